// Clients of other nodes: what blocks (PeerPull) and pages of tickets (TicketPulls) are pulled
// with. One client for each process of the cluster, shared by all who pull from it.
//
// A process is a member in one incarnation at one address. Which process answers there a client
// learns with its first answer: it shows its boot id, which is its incarnation. Greet asks for such
// an answer, Check looks at the last one. When that was another process's, the client is closed for
// all, and the member is in quarantine: for replaced_nanos Get repeats the error and asks nobody.
//
// A client costs four threads, a connection and UCX's buffers, some MiB. There are clients_max of
// them at most, and one that nobody has used for idle_nanos is closed. One that is used is closed
// when its member has left, or was replaced: calls on it end soon, as CANCELLED.
//
// Threads: all of it is called on the loop, but size(), and calls back there, never within the call
// that led to it. Clients call back on threads of their own. They are destroyed on another thread:
// their end waits for the calls that they cancel.
//
// Ownership: who keeps a PeerPtr may look at it for ever, and use its client between Begin and End.
// Whatever a user gave to a client's call must live until Close has returned.
#ifndef KVMILL_SERVICE_PEER_CLIENTS_H_
#define KVMILL_SERVICE_PEER_CLIENTS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/client.h"
#include "service/cluster/loop.h"
#include "service/cluster/member.h"
#include "service/loop_mail.h"
#include "storage/core/worker_pool.h"

namespace kvmill {

class PeerClients {
 public:
  struct Options {
    DataPath path = DataPath::kAuto;
    bool data_plane_plaintext = false;  // As this node's own data plane.
    RdmaUse rdma = RdmaUse::kAuto;      // Likewise.
    TlsFiles tls{};                     // Of connections to peers.
    std::size_t clients_max = 64;
    std::int64_t idle_nanos = 60'000'000'000;
    std::int64_t greet_nanos = 5'000'000'000;  // For the answer to a Greet.
    std::int64_t replaced_nanos = 1'000'000'000;
  };

  // A process of the cluster: id, incarnation and address.
  struct PeerId : std::tuple<std::string, std::string, std::string> {
    explicit PeerId(const Member& member) : tuple(member.id, member.incarnation, member.address) {}
  };

  // One process, and the client that talks to it.
  class Peer {
   public:
    const Member& member() const { return member_; }
    const std::string& boot_id() const { return boot_id_; }  // The member's, in hex.
    // The process there has said that it is the member.
    bool known() const { return known_; }
    // Null once it is closed.
    Client* client() const { return client_.get(); }
    // Why it was closed; OK: it was not. A ReplacedError: another process answers there.
    const absl::Status& closed() const { return closed_; }

   private:
    friend class PeerClients;
    explicit Peer(const Member& member);
    bool used() const { return uses_ > 0 || !greetings_.empty(); }

    const Member member_;
    const std::string boot_id_;
    std::shared_ptr<Client> client_;  // Shared with the task that destroys it.
    bool known_ = false;
    absl::Status closed_;
    std::size_t uses_ = 0;
    std::int64_t used_nanos_ = 0;
    std::vector<std::function<void(absl::Status)>> greetings_;  // Who waits for a first answer.
  };
  using PeerPtr = std::shared_ptr<Peer>;  // Of the table, and of what runs.

  // The loop outlives it.
  PeerClients(Loop& loop, const Options& options);
  ~PeerClients() { Close(); }
  PeerClients(const PeerClients&) = delete;
  PeerClients& operator=(const PeerClients&) = delete;

  // The member's client; it is made when there is none, which asks nobody anything. A
  // ReplacedError: another process was there a moment ago. RESOURCE_EXHAUSTED: clients_max are in
  // use. UNAVAILABLE: with this address there can be none, or Close was called.
  absl::StatusOr<PeerPtr> Get(const Member& member);

  // Has the process say who it is. OK: it is the member. UNAVAILABLE: nobody answers, or it was
  // closed meanwhile, as it says.
  void Greet(const PeerPtr& peer, std::function<void(absl::Status)> done);

  // Not OK when it is closed, as closed() says, or is now, since another process answered last. OK
  // also when nobody has answered yet: what only the member may be asked waits until it is known().
  absl::Status Check(const PeerPtr& peer);

  // In between it is not closed to make room, or for being idle.
  void Begin(const PeerPtr& peer) { ++peer->uses_; }
  void End(const PeerPtr& peer);

  // `changed` runs, until Close, after one was closed, and when there is room after Get had none.
  void Watch(std::function<void()> changed) { watchers_.push_back(std::move(changed)); }

  // Who is not among the members, in this incarnation and at this address, is closed.
  void Keep(const std::vector<Member>& members);

  // Closes all of them, and returns when every call on them has ended; nobody is told of anything
  // any more. Users call it before they go. On the loop or when that has stopped; idempotent.
  void Close();

  std::size_t size() const { return size_.load(std::memory_order_relaxed); }  // Thread-safe.

 private:
  struct Quarantine {
    absl::Status why;
    std::int64_t until = 0;
  };

  void Greeted(const PeerPtr& peer, const absl::Status& status);
  void Shut(const PeerPtr& peer, const absl::Status& why);
  bool MakeRoom();
  void DropIdle();
  void TellWatchers();

  Loop& loop_;
  const Options options_;
  const std::shared_ptr<LoopMail> mail_;
  bool over_ = false;  // Close was called.
  std::map<PeerId, PeerPtr> peers_;
  std::map<PeerId, Quarantine> replaced_;
  std::vector<std::function<void()>> watchers_;
  bool telling_ = false;
  bool refused_ = false;          // There was no room, and nobody was told of any since.
  Loop::TimerId idle_timer_ = 0;  // 0: there are none.
  std::atomic<std::size_t> size_{0};
  std::unique_ptr<WorkerPool> closer_;  // One thread, on which clients are destroyed.
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_PEER_CLIENTS_H_
