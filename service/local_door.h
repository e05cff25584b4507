// The local door: PATH.door, a small socket that makes a process on this node a local client.
//
// Who comes in says hello and gets a token, which its gRPC calls on PATH must carry; "local" means
// "came through this door", whatever an address says. The kernel says who the peer is. Through the
// door goes also what gRPC cannot carry: file descriptors of memory. Its hang-up, or the end of the
// process behind it (a child of that process may still hold the connection), is the definitive
// death of the client.
//
// One thread serves everybody, one message of a client at a time, and never waits for any of them,
// nor for what they pass (service/descriptor_closer.h): a client that sends garbage, floods or does
// not read what it is sent is hung up on, one that connects and says nothing after a while, or
// earlier when others want in. Messages are in client/door_protocol.h. Thread-safe.
#ifndef KVMILL_SERVICE_LOCAL_DOOR_H_
#define KVMILL_SERVICE_LOCAL_DOOR_H_

#include <sys/types.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/door_client.h"
#include "client/door_protocol.h"
#include "service/descriptor_closer.h"
#include "service/unix_listener.h"
#include "storage/core/clock.h"
#include "storage/core/mutex.h"

namespace kvmill {

// Number of a client of the door, of this daemon's life. Never used again. 0: nobody.
using DoorClientId = std::uint64_t;

// Who sent something, as the kernel had it when the connection was made.
struct DoorPeer {
  DoorClientId client = 0;
  uid_t uid = 0;
  pid_t pid = 0;     // In the daemon's namespace of processes; 0 when it cannot be seen from here.
  int process = -1;  // pidfd; borrowed. -1 as above.

  // It has not ended: so `pid` is still its own, and no other process's.
  bool IsAlive() const;
};

class LocalDoor {
 public:
  struct Options {
    std::string path;     // Of the door.
    std::string boot_id;  // 16 bytes.
    std::uint32_t clients_max = 1024;
    std::uint32_t clients_of_uid_max = 256;  // Of a uid other than the daemon's and root.
    std::uint32_t silent_max = 64;           // That have not said hello; beyond, the oldest goes.
    std::int64_t silent_nanos_max = 5'000'000'000;
  };
  struct Handlers {  // Called from the door's thread.
    std::function<void(DoorClientId client)> entered;
    std::function<void(DoorClientId client)> left;
    // The memory of an arena, for this client.
    std::function<absl::StatusOr<DoorClient::ArenaMemory>(DoorClientId client,
                                                          const DoorArenaRequest& request)>
        arena;
    // Takes the memory of a region of this client's. The descriptor is any that somebody passed
    // (-1: none), and is not the handler's to close: nothing must be done with it that could wait.
    std::function<absl::Status(const DoorPeer& peer, const DoorRegion& region, int fd)> region;
    // The same of memory of a GPU.
    std::function<absl::Status(const DoorPeer& peer, const DoorDeviceRegion& region)> device_region;
  };

  // Binds, by the rules of UnixListener; whoever connects waits for Start().
  static absl::StatusOr<std::unique_ptr<LocalDoor>> Create(Options options, const Clock& clock);
  // Stops, and removes the socket.
  ~LocalDoor();

  void Start(Handlers handlers);  // Once.
  // Hangs up on everybody. Idempotent; not from a handler.
  void Stop();

  // Who has this token (lower-case hex); nothing when nobody that is here has it.
  struct Guest {
    DoorClientId client = 0;
    uid_t uid = 0;
  };
  std::optional<Guest> FindToken(absl::string_view token_hex) const;

 private:
  struct Client {
    OwnedFd fd;
    OwnedFd process;  // pidfd; invalid when the process cannot be seen from here.
    uid_t uid = 0;
    pid_t pid = 0;
    bool silent = true;
    std::int64_t connected_nanos = 0;
    std::uint64_t token_head = 0;  // Its place in tokens_.
  };
  struct Token {
    std::array<std::uint8_t, kDoorTokenBytes> bytes{};
    Guest guest;
  };

  LocalDoor(Options options, const Clock& clock) : options_(std::move(options)), clock_(clock) {}
  void Run();
  void Accept();
  void AddClient(OwnedFd* connection);  // Leaves there whom it does not let in.
  void Refuse(int fd, const absl::Status& status, std::uint32_t request = 0);
  // False: the client goes.
  bool Receive(DoorClientId id, Client& client);
  static DoorPeer PeerOf(DoorClientId id, const Client& client) {
    return {id, client.uid, client.pid, client.process.get()};
  }
  // Of a message of `bytes`, `message` is what there was room for.
  bool Handle(DoorClientId id, Client& client, absl::Span<const std::byte> message,
              std::size_t bytes, int passed);
  bool Welcome(DoorClientId id, Client& client, std::uint32_t request);
  bool SendArena(DoorClientId id, Client& client, const DoorArenaRequest& request);
  template <typename Region>  // DoorRegion or DoorDeviceRegion.
  bool AnswerRegion(Client& client, const Region& region, const absl::Status& taken);
  void Drop(DoorClientId id);
  void HangUp(OwnedFd fd);
  void DropSilent();

  const Options options_;
  const Clock& clock_;
  Handlers handlers_;
  std::unique_ptr<UnixListener> listener_;
  OwnedFd epoll_;
  OwnedFd stop_;  // eventfd.
  DescriptorCloser closer_;
  std::thread thread_;

  // The thread's own. By age.
  std::map<DoorClientId, Client> clients_;
  std::map<uid_t, std::uint32_t> clients_of_uid_;
  std::uint32_t silent_ = 0;
  DoorClientId last_id_ = 0;
  bool accepting_ = true;  // Not while there are no descriptors.

  mutable Mutex mu_;
  // By the first 8 bytes of the token.
  absl::flat_hash_map<std::uint64_t, Token> tokens_ ABSL_GUARDED_BY(mu_);
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_LOCAL_DOOR_H_
