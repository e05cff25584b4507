// Namespaces that a node learns from others: who is asked, who lies, and what a namespace costs
// that nobody has.
#include "service/cluster/namespace_learner.h"

#include <gmock/gmock.h>

#include <optional>

#include "tests/cluster/fetch_path_fixture.h"

namespace kvmill {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;
using ::testing::UnorderedElementsAre;

NamespaceSpec SpecOf(const std::string& model, const std::string& tenant = "") {
  NamespaceSpec spec;
  spec.tenant = tenant;
  spec.model = model;
  spec.hash_scheme = "test";
  spec.groups = {{.layers = {0, 1}, .kv_heads = 2, .head_dim = 64}};
  spec.block_tokens = 64;
  return spec;
}

NamespaceLearner::Answer Said(const std::string& model, const std::string& name = "",
                              bool heard = false) {
  return DescribedNamespace{SpecOf(model), name, heard};
}

class NamespaceLearnerTest : public ::testing::Test {
 protected:
  struct Script {
    bool silent = false;
    absl::Status error;
    NamespaceLearner::Answer answer;  // To whatever it is asked.
    std::int64_t delay = kSimMs;
  };
  using Learned = std::shared_ptr<std::optional<absl::StatusOr<DescribedNamespace>>>;

  void SetUp() override { SetView(3); }
  // This node is "node-0".
  void SetView(std::size_t nodes) {
    std::vector<Member> members;
    for (std::size_t i = 0; i < nodes; ++i) members.push_back(Node(i));
    const auto view = *ClusterView::Make(members, ++views_, 4, nullptr);
    health_.Keep(*view);
    learner_.SetView(view);
  }
  NamespaceLearner::Options Options() {
    NamespaceLearner::Options options;
    options.self_id = "node-0";
    options.tenant = "default";
    options.ask = [this](const Member& member, const NamespaceQuestion&, std::int64_t deadline,
                         Peers::Done<NamespaceLearner::Answer> done) -> Peers::CallId {
      asked_.push_back(member.id);
      const Script& script = scripts_[member.id];
      ++open_;
      return loop_.At(script.silent ? deadline : loop_.clock().MonotonicNanos() + script.delay,
                      [this, script, done] {
                        --open_;
                        if (script.silent) return done(absl::DeadlineExceededError("silent"));
                        if (!script.error.ok()) return done(script.error);
                        done(script.answer);
                      });
    };
    options.cancel = [this](Peers::CallId call) {
      loop_.Cancel(call);
      --open_;
    };
    options.heard = [this](const NamespaceQuestion&) { return heard_; };
    return options;
  }
  static NamespaceQuestion By(const NamespaceSpec& spec) {
    return {.name = "", .fingerprint = FingerprintOf(spec)};
  }
  Learned Ask(const NamespaceQuestion& question, std::int64_t timeout = 10 * kSimSecond,
              const std::string& hint = "") {
    auto learned = std::make_shared<std::optional<absl::StatusOr<DescribedNamespace>>>();
    learner_.Learn(question, hint, loop_.clock().MonotonicNanos() + timeout,
                   [learned](absl::StatusOr<DescribedNamespace> said) {
                     EXPECT_FALSE(learned->has_value()) << "twice";
                     *learned = std::move(said);
                   });
    return learned;
  }
  void Run(std::int64_t nanos) {
    events_.RunUntil(events_.now() + nanos, [] {});
  }
  absl::StatusOr<DescribedNamespace> Learn(const NamespaceQuestion& question,
                                           const std::string& hint = "") {
    const Learned learned = Ask(question, 10 * kSimSecond, hint);
    Run(1500 * kSimMs);
    EXPECT_TRUE(learned->has_value());
    EXPECT_EQ(learner_.questions(), 0u);
    EXPECT_EQ(open_, 0);
    return learned->has_value() ? **learned : absl::UnknownError("no answer");
  }

  SimEvents events_{1, false};
  SimLoop loop_{events_, kSimSecond, 0};
  PeerHealth health_{loop_.clock()};
  std::uint64_t views_ = 0;
  std::map<std::string, Script> scripts_;
  absl::StatusOr<NamespaceSpec> heard_ = absl::NotFoundError("nothing");  // By this node.
  std::vector<std::string> asked_;
  int open_ = 0;
  NamespaceLearner learner_{loop_, health_, Options()};
};

TEST_F(NamespaceLearnerTest, WhoeverKnowsItSaysSo) {
  const NamespaceSpec spec = SpecOf("m", "default");
  scripts_["node-2"].answer = Said("m");
  const auto learned = Learn(By(spec));
  ASSERT_TRUE(learned.ok()) << learned.status();
  EXPECT_EQ(learned->spec, spec) << "in this node's tenant";
  EXPECT_THAT(asked_, UnorderedElementsAre("node-1", "node-2"));
  // By a name everybody is asked.
  asked_.clear();
  scripts_["node-1"].answer = Said("m");
  const auto named = Learn({.name = "n"});
  ASSERT_TRUE(named.ok()) << named.status();
  EXPECT_EQ(named->spec, spec);
  EXPECT_THAT(asked_, UnorderedElementsAre("node-1", "node-2"));
}

TEST_F(NamespaceLearnerTest, ATenantLearnsWhatIsItsOwn) {
  const auto asks = [](const NamespaceSpec& spec, const std::string& tenant) {
    NamespaceQuestion question = By(spec);
    question.tenant = tenant;
    return question;
  };
  const NamespaceSpec of_a = SpecOf("m", "team-a");
  scripts_["node-1"].answer = scripts_["node-2"].answer = Said("m");
  const auto learned = Learn(asks(of_a, "team-a"));
  ASSERT_TRUE(learned.ok()) << learned.status();
  EXPECT_EQ(learned->spec, of_a);
  const auto named = Learn({.name = "n", .tenant = "team-a"});
  ASSERT_TRUE(named.ok()) << named.status();
  EXPECT_EQ(named->spec.tenant, "team-a");
  EXPECT_EQ(Learn({.name = "n"})->spec.tenant, "default");
  // By another one's fingerprint there is nothing to learn: no description has it.
  EXPECT_EQ(Learn(asks(of_a, "team-b")).status().code(), absl::StatusCode::kNotFound);
  Run(PeerHealth::kPauseMaxNanos);  // Here that was a lie.
  EXPECT_EQ(Learn(By(of_a)).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(NamespaceLearnerTest, WhatOneTenantAsksLeavesRoomForOthers) {
  for (const char* id : {"node-1", "node-2"}) scripts_[id].silent = true;
  const auto ask = [&](const std::string& tenant, std::size_t i) {
    return Ask({.name = absl::StrCat("n", i), .tenant = tenant});
  };
  for (std::size_t i = 0; i < NamespaceLearner::kQuestionsOfOneMax; ++i) {
    EXPECT_FALSE(ask("team-a", i)->has_value());
  }
  const Learned more = ask("team-a", 99);
  ASSERT_TRUE(more->has_value());
  EXPECT_EQ((*more)->status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_FALSE(ask("team-a", 0)->has_value()) << "it is asked already";
  EXPECT_FALSE(ask("team-b", 0)->has_value());
  const std::size_t open = NamespaceLearner::kQuestionsOfOneMax + 1;
  for (std::size_t i = open; i < NamespaceLearner::kQuestionsMax; ++i) {
    EXPECT_FALSE(ask("", i)->has_value()) << "the daemons' own has all that is left";
  }
  Run(2 * kSimSecond);
  EXPECT_EQ(learner_.questions(), 0u);
}

TEST_F(NamespaceLearnerTest, TheHintIsAskedFirst) {
  SetView(40);
  const NamespaceSpec spec = SpecOf("m", "default");
  scripts_["node-7"].answer = Said("m");
  ASSERT_TRUE(Learn(By(spec), "node-7").ok());
  ASSERT_FALSE(asked_.empty());
  EXPECT_EQ(asked_[0], "node-7");
  EXPECT_THAT(asked_, SizeIs(NamespaceLearner::kCallsMax)) << "and the rest is left alone";
}

TEST_F(NamespaceLearnerTest, ALieIsNoAnswerAndTheLiarIsLeftAlone) {
  const NamespaceSpec spec = SpecOf("m", "default");
  scripts_["node-1"].answer = Said("planted");
  scripts_["node-2"] = {.answer = Said("m"), .delay = 50 * kSimMs};
  const auto learned = Learn(By(spec));
  ASSERT_TRUE(learned.ok()) << learned.status();
  EXPECT_EQ(learned->spec.model, "m");
  EXPECT_EQ(health_.paused_count(), 1u);
  // Nobody else has it: then nobody has.
  scripts_["node-2"].answer.reset();
  Run(PeerHealth::kPauseMinNanos);
  EXPECT_EQ(Learn(By(SpecOf("other", "default"))).status().code(), absl::StatusCode::kNotFound);
  // Of a name a description that none can be is a lie, too.
  Run(PeerHealth::kPauseMaxNanos);
  scripts_["node-1"].answer->spec.groups.clear();
  EXPECT_EQ(Learn({.name = "n"}).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(NamespaceLearnerTest, ANameThatMeansTwoThingsIsNone) {
  scripts_["node-1"].answer = Said("one");
  scripts_["node-2"] = {.answer = Said("two"), .delay = 5 * kSimMs};
  const auto learned = Learn({.name = "n"});
  EXPECT_EQ(learned.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(learned.status().message()),
              HasSubstr("model is \"two\" here and \"one\" there"));
  EXPECT_THAT(std::string(learned.status().message()), HasSubstr("\"node-2\" than on \"node-1\""));
  EXPECT_EQ(learner_.unknown(), 0u) << "it is not unknown";
}

// What engines mean by a name goes before what nodes only heard of it.
TEST_F(NamespaceLearnerTest, WhatWasHeardCountsWhereNoEnginesKnowTheName) {
  scripts_["node-1"].answer = Said("old", "n", true);
  const auto heard = Learn({.name = "n"});
  ASSERT_TRUE(heard.ok()) << heard.status();
  EXPECT_EQ(heard->spec.model, "old");
  scripts_["node-2"] = {.answer = Said("new", "n"), .delay = 5 * kSimMs};
  const auto known = Learn({.name = "n"});
  ASSERT_TRUE(known.ok()) << known.status();
  EXPECT_EQ(known->spec.model, "new");
  scripts_["node-2"].answer->heard = true;
  EXPECT_THAT(std::string(Learn({.name = "n"}).status().message()),
              HasSubstr("\"node-2\" than on \"node-1\""));
  // With a fingerprint there is no doubt about what is meant.
  scripts_["node-2"].answer = {};
  const auto proved = Learn(By(SpecOf("old", "default")));
  ASSERT_TRUE(proved.ok()) << proved.status();
  EXPECT_EQ(proved->name, "n");
}

TEST_F(NamespaceLearnerTest, WhatThisNodeHeardCountsAsWhatOthersHeard) {
  heard_ = SpecOf("mine", "default");
  EXPECT_EQ(Learn({.name = "n"})->spec.model, "mine") << "nobody else knows it";
  EXPECT_EQ(Learn(By(SpecOf("mine", "default"))).status().code(), absl::StatusCode::kNotFound);
  scripts_["node-1"].answer = Said("theirs", "n", true);
  EXPECT_EQ(Learn({.name = "n"}).status().code(), absl::StatusCode::kFailedPrecondition);
  scripts_["node-1"].answer->heard = false;
  EXPECT_EQ(Learn({.name = "n"})->spec.model, "theirs");
  // Alone, and of two things.
  SetView(1);
  EXPECT_EQ(Learn({.name = "n"})->spec.model, "mine");
  heard_ = absl::FailedPreconditionError("two");
  EXPECT_EQ(Learn({.name = "n"}).status(), heard_.status());
}

TEST_F(NamespaceLearnerTest, WhatNobodyKnowsIsAskedForOnceInAWhile) {
  const NamespaceQuestion question = By(SpecOf("m", "default"));
  std::vector<Learned> all;
  for (int i = 0; i < 100; ++i) all.push_back(Ask(question));
  Run(kSimSecond);
  for (const Learned& learned : all) {
    ASSERT_TRUE(learned->has_value());
    EXPECT_EQ((*learned)->status().code(), absl::StatusCode::kNotFound);
  }
  EXPECT_THAT(asked_, UnorderedElementsAre("node-1", "node-2")) << "one question for all";
  for (int i = 0; i < 9; ++i) {
    EXPECT_EQ(Ask(question)->value().status().code(), absl::StatusCode::kNotFound) << "at once";
    Run(100 * kSimMs);
  }
  EXPECT_THAT(asked_, SizeIs(2));
  // Later somebody may know it.
  scripts_["node-1"].answer = Said("m");
  Run(kSimSecond);
  EXPECT_TRUE(Learn(question).ok());
  EXPECT_EQ(learner_.unknown(), 0u);
}

TEST_F(NamespaceLearnerTest, WhatIsRememberedAndAskedIsBounded) {
  for (std::size_t i = 0; i < 2 * NamespaceLearner::kUnknownMax; ++i) {
    Ask({.name = absl::StrCat("n", i)});
    Run(2 * kSimMs);
  }
  EXPECT_LE(learner_.unknown(), NamespaceLearner::kUnknownMax);
  for (const char* id : {"node-1", "node-2"}) scripts_[id].silent = true;
  std::vector<Learned> all;
  for (std::size_t i = 0; i <= NamespaceLearner::kQuestionsMax; ++i) {
    all.push_back(Ask({.name = absl::StrCat("s", i)}));
  }
  EXPECT_EQ(all.back()->value().status().code(), absl::StatusCode::kResourceExhausted);
  for (std::size_t i = NamespaceLearner::kQuestionsMax; i < NamespaceLearner::kWaitersMax; ++i) {
    EXPECT_FALSE(Ask({.name = "s0"})->has_value());
  }
  EXPECT_EQ(Ask({.name = "s0"})->value().status().code(), absl::StatusCode::kResourceExhausted);
  Run(2 * kSimSecond);
  EXPECT_EQ(learner_.questions(), 0u);
  EXPECT_EQ(open_, 0);
  SetView(1);
  EXPECT_EQ(Ask({.name = "alone"})->value().status().code(), absl::StatusCode::kNotFound);
}

TEST_F(NamespaceLearnerTest, SilentNodesCostTheirTimeAndTheCallersDeadlineHolds) {
  const NamespaceSpec spec = SpecOf("m", "default");
  scripts_["node-1"].silent = true;
  scripts_["node-2"] = {.answer = Said("m"), .delay = 150 * kSimMs};
  const Learned hasty = Ask(By(spec), 100 * kSimMs);
  const Learned patient = Ask(By(spec));
  Run(120 * kSimMs);
  ASSERT_TRUE(hasty->has_value());
  EXPECT_EQ((*hasty)->status().code(), absl::StatusCode::kNotFound);
  EXPECT_FALSE(patient->has_value());
  Run(100 * kSimMs);
  ASSERT_TRUE(patient->has_value());
  EXPECT_TRUE((*patient)->ok()) << "the silent one is not waited for";
  EXPECT_EQ(open_, 0);
  // One of an earlier version is no sick one.
  scripts_["node-1"] = {.error = absl::UnimplementedError("no such method")};
  scripts_["node-2"].answer.reset();
  Run(3 * kSimSecond);
  for (int i = 0; i < 10; ++i) Learn({.name = absl::StrCat("n", i)}).IgnoreError();
  EXPECT_EQ(health_.paused_count(), 0u);
}

TEST_F(NamespaceLearnerTest, WhoLeavesTellsAllWhoWait) {
  for (const char* id : {"node-1", "node-2"}) scripts_[id].silent = true;
  const Learned one = Ask({.name = "a"}), two = Ask({.name = "b"});
  Run(10 * kSimMs);
  learner_.CompleteAll();
  ASSERT_TRUE(one->has_value() && two->has_value());
  EXPECT_EQ((*one)->status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(open_, 0);
  EXPECT_EQ(learner_.questions(), 0u);
}

}  // namespace
}  // namespace kvmill
