// What a node asks of other nodes about blocks, and what they answer.
//
// Rules, for callers and for those who implement it (over gRPC and the data plane; tests/cluster):
// - Called on the loop only, and calls back there only, never within the call that started it.
// - A call runs its `done` exactly once, no later than `deadline_nanos` of the loop's clock and
// what
//   the loop takes to get there. After Cancel, or once this is destroyed, it runs no more.
// - The peer that answers is the process that `member` names: its incarnation is part of the
//   connection's handshake. Another one at that address is a ReplacedError.
// - Nothing of an answer is true because a peer said so: whoever uses it checks shapes
// (ValidAnswer)
//   and bytes.
#ifndef KVMILL_SERVICE_CLUSTER_PEERS_H_
#define KVMILL_SERVICE_CLUSTER_PEERS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "service/cluster/anchor.h"
#include "service/cluster/member.h"
#include "service/cluster/run_sketch.h"

namespace kvmill {

// Another process answers where the member should: the member was restarted, or its address is
// another's now. UNAVAILABLE, as when nobody answers; but here nothing is to be waited for.
absl::Status ReplacedError(absl::string_view message);
bool IsReplaced(const absl::Status& status);

inline constexpr std::size_t kQueryRunsMax = 64;        // Of one Locate.
inline constexpr std::size_t kPointersMax = 16;         // Of one run's answer.
inline constexpr std::size_t kAnnouncementsMax = 1024;  // Of one Announce.

// Blocks of one run that someone wants.
struct RunQuery {
  BlockKey anchor;             // Empty: not known, and so are the homes.
  std::uint8_t first = 0;      // Place in the run of keys[0].
  std::vector<BlockKey> keys;  // Of consecutive blocks, 1 to kRunBlocks - first.
};

// Blocks of one run that are to be copied, and where in it they are: whoever has them then can
// count them to their run.
struct RunKeys {
  BlockKey anchor;                   // Empty: not known.
  std::vector<BlockKey> keys;        // 1 to kRunBlocks.
  std::vector<std::uint8_t> places;  // In the run, of each key. Empty when the anchor is.
};

// `holder` had blocks of a run when it said so. Bits are of the query's keys.
struct Pointer {
  std::string holder;         // Member::id
  std::string incarnation;    // Member::incarnation
  std::uint32_t blocks = 0;   // It has these.
  std::uint32_t perhaps = 0;  // It has several in each of these places: only itself can tell.

  friend bool operator==(const Pointer&, const Pointer&) = default;
};

struct RunAnswer {
  std::uint32_t present = 0;  // Bit i: the node has keys[i], whole.
  std::vector<Pointer> pointers;
};

// Whether it can be an answer to the queries: shapes and bounds, nothing more.
bool ValidAnswer(const std::vector<RunQuery>& queries, const std::vector<RunAnswer>& answers);

// Bits of all its keys.
std::uint32_t AllOf(const RunQuery& query);

// "I have these blocks of this anchor's run"; a count of 0: none any more.
struct Announcement {
  std::uint64_t anchor_hash = 0;  // AnchorHash: stands for namespace and anchor.
  RunSketch sketch;

  friend bool operator==(const Announcement&, const Announcement&) = default;
};

inline constexpr std::size_t kListRunsMax = 64;  // Of one ListRuns.
// Of one run in its answer. Sequences that part within a run have several blocks at a place, so
// there may be more: they are asked for with the next one,
inline constexpr std::size_t kListKeysMax = 128;
// and of a run that has more than so many this is what is announced, and copied.
inline constexpr std::size_t kRunListMax = 1 << 17;

struct RunList {
  std::uint64_t anchor_hash = 0;
  // Only blocks behind this one, by place and KeyHash. Zeros: all.
  std::uint8_t after_place = 0;
  std::uint64_t after_hash = 0;
};

// What a node has of one run, for somebody who wants to copy it.
struct HeldRun {
  std::uint64_t anchor_hash = 0;
  Fingerprint fingerprint{};
  // Those that it has, by place, and by hash within one: kListKeysMax at most; none when there are
  // none behind the one that was named. The anchor is known.
  RunKeys blocks;
  std::uint64_t bytes = 0;  // All of them together, as they travel.
  bool more = false;        // There are others behind them.
};

// Whether it can be the answer to ListRuns of these: runs that were asked for, each once, with keys
// and sizes that can be, the anchor where its hash says.
bool ValidRuns(const std::vector<RunList>& lists, const std::vector<HeldRun>& runs);

// Digests of what a holder told a home, one for each range of anchor hashes (their highest bits,
// thus for a range of shards): two nodes that have the same digest believe the same. An empty range
// is 0, and what comes and goes is a xor. docs/formats.md ("Placement"): nodes compute the same.
inline constexpr int kDigestBits = 6;
inline constexpr std::size_t kDigests = std::size_t{1} << kDigestBits;
using Digests = std::array<std::uint64_t, kDigests>;
constexpr std::size_t DigestOf(std::uint64_t anchor_hash) {
  return static_cast<std::size_t>(anchor_hash >> (64 - kDigestBits));
}
// What one announcement adds to, or takes from, its digest; 0 for a count of 0.
std::uint64_t DigestWord(std::uint64_t anchor_hash, std::uint8_t count, std::uint64_t sum);
inline std::uint64_t DigestWord(const Announcement& said) {
  return DigestWord(said.anchor_hash, said.sketch.count, said.sketch.sum);
}

class Peers {
 public:
  using CallId = std::uint64_t;  // Never 0, never used again.
  template <typename Answer>
  using Done = std::function<void(absl::StatusOr<Answer>)>;

  virtual ~Peers() = default;

  // What the peer has of up to kQueryRunsMax runs, and, as a home, knows of who has some.
  virtual CallId Locate(const Member& member, const Fingerprint& fingerprint,
                        std::vector<RunQuery> queries, std::int64_t deadline_nanos,
                        Done<std::vector<RunAnswer>> done) = 0;

  // Copies blocks of one run from the peer into the local store. The answer has one
  // status a key: OK, it is there, verified and whole; NOT_FOUND; DATA_LOSS, what came was not what
  // was asked for, and was dropped; or what else kept it. An error is for all of them, though some
  // may have come.
  virtual CallId Pull(const Member& member, const Fingerprint& fingerprint, RunKeys blocks,
                      std::int64_t deadline_nanos, Done<std::vector<absl::Status>> done) = 0;

  // Tells a home what this node holds: up to kAnnouncementsMax.
  virtual CallId Announce(const Member& member, std::vector<Announcement> announcements,
                          std::int64_t deadline_nanos, std::function<void(absl::Status)> done) = 0;

  // What the peer has of up to kListRunsMax anchors, known by their hashes; those of which it has
  // nothing are left out.
  virtual CallId ListRuns(const Member& member, std::vector<RunList> lists,
                          std::int64_t deadline_nanos, Done<std::vector<HeldRun>> done) = 0;

  // Asks a home to see to it that these runs live on without this node, which leaves: up to
  // kAnnouncementsMax. The answer comes at once and has one number a run: how many of its first
  // places are safe at the home, or at another node that stays; all of them only when all is that
  // it has of the run. It
  // copies those that it lacks from here, and is asked again until it has them.
  virtual CallId HandOver(const Member& member, std::vector<Announcement> announcements,
                          std::int64_t deadline_nanos, Done<std::vector<std::uint8_t>> done) = 0;

  // Which of the digests, as bits, are not what the home knows of this node. The home starts anew
  // with those ranges: it sums up, and soon believes, only what is announced from now on.
  virtual CallId Compare(const Member& member, const Digests& digests, std::int64_t deadline_nanos,
                         Done<std::uint64_t> done) = 0;

  virtual void Cancel(CallId call) = 0;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_CLUSTER_PEERS_H_
