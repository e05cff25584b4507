// Memory in another process: what one exports another imports, sees, and cannot write to.
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <random>

#include "absl/strings/str_cat.h"
#include "tests/storage/device/tested_device.h"

extern char** environ;

namespace kvmill {
namespace {

class DeviceProcessTest : public DeviceTest {
 protected:
  // This program once more, as the importer of importer_main; its wait status.
  int RunImporter(const char* mode, const DeviceMemory& memory, std::uint64_t sum) {
    constexpr int kFd = 9;
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, memory.fd(), kFd);
    const std::string program = "/proc/self/exe";
    std::vector<std::string> arguments{program, absl::StrCat("--import=", mode), absl::StrCat(kFd),
                                       absl::StrCat(memory.bytes()), absl::StrCat(sum)};
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    pid_t child = 0;
    EXPECT_EQ(posix_spawn(&child, program.c_str(), &actions, nullptr, argv.data(), environ), 0);
    posix_spawn_file_actions_destroy(&actions);
    int status = -1;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    return status;
  }
};

TEST_F(DeviceProcessTest, AnotherProcessReadsAndCannotWrite) {
  const auto stream = Stream();
  const auto memory = Memory(std::size_t{3} << 20);
  std::mt19937 random(3);
  std::vector<std::uint32_t> values(memory->bytes() / sizeof(std::uint32_t));
  std::uint64_t sum = 0;
  for (std::uint32_t& v : values) sum += v = static_cast<std::uint32_t>(random());
  ASSERT_EQ(stream->Copy(memory->address(), values.data(), memory->bytes()), absl::OkStatus());
  ASSERT_EQ(stream->Synchronize(), absl::OkStatus());
  EXPECT_NE(fcntl(memory->fd(), F_GETFD) & FD_CLOEXEC, 0);  // Only what is meant to is inherited.

  const int read = RunImporter("read", *memory, sum);
  EXPECT_TRUE(WIFEXITED(read) && WEXITSTATUS(read) == 0) << read;
  if (device_->info().host_accessible) {
    const int written = RunImporter("write", *memory, sum);
    EXPECT_TRUE(WIFSIGNALED(written) && WTERMSIG(written) == SIGSEGV) << written;
  }
  // And nothing that was tried came through.
  EXPECT_EQ(Download<std::uint32_t>(*stream, memory->address(), values.size()), values);
}

}  // namespace
}  // namespace kvmill
