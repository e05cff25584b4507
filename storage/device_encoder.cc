#include "storage/device_encoder.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/core/check.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

// Of a lane: lists for kernels, and after them, on the device only, records.
constexpr std::size_t kListBytes = std::size_t{256} << 10;
constexpr std::size_t kLaneBytes = std::size_t{2} << 20;
constexpr std::align_val_t kPage{4096};
constexpr std::size_t kRecordAlignment = 256;

std::size_t RoundUp(std::size_t bytes, std::size_t step) {
  return (bytes + step - 1) / step * step;
}

std::size_t PageCount(const HeadPages& head, std::uint32_t token_count) {
  return (std::size_t{token_count} + head.page_tokens - 1) / head.page_tokens;
}

}  // namespace

// A stream, and memory for one batch of tiles at a time.
class DeviceEncoder::Lane {
 public:
  static absl::StatusOr<std::unique_ptr<Lane>> Create(Device& device) {
    std::unique_ptr<Lane> lane(new Lane(device));
    KVMILL_ASSIGN_OR_RETURN(lane->memory_, device.Allocate(kLaneBytes, "kvmill-encoder"));
    lane->lists_.reset(static_cast<std::byte*>(::operator new(kListBytes, kPage)));
    KVMILL_RETURN_IF_ERROR(device.Pin(absl::MakeSpan(lane->lists_.get(), kListBytes)));
    lane->is_pinned_ = true;
    KVMILL_ASSIGN_OR_RETURN(lane->stream_, device.CreateStream());
    return lane;
  }
  ~Lane() {
    stream_ = nullptr;  // Waits for what still runs.
    if (is_pinned_) device_.Unpin(absl::MakeSpan(lists_.get(), kListBytes));
  }

  absl::Status WaitFor(DeviceEvent* ready) {
    return ready == nullptr ? absl::OkStatus() : stream_->Wait(*ready);
  }

  // Encodes the first of these tiles, as many as there is memory for; their number.
  absl::StatusOr<std::size_t> EncodeSome(const TileFormat& format, Frame frame,
                                         absl::Span<const EncodeArgs> tiles,
                                         absl::Span<EncodeResult> results) {
    const std::size_t record_bytes = RoundUp(RecordBytes(format), kRecordAlignment);
    const std::size_t count = CountThatFit(format, tiles, record_bytes);
    if (count == 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "a tile of ", PageCount(tiles[0].k, format.group),
          " pages: an encoder on a device has room for ", kListBytes, " bytes of lists"));
    }
    // The lists, with the addresses that they will have on the device.
    std::byte* const device = memory_->address();
    auto* args = reinterpret_cast<EncodeArgs*>(lists_.get());
    std::size_t used = count * sizeof(EncodeArgs);
    const auto put = [&](HeadPages* head) {
      const std::size_t bytes = PageCount(*head, format.group) * sizeof(head->pages[0]);
      std::memcpy(lists_.get() + used, head->pages, bytes);
      head->pages = reinterpret_cast<const std::byte* const*>(device + used);
      used += bytes;
    };
    for (std::size_t i = 0; i < count; ++i) {
      args[i] = tiles[i];
      put(&args[i].k);
      put(&args[i].v);
      args[i].record = device + kListBytes + i * record_bytes;
    }
    std::byte* const results_at = lists_.get() + used;
    auto* device_results = reinterpret_cast<EncodeResult*>(device + used);
    KVMILL_RETURN_IF_ERROR(stream_->Copy(device, lists_.get(), used));
    KVMILL_RETURN_IF_ERROR(stream_->Encode(
        format, frame, reinterpret_cast<const EncodeArgs*>(device), count, device_results));
    KVMILL_RETURN_IF_ERROR(stream_->Copy(results_at, device_results, count * sizeof(EncodeResult)));
    for (std::size_t i = 0; i < count; ++i) {
      KVMILL_RETURN_IF_ERROR(stream_->Copy(tiles[i].record, device + kListBytes + i * record_bytes,
                                           RecordBytes(format)));
    }
    KVMILL_RETURN_IF_ERROR(stream_->Synchronize());
    std::memcpy(results.data(), results_at, count * sizeof(EncodeResult));
    return count;
  }

  absl::Status Copy(void* to, const void* from, std::size_t bytes) {
    return stream_->Copy(to, from, bytes);
  }
  absl::Status Synchronize() { return stream_->Synchronize(); }

 private:
  struct AlignedFree {
    void operator()(std::byte* memory) const { ::operator delete(memory, kPage); }
  };

  explicit Lane(Device& device) : device_(device) {}

  static std::size_t CountThatFit(const TileFormat& format, absl::Span<const EncodeArgs> tiles,
                                  std::size_t record_bytes) {
    const std::size_t records_max = (kLaneBytes - kListBytes) / record_bytes;
    std::size_t used = 0;
    std::size_t count = 0;
    while (count < std::min(tiles.size(), records_max)) {
      const EncodeArgs& tile = tiles[count];
      used += sizeof(EncodeArgs) + sizeof(EncodeResult) +
              (PageCount(tile.k, format.group) + PageCount(tile.v, format.group)) *
                  sizeof(tile.k.pages[0]);
      if (used > kListBytes) break;
      ++count;
    }
    return count;
  }

  Device& device_;
  std::unique_ptr<DeviceMemory> memory_;
  std::unique_ptr<std::byte, AlignedFree> lists_;
  bool is_pinned_ = false;
  std::unique_ptr<DeviceStream> stream_;
};

absl::StatusOr<std::unique_ptr<DeviceEncoder>> DeviceEncoder::Create(Device& device,
                                                                     std::size_t lane_count) {
  KVMILL_CHECK(lane_count > 0);
  std::unique_ptr<DeviceEncoder> encoder(new DeviceEncoder(device));
  for (std::size_t i = 0; i < lane_count; ++i) {
    KVMILL_ASSIGN_OR_RETURN(std::unique_ptr<Lane> lane, Lane::Create(device));
    encoder->ReturnLane(std::move(lane));
  }
  return encoder;
}

DeviceEncoder::DeviceEncoder(Device& device) : device_(device) {}
DeviceEncoder::~DeviceEncoder() = default;

std::unique_ptr<DeviceEncoder::Lane> DeviceEncoder::TakeLane() {
  MutexLock lock(mu_);
  while (lanes_.empty()) returned_.Wait(mu_);
  std::unique_ptr<Lane> lane = std::move(lanes_.back());
  lanes_.pop_back();
  return lane;
}

void DeviceEncoder::ReturnLane(std::unique_ptr<Lane> lane) {
  {
    MutexLock lock(mu_);
    lanes_.push_back(std::move(lane));
  }
  returned_.NotifyOne();
}

template <typename Work>
absl::Status DeviceEncoder::OnLane(const Work& work) {
  std::unique_ptr<Lane> lane = TakeLane();
  absl::Status status;
  if (lane == nullptr) {
    absl::StatusOr<std::unique_ptr<Lane>> made = Lane::Create(device_);
    status = made.status();
    if (made.ok()) lane = *std::move(made);
  }
  if (status.ok()) status = work(*lane);
  // An error stays with a stream. Its end waits for what still runs.
  if (!status.ok()) lane = nullptr;
  ReturnLane(std::move(lane));
  return status;
}

absl::Status DeviceEncoder::Encode(const TileFormat& format, Frame frame,
                                   absl::Span<const EncodeArgs> tiles, DeviceEvent* ready,
                                   absl::Span<EncodeResult> results) {
  KVMILL_DCHECK(tiles.size() == results.size());
  if (tiles.empty()) return absl::OkStatus();
  return OnLane([&](Lane& lane) -> absl::Status {
    KVMILL_RETURN_IF_ERROR(lane.WaitFor(ready));
    for (std::size_t done = 0; done < tiles.size();) {
      KVMILL_ASSIGN_OR_RETURN(
          const std::size_t count,
          lane.EncodeSome(format, frame, tiles.subspan(done), results.subspan(done)));
      done += count;
    }
    return absl::OkStatus();
  });
}

absl::Status DeviceEncoder::ReadHead(const HeadPages& head, std::uint32_t token_count,
                                     std::uint32_t head_dim, DeviceEvent* ready, HostHead* copy) {
  // Of each page what lies between the first and the last value; strides may be negative.
  struct Piece {
    const std::byte* from;
    std::size_t bytes;
    std::ptrdiff_t low;
  };
  std::vector<Piece> pieces;
  std::size_t total_bytes = 0;
  const std::ptrdiff_t channels =
      static_cast<std::ptrdiff_t>(head_dim - 1) * head.channel_stride_bytes;
  for (std::uint32_t token = 0; token < token_count; token += head.page_tokens) {
    const std::uint32_t tokens = std::min(head.page_tokens, token_count - token);
    const std::ptrdiff_t rows = static_cast<std::ptrdiff_t>(tokens - 1) * head.token_stride_bytes;
    const std::ptrdiff_t low =
        std::min<std::ptrdiff_t>(0, rows) + std::min<std::ptrdiff_t>(0, channels);
    const std::ptrdiff_t high =
        std::max<std::ptrdiff_t>(0, rows) + std::max<std::ptrdiff_t>(0, channels) + 2;
    pieces.push_back({head.Row(token) + low, static_cast<std::size_t>(high - low), low});
    total_bytes += pieces.back().bytes;
  }
  copy->bytes.resize(total_bytes);
  copy->pages.clear();
  std::byte* to = copy->bytes.data();
  for (const Piece& piece : pieces) {
    copy->pages.push_back(to - piece.low);
    to += piece.bytes;
  }
  copy->head = head;
  copy->head.offset_bytes = 0;
  copy->head.pages = copy->pages.data();
  return OnLane([&](Lane& lane) -> absl::Status {
    KVMILL_RETURN_IF_ERROR(lane.WaitFor(ready));
    std::byte* at = copy->bytes.data();
    for (const Piece& piece : pieces) {
      KVMILL_RETURN_IF_ERROR(lane.Copy(at, piece.from, piece.bytes));
      at += piece.bytes;
    }
    return lane.Synchronize();
  });
}

absl::Status DeviceEncoder::ReadBytes(const std::byte* from, std::size_t bytes, DeviceEvent* ready,
                                      std::byte* to) {
  return OnLane([&](Lane& lane) -> absl::Status {
    KVMILL_RETURN_IF_ERROR(lane.WaitFor(ready));
    KVMILL_RETURN_IF_ERROR(lane.Copy(to, from, bytes));
    return lane.Synchronize();
  });
}

}  // namespace kvmill
