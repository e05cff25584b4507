#include "client/cli/device_codec.h"

#include <algorithm>
#include <memory>

#include "client/cli/device_arena.h"
#include "storage/core/status_macros.h"

namespace kvmill::cli {
namespace {

constexpr std::size_t kBatchBytes = std::size_t{256} << 20;  // Of K and V of one call.

}  // namespace

absl::Status EncodeOnDevice(Device& device, const Tensor& k, const Tensor& v,
                            const TileFormat& format, std::string* records,
                            std::vector<EncodeResult>* results) {
  const std::size_t block_count = k.tokens / format.group;
  results->resize(block_count * k.heads);
  if (results->empty()) return absl::OkStatus();
  const std::size_t row_bytes = std::size_t{2} * k.heads * k.head_dim;
  const std::size_t block_bytes = row_bytes * format.group;  // Of K, and of V.
  const std::size_t record_bytes = RecordBytes(format);
  const std::size_t batch_max =
      std::clamp<std::size_t>(kBatchBytes / (2 * block_bytes), 1, block_count);
  KVMILL_ASSIGN_OR_RETURN(const std::unique_ptr<DeviceStream> stream, device.CreateStream());
  for (std::size_t first = 0; first < block_count; first += batch_max) {
    const std::size_t blocks = std::min(batch_max, block_count - first);
    const std::size_t tiles = blocks * k.heads;
    KVMILL_ASSIGN_OR_RETURN(
        DeviceArena arena,
        DeviceArena::Create(device, 2 * DeviceArena::Padded(blocks * block_bytes) +
                                        DeviceArena::Padded(tiles * record_bytes) +
                                        DeviceArena::Padded(tiles * sizeof(EncodeArgs)) +
                                        DeviceArena::Padded(tiles * sizeof(EncodeResult)) +
                                        DeviceArena::Padded(2 * blocks * sizeof(std::byte*))));
    std::byte* const values[] = {arena.Reserve(blocks * block_bytes),
                                 arena.Reserve(blocks * block_bytes)};
    std::byte* const encoded = arena.Reserve(tiles * record_bytes);
    auto* const ends = reinterpret_cast<EncodeResult*>(arena.Reserve(tiles * sizeof(EncodeResult)));
    // A block is one page of all heads.
    std::vector<const std::byte*> pages;
    for (const std::byte* start : values) {
      for (std::size_t b = 0; b < blocks; ++b) pages.push_back(start + b * block_bytes);
    }
    const std::byte** const page_list = arena.Put(pages);
    std::vector<EncodeArgs> args;
    for (std::size_t i = 0; i < tiles; ++i) {
      HeadPages half;
      half.pages = page_list + i / k.heads;
      half.offset_bytes = std::size_t{2} * (i % k.heads) * k.head_dim;
      half.page_tokens = format.group;
      half.token_stride_bytes = static_cast<std::ptrdiff_t>(row_bytes);
      half.dtype = k.dtype;
      EncodeArgs& tile = args.emplace_back(EncodeArgs{half, half, encoded + i * record_bytes});
      tile.v.pages += blocks;
    }
    const EncodeArgs* const list = arena.Put(args);
    const auto from = [&](const Tensor& t) {
      return reinterpret_cast<const std::byte*>(t.values.data()) + first * block_bytes;
    };
    absl::Status status = arena.Upload(*stream);
    if (status.ok()) status = stream->Copy(values[0], from(k), blocks * block_bytes);
    if (status.ok()) status = stream->Copy(values[1], from(v), blocks * block_bytes);
    if (status.ok()) status = stream->Encode(format, Frame::kModel, list, tiles, ends);
    if (status.ok()) {
      status = stream->Copy(records->data() + first * k.heads * record_bytes, encoded,
                            tiles * record_bytes);
    }
    if (status.ok()) {
      status = stream->Copy(results->data() + first * k.heads, ends, tiles * sizeof(EncodeResult));
    }
    status.Update(stream->Synchronize());  // Also after an error: the arena goes.
    KVMILL_RETURN_IF_ERROR(status);
  }
  return absl::OkStatus();
}

}  // namespace kvmill::cli
