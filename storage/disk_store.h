// The disk tier's store: sealed blocks, written in the background, found again after any crash.
//
// An interface, so that tests can make it fail; RocksDiskStore (storage/rocks_disk_store.h) is the
// one implementation that ships. For storage/, for service/node.cc, which opens it, and for tests;
// not for engines. Thread-safe. Calls do blocking I/O: no caller holds a lock across
// them.
//
// Durability: a block is durable once a Flush() that started after its Write() returned has
// returned OK. A durable block survives any crash of the process or the machine until it is evicted
// (cap), or removed. A block that was written and not flushed may be there after a crash or not,
// but never in part: its meta entry and its pages appear together.
#ifndef KVMILL_STORAGE_DISK_STORE_H_
#define KVMILL_STORAGE_DISK_STORE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "storage/core/block_key.h"
#include "storage/core/namespace.h"
#include "storage/core/run_link.h"

namespace kvmill {

// Identity of a block on disk: the fingerprint instead of this daemon's dense namespace number.
struct DiskBlockId {
  Fingerprint fingerprint{};
  std::uint8_t group = 0;
  BlockKey key;

  friend bool operator==(const DiskBlockId&, const DiskBlockId&) = default;
};

// What the `meta` column family holds of a block.
struct DiskBlockMeta {
  DiskBlockId id;
  // Empty for the first block of a sequence, when it is not known, and when the link names the
  // anchor.
  BlockKey parent;
  RunLink link;  // One to the parent is kept when that is not empty.
  std::uint16_t token_count = 0;
  std::vector<std::uint32_t>
      page_bytes;           // One a layer of the group, in the group's order; all > 0.
  std::uint64_t epoch = 0;  // Set by the store.
};

class DiskStore {
 public:
  struct Stats {
    std::uint64_t used_bytes = 0;      // Of all files, as the file system counts them.
    std::uint64_t capacity_bytes = 0;  // The cap.
    std::uint64_t block_count = 0;
    std::uint64_t evicted_blocks = 0;     // Dropped by the cap since start.
    std::uint64_t reinserted_blocks = 0;  // Carried over to the newest epoch because recently hit.
    std::uint64_t failed_flushes = 0;     // Since start, also those that nobody asked for.
  };

  // Called when the cap dropped blocks, after they are gone, without any lock held, from a thread
  // of the store or of a Write. By then the block may have been written again: Find() tells.
  using EvictedCallback = std::function<void(absl::Span<const DiskBlockId> ids)>;

  virtual ~DiskStore() = default;

  // At most once, before the first Write.
  virtual void SetEvictedCallback(EvictedCallback callback) = 0;

  // Which blocks the cap should rather spare, and which drop first, whatever was read of them;
  // asked when it drops, without any lock held. Where and when as the callback. A store may ignore
  // it.
  enum class KeepAdvice { kNone, kKeep, kDrop };
  using KeepAdviceCallback = std::function<KeepAdvice(const DiskBlockId& id)>;
  virtual void SetKeepAdvice(KeepAdviceCallback) {}

  // Stores all pages of a sealed block; `pages[i]` has meta.page_bytes[i] bytes. The views must
  // live until it returns. ALREADY_EXISTS: the block is there (the first bytes are kept).
  // RESOURCE_EXHAUSTED: the disk is full or the block is larger than an epoch. On any error nothing
  // of the block is visible.
  virtual absl::Status Write(const DiskBlockMeta& meta,
                             absl::Span<const absl::Span<const std::byte>> pages) = 0;

  // Makes everything that was written (or removed) before the call durable. Concurrent calls share
  // one flush. Costs a few fsyncs and a file: callers collect blocks first. After an error the
  // blocks are still there and readable, and the next Flush tries again.
  virtual absl::Status Flush() = 0;

  // NOT_FOUND, or the meta entry.
  virtual absl::StatusOr<DiskBlockMeta> Find(const DiskBlockId& id) = 0;

  // Reads pages first..first+out.size()-1 of the block into `out` (exactly meta.page_bytes[i] bytes
  // each). NOT_FOUND when the block is gone; DATA_LOSS when a page is missing or has another
  // length. Contents are not verified here (VerifyPage is the caller's). Counts as a hit: recently
  // hit blocks survive the drop of their epoch.
  virtual absl::Status Read(const DiskBlockId& id, std::size_t first_page,
                            absl::Span<const absl::Span<std::byte>> out) = 0;

  // OK also when absent. Durable after the next Flush(). The bytes may stay on disk, unreachable,
  // until the cap drops them.
  virtual absl::Status Remove(absl::Span<const DiskBlockId> ids) = 0;

  // Every block, from the meta column family only (no page is read), in no particular order.
  // `visit` returns false to stop.
  virtual absl::Status Scan(absl::FunctionRef<bool(const DiskBlockMeta&)> visit) = 0;

  // Namespaces live beside the blocks so that a restarted daemon knows them: name -> canonical
  // encoding. Durable on return.
  struct NamespaceRecord {
    std::string name;
    std::string encoding;  // EncodeNamespace().
  };
  virtual absl::Status PutNamespace(const NamespaceRecord& record) = 0;
  virtual absl::StatusOr<std::vector<NamespaceRecord>> Namespaces() = 0;

  virtual Stats stats() const = 0;
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_DISK_STORE_H_
