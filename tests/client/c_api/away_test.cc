// KVMILL_AWAY_MISS: a daemon that dies and comes back.
#include <unistd.h>

#include <memory>
#include <string>

#include "tests/client/c_api/c_daemon.h"

namespace kvmill::testing {
namespace {

using Away = CApiTest;

TEST_F(Away, NothingFailsWithoutADaemonAndAllIsThereAgainWithTheNext) {
  const std::string to = address();
  auto options = Init<kvmill_client_options>();
  options.address = to.c_str();
  options.timeout_ms = 60000;
  options.when_away = 2;
  kvmill_client* client = nullptr;
  EXPECT_EQ(kvmill_client_create(&options, &client), KVMILL_INVALID_ARGUMENT);
  options.when_away = KVMILL_AWAY_MISS;
  ASSERT_EQ(kvmill_client_create(&options, &client), KVMILL_OK) << kvmill_last_error();
  kvmill_client_destroy(client_);
  client_ = client;
  const std::unique_ptr<kvmill_namespace, void (*)(kvmill_namespace*)> ns(Open("away"),
                                                                          &kvmill_namespace_free);
  const SmallBlock block(1);
  Put(ns.get(), "key", block);
  KillDaemon();

  const std::string name = "key";
  const kvmill_key key = Key(name);
  const auto look_up = [&] {
    return Finish(kvmill_lookup(client_, ns.get(), &key, 1, nullptr, 0, nullptr, queue_, 1));
  };
  const auto hits = [](const Outcome& outcome) {
    auto found = Init<kvmill_lookup_result>();
    EXPECT_EQ(kvmill_result_lookup(outcome.result.get(), &found), KVMILL_OK) << outcome.message();
    return found.hit_blocks;
  };
  Outcome outcome = look_up();
  EXPECT_EQ(hits(outcome), 0u);
  EXPECT_EQ(kvmill_result_away(outcome.result.get()), KVMILL_UNAVAILABLE);
  EXPECT_NE(outcome.message(), "");
  SmallBlock got;
  const std::vector<kvmill_fetch_output> outputs = Outputs(&got);
  outcome = Finish(kvmill_fetch(client_, ns.get(), &key, 1, outputs.data(), outputs.size(), nullptr,
                                nullptr, queue_, 1));
  EXPECT_EQ(BlockOf(outcome).code, KVMILL_NOT_FOUND);
  EXPECT_EQ(kvmill_result_away(outcome.result.get()), KVMILL_UNAVAILABLE);
  kvmill_mapped* const mapped = Map(ns.get(), {name});
  auto missed = Init<kvmill_block_result>();
  ASSERT_EQ(kvmill_mapped_block(mapped, 0, &missed), KVMILL_OK);
  EXPECT_EQ(missed.code, KVMILL_NOT_FOUND);
  kvmill_mapped_free(mapped);
  outcome = Put(ns.get(), "other", block);
  EXPECT_EQ(BlockOf(outcome).outcome, static_cast<std::uint32_t>(KVMILL_BLOCK_DROPPED));
  auto stored = Init<kvmill_store_result>();
  ASSERT_EQ(kvmill_result_store(outcome.result.get(), &stored), KVMILL_OK);
  EXPECT_EQ(stored.blocks_dropped, 1u);
  EXPECT_EQ(Finish(kvmill_flush(client_, nullptr, queue_, 1)).event.code, KVMILL_UNAVAILABLE);

  StartDaemon();
  do {
    usleep(5000);
    outcome = Put(ns.get(), "key", block);
  } while (BlockOf(outcome).outcome == static_cast<std::uint32_t>(KVMILL_BLOCK_DROPPED));
  EXPECT_EQ(BlockOf(outcome).outcome, static_cast<std::uint32_t>(KVMILL_BLOCK_STORED));
  EXPECT_EQ(kvmill_result_away(outcome.result.get()), KVMILL_OK);
  outcome = look_up();
  EXPECT_EQ(hits(outcome), 1u);
  EXPECT_EQ(kvmill_result_away(outcome.result.get()), KVMILL_OK);
  EXPECT_EQ(outcome.message(), "");
  EXPECT_EQ(kvmill_result_away(nullptr), KVMILL_OK);
}

}  // namespace
}  // namespace kvmill::testing
