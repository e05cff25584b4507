// A namespace whose tiles lose too much, in a real daemon: it trips, refuses, and an engine that
// asks for it goes on in a higher format. 2-bit values of no structure lose half, 4-bit ones a
// tenth; every tile is a sample, four a block, and a window are eight.
#include <gmock/gmock.h>
#include <httplib.h>
#include <signal.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/server_address.h"
#include "tests/integration/daemon_fixture.h"

namespace kvmill::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr std::uint32_t kBlocks = 2;  // Eight samples.

class GuardTest : public DaemonTest {
 protected:
  std::string config_path() const { return directory_ / "kvmilld.yaml"; }
  void WriteConfig(const std::string& more) const {
    const std::string next = config_path() + ".next";
    std::ofstream(next) << "metrics: \"127.0.0.1:0\"\nerror_sample_interval: 1\nguard_samples: 8\n"
                        << more;
    std::filesystem::rename(next, config_path());
  }
  void StartGuarded(const std::string& options) {
    WriteConfig(options);
    Start({"--config", config_path()});
  }
  std::string Metrics() const {
    const HostPort address = *ParseHostPort(ready_["metrics"].get<std::string>());
    httplib::Client http(address.host, address.port);
    http.set_read_timeout(60);
    const auto answer = http.Get("/metrics");
    return answer ? answer->body : "";
  }
  static NamespaceSpec SpecOf(const std::string& model, std::uint8_t key_bits,
                              std::uint8_t value_bits) {
    NamespaceSpec spec = SmallSpec();
    spec.model = model;
    spec.key_bits = key_bits;
    spec.value_bits = value_bits;
    return spec;
  }
  ClientNamespace OpenOrFallback(const std::string& name, const NamespaceSpec& spec) {
    const absl::StatusOr<ClientNamespace> ns = client_->OpenNamespaceOrFallback(name, spec);
    EXPECT_TRUE(ns.ok()) << ns.status();
    return ns.ok() ? *ns : ClientNamespace();
  }
  // K and V of a sequence of two blocks.
  static Sequence Two(const NamespaceSpec& spec, std::uint32_t seed = 1) {
    return Sequence(spec, kBlocks * spec.block_tokens, seed);
  }
  // What became of storing them, under keys of this name: one status, of all blocks.
  absl::Status Store(const ClientNamespace& ns, const std::string& name, std::uint32_t seed = 1) {
    Sequence sequence = Two(ns.spec, seed);
    const StoreResult result = Put(ns, name, sequence);
    EXPECT_EQ(result.blocks.size(), kBlocks);
    for (const StoreBlockResult& block : result.blocks) {
      EXPECT_EQ(block.status.code(), result.blocks[0].status.code());
      EXPECT_EQ(block.status.ok(), block.outcome == StoreOutcome::kStored);
    }
    return result.blocks.empty() ? absl::InternalError("none") : result.blocks[0].status;
  }
  // How far what is fetched is from what was stored so.
  double ErrorOf(const ClientNamespace& ns, const std::string& name, std::uint32_t seed = 1) {
    const auto values = Get(ns, KeysOf(name, kBlocks));
    if (values.empty()) {
      ADD_FAILURE() << name << " is not there";
      return 0;
    }
    return Two(ns.spec, seed).RelativeError(values, 0, kBlocks * ns.spec.block_tokens);
  }
  std::uint32_t Hits(const ClientNamespace& ns, const std::string& name) {
    const auto found = client_->Lookup(ns, KeysOf(name, kBlocks));
    EXPECT_TRUE(found.ok()) << found.status();
    return found.ok() ? found->hit_blocks : 0;
  }
  static void Until(const std::function<bool()>& is_so, const std::string& what) {
    const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!is_so()) {
      ASSERT_LT(std::chrono::steady_clock::now(), give_up) << what;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }
};

TEST_F(GuardTest, AnEngineGoesOnInTheHigherFormat) {
  StartGuarded("guard_action: fall-back\nguard_value_error: 20\n");
  const NamespaceSpec spec = SpecOf("chat", 4, 2);
  const ClientNamespace chat = OpenOrFallback("chat", spec);
  EXPECT_EQ(chat.name, "chat");
  EXPECT_FALSE(chat.trip.has_value());
  // What is not like it: another model in the same format, whose blocks stay in 16 bits, and one
  // that keeps more.
  const ClientNamespace high = Open("high", SpecOf("high", 4, 4));
  NamespaceSpec sinks = SpecOf("sinks", 4, 2);
  sinks.sink_blocks = kBlocks;
  const ClientNamespace raw = Open("sinks", sinks);
  ASSERT_TRUE(Store(high, "h").ok());
  ASSERT_TRUE(Store(raw, "r").ok());
  EXPECT_THAT(Metrics(), Not(HasSubstr("kvmill_guard_tripped{")));

  ASSERT_TRUE(Store(chat, "a").ok());  // The window is full: it trips.
  PageCollector before;
  ASSERT_TRUE(client_->Fetch(chat, KeysOf("a", kBlocks), before).ok());
  const absl::Status refused = Store(chat, "b");
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("(limit 20 %)"));
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("use \"chat~k4v4\" with key_bits 4, value_bits 4 instead"));
  EXPECT_EQ(Hits(chat, "b"), 0u);
  EXPECT_THAT(daemon_->standard_error(), HasSubstr("guard: k4v2 tiles of namespace \"chat\""));

  // An engine asks again, and goes on.
  const ClientNamespace higher = OpenOrFallback("chat", spec);
  EXPECT_EQ(higher.name, "chat~k4v4");
  EXPECT_EQ(higher.spec.key_bits, 4);
  EXPECT_EQ(higher.spec.value_bits, 4);
  EXPECT_EQ(higher.spec.model, "chat");
  EXPECT_NE(higher.fingerprint, chat.fingerprint);
  EXPECT_FALSE(higher.trip.has_value());
  EXPECT_EQ(Hits(higher, "a"), 0u) << "blocks of another format are not its own";
  for (std::uint32_t i = 0; i < 4; ++i) {
    ASSERT_TRUE(Store(higher, absl::StrCat("s", i), i).ok());
  }
  ASSERT_TRUE(Store(higher, "a", 7).ok()) << "a key that the other one has, with other values";
  for (std::uint32_t i = 0; i < 4; ++i) {
    EXPECT_EQ(Hits(higher, absl::StrCat("s", i)), kBlocks);
    EXPECT_LT(ErrorOf(higher, absl::StrCat("s", i), i), 0.2);
  }
  EXPECT_LT(ErrorOf(higher, "a", 7), 0.2);
  EXPECT_LT(ErrorOf(chat, "a"), 0.5);
  // What was stored before is there, the same to the last bit.
  PageCollector after;
  ASSERT_TRUE(client_->Fetch(chat, KeysOf("a", kBlocks), after).ok());
  EXPECT_EQ(after.pages, before.pages);
  EXPECT_FALSE(before.pages.empty());
  Sequence same = Two(spec);
  EXPECT_EQ(Put(chat, "a", same).blocks.at(0).outcome, StoreOutcome::kExisting);
  // The others notice nothing.
  ASSERT_TRUE(Store(high, "h2").ok());
  ASSERT_TRUE(Store(raw, "r2").ok());
  EXPECT_EQ(OpenOrFallback("high", SpecOf("high", 4, 4)).name, "high");
  EXPECT_EQ(ErrorOf(raw, "r2"), 0);

  // Who does not ask for it gets what it asks for, and is told.
  const ClientNamespace told = Open("chat", spec);
  EXPECT_EQ(told.fingerprint, chat.fingerprint);
  ASSERT_TRUE(told.trip.has_value());
  EXPECT_TRUE(told.trip->refuses_stores);
  EXPECT_EQ(told.trip->fallback_name, "chat~k4v4");
  EXPECT_GT(told.trip->value_error, 0.2);
  EXPECT_LT(told.trip->key_error, 0.2);
  // One series, of one namespace; and who administrates sees it, too.
  EXPECT_THAT(Metrics(), HasSubstr("kvmill_guard_tripped{namespace=\"chat\"} 1\n"));
  EXPECT_THAT(Metrics(), Not(HasSubstr("kvmill_guard_tripped{namespace=\"chat~k4v4\"}")));
  const auto all = client_->Namespaces();
  ASSERT_TRUE(all.ok()) << all.status();
  EXPECT_EQ(all->size(), 4u);
  for (const ClientNamespace& ns : *all) {
    EXPECT_EQ(ns.trip.has_value(), ns.name == "chat") << ns.name;
    EXPECT_EQ(ns.spec.tenant, "default");
  }
}

TEST_F(GuardTest, TheLastFormatIsRawAndLosesNothing) {
  StartGuarded("guard_action: fall-back\nguard_key_error: 1\nguard_value_error: 1\n");
  const NamespaceSpec spec = SpecOf("chat", 2, 2);
  ASSERT_TRUE(Store(OpenOrFallback("chat", spec), "a").ok());
  const ClientNamespace four = OpenOrFallback("chat", spec);
  EXPECT_EQ(four.name, "chat~k4v4") << "both halves lose too much";
  ASSERT_TRUE(Store(four, "a").ok());
  const ClientNamespace raw = OpenOrFallback("chat", spec);
  EXPECT_EQ(raw.name, "chat~raw") << "through both, in one call";
  EXPECT_EQ(raw.spec.sink_blocks, kAllBlocksRaw);
  for (std::uint32_t i = 0; i < 4; ++i) {
    ASSERT_TRUE(Store(raw, absl::StrCat("s", i), i).ok());
    EXPECT_EQ(ErrorOf(raw, absl::StrCat("s", i), i), 0) << "the very bits";
  }
  EXPECT_EQ(OpenOrFallback("chat", spec).name, "chat~raw") << "there is nothing to lose";
  EXPECT_EQ(OpenOrFallback("chat~k4v4", four.spec).name, "chat~raw");
}

TEST_F(GuardTest, ARefusalNamesNothingElse) {
  StartGuarded("guard_action: refuse\nguard_value_error: 20\n");
  const NamespaceSpec spec = SpecOf("chat", 4, 2);
  const ClientNamespace chat = Open("chat", spec);
  ASSERT_TRUE(Store(chat, "a").ok());
  const absl::Status refused = Store(chat, "b");
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_THAT(std::string(refused.message()), Not(HasSubstr("chat~")));
  const ClientNamespace again = OpenOrFallback("chat", spec);
  EXPECT_EQ(again.fingerprint, chat.fingerprint);
  ASSERT_TRUE(again.trip.has_value());
  EXPECT_TRUE(again.trip->refuses_stores);
  EXPECT_EQ(again.trip->fallback_name, "");
  EXPECT_GT(ErrorOf(chat, "a"), 0) << "what is there is served";
}

TEST_F(GuardTest, WhatTrippedIsWhatTheConfigurationSaysNow) {
  StartGuarded("guard_value_error: 20\n");  // The action is alert.
  const NamespaceSpec spec = SpecOf("chat", 4, 2);
  const ClientNamespace chat = OpenOrFallback("chat", spec);
  ASSERT_TRUE(Store(chat, "a").ok());
  ASSERT_TRUE(Store(chat, "b").ok());
  const ClientNamespace alert = OpenOrFallback("chat", spec);
  EXPECT_EQ(alert.name, "chat");
  ASSERT_TRUE(alert.trip.has_value());
  EXPECT_FALSE(alert.trip->refuses_stores);
  EXPECT_THAT(Metrics(), HasSubstr("kvmill_guard_tripped{namespace=\"chat\"} 1\n"));

  WriteConfig("guard_value_error: 20\nguard_action: fall-back\n");
  daemon_->Signal(SIGHUP);
  Until([&] { return OpenOrFallback("chat", spec).name == "chat~k4v4"; }, "no fall-back");
  EXPECT_EQ(Store(chat, "c").code(), absl::StatusCode::kFailedPrecondition);

  WriteConfig("guard_value_error: 90\nguard_action: fall-back\n");
  daemon_->Signal(SIGHUP);
  Until([&] { return OpenOrFallback("chat", spec).name == "chat"; }, "it stays tripped");
  EXPECT_FALSE(Open("chat", spec).trip.has_value());
  EXPECT_TRUE(Store(chat, "c").ok());
  EXPECT_THAT(Metrics(), Not(HasSubstr("kvmill_guard_tripped{")));
}

TEST_F(GuardTest, ADaemonThatStartsAgainMeasuresAgain) {
  WriteConfig("guard_action: fall-back\nguard_value_error: 20\n");
  StartDurable({"--config", config_path()});
  const NamespaceSpec spec = SpecOf("chat", 4, 2);
  ASSERT_TRUE(Store(OpenOrFallback("chat", spec), "a").ok());
  const ClientNamespace higher = OpenOrFallback("chat", spec);
  ASSERT_EQ(higher.name, "chat~k4v4");
  Sequence sequence = Two(spec, 3);
  ASSERT_EQ(Put(higher, "s", sequence, /*durable=*/true).blocks.at(0).outcome,
            StoreOutcome::kStored);
  Kill();
  StartDurable({"--config", config_path()});
  // An engine that lives goes on with what it has; one that comes is measured.
  EXPECT_EQ(Hits(higher, "s"), kBlocks);
  EXPECT_LT(ErrorOf(higher, "s", 3), 0.2);
  const ClientNamespace chat = OpenOrFallback("chat", spec);
  EXPECT_EQ(chat.name, "chat");
  ASSERT_TRUE(Store(chat, "b").ok());
  EXPECT_EQ(Store(chat, "c").code(), absl::StatusCode::kFailedPrecondition);
  const ClientNamespace again = OpenOrFallback("chat", spec);
  EXPECT_EQ(again.fingerprint, higher.fingerprint);
  EXPECT_EQ(Hits(again, "s"), kBlocks);
}

}  // namespace
}  // namespace kvmill::testing
