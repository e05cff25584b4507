// The runtime's half of fake_cuda.h.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "tests/storage/device/fake_cuda.h"

namespace kvmill::fake_cuda {
namespace {

thread_local cudaError_t last_error = cudaSuccess;
thread_local bool in_host_function = false;

void StreamMain(CUstream_st* stream) {
  std::unique_lock<std::mutex> lock(stream->mu);
  for (;;) {
    stream->work_there.wait(lock, [&] { return stream->stop || !stream->queue.empty(); });
    if (stream->queue.empty()) return;
    const std::function<cudaError_t()> work = std::move(stream->queue.front());
    stream->queue.pop_front();
    stream->busy = true;
    lock.unlock();
    const cudaError_t error = work();
    if (error != cudaSuccess) {
      State& state = Global();
      const std::lock_guard<std::mutex> state_lock(state.mu);
      if (state.broken == cudaSuccess) state.broken = error;
    }
    lock.lock();
    stream->busy = false;
    if (stream->queue.empty()) stream->idle.notify_all();
  }
}

cudaError_t Broken() {
  State& state = Global();
  const std::lock_guard<std::mutex> lock(state.mu);
  return state.broken;
}

// What a broken device no longer does; markers are passed all the same.
std::function<cudaError_t()> UnlessBroken(std::function<cudaError_t()> work) {
  return [work = std::move(work)] { return Broken() == cudaSuccess ? work() : cudaSuccess; };
}

void Push(CUstream_st* stream, std::function<cudaError_t()> work) {
  const std::lock_guard<std::mutex> lock(stream->mu);
  stream->queue.push_back(std::move(work));
  stream->work_there.notify_one();
}

bool CheckStream(const char* call, cudaStream_t stream) {
  State& state = Global();
  {
    const std::lock_guard<std::mutex> lock(state.mu);
    if (state.streams.count(stream) == 0) {
      state.problems.push_back(absl::StrCat(call, ": no such stream"));
      return false;
    }
  }
  if (stream->device != CurrentDevice()) {
    Problem(absl::StrCat(call, ": the stream is not of the current device"));
  }
  return true;
}

bool CheckEvent(const char* call, cudaEvent_t event) {
  State& state = Global();
  const std::lock_guard<std::mutex> lock(state.mu);
  if (state.events.count(event) != 0) return true;
  state.problems.push_back(absl::StrCat(call, ": no such event"));
  return false;
}

std::shared_ptr<Point> PointOf(cudaEvent_t event) {
  const std::lock_guard<std::mutex> lock(event->mu);
  return event->point;
}

const KnownMemory::Range* RangeOf(const KnownMemory::View& view, const void* start,
                                  std::size_t bytes) {
  return view.FindAnyOf(start, bytes);
}

}  // namespace

State& Global() {
  static State* const state = new State;  // Outlives the threads that may still look.
  return *state;
}

void Problem(const std::string& what) {
  State& state = Global();
  const std::lock_guard<std::mutex> lock(state.mu);
  state.problems.push_back(what);
}

void Boot(const Machine& machine) {
  const std::vector<std::string> leaks = Leaks();
  State& state = Global();
  const std::lock_guard<std::mutex> lock(state.mu);
  for (const std::string& leak : leaks) state.problems.push_back(leak);
  state.machine = machine;
  state.fail_in = 0;
  state.has_failed = false;
  state.waits = 0;
  state.broken = cudaSuccess;
}

std::vector<std::string> Problems() {
  State& state = Global();
  const std::lock_guard<std::mutex> lock(state.mu);
  return std::exchange(state.problems, {});
}

std::vector<std::string> Leaks() {
  State& state = Global();
  const std::lock_guard<std::mutex> lock(state.mu);
  std::vector<std::string> leaks;
  const auto add = [&](const char* what, std::size_t count) {
    if (count != 0) leaks.push_back(absl::StrCat(count, " ", what));
  };
  add("streams", state.streams.size());
  add("events", state.events.size());
  add("host allocations", state.host_allocations.size());
  add("host registrations", state.registrations.size());
  add("physical memories", state.physical.size());
  add("address ranges", state.reserved.size());
  add("mappings", state.mapped.size());
  add("linear memories", state.linear.size());
  for (const auto& [device, count] : state.retained) {
    if (count != 0) leaks.push_back(absl::StrCat("context of device ", device));
  }
  return leaks;
}

void FailCall(int n) {
  State& state = Global();
  const std::lock_guard<std::mutex> lock(state.mu);
  state.fail_in = n;
  state.has_failed = false;
}

bool HasFailed() {
  State& state = Global();
  const std::lock_guard<std::mutex> lock(state.mu);
  return state.has_failed;
}

int WaitCount() {
  State& state = Global();
  const std::lock_guard<std::mutex> lock(state.mu);
  return state.waits;
}

void CountWait() {
  State& state = Global();
  const std::lock_guard<std::mutex> lock(state.mu);
  ++state.waits;
}

void Point::Pass() {
  const std::lock_guard<std::mutex> lock(mu_);
  passed_ = true;
  passes_.notify_all();
}

bool Point::passed() {
  const std::lock_guard<std::mutex> lock(mu_);
  return passed_;
}

void Point::Wait() {
  std::unique_lock<std::mutex> lock(mu_);
  passes_.wait(lock, [&] { return passed_; });
}

cudaError_t Enter(const char* call, bool can_fail, bool needs_context) {
  if (in_host_function) Problem(absl::StrCat(call, " from a callback"));
  if (needs_context && CurrentDevice() < 0) Problem(absl::StrCat(call, " without a context"));
  State& state = Global();
  const std::lock_guard<std::mutex> lock(state.mu);
  if (state.broken != cudaSuccess) return state.broken;
  if (can_fail && state.fail_in > 0 && --state.fail_in == 0) {
    state.has_failed = true;
    return cudaErrorMemoryAllocation;
  }
  return cudaSuccess;
}

cudaError_t Answer(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

cudaError_t Enqueue(CUstream_st* stream, std::function<cudaError_t()> work) {
  const cudaError_t error = Enter("kernel", true);
  if (error != cudaSuccess || !CheckStream("kernel", stream)) return Answer(error);
  Push(stream, UnlessBroken(std::move(work)));
  return cudaSuccess;
}

}  // namespace kvmill::fake_cuda

using namespace kvmill::fake_cuda;  // NOLINT: the functions below are C's.

extern "C" {

cudaError_t cudaDriverGetVersion(int* version) {
  *version = Global().machine.driver_version;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  const Machine& machine = Global().machine;
  *count = 0;
  if (machine.driver_version == 0) return Answer(cudaErrorInsufficientDriver);
  if (machine.count_error != cudaSuccess) return Answer(machine.count_error);
  if (machine.device_count == 0) return Answer(cudaErrorNoDevice);
  *count = machine.device_count;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  const cudaError_t error = Enter("cudaSetDevice", false, false);
  ContextStack().assign(1, ContextOf(device));
  return Answer(error);
}

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }

const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation"
         : error == cudaErrorIllegalAddress ? "cudaErrorIllegalAddress"
                                            : "cudaErrorOfTheFake";
}

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "out of memory"
         : error == cudaErrorIllegalAddress ? "an illegal memory access was encountered"
                                            : "an error of the fake";
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned version,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  const cudaError_t error = Enter("cudaGetDriverEntryPointByVersion", true, false);
  *function =
      symbol == Global().machine.missing_symbol ? nullptr : DriverEntryPoint(symbol, version);
  *result = *function == nullptr ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
  return Answer(error);
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  const cudaError_t error = Enter("cudaGetDeviceProperties", true, false);
  if (error != cudaSuccess) return Answer(error);
  *properties = {};
  std::strcpy(properties->name, "Fake");  // NOLINT: it fits.
  properties->totalGlobalMem = Global().machine.memory_bytes;
  properties->major = Global().machine.capability_major;
  properties->multiProcessorCount = 3 + device;
  std::memcpy(properties->uuid.bytes, "fake GPU", 8);
  properties->uuid.bytes[15] = static_cast<char>(device);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  const cudaError_t error = Enter("cudaStreamCreateWithFlags", true);
  if (error != cudaSuccess) return Answer(error);
  if (flags != cudaStreamNonBlocking) Problem("a stream that orders with the default stream");
  auto* made = new CUstream_st;
  made->device = CurrentDevice();
  made->thread = std::thread(StreamMain, made);
  State& state = Global();
  const std::lock_guard<std::mutex> lock(state.mu);
  state.streams.insert(made);
  *stream = made;
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const cudaError_t error = Enter("cudaStreamDestroy", false);
  if (!CheckStream("cudaStreamDestroy", stream)) return cudaErrorInvalidResourceHandle;
  {
    State& state = Global();
    const std::lock_guard<std::mutex> lock(state.mu);
    state.streams.erase(stream);
  }
  {
    const std::lock_guard<std::mutex> lock(stream->mu);
    stream->stop = true;
    stream->work_there.notify_one();
  }
  stream->thread.join();
  delete stream;
  return Answer(error);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  const cudaError_t error = Enter("cudaStreamSynchronize", true);
  CountWait();
  if (!CheckStream("cudaStreamSynchronize", stream)) return cudaErrorInvalidResourceHandle;
  if (error != cudaSuccess) return Answer(error);
  std::unique_lock<std::mutex> lock(stream->mu);
  stream->idle.wait(lock, [&] { return stream->queue.empty() && !stream->busy; });
  return Answer(Broken());
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  const cudaError_t error = Enter("cudaEventCreateWithFlags", true);
  if (error != cudaSuccess) return Answer(error);
  if (flags != (cudaEventDisableTiming | cudaEventBlockingSync)) {
    Problem("an event that measures time, or spins");
  }
  auto* made = new CUevent_st;
  made->device = CurrentDevice();
  State& state = Global();
  const std::lock_guard<std::mutex> lock(state.mu);
  state.events.insert(made);
  *event = made;
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const cudaError_t error = Enter("cudaEventDestroy", false);
  if (!CheckEvent("cudaEventDestroy", event)) return cudaErrorInvalidResourceHandle;
  {
    State& state = Global();
    const std::lock_guard<std::mutex> lock(state.mu);
    state.events.erase(event);
  }
  delete event;
  return Answer(error);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const cudaError_t error = Enter("cudaEventRecord", true);
  if (!CheckEvent("cudaEventRecord", event) || !CheckStream("cudaEventRecord", stream)) {
    return cudaErrorInvalidResourceHandle;
  }
  if (error != cudaSuccess) return Answer(error);
  if (event->device != stream->device) Problem("an event of another device than the stream");
  auto point = std::make_shared<Point>();
  {
    const std::lock_guard<std::mutex> lock(event->mu);
    event->point = point;
  }
  Push(stream, [point] {
    point->Pass();
    return cudaSuccess;
  });
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  const cudaError_t error = Enter("cudaEventQuery", false);
  if (!CheckEvent("cudaEventQuery", event)) return cudaErrorInvalidResourceHandle;
  if (error != cudaSuccess) return Answer(error);
  const std::shared_ptr<Point> point = PointOf(event);
  return Answer(point == nullptr || point->passed() ? Broken() : cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  const cudaError_t error = Enter("cudaEventSynchronize", false);
  CountWait();
  if (!CheckEvent("cudaEventSynchronize", event)) return cudaErrorInvalidResourceHandle;
  if (error != cudaSuccess) return Answer(error);
  const std::shared_ptr<Point> point = PointOf(event);
  if (point != nullptr) point->Wait();
  return Answer(Broken());
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const cudaError_t error = Enter("cudaStreamWaitEvent", true);
  if (!CheckEvent("cudaStreamWaitEvent", event) || !CheckStream("cudaStreamWaitEvent", stream)) {
    return cudaErrorInvalidResourceHandle;
  }
  if (error != cudaSuccess) return Answer(error);
  if (const std::shared_ptr<Point> point = PointOf(event)) {
    Push(stream, [point] {
      point->Wait();
      return cudaSuccess;
    });
  }
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  const cudaError_t error = Enter("cudaLaunchHostFunc", true);
  if (!CheckStream("cudaLaunchHostFunc", stream)) return cudaErrorInvalidResourceHandle;
  if (error != cudaSuccess) return Answer(error);
  // As CUDA: not called once the device is broken.
  Push(stream, UnlessBroken([function, data] {
         in_host_function = true;
         function(data);
         in_host_function = false;
         return cudaSuccess;
       }));
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  const cudaError_t error = Enter("cudaMemcpyAsync", true);
  if (!CheckStream("cudaMemcpyAsync", stream)) return cudaErrorInvalidResourceHandle;
  if (error != cudaSuccess) return Answer(error);
  if (kind != cudaMemcpyDefault) Problem("a copy whose direction is guessed");
  kvmill::KnownMemory::View known = Global().known.Look();
  const auto* to_range = RangeOf(known, to, bytes);
  const auto* from_range = RangeOf(known, from, bytes);
  if (to_range == nullptr || from_range == nullptr) {
    Problem("cudaMemcpyAsync of pageable memory, which waits for the device");
  } else if (kvmill::IsPinned(to_range->use) && kvmill::IsPinned(from_range->use)) {
    Problem("cudaMemcpyAsync within host memory, which waits for the device");
  }
  if (!known.Holds(to, bytes, true) || !known.Holds(from, bytes)) {
    return Answer(cudaErrorInvalidValue);
  }
  Push(stream, UnlessBroken([=] {
         std::memcpy(to, from, bytes);
         return cudaSuccess;
       }));
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
  const cudaError_t error = Enter("cudaMemsetAsync", true);
  if (!CheckStream("cudaMemsetAsync", stream)) return cudaErrorInvalidResourceHandle;
  if (error != cudaSuccess) return Answer(error);
  if (!Global().known.Look().Holds(to, bytes, true)) return Answer(cudaErrorInvalidValue);
  Push(stream, UnlessBroken([=] {
         std::memset(to, value, bytes);
         return cudaSuccess;
       }));
  return cudaSuccess;
}

}  // extern "C"
