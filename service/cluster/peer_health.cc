#include "service/cluster/peer_health.h"

#include <algorithm>
#include <cmath>

namespace kvmill {

namespace {

constexpr double kFaultsMax = 3;
constexpr double kHalfLifeNanos = 10e9;
constexpr double kRecovery = 0.25;  // Of a fault that one success makes up for.
constexpr std::int64_t kProbeNanos = 1'000'000'000;

}  // namespace

void PeerHealth::Latency::Add(double nanos) {
  if (!known) {
    known = true;
    mean = nanos;
    deviation = nanos / 2;
    return;
  }
  deviation += (std::abs(nanos - mean) - deviation) / 4;
  mean += (nanos - mean) / 8;
}

PeerHealth::Peer* PeerHealth::Find(const Member& peer) {
  const auto found = peers_.find({peer.id, peer.incarnation});
  return found == peers_.end() ? nullptr : &found->second;
}

const PeerHealth::Peer* PeerHealth::Find(const Member& peer) const {
  return const_cast<PeerHealth*>(this)->Find(peer);
}

bool PeerHealth::Paused(const Member& peer) const {
  const Peer* known = Find(peer);
  if (known == nullptr || known->paused_until == 0) return false;
  const std::int64_t now = clock_.MonotonicNanos();
  return now < known->paused_until || now < known->probe_until;
}

bool PeerHealth::Admit(const Member& peer) {
  if (Paused(peer)) return false;
  Peer& known = peers_[{peer.id, peer.incarnation}];
  if (known.paused_until != 0) known.probe_until = clock_.MonotonicNanos() + kProbeNanos;
  return true;
}

void PeerHealth::Measured(const Member& peer, std::int64_t nanos) {
  if (Peer* known = Find(peer)) known->latency.Add(static_cast<double>(nanos));
  anyone_.Add(static_cast<double>(nanos));
}

void PeerHealth::Succeeded(const Member& peer) {
  Peer* found = Find(peer);
  if (found == nullptr) return;
  Peer& known = *found;
  known.faults = std::max(0.0, known.faults - kRecovery);
  if (known.paused_until != 0) {
    // A probe, or a call from before the pause: either way it answers again.
    known.paused_until = known.probe_until = 0;
    known.faults = 0;
    known.well_since = clock_.MonotonicNanos();
  }
}

void PeerHealth::Failed(const Member& peer, Fault fault) {
  Peer* found = Find(peer);
  if (found == nullptr) return;
  const std::int64_t now = clock_.MonotonicNanos();
  Peer& known = *found;
  const bool probed = known.paused_until != 0 && now >= known.paused_until;
  if (known.paused_until != 0 && !probed) return;  // Sent before the pause; it is paused already.
  known.faults *= std::exp2(-static_cast<double>(now - known.faults_at) / kHalfLifeNanos);
  known.faults += fault == Fault::kLied ? kFaultsMax : 1;
  known.faults_at = now;
  // A little less: what faded meanwhile does not make three in a row two.
  if (!probed && known.faults < kFaultsMax * 0.9) return;
  if (!probed && now - known.well_since > kForgiveNanos) known.pause = 0;
  known.pause = std::clamp(2 * known.pause, kPauseMinNanos, kPauseMaxNanos);
  known.paused_until = now + known.pause;
  known.probe_until = 0;
}

std::int64_t PeerHealth::HedgeNanos(const Member& peer) const {
  const Peer* known = Find(peer);
  const Latency& latency = known != nullptr && known->latency.known ? known->latency : anyone_;
  if (!latency.known) return kHedgeFirstNanos;
  return std::clamp(static_cast<std::int64_t>(latency.mean + 4 * latency.deviation), kHedgeMinNanos,
                    kHedgeMaxNanos);
}

void PeerHealth::Keep(const ClusterView& view) {
  std::erase_if(peers_, [&](const auto& entry) {
    const auto index = view.IndexOf(entry.first.first);
    return !index.has_value() || view.members()[*index].incarnation != entry.first.second;
  });
}

std::size_t PeerHealth::paused_count() const {
  return static_cast<std::size_t>(std::count_if(
      peers_.begin(), peers_.end(), [](const auto& e) { return e.second.paused_until != 0; }));
}

}  // namespace kvmill
