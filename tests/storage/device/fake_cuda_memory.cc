// Memory of fake_cuda.h's runtime: pinned host memory, cudaMalloc, and handles of that for other
// processes, which name a process and the memfd that plays the memory.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/storage/device/fake_cuda.h"

namespace kvmill::fake_cuda {
namespace {

constexpr std::uint64_t kMagic = 0x4C52414E494C4346;

struct Handle {
  std::uint64_t magic;
  std::int64_t pid;
  std::int64_t fd;
  std::int64_t device;
  std::uint64_t bytes;
  std::uint64_t zeros[3];
};
static_assert(sizeof(Handle) == sizeof(cudaIpcMemHandle_t));

std::size_t Mapped(std::size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

// Maps the file, and makes it device memory.
void* AddLinear(int fd, std::size_t bytes, int device, int openings, ino_t inode) {
  void* const at = mmap(nullptr, Mapped(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) std::abort();
  State& state = Global();
  if (!state.known.Add(at, bytes, MemoryUse::kAllocated).ok()) std::abort();
  const std::lock_guard<std::mutex> lock(state.mu);
  state.linear[reinterpret_cast<CUdeviceptr>(at)] = {bytes, fd, device, openings, inode};
  return at;
}

void RemoveLinear(std::map<CUdeviceptr, State::Linear>::iterator linear) {
  State& state = Global();
  void* const at = reinterpret_cast<void*>(linear->first);
  state.known.Remove(at, linear->second.bytes, MemoryUse::kAllocated);
  munmap(at, Mapped(linear->second.bytes));
  close(linear->second.fd);
  state.linear.erase(linear);
}

// Whether this process may write there.
bool IsWritable(const void* address) {
  std::ifstream maps("/proc/self/maps");
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  for (std::string line; std::getline(maps, line);) {
    unsigned long long begin = 0, end = 0;
    char access[5] = {};
    if (std::sscanf(line.c_str(), "%llx-%llx %4s", &begin, &end, access) == 3 && begin <= at &&
        at < end) {
      return access[1] == 'w';
    }
  }
  return false;
}

}  // namespace
}  // namespace kvmill::fake_cuda

using namespace kvmill::fake_cuda;  // NOLINT: the functions below are C's.

extern "C" {

cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  const cudaError_t error = Enter("cudaMalloc", true);
  if (error != cudaSuccess) return Answer(error);
  const int fd = memfd_create("fake-cuda-linear", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(Mapped(bytes))) != 0) std::abort();
  struct stat file {};
  fstat(fd, &file);
  *memory = AddLinear(fd, bytes, CurrentDevice(), 0, file.st_ino);
  return cudaSuccess;
}

cudaError_t cudaFree(void* memory) {
  const cudaError_t error = Enter("cudaFree", false);
  State& state = Global();
  const std::lock_guard<std::mutex> lock(state.mu);
  const auto linear = state.linear.find(reinterpret_cast<CUdeviceptr>(memory));
  if (linear == state.linear.end() || linear->second.openings != 0) {
    state.problems.push_back("cudaFree of what cudaMalloc did not give");
    return cudaErrorInvalidValue;
  }
  RemoveLinear(linear);
  return Answer(error);
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* memory) {
  const cudaError_t error = Enter("cudaIpcGetMemHandle", true);
  if (error != cudaSuccess) return Answer(error);
  State& state = Global();
  const std::lock_guard<std::mutex> lock(state.mu);
  const auto linear = state.linear.find(reinterpret_cast<CUdeviceptr>(memory));
  if (linear == state.linear.end() || linear->second.openings != 0) {
    return Answer(cudaErrorInvalidValue);
  }
  const Handle named{
      kMagic, getpid(), linear->second.fd, linear->second.device, linear->second.bytes, {}};
  std::memcpy(handle, &named, sizeof(named));
  return cudaSuccess;
}

cudaError_t cudaIpcOpenMemHandle(void** memory, cudaIpcMemHandle_t handle, unsigned flags) {
  const cudaError_t error = Enter("cudaIpcOpenMemHandle", true);
  if (error != cudaSuccess) return Answer(error);
  if (flags != cudaIpcMemLazyEnablePeerAccess) Problem("cudaIpcOpenMemHandle without its flag");
  Handle named;
  std::memcpy(&named, &handle, sizeof(named));
  if (named.magic != kMagic) return Answer(cudaErrorInvalidValue);
  State& state = Global();
  if (named.pid == getpid() && !state.machine.opens_own) {
    return Answer(cudaErrorDeviceUninitialized);
  }
  const int fd = open(absl::StrCat("/proc/", named.pid, "/fd/", named.fd).c_str(), O_RDWR);
  struct stat file {};
  if (fd < 0 || fstat(fd, &file) != 0) return Answer(cudaErrorMapBufferObjectFailed);
  {
    const std::lock_guard<std::mutex> lock(state.mu);
    for (auto& [start, linear] : state.linear) {
      if (linear.openings == 0 || linear.inode != file.st_ino) continue;
      ++linear.openings;
      close(fd);
      *memory = reinterpret_cast<void*>(start);
      return cudaSuccess;
    }
  }
  *memory = AddLinear(fd, named.bytes, static_cast<int>(named.device), 1, file.st_ino);
  return cudaSuccess;
}

cudaError_t cudaIpcCloseMemHandle(void* memory) {
  const cudaError_t error = Enter("cudaIpcCloseMemHandle", false);
  State& state = Global();
  const std::lock_guard<std::mutex> lock(state.mu);
  const auto linear = state.linear.find(reinterpret_cast<CUdeviceptr>(memory));
  if (linear == state.linear.end() || linear->second.openings == 0) {
    state.problems.push_back("cudaIpcCloseMemHandle of what was not opened");
    return cudaErrorInvalidValue;
  }
  if (--linear->second.openings == 0) RemoveLinear(linear);
  return Answer(error);
}

cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned) {
  const cudaError_t error = Enter("cudaHostAlloc", true);
  CountWait();
  if (error != cudaSuccess) return Answer(error);
  *memory = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  State& state = Global();
  if (!state.known.Add(*memory, bytes, kvmill::MemoryUse::kPinned).ok()) std::abort();
  const std::lock_guard<std::mutex> lock(state.mu);
  state.host_allocations[*memory] = bytes;
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* memory) {
  const cudaError_t error = Enter("cudaFreeHost", false);
  State& state = Global();
  {
    const std::lock_guard<std::mutex> lock(state.mu);
    const auto found = state.host_allocations.find(memory);
    if (found == state.host_allocations.end()) {
      state.problems.push_back("cudaFreeHost of what was not allocated");
      return cudaErrorInvalidValue;
    }
    state.known.Remove(memory, found->second, kvmill::MemoryUse::kPinned);
    state.host_allocations.erase(found);
  }
  std::free(memory);
  return Answer(error);
}

cudaError_t cudaHostRegister(void* memory, std::size_t bytes, unsigned flags) {
  const cudaError_t error = Enter("cudaHostRegister", true);
  if (error != cudaSuccess) return Answer(error);
  State& state = Global();
  const bool to_read = (flags & cudaHostRegisterReadOnly) != 0;
  if (to_read && !state.machine.pins_to_read) return Answer(cudaErrorNotSupported);
  if (!to_read && !IsWritable(memory)) return Answer(cudaErrorInvalidValue);
  std::size_t locked = bytes;
  {
    const std::lock_guard<std::mutex> lock(state.mu);
    for (const auto& [start, registered] : state.registrations) locked += registered;
    if (locked > state.machine.locked_bytes_max) return Answer(cudaErrorMemoryAllocation);
  }
  const auto use = to_read ? kvmill::MemoryUse::kPinnedToRead : kvmill::MemoryUse::kPinned;
  if (!state.known.Add(memory, bytes, use).ok()) {
    Problem("cudaHostRegister of what is registered or the device's");
    return Answer(cudaErrorHostMemoryAlreadyRegistered);
  }
  const std::lock_guard<std::mutex> lock(state.mu);
  state.registrations[memory] = bytes;
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* memory) {
  const cudaError_t error = Enter("cudaHostUnregister", false);
  State& state = Global();
  const std::lock_guard<std::mutex> lock(state.mu);
  const auto found = state.registrations.find(memory);
  if (found == state.registrations.end()) {
    state.problems.push_back("cudaHostUnregister of what is not registered");
    return cudaErrorInvalidValue;
  }
  state.known.RemovePinned(memory, found->second);
  state.registrations.erase(found);
  return Answer(error);
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  const cudaError_t error = Enter("cudaPointerGetAttributes", true);
  if (error != cudaSuccess) return Answer(error);
  *attributes = {};
  State& state = Global();
  const kvmill::KnownMemory::View known = state.known.Look();
  const auto* range = known.FindAnyOf(pointer, 1);
  attributes->type = range == nullptr               ? cudaMemoryTypeUnregistered
                     : kvmill::IsPinned(range->use) ? cudaMemoryTypeHost
                                                    : cudaMemoryTypeDevice;
  const std::lock_guard<std::mutex> lock(state.mu);
  const auto linear = state.linear.find(reinterpret_cast<CUdeviceptr>(pointer));
  if (linear != state.linear.end()) attributes->device = linear->second.device;
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(std::size_t* free_bytes, std::size_t* total_bytes) {
  const cudaError_t error = Enter("cudaMemGetInfo", false);
  State& state = Global();
  const std::lock_guard<std::mutex> lock(state.mu);
  *total_bytes = state.machine.memory_bytes;
  *free_bytes = state.machine.memory_bytes - state.physical_bytes;
  return Answer(error);
}

}  // extern "C"
