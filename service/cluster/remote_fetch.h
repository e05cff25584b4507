// Brings the blocks of one run to this node from those who have them: a copy that is missing, or
// whose bytes are wrong, is tried elsewhere, and in the end it is a miss.
//
// Every block is asked of the first source that is left, one call a source at a time. A source is
// asked for a block once, and for nothing any more when a call to it failed.
//
// How long a pull takes depends on its bytes, so a source that has stopped is known by something
// else: while a pull is out it is asked a small question now and then, and when it does not answer
// that, others are asked for the blocks, too. Whoever sends them first has won. Lives on the loop.
#ifndef KVMILL_SERVICE_CLUSTER_REMOTE_FETCH_H_
#define KVMILL_SERVICE_CLUSTER_REMOTE_FETCH_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "service/cluster/loop.h"
#include "service/cluster/peer_health.h"
#include "service/cluster/peers.h"
#include "service/cluster/remote_lookup.h"

namespace kvmill {

class RemoteFetch {
 public:
  using OpId = std::uint64_t;  // Never 0, never used again.
  // When a source is asked first whether it is there still; then after twice as long, and so on.
  static constexpr std::int64_t kFirstCheckNanos = 50'000'000;
  static constexpr std::int64_t kLastCheckNanos = 1'000'000'000;

  struct Request {
    Fingerprint fingerprint{};
    BlockKey anchor;                            // Of the run, and the place in it of keys[0], as
    std::uint8_t first = 0;                     //   in RunQuery. Empty: not known.
    std::vector<BlockKey> keys;                 // At most kRunBlocks: the bits of sources.
    std::vector<RemoteLookup::Source> sources;  // Best first; those that are this node are passed.
    std::int64_t call_nanos = 2'000'000'000;    // Of one source.
    std::int64_t deadline_nanos = 0;
    // A source is silent, and no other one is left for its blocks: AddSources may help. May be
    // null; runs on the loop, not within Start.
    std::function<void()> stalled;
  };

  RemoteFetch(Loop& loop, Peers& peers, PeerHealth& health)
      : loop_(loop), peers_(peers), health_(health) {}
  ~RemoteFetch();
  RemoteFetch(const RemoteFetch&) = delete;
  RemoteFetch& operator=(const RemoteFetch&) = delete;

  // `done` runs once, on the loop, not within this call and not after the deadline, with the bits
  // of the keys that are in the local store now, verified. The others are misses.
  OpId Start(Request request, std::function<void(std::uint32_t)> done);
  void Cancel(OpId op);
  // Goes on with these, too; those that it had are passed. Nothing when it has ended.
  void AddSources(OpId op, const std::vector<RemoteLookup::Source>& sources);

  std::size_t running() const { return ops_.size(); }

 private:
  struct Op {
    Request request;
    std::vector<std::uint32_t> left;  // Of each source: blocks it was not asked for yet.
    std::uint32_t have = 0;
    struct Call {
      Peers::CallId id = 0;
      std::uint32_t asked = 0;
      bool silent = false;  // It did not answer a question.
      std::int64_t wait = kFirstCheckNanos;
      Loop::TimerId check = 0;
      Peers::CallId question = 0;
    };
    std::map<std::size_t, Call> calls;  // By source.
    Loop::TimerId timer = 0;
    std::function<void(std::uint32_t)> done;
  };

  void Pull(OpId id, Op* op);
  void Answered(OpId id, std::size_t source,
                const absl::StatusOr<std::vector<absl::Status>>& statuses);
  void CheckLater(OpId id, std::size_t source);
  void Check(OpId id, std::size_t source);
  void Checked(OpId id, std::size_t source, bool answered);
  void EndCall(const Op::Call& call);
  void DropOvertaken(Op* op);
  void Complete(OpId id);
  void End(Op* op);

  Loop& loop_;
  Peers& peers_;
  PeerHealth& health_;
  OpId next_ = 1;
  std::map<OpId, Op> ops_;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_CLUSTER_REMOTE_FETCH_H_
