// client/kvmill_map.h: what is mapped, and for how long.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "tests/client/c_api/c_daemon.h"

namespace kvmill::testing {
namespace {

class Mapping : public CApiTest {
 protected:
  void SetUp() override {
    CApiTest::SetUp();
    ns_ = Open(::testing::UnitTest::GetInstance()->current_test_info()->name());
  }
  void TearDown() override {
    kvmill_namespace_free(ns_);
    CApiTest::TearDown();
  }
  // Stores blocks "0", "1", ...
  std::vector<std::string> Fill(std::uint32_t count) {
    std::vector<std::string> keys;
    for (std::uint32_t i = 0; i < count; ++i) {
      keys.push_back(std::to_string(i));
      Put(ns_, keys.back(), SmallBlock(i + 1));
    }
    return keys;
  }
  std::uint64_t Leases() {
    const Outcome outcome = Finish(kvmill_stat(client_, nullptr, queue_, 9));
    auto stat = Init<kvmill_stat_result>();
    EXPECT_EQ(kvmill_result_stat(outcome.result.get(), &stat), KVMILL_OK);
    return stat.leases;
  }
  bool WaitForLeases(std::uint64_t count) {
    // No lease has ended by itself by then.
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (Leases() != count) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      usleep(5000);
    }
    return true;
  }

  kvmill_namespace* ns_ = nullptr;
};

TEST_F(Mapping, ShowsTheBytesThatAFetchBrings) {
  const std::vector<std::string> keys = Fill(2);
  std::vector<std::vector<std::byte>> pages(4);
  std::vector<kvmill_fetch_output> outputs(4, Init<kvmill_fetch_output>());
  for (std::size_t i = 0; i < 4; ++i) {
    pages[i].resize(kvmill_namespace_page_bytes_max(ns_, 0));
    outputs[i].data = pages[i].data();
    outputs[i].data_bytes = pages[i].size();
  }
  auto options = Init<kvmill_fetch_options>();
  options.form = KVMILL_FORM_PAGES;
  const kvmill_key views[] = {Key(keys[0]), Key(keys[1])};
  const Outcome fetched =
      Finish(kvmill_fetch(client_, ns_, views, 2, outputs.data(), 4, &options, nullptr, queue_, 1));
  ASSERT_EQ(fetched.event.code, KVMILL_OK) << fetched.message();

  kvmill_mapped* const mapped = Map(ns_, {keys[0], keys[1], "missing"});
  ASSERT_EQ(kvmill_mapped_block_count(mapped), 3u);
  for (std::size_t block = 0; block < 2; ++block) {
    auto found = Init<kvmill_block_result>();
    ASSERT_EQ(kvmill_mapped_block(mapped, block, &found), KVMILL_OK);
    EXPECT_EQ(found.code, KVMILL_OK);
    EXPECT_STREQ(found.message, "");
    EXPECT_EQ(found.tier, static_cast<std::uint32_t>(KVMILL_TIER_HOST));
    EXPECT_EQ(found.token_count, 64u);
    for (std::size_t layer = 0; layer < 2; ++layer) {
      auto page = Init<kvmill_page>();
      ASSERT_EQ(kvmill_mapped_page(mapped, block, layer, &page), KVMILL_OK) << kvmill_last_error();
      std::size_t want_bytes = 0;
      kvmill_result_page_bytes(fetched.result.get(), block, layer, &want_bytes);
      ASSERT_EQ(page.bytes, want_bytes);
      EXPECT_EQ(std::memcmp(page.data, pages[2 * block + layer].data(), page.bytes), 0);
      EXPECT_EQ(page.head_count, 2u);
      EXPECT_EQ(page.token_count, 64u);

      kvmill_mapped_head heads[2];
      ASSERT_EQ(kvmill_mapped_heads(mapped, layer, block, 1, heads, 2), KVMILL_OK);
      for (const kvmill_mapped_head& head : heads) {
        EXPECT_EQ(head.kind, static_cast<std::uint32_t>(KVMILL_HEAD_TILE));
        EXPECT_EQ(head.bytes, kvmill_namespace_record_bytes(ns_, layer));
        EXPECT_EQ(head.tokens, 64u);
        EXPECT_GT(head.data, page.data);
        EXPECT_LE(static_cast<const std::byte*>(head.data) + head.bytes,
                  static_cast<const std::byte*>(page.data) + page.bytes);
      }
      EXPECT_NE(heads[0].data, heads[1].data);
    }
  }
  auto missing = Init<kvmill_block_result>();
  ASSERT_EQ(kvmill_mapped_block(mapped, 2, &missing), KVMILL_OK);
  EXPECT_EQ(missing.code, KVMILL_NOT_FOUND);
  auto page = Init<kvmill_page>();
  EXPECT_EQ(kvmill_mapped_page(mapped, 2, 0, &page), KVMILL_NOT_FOUND);
  EXPECT_EQ(kvmill_mapped_check(mapped, 0, 3), KVMILL_OK) << kvmill_last_error();
  EXPECT_EQ(kvmill_mapped_verify(mapped), KVMILL_OK) << kvmill_last_error();
  EXPECT_GT(kvmill_mapped_left_ms(mapped), 1000u);
  EXPECT_LE(kvmill_mapped_left_ms(mapped), 30000u);
  EXPECT_EQ(Leases(), 2u);

  const Outcome touched = Finish(kvmill_touch(client_, ns_, views, 2, nullptr, queue_, 1));
  std::uint64_t count = 0;
  EXPECT_EQ(kvmill_result_count(touched.result.get(), &count), KVMILL_OK);
  EXPECT_EQ(count, 2u);
  kvmill_mapped_free(mapped);
  EXPECT_TRUE(WaitForLeases(0));
}

TEST_F(Mapping, IndicesAndSizesThatAreWrongAreNamed) {
  const std::vector<std::string> keys = Fill(1);
  kvmill_mapped* const mapped = Map(ns_, keys);
  auto block = Init<kvmill_block_result>();
  auto page = Init<kvmill_page>();
  std::vector<kvmill_mapped_head> heads(4);
  const auto out_of_range = [](kvmill_code code, const char* text) {
    EXPECT_EQ(code, KVMILL_OUT_OF_RANGE);
    EXPECT_NE(std::string(kvmill_last_error()).find(text), std::string::npos)
        << kvmill_last_error();
  };
  out_of_range(kvmill_mapped_block(mapped, 1, &block), "block 1 of 1");
  out_of_range(kvmill_mapped_page(mapped, 1, 0, &page), "block 1 of 1");
  out_of_range(kvmill_mapped_page(mapped, 0, 2, &page), "layer 2 of 2");
  out_of_range(kvmill_mapped_heads(mapped, 2, 0, 1, heads.data(), 4), "layer 2 of 2");
  out_of_range(kvmill_mapped_heads(mapped, 0, 0, 2, heads.data(), 4), "2 blocks from block 0");
  out_of_range(kvmill_mapped_heads(mapped, 0, 2, 0, heads.data(), 4), "0 blocks from block 2");
  out_of_range(kvmill_mapped_heads(mapped, 0, 0, 1, heads.data(), 1), "head_count 1, want 2");
  out_of_range(kvmill_mapped_check(mapped, 2, 0), "block 2 of 1");
  out_of_range(kvmill_mapped_check(mapped, 0, 2), "2 blocks");
  out_of_range(kvmill_mapped_check(mapped, 1, SIZE_MAX), "blocks from block 1");
  EXPECT_EQ(kvmill_mapped_heads(mapped, 0, 0, 1, nullptr, 2), KVMILL_INVALID_ARGUMENT);
  EXPECT_EQ(kvmill_mapped_page(mapped, 0, 0, nullptr), KVMILL_INVALID_ARGUMENT);
  page.struct_bytes = 4;
  EXPECT_EQ(kvmill_mapped_page(mapped, 0, 0, &page), KVMILL_INVALID_ARGUMENT);
  // An older caller's page ends earlier.
  std::memset(&page, 0x5a, sizeof(page));
  page.struct_bytes = offsetof(kvmill_page, head_count);
  EXPECT_EQ(kvmill_mapped_page(mapped, 0, 0, &page), KVMILL_OK);
  EXPECT_EQ(page.head_count, 0x5a5a5a5au) << "written behind the end";

  auto options = Init<kvmill_map_options>();
  options.lease_ms = UINT64_MAX;
  const kvmill_key key = Key(keys[0]);
  EXPECT_EQ(kvmill_map(client_, ns_, &key, 1, &options, nullptr, queue_, 1),
            KVMILL_INVALID_ARGUMENT);
  EXPECT_NE(std::string(kvmill_last_error()).find("lease_ms"), std::string::npos);
  options.lease_ms = 3'600'000;
  EXPECT_EQ(Finish(kvmill_map(client_, ns_, &key, 1, &options, nullptr, queue_, 1)).event.code,
            KVMILL_INVALID_ARGUMENT)
      << "the daemon's limit";
  options = Init<kvmill_map_options>();
  options.struct_bytes = 4;
  EXPECT_EQ(kvmill_map(client_, ns_, &key, 1, &options, nullptr, queue_, 1),
            KVMILL_INVALID_ARGUMENT);
  EXPECT_NE(std::string(kvmill_last_error()).find("struct_bytes 4"), std::string::npos);
  EXPECT_EQ(kvmill_queue_running(queue_), 0u) << "nothing was started";
  kvmill_client* const other = Connect();
  EXPECT_EQ(kvmill_renew(other, mapped, 0, nullptr, queue_, 1), KVMILL_INVALID_ARGUMENT);
  kvmill_client_destroy(other);
  kvmill_mapped* nothing = mapped;
  const Outcome stat = Finish(kvmill_stat(client_, nullptr, queue_, 1));
  EXPECT_EQ(kvmill_result_mapped(stat.result.get(), &nothing), KVMILL_FAILED_PRECONDITION);
  EXPECT_EQ(nothing, nullptr);
  kvmill_mapped_free(mapped);
}

TEST_F(Mapping, LeasesEndARenewalMovesTheEndAndAnExpiredOneStaysSo) {
  const std::vector<std::string> keys = Fill(1);
  kvmill_mapped* const shorter = Map(ns_, keys, 150);
  auto page = Init<kvmill_page>();
  const kvmill_code before_its_end = kvmill_mapped_page(shorter, 0, 0, &page);
  if (kvmill_mapped_left_ms(shorter) > 0) {
    EXPECT_EQ(before_its_end, KVMILL_OK);
  }
  // A machine that stands still may let a lease end before it is renewed.
  kvmill_mapped* renewed = nullptr;
  kvmill_code renewal = KVMILL_ABORTED;
  for (int i = 0; i < 50 && renewal == KVMILL_ABORTED; ++i) {
    kvmill_mapped_free(renewed);
    renewed = Map(ns_, keys, 150);
    renewal = Finish(kvmill_renew(client_, renewed, 30000, nullptr, queue_, 1)).event.code;
  }
  ASSERT_EQ(renewal, KVMILL_OK);
  EXPECT_GT(kvmill_mapped_left_ms(renewed), 10000u);
  usleep(160'000);
  EXPECT_EQ(kvmill_mapped_check(shorter, 0, 1), KVMILL_ABORTED);
  EXPECT_EQ(kvmill_mapped_left_ms(shorter), 0u);
  EXPECT_EQ(kvmill_mapped_page(shorter, 0, 0, &page), KVMILL_ABORTED);
  kvmill_mapped_head heads[2];
  EXPECT_EQ(kvmill_mapped_heads(shorter, 0, 0, 1, heads, 2), KVMILL_ABORTED);
  EXPECT_EQ(Finish(kvmill_renew(client_, shorter, 30000, nullptr, queue_, 1)).event.code,
            KVMILL_ABORTED);
  EXPECT_EQ(kvmill_mapped_check(shorter, 0, 1), KVMILL_ABORTED);
  EXPECT_EQ(kvmill_mapped_check(renewed, 0, 1), KVMILL_OK) << kvmill_last_error();
  kvmill_mapped_free(shorter);
  kvmill_mapped_free(renewed);
  EXPECT_TRUE(WaitForLeases(0));
}

TEST_F(Mapping, HandlesShareLeasesAndReleaseEndsThemForAll) {
  const std::vector<std::string> keys = Fill(1);
  const kvmill_key key = Key(keys[0]);
  // A result that nobody looked into holds them, too.
  Finish(kvmill_map(client_, ns_, &key, 1, nullptr, nullptr, queue_, 1));
  EXPECT_TRUE(WaitForLeases(0));

  Outcome outcome = Finish(kvmill_map(client_, ns_, &key, 1, nullptr, nullptr, queue_, 1));
  kvmill_mapped *first = nullptr, *second = nullptr;
  ASSERT_EQ(kvmill_result_mapped(outcome.result.get(), &first), KVMILL_OK);
  ASSERT_EQ(kvmill_result_mapped(outcome.result.get(), &second), KVMILL_OK);
  outcome.result.reset();
  kvmill_mapped_free(first);
  EXPECT_EQ(Leases(), 1u);
  auto page = Init<kvmill_page>();
  ASSERT_EQ(kvmill_mapped_page(second, 0, 0, &page), KVMILL_OK);
  ASSERT_EQ(kvmill_mapped_release(second), KVMILL_OK);
  EXPECT_TRUE(WaitForLeases(0));
  EXPECT_EQ(kvmill_mapped_release(second), KVMILL_OK) << "once is enough, twice no harm";
  EXPECT_EQ(kvmill_mapped_check(second, 0, 1), KVMILL_ABORTED);
  EXPECT_NE(std::string(kvmill_last_error()).find("given back"), std::string::npos);
  EXPECT_EQ(kvmill_mapped_left_ms(second), 0u);
  EXPECT_EQ(Finish(kvmill_renew(client_, second, 0, nullptr, queue_, 1)).event.code,
            KVMILL_ABORTED);
  unsigned sum = 0;  // What came to lie there can be read, and counts for nothing.
  for (std::size_t i = 0; i < page.bytes; ++i) {
    sum += static_cast<const volatile unsigned char*>(page.data)[i];
  }
  EXPECT_GT(sum, 0u);
  kvmill_mapped_free(second);
}

TEST_F(Mapping, OutlivesItsClientAndItsDaemonButNotForReading) {
  const std::vector<std::string> keys = Fill(1);
  kvmill_mapped* const orphan = Map(ns_, keys);
  ASSERT_EQ(kvmill_client_destroy(client_), KVMILL_OK);
  client_ = Connect();
  EXPECT_EQ(kvmill_mapped_check(orphan, 0, 1), KVMILL_ABORTED);
  EXPECT_TRUE(WaitForLeases(0));

  kvmill_mapped* const widow = Map(ns_, keys);
  kvmill_mapped* const running = Map(ns_, keys);
  StopDaemon();
  ASSERT_EQ(kvmill_renew(client_, running, 0, nullptr, queue_, 1), KVMILL_OK);
  kvmill_mapped_free(running);  // While it is renewed.
  KillDaemon();
  auto event = Init<kvmill_event>();
  ASSERT_EQ(kvmill_queue_next(queue_, 60000, &event), KVMILL_OK);
  EXPECT_NE(event.code, KVMILL_OK);
  kvmill_result_free(event.result);
  for (int i = 0; i < 6000 && kvmill_mapped_check(widow, 0, 1) == KVMILL_OK; ++i) usleep(5000);
  EXPECT_EQ(kvmill_mapped_check(widow, 0, 1), KVMILL_ABORTED);
  auto block = Init<kvmill_block_result>();
  EXPECT_EQ(kvmill_mapped_block(widow, 0, &block), KVMILL_OK);
  EXPECT_EQ(block.token_count, 64u);
  kvmill_mapped_free(widow);
  kvmill_mapped_free(orphan);
  StartDaemon();
}

TEST_F(Mapping, IsNotThereInAChildOfFork) {
  const std::vector<std::string> keys = Fill(1);
  kvmill_mapped* const mapped = Map(ns_, keys);
  const pid_t child = fork();
  if (child == 0) {
    int bad = 0;
    auto page = Init<kvmill_page>();
    kvmill_mapped_head heads[2];
    bad += kvmill_mapped_page(mapped, 0, 0, &page) != KVMILL_FAILED_PRECONDITION;
    bad += kvmill_mapped_heads(mapped, 0, 0, 1, heads, 2) != KVMILL_FAILED_PRECONDITION;
    bad += kvmill_mapped_check(mapped, 0, 1) != KVMILL_FAILED_PRECONDITION;
    bad += kvmill_mapped_verify(mapped) != KVMILL_FAILED_PRECONDITION;
    bad += kvmill_mapped_left_ms(mapped) != 0;
    bad += kvmill_renew(client_, mapped, 0, nullptr, queue_, 1) != KVMILL_FAILED_PRECONDITION;
    float vectors[256] = {};
    auto attention = Init<kvmill_attention>();
    attention.query = vectors;
    attention.output = vectors + 128;
    attention.q_heads = 2;
    bad += kvmill_attend(mapped, 0, &attention) != KVMILL_FAILED_PRECONDITION;
    bad += kvmill_mapped_release(mapped) != KVMILL_OK;
    kvmill_mapped_free(mapped);
    _exit(bad);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_EQ(kvmill_mapped_check(mapped, 0, 1), KVMILL_OK) << "the child gave nothing back";
  EXPECT_EQ(Leases(), 1u);
  kvmill_mapped_free(mapped);
}

TEST_F(Mapping, ManyThreadsReadWhileOneRenewsAndThenReleases) {
  const std::vector<std::string> keys = Fill(4);
  kvmill_mapped* const mapped = Map(ns_, keys);
  std::atomic<bool> released{false};
  std::atomic<int> reads{0}, bad{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      std::vector<float> query(4 * 64, 0.5f), output(query.size());
      auto attention = Init<kvmill_attention>();
      attention.query = query.data();
      attention.output = output.data();
      attention.q_heads = 4;
      for (kvmill_code code = KVMILL_OK; code == KVMILL_OK; ++reads) {
        const bool was_released = released;
        code = kvmill_attend(mapped, 1, &attention);
        bad += code != KVMILL_OK && code != KVMILL_ABORTED;
        bad += was_released && code == KVMILL_OK;
      }
    });
  }
  for (int i = 0; i < 20; ++i) {
    const Outcome renewed = Finish(kvmill_renew(client_, mapped, 0, nullptr, queue_, 1));
    EXPECT_EQ(renewed.event.code, KVMILL_OK) << renewed.message();
  }
  while (reads < 8 && bad == 0) usleep(1000);  // Their turns may be late.
  kvmill_mapped_release(mapped);
  released = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(bad, 0);
  kvmill_mapped_free(mapped);
}

}  // namespace
}  // namespace kvmill::testing
