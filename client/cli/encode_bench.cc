#include "client/cli/encode_bench.h"

#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <functional>
#include <new>
#include <random>
#include <thread>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/cli/output.h"
#include "kernels/encode.h"
#include "kernels/encode_bound.h"
#include "kernels/float16.h"
#include "kernels/refine.h"

namespace kvmill::cli {
namespace {

constexpr std::size_t kInputBytes = std::size_t{2}
                                    << 20;  // A thread's tiles: past L1, within L2/L3.
constexpr std::size_t kCopyBytes = std::size_t{64} << 20;  // Past every cache.
constexpr double kRunSeconds = 0.05;                       // One repetition lasts about this.

using EncodeFunction = decltype(&EncodeTilesCpu);

// Distinct tiles of one thread and room for their records.
class Workload {
 public:
  Workload(const TileFormat& format, unsigned seed)
      : format_(format),
        tile_count_(std::max<std::size_t>(1, kInputBytes / RawBytes(format, format.group))),
        values_(tile_count_ * RawBytes(format, format.group) / 2),
        pages_(2 * tile_count_),
        records_(tile_count_ * RecordBytes(format)),
        results_(tile_count_),
        scratch_bytes_(EncodeScratchBytes(format)),
        scratch_(static_cast<std::byte*>(operator new (scratch_bytes_, std::align_val_t{64}))) {
    std::mt19937 random(seed);
    std::normal_distribution<float> gauss;
    for (std::uint16_t& value : values_) value = FloatToFloat16(gauss(random));
    const std::size_t half_values = std::size_t{format.group} * format.head_dim;
    for (std::size_t i = 0; i < pages_.size(); ++i) {
      pages_[i] = reinterpret_cast<const std::byte*>(values_.data() + i * half_values);
    }
    for (std::size_t t = 0; t < tile_count_; ++t) {
      tiles_.push_back({View(2 * t), View(2 * t + 1), records_.data() + t * RecordBytes(format)});
    }
  }
  Workload(const Workload&) = delete;
  Workload& operator=(const Workload&) = delete;
  ~Workload() { operator delete (scratch_, std::align_val_t{64}); }

  std::size_t tile_count() const { return tile_count_; }
  void Encode(EncodeFunction encode, std::size_t count) {
    const absl::Span<std::byte> scratch = absl::MakeSpan(scratch_, scratch_bytes_);
    encode(format_, Frame::kModel, absl::MakeConstSpan(tiles_).first(count),
           absl::MakeSpan(results_).first(count), scratch);
  }

 private:
  HeadPages View(std::size_t page) const {
    HeadPages view;
    view.pages = &pages_[page];
    view.page_tokens = format_.group;
    view.token_stride_bytes = std::ptrdiff_t{2} * format_.head_dim;
    return view;
  }

  const TileFormat format_;
  const std::size_t tile_count_;
  std::vector<std::uint16_t> values_;
  std::vector<const std::byte*> pages_;
  std::vector<std::byte> records_;
  std::vector<EncodeArgs> tiles_;
  std::vector<EncodeResult> results_;
  const std::size_t scratch_bytes_;
  std::byte* scratch_;
};

double SecondsOf(const std::function<void()>& work) {
  const absl::Time start = absl::Now();
  work();
  return absl::ToDoubleSeconds(absl::Now() - start);
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Runs work(thread) on `threads` threads at once, `repetitions` times; the wall seconds of each.
std::vector<double> TimeTogether(std::uint32_t threads, std::uint32_t repetitions,
                                 const std::function<void(std::uint32_t)>& work) {
  std::barrier barrier(static_cast<std::ptrdiff_t>(threads) + 1);
  std::vector<std::thread> workers;
  for (std::uint32_t t = 0; t < threads; ++t) {
    workers.emplace_back([&, t] {
      for (std::uint32_t r = 0; r < repetitions; ++r) {
        barrier.arrive_and_wait();
        work(t);
        barrier.arrive_and_wait();
      }
    });
  }
  std::vector<double> seconds;
  Progress progress("measuring");
  for (std::uint32_t r = 0; r < repetitions; ++r) {
    seconds.push_back(SecondsOf([&] {
      barrier.arrive_and_wait();
      barrier.arrive_and_wait();
    }));
    progress.Update(r + 1, repetitions, "repetitions");
  }
  for (std::thread& worker : workers) worker.join();
  return seconds;
}

double MeasureReference(Workload& workload, const TileFormat& format, Algorithm algorithm) {
  constexpr std::size_t kTiles = 2;
  const std::size_t tiles = std::min(kTiles, workload.tile_count());
  const EncodeFunction encode = ReferenceEncoderOf(algorithm);
  std::vector<double> seconds;
  for (int r = 0; r < 5; ++r) {
    seconds.push_back(SecondsOf([&] { workload.Encode(encode, tiles); }));
  }
  return static_cast<double>(tiles * RawBytes(format, format.group)) / Median(seconds) / 1e9;
}

double MeasureMemcpy(std::uint32_t threads) {
  std::vector<std::vector<char>> from(threads), to(threads);
  for (std::uint32_t t = 0; t < threads; ++t) {
    from[t].assign(kCopyBytes, 'x');
    to[t].assign(kCopyBytes, 'y');
  }
  const std::vector<double> seconds = TimeTogether(
      threads, 9, [&](std::uint32_t t) { std::memcpy(to[t].data(), from[t].data(), kCopyBytes); });
  return static_cast<double>(threads * kCopyBytes) / Median(seconds) / 1e9;
}

}  // namespace

double MeasureReferenceEncoder(const TileFormat& format) {
  Workload workload(format, 1);
  return MeasureReference(workload, format, Algorithm::kKvarn);
}

EncodeBenchResult RunEncodeBench(const EncodeBenchOptions& options) {
  std::vector<std::unique_ptr<Workload>> workloads;
  for (std::uint32_t t = 0; t < options.threads; ++t) {
    workloads.push_back(std::make_unique<Workload>(options.format, t + 1));
  }
  const EncodeFunction encode = CpuEncoderOf(options.algorithm);
  Workload& first = *workloads.front();
  const std::size_t tiles = first.tile_count();
  const double warm_seconds = SecondsOf([&] { first.Encode(encode, tiles); });
  const auto rounds =
      static_cast<std::size_t>(std::clamp(std::ceil(kRunSeconds / warm_seconds), 1.0, 1000.0));

  std::vector<double> seconds =
      TimeTogether(options.threads, options.repetitions, [&](std::uint32_t t) {
        for (std::size_t r = 0; r < rounds; ++r) workloads[t]->Encode(encode, tiles);
      });
  EncodeBenchResult result;
  for (const double s : seconds) {
    result.us_per_tile.push_back(s * 1e6 / static_cast<double>(rounds * tiles));
  }
  std::sort(result.us_per_tile.begin(), result.us_per_tile.end());
  result.median_us = Median(result.us_per_tile);
  const std::size_t tile_bytes = RawBytes(options.format, options.format.group);
  result.gb_per_s = static_cast<double>(options.threads * tile_bytes) / result.median_us / 1e3;
  result.reference_gb_per_s = MeasureReference(first, options.format, options.algorithm);
  result.memcpy_gb_per_s = MeasureMemcpy(options.threads);
  result.bound_us = MeasureEncodePassesMicroseconds(options.format);
  return result;
}

}  // namespace kvmill::cli
