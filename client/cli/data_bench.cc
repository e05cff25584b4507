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
#include "client/cli/bench_pages.h"
#include "client/cli/output.h"
#include "client/mapped_blocks.h"
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
constexpr std::uint32_t kRounds = 5;  // Of rates with several clients.

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

// The engine's memory: a place for each page of the blocks of one call.
class PageSlots : public FetchSink {
 public:
  PageSlots(std::size_t blocks, std::size_t layers, std::size_t page_bytes)
      : layers_(layers), page_bytes_(page_bytes), memory_(blocks * layers * page_bytes) {}
  absl::Span<std::byte> PageMemory(const PageId& id, std::size_t page_bytes) override {
    if (page_bytes > page_bytes_) return {};
    const std::size_t page = id.block * layers_ + id.layer_index;
    return absl::MakeSpan(memory_).subspan(page * page_bytes_, page_bytes);
  }
  absl::Status OnPage(const PageId&, const PageView&) override { return absl::OkStatus(); }

 private:
  const std::size_t layers_, page_bytes_;
  std::vector<std::byte> memory_;
};

// One word of every cache line, so that every line has to come.
std::uint64_t ReadLines(absl::Span<const std::byte> bytes) {
  constexpr std::size_t kLineBytes = 64;
  std::uint64_t sum = 0;
  for (std::size_t at = 0; at + sizeof(sum) <= bytes.size(); at += kLineBytes) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data() + at, sizeof(word));
    sum += word;
  }
  return sum;
}

// One call with one client; `number` is another one in every call of a bench.
using OneCall = std::function<absl::Status(Client& client, std::uint64_t number)>;

// Runs `count` calls, numbered from `first` on, by `depth` threads a client. The time it took.
absl::StatusOr<absl::Duration> RunAtOnce(absl::Span<const std::unique_ptr<Client>> clients,
                                         std::uint32_t depth, std::uint64_t first,
                                         std::uint64_t count, const OneCall& one) {
  std::atomic<std::uint64_t> next{0};
  Mutex mu;
  absl::Status failed;
  std::vector<std::thread> threads;
  const absl::Time start = absl::Now();
  for (std::size_t t = 0; t < clients.size() * depth; ++t) {
    threads.emplace_back([&, &client = *clients[t / depth]] {
      for (std::uint64_t n = 0; (n = next++) < count;) {
        const absl::Status status = one(client, first + n);
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
  explicit Bench(const DataBenchOptions& options)
      : options_(options), spec_(SpecFor(options.bytes)), values_(spec_) {}
  ~Bench() {
    if (!ns_.name.empty()) static_cast<void>(first().Clear(ns_));
  }

  absl::Status Open(const ClientFactory& connect) {
    for (std::uint32_t i = 0; i < options_.clients; ++i) {
      KVMILL_ASSIGN_OR_RETURN(clients_.emplace_back(), connect());
    }
    // Of one name, so that benches do not pile up in the list of namespaces.
    KVMILL_ASSIGN_OR_RETURN(ns_,
                            first().OpenNamespace(absl::StrCat("kvmill-bench-", getpid()), spec_));
    const LayerGroup& group = spec_.groups[0];
    page_bytes_ =
        UniformPageBytes(FormatOf(spec_, group), kTokens, SlotKind::kTile, group.kv_heads);
    result_.page_bytes = page_bytes_ * group.layers.size();
    result_.raw_bytes =
        RawBytes(FormatOf(spec_, group), kTokens) * group.kv_heads * group.layers.size();
    if (!options_.records) return absl::OkStatus();
    KVMILL_RETURN_IF_ERROR(Store(first(), kRecordsBlock));
    Collector collector;
    const BlockKey key = KeyOf(kRecordsBlock);
    KVMILL_RETURN_IF_ERROR(first().Fetch(ns_, absl::MakeConstSpan(&key, 1), collector).status());
    values_.records = std::move(collector.records);
    for (LayerInput& layer : values_.layers) layer.records = values_.records.data();
    return absl::OkStatus();
  }

  // Shares pages with the daemon, of every client.
  absl::Status SharePages() {
    KVMILL_ASSIGN_OR_RETURN(pages_,
                            BenchPages::Create(spec_, values_.k, values_.v, values_.records));
    for (const std::unique_ptr<Client>& client : clients_) {
      KVMILL_ASSIGN_OR_RETURN(registrations_[client.get()],
                              client->RegisterMemory(ns_, pages_.geometry()));
    }
    return absl::OkStatus();
  }

  absl::Status StorePages(Client& client, std::uint64_t number) {
    const PageBlock block = pages_.Block(KeyOf(number), kTokens);
    return CheckNew(client.StorePages(ns_, registrations_.at(&client), {&block, 1}));
  }

  absl::Status Store(Client& client, std::uint64_t number) {
    StoreBlock block;
    block.key = KeyOf(number);
    block.token_count = kTokens;
    block.layers = values_.layers;
    return CheckNew(client.Store(ns_, absl::MakeConstSpan(&block, 1), {}));
  }

  // What fetches and maps ask for.
  absl::Status StoreFetched() {
    for (std::uint64_t n = 0; n < fetched_blocks(); ++n) {
      KVMILL_RETURN_IF_ERROR(Store(first(), n));
      fetched_keys_.push_back(KeyOf(n));
    }
    // Those of a call are neighbours; the last ones go on with the first.
    for (std::uint32_t n = 1; n < options_.blocks; ++n) fetched_keys_.push_back(KeyOf(n - 1));
    return absl::OkStatus();
  }

  absl::Status Fetch(Client& client, std::uint64_t number) {
    static thread_local std::unique_ptr<PageSlots> slots;
    static thread_local const Bench* owner = nullptr;
    if (std::exchange(owner, this) != this) {
      slots =
          std::make_unique<PageSlots>(options_.blocks, spec_.groups[0].layers.size(), page_bytes_);
    }
    KVMILL_ASSIGN_OR_RETURN(const FetchResult fetched,
                            client.Fetch(ns_, KeysOfCall(number), *slots));
    for (const FetchBlockResult& block : fetched.blocks) KVMILL_RETURN_IF_ERROR(block.status);
    return absl::OkStatus();
  }

  absl::Status Map(Client& client, std::uint64_t number) {
    KVMILL_ASSIGN_OR_RETURN(mapped_, client.Map(ns_, KeysOfCall(number)));
    for (std::size_t b = 0; b < mapped_->block_count(); ++b) {
      KVMILL_RETURN_IF_ERROR(mapped_->status(b));
    }
    return absl::OkStatus();
  }

  absl::Status MapAndRead(Client& client, std::uint64_t number) {
    KVMILL_ASSIGN_OR_RETURN(const Client::MappedPtr mapped, client.Map(ns_, KeysOfCall(number)));
    std::uint64_t sum = 0;
    for (std::size_t b = 0; b < mapped->block_count(); ++b) {
      for (std::size_t layer = 0; layer < spec_.groups[0].layers.size(); ++layer) {
        KVMILL_ASSIGN_OR_RETURN(const PageView page, mapped->Page(b, 0, layer));
        sum += ReadLines(page.bytes());
      }
    }
    sum_.fetch_add(sum, std::memory_order_relaxed);
    return mapped->Check();
  }

  // `single` is what is timed one by one, after a call without work each; `one` makes the rate.
  absl::StatusOr<DataBenchResult> Measure(const OneCall& single, const OneCall& one) {
    constexpr std::uint64_t kWarmUp = 10;
    Progress progress("measuring");
    std::uint64_t number = 0;
    for (const std::unique_ptr<Client>& client : clients_) {
      for (std::uint64_t n = 0; n < kWarmUp; ++n) KVMILL_RETURN_IF_ERROR(one(*client, number++));
    }
    std::vector<double> empty;
    for (std::uint32_t n = 0; n < options_.count; ++n) {
      absl::Time start = absl::Now();
      KVMILL_RETURN_IF_ERROR(first().Lookup(ns_, {}).status());
      empty.push_back(Microseconds(absl::Now() - start));
      start = absl::Now();
      KVMILL_RETURN_IF_ERROR(single(first(), number++));
      result_.us.push_back(Microseconds(absl::Now() - start));
      mapped_.reset();
      progress.Update(n, 2 * options_.count, "calls");
    }
    std::sort(result_.us.begin(), result_.us.end());
    result_.empty_rpc_p50_us = Median(empty);
    KVMILL_RETURN_IF_ERROR(MeasureRates(number, one));
    const std::string ucx = first().ucx_transport();
    result_.transport = options_.map ? "shm" : ucx.empty() ? "grpc" : ucx;
    return result_;
  }

 private:
  static constexpr std::uint64_t kRecordsBlock = ~std::uint64_t{0};

  static absl::Status CheckNew(const absl::StatusOr<StoreResult>& stored) {
    KVMILL_RETURN_IF_ERROR(stored.status());
    KVMILL_RETURN_IF_ERROR(stored->blocks[0].status);
    if (stored->blocks_stored == 1) return absl::OkStatus();
    return absl::InternalError("a new block was there before");
  }

  Client& first() { return *clients_[0]; }
  std::uint64_t fetched_blocks() const {
    return std::max(std::min(options_.count, kFetchedBlocksMax), options_.blocks);
  }
  absl::Span<const BlockKey> KeysOfCall(std::uint64_t number) const {
    return absl::MakeConstSpan(fetched_keys_).subspan(number % fetched_blocks(), options_.blocks);
  }

  static double Median(std::vector<double>& values) {
    std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
    return values[values.size() / 2];
  }

  absl::Status MeasureRates(std::uint64_t number, const OneCall& one) {
    std::map<std::uint32_t, std::vector<double>> rates;
    for (std::uint32_t round = 0; round < (options_.clients > 1 ? kRounds : 1); ++round) {
      for (std::uint32_t clients = 1;; clients = std::min(2 * clients, options_.clients)) {
        KVMILL_ASSIGN_OR_RETURN(const absl::Duration took,
                                RunAtOnce(absl::MakeConstSpan(clients_).first(clients),
                                          options_.depth, number, options_.count, one));
        number += options_.count;
        rates[clients].push_back(static_cast<double>(result_.page_bytes) * options_.blocks *
                                 options_.count / absl::ToDoubleSeconds(took) * 1e-9);
        if (clients == options_.clients) break;
      }
    }
    for (auto& [clients, values] : rates) result_.clients_gb_per_s[clients] = Median(values);
    result_.gb_per_s = result_.clients_gb_per_s[options_.clients];
    result_.raw_gb_per_s = result_.gb_per_s * static_cast<double>(result_.raw_bytes) /
                           static_cast<double>(result_.page_bytes);
    return absl::OkStatus();
  }

  const DataBenchOptions& options_;
  const NamespaceSpec spec_;
  Values values_;
  std::vector<std::unique_ptr<Client>> clients_;
  ClientNamespace ns_;
  std::vector<BlockKey> fetched_keys_;
  BenchPages pages_;
  std::map<const Client*, std::uint64_t> registrations_;
  Client::MappedPtr mapped_;  // By the last Map; released outside of its time.
  std::atomic<std::uint64_t> sum_{0};
  std::size_t page_bytes_ = 0;
  DataBenchResult result_;
};

}  // namespace

absl::StatusOr<DataBenchResult> RunStoreBench(const ClientFactory& connect,
                                              const DataBenchOptions& options) {
  Bench bench(options);
  KVMILL_RETURN_IF_ERROR(bench.Open(connect));
  if (options.map) {
    KVMILL_RETURN_IF_ERROR(bench.SharePages());
    const auto store_pages = [&bench](Client& client, std::uint64_t n) {
      return bench.StorePages(client, n);
    };
    return bench.Measure(store_pages, store_pages);
  }
  const auto store = [&bench](Client& client, std::uint64_t n) { return bench.Store(client, n); };
  return bench.Measure(store, store);
}

absl::StatusOr<DataBenchResult> RunFetchBench(const ClientFactory& connect,
                                              const DataBenchOptions& options) {
  Bench bench(options);
  KVMILL_RETURN_IF_ERROR(bench.Open(connect));
  KVMILL_RETURN_IF_ERROR(bench.StoreFetched());
  if (options.map) {
    return bench.Measure(
        [&bench](Client& client, std::uint64_t n) { return bench.Map(client, n); },
        [&bench](Client& client, std::uint64_t n) { return bench.MapAndRead(client, n); });
  }
  const auto fetch = [&bench](Client& client, std::uint64_t n) { return bench.Fetch(client, n); };
  return bench.Measure(fetch, fetch);
}

}  // namespace kvmill::cli
