// The parts that keep copies, each with peers that do exactly what the test says; cluster_sim has
// them all together while everything goes wrong.
//
// For replication_test, whose files are by subject: what a home copies, what a node that leaves
// hands over, what homes are told. A new thing that a peer can do wrong is a field of
// RunPeers::Script.
#ifndef KVMILL_TESTS_CLUSTER_REPLICATION_FIXTURE_H_
#define KVMILL_TESTS_CLUSTER_REPLICATION_FIXTURE_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "service/cluster/cluster_view.h"
#include "service/cluster/peer_health.h"
#include "service/cluster/peers.h"
#include "service/cluster/pointer_table.h"
#include "service/cluster/replicator.h"
#include "tests/cluster/sim_loop.h"
#include "tests/cluster/sketches.h"

namespace kvmill {

inline constexpr std::uint64_t kBlockBytes = 1000;
inline constexpr Fingerprint kFingerprint{};

inline Member Node(std::size_t i) {
  Member member;
  member.id = absl::StrCat("node-", i);
  member.incarnation = "first life";
  member.address = absl::StrCat(i);
  member.capacity_bytes = 1 << 20;
  return member;
}

// Block `place` of run `run`.
inline BlockKey Key(std::size_t run, std::size_t place) {
  return *BlockKey::FromBytes(absl::StrCat("run-", run, "-", place));
}
inline std::uint64_t HashOf(std::size_t run) { return AnchorHash(kFingerprint, Key(run, 0)); }
// The first `count` blocks of a run, said.
inline Announcement Said(std::size_t run, std::size_t count) {
  std::vector<std::pair<std::size_t, std::uint64_t>> blocks;
  for (std::size_t place = 0; place < count; ++place) {
    blocks.emplace_back(place, KeyHash(kFingerprint, Key(run, place)));
  }
  return {HashOf(run), SketchOfBlocks(blocks)};
}

// Peers that have runs of ten blocks, and answer after a millisecond.
class RunPeers : public Peers {
 public:
  static constexpr std::size_t kBlocks = 10;
  static constexpr std::size_t kListMax = 16;  // Of a run in one answer.
  using Block = std::pair<std::size_t, BlockKey>;
  struct Script {
    bool silent = false;
    std::set<std::size_t> runs;
    // It has these sequences of each run: they part at place 4. 0 is the one that others have, too.
    std::set<std::size_t> sequences = {0};
    bool endless = false;                // Its lists are.
    absl::Status pull_status;            // Of every block.
    std::uint64_t claims = kBlockBytes;  // That a block has.
    bool wrong_anchor = false;
    std::uint8_t safe = 0;  // What it answers to HandOver.
    std::uint64_t differ = 0;
    std::int64_t answer_nanos = kSimMs;
  };
  explicit RunPeers(Loop& loop) : loop_(loop) {}

  // By place and hash.
  static std::vector<Block> BlocksOf(std::size_t run, const std::set<std::size_t>& sequences) {
    std::vector<Block> blocks;
    for (std::size_t place = 0; place < kBlocks; ++place) {
      const std::size_t begin = blocks.size();
      for (const std::size_t sequence : sequences) {
        if (place < 4 && sequence != *sequences.begin()) continue;
        blocks.emplace_back(place, Key(run, place < 4 ? place : place + 100 * sequence));
      }
      std::sort(blocks.begin() + static_cast<std::ptrdiff_t>(begin), blocks.end(),
                [](const Block& a, const Block& b) {
                  return KeyHash(kFingerprint, a.second) < KeyHash(kFingerprint, b.second);
                });
    }
    return blocks;
  }

  CallId Locate(const Member&, const Fingerprint&, std::vector<RunQuery>, std::int64_t,
                Done<std::vector<RunAnswer>>) override {
    ADD_FAILURE() << "nobody looks anything up";
    return 1;
  }
  CallId Pull(const Member& member, const Fingerprint&, RunKeys blocks, std::int64_t deadline,
              Done<std::vector<absl::Status>> done) override {
    const Script& script = scripts[member.id];
    pulled.push_back(absl::StrCat(member.id, " ", blocks.keys.size()));
    pulled_blocks += blocks.keys.size();
    EXPECT_EQ(blocks.places.size(), blocks.keys.size());
    return Answer<std::vector<absl::Status>>(script, deadline, done, [this, blocks, &script] {
      std::vector<absl::Status> statuses;
      for (const BlockKey& key : blocks.keys) {
        statuses.push_back(script.pull_status);
        if (script.pull_status.ok()) here.insert(std::string(key.view()));
      }
      return statuses;
    });
  }
  CallId Announce(const Member& member, std::vector<Announcement> announcements,
                  std::int64_t deadline, std::function<void(absl::Status)> done) override {
    return Answer<bool>(
        scripts[member.id], deadline,
        [done](const absl::StatusOr<bool>& answer) { done(answer.status()); },
        [this, id = member.id, announcements] {
          for (const Announcement& said : announcements) {
            ++announcements_heard;
            if (said.sketch.count == 0) {
              announced[id].erase(said.anchor_hash);
            } else {
              announced[id][said.anchor_hash] = said.sketch;
            }
          }
          return true;
        });
  }
  CallId ListRuns(const Member& member, std::vector<RunList> lists, std::int64_t deadline,
                  Done<std::vector<HeldRun>> done) override {
    const Script& script = scripts[member.id];
    listed.push_back(absl::StrCat(member.id, " ", lists.size()));
    return Answer<std::vector<HeldRun>>(script, deadline, done, [this, lists, &script] {
      std::vector<HeldRun> runs;
      for (const auto& [hash, after_place, after_hash] : lists) {
        const std::size_t i = run_of.at(hash);
        if (!script.runs.contains(i)) continue;
        HeldRun run{
            .anchor_hash = hash,
            .fingerprint = kFingerprint,
            .blocks = {
                .anchor = Key(script.wrong_anchor ? i + 1 : i, 0), .keys = {}, .places = {}}};
        const std::vector<Block> blocks = BlocksOf(i, script.sequences);
        for (std::size_t k = 0; k < blocks.size() && !run.more; ++k) {
          const std::uint64_t key_hash = KeyHash(kFingerprint, blocks[k].second);
          if (std::pair(blocks[k].first, key_hash) <=
              std::pair(std::size_t{after_place}, after_hash)) {
            continue;
          }
          run.blocks.keys.push_back(blocks[k].second);
          run.blocks.places.push_back(static_cast<std::uint8_t>(blocks[k].first));
          run.more = run.blocks.keys.size() == kListMax && k + 1 < blocks.size();
        }
        if (script.endless && run.blocks.keys.empty()) {
          for (std::size_t k = 0; k < kListKeysMax; ++k) {
            run.blocks.keys.push_back(Key(i, 1000 + ++made_up));
            run.blocks.places.push_back(31);
          }
        }
        run.more |= script.endless;
        run.bytes = run.blocks.keys.size() * script.claims;
        runs.push_back(std::move(run));
      }
      return runs;
    });
  }
  CallId HandOver(const Member& member, std::vector<Announcement> announcements,
                  std::int64_t deadline, Done<std::vector<std::uint8_t>> done) override {
    handed_over[member.id] += announcements.size();
    const Script& script = scripts[member.id];
    return Answer<std::vector<std::uint8_t>>(
        script, deadline, done,
        [n = announcements.size(), &script] { return std::vector<std::uint8_t>(n, script.safe); });
  }
  CallId Compare(const Member& member, const Digests& digests, std::int64_t deadline,
                 Done<std::uint64_t> done) override {
    ++compared[member.id];
    const Script& script = scripts[member.id];
    return Answer<std::uint64_t>(script, deadline, done, [this, &script, id = member.id, digests] {
      // As a home does: what differs is forgotten.
      Digests known = {};
      for (const auto& [hash, sketch] : announced[id]) {
        known[DigestOf(hash)] ^= DigestWord({hash, sketch});
      }
      std::uint64_t differ = script.differ;
      for (std::size_t i = 0; i < kDigests; ++i) {
        if (known[i] != digests[i]) differ |= std::uint64_t{1} << i;
      }
      std::erase_if(announced[id],
                    [&](const auto& entry) { return (differ >> DigestOf(entry.first) & 1) != 0; });
      return differ;
    });
  }
  void Cancel(CallId call) override {
    loop_.Cancel(call);
    --open;
  }

  std::map<std::string, Script> scripts;
  std::map<std::uint64_t, std::size_t> run_of;  // By the hash of its anchor.
  std::set<std::string> here;                   // Keys that this node has.
  std::vector<std::string> listed, pulled;
  std::size_t made_up = 0;
  std::size_t pulled_blocks = 0, announcements_heard = 0;
  std::map<std::string, std::map<std::uint64_t, RunSketch>> announced;
  std::map<std::string, std::size_t> handed_over, compared;
  int open = 0;

 private:
  template <typename T>
  CallId Answer(const Script& script, std::int64_t deadline, Done<T> done,
                std::function<T()> answer) {
    ++open;
    if (script.silent) {
      return loop_.At(deadline, [this, done] {
        --open;
        done(absl::DeadlineExceededError(""));
      });
    }
    return loop_.After(script.answer_nanos, [this, done, answer = std::move(answer)] {
      --open;
      done(answer());
    });
  }
  Loop& loop_;
};

class ReplicationTest : public ::testing::Test {
 protected:
  static constexpr std::size_t kBlocks = RunPeers::kBlocks;
  const std::set<std::size_t> kSequences = {0, 1, 2, 3};  // All that there are.

  // This node is "node-0".
  void Make(std::size_t copies, std::uint64_t blocks_per_second = 1'000'000) {
    replicator_.reset();
    replicator_ = std::make_unique<Replicator>(
        loop_, peers_, health_, pointers_,
        Replicator::Options{
            .self_id = "node-0",
            .copies = copies,
            .rate = {.bytes_per_second = blocks_per_second * kBlockBytes},
            .call_bytes = 4 * kBlockBytes,
            .sweep_nanos = 5 * kSimSecond,
            .rest_nanos = 60 * kSimSecond,
            .held =
                [this](std::uint64_t hash) {
                  return peers_.run_of.contains(hash) && Here(peers_.run_of[hash], 0)
                             ? SketchOf(peers_.run_of[hash], kSequences, true)
                             : RunSketch();
                },
            .bytes =
                [this](const Fingerprint&, const BlockKey& key) {
                  return peers_.here.contains(std::string(key.view())) ? kBlockBytes : 0;
                }});
  }
  void SetView(std::vector<Member> members) {
    view_ = *ClusterView::Make(std::move(members), ++views_, 10, nullptr);
    health_.Keep(*view_);
    pointers_.Keep(*view_);
    if (replicator_ != nullptr) replicator_->SetView(view_);
  }
  // Of the blocks of these sequences of a run; `here`: those that this node has.
  RunSketch SketchOf(std::size_t run, const std::set<std::size_t>& sequences, bool here) const {
    std::vector<std::pair<std::size_t, std::uint64_t>> hashes;
    for (const auto& [place, key] : RunPeers::BlocksOf(run, sequences)) {
      if (here && !peers_.here.contains(std::string(key.view()))) continue;
      hashes.emplace_back(place, KeyHash(kFingerprint, key));
    }
    return SketchOfBlocks(hashes);
  }
  bool Here(std::size_t run, std::size_t place) const {
    return peers_.here.contains(std::string(Key(run, place).view()));
  }
  void Announced(std::size_t node, const std::vector<std::size_t>& runs) {
    std::vector<Announcement> list;
    for (const std::size_t run : runs) {
      peers_.run_of[HashOf(run)] = run;
      peers_.scripts[Node(node).id].runs.insert(run);
      list.push_back({HashOf(run), SketchOf(run, peers_.scripts[Node(node).id].sequences, false)});
    }
    pointers_.Announced(Node(node), list);
    if (node != 0) replicator_->Announced(list);
  }
  std::string HomeOf(std::size_t run, std::size_t rank) const {
    return view_->members()[view_->HomesOf(kFingerprint, Key(run, 0))[rank]].id;
  }
  // The first runs for which this node has that rank and `holder` another one, above it or not.
  std::vector<std::size_t> RunsWhere(std::size_t count,
                                     const std::function<bool(std::size_t)>& fits) const {
    std::vector<std::size_t> runs;
    for (std::size_t run = 0; runs.size() < count; ++run) {
      if (fits(run)) runs.push_back(run);
    }
    return runs;
  }
  // Of node-1, which has a run of this node whose list has no end: what it says of that, and said.
  Announcement AnnounceEndless(std::uint32_t blocks) {
    Make(1);
    SetView({Node(0), Node(1)});
    const auto mine = RunsWhere(1, [&](std::size_t run) { return HomeOf(run, 0) == "node-0"; });
    peers_.scripts["node-1"].sequences = kSequences;
    peers_.scripts["node-1"].endless = true;
    Announced(1, mine);
    Announcement said = {HashOf(mine[0]), SketchOf(mine[0], kSequences, false)};
    said.sketch.blocks = blocks;
    said.sketch.sum ^= 1;
    pointers_.Announced(Node(1), {said});
    return said;
  }
  void Run(std::int64_t nanos) {
    events_.RunUntil(events_.now() + nanos, [] {});
  }
  std::size_t Copied(const std::vector<std::size_t>& runs) const {
    return static_cast<std::size_t>(std::count_if(
        runs.begin(), runs.end(), [&](std::size_t run) { return Here(run, kBlocks - 1); }));
  }

  SimEvents events_{1, false};
  SimLoop loop_{events_, kSimSecond, 0};
  RunPeers peers_{loop_};
  PeerHealth health_{loop_.clock()};
  PointerTable pointers_{loop_.clock(), {}};
  std::uint64_t views_ = 0;
  std::shared_ptr<const ClusterView> view_;
  std::unique_ptr<Replicator> replicator_;
};

}  // namespace kvmill

#endif  // KVMILL_TESTS_CLUSTER_REPLICATION_FIXTURE_H_
