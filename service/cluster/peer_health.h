// What this node has seen of its peers: how fast they answer, and whether to leave them alone.
//
// A peer that fails is not asked for a while, and then by one call first (a probe). Whoever lies is
// left alone at once; whoever is slow, stopped or gone after three failures in a row, or as soon as
// they are more than its successes make up for. The pause doubles from kPauseMin to kPauseMax and
// is forgotten after a good minute, so nobody is banned for good (pitfall 32), and a peer that is
// advertised but sick costs little (pitfall 28).
//
// Known by id and incarnation: a restart begins anew. Lives on the loop.
#ifndef KVMILL_SERVICE_CLUSTER_PEER_HEALTH_H_
#define KVMILL_SERVICE_CLUSTER_PEER_HEALTH_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "service/cluster/cluster_view.h"
#include "service/cluster/member.h"
#include "storage/core/clock.h"

namespace kvmill {

class PeerHealth {
 public:
  static constexpr std::int64_t kPauseMinNanos = 100'000'000;
  static constexpr std::int64_t kPauseMaxNanos = 30'000'000'000;
  static constexpr std::int64_t kForgiveNanos = 60'000'000'000;
  static constexpr std::int64_t kHedgeMinNanos = 1'000'000;
  static constexpr std::int64_t kHedgeMaxNanos = 100'000'000;
  static constexpr std::int64_t kHedgeFirstNanos = 10'000'000;  // Nothing was measured yet.

  enum class Fault {
    kFailed,  // No answer in time, or an error.
    kLied,    // Bytes or shapes that cannot be.
  };

  explicit PeerHealth(const Clock& clock) : clock_(clock) {}

  // Whether to ask it now. After a pause true once, and again when that probe has told something
  // or a second has gone by.
  bool Admit(const Member& peer);
  // The same without counting as a probe.
  bool Paused(const Member& peer) const;

  // Each call that was admitted ends in one of these; one that was cancelled in none. Nothing when
  // the peer has left the view meanwhile.
  void Succeeded(const Member& peer);
  void Failed(const Member& peer, Fault fault);

  // How long a Locate took that succeeded.
  void Measured(const Member& peer, std::int64_t nanos);

  // How long to wait for it before somebody else is asked, too: mean and four deviations of what it
  // took lately (as TCP's retransmission timer, RFC 6298), or of what anyone took.
  std::int64_t HedgeNanos(const Member& peer) const;

  // Forgets all who are not in the view.
  void Keep(const ClusterView& view);

  std::size_t size() const { return peers_.size(); }
  std::size_t paused_count() const;

 private:
  struct Latency {
    bool known = false;
    double mean = 0, deviation = 0;
    void Add(double nanos);
  };
  struct Peer {
    Latency latency;
    double faults = 0;  // Halved every ten seconds; three are too many.
    std::int64_t faults_at = 0;
    std::int64_t paused_until = 0;  // 0: not paused.
    std::int64_t probe_until = 0;   // A probe is out until then.
    std::int64_t pause = 0;         // The last one.
    std::int64_t well_since = 0;    // Since when there was no pause.
  };
  using Name = std::pair<std::string, std::string>;

  Peer* Find(const Member& peer);
  const Peer* Find(const Member& peer) const;

  const Clock& clock_;
  Latency anyone_;
  std::map<Name, Peer> peers_;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_CLUSTER_PEER_HEALTH_H_
