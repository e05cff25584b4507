// Sessions and leases as a state machine: a clock that only moves when told to, a real store
// underneath.
#include "service/session_table.h"

#include <gmock/gmock.h>

#include <memory>
#include <random>

#include "client/shared_memory.h"
#include "tests/long_form.h"
#include "tests/storage/tiered_store_fixture.h"

namespace kvmill {
namespace {

using ::testing::HasSubstr;
constexpr std::int64_t kMs = 1'000'000;

class Listener : public SessionListener {
 public:
  void OnLeasesExpired(const std::vector<LeaseId>& leases) override {
    expired.insert(expired.end(), leases.begin(), leases.end());
  }
  void OnDrain() override { ++drains; }
  void OnEnd(const absl::Status& why) override {
    EXPECT_FALSE(end.has_value()) << "told twice";
    end = why;
  }
  std::vector<LeaseId> expired;
  int drains = 0;
  std::optional<absl::Status> end;
};

class SessionTableTest : public TieredStoreTest {
 protected:
  void SetUp() override {
    Open(false);
    for (std::uint64_t number = 1; number <= 8; ++number) ASSERT_TRUE(Put(number).ok());
    table_ = std::make_unique<SessionTable>(table_options_, clock_);
    table_->ClientEntered(local_.door_client);
    table_->ClientEntered(other_.door_client);
  }
  void TearDown() override {
    table_.reset();
    EXPECT_EQ(store_->stats().references, 0u) << "something still holds a block";
  }

  void Advance(std::int64_t nanos) {
    clock_.AdvanceNanos(nanos);
    table_->Advance();
  }
  std::string OpenSession(const Caller& caller, std::shared_ptr<Listener> listener = nullptr) {
    if (listener == nullptr) listener = std::make_shared<Listener>();
    const auto id = table_->Open(caller, "", listener);
    EXPECT_TRUE(id.ok()) << id.status();
    return id.ok() ? *id : "";
  }
  std::vector<BlockRef> Blocks(std::uint64_t first, std::uint64_t count) {
    std::vector<BlockRef> blocks;
    for (std::uint64_t i = 0; i < count; ++i) {
      blocks.push_back(store_->FetchFromMemory(Id(first + i), FetchPath::kMap));
      EXPECT_TRUE(blocks.back().valid());
    }
    return blocks;
  }
  absl::StatusOr<LeaseId> Lease(const std::string& session, std::uint64_t first,
                                std::uint64_t count, std::int64_t nanos = 1000 * kMs) {
    return table_->Grant(local_, session, nanos, Blocks(first, count));
  }
  std::uint64_t leases() const { return table_->stats().leases; }
  std::uint64_t held() const { return store_->stats().references; }

  SessionTable::Options table_options_;
  const Caller local_{"default", 7};
  const Caller other_{"uid-5", 8};
  const Caller remote_{"default", 0};
  std::unique_ptr<SessionTable> table_;
};

TEST_F(SessionTableTest, ALeaseHoldsItsBlockUntilReleased) {
  const std::string session = OpenSession(local_);
  const LeaseId first = *Lease(session, 1, 3);
  EXPECT_EQ(leases(), 3u);
  EXPECT_EQ(held(), 3u);
  EXPECT_GT(table_->stats().leased_bytes, 0u);
  EXPECT_EQ(*table_->Release(local_, session, {first, first + 2}), 2u);
  EXPECT_EQ(*table_->Release(local_, session, {first, first + 2, 999}), 0u) << "once";
  EXPECT_EQ(held(), 1u);
  EXPECT_EQ(*table_->Release(local_, session, {first + 1}), 1u);
  EXPECT_EQ(held(), 0u);
  EXPECT_EQ(table_->stats().leased_bytes, 0u);
  EXPECT_EQ(table_->stats().lease_expirations, 0u);
}

TEST_F(SessionTableTest, AnExpiredLeaseIsOverAtOnceAndItsBlockIsLetGoAGraceLater) {
  auto listener = std::make_shared<Listener>();
  const std::string session = OpenSession(local_, listener);
  const LeaseId first = *Lease(session, 1, 2);
  Advance(999 * kMs);
  EXPECT_EQ(leases(), 2u);
  Advance(1 * kMs);
  EXPECT_EQ(leases(), 0u);
  EXPECT_EQ(table_->stats().leased_bytes, 0u);
  EXPECT_EQ(table_->stats().lease_expirations, 2u);
  EXPECT_EQ(listener->expired, (std::vector<LeaseId>{first, first + 1}));
  EXPECT_EQ(held(), 2u) << "readers that just looked at their watch";
  EXPECT_FALSE(table_->WithLease(7, first, [](const BlockRef&) {}));
  EXPECT_EQ(*table_->Renew(local_, session, {first}, 1000 * kMs), std::vector<bool>{false});
  EXPECT_EQ(*table_->Release(local_, session, {first}), 0u);
  Advance(table_options_.lease_grace_nanos - 1);
  EXPECT_EQ(held(), 2u);
  Advance(1);
  EXPECT_EQ(held(), 0u);
  EXPECT_EQ(table_->stats().lease_expirations, 2u);
  EXPECT_EQ(listener->expired.size(), 2u);
}

TEST_F(SessionTableTest, EachLeaseIsRenewedByItself) {
  const std::string session = OpenSession(local_);
  const LeaseId first = *Lease(session, 1, 3);
  Advance(900 * kMs);
  EXPECT_EQ(*table_->Renew(local_, session, {first + 1, first + 9}, 2000 * kMs),
            (std::vector<bool>{true, false}));
  Advance(100 * kMs);
  EXPECT_EQ(leases(), 1u);
  Advance(1899 * kMs);
  EXPECT_EQ(leases(), 1u);
  // A renewal that would end earlier changes nothing.
  EXPECT_EQ(*table_->Renew(local_, session, {first + 1}, 1), std::vector<bool>{true});
  EXPECT_EQ(leases(), 1u);
  // Over is over, also before Advance saw it.
  clock_.AdvanceNanos(1 * kMs);
  EXPECT_EQ(*table_->Renew(local_, session, {first + 1}, 1000 * kMs), std::vector<bool>{false});
  table_->Advance();
  EXPECT_EQ(leases(), 0u);
}

TEST_F(SessionTableTest, EverythingEndsWithTheSessionWhicheverWayItEnds) {
  // Closed.
  auto listener = std::make_shared<Listener>();
  std::string session = OpenSession(local_, listener);
  ASSERT_TRUE(Lease(session, 1, 4).ok());
  ASSERT_TRUE(table_->Register(local_, session, 0, {}).ok());
  EXPECT_EQ(table_->stats().registrations, 1u);
  table_->Close(session, listener.get());
  EXPECT_TRUE(listener->end.has_value() && listener->end->ok());
  EXPECT_EQ(held(), 0u);
  EXPECT_EQ(table_->stats().sessions, 0u);
  EXPECT_EQ(table_->stats().registrations, 0u);
  // The local client died, its stream broken or not.
  for (const bool broken : {false, true}) {
    listener = std::make_shared<Listener>();
    session = OpenSession(local_, listener);
    ASSERT_TRUE(Lease(session, 1, 4).ok());
    if (broken) table_->Detach(session, listener.get());
    table_->ClientLeft(7);
    EXPECT_EQ(listener->end.has_value(), !broken);
    EXPECT_EQ(held(), 0u);
    EXPECT_EQ(table_->stats().sessions, 0u);
    EXPECT_TRUE(absl::IsAborted(table_->Open(local_, "", listener).status()))
        << "a call that came in before the client died must not leave a session behind";
    table_->ClientEntered(7);
  }
  // The daemon stops.
  session = OpenSession(local_);
  ASSERT_TRUE(Lease(session, 1, 4).ok());
  table_->Stop(absl::UnavailableError("stops"));
  EXPECT_EQ(held(), 0u);
  EXPECT_TRUE(absl::IsUnavailable(table_->Open(local_, "", listener).status()));
}

TEST_F(SessionTableTest, ALocalSessionOutlivesItsStreamAndARemoteOneForAGrace) {
  auto broken = std::make_shared<Listener>();
  const std::string local = OpenSession(local_, broken);
  ASSERT_TRUE(Lease(local, 1, 1, 60'000 * kMs).ok());
  table_->Detach(local, broken.get());
  Advance(59'000 * kMs);
  EXPECT_EQ(leases(), 1u);
  auto next = std::make_shared<Listener>();
  EXPECT_EQ(*table_->Open(local_, local, next), local);

  auto remote_listener = std::make_shared<Listener>();
  const std::string remote = OpenSession(remote_, remote_listener);
  EXPECT_EQ(table_->Grant(remote_, remote, kMs, Blocks(1, 1)).status().code(),
            absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(table_->Register(remote_, remote, 0, {}).ok());
  table_->Detach(remote, remote_listener.get());
  Advance(table_options_.resume_grace_nanos - 1);
  auto resumed = std::make_shared<Listener>();
  EXPECT_EQ(*table_->Open(remote_, remote, resumed), remote);
  EXPECT_EQ(table_->stats().registrations, 1u);
  table_->Detach(remote, remote_listener.get());  // The old stream; it has nothing to say.
  Advance(table_options_.silence_nanos_max - 1);
  table_->Heard(remote, resumed.get());
  Advance(table_options_.silence_nanos_max - 1);
  EXPECT_FALSE(resumed->end.has_value());
  Advance(1);  // Silent for too long: as good as broken.
  EXPECT_TRUE(resumed->end.has_value());
  EXPECT_EQ(table_->stats().sessions, 2u);
  Advance(table_options_.resume_grace_nanos);
  EXPECT_EQ(table_->stats().sessions, 1u);
  EXPECT_EQ(table_->stats().registrations, 0u);
  EXPECT_TRUE(absl::IsNotFound(table_->Open(remote_, remote, resumed).status()));
}

TEST_F(SessionTableTest, AResumingStreamTakesTheSessionFromTheOldOne) {
  auto first = std::make_shared<Listener>();
  const std::string session = OpenSession(local_, first);
  auto second = std::make_shared<Listener>();
  ASSERT_TRUE(table_->Open(local_, session, second).ok());
  ASSERT_TRUE(first->end.has_value());
  EXPECT_TRUE(absl::IsAborted(*first->end));
  table_->Close(session, first.get());
  EXPECT_EQ(table_->stats().sessions, 1u);
  table_->Drain();
  EXPECT_EQ(first->drains, 0);
  EXPECT_EQ(second->drains, 1);
}

TEST_F(SessionTableTest, NobodyTouchesAnotherOnesSession) {
  const std::string session = OpenSession(local_);
  const LeaseId lease = *Lease(session, 1, 1);
  // Another user, another client of the same user, a remote one; and the right one elsewhere.
  for (const Caller& caller : {other_, Caller{"default", 9}, remote_, Caller{"uid-5", 7}}) {
    EXPECT_TRUE(absl::IsAborted(table_->Renew(caller, session, {lease}, kMs).status()));
    EXPECT_TRUE(absl::IsAborted(table_->Release(caller, session, {lease}).status()));
    EXPECT_TRUE(absl::IsAborted(table_->Grant(caller, session, kMs, {}).status()));
    EXPECT_TRUE(absl::IsAborted(table_->Register(caller, session, 0, {}).status()));
    EXPECT_FALSE(table_->Open(caller, session, std::make_shared<Listener>()).ok());
  }
  EXPECT_FALSE(table_->WithLease(8, lease, [](const BlockRef&) { FAIL(); }));
  EXPECT_TRUE(table_->WithLease(7, lease, [](const BlockRef& b) { EXPECT_TRUE(b.valid()); }));
  const std::string others = OpenSession(other_);
  EXPECT_EQ(*table_->Release(other_, others, {lease}), 0u);
  EXPECT_EQ(*table_->Renew(other_, others, {lease}, kMs), std::vector<bool>{false});
  EXPECT_EQ(table_->StatsOf("default").leases, 1u);
  EXPECT_EQ(table_->StatsOf("uid-5").leases, 0u);
  EXPECT_EQ(table_->StatsOf("uid-5").sessions, 1u);
  EXPECT_EQ(leases(), 1u);
}

TEST_F(SessionTableTest, LimitsAreNamedAndRefusalsHoldNothing) {
  table_.reset();
  table_options_.sessions_of_client_max = 2;
  table_options_.remote_sessions_max = 1;
  table_options_.leases_max = 3;
  table_options_.registrations_max = 1;
  table_options_.leased_bytes_max = 4 * 3 * 4096;
  table_ = std::make_unique<SessionTable>(table_options_, clock_);
  table_->ClientEntered(7);
  const auto message = [](const auto& result) { return std::string(result.status().message()); };
  auto listener = std::make_shared<Listener>();
  const std::string session = OpenSession(local_);
  OpenSession(local_);
  EXPECT_THAT(message(table_->Open(local_, "", listener)), HasSubstr("2 sessions of one client"));
  OpenSession(remote_);
  EXPECT_THAT(message(table_->Open(remote_, "", listener)), HasSubstr("1 remote sessions"));
  EXPECT_THAT(message(Lease(session, 1, 4)),
              HasSubstr("0 leases of one session and 4 more: at most 3"));
  EXPECT_THAT(message(Lease(session, 1, 1, 60'001 * kMs)), HasSubstr("60001 ms, want 1 to 60000"));
  EXPECT_EQ(held(), 0u);
  EXPECT_THAT(message(Lease(session, 1, 1, 0)), HasSubstr("0 ms"));
  ASSERT_TRUE(table_->Register(local_, session, 0, {}).ok());
  EXPECT_THAT(message(table_->Register(local_, session, 0, {})), HasSubstr("1 registrations"));
  EXPECT_FALSE(*table_->Unregister(local_, session, 999, [](std::uint64_t) {}));
  EXPECT_TRUE(*table_->Unregister(local_, session, 1, [](std::uint64_t) {}));
  table_options_.leased_bytes_max = 1;
  table_ = std::make_unique<SessionTable>(table_options_, clock_);
  table_->ClientEntered(7);
  EXPECT_THAT(message(Lease(OpenSession(local_), 1, 1)), HasSubstr("at most 1"));
  EXPECT_EQ(held(), 0u);
}

// Against a model that knows which leases must be there.
TEST_F(SessionTableTest, RandomLifeLeavesNothingBehind) {
  const std::uint32_t seed = ShortOrLong<std::uint32_t>(1, std::random_device()());
  std::printf("seed %u\n", seed);
  std::mt19937 random(seed);
  struct Known {
    std::shared_ptr<Listener> listener;
    std::map<LeaseId, std::int64_t> leases;  // Until when.
  };
  std::map<std::string, Known> sessions;
  const auto pick = [&] { return std::next(sessions.begin(), random() % sessions.size()); };
  for (int step = 0; step < ShortOrLong(20'000, 2'000'000); ++step) {
    const std::int64_t now = clock_.MonotonicNanos();
    const auto what = random() % 100;
    if (sessions.empty() || (what < 10 && sessions.size() < 8)) {
      Known known{std::make_shared<Listener>(), {}};
      sessions[OpenSession(local_, known.listener)] = known;
    } else if (what < 45) {
      auto& [id, known] = *pick();
      const std::uint64_t count = 1 + random() % 4;
      const std::int64_t nanos = static_cast<std::int64_t>(1 + random() % 50) * kMs;
      const LeaseId first = *Lease(id, 1 + random() % 4, count, nanos);
      for (LeaseId lease = first; lease < first + count; ++lease) known.leases[lease] = now + nanos;
    } else if (what < 60) {
      auto& [id, known] = *pick();
      if (known.leases.empty()) continue;
      const auto lease = std::next(known.leases.begin(), random() % known.leases.size());
      EXPECT_EQ(*table_->Release(local_, id, {lease->first}), 1u);
      known.leases.erase(lease);
    } else if (what < 70) {
      auto& [id, known] = *pick();
      if (known.leases.empty()) continue;
      const auto lease = std::next(known.leases.begin(), random() % known.leases.size());
      EXPECT_TRUE((*table_->Renew(local_, id, {lease->first}, 30 * kMs))[0]);
      lease->second = std::max(lease->second, now + 30 * kMs);
    } else if (what < 75) {
      const auto session = pick();
      table_->Close(session->first, session->second.listener.get());
      sessions.erase(session);
    } else if (what == 75) {
      table_->ClientLeft(7);
      table_->ClientEntered(7);
      sessions.clear();
    } else {
      Advance(static_cast<std::int64_t>(random() % 3000) * kMs / 1000);
      for (auto& [id, known] : sessions) {
        std::erase_if(known.leases,
                      [&](const auto& l) { return l.second <= clock_.MonotonicNanos(); });
      }
    }
    std::uint64_t want = 0;
    for (const auto& [id, known] : sessions) want += known.leases.size();
    ASSERT_EQ(leases(), want) << "step " << step;
    ASSERT_GE(held(), want);
    ASSERT_EQ(table_->stats().sessions, sessions.size());
  }
  Advance(1000 * kMs);
  EXPECT_EQ(held(), 0u);
  EXPECT_EQ(table_->stats().leased_bytes, 0u);
}

// --- Shared memory ---

class SharedMemoryTest : public SessionTableTest {
 protected:
  std::uint64_t Register(const Caller& caller, const std::string& session) {
    EngineGeometry geometry;
    geometry.regions = {{0x10000, 4096}, {0x20000, 4096}};
    const auto registration = table_->Register(caller, session, 5, geometry);
    EXPECT_TRUE(registration.ok()) << registration.status();
    return *registration;
  }
  absl::Status Share(DoorClientId client, std::uint64_t registration, std::uint32_t region) {
    auto mapped = SharedRegion::Map(memory_.fd(), 0, 4096, SharedRegion::Holes::kAllowed);
    EXPECT_TRUE(mapped.ok()) << mapped.status();
    return table_->Share(client, registration, region, *std::move(mapped));
  }
  SharedMemory memory_ = *SharedMemory::Create(4096);
};

TEST_F(SharedMemoryTest, MemoryAndStoresAreThoseOfOneClientAndNamespace) {
  const std::string session = OpenSession(local_);
  const std::string others = OpenSession(other_);
  const std::uint64_t registration = Register(local_, session);
  EXPECT_THAT(Share(8, registration, 0).ToString(), HasSubstr("NOT_FOUND: registration 1"));
  EXPECT_TRUE(absl::IsNotFound(Share(7, registration + 1, 0)));
  ASSERT_TRUE(Share(7, registration, 0).ok());
  EXPECT_EQ(table_->stats().shared_regions, 1u);

  const auto code = [&](const Caller& caller, const std::string& of, std::uint64_t ns) {
    return table_->BeginPageStore(caller, of, registration, static_cast<NamespaceId>(ns), 1)
        .status()
        .code();
  };
  EXPECT_EQ(code(other_, session, 5), absl::StatusCode::kAborted);
  EXPECT_EQ(code(other_, others, 5), absl::StatusCode::kNotFound);
  EXPECT_EQ(code(Caller{"default", 8}, session, 5), absl::StatusCode::kAborted);
  EXPECT_EQ(code(local_, session, 6), absl::StatusCode::kInvalidArgument);
  auto store = table_->BeginPageStore(local_, session, registration, 5, 1);
  ASSERT_TRUE(store.ok()) << store.status();
  EXPECT_NE(store->memory->shared(0), nullptr);
  EXPECT_EQ(store->memory->shared(1), nullptr);
  ASSERT_TRUE(store->reads->BeginRead().ok());

  // Unregistered while it reads: the mapping stays as long, the answer comes then.
  std::optional<std::uint64_t> free;
  EXPECT_TRUE(*table_->Unregister(local_, session, registration,
                                  [&](std::uint64_t stores) { free = stores; }));
  EXPECT_EQ(table_->stats().shared_regions, 0u);
  EXPECT_FALSE(free.has_value());
  EXPECT_EQ(store->memory->shared(0)->data()[0], std::byte{0});
  EXPECT_FALSE(store->reads->BeginRead().ok());
  store->reads->EndRead();
  EXPECT_EQ(free, 1u);
}

TEST_F(SharedMemoryTest, SessionsTakeTheirMemoryAndStoresAlong) {
  const std::string session = OpenSession(local_);
  const std::uint64_t registration = Register(local_, session);
  ASSERT_TRUE(Share(7, registration, 0).ok());
  auto store = table_->BeginPageStore(local_, session, registration, 5, 1);
  ASSERT_TRUE(store.ok());
  const std::weak_ptr<const EngineMemory> memory = store->memory;
  table_->ClientLeft(7);
  EXPECT_EQ(table_->stats().registrations, 0u);
  EXPECT_EQ(table_->stats().shared_regions, 0u);
  const absl::Status ended = store->reads->BeginRead();
  EXPECT_EQ(ended.code(), absl::StatusCode::kAborted) << ended;
  EXPECT_FALSE(memory.expired()) << "somebody could be reading";
  *store = {};
  EXPECT_TRUE(memory.expired());
}

TEST_F(SharedMemoryTest, LimitsAreThoseOfATenantAndOfAllAndAreNamed) {
  table_options_.shared_regions_of_tenant_max = 2;
  table_options_.shared_bytes_of_tenant_max = 3 * 4096 - 1;
  table_options_.shared_regions_max = 3;
  table_ = std::make_unique<SessionTable>(table_options_, clock_);
  table_->ClientEntered(7);
  table_->ClientEntered(8);
  const std::string session = OpenSession(local_);
  const std::uint64_t one = Register(local_, session);
  const std::uint64_t two = Register(local_, session);
  ASSERT_TRUE(Share(7, one, 0).ok());
  ASSERT_TRUE(Share(7, one, 1).ok());
  EXPECT_THAT(Share(7, two, 0).ToString(),
              HasSubstr("2 shared regions of one tenant and 1 more: at most 2"));
  const std::uint64_t others = Register(other_, OpenSession(other_));
  ASSERT_TRUE(Share(8, others, 0).ok());
  EXPECT_THAT(Share(8, others, 1).ToString(), HasSubstr("3 shared regions and 1 more: at most 3"));
  EXPECT_TRUE(*table_->Unregister(local_, session, one, [](std::uint64_t) {}));
  EXPECT_TRUE(Share(7, two, 0).ok());

  table_options_.shared_bytes_of_tenant_max = 4096;
  table_ = std::make_unique<SessionTable>(table_options_, clock_);
  table_->ClientEntered(7);
  const std::uint64_t third = Register(local_, OpenSession(local_));
  ASSERT_TRUE(Share(7, third, 0).ok());
  EXPECT_THAT(Share(7, third, 1).ToString(),
              HasSubstr("4096 shared bytes of one tenant and 4096 more: at most 4096"));
}

}  // namespace
}  // namespace kvmill
