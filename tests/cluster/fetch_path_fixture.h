// Peers that do exactly what the test says, and the parts of the fetch path over them.
#ifndef KVMILL_TESTS_CLUSTER_FETCH_PATH_FIXTURE_H_
#define KVMILL_TESTS_CLUSTER_FETCH_PATH_FIXTURE_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "service/cluster/cluster_view.h"
#include "service/cluster/remote_fetch.h"
#include "service/cluster/remote_lookup.h"
#include "tests/cluster/sim_loop.h"

namespace kvmill {

inline Member Node(std::size_t i) {
  Member member;
  member.id = absl::StrCat("node-", i);
  member.incarnation = "first life";
  member.address = absl::StrCat(i);
  member.capacity_bytes = 1 << 20;
  return member;
}

inline std::vector<BlockKey> Keys(std::size_t count) {
  std::vector<BlockKey> keys;
  for (std::size_t i = 0; i < count; ++i) {
    keys.push_back(*BlockKey::FromBytes(absl::StrCat("key-", i)));
  }
  return keys;
}

inline std::vector<RunQuery> Queries(const std::vector<BlockKey>& keys) {
  std::vector<RunQuery> queries;
  for (const AnchorRun& run : RunsOf(keys)) {
    const auto begin = keys.begin() + static_cast<std::ptrdiff_t>(run.first);
    queries.push_back({run.anchor, 0, {begin, begin + static_cast<std::ptrdiff_t>(run.count)}});
  }
  return queries;
}

// Peers that answer after `delay`, or not before their deadline.
class ScriptedPeers : public Peers {
 public:
  struct Script {
    std::int64_t delay = kSimMs;
    std::int64_t pull_delay = kSimMs;  // Of Pull.
    bool silent = false;
    std::set<std::string> has;                            // Keys.
    std::map<std::uint64_t, std::vector<Pointer>> knows;  // By anchor hash.
    std::size_t answers_too_many = 0;
    std::set<std::string> corrupt;  // Keys of which it has other bytes.
    std::uint64_t differs = 0;      // What it answers to Compare.
  };
  explicit ScriptedPeers(Loop& loop) : loop_(loop) {}

  CallId Locate(const Member& member, const Fingerprint& fingerprint, std::vector<RunQuery> queries,
                std::int64_t deadline, Done<std::vector<RunAnswer>> done) override {
    asked.push_back(member.id);
    const Script& script = scripts[member.id];
    std::vector<RunAnswer> answers(script.answers_too_many);
    for (const RunQuery& query : queries) {
      RunAnswer answer;
      for (std::size_t i = 0; i < query.keys.size(); ++i) {
        if (script.has.contains(std::string(query.keys[i].view()))) answer.present |= 1u << i;
      }
      const auto known = script.knows.find(AnchorHash(fingerprint, query.anchor));
      if (known != script.knows.end()) answer.pointers = known->second;
      answers.push_back(answer);
    }
    return Answer(
        script, deadline, [done, answers] { done(answers); },
        [done](const absl::Status& status) { done(status); });
  }
  CallId Pull(const Member& member, const Fingerprint&, RunKeys blocks, std::int64_t deadline,
              Done<std::vector<absl::Status>> done) override {
    asked.push_back(absl::StrCat(member.id, " for ", blocks.keys.size()));
    const Script& script = scripts[member.id];
    std::vector<absl::Status> statuses(script.answers_too_many);
    pulled = blocks;
    for (const BlockKey& key : blocks.keys) {
      const std::string name(key.view());
      statuses.push_back(script.corrupt.contains(name) ? absl::DataLossError("")
                         : script.has.contains(name)   ? absl::OkStatus()
                                                       : absl::NotFoundError(""));
    }
    Script timing = script;
    timing.delay = std::max(script.delay, script.pull_delay);
    return Answer(
        timing, deadline, [done, statuses] { done(statuses); },
        [done](const absl::Status& status) { done(status); });
  }
  CallId Announce(const Member& member, std::vector<Announcement> announcements,
                  std::int64_t deadline, std::function<void(absl::Status)> done) override {
    const Script& script = scripts[member.id];
    return Answer(
        script, deadline,
        [this, id = member.id, announcements, done] {
          announced[id].push_back(announcements);
          done(absl::OkStatus());
        },
        done);
  }
  CallId ListRuns(const Member& member, std::vector<RunList>, std::int64_t deadline,
                  Done<std::vector<HeldRun>> done) override {
    return Answer(
        scripts[member.id], deadline, [done] { done(std::vector<HeldRun>()); },
        [done](const absl::Status& status) { done(status); });
  }
  CallId HandOver(const Member& member, std::vector<Announcement> announcements,
                  std::int64_t deadline, Done<std::vector<std::uint8_t>> done) override {
    return Answer(
        scripts[member.id], deadline,
        [n = announcements.size(), done] { done(std::vector<std::uint8_t>(n, 0)); },
        [done](const absl::Status& status) { done(status); });
  }
  CallId Compare(const Member& member, const Digests& digests, std::int64_t deadline,
                 Done<std::uint64_t> done) override {
    compared[member.id].push_back(digests);
    return Answer(
        scripts[member.id], deadline, [bits = scripts[member.id].differs, done] { done(bits); },
        [done](const absl::Status& status) { done(status); });
  }
  void Cancel(CallId call) override {
    loop_.Cancel(call);
    open -= call != 0;
  }

  std::map<std::string, Script> scripts;
  std::vector<std::string> asked;
  RunKeys pulled;  // Of the last pull.
  std::map<std::string, std::vector<std::vector<Announcement>>> announced;
  std::map<std::string, std::vector<Digests>> compared;
  int open = 0;

 private:
  CallId Answer(const Script& script, std::int64_t deadline, std::function<void()> good,
                std::function<void(absl::Status)> bad) {
    ++open;
    if (script.silent) {
      return loop_.At(deadline, [this, bad] {
        --open;
        bad(absl::DeadlineExceededError(""));
      });
    }
    return loop_.After(script.delay, [this, good] {
      --open;
      good();
    });
  }
  Loop& loop_;
};

class FetchPathTest : public ::testing::Test {
 protected:
  void SetView(std::size_t nodes) {
    std::vector<Member> members;
    for (std::size_t i = 0; i < nodes; ++i) members.push_back(Node(i));
    view_ = *ClusterView::Make(members, 1, 10, nullptr);
    lookup_.SetView(view_);
  }
  void Run(std::int64_t nanos) {
    events_.RunUntil(events_.now() + nanos, [] {});
  }
  std::string HomeOf(const BlockKey& anchor, std::size_t rank) const {
    return view_->members()[view_->HomesOf(Fingerprint{}, anchor)[rank]].id;
  }
  void Give(const std::string& node, absl::Span<const BlockKey> keys) {
    for (const BlockKey& key : keys) peers_.scripts[node].has.insert(std::string(key.view()));
  }
  RemoteLookup::OpId Look(const std::vector<BlockKey>& keys, std::string hint = "",
                          std::int64_t timeout = kSimSecond) {
    found_.reset();
    return lookup_.Start({.runs = Queries(keys),
                          .hint = std::move(hint),
                          .deadline_nanos = loop_.clock().MonotonicNanos() + timeout},
                         [this](std::vector<RemoteLookup::Run> found) {
                           EXPECT_FALSE(found_.has_value()) << "twice";
                           found_ = std::move(found);
                         });
  }
  std::uint32_t Fetch(const std::vector<BlockKey>& keys,
                      std::vector<std::pair<std::size_t, std::uint32_t>> sources) {
    RemoteFetch::Request request{.anchor = BlockKey(keys[0]),
                                 .first = 3,
                                 .keys = keys,
                                 .deadline_nanos = loop_.clock().MonotonicNanos() + kSimSecond};
    for (const auto& [node, blocks] : sources) {
      request.sources.push_back({.member = Node(node), .blocks = blocks});
    }
    request.call_nanos = 300 * kSimMs;
    std::optional<std::uint32_t> have;
    fetch_.Start(std::move(request), [&](std::uint32_t bits) { have = bits; });
    EXPECT_FALSE(have.has_value());
    Run(kSimSecond);
    EXPECT_TRUE(have.has_value());
    EXPECT_EQ(fetch_.running(), 0u);
    return have.value_or(0);
  }

  SimEvents events_{1, false};
  SimLoop loop_{events_, kSimSecond, 0};
  ScriptedPeers peers_{loop_};
  PeerHealth health_{loop_.clock()};
  RunAnswer local_;
  RemoteLookup lookup_{loop_, peers_, health_, {.self_id = "self", .local = [this](auto&, auto&) {
                                                  return local_;
                                                }}};
  RemoteFetch fetch_{loop_, peers_, health_};
  std::shared_ptr<const ClusterView> view_;
  std::optional<std::vector<RemoteLookup::Run>> found_;
};

}  // namespace kvmill

#endif  // KVMILL_TESTS_CLUSTER_FETCH_PATH_FIXTURE_H_
