// Events out of a completion queue.
#include <gmock/gmock.h>
#include <poll.h>
#include <unistd.h>

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "client/kvmill_events.h"
#include "tests/client/c_api/c_daemon.h"

namespace kvmill::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

class Watches : public CApiTest {
 protected:
  static constexpr std::uint64_t kTag = 4711;
  static constexpr std::uint32_t kHost = KVMILL_TIER_HOST;

  void SetUp() override {
    CApiTest::SetUp();
    ASSERT_EQ(kvmill_queue_create(&told_), KVMILL_OK);
  }
  void TearDown() override {
    EXPECT_EQ(kvmill_watch_close(watch_), KVMILL_OK);
    EXPECT_EQ(kvmill_queue_destroy(told_), KVMILL_OK) << kvmill_last_error();
    CApiTest::TearDown();
  }

  kvmill_code Watch(kvmill_watch_options options) {
    const std::string to = address();
    auto daemon = Init<kvmill_client_options>();
    daemon.address = to.c_str();
    return kvmill_watch_open(&daemon, &options, told_, kTag, &watch_);
  }
  kvmill_code WatchNamespace(const kvmill_namespace* ns) {
    auto options = Init<kvmill_watch_options>();
    options.namespace_name = kvmill_namespace_name(ns);
    return Watch(options);
  }
  // The next event of the queue; its result is null when none came.
  Outcome Next(std::int64_t timeout_ms = 60000) {
    Outcome outcome;
    outcome.event = Init<kvmill_event>();
    if (kvmill_queue_next(told_, timeout_ms, &outcome.event) != KVMILL_OK) return {};
    EXPECT_EQ(outcome.event.tag, kTag);
    outcome.result.reset(outcome.event.result, &kvmill_result_free);
    return outcome;
  }
  bool Readable() {
    pollfd entry = {kvmill_queue_fd(told_), POLLIN, 0};
    return poll(&entry, 1, 0) == 1;
  }
  kvmill_watch_batch BatchOf(const Outcome& outcome) {
    EXPECT_EQ(outcome.event.operation, static_cast<kvmill_operation>(KVMILL_WATCH_BATCH));
    EXPECT_EQ(outcome.event.code, KVMILL_OK);
    auto batch = Init<kvmill_watch_batch>();
    EXPECT_EQ(kvmill_result_watch(outcome.result.get(), &batch), KVMILL_OK) << kvmill_last_error();
    return batch;
  }
  // What of one batch becomes of the index.
  void Apply(const Outcome& outcome) {
    const kvmill_watch_batch batch = BatchOf(outcome);
    if (batch.snapshot_begin != 0) {
      index_.clear();
      ++snapshots_;
    }
    for (std::size_t i = 0; i < batch.event_count; ++i) {
      auto event = Init<kvmill_watched_event>();
      ASSERT_EQ(kvmill_result_watched(outcome.result.get(), i, &event), KVMILL_OK);
      const std::string key(static_cast<const char*>(event.key.data), event.key.bytes);
      ASSERT_NE(event.ns, nullptr);
      spaces_[event.ns->name] = event.ns->fingerprint;
      if (event.what == KVMILL_WATCHED_CLEARED) {
        index_.clear();
      } else if (event.what == KVMILL_WATCHED_REMOVED) {
        index_.erase(key);
      } else {
        index_[key] = event.tier;
      }
      last_ = event;
      last_.ns = nullptr;  // Gone with the result.
    }
    in_snapshot_ = batch.epoch == nullptr;
    if (in_snapshot_) return;
    epoch_ = batch.epoch;
    sequence_ = batch.sequence;
  }
  // Until the index has so many blocks, outside of a snapshot.
  void ReadUntil(std::size_t blocks) {
    for (in_snapshot_ = true; in_snapshot_ || index_.size() != blocks;) {
      const Outcome outcome = Next();
      ASSERT_NE(outcome.result, nullptr) << index_.size() << " blocks, want " << blocks;
      Apply(outcome);
    }
  }

  kvmill_queue* told_ = nullptr;
  kvmill_watch* watch_ = nullptr;
  std::map<std::string, std::uint32_t> index_;
  std::map<std::string, std::string> spaces_;
  kvmill_watched_event last_ = {};
  std::string epoch_;
  std::uint64_t sequence_ = 0;
  int snapshots_ = 0;
  bool in_snapshot_ = false;
};

TEST_F(Watches, TellOfBlocksThatComeAndGo) {
  kvmill_namespace* const ns = Open("watched");
  kvmill_namespace* const other = Open("not-watched");
  Put(ns, "block 0", SmallBlock(1));
  Put(other, "elsewhere", SmallBlock(1));
  ASSERT_EQ(WatchNamespace(ns), KVMILL_OK) << kvmill_last_error();
  ReadUntil(1);
  EXPECT_THAT(index_, UnorderedElementsAre(Pair("block 0", kHost)));
  EXPECT_EQ(snapshots_, 1);
  EXPECT_THAT(spaces_, UnorderedElementsAre(
                           Pair(kvmill_namespace_name(ns), kvmill_namespace_fingerprint(ns))));
  EXPECT_EQ(epoch_.size(), 32u);

  const SmallBlock values(2);
  const std::vector<kvmill_store_layer> layers = Inputs(values);
  kvmill_store_block block = Block("block 1", layers);
  const std::string parent = "block 0";
  block.parent = Key(parent);
  block.block_index = 1;
  Finish(kvmill_store(client_, ns, &block, 1, nullptr, nullptr, queue_, 2));
  for (bool done = false; !done;) {
    const Outcome outcome = Next();
    ASSERT_NE(outcome.result, nullptr);
    Apply(outcome);
    if (index_.size() < 2) continue;
    done = true;
    EXPECT_EQ(last_.what, static_cast<std::uint32_t>(KVMILL_WATCHED_STORED));
    EXPECT_EQ(std::string(static_cast<const char*>(last_.parent.data), last_.parent.bytes), parent);
    EXPECT_EQ(last_.token_count, SmallBlock::kTokens);
  }
  const kvmill_key gone = Key(parent);
  Finish(kvmill_remove(client_, ns, &gone, 1, nullptr, queue_, 3));
  ReadUntil(1);
  EXPECT_EQ(last_.what, static_cast<std::uint32_t>(KVMILL_WATCHED_REMOVED));
  Finish(kvmill_clear(client_, ns, nullptr, queue_, 4));
  ReadUntil(0);
  EXPECT_EQ(last_.what, static_cast<std::uint32_t>(KVMILL_WATCHED_CLEARED));

  // Goes on where it was.
  ASSERT_EQ(kvmill_watch_close(watch_), KVMILL_OK);
  watch_ = nullptr;
  const Outcome end = Next(0);
  ASSERT_NE(end.result, nullptr);
  EXPECT_EQ(end.event.operation, static_cast<kvmill_operation>(KVMILL_WATCH));
  EXPECT_EQ(end.event.code, KVMILL_CANCELLED);
  EXPECT_EQ(kvmill_queue_running(told_), 0u);
  Put(ns, "block 2", SmallBlock(1));
  auto options = Init<kvmill_watch_options>();
  options.namespace_name = kvmill_namespace_name(ns);
  options.epoch = epoch_.c_str();
  options.sequence = sequence_;
  ASSERT_EQ(Watch(options), KVMILL_OK) << kvmill_last_error();
  ReadUntil(1);
  EXPECT_THAT(index_, UnorderedElementsAre(Pair("block 2", kHost)));
  EXPECT_EQ(snapshots_, 1);
  kvmill_namespace_free(other);
  kvmill_namespace_free(ns);
}

TEST_F(Watches, TheNextBatchComesWhenTheLastWasFreed) {
  kvmill_namespace* const ns = Open("one-at-a-time");
  ASSERT_EQ(WatchNamespace(ns), KVMILL_OK) << kvmill_last_error();
  ReadUntil(0);
  EXPECT_EQ(kvmill_queue_running(told_), 1u);
  EXPECT_EQ(kvmill_queue_destroy(told_), KVMILL_FAILED_PRECONDITION);
  Put(ns, "block 0", SmallBlock(1));
  Outcome held = Next();
  ASSERT_NE(held.result, nullptr);
  Apply(held);
  Put(ns, "block 1", SmallBlock(1));
  EXPECT_EQ(Next(300).result, nullptr) << "a second one while the first is with the caller";
  EXPECT_FALSE(Readable());
  auto event = Init<kvmill_watched_event>();
  EXPECT_EQ(kvmill_result_watched(held.result.get(), 100, &event), KVMILL_OUT_OF_RANGE);
  auto stat = Init<kvmill_stat_result>();
  EXPECT_EQ(kvmill_result_stat(held.result.get(), &stat), KVMILL_FAILED_PRECONDITION);
  held.result.reset();
  while (index_.size() < 2) {
    const Outcome outcome = Next();
    ASSERT_NE(outcome.result, nullptr);
    Apply(outcome);
  }
  // A batch that is there when the watch is closed stays, and may be freed whenever.
  Put(ns, "block 2", SmallBlock(1));
  Outcome last = Next();
  ASSERT_NE(last.result, nullptr);
  ASSERT_EQ(kvmill_watch_close(watch_), KVMILL_OK);
  watch_ = nullptr;
  Apply(last);
  last.result.reset();
  EXPECT_EQ(index_.size(), 3u);
  EXPECT_EQ(Next(0).event.code, KVMILL_CANCELLED);
  EXPECT_EQ(Next(0).result, nullptr);
  kvmill_namespace_free(ns);
}

TEST_F(Watches, ADaemonThatRestartsIsFollowed) {
  kvmill_namespace* ns = Open("restarted");
  Put(ns, "block 0", SmallBlock(1));
  ASSERT_EQ(WatchNamespace(ns), KVMILL_OK) << kvmill_last_error();
  ReadUntil(1);
  char text[1024];
  ASSERT_EQ(kvmill_watch_trouble(watch_, text, sizeof(text)), KVMILL_OK);
  EXPECT_STREQ(text, "");
  KillDaemon();
  for (int i = 0; i < 6000 && text[0] == '\0'; ++i, usleep(10'000)) {
    ASSERT_EQ(kvmill_watch_trouble(watch_, text, sizeof(text)), KVMILL_OK);
  }
  EXPECT_THAT(text, HasSubstr("UNAVAILABLE"));
  char cut[4];
  ASSERT_EQ(kvmill_watch_trouble(watch_, cut, sizeof(cut)), KVMILL_OK);
  EXPECT_STREQ(cut, "UNA");
  kvmill_namespace_free(ns);
  StartDaemon();
  ns = Open("restarted");  // Until then nobody knows it.
  const std::string before = epoch_;
  Put(ns, "block 7", SmallBlock(1));
  while (snapshots_ < 2 || !index_.contains("block 7")) {
    const Outcome outcome = Next();
    ASSERT_NE(outcome.result, nullptr);
    Apply(outcome);
  }
  EXPECT_NE(epoch_, before);
  kvmill_namespace_free(ns);
}

TEST_F(Watches, WhatCannotBeMendedEndsThem) {
  auto options = Init<kvmill_watch_options>();
  options.namespace_name = "nobody opened it";
  ASSERT_EQ(Watch(options), KVMILL_OK) << kvmill_last_error();
  const Outcome end = Next();
  ASSERT_NE(end.result, nullptr);
  EXPECT_EQ(end.event.operation, static_cast<kvmill_operation>(KVMILL_WATCH));
  EXPECT_EQ(end.event.code, KVMILL_NOT_FOUND);
  auto batch = Init<kvmill_watch_batch>();
  EXPECT_EQ(kvmill_result_watch(end.result.get(), &batch), KVMILL_FAILED_PRECONDITION);
  ASSERT_EQ(kvmill_watch_close(watch_), KVMILL_OK);
  watch_ = nullptr;
  EXPECT_EQ(Next(0).result, nullptr) << "it has ended before";
}

TEST_F(Watches, RefuseWhatCannotBeRight) {
  const auto refused = [&](kvmill_watch_options options, const char* why) {
    EXPECT_EQ(Watch(options), KVMILL_INVALID_ARGUMENT) << why;
    EXPECT_THAT(kvmill_last_error(), HasSubstr(why));
    EXPECT_EQ(watch_, nullptr);
  };
  auto options = Init<kvmill_watch_options>();
  options.sequence = 1;
  refused(options, "a sequence without its epoch");
  options.epoch = "0123456789abcdef";
  refused(options, "an epoch has 32 hexadecimal digits");
  options.epoch = "0123456789abcdef0123456789abcdeg";
  refused(options, "an epoch has 32 hexadecimal digits");
  options = Init<kvmill_watch_options>();
  const std::string name(5000, 'n');
  options.namespace_name = name.c_str();
  refused(options, "namespace_name is longer than");
  options = Init<kvmill_watch_options>();
  options.struct_bytes = 3;
  refused(options, "struct_bytes");
  const std::string to = address();
  auto daemon = Init<kvmill_client_options>();
  EXPECT_EQ(kvmill_watch_open(&daemon, nullptr, told_, kTag, &watch_), KVMILL_INVALID_ARGUMENT);
  EXPECT_THAT(kvmill_last_error(), HasSubstr("daemon.address is null"));
  daemon.address = to.c_str();
  EXPECT_EQ(kvmill_watch_open(&daemon, nullptr, nullptr, kTag, &watch_), KVMILL_INVALID_ARGUMENT);
  EXPECT_EQ(kvmill_watch_open(&daemon, nullptr, told_, kTag, nullptr), KVMILL_INVALID_ARGUMENT);
  EXPECT_EQ(kvmill_watch_open(nullptr, nullptr, told_, kTag, &watch_), KVMILL_INVALID_ARGUMENT);
  char text[2];
  EXPECT_EQ(kvmill_watch_trouble(nullptr, text, sizeof(text)), KVMILL_INVALID_ARGUMENT);
  EXPECT_EQ(kvmill_watch_close(nullptr), KVMILL_OK);
  EXPECT_EQ(kvmill_queue_running(told_), 0u);
}

}  // namespace
}  // namespace kvmill::testing
