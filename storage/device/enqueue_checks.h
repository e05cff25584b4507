// What every device refuses when work is enqueued: INVALID_ARGUMENT for what could never run.
//
// Internal to storage/device.
#ifndef KVMILL_STORAGE_DEVICE_ENQUEUE_CHECKS_H_
#define KVMILL_STORAGE_DEVICE_ENQUEUE_CHECKS_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "kernels/attention.h"
#include "kernels/decode.h"
#include "kernels/encode.h"
#include "kernels/generation_check.h"
#include "storage/device/known_memory.h"

namespace kvmill {

// Of HostDevice, whose kernel needs none: room for a mark that it is in use, and its alignment.
inline constexpr std::size_t kHostAttendWorkspaceBytes = 256;

absl::Status CheckCopy(const void* to, const void* from, std::size_t bytes,
                       const KnownMemory::View& known);
absl::Status CheckEncode(const TileFormat& format, Frame frame, const EncodeArgs* tiles,
                         std::size_t tile_count, const EncodeResult* results);
absl::Status CheckDecode(const TileFormat& format, Frame frame, const DecodeArgs* tiles,
                         std::size_t tile_count);
absl::Status CheckAttend(const AttentionArgs& args, std::uint32_t worker_count,
                         const std::byte* workspace);
absl::Status CheckGenerationChecks(const GenerationCheck* checks, std::size_t check_count,
                                   const std::uint32_t* changed);
// An event of another device.
absl::Status ForeignEvent();

}  // namespace kvmill

#endif  // KVMILL_STORAGE_DEVICE_ENQUEUE_CHECKS_H_
