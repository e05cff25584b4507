#include "storage/tiered_store.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/core/log.h"
#include "storage/core/quoted.h"
#include "storage/core/status_macros.h"
#include "storage/eviction/policy.h"
#include "storage/tiered_store_impl.h"

namespace kvmill {
namespace {

constexpr int kFetchAttemptsMax = 8;

TieredStore::NamespaceInfo InfoOf(const OpenedNamespace& space, absl::string_view name) {
  return {space.id, std::string(name), space.spec, space.fingerprint};
}

// FAILED_PRECONDITION for tiles that the GPU of the store's tier can hold, and not read.
absl::Status CheckGpuHas(const Device* gpu, const NamespaceSpec& spec) {
  if (gpu == nullptr || gpu->info().kind != DeviceKind::kCuda || spec.key_bits != 3) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "key_bits 3: this daemon has a GPU tier on ", gpu->info().name,
      ", whose kernels have no 3-bit keys; want key_bits 2 or 4, or a daemon with --gpu-bytes 0"));
}

// The name under which the disk keeps a namespace: names are local to tenants. No name has a zero
// in it. Records of before tenants have the name alone.
std::string DiskNameOf(absl::string_view tenant, absl::string_view name) {
  return tenant.empty() ? std::string(name)
                        : absl::StrCat(name, absl::string_view("\0", 1), tenant);
}
absl::string_view NameFromDisk(absl::string_view disk_name) {
  return disk_name.substr(0, disk_name.find('\0'));
}

}  // namespace

BlockRef::BlockRef(BlockRef&& other) noexcept { *this = std::move(other); }

BlockRef& BlockRef::operator=(BlockRef&& other) noexcept {
  if (this == &other) return *this;
  Reset();
  store_ = std::exchange(other.store_, nullptr);
  entry_ = other.entry_;
  token_count_ = other.token_count_;
  tier_ = other.tier_;
  memory_ = other.memory_;
  slots_ = std::move(other.slots_);
  pages_ = std::move(other.pages_);
  return *this;
}

BlockRef::~BlockRef() { Reset(); }

void BlockRef::Reset() {
  if (store_ == nullptr) return;
  store_->impl_->ReleaseReference(*this);
  store_ = nullptr;
}

TieredStore::Impl::Impl(const Options& options, const Clock& clock, std::unique_ptr<DiskStore> disk)
    : options_(options),
      clock_(clock),
      watcher_(dynamic_cast<BlockWatcher*>(options.observer)),
      disk_(std::move(disk)) {}

TieredStore::Impl::~Impl() {
  if (maintenance_.joinable()) {
    {
      MutexLock lock(maintenance_mu_);
      stopping_ = true;
    }
    stop_changed_.NotifyAll();
    maintenance_.join();
  }
  {
    MutexLock lock(assemblies_mu_);
    assemblies_.clear();
  }
  write_behind_.reset();
  if (keeper_ != nullptr) keeper_->Stop();
  gpu_.reset();
}

absl::StatusOr<std::unique_ptr<EvictionPolicy>> TieredStore::Impl::MakePolicy(
    std::uint64_t tier_bytes) const {
  const std::string_view name = options_.eviction_policy.empty()
                                    ? kDefaultEvictionPolicy
                                    : std::string_view(options_.eviction_policy);
  return CreateEvictionPolicy(
      name, {.entries_max = index_->ids_max(), .capacity_blocks = CapacityBlocks(tier_bytes)});
}

std::uint32_t TieredStore::Impl::CapacityBlocks(std::uint64_t tier_bytes) const {
  // The most blocks that may be asked for so that the policy's queues fit: what the tier holds if
  // blocks were 64 KiB, a small model's. Larger blocks only leave ghosts for more of them.
  return static_cast<std::uint32_t>(
      std::min<std::uint64_t>(std::max<std::uint64_t>(1, tier_bytes / 65536), options_.blocks_max));
}

absl::Status TieredStore::Impl::Start() {
  PagePool::Options pool_options;
  pool_options.capacity_bytes = options_.host_bytes;
  pool_options.arena_bytes = options_.arena_bytes;
  pool_options.prefault = options_.prefault;
  pool_options.huge_pages = options_.huge_pages;
  pool_options.pin_for = options_.gpu;
  pool_options.progress = options_.prefault_progress;
  KVMILL_ASSIGN_OR_RETURN(pool_, PagePool::Create(pool_options));
  if (options_.prefault && options_.huge_pages != HugePages::kOff) {
    const PagePool::Stats pool = pool_->stats();
    LogInfo(absl::StrCat("host memory: ", pool.huge_bytes >> 20, " of ", pool.memory_bytes >> 20,
                         " MiB in huge pages", pool.huge_error == 0 ? "" : ": ",
                         pool.huge_error == 0 ? "" : std::strerror(pool.huge_error)));
  }
  KVMILL_ASSIGN_OR_RETURN(
      index_,
      BlockIndex::Create({.entries_max = options_.blocks_max,
                          .keeps_links = watcher_ != nullptr ? watcher_->wants_links()
                                                             : options_.observer != nullptr}));
  MemoryTiers::Part host{pool_.get(), nullptr};
  KVMILL_ASSIGN_OR_RETURN(host.policy, MakePolicy(options_.host_bytes));
  MemoryTiers::Part gpu;
  if (options_.gpu != nullptr) {
    pool_options.capacity_bytes = options_.gpu_bytes;
    pool_options.arena_bytes = options_.gpu_arena_bytes;
    pool_options.device = options_.gpu;
    pool_options.progress = nullptr;
    KVMILL_ASSIGN_OR_RETURN(gpu_pool_, PagePool::Create(pool_options));
    gpu.pool = gpu_pool_.get();
    KVMILL_ASSIGN_OR_RETURN(gpu.policy, MakePolicy(options_.gpu_bytes));
  }
  TenantOrders::Options orders;
  orders.policy = std::string(host.policy->name());
  orders.entries_max = index_->ids_max();
  orders.capacity_blocks[Index(Tier::kGpu)] = CapacityBlocks(options_.gpu_bytes);
  orders.capacity_blocks[Index(Tier::kHost)] = CapacityBlocks(options_.host_bytes);
  tiers_ =
      std::make_unique<MemoryTiers>(*index_, clock_, counters_, std::move(host), std::move(gpu),
                                    options_.observer, namespaces_, accounts_, std::move(orders));
  if (options_.gpu != nullptr) {
    KVMILL_ASSIGN_OR_RETURN(
        gpu_, GpuTier::Create(*options_.gpu, *tiers_, namespaces_, clock_, counters_));
  }
  keeper_ = std::make_unique<RoomKeeper>(*tiers_, gpu_.get(), disk_ != nullptr);
  if (disk_ != nullptr) {
    disk_->SetEvictedCallback([this](absl::Span<const DiskBlockId> ids) {
      for (const DiskBlockId& id : ids) {
        const OpenedNamespace* space = namespaces_.Find(id.fingerprint);
        if (space == nullptr) {  // One that could not be read at the start.
          counters_.evicted(Tier::kDisk, EvictReason::kCapacity).Add();
          continue;
        }
        tiers_->EvictedFromDisk({space->id, id.group, id.key});
      }
    });
    disk_->SetKeepAdvice([this](const DiskBlockId& id) {
      const OpenedNamespace* space = namespaces_.Find(id.fingerprint);
      const int over = space == nullptr ? 0 : tiers_->OverSoftOnDisk(space->tenant_id);
      return over > 0   ? DiskStore::KeepAdvice::kDrop
             : over < 0 ? DiskStore::KeepAdvice::kKeep
                        : DiskStore::KeepAdvice::kNone;
    });
    loader_ = std::make_unique<DiskLoader>(*disk_, *pool_, *tiers_, clock_, counters_);
    KVMILL_RETURN_IF_ERROR(RecoverFromDisk());
    write_behind_ = std::make_unique<WriteBehind>(*disk_, *pool_, *index_, *tiers_, gpu_.get(),
                                                  namespaces_, clock_, counters_);
  }
  if (watcher_ != nullptr) watcher_->Watch(*this);
  maintenance_ = std::thread([this] { RunMaintenance(); });
  return absl::OkStatus();
}

std::uint64_t TieredStore::Impl::TakeReference(BlockEntry& e, BlockRef* ref) {
  std::uint64_t bytes = 0;
  ++e.references;
  ref->token_count_ = e.token_count;
  ref->memory_ = TierOf(e.flags);
  ref->slots_.clear();
  ref->pages_.clear();
  ref->pages_.reserve(e.pages().size());
  const PagePool& pool = tiers_->pool(ref->memory_);
  absl::Span<std::byte> slot;
  SlotRef before;
  for (const PagePlace& place : e.pages()) {
    // Most pages follow their neighbours: the pool need not be asked.
    slot = Follows(place.slot, before) ? absl::MakeSpan(slot.data() + slot.size(), slot.size())
                                       : pool.Bytes(place.slot);
    before = place.slot;
    ref->pages_.push_back(slot.first(place.page_bytes));
    bytes += place.page_bytes;
  }
  if (ref->memory_ == Tier::kGpu) {
    for (const PagePlace& place : e.pages()) ref->slots_.push_back(place.slot);
  }
  return bytes;
}

bool TieredStore::Impl::TryReference(TieredStore* store, const BlockId& id, BlockRef* ref,
                                     std::optional<Tier> only) {
  EntryId entry = kNoEntry;
  std::uint64_t bytes = 0;
  index_->Find(id, [&](EntryId found, BlockEntry& e) {
    if (!InMemory(e.flags) || (only.has_value() && TierOf(e.flags) != *only)) return;
    entry = found;
    bytes = TakeReference(e, ref);
  });
  if (entry == kNoEntry) return false;
  ref->store_ = store;
  ref->entry_ = entry;
  counters_.references.Add();
  counters_.referenced_bytes.Add(bytes);
  tiers_->Touch(entry);
  return true;
}

void TieredStore::Impl::ReferenceAgain(TieredStore* store, EntryId entry, BlockRef* ref) {
  std::uint64_t bytes = 0;
  index_->With(entry, [&](BlockEntry& e) { bytes = TakeReference(e, ref); });
  ref->store_ = store;
  ref->entry_ = entry;
  counters_.references.Add();
  counters_.referenced_bytes.Add(bytes);
}

void TieredStore::Impl::Adopt(TieredStore* store, absl::Span<const std::uint32_t> page_bytes,
                              BlockRef* ref) {
  std::uint64_t bytes = 0;
  ref->pages_.clear();
  for (std::size_t i = 0; i < page_bytes.size(); ++i) {
    ref->pages_.push_back(tiers_->pool(ref->memory_).Bytes(ref->slots_[i]).first(page_bytes[i]));
    bytes += page_bytes[i];
  }
  ref->store_ = store;
  counters_.references.Add();
  counters_.referenced_bytes.Add(bytes);
}

void TieredStore::Impl::ReleaseReference(BlockRef& ref) {
  std::uint64_t bytes = 0;
  for (const auto& page : ref.pages_) bytes += page.size();
  counters_.references.Subtract();
  counters_.referenced_bytes.Subtract(bytes);
  if (ref.entry_ != kNoEntry) {
    tiers_->Release(ref.entry_);
    return;
  }
  for (SlotRef slot : ref.slots_) tiers_->pool(ref.memory_).Release(slot);
  tiers_->RoomMayHaveComeFree();
}

absl::Status TieredStore::Impl::CopyToHost(TieredStore* store, const OpenedNamespace& space,
                                           const BlockId& id, BlockRef* ref) {
  std::vector<std::uint32_t> page_bytes;
  for (const auto& page : ref->pages_)
    page_bytes.push_back(static_cast<std::uint32_t>(page.size()));
  BlockRef copy;
  absl::Status read = gpu_->ReadToHost(space, id, ref->token_count_, ref->slots_, page_bytes,
                                       options_.room_wait, &copy.slots_);
  copy.token_count_ = ref->token_count_;
  *ref = BlockRef();
  if (read.ok()) {
    Adopt(store, page_bytes, &copy);
    *ref = std::move(copy);
  } else if (!absl::IsResourceExhausted(read)) {
    KVMILL_RETURN_IF_ERROR(DropDamaged(id, Tier::kGpu, read));
  }
  return read;
}

absl::Status TieredStore::Impl::DropDamaged(const BlockId& id, Tier tier, const absl::Status& why) {
  counters_.checksum_failures[Index(tier)].Add();
  LogError(absl::StrCat(TierName(tier), " tier: block ", id.key.ToHex(),
                        " is damaged and is dropped: ", why.message()));
  if (tiers_->DropCopy(id, tier)) {
    counters_.evicted(tier, EvictReason::kCorrupt).Add();
    return absl::OkStatus();
  }
  return RemoveBlocks({id}).status();
}

absl::StatusOr<const OpenedNamespace*> TieredStore::Impl::SpaceOf(const BlockId& id) const {
  const OpenedNamespace* space = namespaces_.Find(id.namespace_id);
  if (space == nullptr || id.group >= space->spec.groups.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "namespace ", id.namespace_id, " with layer group ", int{id.group}, " is not open"));
  }
  return space;
}

std::uint8_t TieredStore::Impl::FlagsOf(const BlockId& id) {
  std::uint8_t flags = 0;
  index_->Find(id, [&](EntryId, BlockEntry& e) { flags = e.flags; });
  return flags;
}

absl::Status TieredStore::Impl::RecoverFromDisk() {
  KVMILL_ASSIGN_OR_RETURN(const std::vector<DiskStore::NamespaceRecord> records,
                          disk_->Namespaces());
  for (const DiskStore::NamespaceRecord& record : records) {
    absl::StatusOr<NamespaceSpec> spec = DecodeNamespace(record.encoding);
    bool unsaved = false;
    const absl::string_view name = NameFromDisk(record.name);
    absl::Status opened =
        spec.ok() ? namespaces_.Open(name, *spec, &unsaved).status() : spec.status();
    if (opened.ok()) namespaces_.Saved(spec->tenant, name);
    // Its blocks are unreachable without it, and only those: the others are served.
    if (!opened.ok())
      LogError(absl::StrCat("disk tier: namespace \"", name, "\" is skipped: ", opened.message()));
  }
  const std::uint32_t now_s = static_cast<std::uint32_t>(clock_.MonotonicNanos() / 1'000'000'000);
  std::vector<DiskBlockId> useless;
  std::uint64_t recovered = 0;
  absl::Status full;
  KVMILL_RETURN_IF_ERROR(disk_->Scan([&](const DiskBlockMeta& meta) {
    OpenedNamespace* space = namespaces_.Find(meta.id.fingerprint);
    if (space == nullptr || meta.id.group >= space->spec.groups.size() ||
        space->spec.groups[meta.id.group].layers.size() != meta.page_bytes.size()) {
      useless.push_back(meta.id);
      return true;
    }
    const BlockId id{space->id, meta.id.group, meta.id.key};
    std::uint64_t bytes = 0;
    absl::Status inserted = index_
                                ->Insert(
                                    id, meta.page_bytes.size(),
                                    [&](BlockEntry& e) {
                                      e.token_count = meta.token_count;
                                      e.flags = kOnDisk;
                                      e.inserted_at_s = now_s;
                                      for (std::size_t i = 0; i < meta.page_bytes.size(); ++i) {
                                        e.pages()[i].page_bytes = meta.page_bytes[i];
                                        bytes += meta.page_bytes[i];
                                      }
                                    },
                                    meta.link)
                                .status();
    if (absl::IsResourceExhausted(inserted)) {
      full = inserted;
      return false;
    }
    if (inserted.ok()) {  // Or the disk told of it twice.
      TenantAccount& account = accounts_[space->tenant_id];
      account.AddBlock(bytes);
      account.charged_bytes.fetch_add(bytes, std::memory_order_relaxed);
      account.AddToTier(Tier::kDisk, bytes);
    }
    ++recovered;
    return true;
  }));
  if (!full.ok())
    LogWarning(absl::StrCat("disk tier: only part of the blocks was indexed: ", full.message()));
  if (!useless.empty()) {
    LogWarning(
        absl::StrCat("disk tier: ", useless.size(), " blocks of unknown namespaces are removed"));
    KVMILL_RETURN_IF_ERROR(disk_->Remove(useless));
  }
  counters_.tier_blocks[Index(Tier::kDisk)].Add(recovered);
  return absl::OkStatus();
}

absl::Status TieredStore::Impl::SaveNamespaces() {
  if (disk_ == nullptr) return absl::OkStatus();
  for (const NamespaceTable::UnsavedName& unsaved : namespaces_.Unsaved()) {
    KVMILL_RETURN_IF_ERROR(
        disk_->PutNamespace({DiskNameOf(unsaved.space->spec.tenant, unsaved.name),
                             EncodeNamespace(unsaved.space->spec)}));
    namespaces_.Saved(unsaved.space->spec.tenant, unsaved.name);
  }
  return absl::OkStatus();
}

TieredStore::TieredStore(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
TieredStore::~TieredStore() = default;

absl::StatusOr<std::unique_ptr<TieredStore>> TieredStore::Create(const Options& options,
                                                                 const Clock& clock,
                                                                 std::unique_ptr<DiskStore> disk) {
  auto impl = std::make_unique<Impl>(options, clock, std::move(disk));
  KVMILL_RETURN_IF_ERROR(impl->Start());
  return std::unique_ptr<TieredStore>(new TieredStore(std::move(impl)));
}

Algorithm TieredStore::algorithm() const { return impl_->options_.algorithm; }

absl::StatusOr<TieredStore::NamespaceInfo> TieredStore::OpenNamespace(absl::string_view name,
                                                                      const NamespaceSpec& spec) {
  KVMILL_RETURN_IF_ERROR(CheckGpuHas(impl_->options_.gpu, spec));
  bool unsaved = false;
  KVMILL_ASSIGN_OR_RETURN(OpenedNamespace * space, impl_->namespaces_.Open(name, spec, &unsaved));
  if (unsaved) KVMILL_RETURN_IF_ERROR(impl_->SaveNamespaces());
  return InfoOf(*space, name);
}

absl::StatusOr<TieredStore::NamespaceInfo> TieredStore::FindNamespace(
    absl::string_view tenant, absl::string_view name) const {
  const OpenedNamespace* space = impl_->namespaces_.Find(tenant, name);
  if (space == nullptr)
    return absl::NotFoundError(absl::StrCat("namespace ", Quoted(name), " is not known here"));
  return InfoOf(*space, name);
}

absl::StatusOr<TieredStore::NamespaceInfo> TieredStore::FindNamespace(
    absl::string_view tenant, const Fingerprint& fingerprint) const {
  const OpenedNamespace* space = impl_->namespaces_.Find(fingerprint);
  if (space == nullptr || space->spec.tenant != tenant) {
    return absl::NotFoundError(
        absl::StrCat("namespace ", ToHex(fingerprint), " is not known here"));
  }
  return InfoOf(*space, space->name);
}

absl::StatusOr<TieredStore::NamespaceInfo> TieredStore::FindAnyNamespace(
    const Fingerprint& fingerprint) const {
  const OpenedNamespace* space = impl_->namespaces_.Find(fingerprint);
  if (space == nullptr) {
    return absl::NotFoundError(
        absl::StrCat("namespace ", ToHex(fingerprint), " is not known here"));
  }
  return InfoOf(*space, space->name);
}

absl::StatusOr<TieredStore::NamespaceInfo> TieredStore::FindNamespace(NamespaceId id) const {
  const OpenedNamespace* space = impl_->namespaces_.Find(id);
  if (space == nullptr) return absl::NotFoundError(absl::StrCat("namespace ", id, " is not open"));
  return InfoOf(*space, space->name);
}

std::vector<TieredStore::NamespaceInfo> TieredStore::Namespaces() const {
  return NamespacesWhere([](absl::string_view, absl::string_view) { return true; });
}

std::vector<TieredStore::NamespaceInfo> TieredStore::NamespacesWhere(
    absl::FunctionRef<bool(absl::string_view, absl::string_view)> wanted) const {
  std::vector<NamespaceInfo> infos;
  for (const OpenedNamespace* space : impl_->namespaces_.All()) {
    if (wanted(space->spec.tenant, space->name)) infos.push_back(InfoOf(*space, space->name));
  }
  return infos;
}

std::vector<TieredStore::NamespaceStored> TieredStore::Stored() const {
  std::vector<NamespaceStored> all;
  for (const OpenedNamespace* space : impl_->namespaces_.All()) {
    const NamespaceStores::Stored stored = impl_->stored_.Of(space->id);
    if (stored.blocks == 0) continue;
    all.push_back({space->spec.tenant, space->name, stored.blocks, stored.bytes});
  }
  std::stable_sort(all.begin(), all.end(), [](const NamespaceStored& a, const NamespaceStored& b) {
    return a.bytes > b.bytes;
  });
  return all;
}

absl::StatusOr<BlockWriter> TieredStore::BeginStore(const BlockId& id, const BlockOrigin& origin) {
  KVMILL_ASSIGN_OR_RETURN(std::shared_ptr<BlockWriter::Assembly> assembly,
                          impl_->BeginStore(id, origin));
  return BlockWriter(std::move(assembly));
}

absl::Status TieredStore::MakeDurable(absl::Span<const BlockId> ids,
                                      absl::Span<absl::Status> results) {
  if (impl_->write_behind_ == nullptr) {
    return absl::FailedPreconditionError(
        "no disk tier: start kvmilld with --data-dir to store durably");
  }
  KVMILL_RETURN_IF_ERROR(impl_->SaveNamespaces());
  const absl::Status flushed = impl_->write_behind_->MakeDurable(ids, results);
  return ids.empty() ? flushed : absl::OkStatus();
}

absl::StatusOr<std::uint64_t> TieredStore::Flush(std::optional<absl::string_view> tenant) {
  std::vector<BlockId> unwritten;
  if (!tenant.has_value()) {
    unwritten = impl_->tiers_->Unwritten(std::nullopt);
  } else if (const auto number = impl_->namespaces_.FindTenant(*tenant); number.has_value()) {
    unwritten = impl_->tiers_->Unwritten(*number);
  }
  std::vector<absl::Status> results(unwritten.size());
  KVMILL_RETURN_IF_ERROR(MakeDurable(unwritten, absl::MakeSpan(results)));
  std::uint64_t flushed = 0;
  for (const absl::Status& result : results) {
    if (absl::IsNotFound(result)) continue;  // Removed meanwhile.
    KVMILL_RETURN_IF_ERROR(result);
    ++flushed;
  }
  // What was written before may be what the disk could not flush.
  if (flushed == 0 && !unwritten.empty()) KVMILL_RETURN_IF_ERROR(MakeDurable({}, {}));
  return flushed;
}

absl::StatusOr<BlockRef> TieredStore::Fetch(const BlockId& id, FetchPath path) {
  KVMILL_ASSIGN_OR_RETURN(const OpenedNamespace* space, impl_->SpaceOf(id));
  BlockRef ref;
  Tier tier = Tier::kHost;
  // A block that was loaded may be evicted again before it is referenced; a bounded number of
  // times.
  for (int attempt = 0; attempt < kFetchAttemptsMax; ++attempt) {
    if (impl_->TryReference(this, id, &ref)) {
      if (ref.memory_ == Tier::kGpu) {
        const absl::Status copied = impl_->CopyToHost(this, *space, id, &ref);
        if (absl::IsResourceExhausted(copied)) return copied;
        if (!copied.ok()) continue;  // That copy is dropped: the next one.
        tier = Tier::kGpu;
      }
      ref.tier_ = tier;
      impl_->counters_.fetched(path, tier).Add();
      return ref;
    }
    if ((impl_->FlagsOf(id) & kOnDisk) == 0 || impl_->loader_ == nullptr) break;
    absl::Status loaded = impl_->loader_->Load(*space, id, impl_->options_.room_wait);
    if (absl::IsNotFound(loaded)) continue;  // Gone from the disk, or not there only: look again.
    KVMILL_RETURN_IF_ERROR(loaded);
    tier = Tier::kDisk;
  }
  impl_->counters_.fetch_misses[static_cast<std::size_t>(path)].Add();
  return absl::NotFoundError("miss");
}

absl::StatusOr<BlockRef> TieredStore::FetchOnGpu(const BlockId& id, FetchPath path) {
  if (impl_->gpu_ == nullptr) {
    return absl::FailedPreconditionError("no GPU tier: start kvmilld with --gpu-bytes");
  }
  KVMILL_ASSIGN_OR_RETURN(const OpenedNamespace* space, impl_->SpaceOf(id));
  BlockRef ref;
  Tier tier = Tier::kHost;
  Room::Attempt room(impl_->tiers_->room(Tier::kGpu), impl_->options_.room_wait);
  for (int attempt = 0; attempt < kFetchAttemptsMax;) {
    room.Look();
    if (impl_->TryReference(this, id, &ref, Tier::kGpu)) {
      ref.tier_ = tier == Tier::kDisk ? Tier::kDisk : Tier::kGpu;
      impl_->counters_.fetched(path, ref.tier_).Add();
      return ref;
    }
    const std::uint8_t flags = impl_->FlagsOf(id);
    if ((flags & kInHost) != 0) {
      GpuTier::Held held;
      const absl::Status status = impl_->gpu_->Hold(id, &held);
      if (status.ok()) {
        room.Found();
        ref.entry_ = held.entry;
        ref.token_count_ = held.token_count;
        ref.tier_ = tier;
        ref.memory_ = Tier::kGpu;
        ref.slots_ = std::move(held.slots);
        impl_->Adopt(this, held.page_bytes, &ref);
        impl_->counters_.fetched(path, tier).Add();
        return ref;
      }
      if (absl::IsResourceExhausted(status)) {
        if (room.Wait()) continue;
        return status;
      }
      if (!absl::IsNotFound(status)) return status;
    } else if ((flags & kInGpu) == 0) {
      if ((flags & kOnDisk) == 0 || impl_->loader_ == nullptr) break;
      absl::Status loaded = impl_->loader_->Load(*space, id, impl_->options_.room_wait);
      if (!absl::IsNotFound(loaded)) {
        KVMILL_RETURN_IF_ERROR(loaded);
        tier = Tier::kDisk;
      }
    }
    ++attempt;
  }
  impl_->counters_.fetch_misses[static_cast<std::size_t>(path)].Add();
  return absl::NotFoundError("miss");
}

}  // namespace kvmill
