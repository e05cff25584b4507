// The attention benchmark on a device.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>

#include "absl/strings/str_cat.h"
#include "client/cli/attention_bench.h"
#include "client/cli/device_arena.h"
#include "client/cli/relative_error.h"
#include "kernels/attention.h"
#include "kernels/encode.h"
#include "kernels/float16.h"
#include "storage/core/status_macros.h"

namespace kvmill::cli {
namespace {

constexpr std::size_t kDistinctTiles = 64;  // The rest are copies: values do not change the speed.

// The distinct tiles, on the host: fp16 blocks and their records.
struct Pattern {
  std::vector<std::byte> raw, records;
};

Pattern MakePattern(const TileFormat& format, std::size_t count) {
  const std::size_t raw_bytes = RawBytes(format, format.group);
  Pattern pattern;
  std::mt19937 random(1);
  std::normal_distribution<float> gauss;
  std::vector<std::uint16_t> values(count * raw_bytes / 2);
  for (std::uint16_t& value : values) value = FloatToFloat16(gauss(random));
  pattern.raw.resize(count * raw_bytes);
  std::memcpy(pattern.raw.data(), values.data(), pattern.raw.size());
  pattern.records.resize(count * RecordBytes(format));
  std::vector<std::byte> scratch(EncodeScratchBytes(format) + 64);
  const auto misaligned = reinterpret_cast<std::uintptr_t>(scratch.data()) % 64;
  for (std::size_t i = 0; i < count; ++i) {
    const std::byte* const k_page = pattern.raw.data() + i * raw_bytes;
    const std::byte* const v_page = k_page + raw_bytes / 2;
    EncodeArgs args;
    args.k.pages = &k_page;
    args.k.page_tokens = format.group;
    args.k.token_stride_bytes = std::ptrdiff_t{2} * format.head_dim;
    args.v = args.k;
    args.v.pages = &v_page;
    args.record = pattern.records.data() + i * RecordBytes(format);
    EncodeResult result;
    EncodeTilesCpu(format, Frame::kModel, {&args, 1}, {&result, 1},
                   {scratch.data() + (64 - misaligned) % 64, EncodeScratchBytes(format)});
  }
  return pattern;
}

// A batch of sequences, each with K and V of its own, as tiles and as fp16.
class DeviceBatch {
 public:
  DeviceBatch(const AttentionBenchOptions& options, Device& device, DeviceStream& stream)
      : options_(options),
        device_(device),
        stream_(stream),
        blocks_((options.context + options.format.group - 1) / options.format.group),
        entries_(blocks_ * options.kv_heads),
        record_bytes_(RecordBytes(options.format)),
        raw_bytes_(RawBytes(options.format, options.format.group)),
        count_(std::max<std::size_t>(1, (options.device_bytes + tile_bytes() - 1) / tile_bytes())),
        pattern_tiles_(std::min(kDistinctTiles, count_ * entries_)),
        pattern_(MakePattern(options.format, pattern_tiles_)) {
    AttentionShape& shape = args_.shape;
    shape.format = options.format;
    shape.q_heads = options.q_heads;
    shape.kv_heads = options.kv_heads;
    shape.scale = 1 / std::sqrt(static_cast<float>(options.format.head_dim));
    shape.raw = PackedRawLayout(options.format, DType::kFloat16, options.format.group);
    std::mt19937 random(2);
    std::normal_distribution<float> gauss;
    query_.resize(count_ * options.q_heads * options.format.head_dim);
    for (float& q : query_) q = gauss(random);
  }

  absl::Status Create() {
    const std::size_t total = count_ * entries_;
    const std::size_t workspace_bytes =
        device_.AttendWorkspaceBytes(args_.shape, count_, count_, device_.info().attention_workers);
    const std::size_t bytes = DeviceArena::Padded(total * record_bytes_) +
                              DeviceArena::Padded(total * raw_bytes_) +
                              2 * DeviceArena::Padded(total * sizeof(AttentionBlock)) +
                              2 * DeviceArena::Padded(count_ * sizeof(AttentionSequence)) +
                              2 * DeviceArena::Padded(query_.size() * sizeof(float)) +
                              DeviceArena::Padded(workspace_bytes);
    KVMILL_ASSIGN_OR_RETURN(DeviceArena arena, DeviceArena::Create(device_, bytes));
    std::byte* const records = arena.Reserve(total * record_bytes_);
    raw_ = arena.Reserve(total * raw_bytes_);
    workspace_ = arena.Reserve(workspace_bytes);
    args_.output = arena.Reserve(query_.size() * sizeof(float));
    args_.query = arena.Put(query_);
    tiles_ = PutSequences(arena, BlockKind::kTile, records, record_bytes_);
    fp16_ = PutSequences(arena, BlockKind::kRaw, raw_, raw_bytes_);
    absl::Status status = stream_.Copy(records, pattern_.records.data(), pattern_.records.size());
    status.Update(stream_.Copy(raw_, pattern_.raw.data(), pattern_.raw.size()));
    status.Update(RepeatOnDevice(stream_, records, pattern_.records.size(), total * record_bytes_));
    status.Update(RepeatOnDevice(stream_, raw_, pattern_.raw.size(), total * raw_bytes_));
    status.Update(arena.Upload(stream_));
    arena_ = std::make_unique<DeviceArena>(std::move(arena));
    return status;
  }

  std::size_t count() const { return count_; }
  std::size_t tile_bytes() const { return entries_ * record_bytes_; }  // Of one sequence.
  std::size_t raw_bytes() const { return entries_ * raw_bytes_; }
  std::size_t copy_bytes() const { return count_ * raw_bytes() / 2; }

  absl::StatusOr<double> TilesMicroseconds() { return Run(tiles_); }
  absl::StatusOr<double> Fp16Microseconds() { return Run(fp16_); }
  // Half of the fp16 values over the other half.
  absl::StatusOr<double> CopyMicroseconds() {
    return Time([&] { return stream_.Copy(raw_ + copy_bytes(), raw_, copy_bytes()); });
  }

  // The first sequence of what ran last, against fp64 over the same blocks on the host.
  absl::StatusOr<double> Error(BlockKind kind) {
    const std::size_t values = std::size_t{options_.q_heads} * options_.format.head_dim;
    std::vector<float> got(values), want(values);
    KVMILL_RETURN_IF_ERROR(stream_.Copy(got.data(), args_.output, values * sizeof(float)));
    KVMILL_RETURN_IF_ERROR(stream_.Synchronize());
    const std::byte* const from =
        kind == BlockKind::kTile ? pattern_.records.data() : pattern_.raw.data();
    const std::vector<AttentionBlock> table =
        Table(kind, 0, [&](std::size_t i) { return from + i % pattern_tiles_ * BytesOf(kind); });
    const AttentionSequence sequence = Sequence(table.data());
    AttentionArgs args = args_;
    args.sequences = {&sequence, 1};
    args.query = query_.data();
    args.output = want.data();
    AttentionReference(args);
    return RelativeError(got, want);
  }

 private:
  std::size_t BytesOf(BlockKind kind) const {
    return kind == BlockKind::kTile ? record_bytes_ : raw_bytes_;
  }

  template <typename AddressOf>
  std::vector<AttentionBlock> Table(BlockKind kind, std::size_t sequence,
                                    const AddressOf& address_of) const {
    std::vector<AttentionBlock> table;
    for (std::size_t i = 0; i < entries_; ++i) {
      table.push_back({kind, address_of(sequence * entries_ + i)});
    }
    return table;
  }

  AttentionSequence Sequence(const AttentionBlock* table) const {
    AttentionSequence s;
    s.blocks = table;
    s.block_count = static_cast<std::uint32_t>(blocks_);
    s.token_end = options_.context;
    s.query_position = options_.context - 1;
    return s;
  }

  const AttentionSequence* PutSequences(DeviceArena& arena, BlockKind kind, const std::byte* start,
                                        std::size_t bytes) const {
    std::vector<AttentionBlock> tables;
    for (std::size_t s = 0; s < count_; ++s) {
      const std::vector<AttentionBlock> table =
          Table(kind, s, [&](std::size_t i) { return start + i * bytes; });
      tables.insert(tables.end(), table.begin(), table.end());
    }
    const AttentionBlock* const at = arena.Put(tables);
    std::vector<AttentionSequence> sequences;
    for (std::size_t s = 0; s < count_; ++s) sequences.push_back(Sequence(at + s * entries_));
    return arena.Put(sequences);
  }

  template <typename Enqueue>
  absl::StatusOr<double> Time(const Enqueue& enqueue) {
    const auto start = std::chrono::steady_clock::now();
    absl::Status status = enqueue();
    status.Update(stream_.Synchronize());
    KVMILL_RETURN_IF_ERROR(status);
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
    return took.count();
  }

  absl::StatusOr<double> Run(const AttentionSequence* sequences) {
    args_.sequences = {sequences, count_};
    return Time(
        [&] { return stream_.Attend(args_, device_.info().attention_workers, workspace_); });
  }

  const AttentionBenchOptions& options_;
  Device& device_;
  DeviceStream& stream_;
  const std::size_t blocks_;
  const std::size_t entries_;  // Of one sequence.
  const std::size_t record_bytes_, raw_bytes_;
  const std::size_t count_;
  const std::size_t pattern_tiles_;
  const Pattern pattern_;
  AttentionArgs args_;
  std::vector<float> query_;
  std::unique_ptr<DeviceArena> arena_;
  std::byte* raw_ = nullptr;
  std::byte* workspace_ = nullptr;
  const AttentionSequence* tiles_ = nullptr;
  const AttentionSequence* fp16_ = nullptr;
};

}  // namespace

absl::StatusOr<AttentionBenchResult> RunAttentionBenchOn(Device& device,
                                                         const AttentionBenchOptions& options) {
  KVMILL_RETURN_IF_ERROR(CheckHeads(options));
  KVMILL_ASSIGN_OR_RETURN(const std::unique_ptr<DeviceStream> stream, device.CreateStream());
  DeviceBatch batch(options, device, *stream);
  KVMILL_RETURN_IF_ERROR(batch.Create());
  AttentionBenchResult result;
  result.layers = static_cast<std::uint32_t>(batch.count());
  // The first run of each loads the kernel.
  KVMILL_RETURN_IF_ERROR(batch.Fp16Microseconds().status());
  KVMILL_ASSIGN_OR_RETURN(result.rel_error_fp16, batch.Error(BlockKind::kRaw));
  KVMILL_RETURN_IF_ERROR(batch.TilesMicroseconds().status());
  KVMILL_ASSIGN_OR_RETURN(result.rel_error, batch.Error(BlockKind::kTile));

  const auto count = static_cast<double>(batch.count());
  std::vector<double> traffic;
  for (std::uint32_t r = 0; r < options.repetitions; ++r) {
    KVMILL_ASSIGN_OR_RETURN(const double tiles_us, batch.TilesMicroseconds());
    KVMILL_ASSIGN_OR_RETURN(const double fp16_us, batch.Fp16Microseconds());
    KVMILL_ASSIGN_OR_RETURN(const double copy_us, batch.CopyMicroseconds());
    result.tiles_us.push_back(tiles_us / count);
    result.fp16_us.push_back(fp16_us / count);
    result.ratio.push_back(fp16_us / tiles_us);
    traffic.push_back(2 * static_cast<double>(batch.copy_bytes()) / copy_us / 1e3);
  }
  for (std::vector<double>* values : {&result.tiles_us, &result.fp16_us, &result.ratio, &traffic}) {
    std::sort(values->begin(), values->end());
  }
  const auto median = [](const std::vector<double>& ascending) {
    return ascending[ascending.size() / 2];
  };
  result.tiles_gb_per_s = static_cast<double>(batch.tile_bytes()) / median(result.tiles_us) / 1e3;
  result.fp16_gb_per_s = static_cast<double>(batch.raw_bytes()) / median(result.fp16_us) / 1e3;
  result.read_gb_per_s = median(traffic);
  return result;
}

}  // namespace kvmill::cli
