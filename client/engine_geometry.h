// An engine's own KV memory, described so that nobody has to guess: where pages are, how large, how
// their elements lie, and which heads of the model a rank holds.
//
// Value types and pure functions, thread-safe. Used by engines, the client and the service; the
// daemon checks again what a client checked.
#ifndef KVMILL_CLIENT_ENGINE_GEOMETRY_H_
#define KVMILL_CLIENT_ENGINE_GEOMETRY_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "storage/core/namespace.h"

namespace kvmill {

inline constexpr std::size_t kEngineRegionsMax = 4096;
inline constexpr std::size_t kEngineLayersMax = 1024;  // Entries of EngineGeometry::layers.

// How a region comes to the daemon, through the local door.
enum class EngineRegionKind : std::uint8_t {
  kUnsaid = 0,     // An engine: as the fields of its region are. A daemon: as the door has it.
  kPrivate = 1,    // Not at all: memory of the engine's process alone.
  kMemfd = 2,      // Shared memory.
  kDeviceIpc = 3,  // Memory of a GPU.
};

// Memory of a GPU that another process can open: an allocation, and where in it a region begins.
struct EngineDeviceMemory {
  std::array<std::byte, 64> handle{};  // cudaIpcGetMemHandle's, of the whole allocation.
  std::uint64_t allocation_bytes = 0;  // Of the allocation, or at least up to the region's end.
  std::uint64_t offset_bytes = 0;      // Of the region in it.
  std::array<std::byte, 16> device{};  // The GPU's UUID; zeros: unsaid.

  friend bool operator==(const EngineDeviceMemory&, const EngineDeviceMemory&) = default;
};

// Consecutive bytes of the engine's memory.
struct EngineRegion {
  std::uint64_t base = 0;  // Address in the engine's process.
  std::uint64_t bytes = 0;
  // Shared memory that holds the region from fd_offset_bytes on: a memfd with F_SEAL_SHRINK
  // (client/shared_memory.h makes one). A local daemon maps it and can store from it without a copy
  // (client/page_store.h). Borrowed until RegisterMemory is done; does not travel with the rest.
  // -1: memory of this process alone.
  int fd = -1;
  std::uint64_t fd_offset_bytes = 0;
  // Memory of a GPU that the daemon uses as well (as Device::ExportIpc of
  // storage/device/device.h says), instead of `fd`; `base` is its address there. The allocation
  // stays until the registration has ended and nobody reads. Does not travel with the rest either.
  std::optional<EngineDeviceMemory> device_memory = std::nullopt;
  EngineRegionKind kind = EngineRegionKind::kUnsaid;

  friend bool operator==(const EngineRegion&, const EngineRegion&) = default;
};

enum class EngineElement : std::uint8_t {
  kFloat16 = 0,
  kBFloat16 = 1,
  kRecords = 2,  // Pages hold records of the namespace's tile format, one a head.
};

// Where page 0 of one layer's K (or V, or records) lies; page i is i * page_stride_bytes further.
struct EnginePlace {
  std::uint32_t region = 0;  // Index into EngineGeometry::regions.
  std::uint64_t offset_bytes = 0;

  friend bool operator==(const EnginePlace&, const EnginePlace&) = default;
};

// The layers of one layer group that this rank holds. The 16-bit value of (token, head, channel) is
// at
//
//   page + (token % page_tokens) * token_stride_bytes + head * head_stride_bytes + 2 * channel
//
// where heads count from head_begin; the record of a head at page + head * head_stride_bytes.
struct EngineLayers {
  std::uint32_t group = 0;        // Layer group of the namespace.
  std::uint32_t layer_begin = 0;  // Within the group.
  EngineElement element = EngineElement::kFloat16;
  std::uint32_t block_tokens = 0;  // Of the blocks that the engine names by keys.
  std::uint32_t head_dim = 0;
  std::uint32_t head_begin = 0;  // Of the model's heads: a tensor-parallel rank's range.
  std::uint32_t head_count = 0;
  std::uint32_t page_tokens = 0;  // Divides block_tokens.
  std::uint64_t page_count = 0;
  std::uint64_t page_bytes = 0;          // With contents, padding inside included.
  std::uint64_t page_stride_bytes = 0;   // From one page to the next, padding behind included.
  std::uint64_t token_stride_bytes = 0;  // 0 for records.
  std::uint64_t head_stride_bytes = 0;
  std::vector<EnginePlace> keys;    // One a layer, from layer_begin on; for records these too.
  std::vector<EnginePlace> values;  // As many; none for records.

  friend bool operator==(const EngineLayers&, const EngineLayers&) = default;
};

struct EngineGeometry {
  std::vector<EngineRegion> regions;
  std::vector<EngineLayers> layers;
  // Boot id (lower-case hex) of the daemon that assembles the blocks of all ranks; empty: the one
  // that is asked.
  std::string assembling_boot_id;

  friend bool operator==(const EngineGeometry&, const EngineGeometry&) = default;
};

// What the region says it is, or has fields of.
EngineRegionKind KindOf(const EngineRegion& region);

// INVALID_ARGUMENT for what makes no sense in itself, FAILED_PRECONDITION for what does not fit the
// namespace; both name the field, its value and what was expected.
absl::Status CheckGeometry(const NamespaceSpec& spec, const EngineGeometry& geometry);

}  // namespace kvmill

#endif  // KVMILL_CLIENT_ENGINE_GEOMETRY_H_
