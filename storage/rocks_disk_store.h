// The disk tier on RocksDB: a cache of sealed blocks with a hard cap on its files.
//
// Layout. A `meta` column family (no blob files) holds one small entry a block; pages lie in
// *epoch* column families with blob files, each about capacity / epoch_count. Writes go to the
// newest epoch. When it is full a new one begins and, on a thread of the store, the oldest is
// dropped whole: blocks of it that were read lately are first written again to the newest epoch (at
// most reinsert_share of an epoch per drop, so the store always makes progress), the others are
// evicted. Bytes of removed blocks stay in their epoch's files until it is dropped. What was hit is
// kept in memory, one byte a block: after a restart every block counts as not hit.
//
// Files never exceed capacity_bytes + one epoch. The write-ahead log is off; all column families
// are flushed atomically, so what survives a crash is a prefix of the writes.
//
// Memory: up to 5 memtables of memtable_bytes, meta_cache_bytes, one byte a block.
#ifndef KVMILL_STORAGE_ROCKS_DISK_STORE_H_
#define KVMILL_STORAGE_ROCKS_DISK_STORE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "storage/disk_store.h"
#include "storage/encryption_keys.h"

namespace kvmill {

inline constexpr std::uint64_t kDiskCapacityBytesMin = std::uint64_t{16} << 20;

struct RocksDiskStoreOptions {
  std::string directory;             // Created with mode 0700; its parent must exist.
  std::uint64_t capacity_bytes = 0;  // At least kDiskCapacityBytesMin.
  std::uint32_t epoch_count = 16;    // 4 to 64. Blocks must be smaller than an epoch.
  // A block survives the drop of its epoch when it was read since this many epochs have begun.
  std::uint32_t reinsert_window_epochs = 8;
  double reinsert_share = 0.75;      // Of an epoch, per drop; 0 (never) to 0.9.
  std::uint64_t memtable_bytes = 0;  // 0: 32 MiB, more for large and less for small caps.
  std::uint64_t meta_cache_bytes = std::uint64_t{32} << 20;
  bool direct_io = true;                // Where the file system supports it.
  std::uint32_t write_wait_ms = 30000;  // How long a Write waits for a flush or a drop at most.
  // Null: nothing is encrypted. Else everything but names, sizes and times of files is; the first
  // key is for what is written from now on. Shared with who configures the store.
  std::shared_ptr<const EncryptionKeys> keys;
};

class RocksDiskStore : public DiskStore {
 public:
  // Opens or creates the store and drops meta entries whose epoch is gone; reads `meta`, no page.
  // INVALID_ARGUMENT for bad options, FAILED_PRECONDITION when another process or store holds the
  // directory, or when it was written with keys that are not there, or without any: then nothing of
  // it was changed. DATA_LOSS when the files are damaged beyond single blocks (remove the directory
  // to start empty), RESOURCE_EXHAUSTED or UNAVAILABLE for what the file system says.
  static absl::StatusOr<std::unique_ptr<RocksDiskStore>> Open(const RocksDiskStoreOptions& options);

  // Flushes what was written, as far as the disk allows. No call may be running.
  ~RocksDiskStore() override = default;

  // Bytes of pages that were read from files (not from memory) since Open.
  virtual std::uint64_t page_file_bytes_read() const = 0;
  // One for each key, in their order; empty without keys. Looks at every file's size.
  virtual std::vector<EncryptionKeyUsage> key_usage() const = 0;
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_ROCKS_DISK_STORE_H_
