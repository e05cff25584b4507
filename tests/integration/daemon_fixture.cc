#include "tests/integration/daemon_fixture.h"

#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <future>
#include <random>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "kernels/float16.h"

namespace kvmill::testing {

Sequence::Sequence(const NamespaceSpec& spec, std::uint32_t token_count, std::uint32_t seed)
    : spec_(spec), token_count_(token_count) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (const LayerGroup& group : spec.groups) {
    for (std::size_t l = 0; l < group.layers.size(); ++l) {
      layers_.push_back({group.kv_heads, group.head_dim});
      for (int kv = 0; kv < 2; ++kv) {
        std::vector<std::uint16_t>& values =
            values_.emplace_back(std::size_t{token_count} * group.kv_heads * group.head_dim);
        for (std::uint16_t& v : values) v = FromFloat(normal(random), spec.source_dtype);
      }
    }
  }
}

std::vector<StoreBlock> Sequence::Blocks(const std::string& name) {
  std::vector<StoreBlock> blocks;
  const std::uint32_t count = (token_count_ + spec_.block_tokens - 1) / spec_.block_tokens;
  inputs_.assign(std::size_t{count} * layers_.size(), LayerInput());
  for (std::uint32_t b = 0; b < count; ++b) {
    StoreBlock& block = blocks.emplace_back();
    const std::uint32_t token = b * spec_.block_tokens;
    block.token_count = std::min(spec_.block_tokens, token_count_ - token);
    block.block_index = b;
    block.key = KeyOf(name, b);
    if (b > 0) block.parent = KeyOf(name, b - 1);
    LayerInput* inputs = &inputs_[b * layers_.size()];
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      const std::size_t row = std::size_t{layers_[l].heads} * layers_[l].head_dim;
      inputs[l].k =
          KvView::Array(values_[2 * l].data() + token * row, layers_[l].heads, layers_[l].head_dim);
      inputs[l].v = KvView::Array(values_[2 * l + 1].data() + token * row, layers_[l].heads,
                                  layers_[l].head_dim);
    }
    block.layers = absl::MakeConstSpan(inputs, layers_.size());
  }
  return blocks;
}

std::uint16_t& Sequence::At(std::size_t layer, bool value, std::uint32_t token, std::uint32_t head,
                            std::uint32_t channel) {
  const Layer& l = layers_[layer];
  return values_[2 * layer + (value ? 1 : 0)]
                [(std::size_t{token} * l.heads + head) * l.head_dim + channel];
}

double Sequence::RelativeError(const std::vector<std::vector<std::uint16_t>>& decoded,
                               std::uint32_t token_begin, std::uint32_t tokens) const {
  double difference = 0;
  double norm = 0;
  for (std::size_t i = 0; i < values_.size(); ++i) {
    const std::size_t row = std::size_t{layers_[i / 2].heads} * layers_[i / 2].head_dim;
    for (std::size_t j = 0; j < tokens * row; ++j) {
      const double want = ToFloat(values_[i][token_begin * row + j], spec_.source_dtype);
      const double got = ToFloat(decoded[i][j], spec_.source_dtype);
      difference += (got - want) * (got - want);
      norm += want * want;
    }
  }
  return std::sqrt(difference / norm);
}

BlockKey KeyOf(const std::string& name, std::uint32_t index) {
  std::string bytes = name;
  bytes += '/';
  bytes += std::to_string(index);
  bytes.resize(32, '.');
  return *BlockKey::FromBytes(bytes);
}

std::vector<BlockKey> KeysOf(const std::string& name, std::uint32_t count) {
  std::vector<BlockKey> keys;
  for (std::uint32_t i = 0; i < count; ++i) keys.push_back(KeyOf(name, i));
  return keys;
}

absl::Status PageCollector::OnPage(const PageId& id, const PageView& page) {
  std::string& bytes = pages[{id.block, id.group, id.layer_index}];
  for (std::size_t head = 0; head < page.head_count(); ++head) {
    const auto contents = page.contents(head);
    bytes.push_back(static_cast<char>(page.slot(head).kind));
    bytes.append(reinterpret_cast<const char*>(contents.data()), contents.size());
  }
  return absl::OkStatus();
}

LocalPass::LocalPass(const std::string& socket) : door_(DoorPath(socket), [](std::uint64_t) {}) {
  std::promise<void> entered;
  door_.Enter(std::chrono::system_clock::now() + std::chrono::seconds(30),
              [&](const absl::StatusOr<std::shared_ptr<const DoorPass>>& pass) {
                status_ = pass.status();
                if (pass.ok()) token_hex_ = (*pass)->token_hex;
                entered.set_value();
              });
  entered.get_future().wait();
}

void LocalPass::AddTo(grpc::ClientContext* call) const {
  call->AddMetadata(kDoorTokenMetadata, token_hex_);
}

bool DaemonTest::WaitForStat(const std::function<bool(const ServerStat&)>& is_so) {
  const absl::Time deadline = absl::Now() + absl::Seconds(20);
  while (absl::Now() < deadline) {
    const absl::StatusOr<ServerStat> stat = client_->Stat();
    if (stat.ok() && is_so(*stat)) return true;
    usleep(5000);
  }
  return false;
}

void DaemonTest::LetOthersIn() {
  chmod(directory_.path().c_str(), 0755);
  chmod((directory_ / "run").c_str(), 0755);
  chmod(socket().c_str(), 0666);
  chmod(DoorPath(socket()).c_str(), 0666);
}

std::unique_ptr<DaemonProcess> DaemonTest::Probe(const std::vector<std::string>& arguments,
                                                 uid_t uid) {
  std::vector<std::string> all = {absl::StrCat("unix:", socket())};
  all.insert(all.end(), arguments.begin(), arguments.end());
  return std::make_unique<DaemonProcess>(ProbeBinary(), all, uid);
}

NamespaceSpec DaemonTest::SmallSpec() {
  NamespaceSpec spec;
  spec.model = "tiny";
  spec.revision = "r1";
  spec.hash_scheme = "test";
  spec.block_tokens = 64;
  LayerGroup group;
  group.layers = {0, 1};
  group.kv_heads = 2;
  group.head_dim = 64;
  spec.groups = {group};
  return spec;
}

NamespaceSpec DaemonTest::TwoGroups(const std::string& salt) {
  NamespaceSpec spec = SmallSpec();
  spec.salt = salt;
  LayerGroup window = spec.groups[0];
  window.layers = {2};
  window.attention = AttentionKind::kWindow;
  window.window_tokens = 128;
  window.kv_heads = 1;
  spec.groups.push_back(window);
  return spec;
}

EngineGeometry DaemonTest::SmallGeometry() {
  EngineGeometry geometry;
  geometry.regions = {{0x10000, 1 << 20}};
  EngineLayers l;
  l.block_tokens = 64;
  l.head_dim = 64;
  l.head_count = 2;
  l.page_tokens = 16;
  l.page_count = 4;
  l.page_bytes = l.page_stride_bytes = 16 * 2 * 64 * 2;
  l.head_stride_bytes = 128;
  l.token_stride_bytes = 256;
  l.keys = {{0, 0}, {0, 1 << 18}};
  l.values = {{0, 2 << 18}, {0, 3 << 18}};
  geometry.layers = {l};
  return geometry;
}

std::vector<std::string> DaemonTest::DefaultArguments() const {
  return {"--socket", socket(), "--host-bytes", "256MiB", "--encode-threads", "2"};
}

void DaemonTest::Start(const std::vector<std::string>& more) {
  std::vector<std::string> arguments = DefaultArguments();
  arguments.insert(arguments.end(), more.begin(), more.end());
  daemon_ = std::make_unique<DaemonProcess>(DaemonBinary(), arguments);
  ready_ = daemon_->WaitReady();
  ASSERT_FALSE(ready_.is_null()) << daemon_->standard_error();
  client_ = Connect(absl::StrCat("unix:", socket()));
}

void DaemonTest::StartDurable(const std::vector<std::string>& more) {
  std::vector<std::string> arguments = {"--data-dir", directory_ / "data", "--disk-bytes", "1GiB"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  Start(arguments);
}

void DaemonTest::Kill() {
  daemon_->Signal(SIGKILL);
  ASSERT_EQ(daemon_->WaitExit().signal, SIGKILL);
}

std::unique_ptr<Client> DaemonTest::Connect(const std::string& address,
                                            absl::Duration timeout) const {
  Client::Options options;
  options.address = address;
  options.timeout = timeout;
  absl::StatusOr<std::unique_ptr<Client>> client = Client::Create(options);
  EXPECT_TRUE(client.ok()) << client.status();
  return client.ok() ? *std::move(client) : nullptr;
}

ClientNamespace DaemonTest::Open(const std::string& name, const NamespaceSpec& spec) {
  const absl::StatusOr<ClientNamespace> ns = client_->OpenNamespace(name, spec);
  EXPECT_TRUE(ns.ok()) << ns.status();
  return ns.ok() ? *ns : ClientNamespace();
}

StoreResult DaemonTest::Put(const ClientNamespace& ns, const std::string& name, Sequence& sequence,
                            bool durable) {
  StoreOptions options;
  options.wait_durable = durable;
  const std::vector<StoreBlock> blocks = sequence.Blocks(name);
  const absl::StatusOr<StoreResult> result = client_->Store(ns, blocks, options);
  EXPECT_TRUE(result.ok()) << result.status();
  return result.ok() ? *result : StoreResult();
}

std::vector<std::vector<std::uint16_t>> DaemonTest::Get(const ClientNamespace& ns,
                                                        const std::vector<BlockKey>& keys) {
  std::vector<std::vector<std::uint16_t>> values;
  std::vector<std::pair<std::uint32_t, std::uint32_t>> shapes;
  for (const LayerGroup& group : ns.spec.groups) {
    for (std::size_t l = 0; l < group.layers.size(); ++l) {
      shapes.emplace_back(group.kv_heads, group.head_dim);
      for (int kv = 0; kv < 2; ++kv) {
        values.emplace_back(keys.size() * ns.spec.block_tokens * group.kv_heads * group.head_dim);
      }
    }
  }
  std::vector<LayerOutput> outputs;
  for (std::size_t b = 0; b < keys.size(); ++b) {
    for (std::size_t l = 0; l < shapes.size(); ++l) {
      const auto [heads, dim] = shapes[l];
      const std::size_t offset = b * ns.spec.block_tokens * heads * dim;
      outputs.push_back({MutableKvView::Array(values[2 * l].data() + offset, heads, dim),
                         MutableKvView::Array(values[2 * l + 1].data() + offset, heads, dim)});
    }
  }
  KvSink sink(ns.spec, ns.spec.frame, outputs);
  const absl::StatusOr<FetchResult> result = client_->Fetch(ns, keys, sink);
  EXPECT_TRUE(result.ok()) << result.status();
  if (!result.ok()) return {};
  for (const FetchBlockResult& block : result->blocks) {
    if (!block.status.ok()) return {};
  }
  return values;
}

}  // namespace kvmill::testing
