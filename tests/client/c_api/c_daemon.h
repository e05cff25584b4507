// A daemon and the C ABI's calls in one word each: what the tests of client/kvmill.h stand on.
#ifndef KVMILL_TESTS_CLIENT_C_API_C_DAEMON_H_
#define KVMILL_TESTS_CLIENT_C_API_C_DAEMON_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "client/kvmill.h"
#include "client/kvmill_engine.h"
#include "client/kvmill_map.h"
#include "tests/integration/daemon_process.h"

namespace kvmill::testing {

float FromBf16(std::uint16_t value);

template <typename T>
T Init() {
  T value;
  KVMILL_INIT(&value);
  return value;
}

// What an operation came to.
struct Outcome {
  kvmill_event event = {};
  std::shared_ptr<kvmill_result> result;
  std::string message() const { return kvmill_result_message(result.get()); }
};

// K and V of one block of the small namespace, in bf16: [layer][k or v][token, head, channel].
struct SmallBlock {
  static constexpr std::uint32_t kLayers = 2, kHeads = 2, kHeadDim = 64, kTokens = 64;
  explicit SmallBlock(std::uint32_t seed = 0);
  // ||values - other|| / ||values||.
  double RelativeError(const SmallBlock& other, std::uint32_t tokens = kTokens) const;

  std::vector<std::vector<std::uint16_t>> values;
};

class CApiTest : public ::testing::Test {
 protected:
  void SetUp() override;
  void TearDown() override;

  // Starts a daemon when none runs; SetUp does. The tests of a program share it.
  static void StartDaemon();
  static void KillDaemon();
  static void StopDaemon();  // SIGSTOP, and waits until every thread of it stands still.
  static void ContinueDaemon();
  static kvmill_client* Connect(std::uint64_t timeout_ms = 60000);
  static std::string address();

  // The outcome of what was just started, which is the only operation on queue_.
  Outcome Finish(kvmill_code started);
  kvmill_namespace* Open(const std::string& name,
                         std::uint32_t sink_blocks = 0);  // With blocks of its own.
  std::vector<kvmill_store_layer> Inputs(const SmallBlock& block) const;
  std::vector<kvmill_fetch_output> Outputs(SmallBlock* block) const;
  // `key` and `layers` are borrowed.
  kvmill_store_block Block(const char* key, const std::vector<kvmill_store_layer>& layers,
                           std::uint32_t token_count = SmallBlock::kTokens) const;
  Outcome Put(const kvmill_namespace* ns, const std::string& key, const SmallBlock& block);
  // Null, and the test fails, when the blocks could not be mapped; `ns` and a client of the
  // fixture.
  kvmill_mapped* Map(const kvmill_namespace* ns, const std::vector<std::string>& keys,
                     std::uint64_t lease_ms = 30000);
  static kvmill_key Key(const std::string& key) { return {key.data(), key.size()}; }
  static kvmill_key Key(std::string&& key) = delete;  // It would be gone.
  static kvmill_block_result BlockOf(const Outcome& outcome, std::size_t block = 0);

  kvmill_client* client_ = nullptr;
  kvmill_queue* queue_ = nullptr;
};

}  // namespace kvmill::testing

#endif  // KVMILL_TESTS_CLIENT_C_API_C_DAEMON_H_
