// The parts that keep copies, each with peers that do exactly what the test says; cluster_sim has
// them all together while everything goes wrong.
#include <gmock/gmock.h>

#include <map>
#include <optional>
#include <set>

#include "absl/strings/str_cat.h"
#include "service/cluster/announcer.h"
#include "service/cluster/handover.h"
#include "service/cluster/hot_runs.h"
#include "service/cluster/replicator.h"
#include "tests/cluster/sim_loop.h"
#include "tests/cluster/sketches.h"

namespace kvmill {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr std::uint64_t kBlockBytes = 1000;
constexpr Fingerprint kFingerprint{};

Member Node(std::size_t i) {
  Member member;
  member.id = absl::StrCat("node-", i);
  member.incarnation = "first life";
  member.address = absl::StrCat(i);
  member.capacity_bytes = 1 << 20;
  return member;
}

// Block `place` of run `run`.
BlockKey Key(std::size_t run, std::size_t place) {
  return *BlockKey::FromBytes(absl::StrCat("run-", run, "-", place));
}
std::uint64_t HashOf(std::size_t run) { return AnchorHash(kFingerprint, Key(run, 0)); }
// The first `count` blocks of a run, said.
Announcement Said(std::size_t run, std::size_t count) {
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

TEST_F(ReplicationTest, AHomeCopiesWhatItLacks) {
  Make(1);
  SetView({Node(0), Node(1), Node(2), Node(3)});
  const auto mine = RunsWhere(20, [&](std::size_t run) { return HomeOf(run, 0) == "node-0"; });
  const auto others = RunsWhere(20, [&](std::size_t run) {
    return HomeOf(run, 0) != "node-0" && HomeOf(run, 1) != "node-0";
  });
  Announced(1, mine);
  Announced(1, others);
  Run(kSimSecond);
  EXPECT_EQ(Copied(mine), 20u);
  EXPECT_EQ(Copied(others), 0u);
  EXPECT_EQ(peers_.pulled_blocks, 20 * kBlocks);
  EXPECT_THAT(peers_.listed, ElementsAre("node-1 20")) << "one question for all";
  EXPECT_EQ(replicator_->stats().copied_blocks, 20 * kBlocks);
  EXPECT_EQ(replicator_->stats().copied_bytes, 20 * kBlocks * kBlockBytes);
  EXPECT_EQ(replicator_->queued() + replicator_->jobs(), 0u);
  // Said again: nothing to do.
  Announced(1, mine);
  Run(10 * kSimSecond);
  EXPECT_THAT(peers_.listed, SizeIs(1));
}

TEST_F(ReplicationTest, WithoutCopiesAHomeOnlyPoints) {
  Make(0);
  SetView({Node(0), Node(1)});
  Announced(1, RunsWhere(20, [&](std::size_t run) { return HomeOf(run, 0) == "node-0"; }));
  Run(10 * kSimSecond);
  EXPECT_THAT(peers_.listed, IsEmpty());
}

TEST_F(ReplicationTest, TheNextHomeCopiesWhenNobodyOutsideHolds) {
  Make(1);
  SetView({Node(0), Node(1), Node(2)});
  const auto second = RunsWhere(10, [&](std::size_t run) {
    return HomeOf(run, 0) == "node-1" && HomeOf(run, 1) == "node-0";
  });
  // Node 2 is no home, and its copy is the second one besides that of node 1.
  Announced(2, second);
  Announced(1, second);
  Run(10 * kSimSecond);
  EXPECT_EQ(Copied(second), 0u);
  // It dies: two copies are wanted again.
  SetView({Node(0), Node(1)});
  Run(kSimSecond);
  EXPECT_EQ(Copied(second), 10u);
  EXPECT_THAT(peers_.listed, ElementsAre("node-1 10"));
}

TEST_F(ReplicationTest, AHolderThatDrainsDoesNotCount) {
  Make(1);
  Member draining = Node(2);
  draining.state = MemberState::kDraining;
  SetView({Node(0), Node(1), draining});
  const auto second = RunsWhere(5, [&](std::size_t run) { return HomeOf(run, 1) == "node-0"; });
  Announced(2, second);
  Run(kSimSecond);
  EXPECT_EQ(Copied(second), 5u);
  EXPECT_THAT(peers_.listed, ElementsAre("node-2 5")) << "who drains still answers";
}

TEST_F(ReplicationTest, TheRateIsKeptAndSaysHowLongItTakes) {
  Make(1, 50);
  SetView({Node(0), Node(1)});
  const auto mine = RunsWhere(20, [&](std::size_t run) { return HomeOf(run, 0) == "node-0"; });
  peers_.scripts["node-1"].claims = 1;  // That a block has a byte is not believed for long.
  Announced(1, mine);
  EXPECT_NEAR(static_cast<double>(replicator_->rate().NanosFor(200 * kBlockBytes)), 4e9, 1e8);
  Run(2 * kSimSecond);
  // Fifty a second, and the first run at once, which the peer made smaller than it was.
  EXPECT_LE(peers_.pulled_blocks, 2u * 50 + kBlocks + 5);
  EXPECT_GE(peers_.pulled_blocks, 2u * 50 - kBlocks);
  Run(2 * kSimSecond + 200 * kSimMs);
  EXPECT_EQ(Copied(mine), 20u);
}

TEST_F(ReplicationTest, APeerThatSaysBlocksAreHugeStopsNothing) {
  Make(1, 50);
  SetView({Node(0), Node(1), Node(2)});
  const auto mine = RunsWhere(2, [&](std::size_t run) { return HomeOf(run, 0) == "node-0"; });
  peers_.scripts["node-1"].claims = std::uint64_t{1} << 58;
  Announced(1, {mine[0]});
  Run(3 * kSimSecond);
  EXPECT_EQ(Copied(mine), 1u);
  peers_.scripts["node-1"].silent = true;
  Announced(1, {mine[1]});
  Run(30 * kSimSecond);
  Announced(2, {mine[1]});
  Run(3 * kSimSecond);
  EXPECT_EQ(Copied(mine), 2u);
}

TEST_F(ReplicationTest, AnotherHolderIsAskedWhenOneFailsOrLies) {
  Make(1);
  SetView({Node(0), Node(1), Node(2), Node(3)});
  const auto mine = RunsWhere(6, [&](std::size_t run) { return HomeOf(run, 0) == "node-0"; });
  peers_.scripts["node-1"].silent = true;
  peers_.scripts["node-2"].wrong_anchor = true;
  for (const std::size_t node : {3, 2, 1}) Announced(node, mine);  // Asked in the other order.
  Run(20 * kSimSecond);
  EXPECT_EQ(Copied(mine), 6u);
  EXPECT_TRUE(health_.paused_count() > 0);
  for (const std::string& call : peers_.pulled) EXPECT_THAT(call, ::testing::StartsWith("node-3"));
  EXPECT_EQ(replicator_->queued() + replicator_->jobs(), 0u);
}

TEST_F(ReplicationTest, BytesThatAreWrongOrDoNotFitEndInPeace) {
  Make(1);
  SetView({Node(0), Node(1)});
  const auto mine = RunsWhere(6, [&](std::size_t run) { return HomeOf(run, 0) == "node-0"; });
  peers_.scripts["node-1"].pull_status = absl::DataLossError("");
  Announced(1, mine);
  Run(kSimSecond);
  EXPECT_LE(peers_.pulled.size(), 4u) << "it is left alone";
  EXPECT_EQ(Copied(mine), 0u);
  peers_.scripts["node-1"].pull_status = absl::ResourceExhaustedError("");
  Run(60 * kSimSecond);
  EXPECT_LE(peers_.pulled.size(), 80u) << "once a second";
  peers_.scripts["node-1"].pull_status = absl::OkStatus();
  Run(10 * kSimSecond);
  EXPECT_EQ(Copied(mine), 6u);
}

TEST_F(ReplicationTest, WhatWasEvictedHereRests) {
  Make(1);
  SetView({Node(0), Node(1)});
  const auto mine = RunsWhere(2, [&](std::size_t run) { return HomeOf(run, 0) == "node-0"; });
  Announced(1, mine);
  Run(kSimSecond);
  ASSERT_EQ(Copied(mine), 2u);
  peers_.here.erase(std::string(Key(mine[0], kBlocks - 1).view()));
  replicator_->Evicted(HashOf(mine[0]), KeyHash(kFingerprint, Key(mine[0], kBlocks - 1)));
  Announced(1, mine);
  Run(50 * kSimSecond);
  EXPECT_EQ(Copied(mine), 1u);
  Run(20 * kSimSecond);
  EXPECT_EQ(Copied(mine), 2u);
  EXPECT_EQ(peers_.pulled_blocks, 2 * kBlocks + 1) << "and only what is missing comes";
}

// Sequences that part within a run have as many places: what counts is which blocks there are.
TEST_F(ReplicationTest, BlocksOfSequencesThatPartAreCopiedFromWhoeverHasThem) {
  Make(1);
  SetView({Node(0), Node(1), Node(2), Node(3)});
  const auto mine = RunsWhere(4, [&](std::size_t run) { return HomeOf(run, 0) == "node-0"; });
  peers_.scripts["node-1"].sequences = {0};
  peers_.scripts["node-2"].sequences = {1};
  peers_.scripts["node-3"].sequences = {1, 2, 3};
  Announced(1, mine);
  Run(kSimSecond);
  for (const std::size_t run : mine) EXPECT_EQ(SketchOf(run, kSequences, true).blocks, kBlocks);
  Announced(2, mine);
  Run(kSimSecond);
  for (const std::size_t run : mine) {
    EXPECT_EQ(SketchOf(run, kSequences, true), SketchOf(run, {0, 1}, false));
  }
  // Its list takes two answers.
  Announced(3, mine);
  Run(kSimSecond);
  for (const std::size_t run : mine) {
    EXPECT_EQ(SketchOf(run, kSequences, true), SketchOf(run, kSequences, false));
  }
  EXPECT_EQ(peers_.pulled_blocks, mine.size() * (kBlocks + 3 * 6)) << "each once";
  EXPECT_EQ(replicator_->queued() + replicator_->jobs(), 0u);
  // That nothing is missing is known for a while.
  const std::size_t listed = peers_.listed.size();
  for (const std::size_t node : {1, 2, 3}) Announced(node, mine);
  Run(20 * kSimSecond);
  EXPECT_LE(peers_.listed.size(), listed + 3);
  const std::size_t once = peers_.listed.size();
  Run(30 * kSimSecond);
  EXPECT_EQ(peers_.listed.size(), once);
  EXPECT_EQ(peers_.pulled_blocks, mine.size() * (kBlocks + 3 * 6));
}

TEST_F(ReplicationTest, ANodeThatLeavesKeepsNothingBackOfSequencesThatPart) {
  Make(0);
  Member leaving = Node(1);
  leaving.state = MemberState::kDraining;
  SetView({Node(0), leaving, Node(2)});
  peers_.scripts["node-1"].sequences = {0, 1, 2};
  peers_.scripts["node-2"].sequences = {1};
  Announced(1, {1});
  Announced(2, {1});  // It stays, and has as many places.
  const std::vector<Announcement> all = {{HashOf(1), SketchOf(1, {0, 1, 2}, false)}};
  EXPECT_THAT(replicator_->HandedOver(leaving, all), ElementsAre(4)) << "those of all";
  Run(kSimSecond);
  EXPECT_THAT(replicator_->HandedOver(leaving, all), ElementsAre(10));
  EXPECT_EQ(SketchOf(1, kSequences, true), SketchOf(1, {0, 1, 2}, false));
  // One block of those that cannot be told apart is evicted: not all is safe any more.
  const BlockKey gone = RunPeers::BlocksOf(1, {1}).back().second;
  peers_.here.erase(std::string(gone.view()));
  replicator_->Evicted(HashOf(1), KeyHash(kFingerprint, gone));
  EXPECT_THAT(replicator_->HandedOver(leaving, all), ElementsAre(4));
  Run(kSimSecond);
  EXPECT_THAT(replicator_->HandedOver(leaving, all), ElementsAre(10));
}

TEST_F(ReplicationTest, AListWithoutAnEndEnds) {
  Make(1);
  SetView({Node(0), Node(1)});
  const auto mine = RunsWhere(1, [&](std::size_t run) { return HomeOf(run, 0) == "node-0"; });
  peers_.scripts["node-1"].sequences = {0, 1, 2, 3};
  peers_.scripts["node-1"].endless = true;
  Announced(1, mine);
  Announcement said = {HashOf(mine[0]), SketchOf(mine[0], kSequences, false)};
  said.sketch.blocks = kRunListMax - 1;
  said.sketch.sum ^= 1;
  pointers_.Announced(Node(1), {said});
  for (int i = 0; i < 600 && health_.paused_count() == 0; ++i) Run(100 * kSimMs);
  EXPECT_EQ(health_.paused_count(), 1u) << "it lied";
  EXPECT_GT(peers_.made_up, kRunListMax - 2 * kListKeysMax);
  EXPECT_LE(peers_.made_up, 2 * kRunListMax);
}

// Nobody can announce more: thousands of sequences that part behind one short prompt.
TEST_F(ReplicationTest, ARunOfMoreBlocksThanAreAnnouncedIsNoLie) {
  Make(1);
  SetView({Node(0), Node(1)});
  const auto mine = RunsWhere(1, [&](std::size_t run) { return HomeOf(run, 0) == "node-0"; });
  peers_.scripts["node-1"].sequences = {0, 1, 2, 3};
  peers_.scripts["node-1"].endless = true;
  Announced(1, mine);
  Announcement said = {HashOf(mine[0]), SketchOf(mine[0], kSequences, false)};
  said.sketch.blocks = kRunListMax;
  said.sketch.sum ^= 1;
  pointers_.Announced(Node(1), {said});
  for (int i = 0; i < 600 && replicator_->queued() > 0; ++i) Run(100 * kSimMs);
  EXPECT_EQ(replicator_->queued(), 0u);
  EXPECT_EQ(health_.paused_count(), 0u);
  const std::uint64_t looked_at = peers_.made_up;
  EXPECT_GT(looked_at, kRunListMax - 2 * kListKeysMax);
  EXPECT_LE(looked_at, kRunListMax + 2 * kListKeysMax);
  Run(20 * kSimSecond);
  EXPECT_EQ(peers_.made_up, looked_at) << "it is not listed again at once";
}

TEST_F(ReplicationTest, ARunThatGrowsAllTheTimeIsCopiedToItsEnd) {
  Make(1);
  SetView({Node(0), Node(1)});
  const auto mine = RunsWhere(1, [&](std::size_t run) { return HomeOf(run, 0) == "node-0"; });
  peers_.scripts["node-1"].answer_nanos = 100 * kSimMs;
  Announced(1, mine);
  Announcement said = {HashOf(mine[0]), SketchOf(mine[0], {0}, false)};
  std::size_t lists = 0;
  // Each time it is listed it says something else before the list is there.
  for (std::size_t pass = 0; pass < Replicator::kTriesMax; ++pass) {
    lists = peers_.listed.size();
    for (int i = 0; i < 100 && peers_.listed.size() == lists; ++i) Run(10 * kSimMs);
    ASSERT_EQ(peers_.listed.size(), lists + 1);
    said.sketch.sum ^= std::uint64_t{1} << pass;
    pointers_.Announced(Node(1), {said});
    replicator_->Announced({said});
  }
  lists = peers_.listed.size();
  Run(kSimSecond);
  EXPECT_EQ(peers_.listed.size(), lists + 1) << "before the next sweep";
  EXPECT_EQ(replicator_->queued(), 0u);
}

TEST_F(ReplicationTest, AQueueThatIsFullForgetsNothing) {
  Make(1);
  SetView({Node(0), Node(1)});
  const auto mine = RunsWhere(Replicator::kQueueMax + 500,
                              [&](std::size_t run) { return HomeOf(run, 0) == "node-0"; });
  Announced(1, mine);
  EXPECT_EQ(replicator_->queued(), Replicator::kQueueMax);
  Run(60 * kSimSecond);
  EXPECT_EQ(Copied(mine), mine.size());
}

TEST_F(ReplicationTest, JobsOfAMemberThatIsGoneEnd) {
  Make(1);
  SetView({Node(0), Node(1), Node(2)});
  const auto mine = RunsWhere(5, [&](std::size_t run) { return HomeOf(run, 0) == "node-0"; });
  peers_.scripts["node-1"].silent = true;
  Announced(1, mine);
  Run(100 * kSimMs);
  EXPECT_EQ(replicator_->jobs(), 1u);
  SetView({Node(0), Node(2)});
  EXPECT_EQ(peers_.open, 0);
  Run(kSimSecond);
  EXPECT_EQ(replicator_->queued() + replicator_->jobs(), 0u);
}

TEST_F(ReplicationTest, RunsThatManyAskForAreHot) {
  HotRuns hot(loop_.clock());
  EXPECT_FALSE(hot.Asked(7, "a"));
  EXPECT_FALSE(hot.Asked(7, "b"));
  EXPECT_FALSE(hot.Asked(7, "a")) << "different ones count";
  EXPECT_FALSE(hot.Asked(8, "c"));
  EXPECT_TRUE(hot.Asked(7, "c"));
  EXPECT_FALSE(hot.Asked(7, "d")) << "once";
  Run(HotRuns::kWindowNanos);
  EXPECT_FALSE(hot.Asked(7, "a"));
  EXPECT_FALSE(hot.Asked(7, "b"));
  EXPECT_TRUE(hot.Asked(7, "c"));
  for (std::uint64_t i = 100; i < 100 + 2 * HotRuns::kRunsMax; ++i) hot.Asked(i, "a");
  EXPECT_EQ(hot.runs(), HotRuns::kRunsMax);

  // The home copies it, whatever R is.
  Make(0);
  SetView({Node(0), Node(1)});
  const auto mine = RunsWhere(2, [&](std::size_t run) { return HomeOf(run, 0) == "node-0"; });
  Announced(1, mine);
  replicator_->Hot(HashOf(mine[0]));
  replicator_->Hot(12345);
  Run(kSimSecond);
  EXPECT_TRUE(Here(mine[0], 9));
  EXPECT_FALSE(Here(mine[1], 0));
}

TEST_F(ReplicationTest, AHomeTakesOverWhatNobodyElseHasWhoStays) {
  Make(0);
  Member leaving = Node(1), leaves_too = Node(3);
  leaving.state = leaves_too.state = MemberState::kDraining;
  SetView({Node(0), leaving, Node(2), leaves_too});
  Announced(1, {1, 2, 3});
  Announced(2, {2});  // It stays, and has it.
  Announced(3, {3});  // It has it, and goes, too.
  const std::vector<Announcement> all = {Said(1, 10), Said(2, 10), Said(3, 10)};
  EXPECT_THAT(replicator_->HandedOver(leaving, all), ElementsAre(0, 10, 0));
  Run(kSimSecond);
  EXPECT_THAT(replicator_->HandedOver(leaving, all), ElementsAre(10, 10, 10));
  EXPECT_EQ(peers_.pulled_blocks, 2 * kBlocks);
  // A node that drains itself promises nothing.
  Member self = Node(0);
  self.state = MemberState::kDraining;
  SetView({self, leaving, Node(2), leaves_too});
  EXPECT_THAT(replicator_->HandedOver(leaving, all), ElementsAre(0, 10, 0));
}

TEST_F(ReplicationTest, WhatIsHandedOverComesFirstAndInItsOrder) {
  Make(1, 100);
  Member leaving = Node(1);
  leaving.state = MemberState::kDraining;
  SetView({Node(0), leaving, Node(2)});
  // Copies that this node owes anyway wait.
  const std::vector<std::size_t> owed =
      RunsWhere(40, [&](std::size_t run) { return run >= 1000 && HomeOf(run, 0) == "node-0"; });
  Announced(2, owed);
  std::vector<std::size_t> runs;
  std::vector<Announcement> list;
  for (std::size_t i = 0; i < 20; ++i) {
    runs.push_back(20 - i);
    list.push_back(Said(runs.back(), kBlocks));
  }
  for (const std::size_t run : runs) {
    peers_.run_of[HashOf(run)] = run;
    peers_.scripts["node-1"].runs.insert(run);
  }
  pointers_.Announced(leaving, list);
  replicator_->HandedOver(leaving, list);
  for (std::size_t done = 0; done < runs.size();) {
    Run(10 * kSimMs);
    while (done < runs.size() && Here(runs[done], kBlocks - 1)) ++done;
    // Whatever has come so far is the beginning of the list, and a run that is under way.
    for (std::size_t i = done + 1; i < runs.size(); ++i) {
      ASSERT_FALSE(Here(runs[i], 0)) << i << " before " << done;
    }
    ASSERT_LT(events_.now(), 60 * kSimSecond);
  }
  EXPECT_LE(Copied(owed), 12u) << "of the node that does not leave, at the same time";
}

// One that leaves does not answer, and has more than the queue takes; the other one's runs, and one
// that both have, come all the same.
TEST_F(ReplicationTest, ANodeThatLeavesDoesNotWaitForAnotherThatIsStuck) {
  Make(0);
  Member stuck = Node(1), other = Node(2);
  stuck.state = other.state = MemberState::kDraining;
  SetView({Node(0), stuck, other});
  const auto hand_over = [&](const Member& from, std::size_t first, std::size_t count) {
    std::vector<Announcement> list;
    for (std::size_t run = first; run < first + count; ++run) {
      peers_.run_of[HashOf(run)] = run;
      peers_.scripts[from.id].runs.insert(run);
      list.push_back(Said(run, kBlocks));
    }
    pointers_.Announced(from, list);
    replicator_->HandedOver(from, list);
  };
  peers_.scripts["node-1"].silent = true;
  for (std::size_t run = 0; run < 40'000; run += 1000) hand_over(stuck, run, 1000);
  EXPECT_EQ(replicator_->queued(), 2 * Replicator::kQueueMax);
  Run(5 * kSimSecond);  // It is known to be silent, and asked now and then.
  EXPECT_EQ(peers_.pulled_blocks, 0u);
  hand_over(other, 50'000, 20);
  hand_over(other, 30'000, 1);
  std::vector<std::size_t> runs = {30'000};
  for (std::size_t run = 50'000; run < 50'020; ++run) runs.push_back(run);
  for (int i = 0; i < 20 && Copied(runs) < runs.size(); ++i) Run(100 * kSimMs);
  EXPECT_EQ(Copied(runs), runs.size());
  EXPECT_EQ(peers_.pulled_blocks, runs.size() * kBlocks) << "each once";
  // It answers again: what it has is in the queue still, or asked for again.
  peers_.scripts["node-1"].silent = false;
  for (std::size_t i = 0; i < 100 && !(Here(0, 9) && Here(999, 9)); ++i) {
    hand_over(stuck, 0, 1000);
    Run(2 * kSimSecond);
  }
  EXPECT_TRUE(Here(0, 9) && Here(999, 9));
}

TEST_F(ReplicationTest, AHandoverEndsWhenAllIsSafeOrTheTimeIsOver) {
  const auto hand_over = [&](std::int64_t limit) {
    Handover handover(loop_, peers_, health_, {.self_id = "node-0"});
    handover.SetView(view_);
    handover.SetMembers(view_->members());
    std::optional<Handover::Report> report;
    std::vector<Announcement> runs;
    for (std::size_t run = 0; run < 2000; ++run) runs.push_back(Said(run, 10));
    runs.push_back({1, {}});
    const std::int64_t start = events_.now();
    handover.Start(runs, loop_.clock().MonotonicNanos() + limit,
                   [&](const auto& r) { report = r; });
    EXPECT_FALSE(report.has_value());
    EXPECT_EQ(handover.report().blocks_left, 20'000u);
    while (!report.has_value() && events_.now() <= start + limit) {
      Run(kSimMs);
      EXPECT_EQ(handover.report().blocks + handover.report().blocks_left, 20'000u) << "as it goes";
    }
    EXPECT_TRUE(report.has_value());
    EXPECT_FALSE(handover.running());
    EXPECT_EQ(peers_.open, 0);
    return report.value_or(Handover::Report());
  };
  SetView({Node(0), Node(1), Node(2)});
  peers_.scripts["node-1"].safe = 10;
  peers_.scripts["node-2"].safe = 9;
  const Handover::Report half = hand_over(3 * kSimSecond);
  EXPECT_GT(half.runs, 0u);
  EXPECT_GT(half.runs_left, 0u);
  EXPECT_EQ(half.runs + half.runs_left, 2000u);
  EXPECT_EQ(half.blocks, 10 * half.runs);
  EXPECT_EQ(half.blocks_left, 10 * half.runs_left);
  EXPECT_LE(peers_.handed_over["node-2"], 12 * half.runs_left) << "asked less and less often";

  peers_.scripts["node-2"].safe = 32;
  EXPECT_EQ(hand_over(3 * kSimSecond).blocks_left, 0u);
  // A home that does not answer is left alone, and the next one takes over.
  peers_.scripts["node-2"].silent = true;
  EXPECT_EQ(hand_over(10 * kSimSecond).blocks_left, 0u);
  SetView({Node(0)});
  const std::int64_t before = events_.now();
  EXPECT_EQ(hand_over(3 * kSimSecond).runs_left, 2000u) << "there is nobody";
  EXPECT_LT(events_.now() - before, kSimSecond);
}

TEST_F(ReplicationTest, ARunOfWhichTwoHomesSayThatItIsSafeIsCountedOnce) {
  Handover handover(loop_, peers_, health_, {.self_id = "node-0"});
  const auto see = [&](const std::vector<Member>& members) {
    SetView(members);
    handover.SetView(view_);
    handover.SetMembers(view_->members());
  };
  see({Node(0), Node(1)});
  for (const char* id : {"node-1", "node-2"}) peers_.scripts[id].safe = 10;
  peers_.scripts["node-1"].answer_nanos = 200 * kSimMs;
  std::optional<Handover::Report> report;
  std::vector<Announcement> runs;
  for (std::size_t run = 0; run < 6000; ++run) runs.push_back(Said(run, 10));
  handover.Start(runs, loop_.clock().MonotonicNanos() + 100 * kSimSecond,
                 [&](const auto& r) { report = r; });
  for (int i = 0; i < 1000 && peers_.handed_over["node-1"] == 0; ++i) Run(kSimMs);
  EXPECT_EQ(peers_.handed_over["node-1"], 1024u);
  see({Node(0), Node(1), Node(2)});  // Now the home of some of those.
  while (!report.has_value()) {
    Run(kSimMs);
    ASSERT_LE(handover.report().blocks_left, 60'000u);
  }
  EXPECT_GT(peers_.handed_over["node-1"] + peers_.handed_over["node-2"], 6000u);
  EXPECT_EQ(report->runs, 6000u);
  EXPECT_EQ(report->blocks, 60'000u);
  EXPECT_EQ(report->blocks_left + report->runs_left, 0u);
}

TEST_F(ReplicationTest, HomesOfAllRanksAreToldAndFormerOnesForget) {
  Announcer announcer(loop_, peers_, health_,
                      {.self_id = "self",
                       .copies = 1,
                       .tick_nanos = 10 * kSimMs,
                       .repeat_nanos = 1000 * kSimSecond,
                       .withdraw_nanos = 3 * kSimSecond});
  SetView({Node(0), Node(1), Node(2)});
  announcer.SetView(view_);
  for (std::size_t run = 0; run < 300; ++run) announcer.Set(Said(run, 10));
  Run(kSimSecond);
  EXPECT_EQ(announcer.untold(), 0u);
  EXPECT_EQ(peers_.announcements_heard, 600u);
  const auto right = [&] {
    std::size_t pointers = 0;
    for (const auto& [id, known] : peers_.announced) pointers += known.size();
    for (std::size_t run = 0; run < 300; ++run) {
      for (const std::size_t rank : {0, 1}) {
        if (!peers_.announced[HomeOf(run, rank)].contains(HashOf(run))) return false;
      }
    }
    return pointers == 600u;
  };
  EXPECT_TRUE(right());
  // A node comes: only what it is home of is told, and taken back elsewhere a while later.
  SetView({Node(0), Node(1), Node(2), Node(3)});
  announcer.SetView(view_);
  Run(kSimSecond);
  const std::size_t moved = peers_.announced["node-3"].size();
  EXPECT_GT(moved, 0u);
  EXPECT_EQ(peers_.announcements_heard, 600 + moved);
  EXPECT_FALSE(right());
  Run(5 * kSimSecond);
  EXPECT_TRUE(right());
  EXPECT_EQ(peers_.announcements_heard, 600 + 2 * moved);
}

TEST_F(ReplicationTest, DigestsFindWhatAHomeDoesNotKnow) {
  Announcer announcer(loop_, peers_, health_,
                      {.self_id = "self",
                       .copies = 1,
                       .tick_nanos = 10 * kSimMs,
                       .repeat_nanos = 1000 * kSimSecond,
                       .compare_nanos = 10 * kSimSecond,
                       .withdraw_nanos = 2 * kSimSecond});
  SetView({Node(0), Node(1), Node(2)});
  announcer.SetView(view_);
  for (std::size_t run = 0; run < 300; ++run) announcer.Set(Said(run, 10));
  Run(10 * kSimSecond);
  for (std::size_t run = 0; run < 50; ++run) announcer.Set(Said(run, 0));
  for (std::size_t run = 50; run < 90; ++run) announcer.Set(Said(run, 4));
  Run(10 * kSimSecond);
  SetView({Node(0), Node(1), Node(3)});
  announcer.SetView(view_);
  Run(60 * kSimSecond);
  EXPECT_EQ(announcer.differed(), 0u) << "they agree, whatever changed";
  EXPECT_GE(peers_.compared["node-1"], 5u);

  // A home lost some, and believes in one that is none.
  const auto before = peers_.announced["node-1"];
  peers_.announced["node-1"].erase(peers_.announced["node-1"].begin());
  peers_.announced["node-1"][std::uint64_t{0xff} << 56] = Places(3);
  Run(11 * kSimSecond);
  EXPECT_EQ(announcer.differed(), 2u);
  EXPECT_EQ(peers_.announced["node-1"], before);
  Run(60 * kSimSecond);
  EXPECT_EQ(announcer.differed(), 2u);

  // One that never agrees is asked less and less often.
  peers_.scripts["node-1"].differ = 1;
  const std::size_t compared = peers_.compared["node-1"];
  Run(700 * kSimSecond);
  EXPECT_LE(peers_.compared["node-1"], compared + 7);
}

TEST_F(ReplicationTest, APointerTableKnowsItsDigests) {
  Digests said = {};
  const auto say = [&](std::size_t run, std::size_t before, std::size_t now) {
    said[DigestOf(HashOf(run))] ^= DigestWord(Said(run, before)) ^ DigestWord(Said(run, now));
    pointers_.Announced(Node(1), {Said(run, now)});
  };
  SetView({Node(0), Node(1), Node(2)});
  for (std::size_t run = 0; run < 200; ++run) say(run, 0, 5);
  for (std::size_t run = 0; run < 200; run += 3) say(run, 5, 7);
  for (std::size_t run = 0; run < 200; run += 5) say(run, run % 3 == 0 ? 7 : 5, 0);
  pointers_.Announced(Node(2), {Said(1, 9)});
  EXPECT_EQ(pointers_.Compare(Node(1), said), 0u);
  EXPECT_EQ(pointers_.HoldersOf(HashOf(1))[0].sketch, Said(1, 9).sketch);
  EXPECT_EQ(pointers_.HoldersOf(HashOf(3))[0].sketch, Said(3, 7).sketch);
  // As many blocks, and other ones.
  Announcement others = Said(1, 5);
  others.sketch.sum ^= 1;
  pointers_.Announced(Node(1), {others});
  EXPECT_EQ(pointers_.Compare(Node(1), said), std::uint64_t{1} << DigestOf(HashOf(1)));
  pointers_.Announced(Node(1), {Said(1, 5)});
  said[DigestOf(HashOf(1))] = DigestWord(Said(1, 5));
  EXPECT_EQ(pointers_.Compare(Node(1), said), 0u);

  Digests other = said;
  other[DigestOf(HashOf(1))] ^= 1;
  EXPECT_EQ(pointers_.Compare(Node(1), other), std::uint64_t{1} << DigestOf(HashOf(1)));
  EXPECT_THAT(pointers_.HoldersOf(HashOf(1)), SizeIs(2)) << "believed until node 1 told again";
  Run(PointerTable::kForgetNanos);
  EXPECT_THAT(pointers_.HoldersOf(HashOf(1)), SizeIs(1)) << "which it did not";
  EXPECT_EQ(pointers_.HoldersOf(HashOf(1))[0].id, "node-2");
  said[DigestOf(HashOf(1))] = 0;
  EXPECT_EQ(pointers_.Compare(Node(1), said), 0u);
  say(1, 0, 5);
  EXPECT_EQ(pointers_.Compare(Node(1), said), 0u);
  EXPECT_THAT(pointers_.HoldersOf(HashOf(1)), SizeIs(2));

  // docs/formats.md
  EXPECT_EQ(DigestWord(0x0123456789abcdef, 32, 0xfedcba9876543210), 0xcd5e6250bffbbb37u);
  EXPECT_EQ(DigestWord(0x0123456789abcdef, 0, 0), 0u);
}

TEST(ValidRunsTest, OnlyWhatWasAskedForAndCanBe) {
  HeldRun good{.anchor_hash = HashOf(1),
               .fingerprint = kFingerprint,
               .blocks = {.anchor = Key(1, 0), .keys = {Key(1, 0), Key(1, 1)}, .places = {0, 1}},
               .bytes = 2000};
  const std::vector<RunList> asked = {{HashOf(1)}, {HashOf(2)}};
  EXPECT_TRUE(ValidRuns(asked, {}));
  EXPECT_TRUE(ValidRuns(asked, {good}));
  EXPECT_FALSE(ValidRuns(asked, {good, good}));
  EXPECT_FALSE(ValidRuns({{HashOf(2)}}, {good}));
  // All were skipped: there are no more.
  HeldRun end = good;
  end.blocks.keys.clear();
  end.blocks.places.clear();
  EXPECT_TRUE(ValidRuns({{HashOf(1), 1, 77}}, {end}));
  end.more = true;
  EXPECT_FALSE(ValidRuns({{HashOf(1), 1, 77}}, {end}));
  const auto refused = [&](const std::function<void(HeldRun*)>& change) {
    HeldRun run = good;
    change(&run);
    return !ValidRuns(asked, {run});
  };
  EXPECT_TRUE(refused([](HeldRun* run) { run->blocks.anchor = Key(2, 0); }));
  EXPECT_TRUE(refused([](HeldRun* run) { run->blocks.anchor = BlockKey(); }));
  EXPECT_TRUE(refused([](HeldRun* run) { run->fingerprint[0] = std::byte{1}; }));
  EXPECT_TRUE(refused([](HeldRun* run) { run->blocks.keys.pop_back(); }));
  EXPECT_TRUE(refused([](HeldRun* run) { run->blocks.keys[1] = BlockKey(); }));
  EXPECT_TRUE(refused([](HeldRun* run) { run->blocks.keys[1] = run->blocks.keys[0]; }));
  EXPECT_TRUE(refused([](HeldRun* run) { run->blocks.places = {1, 0}; }));
  EXPECT_TRUE(refused([](HeldRun* run) { run->blocks.places = {1, 32}; }));
  EXPECT_TRUE(refused([](HeldRun* run) { run->bytes = 1; }));
  EXPECT_TRUE(refused([](HeldRun* run) {
    run->blocks.keys.clear();
    run->blocks.places.clear();
  }));
  EXPECT_TRUE(refused([](HeldRun* run) {
    for (std::size_t i = 2; i <= kListKeysMax; ++i) {
      run->blocks.keys.push_back(Key(1, i));
      run->blocks.places.push_back(31);
    }
    run->bytes = 1 << 20;
  }));
}

}  // namespace
}  // namespace kvmill
