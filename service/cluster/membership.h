// Who is in the cluster: the own entry, the others', and what to believe when the registry is in
// trouble. On the loop.
//
// - The registry cannot be reached: the last members stay, the node serves on; after one lease time
//   without word the snapshot is `stale`.
// - More than a third of the members vanish within one lease time: they are kept for a grace
//   (VanishedMembers), `keeping`.
// - Another cluster id, or a revision that fell: everything is listed anew and the own entry
//   written anew. The members that are not in the new history vanished as any others.
// - The own lease ended: the node serves on and registers again.
#ifndef KVMILL_SERVICE_CLUSTER_MEMBERSHIP_H_
#define KVMILL_SERVICE_CLUSTER_MEMBERSHIP_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "service/cluster/loop.h"
#include "service/cluster/registrar.h"
#include "service/cluster/registration.h"
#include "service/cluster/registry.h"
#include "service/cluster/roster.h"
#include "service/cluster/vanished.h"

namespace kvmill {

// Immutable; may be read on any thread.
struct MembershipSnapshot {
  std::vector<Member> members;  // By id; this node among them when the registry has it.
  std::uint64_t version = 0;    // Rises when `members` changes. 0: nothing was heard yet.
  bool stale = true;            // The registry may know better.
  bool keeping = false;         // Members are kept that the registry no longer has.
  Registrar::State registration = Registrar::State::kJoining;
  absl::Status problem;           // With the own entry, or else with following the others.
  std::uint64_t registry_id = 0;  // Its cluster id; 0: nothing was heard yet.
};

class Membership {
 public:
  struct Options {
    std::string prefix = "/kvmill/";  // Of every key.
    Registration self;
    std::int64_t lease_seconds = 10;
    std::int64_t grace_seconds = 30;  // For members that vanished with many others.
    std::uint64_t seed = 0;           // Of the waits between attempts.
  };
  static constexpr std::int64_t kLeaseSecondsMin = 2;
  static constexpr std::int64_t kLeaseSecondsMax = 600;
  static constexpr std::int64_t kGraceSecondsMax = 3600;
  using Publish = std::function<void(std::shared_ptr<const MembershipSnapshot>)>;

  // INVALID_ARGUMENT naming the option.
  static absl::Status Check(const Options& options);

  // `options` passed Check. `publish` gets every change, some milliseconds after it, those that
  // come close together as one.
  Membership(Loop& loop, Registry& registry, Options options, Publish publish);
  ~Membership();
  Membership(const Membership&) = delete;
  Membership& operator=(const Membership&) = delete;

  void Start();
  void SetState(MemberState state) { registrar_.SetState(state); }
  // Registrar::Leave. The others are still followed.
  void Leave(std::int64_t deadline_nanos, std::function<void(const absl::Status&)> done) {
    registrar_.Leave(deadline_nanos, std::move(done));
  }

  const std::shared_ptr<const MembershipSnapshot>& snapshot() const { return snapshot_; }

 private:
  void Following(bool following, const absl::Status& why);
  void Told(bool listed, Registry::Revision revision);
  void Changed();
  void PublishNow();
  std::int64_t Now() const { return loop_.clock().MonotonicNanos(); }

  Loop& loop_;
  const Options options_;
  const Publish publish_;
  VanishedMembers members_;
  Roster roster_;
  Registrar registrar_;
  std::shared_ptr<const MembershipSnapshot> snapshot_;
  bool members_changed_ = false;
  bool following_ = false;
  bool stale_ = true;
  absl::Status following_problem_;
  Loop::TimerId publish_timer_ = 0;
  Loop::TimerId stale_timer_ = 0;
  Loop::TimerId grace_timer_ = 0;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_CLUSTER_MEMBERSHIP_H_
