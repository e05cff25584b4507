// Brings blocks of a sequence that this node lacks from whoever has them, run by run, so that a
// fetch can go on with the first ones while the others are under way.
//
// Where a block is, a lookup has said lately (SourceTable), or one is made; when the block is not
// there any more, or whoever has it is silent, a lookup is made after all, and nobody is asked
// twice. Blocks that are on their way already are waited for, not asked for again: the ranks of one
// engine fetch the same ones at the same time. What does not come by the deadline is a miss. Lives
// on the loop.
#ifndef KVMILL_SERVICE_CLUSTER_BLOCK_BRINGER_H_
#define KVMILL_SERVICE_CLUSTER_BLOCK_BRINGER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "service/cluster/loop.h"
#include "service/cluster/peers.h"
#include "service/cluster/remote_fetch.h"
#include "service/cluster/remote_lookup.h"
#include "service/cluster/source_table.h"

namespace kvmill {

class BlockBringer {
 public:
  static constexpr std::size_t kPartsAtOnce = 4;  // Of one request.

  struct Options {
    std::int64_t lookup_nanos = 200'000'000;
    // How long a pull from one peer may take: so long, and what the bytes of all parts that run
    // take at 12.5 MB/s, a link of 100 Mbit/s.
    std::int64_t pull_nanos = 2'000'000'000;
    double nanos_per_byte = 80;
  };
  struct Request {
    Fingerprint fingerprint{};
    std::vector<BlockKey> keys;     // Of consecutive blocks,
    std::vector<bool> missing;      //   of which those are to be brought: one for each key.
    std::uint64_t first_block = 0;  // Position of keys[0] in its sequence, and the anchor of its
    BlockKey anchor;                //   run when that is not among the keys; empty: not known.
    std::string hint;               // As in RemoteLookup::Request.
    std::uint64_t block_bytes = 0;  // About.
    std::int64_t deadline_nanos = 0;
    // Calls what it is given, which asks peers: for whoever wants to know what is asked for it.
    // Null: it is just called.
    std::function<void(const std::function<void()>& ask)> within;
  };
  // The first `settled` keys are here or will not come. False: nobody wants the rest any more.
  using Progress = std::function<bool(std::size_t settled)>;

  BlockBringer(Loop& loop, RemoteLookup& lookup, RemoteFetch& fetch, SourceTable& sources,
               Options options)
      : loop_(loop), lookup_(lookup), fetch_(fetch), sources_(sources), options_(options) {}
  // What runs ends without a word.
  ~BlockBringer();
  BlockBringer(const BlockBringer&) = delete;
  BlockBringer& operator=(const BlockBringer&) = delete;

  // Of lookups from now on.
  void SetLookupNanos(std::int64_t nanos) { options_.lookup_nanos = nanos; }

  // `progress` runs on the loop, not within this call, with rising numbers; the last one is
  // keys.size(), and comes at the deadline at the latest.
  void Start(Request request, Progress progress);
  // All that runs ends now: what has not come will not.
  void EndAll();

  std::size_t running() const { return ops_.size(); }
  std::size_t flights() const { return flights_.size(); }

 private:
  using OpId = std::uint64_t;
  using FlightId = std::uint64_t;

  // Blocks of one run, next to each other in the request, that are brought together.
  struct Part {
    RunQuery query;
    std::size_t first = 0;      // Of the request's keys.
    std::uint32_t missing = 0;  // Bits of query.keys.
    std::size_t flights = 0;    // That it waits for.
    bool settled = false;
  };
  struct Op {
    Request request;
    Progress progress;
    std::vector<Part> parts;
    std::size_t next = 0;      // Part to start.
    std::size_t running = 0;   // Parts.
    std::size_t settled = 0;   // Parts, from the first one on.
    std::size_t reported = 0;  // Keys.
    Loop::TimerId timer = 0;   // Of the start, then of the deadline.
  };
  // Blocks on their way.
  struct Flight {
    Fingerprint fingerprint{};
    RunQuery query;
    std::uint32_t missing = 0;
    std::string hint;
    std::uint64_t block_bytes = 0;
    std::int64_t deadline_nanos = 0;
    bool looked_up = false;
    std::set<std::pair<std::string, std::string>> asked;  // Ids and incarnations.
    RemoteLookup::OpId lookup = 0;
    RemoteFetch::OpId fetch = 0;
    std::vector<std::pair<OpId, std::size_t>> waiting;  // Parts.
  };

  std::vector<Part> PartsOf(const Request& request) const;
  void StartParts(OpId id);
  void StartPart(OpId id, std::size_t part);
  void PartSettled(OpId id, std::size_t part);
  void Report(OpId id);

  void Begin(FlightId id);
  void Look(FlightId id);
  static void KeepNew(Flight* flight, std::vector<RemoteLookup::Source>* sources);
  void Pull(FlightId id, std::vector<RemoteLookup::Source> sources);
  void Land(FlightId id);
  std::vector<RemoteLookup::Source> Remembered(const Flight& flight) const;

  Loop& loop_;
  RemoteLookup& lookup_;
  RemoteFetch& fetch_;
  SourceTable& sources_;
  Options options_;
  std::uint64_t next_ = 1;
  std::map<OpId, Op> ops_;
  std::map<FlightId, Flight> flights_;
  // Which flight brings a block, by the hash of namespace and key. Two blocks with one hash: the
  // second one is not brought, a miss.
  absl::flat_hash_map<std::uint64_t, FlightId> on_the_way_;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_CLUSTER_BLOCK_BRINGER_H_
