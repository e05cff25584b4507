// What readers of events cost who stores: put through a real kvmilld over its unix socket, while
// nobody reads events, while a call of Watch does, and while a subscriber to --events does.
//
// A daemon for each, since one whose events were read goes on with them for minutes. Blocks are
// small (one layer, one head, 64 tokens), so that there are as many events for a byte as there can
// be; --layers and --heads make them larger. Each round stores them in each daemon by turns, and
// clears them again; lines have medians over the rounds, the least and the most.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>
#include <zmq.hpp>

#include "CLI/CLI.hpp"
#include "client/client.h"
#include "client/events.h"
#include "kernels/float16.h"
#include "storage/core/check.h"
#include "tests/integration/daemon_process.h"

namespace kvmill {
namespace {

constexpr std::uint32_t kTokens = 64, kHeadDim = 64;

struct Shape {
  std::uint16_t layers = 1;
  std::uint32_t heads = 1;
};

NamespaceSpec SpecOf(const Shape& shape) {
  NamespaceSpec spec;
  spec.model = "bench";
  spec.hash_scheme = "bench";
  spec.block_tokens = kTokens;
  LayerGroup group;
  for (std::uint16_t layer = 0; layer < shape.layers; ++layer) group.layers.push_back(layer);
  group.kv_heads = static_cast<std::uint16_t>(shape.heads);
  group.head_dim = kHeadDim;
  spec.groups.push_back(group);
  return spec;
}

// Blocks whose values are all the same ones.
class Blocks {
 public:
  Blocks(const Shape& shape, std::uint32_t count) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    values_.resize(std::size_t{kTokens} * shape.heads * kHeadDim);
    for (std::uint16_t& value : values_) value = FloatToFloat16(normal(random));
    LayerInput input;
    input.k = input.v = KvView::Array(values_.data(), shape.heads, kHeadDim);
    layers_.assign(shape.layers, input);
    for (std::uint32_t i = 0; i < count; ++i) {
      StoreBlock& block = blocks_.emplace_back();
      std::string key(32, 'k');
      std::memcpy(key.data(), &i, sizeof(i));
      block.key = *BlockKey::FromBytes(key);
      if (i > 0) block.parent = blocks_[i - 1].key;
      block.token_count = kTokens;
      block.block_index = i;
      block.layers = layers_;
    }
  }
  const std::vector<StoreBlock>& all() const { return blocks_; }

 private:
  std::vector<std::uint16_t> values_;
  std::vector<LayerInput> layers_;
  std::vector<StoreBlock> blocks_;
};

// A daemon, its client, and who reads its events: in this process, on a thread.
class Way {
 public:
  Way(const char* what, const Shape& shape, const std::string& host_bytes, bool watched,
      bool published)
      : name(what) {
    std::vector<std::string> arguments = {
        "--socket", directory_ / "run/kvmill.sock", "--host-bytes", host_bytes, "--device", "host"};
    if (published) {
      arguments.emplace_back("--events");
      arguments.emplace_back("127.0.0.1:0");
    }
    daemon_ = std::make_unique<testing::DaemonProcess>(testing::DaemonBinary(), arguments);
    const nlohmann::json ready = daemon_->WaitReady();
    KVMILL_CHECK(!ready.is_null());
    const std::string address = "unix:" + (directory_ / "run/kvmill.sock");
    client_ = *Client::Create({.address = address, .timeout = absl::Minutes(1)});
    ns_ = *client_->OpenNamespace("bench", SpecOf(shape));
    if (watched) thread_ = std::thread([this, address] { Watch(address); });
    if (published) {
      thread_ = std::thread([this, at = ready["events"].get<std::string>()] { Subscribe(at); });
    }
  }
  ~Way() {
    ending_.store(true);
    if (thread_.joinable()) thread_.join();
  }
  Way(const Way&) = delete;
  Way& operator=(const Way&) = delete;

  // Puts all of them and clears again.
  void Round(const Blocks& blocks, std::size_t at_once) {
    const absl::Span<const StoreBlock> all(blocks.all());
    const auto begin = std::chrono::steady_clock::now();
    for (std::size_t i = 0; i < all.size(); i += at_once) {
      const absl::StatusOr<StoreResult> stored = client_->Store(ns_, all.subspan(i, at_once), {});
      KVMILL_CHECK(stored.ok());
      KVMILL_CHECK(stored->blocks_failed == 0);
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    micros.push_back(seconds.count() / static_cast<double>(all.size()) * 1e6);
    KVMILL_CHECK(client_->Clear(ns_).ok());
  }
  std::uint64_t read() const { return read_.load(); }

  const std::string name;
  std::vector<double> micros;

 private:
  void Watch(const std::string& address) {
    const auto stream = *EventStream::Open({.address = address}, {});
    while (!ending_.load()) {
      const absl::StatusOr<EventBatch> batch = stream->Next(absl::Milliseconds(50));
      if (batch.ok()) read_ += batch->events.size();
    }
  }
  void Subscribe(const std::string& address) {
    zmq::context_t context(1);
    zmq::socket_t socket(context, zmq::socket_type::sub);
    socket.set(zmq::sockopt::subscribe, "");
    socket.set(zmq::sockopt::rcvtimeo, 50);
    socket.connect(address);
    for (zmq::message_t part; !ending_.load();) {
      if (socket.recv(part).has_value()) ++read_;
    }
  }

  testing::TemporaryDirectory directory_;
  std::unique_ptr<testing::DaemonProcess> daemon_;
  std::unique_ptr<Client> client_;
  ClientNamespace ns_;
  std::atomic<bool> ending_{false};
  std::atomic<std::uint64_t> read_{0};
  std::thread thread_;
};

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace
}  // namespace kvmill

int main(int argc, char** argv) {
  CLI::App app("What readers of events cost who stores.");
  std::uint32_t count = 4000;
  std::size_t at_once = 256;
  int rounds = 9;
  kvmill::Shape shape;
  std::string host_bytes = "128MiB";
  app.add_option("--blocks", count, "Of a round")->check(CLI::Range(1, 1 << 20));
  app.add_option("--batch", at_once, "Blocks of a call")->check(CLI::Range(1, 4096));
  app.add_option("--rounds", rounds, "In each way")->check(CLI::Range(1, 99));
  app.add_option("--layers", shape.layers, "Of a block")->check(CLI::Range(1, 128));
  app.add_option("--heads", shape.heads, "Of a layer")->check(CLI::Range(1, 64));
  app.add_option("--host-bytes", host_bytes, "Of each daemon: more than all blocks");
  CLI11_PARSE(app, argc, argv);
  const kvmill::Blocks blocks(shape, count);
  kvmill::Way ways[] = {{"Watch off", shape, host_bytes, false, false},
                        {"Watch on", shape, host_bytes, true, false},
                        {"ZeroMQ on", shape, host_bytes, false, true}};
  for (kvmill::Way& way : ways)
    way.Round(blocks, at_once);  // Memory is touched, threads are there.
  for (kvmill::Way& way : ways) way.micros.clear();
  for (int round = 0; round < rounds; ++round) {
    for (kvmill::Way& way : ways) {
      way.Round(blocks, at_once);
      // What is told of this round is not told in the next one's time.
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
  }
  const double off = kvmill::Median(ways[0].micros);
  std::printf("us a block, median (least to most) of %d rounds by turns, %u blocks of %u x %u\n",
              rounds, count, shape.layers, shape.heads);
  for (const kvmill::Way& way : ways) {
    const auto [least, most] = std::minmax_element(way.micros.begin(), way.micros.end());
    const double median = kvmill::Median(way.micros);
    std::printf("%-10s %.2f (%.2f to %.2f), %.3f of off; %llu read\n", way.name.c_str(), median,
                *least, *most, median / off, static_cast<unsigned long long>(way.read()));
  }
  KVMILL_CHECK(ways[1].read() > 0 && ways[2].read() > 0);
  return 0;
}
