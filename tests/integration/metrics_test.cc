// /metrics of a real daemon, parsed strictly and compared with what a scripted workload did.
#include <gmock/gmock.h>
#include <httplib.h>
#include <signal.h>
#include <unistd.h>

#include <cmath>
#include <map>
#include <set>
#include <sstream>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/server_address.h"
#include "tests/integration/daemon_fixture.h"

namespace kvmill::testing {
namespace {

using ::testing::HasSubstr;

// One scrape: "name{labels}" -> value, as written.
class Scrape {
 public:
  // Checks the text format while reading it.
  explicit Scrape(const std::string& text) {
    std::set<std::string> families;
    std::string family;
    std::string type;
    for (absl::string_view line : absl::StrSplit(text, '\n')) {
      if (line.empty()) continue;
      const std::vector<std::string> words = absl::StrSplit(line, absl::MaxSplits(' ', 3));
      if (absl::StartsWith(line, "# HELP ")) {
        family = words[2];
        EXPECT_TRUE(families.insert(family).second) << family << " appears twice";
        EXPECT_GT(words.size(), 3u) << family << " has no help";
        type.clear();
        continue;
      }
      if (absl::StartsWith(line, "# TYPE ")) {
        EXPECT_EQ(words[2], family);
        type = words[3];
        EXPECT_TRUE(type == "counter" || type == "gauge" || type == "histogram") << line;
        EXPECT_EQ(type == "counter", absl::EndsWith(family, "_total")) << family;
        continue;
      }
      EXPECT_FALSE(type.empty()) << "a sample before its type: " << line;
      const std::size_t space = line.rfind(' ');
      const std::string series(line.substr(0, space));
      double value = -1;
      EXPECT_TRUE(absl::SimpleAtod(line.substr(space + 1), &value)) << line;
      EXPECT_TRUE(values_.emplace(series, value).second) << series << " appears twice";
      EXPECT_TRUE(absl::StartsWith(series, family)) << series;
      EXPECT_TRUE(absl::StartsWith(series, "kvmill_")) << series;
      EXPECT_GE(value, 0) << line;
    }
  }

  double operator()(const std::string& series) const {
    const auto it = values_.find("kvmill_" + series);
    EXPECT_NE(it, values_.end()) << series << " is missing";
    return it == values_.end() ? -1 : it->second;
  }
  bool has(const std::string& series) const { return values_.count("kvmill_" + series) > 0; }

 private:
  std::map<std::string, double> values_;
};

class MetricsTest : public DaemonTest {
 protected:
  void StartWithMetrics() { StartDurable({"--metrics", "127.0.0.1:0"}); }
  httplib::Result HttpGet(const std::string& path) {
    const HostPort address = *ParseHostPort(ready_["metrics"].get<std::string>());
    httplib::Client http(address.host, address.port);
    http.set_read_timeout(30, 0);
    return http.Get(path.c_str());
  }
  Scrape Metrics() {
    const httplib::Result result = HttpGet("/metrics");
    EXPECT_TRUE(result && result->status == 200);
    if (!result) return Scrape("");
    EXPECT_THAT(result->get_header_value("Content-Type"), HasSubstr("version=0.0.4"));
    return Scrape(result->body);
  }
};

TEST_F(MetricsTest, CountersSayWhatTheWorkloadDid) {
  StartWithMetrics();
  const NamespaceSpec spec = SmallSpec();
  const ClientNamespace ns = Open("n", spec);
  Sequence sequence(spec, 64 * 3, 1);
  Sequence broken(spec, 64, 2);
  broken.At(0, false, 3, 0, 0) = 0x7E00;  // NaN.

  const StoreResult stored = Put(ns, "s", sequence, true);
  ASSERT_EQ(stored.blocks_stored, 3u);
  EXPECT_EQ(Put(ns, "s", sequence).blocks_existing, 3u);
  EXPECT_EQ(Put(ns, "broken", broken).blocks_failed, 1u);
  ASSERT_TRUE(client_->Lookup(ns, KeysOf("s", 3)).ok());
  ASSERT_TRUE(client_->Lookup(ns, KeysOf("s", 5)).ok());
  ASSERT_TRUE(client_->Lookup(ns, KeysOf("absent", 2)).ok());
  PageCollector pages;
  const auto fetched =
      client_->Fetch(ns, {{KeyOf("s", 0), KeyOf("s", 1), KeyOf("absent", 0)}}, pages);
  ASSERT_TRUE(fetched.ok());

  const Scrape m = Metrics();
  EXPECT_EQ(m("stored_blocks_total{result=\"stored\"}"), 3);
  EXPECT_EQ(m("stored_blocks_total{result=\"existing\"}"), 3);
  EXPECT_EQ(m("stored_blocks_total{result=\"rejected\"}"), 1);
  EXPECT_EQ(m("stored_blocks_total{result=\"raw\"}"), 0);
  EXPECT_EQ(m("lookup_requests_total{result=\"hit\"}"), 1);
  EXPECT_EQ(m("lookup_requests_total{result=\"partial\"}"), 1);
  EXPECT_EQ(m("lookup_requests_total{result=\"miss\"}"), 1);
  EXPECT_EQ(m("lookup_blocks_total"), 10);
  EXPECT_EQ(m("lookup_tokens_total"), 10 * 64);
  EXPECT_EQ(m("hit_blocks_total{tier=\"host\"}"), 6);
  EXPECT_EQ(m("hit_tokens_total{tier=\"host\"}"), 6 * 64);
  EXPECT_EQ(m("hit_blocks_total{tier=\"disk\"}"), 0);
  EXPECT_EQ(m("fetched_blocks_total{path=\"inline\",tier=\"host\",result=\"hit\"}"), 2);
  EXPECT_EQ(m("fetched_blocks_total{path=\"inline\",tier=\"none\",result=\"miss\"}"), 1);
  EXPECT_EQ(m("raw_bytes_ingested_total{format=\"k4v2_g64\"}"),
            static_cast<double>(stored.raw_bytes));
  EXPECT_EQ(m("encoded_bytes_stored_total{format=\"k4v2_g64\"}"),
            static_cast<double>(stored.stored_bytes));
  EXPECT_EQ(m("bytes_total{direction=\"out\",path=\"inline\",transport=\"grpc\"}"),
            static_cast<double>(fetched->page_bytes));
  EXPECT_GE(m("bytes_total{direction=\"in\",path=\"inline\",transport=\"grpc\"}"),
            static_cast<double>(stored.raw_bytes));
  EXPECT_EQ(m("tier_blocks{tier=\"host\"}"), 3);
  EXPECT_EQ(m("tier_blocks{tier=\"disk\"}"), 3);
  EXPECT_GT(m("tier_used_bytes{tier=\"host\"}"), 0);
  EXPECT_GT(m("tier_capacity_bytes{tier=\"host\"}"), 0);
  EXPECT_TRUE(m.has("host_huge_page_bytes"));
  EXPECT_EQ(std::fmod(m("host_huge_page_bytes"), 2 << 20), 0);
  EXPECT_EQ(m("tier_capacity_bytes{tier=\"disk\"}"), 1 << 30);
  EXPECT_EQ(m("checksum_failures_total{tier=\"host\"}"), 0);
  EXPECT_EQ(m("leases"), 0);
  EXPECT_EQ(m("draining"), 0);
  EXPECT_EQ(m(absl::StrCat("build_info{version=\"0.1.0\",device=\"host\",boot_id=\"",
                           ready_["boot_id"].get<std::string>(), "\"}")),
            1);
  EXPECT_GT(m("start_time_seconds"), 1e9);
  EXPECT_EQ(m("stage_duration_seconds_count{op=\"store\",stage=\"encode\"}"),
            m("stage_duration_seconds_bucket{op=\"store\",stage=\"encode\",le=\"+Inf\"}"));
  EXPECT_GT(m("stage_duration_seconds_count{op=\"store\",stage=\"encode\"}"), 0);
  EXPECT_FALSE(m.has("tier_blocks{tier=\"gpu\"}")) << "a tier that this daemon does not have";

  // Stat says the same.
  const auto stat = client_->Stat();
  ASSERT_TRUE(stat.ok()) << stat.status();
  EXPECT_EQ(stat->lookup_requests, 3u);
  EXPECT_EQ(stat->stored_blocks, 3u);
  EXPECT_EQ(stat->existing_blocks, 3u);
  EXPECT_EQ(stat->rejected_blocks, 1u);
  EXPECT_EQ(stat->fetched_blocks, 2u);
  EXPECT_EQ(stat->fetch_misses, 1u);
  EXPECT_FALSE(stat->draining);
  ASSERT_EQ(stat->tiers.size(), 2u);
  EXPECT_EQ(stat->tiers[0].hit_blocks, 6u);
  EXPECT_EQ(stat->tiers[1].hit_blocks, 0u);
  ASSERT_EQ(stat->transfers.size(), 3u);
  EXPECT_EQ(stat->transfers[0].path, "map");
  EXPECT_EQ(stat->transfers[1].path, "inline");
  EXPECT_EQ(stat->transfers[2].path, "pages");
  EXPECT_EQ(stat->transfers[1].transport, "grpc");
  EXPECT_EQ(stat->transfers[1].bytes_out, fetched->page_bytes);
  EXPECT_GE(stat->transfers[1].bytes_in, stored.raw_bytes);

  // Evicted from memory, the blocks are found and fetched on disk.
  const auto evicted = client_->Evict(Tier::kHost, 0);
  ASSERT_TRUE(evicted.ok()) << evicted.status();
  EXPECT_EQ(*evicted, 3u);
  ASSERT_TRUE(client_->Lookup(ns, KeysOf("s", 3)).ok());
  ASSERT_TRUE(client_->Fetch(ns, KeysOf("s", 1), pages).ok());
  const Scrape after = Metrics();
  EXPECT_EQ(after("evicted_blocks_total{tier=\"host\",reason=\"admin\"}"), 3);
  EXPECT_EQ(after("hit_blocks_total{tier=\"disk\"}"), 3);
  EXPECT_EQ(after("fetched_blocks_total{path=\"inline\",tier=\"disk\",result=\"hit\"}"), 1);
  EXPECT_EQ(after("eviction_age_seconds_count{tier=\"host\"}"), 3);
  EXPECT_EQ(client_->Stat()->tiers[0].evicted_blocks, 3u);
  EXPECT_EQ(client_->Stat()->tiers[1].hit_blocks, 3u);

  // A restart starts the counters again and finds the blocks.
  Kill();
  StartWithMetrics();
  Open("n", spec);
  const Scrape restarted = Metrics();
  EXPECT_EQ(restarted("stored_blocks_total{result=\"stored\"}"), 0);
  EXPECT_EQ(restarted("lookup_blocks_total"), 0);
  EXPECT_EQ(restarted("tier_blocks{tier=\"disk\"}"), 3);
  EXPECT_EQ(restarted("tier_blocks{tier=\"host\"}"), 0);
}

TEST_F(MetricsTest, AGpuTierHasItsOwn) {
  Start({"--metrics", "127.0.0.1:0", "--device", "host", "--gpu-bytes", "64MiB"});
  const ClientNamespace ns = Open("n", SmallSpec());
  Sequence sequence(SmallSpec(), 64 * 3, 1);
  ASSERT_EQ(Put(ns, "s", sequence).blocks_stored, 3u);
  for (int i = 0; i < 3000 && Metrics()("moved_blocks_total{from=\"host\",to=\"gpu\"}") < 3; ++i) {
    usleep(10'000);
  }
  PageCollector pages;
  ASSERT_TRUE(client_->Fetch(ns, KeysOf("s", 2), pages).ok());
  ASSERT_TRUE(client_->Lookup(ns, KeysOf("s", 3)).ok());
  ASSERT_EQ(*client_->Evict(Tier::kGpu, 1), 1u);
  const Scrape m = Metrics();
  EXPECT_EQ(m("tier_blocks{tier=\"gpu\"}"), 2);
  EXPECT_EQ(m("tier_blocks{tier=\"host\"}"), 1);
  EXPECT_EQ(m("tier_capacity_bytes{tier=\"gpu\"}"), 62 << 20);
  EXPECT_GT(m("tier_used_bytes{tier=\"gpu\"}"), 0);
  EXPECT_EQ(m("hit_blocks_total{tier=\"gpu\"}"), 3);
  EXPECT_EQ(m("fetched_blocks_total{path=\"inline\",tier=\"gpu\",result=\"hit\"}"), 2);
  EXPECT_EQ(m("moved_blocks_total{from=\"gpu\",to=\"host\"}"), 1);
  EXPECT_EQ(m("evicted_blocks_total{tier=\"gpu\",reason=\"admin\"}"), 1);
  EXPECT_EQ(m("eviction_age_seconds_count{tier=\"gpu\"}"), 1);
  EXPECT_EQ(m("checksum_failures_total{tier=\"gpu\"}"), 0);
  EXPECT_EQ(m("skipped_promotions_total"), 0);
  EXPECT_EQ(m("unpromoted_blocks"), 0);
  EXPECT_EQ(m("stage_duration_seconds_count{op=\"fetch\",stage=\"transfer\"}"), 3);
}

TEST_F(MetricsTest, ProbesFollowTheDrain) {
  StartWithMetrics();
  ASSERT_EQ(HttpGet("/healthz")->status, 200);
  EXPECT_EQ(HttpGet("/readyz")->status, 200);
  EXPECT_EQ(HttpGet("/nothing")->status, 404);
  ASSERT_TRUE(client_->Drain().ok());
  EXPECT_EQ(HttpGet("/healthz")->status, 200);
  EXPECT_EQ(HttpGet("/readyz")->status, 503);
  EXPECT_EQ(Metrics()("draining"), 1);
}

TEST_F(MetricsTest, HttpListensOnIpv6) {
  Start({"--metrics", "[::1]:0"});
  EXPECT_EQ(HttpGet("/healthz")->status, 200);
}

}  // namespace
}  // namespace kvmill::testing
