// What the disk tier's keys and values look like as bytes (docs/formats.md, "Disk").
//
//   meta key      fingerprint (16) | group (1) | block key (1..64)
//   meta value    MetaValueHeader (32) | parent key (0..64) | PageRun x run_count (8 each)
//   page key      block number (8, big-endian) | page index (2, big-endian)
//   epoch name    "epoch-" and 16 lower-case hex digits
//   namespace     name -> NamespaceValueHeader (16) | canonical encoding
//
// A block number names one write of one block and is not used again in the life of a process, so a
// reader can never combine pages of two writes of the same key. Big-endian numbers sort in the
// order of writing: the files of an epoch never overlap and a block's pages lie side by side.
//
// Pure functions, thread-safe. Decoders take any bytes and answer DATA_LOSS when they are not
// exactly one valid value.
#ifndef KVMILL_STORAGE_DISK_KEYS_H_
#define KVMILL_STORAGE_DISK_KEYS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "storage/disk_store.h"

namespace kvmill {

inline constexpr std::uint16_t kMetaValueVersion = 1;
inline constexpr std::uint16_t kNamespaceValueVersion = 1;
inline constexpr std::size_t kDiskPagesMax = 65535;

// Little-endian.
struct MetaValueHeader {
  std::uint16_t version;
  std::uint8_t parent_bytes;  // 0..64.
  std::uint8_t run_place;     // 0: not known; 1 + place in its run; with kNamesAnchor, see below.
  std::uint16_t token_count;
  std::uint16_t run_count;
  std::uint64_t epoch;         // Column family that holds the pages.
  std::uint64_t block_number;  // Prefix of the page keys.
  std::uint64_t checksum;      // XXH3-64 of meta key and meta value with this field 0.
};
static_assert(sizeof(MetaValueHeader) == 32);

// In run_place: in place of the parent key are the 8 bytes of RunLink::hash, of the run's anchor.
inline constexpr std::uint8_t kNamesAnchor = 0x80;

// `page_count` consecutive pages of `page_bytes` each.
struct PageRun {
  std::uint32_t page_count;
  std::uint32_t page_bytes;
};
static_assert(sizeof(PageRun) == 8);

struct NamespaceValueHeader {
  std::uint16_t version;
  std::uint16_t reserved;  // 0.
  std::uint32_t encoding_bytes;
  std::uint64_t checksum;  // XXH3-64 of name and value with this field 0.
};
static_assert(sizeof(NamespaceValueHeader) == 16);

std::string EncodeMetaKey(const DiskBlockId& id);
absl::StatusOr<DiskBlockId> DecodeMetaKey(absl::string_view bytes);

// `meta_key` is EncodeMetaKey(meta.id); the checksum covers it, so a value can never pass for
// another key's.
std::string EncodeMetaValue(absl::string_view meta_key, const DiskBlockMeta& meta,
                            std::uint64_t block_number);

struct DecodedMeta {
  DiskBlockMeta meta;
  std::uint64_t block_number = 0;
};
absl::StatusOr<DecodedMeta> DecodeMeta(absl::string_view meta_key, absl::string_view meta_value);

using PageKey = std::array<char, 10>;
PageKey EncodePageKey(std::uint64_t block_number, std::size_t page_index);

std::string EpochName(std::uint64_t epoch);
// Empty when `name` is not an epoch's.
std::optional<std::uint64_t> EpochOfName(absl::string_view name);

std::string EncodeNamespaceValue(absl::string_view name, absl::string_view encoding);
// The canonical encoding.
absl::StatusOr<std::string> DecodeNamespaceValue(absl::string_view name, absl::string_view value);

}  // namespace kvmill

#endif  // KVMILL_STORAGE_DISK_KEYS_H_
