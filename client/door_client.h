// The client's side of the local door: gets in, stays in, and notices at once when it is over.
//
// The connection is what makes this process a local client of the daemon: when it ends, whatever
// the daemon held for this client is gone. It is made when first needed and again when it is needed
// after it broke. Internal to client/. Thread-safe; has one thread of its own.
#ifndef KVMILL_CLIENT_DOOR_CLIENT_H_
#define KVMILL_CLIENT_DOOR_CLIENT_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/door_protocol.h"
#include "storage/core/mutex.h"

namespace kvmill {

// A file descriptor that is closed with its owner. Movable.
class OwnedFd {
 public:
  OwnedFd() = default;
  explicit OwnedFd(int fd) : fd_(fd) {}
  OwnedFd(OwnedFd&& other) noexcept : fd_(other.Release()) {}
  OwnedFd& operator=(OwnedFd&& other) noexcept;
  ~OwnedFd();

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  int Release();

 private:
  int fd_ = -1;
};

// What being let in is worth. Value type.
struct DoorPass {
  std::uint64_t number = 0;  // Of this process: another one after every new connection. From 1.
  std::string token_hex;
  std::string boot_id_hex;
  std::uint16_t version = 0;  // That the daemon's door speaks.
  OwnedFd process;  // pidfd of the daemon; not valid when its process cannot be seen from here.

  // The daemon has ended, for certain.
  bool DaemonIsGone() const;
};

class DoorClient {
 public:
  using Deadline = std::chrono::system_clock::time_point;
  // How long one attempt may take: a busy daemon needs a while to greet.
  static constexpr std::chrono::seconds kAttemptMax{5};

  // `path` is the door's. `lost(number)` is called from the thread of this object when the
  // connection with that pass ended; it must not call back. Does not connect yet.
  DoorClient(std::string path, std::function<void(std::uint64_t number)> lost);
  // Calls what still waits with CANCELLED, and hangs up.
  ~DoorClient();

  // The pass of the connection that is open now; null when there is none.
  std::shared_ptr<const DoorPass> pass() const;

  // Calls `done` once, from the thread of this object, when there is a pass. UNAVAILABLE when
  // nobody opens; DEADLINE_EXCEEDED; or what the daemon refused with.
  using Entered = std::function<void(absl::StatusOr<std::shared_ptr<const DoorPass>> pass)>;
  void Enter(Deadline deadline, Entered done);

  // The daemon does not know this pass any more: hangs up, unless there is a newer one already.
  void Refused(std::uint64_t number);

  // Memory of an arena that this client holds a lease in, for mapping. `done` is called once, from
  // the thread of this object. UNAVAILABLE when the connection with pass `number` is gone.
  struct ArenaMemory {
    OwnedFd fd;
    std::uint64_t arena_bytes = 0;
    OwnedFd generations;  // Of an arena of a GPU, whose generations are in host memory.
  };
  using GotArena = std::function<void(absl::StatusOr<ArenaMemory> memory)>;
  void RequestArena(std::uint64_t number, DoorArenaRequest request, Deadline deadline,
                    GotArena done);

  // Memory of a registered region: `fd` goes to the daemon, which answers when it has it mapped.
  // `fd` must stay open until `done`; otherwise as RequestArena.
  using RegionTaken = std::function<void(absl::Status status)>;
  void SendRegion(std::uint64_t number, const DoorRegion& region, int fd, Deadline deadline,
                  RegionTaken done);
  // The same for memory of a GPU. UNIMPLEMENTED: the daemon is older than that.
  void SendDeviceRegion(std::uint64_t number, const DoorDeviceRegion& region, Deadline deadline,
                        RegionTaken done);

  // Cancels and hangs up before the destructor does. Idempotent.
  void Stop();

 private:
  struct Waiter {
    Deadline deadline;
    Entered done;
  };
  // An answer, and the descriptors that came along, if any.
  struct Answer {
    std::vector<std::byte> packet;
    OwnedFd fd;
    OwnedFd more;
  };
  struct Request {
    std::vector<std::byte> packet;
    int fd = -1;  // That goes along; the caller's.
    Deadline deadline;
    std::uint32_t number = 0;  // 0: not sent yet.
    std::function<void(absl::StatusOr<Answer> answer)> done;
  };

  void Run();
  // Connects and says hello; the connection's descriptor.
  absl::StatusOr<OwnedFd> Attempt(DoorWelcome* welcome, OwnedFd* process);
  absl::StatusOr<OwnedFd> Connect(std::chrono::steady_clock::time_point give_up);
  // Serves the open connection until it ends or the object stops.
  void Serve(int fd);
  // False: the connection is over.
  bool Receive(int fd);
  void Ask(std::uint64_t pass_number, Request request);
  // A region: `packet` with `fd`, or without one.
  void AskToTake(std::uint64_t number, absl::Span<const std::byte> packet, int fd,
                 Deadline deadline, RegionTaken done);
  void SendRequests(int fd);
  // Milliseconds until the first deadline of those who wait.
  int PollTimeoutMs();
  void FailExpired();
  void FailAll(const absl::Status& status);
  void FailRequests(const absl::Status& status);
  void Wake();
  bool Stopping();

  const std::string path_;
  const std::function<void(std::uint64_t)> lost_;
  OwnedFd wake_fd_;  // eventfd.

  mutable Mutex mu_;
  CondVar changed_;
  std::shared_ptr<const DoorPass> pass_ ABSL_GUARDED_BY(mu_);  // Shared with who uses it.
  std::vector<Waiter> waiters_ ABSL_GUARDED_BY(mu_);           // At most one a running call.
  std::vector<Request> requests_ ABSL_GUARDED_BY(mu_);
  std::uint64_t passes_ ABSL_GUARDED_BY(mu_) = 0;
  std::uint64_t refused_ ABSL_GUARDED_BY(mu_) = 0;  // The highest number that was.
  std::uint32_t next_request_ ABSL_GUARDED_BY(mu_) = 1;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;  // Started by the constructor.
};

}  // namespace kvmill

#endif  // KVMILL_CLIENT_DOOR_CLIENT_H_
