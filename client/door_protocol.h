// Messages of the local door (docs/formats.md): what travels over PATH.door, one message a packet.
//
// A client says hello and is welcomed with a token, or refused with a reason. The welcomed then
// asks for the memory of arenas that it has leases in, which comes as file descriptors, and sends
// descriptors of memory that it registered, or handles of memory of a GPU.
//
// Shared by client/door_client.h and service/local_door.h. Pure functions, thread-safe. Any bytes
// may be passed in.
#ifndef KVMILL_CLIENT_DOOR_PROTOCOL_H_
#define KVMILL_CLIENT_DOOR_PROTOCOL_H_

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace kvmill {

static_assert(std::endian::native == std::endian::little, "messages are little-endian");

inline constexpr std::uint32_t kDoorMagic = 0x52444D4B;  // "KMDR" in memory.
// Neighbours talk to each other: a later version only appends fields to a message.
// 2: kDeviceRegion, which is sent only to who knows it.
inline constexpr std::uint16_t kDoorVersion = 2;
inline constexpr std::uint16_t kDoorDeviceRegionVersion = 2;
inline constexpr std::size_t kDoorMessageBytesMax = 512;
inline constexpr std::size_t kDoorDescriptorsMax = 2;  // With one message.

// The door of a daemon whose socket is PATH.
inline std::string DoorPath(absl::string_view socket_path) {
  return std::string(socket_path) + ".door";
}

enum class DoorKind : std::uint16_t {
  kHello = 1,         // Client: the first message, once.
  kWelcome = 2,       // Daemon: the answer to it.
  kRefusal = 3,       // Daemon: to anything; without a request number the connection ends.
  kArenaRequest = 4,  // Client.
  kArena = 5,         // Daemon: the answer, with the arena's file descriptor; of an arena of a GPU
                      // also that of its generations, which are in host memory.
  kRegion = 6,        // Client: with one file descriptor.
  kRegionTaken = 7,   // Daemon: the answer to it, and to the next.
  kDeviceRegion = 8,  // Client.
};
inline constexpr DoorKind kDoorKindMax = DoorKind::kDeviceRegion;

// The first bytes of every message, in every version.
struct DoorHeader {
  std::uint32_t magic;
  std::uint16_t version;
  std::uint16_t kind;           // DoorKind.
  std::uint32_t message_bytes;  // All of it.
  std::uint32_t request;        // The client's number of a request, repeated in the answer; else 0.
};
static_assert(sizeof(DoorHeader) == 16);

struct DoorHello {
  DoorHeader header;
  std::uint64_t reserved[2];  // 0.
};
static_assert(sizeof(DoorHello) == 32);

inline constexpr std::size_t kDoorTokenBytes = 32;
struct DoorWelcome {
  DoorHeader header;
  std::array<std::uint8_t, 16> boot_id;
  std::array<std::uint8_t, kDoorTokenBytes> token;  // Random; whoever has it is this client.
};
static_assert(sizeof(DoorWelcome) == 64);

struct DoorRefusal {
  DoorHeader header;
  std::uint32_t code;        // A google.rpc.Code.
  std::uint32_t text_bytes;  // Of `text`, UTF-8.
  char text[232];            // Zeros behind it.
};
static_assert(sizeof(DoorRefusal) == 256);

// Which arena: the tier it belongs to, its number there, and the epoch, which changes when the
// arena gets other memory.
struct DoorArenaRequest {
  DoorHeader header;
  std::uint64_t lease;  // Of a block with pages in the arena.
  std::uint64_t arena_epoch;
  std::uint32_t arena;
  std::uint8_t tier;         // Tier.
  std::uint8_t reserved[3];  // 0.
};
static_assert(sizeof(DoorArenaRequest) == 40);

struct DoorArena {
  DoorHeader header;
  std::uint64_t arena_epoch;
  std::uint64_t arena_bytes;
  std::uint32_t arena;
  std::uint8_t tier;
  std::uint8_t reserved[3];  // 0.
};
static_assert(sizeof(DoorArena) == 40);

// How a region's memory is shared.
enum class DoorRegionKind : std::uint8_t {
  kMemfd = 0,  // The descriptor is a memfd with F_SEAL_SHRINK.
};

// The memory of one region of a registration (Engine.RegisterMemory) of this client.
struct DoorRegion {
  DoorHeader header;
  std::uint64_t registration;
  std::uint64_t offset_bytes;  // Where the region begins in the descriptor's memory,
  std::uint64_t bytes;         //   and its size: that of the registration.
  std::uint32_t region;        // Index in the registration.
  std::uint8_t kind;           // DoorRegionKind.
  std::uint8_t reserved[3];    // 0.
};
static_assert(sizeof(DoorRegion) == 48);

// The same for a region in memory of a GPU, which is named instead of handed over.
struct DoorDeviceRegion {
  DoorHeader header;
  std::uint64_t registration;
  std::uint64_t offset_bytes;           // Where the region begins in the allocation,
  std::uint64_t bytes;                  //   and its size: that of the registration.
  std::uint64_t allocation_bytes;       // What is opened of the allocation, from its beginning on.
  std::uint32_t region;                 // Index in the registration.
  std::uint32_t reserved;               // 0.
  std::array<std::uint8_t, 64> handle;  // cudaIpcMemHandle_t, or what stands for it.
  std::array<std::uint8_t, 16> device;  // The GPU's UUID; zeros: unsaid.
};
static_assert(sizeof(DoorDeviceRegion) == 136);

struct DoorRegionTaken {
  DoorHeader header;
  std::uint64_t registration;
  std::uint32_t region;
  std::uint32_t reserved;  // 0.
};
static_assert(sizeof(DoorRegionTaken) == 32);

template <typename Message>
constexpr DoorKind kDoorKindOf = DoorKind{};
template <>
inline constexpr DoorKind kDoorKindOf<DoorHello> = DoorKind::kHello;
template <>
inline constexpr DoorKind kDoorKindOf<DoorWelcome> = DoorKind::kWelcome;
template <>
inline constexpr DoorKind kDoorKindOf<DoorRefusal> = DoorKind::kRefusal;
template <>
inline constexpr DoorKind kDoorKindOf<DoorArenaRequest> = DoorKind::kArenaRequest;
template <>
inline constexpr DoorKind kDoorKindOf<DoorArena> = DoorKind::kArena;
template <>
inline constexpr DoorKind kDoorKindOf<DoorRegion> = DoorKind::kRegion;
template <>
inline constexpr DoorKind kDoorKindOf<DoorRegionTaken> = DoorKind::kRegionTaken;
template <>
inline constexpr DoorKind kDoorKindOf<DoorDeviceRegion> = DoorKind::kDeviceRegion;

// A message of this version, zeros but for its header.
template <typename Message>
Message MakeDoorMessage(std::uint32_t request = 0) {
  static_assert(sizeof(Message) <= kDoorMessageBytesMax);
  Message message{};
  message.header = {kDoorMagic, kDoorVersion, static_cast<std::uint16_t>(kDoorKindOf<Message>),
                    sizeof(Message), request};
  return message;
}

// INVALID_ARGUMENT naming field, value and what was expected; FAILED_PRECONDITION naming both
// versions when they are too far apart. The kind is one of DoorKind.
absl::StatusOr<DoorHeader> ParseDoorHeader(absl::Span<const std::byte> packet);

absl::Status CheckDoorMessage(const DoorHeader& header, DoorKind want, std::size_t bytes_min);

// The same checks, and that the message is of this kind and long enough. A longer one is of a later
// version: what it has more is not read.
template <typename Message>
absl::StatusOr<Message> ParseDoorMessage(absl::Span<const std::byte> packet) {
  const absl::StatusOr<DoorHeader> header = ParseDoorHeader(packet);
  if (!header.ok()) return header.status();
  absl::Status fits = CheckDoorMessage(*header, kDoorKindOf<Message>, sizeof(Message));
  if (!fits.ok()) return fits;
  Message message;
  std::memcpy(&message, packet.data(), sizeof(message));
  return message;
}

DoorRefusal RefusalFrom(const absl::Status& status, std::uint32_t request);
// Never OK.
absl::Status StatusFrom(const DoorRefusal& refusal);

template <typename Message>
absl::Span<const std::byte> BytesOf(const Message& message) {
  return absl::MakeConstSpan(reinterpret_cast<const std::byte*>(&message), sizeof(message));
}

// Metadata of every gRPC call on PATH: the token in lower-case hex.
inline constexpr const char* kDoorTokenMetadata = "kvmill-token";

}  // namespace kvmill

#endif  // KVMILL_CLIENT_DOOR_PROTOCOL_H_
