// What ThreadSanitizer cannot see of gRPC: the order in which it hands our memory from thread to
// thread. Debian's gRPC is not instrumented; its queues and locks are atomics that ThreadSanitizer
// knows nothing of, so every object of ours that goes through one would be reported. This file
// stands between libgrpc++ and libgrpc (symbols of the program come first) and says to
// ThreadSanitizer what gRPC promises, and no more:
//
//   - what was done before an operation was started happens before what is done when it completed:
//     grpc_call_start_batch and the like, to the queue that returns the tag or to its callback;
//   - what was done before a server was started happens before its calls;
//   - what was done before a slice was made, or a later operation started, happens before the slice
//     is given back;
//   - a reactor's OnCancel and OnDone come after what made them due. libgrpc++ lets threads of its
//     own make these two calls; here it is one of ours;
//   - absl's mutexes and the counts of its statuses order what they do.
//
// Linked into programs of the `tsan` preset only. What stays unseen: races
// within gRPC and libraries that are not instrumented, and between one of them and ours in what it
// reads and writes for us (tsan.supp). StressTest.ThreadSanitizerSeesARaceBehindGrpc shows that a
// race of ours is seen where gRPC is in between.
#include <dlfcn.h>
#include <grpc/byte_buffer.h>
#include <grpc/grpc.h>
#include <grpc/slice.h>
#include <grpcpp/support/server_callback.h>
#include <link.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "absl/time/time.h"

extern "C" {
void __tsan_acquire(void* address);
void __tsan_release(void* address);
}

namespace {

char server_start;
char slices;

template <typename Function>
Function* Next(Function* /*declaration*/, const char* name) {
  void* const found = dlsym(RTLD_NEXT, name);
  if (found == nullptr) std::abort();
  return reinterpret_cast<Function*>(found);
}
#define KVMILL_NEXT(function, name) static auto* const next = Next(&function, name)

bool IsCode(const void* address) {
  struct Search {
    std::uintptr_t address;
    bool found;
  } search{reinterpret_cast<std::uintptr_t>(address), false};
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* data) {
        auto* const s = static_cast<Search*>(data);
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const ElfW(Phdr)& segment = info->dlpi_phdr[i];
          if (segment.p_type != PT_LOAD || (segment.p_flags & PF_X) == 0) continue;
          const std::uintptr_t begin = info->dlpi_addr + segment.p_vaddr;
          if (s->address >= begin && s->address < begin + segment.p_memsz) s->found = true;
        }
        return s->found ? 1 : 0;
      },
      &search);
  return search.found;
}

// A callback's tag is a functor: it begins with the function to run, of which gRPC has a handful.
// Each gets a function of ours in front.
using Run = void (*)(grpc_completion_queue_functor*, int);
constexpr std::size_t kRunsMax = 32;
std::array<std::atomic<Run>, kRunsMax> runs;

template <std::size_t i>
void RunInFront(grpc_completion_queue_functor* functor, int ok) {
  __tsan_acquire(functor);
  runs[i].load(std::memory_order_acquire)(functor, ok);
}
template <std::size_t... i>
constexpr std::array<Run, kRunsMax> MakeInFront(std::index_sequence<i...>) {
  return {&RunInFront<i>...};
}
constexpr std::array<Run, kRunsMax> in_front = MakeInFront(std::make_index_sequence<kRunsMax>());

void PutInFront(grpc_completion_queue_functor* functor) {
  const Run run = functor->functor_run;
  for (const Run ours : in_front) {
    if (run == ours) return;
  }
  for (std::size_t i = 0; i < kRunsMax; ++i) {
    Run known = runs[i].load(std::memory_order_acquire);
    if (known == nullptr && runs[i].compare_exchange_strong(known, run)) known = run;
    if (known == run) {
      functor->functor_run = in_front[i];
      return;
    }
  }
  std::abort();
}

// Whatever else gRPC has for tags begins with a vtable.
bool IsFunctor(void* tag) {
  void* const first = *static_cast<void**>(tag);
  thread_local void* code = nullptr;
  thread_local void* data = nullptr;
  if (first == code || first == data) return first == code;
  const bool is_code = IsCode(first);
  (is_code ? code : data) = first;
  return is_code;
}

void Started(void* tag) {
  __tsan_release(&slices);
  if (tag == nullptr) return;
  if (IsFunctor(tag)) PutInFront(static_cast<grpc_completion_queue_functor*>(tag));
  __tsan_release(tag);
}

// Messages that came in one packet share its memory, and who gives the last of them back frees it.
void GivenBack(const grpc_slice& slice) {
  constexpr std::uintptr_t kStaticMax = 4096;  // Not an address: a slice that nobody counts.
  if (reinterpret_cast<std::uintptr_t>(slice.refcount) < kStaticMax) return;
  __tsan_release(slice.refcount);
  __tsan_acquire(slice.refcount);
}

struct OwnedSlice {
  void (*destroy)(void*);
  void* user_data;
};

void DestroySlice(void* data) {
  const OwnedSlice owned = *static_cast<OwnedSlice*>(data);
  __tsan_acquire(data);
  __tsan_acquire(&slices);
  std::free(data);
  owned.destroy(owned.user_data);
}

// The thread for OnCancel and OnDone. Never ends.
class ReactorThread {
 public:
  static ReactorThread& Get() {
    static auto* const thread = new ReactorThread;
    return *thread;
  }
  void Post(std::function<void()> task) {
    const std::lock_guard<std::mutex> lock(mu_);
    tasks_.push_back(std::move(task));
    changed_.notify_one();
  }

 private:
  ReactorThread() {
    std::thread([this] {
      for (;;) {
        std::unique_lock<std::mutex> lock(mu_);
        changed_.wait(lock, [this] { return !tasks_.empty(); });
        const std::function<void()> task = std::move(tasks_.front());
        tasks_.pop_front();
        lock.unlock();
        task();
      }
    }).detach();
  }
  std::mutex mu_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
};

// For what is protected.
class Call : public grpc::internal::ServerCallbackCall {
 public:
  static void Hold(ServerCallbackCall* call) { (call->*&Call::Ref)(); }
};

}  // namespace

void ScheduleOnDone(grpc::internal::ServerCallbackCall* call, bool inline_ondone) __asm__(
    "_ZN4grpc8internal18ServerCallbackCall14ScheduleOnDoneEb");
void ScheduleOnDone(grpc::internal::ServerCallbackCall* call, bool inline_ondone) {
  KVMILL_NEXT(ScheduleOnDone, "_ZN4grpc8internal18ServerCallbackCall14ScheduleOnDoneEb");
  if (inline_ondone) return next(call, true);
  ReactorThread::Get().Post([call] { next(call, true); });
}

void CallOnCancel(grpc::internal::ServerCallbackCall* call, grpc::internal::ServerReactor* reactor) __asm__(
    "_ZN4grpc8internal18ServerCallbackCall12CallOnCancelEPNS0_13ServerReactorE");
void CallOnCancel(grpc::internal::ServerCallbackCall* call,
                  grpc::internal::ServerReactor* reactor) {
  Call::Hold(call);
  ReactorThread::Get().Post([call, reactor] {
    reactor->OnCancel();
    call->MaybeDone();
  });
}

// absl's locks, which are gRPC's: as atomics in a library they order nothing for ThreadSanitizer.
#define KVMILL_ABSL(function) "_ZN4absl7debian3" function
#define KVMILL_LOCK(name, symbol)                      \
  void name(void* mutex) __asm__(KVMILL_ABSL(symbol)); \
  void name(void* mutex) {                             \
    KVMILL_NEXT(name, KVMILL_ABSL(symbol));            \
    next(mutex);                                       \
    __tsan_acquire(mutex);                             \
  }
#define KVMILL_TRY_LOCK(name, symbol)                  \
  bool name(void* mutex) __asm__(KVMILL_ABSL(symbol)); \
  bool name(void* mutex) {                             \
    KVMILL_NEXT(name, KVMILL_ABSL(symbol));            \
    const bool locked = next(mutex);                   \
    if (locked) __tsan_acquire(mutex);                 \
    return locked;                                     \
  }
#define KVMILL_UNLOCK(name, symbol)                    \
  void name(void* mutex) __asm__(KVMILL_ABSL(symbol)); \
  void name(void* mutex) {                             \
    KVMILL_NEXT(name, KVMILL_ABSL(symbol));            \
    __tsan_release(mutex);                             \
    next(mutex);                                       \
  }
KVMILL_LOCK(MutexLock, "5Mutex4LockEv")
KVMILL_LOCK(MutexReaderLock, "5Mutex10ReaderLockEv")
KVMILL_TRY_LOCK(MutexTryLock, "5Mutex7TryLockEv")
KVMILL_TRY_LOCK(MutexReaderTryLock, "5Mutex13ReaderTryLockEv")
KVMILL_UNLOCK(MutexUnlock, "5Mutex6UnlockEv")
KVMILL_UNLOCK(MutexReaderUnlock, "5Mutex12ReaderUnlockEv")

void CondVarWait(void* changed, void* mutex) __asm__(KVMILL_ABSL("7CondVar4WaitEPNS0_5MutexE"));
void CondVarWait(void* changed, void* mutex) {
  KVMILL_NEXT(CondVarWait, KVMILL_ABSL("7CondVar4WaitEPNS0_5MutexE"));
  __tsan_release(mutex);
  next(changed, mutex);
  __tsan_acquire(mutex);
}
bool CondVarWaitWithDeadline(void* changed, void* mutex, absl::Time deadline) __asm__(
    KVMILL_ABSL("7CondVar16WaitWithDeadlineEPNS0_5MutexENS0_4TimeE"));
bool CondVarWaitWithDeadline(void* changed, void* mutex, absl::Time deadline) {
  KVMILL_NEXT(CondVarWaitWithDeadline,
              KVMILL_ABSL("7CondVar16WaitWithDeadlineEPNS0_5MutexENS0_4TimeE"));
  __tsan_release(mutex);
  const bool late = next(changed, mutex, deadline);
  __tsan_acquire(mutex);
  return late;
}

// The last reference to a shared absl::Status is given back in absl's library, others inline.
void UnrefStatus(std::uintptr_t rep) __asm__(KVMILL_ABSL("6Status15UnrefNonInlinedEm"));
void UnrefStatus(std::uintptr_t rep) {
  KVMILL_NEXT(UnrefStatus, KVMILL_ABSL("6Status15UnrefNonInlinedEm"));
  __tsan_release(reinterpret_cast<void*>(rep));
  __tsan_acquire(reinterpret_cast<void*>(rep));
  next(rep);
}

// The tag that the queue returns is a member of the alarm, after its base.
void SetAlarm(void** alarm, grpc::CompletionQueue* queue, gpr_timespec deadline, void* tag) __asm__(
    "_ZN4grpc5Alarm11SetInternalEPNS_15CompletionQueueE12gpr_timespecPv");
void SetAlarm(void** alarm, grpc::CompletionQueue* queue, gpr_timespec deadline, void* tag) {
  KVMILL_NEXT(SetAlarm, "_ZN4grpc5Alarm11SetInternalEPNS_15CompletionQueueE12gpr_timespecPv");
  __tsan_release(alarm[2]);
  next(alarm, queue, deadline, tag);
}

extern "C" {

grpc_call_error grpc_call_start_batch(grpc_call* call, const grpc_op* ops, std::size_t nops,
                                      void* tag, void* reserved) {
  KVMILL_NEXT(grpc_call_start_batch, "grpc_call_start_batch");
  Started(tag);
  return next(call, ops, nops, tag, reserved);
}

grpc_call_error grpc_server_request_registered_call(
    grpc_server* server, void* registered_method, grpc_call** call, gpr_timespec* deadline,
    grpc_metadata_array* metadata, grpc_byte_buffer** payload, grpc_completion_queue* bound_to,
    grpc_completion_queue* notification, void* tag) {
  KVMILL_NEXT(grpc_server_request_registered_call, "grpc_server_request_registered_call");
  __tsan_release(tag);
  return next(server, registered_method, call, deadline, metadata, payload, bound_to, notification,
              tag);
}

grpc_call_error grpc_server_request_call(grpc_server* server, grpc_call** call,
                                         grpc_call_details* details, grpc_metadata_array* metadata,
                                         grpc_completion_queue* bound_to,
                                         grpc_completion_queue* notification, void* tag) {
  KVMILL_NEXT(grpc_server_request_call, "grpc_server_request_call");
  __tsan_release(tag);
  return next(server, call, details, metadata, bound_to, notification, tag);
}

grpc_event grpc_completion_queue_next(grpc_completion_queue* queue, gpr_timespec deadline,
                                      void* reserved) {
  KVMILL_NEXT(grpc_completion_queue_next, "grpc_completion_queue_next");
  const grpc_event event = next(queue, deadline, reserved);
  __tsan_acquire(&server_start);
  if (event.type == GRPC_OP_COMPLETE && event.tag != nullptr) __tsan_acquire(event.tag);
  return event;
}

grpc_event grpc_completion_queue_pluck(grpc_completion_queue* queue, void* tag,
                                       gpr_timespec deadline, void* reserved) {
  KVMILL_NEXT(grpc_completion_queue_pluck, "grpc_completion_queue_pluck");
  const grpc_event event = next(queue, tag, deadline, reserved);
  if (event.type == GRPC_OP_COMPLETE) __tsan_acquire(tag);
  return event;
}

void grpc_channel_watch_connectivity_state(grpc_channel* channel, grpc_connectivity_state last,
                                           gpr_timespec deadline, grpc_completion_queue* queue,
                                           void* tag) {
  KVMILL_NEXT(grpc_channel_watch_connectivity_state, "grpc_channel_watch_connectivity_state");
  __tsan_release(tag);
  next(channel, last, deadline, queue, tag);
}

void grpc_server_start(grpc_server* server) {
  KVMILL_NEXT(grpc_server_start, "grpc_server_start");
  __tsan_release(&server_start);
  next(server);
}

// The first that a handler of a callback method does.
void* grpc_call_arena_alloc(grpc_call* call, std::size_t bytes) {
  KVMILL_NEXT(grpc_call_arena_alloc, "grpc_call_arena_alloc");
  __tsan_acquire(&server_start);
  return next(call, bytes);
}

void grpc_slice_unref(grpc_slice slice) {
  KVMILL_NEXT(grpc_slice_unref, "grpc_slice_unref");
  GivenBack(slice);
  next(slice);
}

void grpc_byte_buffer_destroy(grpc_byte_buffer* buffer) {
  KVMILL_NEXT(grpc_byte_buffer_destroy, "grpc_byte_buffer_destroy");
  if (buffer != nullptr && buffer->type == GRPC_BB_RAW) {
    const grpc_slice_buffer& slices_of = buffer->data.raw.slice_buffer;
    for (std::size_t i = 0; i < slices_of.count; ++i) GivenBack(slices_of.slices[i]);
  }
  next(buffer);
}

grpc_slice grpc_slice_new_with_user_data(void* bytes, std::size_t count, void (*destroy)(void*),
                                         void* user_data) {
  KVMILL_NEXT(grpc_slice_new_with_user_data, "grpc_slice_new_with_user_data");
  auto* const owned = static_cast<OwnedSlice*>(std::malloc(sizeof(OwnedSlice)));
  *owned = {destroy, user_data};
  __tsan_release(owned);
  return next(bytes, count, &DestroySlice, owned);
}

}  // extern "C"
