// Where the heads that a block is written from lie, and who encodes them there.
//
// Internal to storage/. Used by one thread at a time.
#ifndef KVMILL_STORAGE_HEAD_SOURCE_H_
#define KVMILL_STORAGE_HEAD_SOURCE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/algorithm.h"
#include "kernels/encode.h"
#include "storage/block_writer.h"
#include "storage/device_encoder.h"

namespace kvmill {

class HeadSource {
 public:
  virtual ~HeadSource() = default;
  // As EncodeTilesCpu; records are in host memory. An error is a device's.
  virtual absl::Status Encode(const TileFormat& format, Frame frame,
                              absl::Span<const EncodeArgs> tiles,
                              absl::Span<EncodeResult> results) = 0;
  // The head where the CPU can read it; good until the next call.
  virtual absl::StatusOr<HeadInput> OnHost(const HeadInput& input, std::uint32_t token_count,
                                           std::uint32_t head_dim) = 0;
};

// Host memory; the calling thread encodes.
class HostHeads : public HeadSource {
 public:
  explicit HostHeads(Algorithm algorithm) : algorithm_(algorithm) {}
  absl::Status Encode(const TileFormat& format, Frame frame, absl::Span<const EncodeArgs> tiles,
                      absl::Span<EncodeResult> results) override;
  absl::StatusOr<HeadInput> OnHost(const HeadInput& input, std::uint32_t token_count,
                                   std::uint32_t head_dim) override;

 private:
  const Algorithm algorithm_;
};

// A device's memory, complete after `ready` (null: now).
class DeviceHeads : public HeadSource {
 public:
  DeviceHeads(DeviceEncoder& encoder, DeviceEvent* ready) : encoder_(encoder), ready_(ready) {}
  absl::Status Encode(const TileFormat& format, Frame frame, absl::Span<const EncodeArgs> tiles,
                      absl::Span<EncodeResult> results) override;
  absl::StatusOr<HeadInput> OnHost(const HeadInput& input, std::uint32_t token_count,
                                   std::uint32_t head_dim) override;

 private:
  DeviceEncoder& encoder_;
  DeviceEvent* const ready_;
  DeviceEncoder::HostHead k_, v_;  // The last that was copied.
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_HEAD_SOURCE_H_
