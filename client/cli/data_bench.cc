#include "client/cli/data_bench.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cli/output.h"
#include "kernels/float16.h"
#include "storage/core/mutex.h"
#include "storage/core/page_layout.h"
#include "storage/core/sha256.h"
#include "storage/core/status_macros.h"

namespace kvmill::cli {
namespace {

constexpr std::uint32_t kTokens = 128;
constexpr std::uint32_t kHeadDim = 128;
constexpr std::uint32_t kHeadsMax = 8;
constexpr std::uint32_t kFetchedBlocksMax = 16;
constexpr std::uint32_t kEmptyCalls = 200;

double Microseconds(absl::Duration duration) { return absl::ToDoubleMicroseconds(duration); }

NamespaceSpec SpecFor(std::uint64_t bytes) {
  NamespaceSpec spec;
  spec.model = "kvmill bench";
  spec.hash_scheme = "kvmill-bench";
  spec.salt = absl::StrCat(getpid(), " ", absl::ToUnixMicros(absl::Now()));
  spec.block_tokens = kTokens;
  LayerGroup group;
  group.head_dim = kHeadDim;
  const std::uint64_t tiles =
      std::max<std::uint64_t>(1, bytes / RecordBytes(FormatOf(spec, group)));
  group.kv_heads = static_cast<std::uint16_t>(std::min<std::uint64_t>(tiles, kHeadsMax));
  const std::uint64_t layers =
      std::min<std::uint64_t>(kLayersMax, (tiles + group.kv_heads / 2) / group.kv_heads);
  for (std::uint64_t layer = 0; layer < layers; ++layer) {
    group.layers.push_back(static_cast<std::uint16_t>(layer));
  }
  spec.groups = {group};
  return spec;
}

BlockKey KeyOf(std::uint64_t number) {
  const Sha256Digest digest = Sha256(absl::StrCat("kvmill-bench ", number));
  const absl::StatusOr<BlockKey> key = BlockKey::FromBytes(
      absl::string_view(reinterpret_cast<const char*>(digest.data()), digest.size()));
  return *key;  // 32 bytes always are a key.
}

// One block's worth of Gaussian values; every layer is the same.
struct Values {
  std::vector<std::uint16_t> k, v;
  std::vector<std::byte> records;  // Of one layer; empty: 16-bit values are stored.
  std::vector<LayerInput> layers;

  explicit Values(const NamespaceSpec& spec) {
    const LayerGroup& group = spec.groups[0];
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (std::vector<std::uint16_t>* half : {&k, &v}) {
      half->resize(std::size_t{kTokens} * group.kv_heads * kHeadDim);
      for (std::uint16_t& value : *half) value = FromFloat(normal(random), spec.source_dtype);
    }
    layers.resize(group.layers.size());
    for (LayerInput& layer : layers) {
      layer.k = KvView::Array(k.data(), group.kv_heads, kHeadDim);
      layer.v = KvView::Array(v.data(), group.kv_heads, kHeadDim);
    }
  }
};

class Collector : public FetchSink {
 public:
  absl::Status OnPage(const PageId& id, const PageView& page) override {
    if (id.layer_index != 0) return absl::OkStatus();
    for (std::size_t head = 0; head < page.head_count(); ++head) {
      const absl::Span<const std::byte> contents = page.contents(head);
      records.insert(records.end(), contents.begin(), contents.end());
    }
    return absl::OkStatus();
  }
  std::vector<std::byte> records;
};

// The engine's memory: a place for each page of one block.
class PageSlots : public FetchSink {
 public:
  PageSlots(std::size_t layers, std::size_t page_bytes)
      : page_bytes_(page_bytes), memory_(layers * page_bytes) {}
  absl::Span<std::byte> PageMemory(const PageId& id, std::size_t page_bytes) override {
    if (page_bytes > page_bytes_) return {};
    return absl::MakeSpan(memory_).subspan(id.layer_index * page_bytes_, page_bytes);
  }
  absl::Status OnPage(const PageId&, const PageView&) override { return absl::OkStatus(); }

 private:
  const std::size_t page_bytes_;
  std::vector<std::byte> memory_;
};

// Runs `one(number)` for `count` numbers from `first` on, on `depth` threads. The time it took.
absl::StatusOr<absl::Duration> RunAtOnce(std::uint32_t depth, std::uint64_t first,
                                         std::uint64_t count,
                                         const std::function<absl::Status(std::uint64_t)>& one) {
  std::atomic<std::uint64_t> next{0};
  Mutex mu;
  absl::Status failed;
  std::vector<std::thread> threads;
  const absl::Time start = absl::Now();
  for (std::uint32_t t = 0; t < depth; ++t) {
    threads.emplace_back([&] {
      for (std::uint64_t n = 0; (n = next++) < count;) {
        const absl::Status status = one(first + n);
        if (status.ok()) continue;
        MutexLock lock(mu);
        failed = status;
        next = count;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const absl::Duration took = absl::Now() - start;
  if (!failed.ok()) return failed;
  return took;
}

class Bench {
 public:
  Bench(Client& client, const DataBenchOptions& options)
      : client_(client), options_(options), spec_(SpecFor(options.bytes)), values_(spec_) {}
  ~Bench() {
    if (!ns_.name.empty()) static_cast<void>(client_.Clear(ns_));
  }

  absl::Status Open() {
    // Of one name, so that benches do not pile up in the list of namespaces.
    KVMILL_ASSIGN_OR_RETURN(ns_,
                            client_.OpenNamespace(absl::StrCat("kvmill-bench-", getpid()), spec_));
    const LayerGroup& group = spec_.groups[0];
    page_bytes_ =
        UniformPageBytes(FormatOf(spec_, group), kTokens, SlotKind::kTile, group.kv_heads);
    result_.page_bytes = page_bytes_ * group.layers.size();
    result_.raw_bytes =
        RawBytes(FormatOf(spec_, group), kTokens) * group.kv_heads * group.layers.size();
    if (!options_.records) return absl::OkStatus();
    KVMILL_RETURN_IF_ERROR(Store(kRecordsBlock));
    Collector collector;
    const BlockKey key = KeyOf(kRecordsBlock);
    KVMILL_RETURN_IF_ERROR(client_.Fetch(ns_, absl::MakeConstSpan(&key, 1), collector).status());
    values_.records = std::move(collector.records);
    for (LayerInput& layer : values_.layers) layer.records = values_.records.data();
    return absl::OkStatus();
  }

  absl::Status Store(std::uint64_t number) {
    StoreBlock block;
    block.key = KeyOf(number);
    block.token_count = kTokens;
    block.layers = values_.layers;
    KVMILL_ASSIGN_OR_RETURN(const StoreResult stored,
                            client_.Store(ns_, absl::MakeConstSpan(&block, 1), {}));
    KVMILL_RETURN_IF_ERROR(stored.blocks[0].status);
    if (stored.blocks_stored == 1) return absl::OkStatus();
    return absl::InternalError("a new block was there before");
  }

  absl::Status Fetch(std::uint64_t number) {
    static thread_local std::unique_ptr<PageSlots> slots;
    static thread_local const Bench* owner = nullptr;
    if (std::exchange(owner, this) != this) {
      slots = std::make_unique<PageSlots>(spec_.groups[0].layers.size(), page_bytes_);
    }
    const BlockKey key = KeyOf(number % fetched_blocks());
    KVMILL_ASSIGN_OR_RETURN(const FetchResult fetched,
                            client_.Fetch(ns_, absl::MakeConstSpan(&key, 1), *slots));
    return fetched.blocks[0].status;
  }

  std::uint64_t fetched_blocks() const { return std::min(options_.count, kFetchedBlocksMax); }

  absl::StatusOr<DataBenchResult> Measure(const std::function<absl::Status(std::uint64_t)>& one) {
    constexpr std::uint64_t kWarmUp = 10;
    Progress progress("measuring");
    for (std::uint64_t n = 0; n < kWarmUp; ++n) KVMILL_RETURN_IF_ERROR(one(n));
    for (std::uint32_t n = 0; n < options_.count; ++n) {
      const absl::Time start = absl::Now();
      KVMILL_RETURN_IF_ERROR(one(kWarmUp + n));
      result_.us.push_back(Microseconds(absl::Now() - start));
      progress.Update(n, 2 * options_.count, "blocks");
    }
    std::sort(result_.us.begin(), result_.us.end());
    KVMILL_ASSIGN_OR_RETURN(
        const absl::Duration took,
        RunAtOnce(options_.depth, kWarmUp + options_.count, options_.count, one));
    const double seconds = absl::ToDoubleSeconds(took);
    const double count = options_.count;
    result_.gb_per_s = static_cast<double>(result_.page_bytes) * count / seconds * 1e-9;
    result_.raw_gb_per_s = static_cast<double>(result_.raw_bytes) * count / seconds * 1e-9;
    std::vector<double> empty;
    for (std::uint32_t n = 0; n < kEmptyCalls; ++n) {
      const absl::Time start = absl::Now();
      KVMILL_RETURN_IF_ERROR(client_.Lookup(ns_, {}, false).status());
      empty.push_back(Microseconds(absl::Now() - start));
    }
    std::nth_element(empty.begin(), empty.begin() + kEmptyCalls / 2, empty.end());
    result_.empty_rpc_p50_us = empty[kEmptyCalls / 2];
    const std::string ucx = client_.ucx_transport();
    result_.transport = ucx.empty() ? "grpc" : ucx;
    return result_;
  }

 private:
  static constexpr std::uint64_t kRecordsBlock = ~std::uint64_t{0};

  Client& client_;
  const DataBenchOptions& options_;
  const NamespaceSpec spec_;
  Values values_;
  ClientNamespace ns_;
  std::size_t page_bytes_ = 0;
  DataBenchResult result_;
};

}  // namespace

absl::StatusOr<DataBenchResult> RunStoreBench(Client& client, const DataBenchOptions& options) {
  Bench bench(client, options);
  KVMILL_RETURN_IF_ERROR(bench.Open());
  return bench.Measure([&bench](std::uint64_t number) { return bench.Store(number); });
}

absl::StatusOr<DataBenchResult> RunFetchBench(Client& client, const DataBenchOptions& options) {
  Bench bench(client, options);
  KVMILL_RETURN_IF_ERROR(bench.Open());
  for (std::uint64_t n = 0; n < bench.fetched_blocks(); ++n) {
    KVMILL_RETURN_IF_ERROR(bench.Store(n));
  }
  return bench.Measure([&bench](std::uint64_t number) { return bench.Fetch(number); });
}

}  // namespace kvmill::cli
