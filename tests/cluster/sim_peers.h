// `Peers` as one simulated process has it: calls to other processes over SimNetwork, which may be
// slow, stopped, gone, another process than was meant, or liars.
#ifndef KVMILL_TESTS_CLUSTER_SIM_PEERS_H_
#define KVMILL_TESTS_CLUSTER_SIM_PEERS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "service/cluster/loop.h"
#include "service/cluster/peers.h"
#include "tests/cluster/sim_network.h"

namespace kvmill {

// What a process does when peers call. Called on its loop.
class SimPeerService {
 public:
  // A block as it travels: bytes, and their checksum as the page that holds them has it.
  struct Block {
    bool found = false;
    std::string bytes;
    std::uint64_t checksum = 0;
  };

  virtual ~SimPeerService() = default;
  virtual std::vector<RunAnswer> OnLocate(const Member& from, const Fingerprint& fingerprint,
                                          const std::vector<RunQuery>& queries) = 0;
  virtual std::vector<Block> OnPull(const Fingerprint& fingerprint,
                                    const std::vector<BlockKey>& keys) = 0;
  // `from`: id, incarnation and address alone.
  virtual void OnAnnounce(const Member& from, const std::vector<Announcement>& announcements) = 0;
  virtual std::vector<HeldRun> OnListRuns(const std::vector<RunList>& lists) = 0;
  virtual std::vector<std::uint8_t> OnHandOver(const Member& from,
                                               const std::vector<Announcement>& announcements) = 0;
  virtual std::uint64_t OnCompare(const Member& from, const Digests& digests) = 0;
  // Blocks that a Pull of this process brought. OK when it is what `key` stands for, and kept.
  virtual absl::Status Keep(const Fingerprint& fingerprint, const BlockKey& key,
                            const Block& block) = 0;
};

// Which process answers where. The port of a simulated machine is its number.
class SimHosts {
 public:
  struct Host {
    std::string id, incarnation;
    Loop* loop = nullptr;
    SimPeerService* service = nullptr;
    double lies = 0;  // Share of its answers in which bits are flipped.
    std::shared_ptr<bool> alive;
  };
  explicit SimHosts(std::size_t machines) : hosts_(machines) {}

  Host& operator[](std::size_t machine) { return hosts_[machine]; }
  static std::string AddressOf(std::size_t machine);
  static std::size_t MachineOf(const std::string& address);

 private:
  std::vector<Host> hosts_;
};

class SimPeers : public Peers {
 public:
  SimPeers(SimEvents& events, SimNetwork& network, SimHosts& hosts, std::size_t machine)
      : events_(events), network_(network), hosts_(hosts), machine_(machine) {}
  ~SimPeers() override;

  CallId Locate(const Member& member, const Fingerprint& fingerprint, std::vector<RunQuery> queries,
                std::int64_t deadline_nanos, Done<std::vector<RunAnswer>> done) override;
  CallId Pull(const Member& member, const Fingerprint& fingerprint, RunKeys blocks,
              std::int64_t deadline_nanos, Done<std::vector<absl::Status>> done) override;
  CallId Announce(const Member& member, std::vector<Announcement> announcements,
                  std::int64_t deadline_nanos, std::function<void(absl::Status)> done) override;
  CallId ListRuns(const Member& member, std::vector<RunList> lists, std::int64_t deadline_nanos,
                  Done<std::vector<HeldRun>> done) override;
  CallId HandOver(const Member& member, std::vector<Announcement> announcements,
                  std::int64_t deadline_nanos, Done<std::vector<std::uint8_t>> done) override;
  CallId Compare(const Member& member, const Digests& digests, std::int64_t deadline_nanos,
                 Done<std::uint64_t> done) override;
  void Cancel(CallId call) override;

  std::size_t open() const { return calls_.size(); }
  // A planted fault: calls that get no answer never end.
  void ForgetDeadlines() { deadlines_ = false; }

 private:
  using Fail = std::function<void(const absl::Status&)>;
  struct Call {
    Fail fail;
    Loop::TimerId timer = 0;
  };

  // Runs `serve` on the loop of the process that `member` is, and what that returns here, unless
  // the call has ended: then `fail` ran.
  CallId Start(const Member& member, std::int64_t deadline_nanos, Fail fail,
               std::function<std::function<void()>(SimHosts::Host&)> serve);
  void End(CallId id, const std::function<void()>& run);
  Loop& loop() { return *hosts_[machine_].loop; }
  // This process, as those whom it calls know it.
  Member self() const;

  SimEvents& events_;
  SimNetwork& network_;
  SimHosts& hosts_;
  const std::size_t machine_;
  bool deadlines_ = true;
  CallId next_ = 1;
  std::map<CallId, Call> calls_;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

}  // namespace kvmill

#endif  // KVMILL_TESTS_CLUSTER_SIM_PEERS_H_
