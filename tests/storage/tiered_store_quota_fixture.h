// A tiered store with tenants: blocks by tenant and number, what each has, and whether the accounts
// are right.
//
// The clock stands still: a call that waited for room would never return, so whatever returns was
// decided at once.
#ifndef KVMILL_TESTS_STORAGE_TIERED_STORE_QUOTA_FIXTURE_H_
#define KVMILL_TESTS_STORAGE_TIERED_STORE_QUOTA_FIXTURE_H_

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "tests/storage/tiered_store_fixture.h"

namespace kvmill {

inline constexpr std::uint64_t kArena = std::uint64_t{4} << 20;  // One extent for pages.

class TieredStoreQuotaTest : public TieredStoreTest {
 protected:
  // Two arenas' worth for every tenant of the tests, unless a test says otherwise.
  TieredStoreQuotaTest() {
    options_.host_bytes = 6 * kArena;
    options_.arena_bytes = kArena;
    options_.room_wait = absl::Seconds(5);
  }

  void OpenAll(bool with_disk) {
    auto store = TieredStore::Create(options_, clock_,
                                     with_disk ? std::make_unique<DiskHandle>(disk_) : nullptr);
    ASSERT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
    spaces_.clear();
  }
  void Restart() {
    store_.reset();
    OpenAll(true);
  }

  NamespaceId Space(const std::string& tenant) {
    const auto known = spaces_.find(tenant);
    if (known != spaces_.end()) return known->second;
    NamespaceSpec spec = Spec();
    spec.tenant = tenant;
    return spaces_[tenant] = store_->OpenNamespace("test", spec)->id;
  }
  BlockId IdOf(const std::string& tenant, std::uint64_t number) {
    return {Space(tenant), 0, Key(number)};
  }
  absl::Status Put(const std::string& tenant, std::uint64_t number) {
    return TieredStoreTest::Put(IdOf(tenant, number), {.token_count = kTokens}, values_);
  }
  // Blocks first to first + count - 1.
  void PutSome(const std::string& tenant, std::uint64_t first, std::uint64_t count) {
    for (std::uint64_t i = first; i < first + count; ++i) {
      const absl::Status put = Put(tenant, i);
      ASSERT_TRUE(put.ok()) << tenant << " " << i << ": " << put;
    }
  }
  // The bytes of one block, which all have.
  std::uint64_t BlockBytes() {
    if (block_bytes_ == 0) {
      EXPECT_TRUE(Put("probe", 0).ok());
      store_->List([this](const TieredStore::BlockInfo& info) {
        block_bytes_ = info.bytes;
        return false;
      });
      EXPECT_TRUE(store_->Remove(Space("probe"), {Key(0)}).ok());
    }
    return block_bytes_;
  }
  // What fits into an arena, of which all but the first extent is for pages. Of an empty store.
  std::uint64_t BlocksOfArena() {
    BlockBytes();
    EXPECT_TRUE(Put("probe", 0).ok());
    const std::uint64_t slots = kExtentBytes / (HostUsedBytes() / kLayers);
    EXPECT_TRUE(store_->Remove(Space("probe"), {Key(0)}).ok());
    while (HostUsedBytes() > 0) {  // The disk may still read it.
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_EQ(slots % kLayers, 0u) << "no block lies in two arenas";
    return slots / kLayers;
  }

  std::set<std::uint64_t> Numbers(const std::string& tenant, std::uint64_t below = 4096) {
    std::set<std::uint64_t> numbers;
    std::map<std::string, std::uint64_t> by_key;
    for (std::uint64_t i = 0; i < below; ++i) by_key[Key(i).ToHex()] = i;
    const NamespaceId space = Space(tenant);
    store_->List([&](const TieredStore::BlockInfo& info) {
      if (info.namespace_id == space) numbers.insert(by_key.at(info.key.ToHex()));
      return true;
    });
    return numbers;
  }
  TenantUsage Usage(const std::string& tenant) {
    for (TenantUsage& usage : store_->Usage()) {
      if (usage.tenant == tenant) return usage;
    }
    return {};
  }
  // Whether what is counted is what List and the disk have. Nothing may be under way.
  ::testing::AssertionResult Agrees() {
    std::map<std::string, std::uint64_t> used, host, disk;
    store_->List([&](const TieredStore::BlockInfo& info) {
      const std::string tenant = store_->FindNamespace(info.namespace_id)->spec.tenant;
      used[tenant] += info.bytes;
      if (info.tier == Tier::kHost) host[tenant] += info.bytes;
      return true;
    });
    disk_
        .Scan([&](const DiskBlockMeta& meta) {
          for (const TieredStore::NamespaceInfo& space : store_->Namespaces()) {
            if (space.fingerprint != meta.id.fingerprint) continue;
            for (const std::uint32_t bytes : meta.page_bytes) disk[space.spec.tenant] += bytes;
          }
          return true;
        })
        .IgnoreError();
    for (const TenantUsage& usage : store_->Usage()) {
      if (usage.used_bytes != used[usage.tenant] ||
          usage.tier_bytes[static_cast<std::size_t>(Tier::kHost)] != host[usage.tenant] ||
          usage.tier_bytes[static_cast<std::size_t>(Tier::kDisk)] != disk[usage.tenant]) {
        return ::testing::AssertionFailure()
               << usage.tenant << ": used " << usage.used_bytes << " want " << used[usage.tenant]
               << ", host " << usage.tier_bytes[1] << " want " << host[usage.tenant] << ", disk "
               << usage.tier_bytes[2] << " want " << disk[usage.tenant];
      }
    }
    return ::testing::AssertionSuccess();
  }
  void Written() {
    while (store_->stats().unwritten_blocks > 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }
  std::uint64_t Evicted(EvictReason reason) {
    std::uint64_t blocks = 0;
    for (const auto& tier : store_->stats().evicted_blocks) {
      blocks += tier[static_cast<std::size_t>(reason)];
    }
    return blocks;
  }

  const Values values_ = ValuesOf(1);
  std::uint64_t block_bytes_ = 0;
  std::map<std::string, NamespaceId> spaces_;
};

}  // namespace kvmill

#endif  // KVMILL_TESTS_STORAGE_TIERED_STORE_QUOTA_FIXTURE_H_
