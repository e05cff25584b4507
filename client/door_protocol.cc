#include "client/door_protocol.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace kvmill {

absl::StatusOr<DoorHeader> ParseDoorHeader(absl::Span<const std::byte> packet) {
  const auto bad = [](absl::string_view field, std::uint64_t value, std::uint64_t want) {
    return absl::InvalidArgumentError(
        absl::StrCat("door message: ", field, " ", value, ", want ", want));
  };
  if (packet.size() < sizeof(DoorHeader) || packet.size() > kDoorMessageBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat("door message: ", packet.size(), " bytes, want ",
                                                   sizeof(DoorHeader), " to ",
                                                   kDoorMessageBytesMax));
  }
  DoorHeader header;
  std::memcpy(&header, packet.data(), sizeof(header));
  if (header.magic != kDoorMagic) return bad("magic", header.magic, kDoorMagic);
  // Versions begin with 1.
  if (header.version == 0 || header.version + 1 < kDoorVersion ||
      header.version > kDoorVersion + 1) {
    return absl::FailedPreconditionError(absl::StrCat("door version ", header.version,
                                                      " cannot talk to version ", kDoorVersion,
                                                      ": they may differ by one"));
  }
  if (header.message_bytes != packet.size()) {
    return bad("message_bytes", header.message_bytes, packet.size());
  }
  if (header.kind < static_cast<std::uint16_t>(DoorKind::kHello) ||
      header.kind > static_cast<std::uint16_t>(kDoorKindMax)) {
    return absl::InvalidArgumentError(absl::StrCat("door message: kind ", header.kind,
                                                   ", want 1 to ",
                                                   static_cast<std::uint16_t>(kDoorKindMax)));
  }
  return header;
}

absl::Status CheckDoorMessage(const DoorHeader& header, DoorKind want, std::size_t bytes_min) {
  if (header.kind != static_cast<std::uint16_t>(want)) {
    return absl::InvalidArgumentError(absl::StrCat("door message: kind ", header.kind, ", want ",
                                                   static_cast<std::uint16_t>(want)));
  }
  if (header.message_bytes < bytes_min ||
      (header.message_bytes > bytes_min && header.version <= kDoorVersion)) {
    return absl::InvalidArgumentError(absl::StrCat("door message of kind ", header.kind, ": ",
                                                   header.message_bytes, " bytes, want ",
                                                   bytes_min));
  }
  return absl::OkStatus();
}

DoorRefusal RefusalFrom(const absl::Status& status, std::uint32_t request) {
  auto refusal = MakeDoorMessage<DoorRefusal>(request);
  refusal.code = static_cast<std::uint32_t>(status.code());
  refusal.text_bytes =
      static_cast<std::uint32_t>(std::min(status.message().size(), sizeof(refusal.text)));
  std::memcpy(refusal.text, status.message().data(), refusal.text_bytes);
  return refusal;
}

absl::Status StatusFrom(const DoorRefusal& refusal) {
  const std::size_t bytes = std::min<std::size_t>(refusal.text_bytes, sizeof(refusal.text));
  const auto code = refusal.code == 0 || refusal.code > 16
                        ? absl::StatusCode::kUnknown
                        : static_cast<absl::StatusCode>(refusal.code);
  return absl::Status(code, absl::string_view(refusal.text, bytes));
}

}  // namespace kvmill
