#include "tests/client/c_api/c_daemon.h"

#include <signal.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>

namespace kvmill::testing {
namespace {

// Fills a view of [tokens, heads, head_dim].
template <typename View, typename Pointer>
View ViewOf(Pointer* base) {
  View view = {};
  view.data = base;
  view.head_stride_bytes = 2 * SmallBlock::kHeadDim;
  view.token_stride_bytes = 2 * SmallBlock::kHeadDim * SmallBlock::kHeads;
  view.tokens = SmallBlock::kTokens;
  return view;
}

struct Shared {
  TemporaryDirectory directory;
  std::unique_ptr<DaemonProcess> daemon;
};

Shared& shared() {
  static Shared the;
  return the;
}

}  // namespace

float FromBf16(std::uint16_t value) {
  const std::uint32_t bits = std::uint32_t{value} << 16;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

SmallBlock::SmallBlock(std::uint32_t seed)
    : values(2 * kLayers, std::vector<std::uint16_t>(kTokens * kHeads * kHeadDim)) {
  if (seed == 0) return;
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (std::vector<std::uint16_t>& v : values) {
    for (std::uint16_t& value : v) {
      const float f = normal(random);
      std::uint32_t bits;
      std::memcpy(&bits, &f, sizeof(bits));
      value = static_cast<std::uint16_t>(bits >> 16);
    }
  }
}

double SmallBlock::RelativeError(const SmallBlock& other, std::uint32_t tokens) const {
  double difference = 0, norm = 0;
  for (std::size_t v = 0; v < values.size(); ++v) {
    for (std::size_t i = 0; i < tokens * kHeads * kHeadDim; ++i) {
      const double want = FromBf16(values[v][i]);
      difference += std::pow(FromBf16(other.values[v][i]) - want, 2);
      norm += want * want;
    }
  }
  return std::sqrt(difference / norm);
}

void CApiTest::SetUp() {
  StartDaemon();
  ASSERT_EQ(kvmill_queue_create(&queue_), KVMILL_OK) << kvmill_last_error();
  client_ = Connect();
  ASSERT_NE(client_, nullptr) << kvmill_last_error();
}

void CApiTest::TearDown() {
  EXPECT_EQ(kvmill_client_destroy(client_), KVMILL_OK);
  EXPECT_EQ(kvmill_queue_destroy(queue_), KVMILL_OK) << kvmill_last_error();
}

std::string CApiTest::address() { return "unix:" + (shared().directory / "run/kvmill.sock"); }

void CApiTest::StartDaemon() {
  if (shared().daemon != nullptr) return;
  const TemporaryDirectory& directory = shared().directory;
  shared().daemon = std::make_unique<DaemonProcess>(
      DaemonBinary(),
      std::vector<std::string>{"--socket", directory / "run/kvmill.sock", "--host-bytes", "64MiB",
                               "--data-dir", directory / "data", "--disk-bytes", "64MiB"});
  ASSERT_FALSE(shared().daemon->WaitReady().is_null()) << shared().daemon->standard_error();
}

void CApiTest::KillDaemon() {
  shared().daemon->Signal(SIGKILL);
  shared().daemon->WaitExit();
  shared().daemon.reset();
}

void CApiTest::ContinueDaemon() { shared().daemon->Signal(SIGCONT); }

void CApiTest::StopDaemon() {
  shared().daemon->Signal(SIGSTOP);
  const std::string tasks = "/proc/" + std::to_string(shared().daemon->pid()) + "/task";
  for (bool all = false; !all; usleep(1000)) {
    all = true;
    for (const auto& task : std::filesystem::directory_iterator(tasks)) {
      std::ifstream file(task.path() / "stat");
      std::string stat;
      std::getline(file, stat);
      const std::size_t name_end = stat.rfind(')');
      all = all && name_end != std::string::npos && stat.substr(name_end, 3) == ") T";
    }
  }
}

kvmill_client* CApiTest::Connect(std::uint64_t timeout_ms) {
  const std::string to = address();
  auto options = Init<kvmill_client_options>();
  options.address = to.c_str();
  options.timeout_ms = timeout_ms;
  kvmill_client* client = nullptr;
  static_cast<void>(kvmill_client_create(&options, &client));
  return client;
}

Outcome CApiTest::Finish(kvmill_code started) {
  Outcome outcome;
  outcome.event = Init<kvmill_event>();
  EXPECT_EQ(started, KVMILL_OK) << kvmill_last_error();
  if (started != KVMILL_OK) return outcome;
  EXPECT_EQ(kvmill_queue_next(queue_, 120000, &outcome.event), KVMILL_OK) << kvmill_last_error();
  outcome.result.reset(outcome.event.result, &kvmill_result_free);
  return outcome;
}

kvmill_namespace* CApiTest::Open(const std::string& name, std::uint32_t sink_blocks) {
  const std::uint16_t layers[] = {0, 1};
  auto group = Init<kvmill_layer_group>();
  group.layers = layers;
  group.layer_count = SmallBlock::kLayers;
  group.kv_heads = SmallBlock::kHeads;
  group.head_dim = SmallBlock::kHeadDim;
  auto spec = Init<kvmill_namespace_spec>();
  spec.model = "tiny";
  spec.revision = name.c_str();
  spec.source_dtype = KVMILL_BFLOAT16;
  spec.block_tokens = SmallBlock::kTokens;
  spec.sink_blocks = sink_blocks;
  spec.groups = &group;
  spec.group_count = 1;
  const Outcome outcome =
      Finish(kvmill_open_namespace(client_, name.c_str(), &spec, nullptr, queue_, 1));
  EXPECT_EQ(outcome.event.code, KVMILL_OK) << outcome.message();
  kvmill_namespace* ns = nullptr;
  EXPECT_EQ(kvmill_result_namespace(outcome.result.get(), &ns), KVMILL_OK) << kvmill_last_error();
  return ns;
}

std::vector<kvmill_store_layer> CApiTest::Inputs(const SmallBlock& block) const {
  std::vector<kvmill_store_layer> layers(SmallBlock::kLayers, Init<kvmill_store_layer>());
  for (std::size_t l = 0; l < layers.size(); ++l) {
    layers[l].k = ViewOf<kvmill_kv>(block.values[2 * l].data());
    layers[l].v = ViewOf<kvmill_kv>(block.values[2 * l + 1].data());
  }
  return layers;
}

std::vector<kvmill_fetch_output> CApiTest::Outputs(SmallBlock* block) const {
  std::vector<kvmill_fetch_output> layers(SmallBlock::kLayers, Init<kvmill_fetch_output>());
  for (std::size_t l = 0; l < layers.size(); ++l) {
    layers[l].k = ViewOf<kvmill_mutable_kv>(block->values[2 * l].data());
    layers[l].v = ViewOf<kvmill_mutable_kv>(block->values[2 * l + 1].data());
  }
  return layers;
}

kvmill_store_block CApiTest::Block(const char* key, const std::vector<kvmill_store_layer>& layers,
                                   std::uint32_t token_count) const {
  auto block = Init<kvmill_store_block>();
  block.key = {key, std::strlen(key)};
  block.token_count = token_count;
  block.layers = layers.data();
  block.layer_count = layers.size();
  return block;
}

Outcome CApiTest::Put(const kvmill_namespace* ns, const std::string& key, const SmallBlock& block) {
  const std::vector<kvmill_store_layer> layers = Inputs(block);
  const kvmill_store_block stored = Block(key.c_str(), layers);
  Outcome outcome = Finish(kvmill_store(client_, ns, &stored, 1, nullptr, nullptr, queue_, 2));
  EXPECT_EQ(BlockOf(outcome).code, KVMILL_OK) << BlockOf(outcome).message;
  return outcome;
}

kvmill_mapped* CApiTest::Map(const kvmill_namespace* ns, const std::vector<std::string>& keys,
                             std::uint64_t lease_ms) {
  std::vector<kvmill_key> views;
  for (const std::string& key : keys) views.push_back(Key(key));
  auto options = Init<kvmill_map_options>();
  options.lease_ms = lease_ms;
  const Outcome outcome =
      Finish(kvmill_map(client_, ns, views.data(), views.size(), &options, nullptr, queue_, 3));
  EXPECT_EQ(outcome.event.code, KVMILL_OK) << outcome.message();
  kvmill_mapped* mapped = nullptr;
  EXPECT_EQ(kvmill_result_mapped(outcome.result.get(), &mapped), KVMILL_OK) << kvmill_last_error();
  return mapped;
}

kvmill_block_result CApiTest::BlockOf(const Outcome& outcome, std::size_t block) {
  auto result = Init<kvmill_block_result>();
  EXPECT_EQ(kvmill_result_block(outcome.result.get(), block, &result), KVMILL_OK)
      << kvmill_last_error() << "; " << outcome.message();
  return result;
}

}  // namespace kvmill::testing
