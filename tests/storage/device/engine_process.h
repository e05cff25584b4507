// An engine in a process of its own, whose memory a test opens by handle.
#ifndef KVMILL_TESTS_STORAGE_DEVICE_ENGINE_PROCESS_H_
#define KVMILL_TESTS_STORAGE_DEVICE_ENGINE_PROCESS_H_

#include <fcntl.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "storage/device/device.h"

namespace kvmill {

// This program once more, as the engine of importer_main.cc, with kBytes of its own memory.
class EngineProcess {
 public:
  static constexpr std::size_t kBytes = std::size_t{2} << 20;
  static constexpr std::size_t kOffset = 4096;
  EngineProcess() {
    int to_child[2], from_child[2];
    EXPECT_EQ(pipe2(to_child, O_CLOEXEC), 0);
    EXPECT_EQ(pipe2(from_child, O_CLOEXEC), 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, to_child[0], 0);
    posix_spawn_file_actions_adddup2(&actions, from_child[1], 1);
    const std::string program = "/proc/self/exe";
    std::vector<std::string> arguments{program, "--engine", absl::StrCat(kBytes),
                                       absl::StrCat(kOffset)};
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    EXPECT_EQ(posix_spawn(&child_, program.c_str(), &actions, nullptr, argv.data(), environ), 0);
    posix_spawn_file_actions_destroy(&actions);
    close(to_child[0]);
    close(from_child[1]);
    input_ = to_child[1];
    std::string line;
    char c = 0;
    while (read(from_child[0], &c, 1) == 1 && c != '\n') line.push_back(c);
    close(from_child[0]);
    std::istringstream words(line);
    std::string hex;
    words >> hex >> memory.allocation_bytes >> memory.offset_bytes;
    const std::string handle = absl::HexStringToBytes(hex);
    EXPECT_EQ(handle.size(), memory.handle.size());
    std::memcpy(memory.handle.data(), handle.data(), std::min(handle.size(), sizeof(IpcHandle)));
  }
  ~EngineProcess() { End(); }
  void End() {
    if (child_ == 0) return;
    close(input_);
    int status = -1;
    EXPECT_EQ(waitpid(child_, &status, 0), child_);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
    child_ = 0;
  }
  pid_t pid() const { return child_; }
  IpcMemory memory;  // From kOffset to the end; word i of all of it is EngineWord(i).

 private:
  pid_t child_ = 0;
  int input_ = -1;
};

}  // namespace kvmill

#endif  // KVMILL_TESTS_STORAGE_DEVICE_ENGINE_PROCESS_H_
