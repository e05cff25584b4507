// Blocks in a RocksDatabase: one meta entry and a row of pages each. Knows nothing of caps and
// locks.
#ifndef KVMILL_STORAGE_ROCKS_BLOCKS_H_
#define KVMILL_STORAGE_ROCKS_BLOCKS_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "storage/disk_keys.h"
#include "storage/rocks_database.h"

namespace kvmill {

// What a block takes on disk: pages, and for each a blob record header (32), its key there and in
// the table (10 + 10) and a blob index and table overhead (about 36); the meta entry is counted
// with the `meta` family.
std::uint64_t DiskBytesOf(const DiskBlockMeta& meta);

// NOT_FOUND or the entry; DATA_LOSS when it is damaged.
absl::StatusOr<DecodedMeta> FindBlock(RocksDatabase& database, const std::string& meta_key);

// Meta entry and pages in one batch; `meta.epoch` is the epoch of `family`.
absl::Status PutBlock(RocksDatabase& database, const ColumnFamily& family,
                      const std::string& meta_key, const DiskBlockMeta& meta,
                      std::uint64_t block_number,
                      absl::Span<const absl::Span<const std::byte>> pages);

// Pages first_page.. of the block into `out`, whose sizes are the expected ones. DATA_LOSS when one
// is missing, has another length or its file is damaged.
absl::Status ReadPages(RocksDatabase& database, const ColumnFamily& family,
                       std::uint64_t block_number, std::size_t first_page,
                       absl::Span<const absl::Span<std::byte>> out);

// Removes meta entries; pages stay behind, unreachable, until their epoch is dropped.
absl::Status EraseMeta(RocksDatabase& database, absl::Span<const std::string> meta_keys);

// Every entry of `meta` with its raw key, or the reason why it cannot be decoded. `visit` returns
// false to stop.
absl::Status ScanMeta(
    RocksDatabase& database,
    absl::FunctionRef<bool(absl::string_view meta_key, absl::StatusOr<DecodedMeta> entry)> visit);

}  // namespace kvmill

#endif  // KVMILL_STORAGE_ROCKS_BLOCKS_H_
