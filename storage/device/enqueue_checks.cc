#include "storage/device/enqueue_checks.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

constexpr std::uintptr_t kWorkspaceAlignment = 256;

absl::Status CheckFrame(Frame frame) {
  if (frame == Frame::kModel || frame == Frame::kRotated) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("frame ", static_cast<int>(frame), ": want 0 or 1"));
}

absl::Status Null(absl::string_view what, std::size_t count) {
  return absl::InvalidArgumentError(absl::StrCat(what, " is null, for ", count));
}

}  // namespace

absl::Status CheckCopy(const void* to, const void* from, std::size_t bytes,
                       const KnownMemory::View& known) {
  if (bytes == 0) return absl::OkStatus();
  if (to == nullptr || from == nullptr) return Null("an end of a copy", bytes);
  const auto t = reinterpret_cast<std::uintptr_t>(to);
  const auto f = reinterpret_cast<std::uintptr_t>(from);
  if (t + bytes < t || f + bytes < f || (t < f + bytes && f < t + bytes)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("copy of %d bytes from %p to %p: the ranges overlap", bytes, from, to));
  }
  const KnownMemory::Range* range = known.FindAnyOf(to, bytes);
  if (range != nullptr && !MayBeWritten(range->use)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("copy of %d bytes to %p: imported memory, another process's and what was "
                        "pinned to read is read only",
                        bytes, to));
  }
  return absl::OkStatus();
}

absl::Status CheckEncode(const TileFormat& format, Frame frame, const EncodeArgs* tiles,
                         std::size_t tile_count, const EncodeResult* results) {
  KVMILL_RETURN_IF_ERROR(ValidateTileFormat(format));
  KVMILL_RETURN_IF_ERROR(CheckFrame(frame));
  if (tile_count != 0 && (tiles == nullptr || results == nullptr)) {
    return Null(tiles == nullptr ? "list of tiles" : "list of results", tile_count);
  }
  return absl::OkStatus();
}

absl::Status CheckDecode(const TileFormat& format, Frame frame, const DecodeArgs* tiles,
                         std::size_t tile_count) {
  KVMILL_RETURN_IF_ERROR(ValidateTileFormat(format));
  KVMILL_RETURN_IF_ERROR(CheckFrame(frame));
  if (tile_count != 0 && tiles == nullptr) return Null("list of tiles", tile_count);
  return absl::OkStatus();
}

absl::Status CheckAttend(const AttentionArgs& args, std::uint32_t worker_count,
                         const std::byte* workspace) {
  // Without sequences: those are the device's to read.
  AttentionArgs alone = args;
  alone.sequences = {};
  KVMILL_RETURN_IF_ERROR(ValidateAttention(alone));
  if (worker_count == 0) return absl::InvalidArgumentError("attention by 0 workers");
  if (args.sequences.empty()) return absl::OkStatus();
  if (args.sequences.data() == nullptr) return Null("list of sequences", args.sequences.size());
  if (workspace == nullptr ||
      reinterpret_cast<std::uintptr_t>(workspace) % kWorkspaceAlignment != 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "workspace of attention at %p: want a multiple of %d", workspace, kWorkspaceAlignment));
  }
  return absl::OkStatus();
}

absl::Status CheckGenerationChecks(const GenerationCheck* checks, std::size_t check_count,
                                   const std::uint32_t* changed) {
  if (check_count != 0 && (checks == nullptr || changed == nullptr)) {
    return Null(checks == nullptr ? "list of checks" : "count of changes", check_count);
  }
  return absl::OkStatus();
}

absl::Status ForeignEvent() {
  return absl::InvalidArgumentError("the event is of another device than the stream");
}

}  // namespace kvmill
