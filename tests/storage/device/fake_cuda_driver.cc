// The driver's half of fake_cuda.h: contexts and virtual memory.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <climits>
#include <cstdlib>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "tests/storage/device/fake_cuda.h"

struct CUctx_st {
  int device;
};

namespace kvmill::fake_cuda {
namespace {

constexpr const char* kFileName = "fake-cuda-";  // And the device's number.

CUresult DriverError(cudaError_t error) {
  return error == cudaSuccess                 ? CUDA_SUCCESS
         : error == cudaErrorMemoryAllocation ? CUDA_ERROR_OUT_OF_MEMORY
                                              : CUDA_ERROR_ILLEGAL_ADDRESS;
}

// Calls of the driver need no current context but where they say so.
CUresult EnterDriver(const char* call, bool can_fail) {
  return DriverError(Enter(call, can_fail, false));
}

CUresult CUDAAPI Init(unsigned) { return EnterDriver("cuInit", true); }

CUresult CUDAAPI ErrorName(CUresult error, const char** name) {
  *name = error == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_OF_THE_FAKE";
  return CUDA_SUCCESS;
}

CUresult CUDAAPI ErrorString(CUresult error, const char** text) {
  *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "an error of the fake";
  return CUDA_SUCCESS;
}

CUresult CUDAAPI DeviceGet(CUdevice* device, int index) {
  *device = index;
  return EnterDriver("cuDeviceGet", true);
}

CUresult CUDAAPI DeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  const Machine& machine = Global().machine;
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      *value = machine.capability_major;
      break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      *value = 0;
      break;
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
      *value = machine.shares_memory ? 1 : 0;
      break;
    case CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED:
      *value = machine.pins_to_read ? 1 : 0;
      break;
    default:
      *value = 1;
  }
  return CUDA_SUCCESS;
}

CUresult CUDAAPI PrimaryContextRetain(CUcontext* context, CUdevice device) {
  const CUresult error = EnterDriver("cuDevicePrimaryCtxRetain", true);
  if (error != CUDA_SUCCESS) return error;
  *context = ContextOf(device);
  State& state = Global();
  const std::lock_guard<std::mutex> lock(state.mu);
  ++state.retained[device];
  return CUDA_SUCCESS;
}

CUresult CUDAAPI PrimaryContextRelease(CUdevice device) {
  State& state = Global();
  const std::lock_guard<std::mutex> lock(state.mu);
  if (--state.retained[device] < 0) state.problems.push_back("a context is released too often");
  return CUDA_SUCCESS;
}

CUresult CUDAAPI PushContext(CUcontext context) {
  {
    State& state = Global();
    const std::lock_guard<std::mutex> lock(state.mu);
    if (state.retained[context->device] == 0) {
      state.problems.push_back("a context is used that is not retained");
    }
  }
  ContextStack().push_back(context);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI PopContext(CUcontext* context) {
  if (ContextStack().empty()) {
    Problem("cuCtxPopCurrent without a context");
    return CUDA_ERROR_INVALID_CONTEXT;
  }
  *context = ContextStack().back();
  ContextStack().pop_back();
  return CUDA_SUCCESS;
}

CUresult CUDAAPI Granularity(std::size_t* bytes, const CUmemAllocationProp*,
                             CUmemAllocationGranularity_flags) {
  *bytes = Global().machine.granularity;
  return EnterDriver("cuMemGetAllocationGranularity", true);
}

CUmemGenericAllocationHandle AddPhysical(const State::Physical& physical) {
  State& state = Global();
  const std::lock_guard<std::mutex> lock(state.mu);
  state.physical[state.next_handle] = physical;
  return state.next_handle++;
}

CUresult CUDAAPI Create(CUmemGenericAllocationHandle* handle, std::size_t bytes,
                        const CUmemAllocationProp* properties, unsigned long long) {
  const CUresult error = EnterDriver("cuMemCreate", true);
  if (error != CUDA_SUCCESS) return error;
  if (properties->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
      properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
    Problem("memory of a kind that cuMemCreate does not make");
  }
  State& state = Global();
  {
    const std::lock_guard<std::mutex> lock(state.mu);
    if (bytes == 0 || bytes % state.machine.granularity != 0) {
      state.problems.push_back("cuMemCreate of a size that is no multiple of the granularity");
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (bytes > state.machine.memory_bytes - state.physical_bytes) return CUDA_ERROR_OUT_OF_MEMORY;
    state.physical_bytes += bytes;
  }
  const int device = properties->location.id;
  const int fd = memfd_create(absl::StrCat(kFileName, device).c_str(), MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) std::abort();
  // Not zero: CUDA does not promise it either.
  const char junk[64] = {'j', 'u', 'n', 'k'};
  if (pwrite(fd, junk, sizeof(junk), 0) != sizeof(junk)) std::abort();
  const bool shareable =
      properties->requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  *handle = AddPhysical({fd, bytes, device, shareable});
  return CUDA_SUCCESS;
}

CUresult CUDAAPI Release(CUmemGenericAllocationHandle handle) {
  State& state = Global();
  const std::lock_guard<std::mutex> lock(state.mu);
  const auto found = state.physical.find(handle);
  if (found == state.physical.end()) {
    state.problems.push_back("cuMemRelease of no memory");
    return CUDA_ERROR_INVALID_VALUE;
  }
  close(found->second.fd);
  state.physical_bytes -= std::min(state.physical_bytes, found->second.bytes);
  state.physical.erase(found);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI PropertiesOf(CUmemAllocationProp* properties,
                              CUmemGenericAllocationHandle handle) {
  const CUresult error = EnterDriver("cuMemGetAllocationPropertiesFromHandle", true);
  if (error != CUDA_SUCCESS) return error;
  State& state = Global();
  const std::lock_guard<std::mutex> lock(state.mu);
  *properties = {};
  properties->location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties->location.id = state.physical.at(handle).device;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI Export(void* fd, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType,
                        unsigned long long) {
  const CUresult error = EnterDriver("cuMemExportToShareableHandle", true);
  if (error != CUDA_SUCCESS) return error;
  State& state = Global();
  const std::lock_guard<std::mutex> lock(state.mu);
  const State::Physical& physical = state.physical.at(handle);
  if (!physical.exported_kind) return CUDA_ERROR_INVALID_VALUE;
  *static_cast<int*>(fd) = dup(physical.fd);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI Import(CUmemGenericAllocationHandle* handle, void* os_handle,
                        CUmemAllocationHandleType) {
  const CUresult error = EnterDriver("cuMemImportFromShareableHandle", true);
  if (error != CUDA_SUCCESS) return error;
  const int fd = static_cast<int>(reinterpret_cast<std::intptr_t>(os_handle));
  char path[PATH_MAX];
  const ssize_t length =
      readlink(absl::StrCat("/proc/self/fd/", fd).c_str(), path, sizeof(path) - 1);
  absl::string_view name(path, length < 0 ? 0 : static_cast<std::size_t>(length));
  int device = 0;
  struct stat file {};
  if (!absl::ConsumePrefix(&name, absl::StrCat("/memfd:", kFileName)) ||
      !absl::ConsumeSuffix(&name, " (deleted)") || !absl::SimpleAtoi(name, &device) ||
      fstat(fd, &file) != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *handle = AddPhysical({dup(fd), static_cast<std::size_t>(file.st_size), device, false});
  return CUDA_SUCCESS;
}

CUresult CUDAAPI AddressReserve(CUdeviceptr* address, std::size_t bytes, std::size_t alignment,
                                CUdeviceptr, unsigned long long) {
  const CUresult error = EnterDriver("cuMemAddressReserve", true);
  if (error != CUDA_SUCCESS) return error;
  // The fake never gives addresses back: what is used after its end then faults.
  void* const start = mmap(nullptr, bytes + alignment, PROT_NONE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *address = (reinterpret_cast<CUdeviceptr>(start) + alignment - 1) / alignment * alignment;
  State& state = Global();
  const std::lock_guard<std::mutex> lock(state.mu);
  state.reserved[*address] = bytes;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI AddressFree(CUdeviceptr address, std::size_t bytes) {
  State& state = Global();
  const std::lock_guard<std::mutex> lock(state.mu);
  const auto found = state.reserved.find(address);
  if (found == state.reserved.end() || found->second != bytes) {
    state.problems.push_back("cuMemAddressFree of no range");
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (state.mapped.count(address) != 0) state.problems.push_back("a range is freed while mapped");
  state.reserved.erase(found);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI Map(CUdeviceptr address, std::size_t bytes, std::size_t offset,
                     CUmemGenericAllocationHandle handle, unsigned long long) {
  const CUresult error = EnterDriver("cuMemMap", true);
  if (error != CUDA_SUCCESS) return error;
  State& state = Global();
  const std::lock_guard<std::mutex> lock(state.mu);
  const auto range = state.reserved.find(address);
  const auto physical = state.physical.find(handle);
  if (range == state.reserved.end() || range->second != bytes || offset != 0 ||
      physical == state.physical.end()) {
    state.problems.push_back("cuMemMap of no range or memory");
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (bytes > physical->second.bytes) return CUDA_ERROR_INVALID_VALUE;
  if (mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED,
           physical->second.fd, 0) == MAP_FAILED) {
    std::abort();
  }
  state.mapped[address] = bytes;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI Unmap(CUdeviceptr address, std::size_t bytes) {
  State& state = Global();
  const std::lock_guard<std::mutex> lock(state.mu);
  const auto found = state.mapped.find(address);
  if (found == state.mapped.end() || found->second != bytes) {
    state.problems.push_back("cuMemUnmap of no mapping");
    return CUDA_ERROR_INVALID_VALUE;
  }
  const auto* start = reinterpret_cast<const void*>(address);
  if (!state.known.Remove(start, bytes, MemoryUse::kAllocated)) {
    state.known.Remove(start, bytes, MemoryUse::kImported);
  }
  mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE,
       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  state.mapped.erase(found);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI SetAccess(CUdeviceptr address, std::size_t bytes, const CUmemAccessDesc* access,
                           std::size_t count) {
  const CUresult error = EnterDriver("cuMemSetAccess", true);
  if (error != CUDA_SUCCESS) return error;
  State& state = Global();
  const std::lock_guard<std::mutex> lock(state.mu);
  const auto found = state.mapped.find(address);
  if (found == state.mapped.end() || found->second != bytes || count != 1) {
    state.problems.push_back("cuMemSetAccess of no mapping");
    return CUDA_ERROR_INVALID_VALUE;
  }
  const bool writable = access->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  if (!writable && !state.machine.protects_memory) return CUDA_ERROR_NOT_SUPPORTED;
  mprotect(reinterpret_cast<void*>(address), bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ);
  if (!state.known
           .Add(reinterpret_cast<const void*>(address), bytes,
                writable ? MemoryUse::kAllocated : MemoryUse::kImported)
           .ok()) {
    state.problems.push_back("cuMemSetAccess once more");
  }
  return CUDA_SUCCESS;
}

CUresult CUDAAPI AddressRange(CUdeviceptr* base, std::size_t* bytes, CUdeviceptr address) {
  const CUresult error = EnterDriver("cuMemGetAddressRange", true);
  if (error != CUDA_SUCCESS) return error;
  State& state = Global();
  const std::lock_guard<std::mutex> lock(state.mu);
  for (const auto& [start, linear] : state.linear) {
    if (address < start || address >= start + linear.bytes) continue;
    *base = start;
    *bytes = linear.bytes;
    return CUDA_SUCCESS;
  }
  for (const auto& [start, mapped_bytes] : state.mapped) {
    if (address < start || address >= start + mapped_bytes) continue;
    *base = start;
    *bytes = mapped_bytes;
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_NOT_FOUND;
}

template <typename Function>
void* Erase(Function* function) {
  return reinterpret_cast<void*>(function);
}

}  // namespace

CUcontext ContextOf(int device) {
  static CUctx_st contexts[8] = {{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}};
  return &contexts[device];
}

std::vector<CUcontext>& ContextStack() {
  thread_local std::vector<CUcontext> stack;
  return stack;
}

int CurrentDevice() { return ContextStack().empty() ? -1 : ContextStack().back()->device; }

void* DriverEntryPoint(const std::string& symbol, unsigned version) {
  struct Entry {
    unsigned since;  // The version of the form that is here.
    void* function;
  };
  static const std::map<std::string, Entry> entries{
      {"cuInit", {2000, Erase(Init)}},
      {"cuGetErrorName", {6000, Erase(ErrorName)}},
      {"cuGetErrorString", {6000, Erase(ErrorString)}},
      {"cuDeviceGet", {2000, Erase(DeviceGet)}},
      {"cuDeviceGetAttribute", {2000, Erase(DeviceGetAttribute)}},
      {"cuDevicePrimaryCtxRetain", {7000, Erase(PrimaryContextRetain)}},
      {"cuDevicePrimaryCtxRelease", {11000, Erase(PrimaryContextRelease)}},
      {"cuCtxPushCurrent", {4000, Erase(PushContext)}},
      {"cuCtxPopCurrent", {4000, Erase(PopContext)}},
      {"cuMemGetAllocationGranularity", {10020, Erase(Granularity)}},
      {"cuMemGetAllocationPropertiesFromHandle", {10020, Erase(PropertiesOf)}},
      {"cuMemCreate", {10020, Erase(Create)}},
      {"cuMemRelease", {10020, Erase(Release)}},
      {"cuMemAddressReserve", {10020, Erase(AddressReserve)}},
      {"cuMemAddressFree", {10020, Erase(AddressFree)}},
      {"cuMemMap", {10020, Erase(Map)}},
      {"cuMemUnmap", {10020, Erase(Unmap)}},
      {"cuMemSetAccess", {10020, Erase(SetAccess)}},
      {"cuMemExportToShareableHandle", {10020, Erase(Export)}},
      {"cuMemImportFromShareableHandle", {10020, Erase(Import)}},
      {"cuMemGetAddressRange", {3020, Erase(AddressRange)}}};
  const auto found = entries.find(symbol);
  return found == entries.end() || version != found->second.since ? nullptr
                                                                  : found->second.function;
}

}  // namespace kvmill::fake_cuda
