#include "client/cli/attention_bench.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <ctime>
#include <memory>
#include <new>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "client/cli/relative_error.h"
#include "kernels/attention.h"
#include "kernels/encode.h"
#include "kernels/float16.h"
#include "storage/core/status_macros.h"

namespace kvmill::cli {
namespace {

constexpr std::size_t kTileBytesMin = std::size_t{256} << 20;  // Of all layers: past every cache.
constexpr std::size_t kLayersMax = 16;
constexpr std::size_t kDistinctTiles = 64;  // The rest are copies: values do not change the speed.

// Huge pages where the kernel gives them, as in the daemon's arenas: with small ones a processor
// that walks page tables for a virtual machine reads half as fast, whatever it reads.
constexpr std::align_val_t kBufferAlignment{std::size_t{2} << 20};
struct AlignedDelete {
  void operator()(std::byte* p) const { operator delete(p, kBufferAlignment); }
};
using Buffer = std::unique_ptr<std::byte, AlignedDelete>;
Buffer MakeBuffer(std::size_t bytes) {
  Buffer buffer(static_cast<std::byte*>(operator new(bytes, kBufferAlignment)));
  madvise(buffer.get(), bytes, MADV_HUGEPAGE);  // Only a wish.
  return buffer;
}

// Threads that wait for work; the caller is the first of them.
class Workers {
 public:
  explicit Workers(std::uint32_t count) : count_(count), barrier_(count) {
    for (std::uint32_t w = 1; w < count; ++w) {
      threads_.emplace_back([this, w] {
        for (;;) {
          barrier_.arrive_and_wait();
          if (work_ == nullptr) return;
          work_(context_, w);
          barrier_.arrive_and_wait();
        }
      });
    }
  }
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;
  ~Workers() {
    work_ = nullptr;
    barrier_.arrive_and_wait();
    for (std::thread& thread : threads_) thread.join();
  }

  void Run(void (*work)(void*, std::uint32_t), void* context) {
    work_ = work;
    context_ = context;
    barrier_.arrive_and_wait();
    work(context, 0);
    barrier_.arrive_and_wait();
  }

  AttentionWorkers lend() {
    return {count_,
            [](void* self, void (*work)(void*, std::uint32_t), void* context) {
              static_cast<Workers*>(self)->Run(work, context);
            },
            this};
  }
  std::uint32_t count() const { return count_; }

 private:
  const std::uint32_t count_;
  std::barrier<> barrier_;
  void (*work_)(void*, std::uint32_t) = nullptr;
  void* context_ = nullptr;
  std::vector<std::thread> threads_;
};

// K and V of some layers twice: as fp16 blocks and as records.
class Layers {
 public:
  explicit Layers(const AttentionBenchOptions& options)
      : format_(options.format),
        blocks_((options.context + format_.group - 1) / format_.group),
        entries_(blocks_ * options.kv_heads),
        record_bytes_(RecordBytes(format_)),
        raw_bytes_(RawBytes(format_, format_.group)),
        count_(
            std::clamp((kTileBytesMin + entries_ * record_bytes_ - 1) / (entries_ * record_bytes_),
                       std::size_t{1}, kLayersMax)),
        records_(MakeBuffer(count_ * entries_ * record_bytes_)),
        raw_(MakeBuffer(count_ * entries_ * raw_bytes_)) {
    Fill();
    for (std::size_t i = 0; i < count_ * entries_; ++i) {
      tile_table_.push_back({BlockKind::kTile, records_.get() + i * record_bytes_});
      raw_table_.push_back({BlockKind::kRaw, raw_.get() + i * raw_bytes_});
    }
  }

  std::size_t count() const { return count_; }
  std::size_t block_count() const { return blocks_; }
  std::size_t tile_bytes() const { return entries_ * record_bytes_; }  // Of one layer.
  std::size_t raw_bytes() const { return entries_ * raw_bytes_; }
  const AttentionBlock* tiles(std::size_t layer) const { return &tile_table_[layer * entries_]; }
  const AttentionBlock* raws(std::size_t layer) const { return &raw_table_[layer * entries_]; }
  const std::byte* raw_data(std::size_t layer) const { return raw_.get() + layer * raw_bytes(); }

 private:
  // The distinct tiles first, then copies of them in no regular order.
  void Fill() {
    const std::size_t total = count_ * entries_;
    const std::size_t distinct = std::min(kDistinctTiles, total);
    std::mt19937 random(1);
    std::normal_distribution<float> gauss;
    const Buffer scratch = MakeBuffer(EncodeScratchBytes(format_));
    for (std::size_t i = 0; i < distinct; ++i) {
      auto* values = reinterpret_cast<std::uint16_t*>(raw_.get() + i * raw_bytes_);
      for (std::size_t j = 0; j < raw_bytes_ / 2; ++j) values[j] = FloatToFloat16(gauss(random));
      const auto* page = raw_.get() + i * raw_bytes_;
      const std::byte* const k_page = page;
      const std::byte* const v_page = page + raw_bytes_ / 2;
      EncodeArgs args;
      args.k.pages = &k_page;
      args.k.page_tokens = format_.group;
      args.k.token_stride_bytes = std::ptrdiff_t{2} * format_.head_dim;
      args.v = args.k;
      args.v.pages = &v_page;
      args.record = records_.get() + i * record_bytes_;
      EncodeResult result;
      EncodeTilesCpu(format_, Frame::kModel, {&args, 1}, {&result, 1},
                     {scratch.get(), EncodeScratchBytes(format_)});
    }
    for (std::size_t i = distinct; i < total; ++i) {
      const std::size_t from = random() % distinct;
      std::memcpy(raw_.get() + i * raw_bytes_, raw_.get() + from * raw_bytes_, raw_bytes_);
      std::memcpy(records_.get() + i * record_bytes_, records_.get() + from * record_bytes_,
                  record_bytes_);
    }
  }

  const TileFormat format_;
  const std::size_t blocks_;
  const std::size_t entries_;  // Of one layer.
  const std::size_t record_bytes_, raw_bytes_;
  const std::size_t count_;
  const Buffer records_, raw_;
  std::vector<AttentionBlock> tile_table_, raw_table_;
};

class Decoding {
 public:
  Decoding(const AttentionBenchOptions& options, const Layers& layers, Workers& workers)
      : layers_(layers), workers_(workers) {
    std::mt19937 random(2);
    std::normal_distribution<float> gauss;
    query_.resize(std::size_t{options.q_heads} * options.format.head_dim);
    for (float& q : query_) q = gauss(random);
    output_.resize(query_.size());
    AttentionShape& shape = args_.shape;
    shape.format = options.format;
    shape.q_heads = options.q_heads;
    shape.kv_heads = options.kv_heads;
    shape.scale = 1 / std::sqrt(static_cast<float>(options.format.head_dim));
    shape.raw = PackedRawLayout(options.format, DType::kFloat16, options.format.group);
    sequence_.block_count = static_cast<std::uint32_t>(layers.block_count());
    sequence_.token_end = options.context;
    sequence_.query_position = options.context - 1;
    args_.sequences = {&sequence_, 1};
    args_.query = query_.data();
    args_.output = output_.data();
    scratch_bytes_ = AttentionScratchBytes(args_, workers.count());
    scratch_ = MakeBuffer(scratch_bytes_);
  }

  void Tiles(std::size_t layer) { Run(layers_.tiles(layer)); }
  void Fp16(std::size_t layer) { Run(layers_.raws(layer)); }

  // Of what ran last, against the reference over the same blocks.
  double Error() const {
    std::vector<float> want(output_.size());
    AttentionArgs args = args_;
    args.output = want.data();
    AttentionReference(args);
    return RelativeError(output_, want);
  }

 private:
  void Run(const AttentionBlock* blocks) {
    sequence_.blocks = blocks;
    AttentionCpu(args_, workers_.lend(), {scratch_.get(), scratch_bytes_});
  }

  const Layers& layers_;
  Workers& workers_;
  AttentionArgs args_;
  AttentionSequence sequence_;
  std::vector<float> query_, output_;
  std::size_t scratch_bytes_ = 0;
  Buffer scratch_;
};

// Reads a layer's fp16 once, split over the workers, four streams each.
class Reading {
 public:
  explicit Reading(Workers& workers) : workers_(workers) {}

  void Run(const std::byte* data, std::size_t bytes) {
    data_ = reinterpret_cast<const std::uint64_t*>(data);
    words_ = bytes / sizeof(std::uint64_t) / workers_.count() / (4 * kStep) * (4 * kStep);
    workers_.Run([](void* self, std::uint32_t w) { static_cast<Reading*>(self)->Read(w); }, this);
  }
  std::size_t bytes() const { return words_ * sizeof(std::uint64_t) * workers_.count(); }
  std::uint64_t sum() const { return sum_.load(); }

 private:
  static constexpr std::size_t kStep = 8;

  void Read(std::uint32_t worker) {
    const std::uint64_t* from = data_ + worker * words_;
    const std::size_t quarter = words_ / 4;
    std::uint64_t lanes[kStep] = {};
    for (std::size_t i = 0; i < quarter; i += kStep) {
      for (std::size_t stream = 0; stream < 4; ++stream) {
        for (std::size_t j = 0; j < kStep; ++j) lanes[j] ^= from[stream * quarter + i + j];
      }
    }
    std::uint64_t all = 0;
    for (const std::uint64_t lane : lanes) all ^= lane;
    sum_.fetch_add(all);  // Or the compiler reads nothing.
  }

  Workers& workers_;
  const std::uint64_t* data_ = nullptr;
  std::size_t words_ = 0;  // Of one worker.
  std::atomic<std::uint64_t> sum_{0};
};

// Wall time, and the processor time of all threads divided by their number: on a machine that does
// other things too, the second says more.
struct Times {
  double wall_us = 0;
  double cpu_us = 0;
};

double ProcessMicroseconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) / 1e3;
}

template <class Work>
Times TimesOf(const Workers& workers, const Work& work) {
  const double cpu = ProcessMicroseconds();
  const auto start = std::chrono::steady_clock::now();
  work();
  const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
  return {took.count(), (ProcessMicroseconds() - cpu) / workers.count()};
}

double Median(const std::vector<double>& ascending) { return ascending[ascending.size() / 2]; }

}  // namespace

absl::Status CheckHeads(const AttentionBenchOptions& options) {
  if (options.kv_heads == 0 || options.q_heads == 0 || options.q_heads % options.kv_heads != 0 ||
      options.q_heads > kAttentionHeadsMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("--heads-q ", options.q_heads, ", --heads-kv ", options.kv_heads,
                     ": want a multiple, and at most ", kAttentionHeadsMax));
  }
  return absl::OkStatus();
}

absl::StatusOr<AttentionBenchResult> RunAttentionBench(const AttentionBenchOptions& options) {
  KVMILL_RETURN_IF_ERROR(CheckHeads(options));
  const Layers layers(options);
  Workers workers(options.threads);
  Decoding decoding(options, layers, workers);
  Reading reading(workers);
  AttentionBenchResult result;
  result.layers = static_cast<std::uint32_t>(layers.count());
  decoding.Fp16(0);
  result.rel_error_fp16 = decoding.Error();
  decoding.Tiles(0);
  result.rel_error = decoding.Error();

  // All three in turn, so that what else the machine does meets them alike.
  std::vector<double> read;
  for (std::uint32_t r = 0; r < options.repetitions; ++r) {
    const std::size_t layer = (r + 1) % layers.count();
    const Times tiles = TimesOf(workers, [&] { decoding.Tiles(layer); });
    const Times fp16 = TimesOf(workers, [&] { decoding.Fp16(layer); });
    const Times reads = TimesOf(workers, [&] {
      reading.Run(layers.raw_data((layer + layers.count() / 2) % layers.count()),
                  layers.raw_bytes());
    });
    result.tiles_us.push_back(tiles.wall_us);
    result.fp16_us.push_back(fp16.wall_us);
    result.ratio.push_back(fp16.wall_us / tiles.wall_us);
    result.tiles_cpu_us.push_back(tiles.cpu_us);
    result.fp16_cpu_us.push_back(fp16.cpu_us);
    result.ratio_cpu.push_back(fp16.cpu_us / tiles.cpu_us);
    read.push_back(static_cast<double>(reading.bytes()) / reads.wall_us / 1e3);
    result.read_cpu_gb_per_s.push_back(static_cast<double>(reading.bytes()) / reads.cpu_us / 1e3);
  }
  for (std::vector<double>* values :
       {&result.tiles_us, &result.fp16_us, &result.ratio, &result.tiles_cpu_us, &result.fp16_cpu_us,
        &result.ratio_cpu, &result.read_cpu_gb_per_s, &read}) {
    std::sort(values->begin(), values->end());
  }
  result.tiles_gb_per_s = static_cast<double>(layers.tile_bytes()) / Median(result.tiles_us) / 1e3;
  result.fp16_gb_per_s = static_cast<double>(layers.raw_bytes()) / Median(result.fp16_us) / 1e3;
  result.read_gb_per_s = Median(read);
  return result;
}

}  // namespace kvmill::cli
