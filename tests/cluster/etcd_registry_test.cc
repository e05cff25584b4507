// The registry against real etcd processes: killed, stopped, emptied, compacted. What
// service/cluster relies on (registry.h) is asserted here for the real one; the simulator's is held
// to the same.
#include <gmock/gmock.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "absl/strings/str_cat.h"
#include "tests/cluster/etcd_registry_fixture.h"

namespace kvmill::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST_F(EtcdRegistryTest, WritesCompareAndEndWithTheirLease) {
  Connect();
  const auto lease = Grant(60);
  ASSERT_TRUE(lease.ok()) << lease.status();
  EXPECT_EQ(lease->seconds, 60);
  EXPECT_NE(lease->header.cluster_id, 0u);

  const auto put = Put("/t/a", "1", lease->id);
  ASSERT_TRUE(put.ok()) << put.status();
  EXPECT_TRUE(put->done);
  const Registry::Revision first = put->current->mod_revision;
  EXPECT_EQ(first, put->header.revision);

  // It is there now.
  const auto again = Put("/t/a", "2", lease->id);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_FALSE(again->done);
  ASSERT_TRUE(again->current.has_value());
  EXPECT_EQ(again->current->value, "1");
  EXPECT_EQ(again->current->mod_revision, first);
  EXPECT_EQ(again->current->lease, lease->id);

  const auto changed = Put("/t/a", "2", lease->id, first);
  ASSERT_TRUE(changed.ok() && changed->done) << changed.status();
  EXPECT_GT(changed->current->mod_revision, first);
  const auto missing = Put("/t/b", "1", lease->id, first);
  ASSERT_TRUE(missing.ok()) << missing.status();
  EXPECT_FALSE(missing->done);
  EXPECT_FALSE(missing->current.has_value());

  ASSERT_TRUE(Put("/t/b", "3", lease->id)->done);
  ASSERT_TRUE(Put("/u/c", "4", lease->id)->done);
  const auto wrong = Delete("/t/a", first);
  ASSERT_TRUE(wrong.ok()) << wrong.status();
  EXPECT_FALSE(wrong->done);
  EXPECT_EQ(wrong->current->value, "2");

  auto listing = List();
  ASSERT_TRUE(listing.ok()) << listing.status();
  ASSERT_EQ(listing->entries.size(), 2u);
  EXPECT_EQ(listing->entries[0].key, "/t/a");
  EXPECT_EQ(listing->entries[0].value, "2");
  EXPECT_EQ(listing->entries[1].key, "/t/b");
  EXPECT_EQ(listing->header.cluster_id, lease->header.cluster_id);

  const auto deleted = Delete("/t/a", changed->current->mod_revision);
  ASSERT_TRUE(deleted.ok() && deleted->done) << deleted.status();
  EXPECT_FALSE(deleted->current.has_value());

  ASSERT_TRUE(Revoke(lease->id).ok());
  EXPECT_TRUE(List()->entries.empty());
  EXPECT_EQ(Revoke(lease->id).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(KeepAlive(lease->id).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Put("/t/a", "5", lease->id).status().code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(List()->entries.empty());
}

TEST_F(EtcdRegistryTest, RefusesWhatIsOutOfBounds) {
  Connect();
  const auto code = [](const auto& result) { return result.status().code(); };
  EXPECT_EQ(code(Grant(0)), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(Grant(Registry::kLeaseSecondsMax + 1)), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(Put("", "1", 1)), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(Put(std::string(Registry::kKeyBytesMax + 1, 'a'), "1", 1)),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(Put("/t/a", std::string(Registry::kValueBytesMax + 1, 'a'), 1)),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(Put("/t/a", "1", 0)), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(Delete("/t/a", 0)), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(List("")), absl::StatusCode::kInvalidArgument);
  EXPECT_FALSE(EtcdRegistry::Create({}, loop_).ok());
}

TEST_F(EtcdRegistryTest, AWatchTellsEveryChangeOnceAndInOrder) {
  Connect();
  const auto lease = Grant(60);
  ASSERT_TRUE(lease.ok());
  const Registry::Revision a = Put("/t/a", "1", lease->id)->header.revision;
  Watcher watcher;
  const Registry::CallId id = Watch(&watcher, a);
  ASSERT_TRUE(watcher.WaitStarted());
  EXPECT_EQ(watcher.started->cluster_id, lease->header.cluster_id);
  const Registry::Revision b = Put("/t/b", "2", lease->id)->header.revision;
  ASSERT_TRUE(Put("/u/c", "3", lease->id)->done);  // Not of the prefix.
  const Registry::Revision a2 = Put("/t/a", "4", lease->id, a)->header.revision;
  const Registry::Revision b2 = Delete("/t/b", b)->header.revision;
  ASSERT_TRUE(watcher.WaitChanges(4));
  EXPECT_THAT(watcher.changes,
              ElementsAre(Watcher::Change{"/t/a", "1", a}, Watcher::Change{"/t/b", "2", b},
                          Watcher::Change{"/t/a", "4", a2}, Watcher::Change{"/t/b", "-", b2}));
  // From where one left off nothing comes twice.
  Watcher later;
  Watch(&later, a2 + 1);
  ASSERT_TRUE(later.WaitChanges(1));
  Cancel(id);
  ASSERT_TRUE(Put("/t/d", "5", lease->id)->done);
  ASSERT_TRUE(later.WaitChanges(2));
  EXPECT_EQ(later.changes[0].key, "/t/b");
  EXPECT_EQ(later.changes[1].key, "/t/d");
  EXPECT_EQ(watcher.changes.size(), 4u);
  EXPECT_FALSE(watcher.ended);
}

TEST_F(EtcdRegistryTest, AQuietWatchLivesLongerThanItsSilence) {
  Connect();
  // A machine that stands still for most of a second takes etcd's word from it: not three times.
  bool lives = false;
  for (int i = 0; i < 3 && !lives; ++i) {
    Watcher watcher;
    const Registry::CallId id = Watch(&watcher, List()->header.revision + 1, Millis(1000));
    ASSERT_TRUE(watcher.WaitFor([](const Watcher& w) { return w.started || w.ended; }));
    lives = !watcher.WaitEnded(Millis(2200));
    Cancel(id);
  }
  EXPECT_TRUE(lives);
}

// On a busy machine some time passes between the last word of a stream and its end.
TEST_F(EtcdRegistryTest, AWatchWhoseStreamIsOverAsksForNothingMore) {
  Connect();
  Watcher watcher;
  Watch(&watcher, List()->header.revision + 1, Millis(1000));  // It asks every 333 ms.
  ASSERT_TRUE(watcher.WaitStarted());
  loop_.Run([this] {
    etcd_.Kill();
    std::this_thread::sleep_for(Millis(100));  // The last word waits for the loop.
    loop_.Post([] { std::this_thread::sleep_for(Millis(400)); });
  });
  EXPECT_TRUE(watcher.WaitEnded());
  // On a machine that stands still meanwhile its silence ends it.
  EXPECT_TRUE(absl::IsUnavailable(watcher.broken) || absl::IsDeadlineExceeded(watcher.broken))
      << watcher.broken;
}

TEST_F(EtcdRegistryTest, ManyLeasesExpireAtOnce) {
  Connect();
  constexpr int kKeptSeconds = 5;
  const auto granted = std::chrono::steady_clock::now();
  const auto kept = Grant(kKeptSeconds);
  ASSERT_TRUE(Put("/t/kept", "1", kept->id)->done);
  Registry::Revision from = 0;  // The first may be gone before the last is there.
  constexpr std::size_t kLeases = 30;
  for (std::size_t i = 0; i < kLeases; ++i) {
    absl::StatusOr<Registry::Written> put = absl::NotFoundError("not tried");
    // Its lease may end before it is written, when the machine stands still in between.
    for (int tries = 0; tries < 5 && absl::IsNotFound(put.status()); ++tries) {
      const auto lease = Grant(1);
      ASSERT_TRUE(lease.ok()) << lease.status();
      put = Put(absl::StrCat("/t/n", i), "1", lease->id);
    }
    ASSERT_TRUE(put.ok() && put->done) << put.status();
    if (from == 0) from = put->header.revision;
    ASSERT_TRUE(KeepAlive(kept->id).ok());
  }
  Watcher watcher;
  Watch(&watcher, from);
  const auto gone = [](const Watcher& w) {
    return static_cast<std::size_t>(
        std::count_if(w.changes.begin(), w.changes.end(),
                      [](const Watcher::Change& change) { return change.value == "-"; }));
  };
  const auto all_gone = [&](const Watcher& w) { return gone(w) >= kLeases; };
  const auto deadline = granted + std::chrono::seconds(30);
  // Longer than the one that is kept would last by itself.
  const auto kept_until = granted + std::chrono::milliseconds(kKeptSeconds * 1000 + 700);
  while (
      std::chrono::steady_clock::now() < deadline &&
      (!watcher.WaitFor(all_gone, Millis(250)) || std::chrono::steady_clock::now() < kept_until)) {
    ASSERT_TRUE(KeepAlive(kept->id).ok());
    std::this_thread::sleep_for(Millis(50));
  }
  EXPECT_TRUE(watcher.WaitFor(
      [&](const Watcher& w) { return gone(w) == kLeases && w.changes.size() == 2 * kLeases; }));
  const auto listing = List();
  ASSERT_EQ(listing->entries.size(), 1u);
  EXPECT_EQ(listing->entries[0].key, "/t/kept");
}

TEST_F(EtcdRegistryTest, GoesOnAfterEtcdWasKilled) {
  Connect();
  const auto lease = Grant(60);
  const Registry::Revision a = Put("/t/a", "1", lease->id)->header.revision;
  Watcher watcher;
  Watch(&watcher, a + 1);
  ASSERT_TRUE(watcher.WaitStarted());
  etcd_.Kill();
  ASSERT_TRUE(watcher.WaitEnded());
  EXPECT_EQ(watcher.broken.code(), absl::StatusCode::kUnavailable) << watcher.broken;
  const auto failed = List("/t/", Millis(30'000));
  EXPECT_EQ(failed.status().code(), absl::StatusCode::kUnavailable) << failed.status();
  EXPECT_LT(took_, Millis(15'000)) << "a refused connection needs no deadline";
  EXPECT_THAT(std::string(failed.status().message()), HasSubstr(etcd_.address().ToString()));

  ASSERT_TRUE(etcd_.Start());
  const auto listing = ListAgain();
  ASSERT_TRUE(listing.ok()) << listing.status();
  EXPECT_EQ(listing->entries.size(), 1u);
  EXPECT_EQ(listing->header.cluster_id, lease->header.cluster_id);
  EXPECT_TRUE(KeepAlive(lease->id).ok());
  // The change that nobody watched is told to who watches from there.
  const Registry::Revision b = Put("/t/b", "2", lease->id)->header.revision;
  Watcher resumed;
  Watch(&resumed, a + 1);
  ASSERT_TRUE(resumed.WaitChanges(1));
  EXPECT_EQ(resumed.changes[0], (Watcher::Change{"/t/b", "2", b}));
}

TEST_F(EtcdRegistryTest, AStoppedEtcdHoldsNobodyUp) {
  constexpr Millis kInTime(4000);  // Of deadlines of 300 ms; etcd stands still for good.
  Connect();
  const auto lease = Grant(60);
  const Registry::Revision a = Put("/t/a", "1", lease->id)->header.revision;
  Watcher watcher;
  Watch(&watcher, a + 1, Millis(3000));
  ASSERT_TRUE(watcher.WaitStarted());
  etcd_.Stop();
  const auto stopped = std::chrono::steady_clock::now();
  EXPECT_EQ(List("/t/", Millis(300)).status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_LT(took_, kInTime);
  EXPECT_EQ(KeepAlive(lease->id, Millis(300)).status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_LT(took_, kInTime);
  EXPECT_EQ(Put("/t/b", "2", lease->id, 0, Millis(300)).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_LT(took_, kInTime);
  ASSERT_TRUE(watcher.WaitEnded());
  EXPECT_EQ(watcher.broken.code(), absl::StatusCode::kDeadlineExceeded) << watcher.broken;
  EXPECT_LT(std::chrono::steady_clock::now() - stopped, 5 * kInTime);
  etcd_.Continue();
  const auto listing = ListAgain();
  ASSERT_TRUE(listing.ok()) << listing.status();
  EXPECT_GE(listing->entries.size(), 1u);  // The put may have been done in the end.
}

TEST_F(EtcdRegistryTest, AnotherHistoryIsSeen) {
  Connect();
  const auto lease = Grant(60);
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(Put(absl::StrCat("/t/", i), "1", lease->id)->done);
  const Registry::Header before = List()->header;

  ASSERT_TRUE(etcd_.StartEmpty());
  const auto emptied = ListAgain();
  ASSERT_TRUE(emptied.ok()) << emptied.status();
  EXPECT_NE(emptied->header.cluster_id, before.cluster_id);
  EXPECT_TRUE(emptied->entries.empty());
  EXPECT_EQ(KeepAlive(lease->id).status().code(), absl::StatusCode::kNotFound);

  // Set up as before it has the same id: only the revision tells, and a watch says so as it starts.
  ASSERT_TRUE(etcd_.StartEmpty(/*same_id=*/true));
  const auto again = ListAgain();
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->header.cluster_id, emptied->header.cluster_id);
  EXPECT_LT(again->header.revision, before.revision);
  Watcher watcher;
  Watch(&watcher, before.revision + 1);
  ASSERT_TRUE(watcher.WaitStarted());
  EXPECT_LT(watcher.started->revision, before.revision);
}

TEST_F(EtcdRegistryTest, CompactedHistoryIsSaidToBe) {
  Connect();
  const auto lease = Grant(60);
  const Registry::Revision a = Put("/t/a", "1", lease->id)->header.revision;
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(Put(absl::StrCat("/t/b", i), "1", lease->id)->done);
  const Registry::Revision last = List()->header.revision;
  std::string said;
  ASSERT_TRUE(etcd_.Control({"compact", absl::StrCat(last)}, &said)) << said;
  Watcher watcher;
  Watch(&watcher, a + 1);
  ASSERT_TRUE(watcher.WaitEnded());
  EXPECT_EQ(watcher.compacted, last);
  EXPECT_TRUE(watcher.changes.empty());
  // What comes after is kept.
  Watcher later;
  Watch(&later, last + 1);
  ASSERT_TRUE(Put("/t/c", "2", lease->id)->done);
  ASSERT_TRUE(later.WaitChanges(1));
  EXPECT_FALSE(later.ended);
}

TEST_F(EtcdRegistryTest, OneOfTwoServersIsEnough) {
  // One that refuses, and one that takes connections and says nothing: a listener without a server.
  const int silent = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t bytes = sizeof(address);
  ASSERT_EQ(bind(silent, reinterpret_cast<sockaddr*>(&address), bytes), 0);
  ASSERT_EQ(listen(silent, 16), 0);
  ASSERT_EQ(getsockname(silent, reinterpret_cast<sockaddr*>(&address), &bytes), 0);
  for (const std::uint16_t port : {FreePort(), std::uint16_t{ntohs(address.sin_port)}}) {
    EtcdOptions options;
    options.servers = {{"127.0.0.1", port}, etcd_.address()};
    Connect(options);
    // Each has half of the time. Not every time does the machine stand still for so long.
    constexpr Millis kDeadline(4000);
    absl::StatusOr<Registry::Listing> listing = List("/t/", kDeadline);
    for (int i = 0; i < 3 && !listing.ok(); ++i) listing = List("/t/", kDeadline);
    ASSERT_TRUE(listing.ok()) << listing.status();
    // From now on the one that answers is asked first; a watch too.
    Millis least = kDeadline;
    for (int i = 0; i < 3 && least >= kDeadline / 2; ++i) {
      if (List("/t/", kDeadline).ok()) least = std::min(least, took_);
    }
    EXPECT_LT(least, kDeadline / 2);
    Watcher watcher;
    Watch(&watcher, listing->header.revision + 1);
    EXPECT_TRUE(watcher.WaitStarted());
  }
  close(silent);
}

TEST_F(EtcdRegistryTest, SpeaksIpv6) {
  const int probe = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  address.sin6_addr = in6addr_loopback;
  const bool available =
      probe >= 0 && bind(probe, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
  if (probe >= 0) close(probe);
  if (!available) GTEST_SKIP() << "this machine has no ::1";
  EtcdOptions options;
  options.servers = {etcd_.address_ipv6()};
  Connect(options);
  EXPECT_TRUE(List().ok());
}

TEST_F(EtcdRegistryTest, CancelledCallsTellNothingMore) {
  Connect();
  ASSERT_TRUE(List().ok());
  etcd_.Stop();
  std::atomic<int> told{0};
  const auto alive = std::make_shared<int>(0);
  loop_.Run([&] {
    const std::int64_t deadline = loop_.clock().MonotonicNanos() + 200 * kMs;
    const auto id = registry_->List("/t/", deadline, [&told, alive](const auto&) { ++told; });
    registry_->Cancel(id);
    EXPECT_EQ(alive.use_count(), 1) << "what was cancelled is destroyed";
    registry_->List("/t/", deadline, [&told, alive](const auto&) { ++told; });
    registry_->Watch("/t/", 1, 1000 * kMs,
                     Registry::WatchCalls{.started = {},
                                          .events = {},
                                          .compacted = {},
                                          .broken = [&told, alive](auto) { ++told; }});
  });
  Disconnect();
  EXPECT_EQ(alive.use_count(), 1);
  std::this_thread::sleep_for(Millis(300));
  EXPECT_EQ(told, 0);
  etcd_.Continue();
}

}  // namespace
}  // namespace kvmill::testing
