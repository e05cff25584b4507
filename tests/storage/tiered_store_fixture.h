// Shared by the tiered store's tests: a small namespace, blocks whose values follow from a number,
// and a store with one-word verbs.
#ifndef KVMILL_TESTS_STORAGE_TIERED_STORE_FIXTURE_H_
#define KVMILL_TESTS_STORAGE_TIERED_STORE_FIXTURE_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "gtest/gtest.h"
#include "kernels/encode.h"
#include "kernels/float16.h"
#include "storage/core/clock.h"
#include "storage/tiered_store.h"
#include "tests/storage/faulty_disk_store.h"

namespace kvmill {

// A FaultyDiskStore that outlives the tiered store that owns it, as a disk outlives a process.
class DiskHandle : public DiskStore {
 public:
  explicit DiskHandle(FaultyDiskStore& disk) : disk_(disk) {}
  ~DiskHandle() override {
    disk_.SetEvictedCallback(nullptr);
    disk_.SetKeepAdvice(nullptr);
  }
  void SetEvictedCallback(EvictedCallback callback) override {
    disk_.SetEvictedCallback(std::move(callback));
  }
  void SetKeepAdvice(KeepAdviceCallback advice) override { disk_.SetKeepAdvice(std::move(advice)); }
  absl::Status Write(const DiskBlockMeta& meta,
                     absl::Span<const absl::Span<const std::byte>> pages) override {
    return disk_.Write(meta, pages);
  }
  absl::Status Flush() override { return disk_.Flush(); }
  absl::StatusOr<DiskBlockMeta> Find(const DiskBlockId& id) override { return disk_.Find(id); }
  absl::Status Read(const DiskBlockId& id, std::size_t first_page,
                    absl::Span<const absl::Span<std::byte>> out) override {
    return disk_.Read(id, first_page, out);
  }
  absl::Status Remove(absl::Span<const DiskBlockId> ids) override { return disk_.Remove(ids); }
  absl::Status Scan(absl::FunctionRef<bool(const DiskBlockMeta&)> visit) override {
    return disk_.Scan(visit);
  }
  absl::Status PutNamespace(const NamespaceRecord& record) override {
    return disk_.PutNamespace(record);
  }
  absl::StatusOr<std::vector<NamespaceRecord>> Namespaces() override { return disk_.Namespaces(); }
  Stats stats() const override { return disk_.stats(); }

 private:
  FaultyDiskStore& disk_;
};

class TieredStoreTest : public ::testing::Test {
 protected:
  static constexpr std::uint32_t kLayers = 2;
  static constexpr std::uint32_t kHeads = 2;
  static constexpr std::uint32_t kTokens = 64;
  static constexpr std::uint32_t kDim = 64;

  static NamespaceSpec Spec() {
    NamespaceSpec spec;
    spec.tenant = "default";
    spec.model = "test";
    spec.hash_scheme = "test-1";
    spec.block_tokens = kTokens;
    LayerGroup group;
    group.layers = {0, 1};
    group.kv_heads = kHeads;
    group.head_dim = kDim;
    spec.groups = {group};
    return spec;
  }

  // 8 MiB: one arena of four extents, three of them for pages.
  TieredStore::Options options_{.host_bytes = 8 << 20,
                                .arena_bytes = 8 << 20,
                                .blocks_max = 4096,
                                .room_wait = absl::Milliseconds(200),
                                .prefault = false};
  ManualClock clock_;
  FaultyDiskStore disk_;
  std::unique_ptr<TieredStore> store_;
  NamespaceId space_ = 0;

  void Open(bool with_disk, const NamespaceSpec& spec = Spec()) {
    auto store = TieredStore::Create(options_, clock_,
                                     with_disk ? std::make_unique<DiskHandle>(disk_) : nullptr);
    ASSERT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
    auto info = store_->OpenNamespace("test", spec);
    ASSERT_TRUE(info.ok()) << info.status();
    space_ = info->id;
  }

  static BlockKey Key(std::uint64_t number) {
    return *BlockKey::FromBytes(absl::StrFormat("block-%026d", number));
  }
  BlockId Id(std::uint64_t number) const { return {space_, 0, Key(number)}; }

  // K and V of one block, [layer][head][K, V][token, channel].
  using Values = std::vector<std::uint16_t>;
  static Values ValuesOf(std::uint64_t number, std::uint32_t tokens = kTokens) {
    std::mt19937_64 random(number + 1);
    std::normal_distribution<float> normal;
    Values values(std::size_t{kLayers} * kHeads * 2 * tokens * kDim);
    for (std::uint16_t& value : values) value = FloatToFloat16(normal(random));
    return values;
  }

  // Views of one head; `pages` keeps the page pointers alive.
  struct HeadViews {
    const std::byte* k = nullptr;
    const std::byte* v = nullptr;
    HeadInput input;
    HeadViews(const Values& values, std::uint32_t layer, std::uint32_t head, std::uint32_t tokens) {
      const std::uint16_t* base =
          values.data() + (std::size_t{layer} * kHeads + head) * 2 * tokens * kDim;
      k = reinterpret_cast<const std::byte*>(base);
      v = reinterpret_cast<const std::byte*>(base + std::size_t{tokens} * kDim);
      input.k = {.pages = &k, .page_tokens = tokens, .token_stride_bytes = kDim * 2};
      input.v = {.pages = &v, .page_tokens = tokens, .token_stride_bytes = kDim * 2};
    }
    HeadViews(const HeadViews&) = delete;
  };

  static absl::StatusOr<WriteResult> WriteHead(BlockWriter& writer, const Values& values,
                                               std::uint32_t layer, std::uint32_t head,
                                               std::uint32_t tokens = kTokens) {
    HeadViews views(values, layer, head, tokens);
    return writer.WriteHeads(layer, head, {views.input});
  }

  // Stores a whole block; the status of the first step that failed.
  absl::Status Put(const BlockId& id, const BlockOrigin& origin, const Values& values) {
    auto writer = store_->BeginStore(id, origin);
    if (!writer.ok()) return writer.status();
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      for (std::uint32_t head = 0; head < kHeads; ++head) {
        auto result = WriteHead(*writer, values, layer, head, origin.token_count);
        if (!result.ok()) return result.status();
      }
    }
    return absl::OkStatus();
  }
  absl::Status Put(std::uint64_t number) {
    return Put(Id(number), {.token_count = kTokens}, ValuesOf(number));
  }

  // Whether a fetched block holds exactly the records that this machine's encoder makes of block
  // `number`.
  static ::testing::AssertionResult Holds(const BlockRef& ref, std::uint64_t number) {
    return PagesHold(ref.pages(), number);
  }
  static ::testing::AssertionResult PagesHold(absl::Span<const absl::Span<const std::byte>> pages,
                                              std::uint64_t number) {
    const Values values = ValuesOf(number);
    const TileFormat format = FormatOf(Spec(), Spec().groups[0]);
    std::vector<std::byte> record(RecordBytes(format));
    std::vector<std::byte> scratch(EncodeScratchBytes(format) + 64);
    const std::size_t misaligned = reinterpret_cast<std::uintptr_t>(scratch.data()) % 64;
    const auto aligned =
        absl::MakeSpan(scratch).subspan(64 - misaligned, EncodeScratchBytes(format));
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      auto page = PageView::Parse(pages[layer]);
      if (!page.ok()) return ::testing::AssertionFailure() << page.status();
      for (std::uint32_t head = 0; head < kHeads; ++head) {
        HeadViews views(values, layer, head, kTokens);
        EncodeResult result;
        EncodeTilesCpu(format, Frame::kModel,
                       {EncodeArgs{views.input.k, views.input.v, record.data()}},
                       absl::MakeSpan(&result, 1), aligned);
        const auto contents = page->contents(head);
        if (contents.size() != record.size() ||
            std::memcmp(contents.data(), record.data(), record.size()) != 0) {
          return ::testing::AssertionFailure()
                 << "block " << number << " layer " << layer << " head " << head << " differs";
        }
      }
    }
    return ::testing::AssertionSuccess();
  }

  ::testing::AssertionResult GetIs(std::uint64_t number) {
    auto ref = store_->Fetch(Id(number));
    if (!ref.ok()) return ::testing::AssertionFailure() << ref.status();
    return Holds(*ref, number);
  }

  std::uint64_t HostUsedBytes() const {
    return store_->stats().tiers[static_cast<std::size_t>(Tier::kHost)].used_bytes;
  }
};

}  // namespace kvmill

#endif  // KVMILL_TESTS_STORAGE_TIERED_STORE_FIXTURE_H_
