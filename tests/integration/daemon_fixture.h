// A daemon, a client and made-up K/V: the fixture of the integration tests.
#ifndef KVMILL_TESTS_INTEGRATION_DAEMON_FIXTURE_H_
#define KVMILL_TESTS_INTEGRATION_DAEMON_FIXTURE_H_

#include <grpcpp/client_context.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "client/client.h"
#include "client/door_client.h"
#include "client/kv_sink.h"
#include "tests/integration/daemon_process.h"

namespace kvmill::testing {

// K and V of `token_count` tokens in memory, [layer][k or v][token, head, channel].
class Sequence {
 public:
  Sequence(const NamespaceSpec& spec, std::uint32_t token_count, std::uint32_t seed);

  std::uint32_t token_count() const { return token_count_; }
  std::vector<StoreBlock> Blocks(const std::string& name);  // Views into this.
  std::uint16_t& At(std::size_t layer, bool value, std::uint32_t token, std::uint32_t head,
                    std::uint32_t channel);
  // ||decoded - this|| / ||this|| over `tokens` tokens from `token_begin`.
  double RelativeError(const std::vector<std::vector<std::uint16_t>>& decoded,
                       std::uint32_t token_begin, std::uint32_t tokens) const;

 private:
  struct Layer {
    std::uint32_t heads = 0;
    std::uint32_t head_dim = 0;
  };
  friend class DaemonTest;
  const NamespaceSpec spec_;
  const std::uint32_t token_count_;
  std::vector<Layer> layers_;
  std::vector<std::vector<std::uint16_t>> values_;  // Two a layer: K, V.
  std::vector<LayerInput> inputs_;
};

// Key of block `index` of sequence `name`.
BlockKey KeyOf(const std::string& name, std::uint32_t index);
std::vector<BlockKey> KeysOf(const std::string& name, std::uint32_t count);

// Keeps the verified pages of a Fetch as bytes.
class PageCollector : public FetchSink {
 public:
  absl::Status OnPage(const PageId& id, const PageView& page) override;
  // (block, group, layer index) -> header and slots of all heads, as bytes.
  std::map<std::tuple<std::uint32_t, int, std::uint32_t>, std::string> pages;
};

// Makes the process a local client of the daemon as long as it lives, below the client library.
class LocalPass {
 public:
  explicit LocalPass(const std::string& socket);
  const std::string& token_hex() const { return token_hex_; }  // Empty when not let in.
  const absl::Status& status() const { return status_; }
  void AddTo(grpc::ClientContext* call) const;
  DoorClient& door() { return door_; }

 private:
  DoorClient door_;
  std::string token_hex_;
  absl::Status status_;
};

class DaemonTest : public ::testing::Test {
 protected:
  // 2 layers of full attention, 2 heads, D 64, blocks of 64 tokens, k4v2.
  static NamespaceSpec SmallSpec();
  // SmallSpec, and a group of one layer with one head and a window of two blocks.
  static NamespaceSpec TwoGroups(const std::string& salt);
  // Memory of an engine with pages for one block of it, from 0x10000 on, never looked at.
  static EngineGeometry SmallGeometry();

  std::vector<std::string> DefaultArguments() const;
  // Starts the daemon with DefaultArguments() and `more`, and connects. Fails the test otherwise.
  void Start(const std::vector<std::string>& more = {});
  void StartDurable(const std::vector<std::string>& more = {});
  void Kill();  // kill -9, and waits.
  std::unique_ptr<Client> Connect(const std::string& address,
                                  absl::Duration timeout = absl::Seconds(60)) const;
  // Polls Stat until `is_so`, up to 20 s.
  bool WaitForStat(const std::function<bool(const ServerStat&)>& is_so);
  std::string socket() const { return directory_ / "run/kvmill.sock"; }
  // Socket and door for every user. After Start.
  void LetOthersIn();
  // client_probe.cc in a process of its own, as `uid` (only root can be another one).
  std::unique_ptr<DaemonProcess> Probe(const std::vector<std::string>& arguments, uid_t uid);

  ClientNamespace Open(const std::string& name, const NamespaceSpec& spec);
  StoreResult Put(const ClientNamespace& ns, const std::string& name, Sequence& sequence,
                  bool durable = false);
  // Decoded K/V of the blocks, one vector per layer and K/V as in Sequence; empty on any miss.
  std::vector<std::vector<std::uint16_t>> Get(const ClientNamespace& ns,
                                              const std::vector<BlockKey>& keys);

  TemporaryDirectory directory_;
  std::unique_ptr<DaemonProcess> daemon_;
  nlohmann::json ready_;
  std::unique_ptr<Client> client_;
};

}  // namespace kvmill::testing

#endif  // KVMILL_TESTS_INTEGRATION_DAEMON_FIXTURE_H_
