// main of the device tests: GoogleTest, or the other process of some of them.
//
// --import=MODE FD BYTES SUM, for device_process_test.cc: `read` checks the contents and that every
// way to write is refused, `write` writes through the imported address, which must end it. Exit
// code 0: as it should be.
//
// --engine BYTES OFFSET, for device_ipc_test.cc: has memory of an engine, word i of it
// EngineWord(i), says on its standard output "HANDLE ALLOCATION_BYTES OFFSET_BYTES" of what lies at
// OFFSET, and keeps it until its standard input ends.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <iostream>
#include <string>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/strip.h"
#include "tests/storage/device/tested_device.h"

namespace kvmill {
namespace {

int Fail(const std::string& what) {
  std::cerr << "importer: " << what << std::endl;
  return 1;
}

int Import(absl::string_view mode, int fd, std::size_t bytes, std::uint64_t sum) {
  auto device = OpenDevice(TestedDeviceName());
  if (!device.ok()) return Fail(device.status().ToString());
  auto memory = (*device)->Import(fd, bytes);
  if (!memory.ok()) return Fail(memory.status().ToString());
  if (mode == "write") {
    signal(SIGSEGV, SIG_DFL);  // A sanitizer would make it an exit code.
    *reinterpret_cast<volatile std::byte*>((*memory)->address()) = std::byte{1};
    return Fail("the write went through");
  }
  auto stream = (*device)->CreateStream();
  if (!stream.ok()) return Fail(stream.status().ToString());
  std::vector<std::uint32_t> values(bytes / sizeof(std::uint32_t));
  absl::Status status = (*stream)->Copy(values.data(), (*memory)->address(), bytes);
  if (status.ok()) status = (*stream)->Synchronize();
  if (!status.ok()) return Fail(status.ToString());
  for (const std::uint32_t v : values) sum -= v;
  if (sum != 0) return Fail("other contents");
  if ((*stream)->Copy((*memory)->address(), values.data(), 4).ok()) {
    return Fail("a copy to imported memory is not refused");
  }
  if (!(*device)->info().host_accessible) return 0;  // What follows is the host's protection.
  if (mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) != MAP_FAILED) {
    return Fail("it can be mapped to write");
  }
  if (mprotect((*memory)->address(), bytes, PROT_READ | PROT_WRITE) == 0) {
    return Fail("it can be made writable");
  }
  if (pwrite(fd, "x", 1, 0) == 1) return Fail("it can be written as a file");
  if (ftruncate(fd, 4096) == 0) return Fail("it can be shrunk");
  return 0;
}

int BeAnEngine(std::size_t bytes, std::size_t offset) {
  auto device = OpenDevice(TestedDeviceName());
  if (!device.ok()) return Fail(device.status().ToString());
  const EngineAllocation memory = AllocateAsEngine(**device, bytes);
  auto stream = (*device)->CreateStream();
  if (!stream.ok()) return Fail(stream.status().ToString());
  std::vector<std::uint32_t> values(bytes / sizeof(std::uint32_t));
  for (std::uint32_t i = 0; i < values.size(); ++i) values[i] = EngineWord(i);
  absl::Status status = (*stream)->Copy(memory.address, values.data(), bytes);
  if (status.ok()) status = (*stream)->Synchronize();
  if (!status.ok()) return Fail(status.ToString());
  const auto exported = (*device)->ExportIpc(memory.address + offset, bytes - offset);
  if (!exported.ok()) return Fail(exported.status().ToString());
  const std::string handle(reinterpret_cast<const char*>(exported->handle.data()),
                           exported->handle.size());
  std::cout << absl::BytesToHexString(handle) << " " << exported->allocation_bytes << " "
            << exported->offset_bytes << std::endl;
  std::cin.get();
  return 0;
}

int Main(int argc, char** argv) {
  absl::string_view mode = argc > 1 ? argv[1] : "";
  if (mode == "--engine") {
    std::size_t bytes = 0;
    std::size_t offset = 0;
    if (argc != 4 || !absl::SimpleAtoi(argv[2], &bytes) || !absl::SimpleAtoi(argv[3], &offset)) {
      return Fail("--engine BYTES OFFSET");
    }
    return BeAnEngine(bytes, offset);
  }
  if (!absl::ConsumePrefix(&mode, "--import=")) {
    testing::InitGoogleTest(&argc, argv);
    return RUN_ALL_TESTS();
  }
  int fd = -1;
  std::size_t bytes = 0;
  std::uint64_t sum = 0;
  if (argc != 5 || !absl::SimpleAtoi(argv[2], &fd) || !absl::SimpleAtoi(argv[3], &bytes) ||
      !absl::SimpleAtoi(argv[4], &sum)) {
    return Fail("--import=MODE FD BYTES SUM");
  }
  return Import(mode, fd, bytes, sum);
}

}  // namespace
}  // namespace kvmill

int main(int argc, char** argv) { return kvmill::Main(argc, argv); }
