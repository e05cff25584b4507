// The encode benchmark on a device.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <random>

#include "absl/strings/str_cat.h"
#include "client/cli/device_arena.h"
#include "client/cli/encode_bench.h"
#include "client/cli/output.h"
#include "kernels/encode.h"
#include "kernels/float16.h"
#include "storage/core/status_macros.h"

namespace kvmill::cli {
namespace {

constexpr std::size_t kDistinctTiles = 64;  // The rest are copies: values do not change the speed.
constexpr double kRunSeconds = 0.05;        // One repetition lasts about this.
constexpr int kCopies = 9;

using Clock = std::chrono::steady_clock;

// Seconds of what `enqueue` enqueues, from then until it has ended.
template <typename Enqueue>
absl::StatusOr<double> SecondsOf(DeviceStream& stream, const Enqueue& enqueue) {
  const Clock::time_point start = Clock::now();
  absl::Status status = enqueue();
  status.Update(stream.Synchronize());
  KVMILL_RETURN_IF_ERROR(status);
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Tiles on the device, each at a place of its own.
class DeviceTiles {
 public:
  static absl::StatusOr<DeviceTiles> Create(Device& device, DeviceStream& stream,
                                            const TileFormat& format, std::size_t count) {
    const std::size_t tile_bytes = RawBytes(format, format.group);
    const std::size_t bytes = DeviceArena::Padded(count * tile_bytes) +
                              DeviceArena::Padded(count * RecordBytes(format)) +
                              DeviceArena::Padded(count * sizeof(EncodeArgs)) +
                              DeviceArena::Padded(2 * count * sizeof(const std::byte*)) +
                              DeviceArena::Padded(count * sizeof(EncodeResult));
    KVMILL_ASSIGN_OR_RETURN(DeviceArena arena, DeviceArena::Create(device, bytes));
    DeviceTiles tiles(format, count, std::move(arena));
    KVMILL_RETURN_IF_ERROR(tiles.Fill(stream));
    return tiles;
  }

  absl::Status Encode(DeviceStream& stream) const {
    return stream.Encode(format_, Frame::kModel, args_, count_, results_);
  }

  // INTERNAL unless every tile became a record.
  absl::Status CheckResults(DeviceStream& stream) const {
    std::vector<EncodeResult> results(count_, EncodeResult::kRaw);
    KVMILL_RETURN_IF_ERROR(stream.Copy(results.data(), results_, count_ * sizeof(results[0])));
    KVMILL_RETURN_IF_ERROR(stream.Synchronize());
    const auto bad = std::find_if(results.begin(), results.end(),
                                  [](EncodeResult r) { return r != EncodeResult::kTile; });
    if (bad == results.end()) return absl::OkStatus();
    return absl::InternalError(
        absl::StrCat("tile ", bad - results.begin(), " was not encoded: ", static_cast<int>(*bad)));
  }

  // Half of the values over the other half.
  absl::Status CopyWithin(DeviceStream& stream) const {
    return stream.Copy(values_ + copy_bytes(), values_, copy_bytes());
  }
  std::size_t copy_bytes() const { return count_ * RawBytes(format_, format_.group) / 2; }

 private:
  DeviceTiles(const TileFormat& format, std::size_t count, DeviceArena arena)
      : format_(format), count_(count), arena_(std::move(arena)) {}

  absl::Status Fill(DeviceStream& stream) {
    const std::size_t tile_bytes = RawBytes(format_, format_.group);
    const std::size_t distinct = std::min(kDistinctTiles, count_);
    std::mt19937 random(1);
    std::normal_distribution<float> gauss;
    std::vector<std::uint16_t> pattern(distinct * tile_bytes / 2);
    for (std::uint16_t& value : pattern) value = FloatToFloat16(gauss(random));
    values_ = arena_.Reserve(count_ * tile_bytes);
    std::byte* const records = arena_.Reserve(count_ * RecordBytes(format_));
    results_ = reinterpret_cast<EncodeResult*>(arena_.Reserve(count_ * sizeof(EncodeResult)));

    std::vector<const std::byte*> pages;
    for (std::size_t half = 0; half < 2 * count_; ++half) {
      pages.push_back(values_ + half * tile_bytes / 2);
    }
    const std::byte** const page_list = arena_.Put(pages);
    std::vector<EncodeArgs> args(count_);
    for (std::size_t i = 0; i < count_; ++i) {
      args[i].k.pages = page_list + 2 * i;
      args[i].k.page_tokens = format_.group;
      args[i].k.token_stride_bytes = std::ptrdiff_t{2} * format_.head_dim;
      args[i].v = args[i].k;
      args[i].v.pages = page_list + 2 * i + 1;
      args[i].record = records + i * RecordBytes(format_);
    }
    args_ = arena_.Put(args);
    absl::Status status = stream.Copy(values_, pattern.data(), pattern.size() * 2);
    status.Update(RepeatOnDevice(stream, values_, distinct * tile_bytes, count_ * tile_bytes));
    status.Update(arena_.Upload(stream));
    return status;
  }

  TileFormat format_;
  std::size_t count_;
  DeviceArena arena_;
  std::byte* values_ = nullptr;
  const EncodeArgs* args_ = nullptr;
  EncodeResult* results_ = nullptr;
};

}  // namespace

absl::StatusOr<EncodeBenchResult> RunEncodeBenchOn(Device& device,
                                                   const EncodeBenchOptions& options) {
  const std::size_t tile_bytes = RawBytes(options.format, options.format.group);
  const std::size_t count =
      std::max<std::size_t>(2, (options.device_bytes + tile_bytes - 1) / tile_bytes);
  KVMILL_ASSIGN_OR_RETURN(const std::unique_ptr<DeviceStream> stream, device.CreateStream());
  KVMILL_ASSIGN_OR_RETURN(const DeviceTiles tiles,
                          DeviceTiles::Create(device, *stream, options.format, count));
  const auto encode = [&](std::size_t rounds) {
    return SecondsOf(*stream, [&] {
      for (std::size_t r = 0; r < rounds; ++r) KVMILL_RETURN_IF_ERROR(tiles.Encode(*stream));
      return absl::OkStatus();
    });
  };
  KVMILL_RETURN_IF_ERROR(encode(1).status());  // Loads the kernel.
  KVMILL_RETURN_IF_ERROR(tiles.CheckResults(*stream));
  KVMILL_ASSIGN_OR_RETURN(const double warm_seconds, encode(1));
  const auto rounds =
      static_cast<std::size_t>(std::clamp(std::ceil(kRunSeconds / warm_seconds), 1.0, 1000.0));

  EncodeBenchResult result;
  Progress progress("measuring");
  for (std::uint32_t r = 0; r < options.repetitions; ++r) {
    KVMILL_ASSIGN_OR_RETURN(const double seconds, encode(rounds));
    result.us_per_tile.push_back(seconds * 1e6 / static_cast<double>(rounds * count));
    progress.Update(r + 1, options.repetitions, "repetitions");
  }
  std::sort(result.us_per_tile.begin(), result.us_per_tile.end());
  result.median_us = result.us_per_tile[result.us_per_tile.size() / 2];
  result.gb_per_s = static_cast<double>(tile_bytes) / result.median_us / 1e3;
  result.reference_gb_per_s = MeasureReferenceEncoder(options.format);

  std::vector<double> copies;
  for (int i = 0; i < kCopies; ++i) {
    KVMILL_ASSIGN_OR_RETURN(const double seconds,
                            SecondsOf(*stream, [&] { return tiles.CopyWithin(*stream); }));
    copies.push_back(seconds);
  }
  std::sort(copies.begin(), copies.end());
  result.memcpy_gb_per_s = static_cast<double>(tiles.copy_bytes()) / copies[kCopies / 2] / 1e9;
  // A copied byte is read and written; a tile's values are read and its record is written.
  result.bound_us = static_cast<double>(tile_bytes + RecordBytes(options.format)) /
                    (2 * result.memcpy_gb_per_s) / 1e3;
  return result;
}

}  // namespace kvmill::cli
