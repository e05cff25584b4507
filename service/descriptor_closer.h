// Closes what other processes passed: descriptors, and connections on which some may still lie.
//
// Closing a foreign descriptor takes as long as its sender likes: a socket with SO_LINGER and full
// buffers waits for its time, a file of a file system in user space for its answer, and both may
// lie in a socket that was passed. So nobody who has other things to do closes one. Sockets lose
// their SO_LINGER before; what waits nevertheless keeps a thread of this class, of which there are
// a few, and none ends later for it than the process.
//
// Thread-safe.
#ifndef KVMILL_SERVICE_DESCRIPTOR_CLOSER_H_
#define KVMILL_SERVICE_DESCRIPTOR_CLOSER_H_

#include <sys/socket.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "client/door_client.h"

namespace kvmill {

// With one message; a constant of Linux (SCM_MAX_FD). The kernel closes at once what there is no
// room for, in the thread that receives.
inline constexpr std::size_t kPassedDescriptorsMax = 253;

// The descriptors of a message that recvmsg returned, with whatever result but an error.
std::vector<OwnedFd> PassedDescriptors(msghdr& message);

class DescriptorCloser {
 public:
  static constexpr std::size_t kThreadsMax = 8;
  static constexpr std::size_t kWaitingMax = 512;  // Descriptors that no thread has begun with.

  DescriptorCloser();
  // As Stop. What waits is closed all the same, soon.
  ~DescriptorCloser();

  // Waits while kWaitingMax others do and all threads are busy.
  void Close(OwnedFd passed);
  // Of a unix socket. The peer learns it at once; what it sent and nobody read is closed as well.
  void HangUp(OwnedFd connection);

  // From now on nobody waits for room. Idempotent.
  void Stop();

 private:
  struct State;
  void Add(OwnedFd fd, bool connection);
  const std::shared_ptr<State> state_;  // With the threads, which may outlive this object.
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_DESCRIPTOR_CLOSER_H_
