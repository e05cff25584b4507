// A unix socket of the daemon: accepts connections, remembers who they are, hands them on.
#ifndef KVMILL_SERVICE_UNIX_LISTENER_H_
#define KVMILL_SERVICE_UNIX_LISTENER_H_

#include <sys/types.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/statusor.h"

namespace kvmill {

class UnixListener {
 public:
  // Called for every connection, on the listener's thread. The callee owns `fd`.
  using Accepted = std::function<void(int fd, uid_t uid)>;

  enum class Type { kStream, kPackets };  // SOCK_STREAM, SOCK_SEQPACKET.

  // Binds and listens; connections wait until Start(). The directory is created with mode 0750 when
  // missing, the socket gets 0660. A socket that nobody listens on any more is replaced.
  // FAILED_PRECONDITION: another daemon listens there, or the path is no socket; other codes name
  // the call that failed.
  static absl::StatusOr<std::unique_ptr<UnixListener>> Create(const std::string& path,
                                                              Type type = Type::kStream);
  // Stops, and removes the socket if it is still ours.
  ~UnixListener();

  // Once.
  void Start(Accepted accepted);
  // No further connections. Idempotent; not from `accepted`.
  void Stop();

  // 16 random bytes that stay from one process to the next: who has them has the lock, so nobody
  // else that had them lives. Empty when the lock file could not be written.
  const std::string& holder() const { return holder_; }

  // For whoever accepts by itself instead of Start: the socket, which does not block.
  int fd() const { return listen_fd_; }

 private:
  UnixListener() = default;
  void Run();

  std::string path_;
  std::string holder_;
  int lock_fd_ = -1;  // Of PATH.lock: who may bind, replace and remove the socket.
  int listen_fd_ = -1;
  int stop_fd_ = -1;  // eventfd.
  Accepted accepted_;
  std::thread thread_;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_UNIX_LISTENER_H_
