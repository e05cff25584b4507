// Blocks in the daemon's own memory, mapped: read and attended to in place, without a copy.
//
//   auto mapped = client->Map(ns, keys);                      // Leases on blocks, pages of memory.
//   table: FillAttentionBlocks(**mapped, group, layer, ...);  // Where the heads of a layer lie.
//   AttentionCpu(...);                                        // Reads records where they are.
//   absl::Status whole = (*mapped)->Check();                  // What was read was right, or
//   ABORTED.
//
// Reading is not holding: a lease has an end, and a process may be stopped for longer. So what was
// computed counts only when Check() said OK afterwards. ABORTED (the lease is over, the memory
// belongs to another block, the session ended) is a hard error: throw the result away, map again or
// recompute.
//
// What is verified: that the daemon says who it is (the local door), when a page is looked at that
// it is whole, the page that was asked for, and the same as before (generation, header checksum,
// namespace, block key, layer, format). Not the checksums of its contents: they were when the
// daemon took the bytes in (computed when it encoded them, verified when they came from disk), and
// nobody else can write to that memory. VerifyContents() does it all, once, for those who want it.
//
// Blocks on the daemon's GPU stay there when MapOptions::memory says so. Their pages are then
// addresses for the streams of Client::Options::device, where a kernel reads them as it reads its
// own memory, and the second look at their generations is work behind it on the same stream:
//
//   table, checks: FillAttentionBlocks(...), FillGenerationChecks(...);  // In pinned memory.
//   stream->Attend(...); stream->CheckGenerations(checks, count, changed);
//   ... Synchronize; *changed == 0 and Check() OK: what was computed counts.
//
// Thread-safe. The mapping lives as long as this object, whatever becomes of the client and the
// daemon. Destroying it gives the leases back. In a forked child the memory is not there:
// every call answers FAILED_PRECONDITION.
#ifndef KVMILL_CLIENT_MAPPED_BLOCKS_H_
#define KVMILL_CLIENT_MAPPED_BLOCKS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/client.h"
#include "kernels/attention.h"
#include "kernels/generation_check.h"
#include "storage/core/page_layout.h"

namespace kvmill {

class MappedBlocks {
 public:
  ~MappedBlocks();
  MappedBlocks(const MappedBlocks&) = delete;
  MappedBlocks& operator=(const MappedBlocks&) = delete;

  const ClientNamespace& name_space() const;
  std::size_t block_count() const;  // The keys of the call.
  // Of the first of its layer groups that is not there, else OK. NOT_FOUND: a miss.
  // RESOURCE_EXHAUSTED: no room to load it into. Groups that are there have their pages all the
  // same.
  const absl::Status& status(std::size_t block) const;
  Tier tier(std::size_t block) const;  // Where it was found: the slowest over its layer groups.
  // Where the pages of a layer group are: kHost, or kGpu, where only a device can read them.
  Tier memory(std::size_t block, std::size_t group) const;
  std::uint32_t token_count(std::size_t block) const;
  // Not OK: why all of them are misses. WhenAway::kMiss only.
  const absl::Status& away() const;

  // The page of one layer. ABORTED as Check(); DATA_LOSS when it is not the page that was asked
  // for; the block's status when it is not there. What it points to is good to read until Check().
  // Of a page on the GPU header and slots were copied here (the first time: an error may be the
  // device's), and contents() are addresses for its streams.
  absl::StatusOr<PageView> Page(std::size_t block, std::size_t group,
                                std::size_t layer_index) const;

  // Whether everything that was read so far was right; after reading. Looks at the leases' time and
  // at the generation of every page that was looked at: some nanoseconds a page.
  absl::Status Check() const;
  // The same for some blocks.
  absl::Status Check(std::size_t first_block, std::size_t count) const;
  // Until when Check() can be OK: the first lease's end, counted from the moment when it was asked
  // for.
  absl::Time deadline() const;

  // Gives the leases back now: Check() and Page() answer ABORTED from here on. The memory stays
  // mapped, with whatever comes to lie there, until the object is destroyed.
  void Release();

  // Every checksum of every page; DATA_LOSS names the first that is wrong. ABORTED as Check().
  absl::Status VerifyContents() const;

 public:
  // Internal to client/.
  struct Content;
  explicit MappedBlocks(std::unique_ptr<Content> content);

 private:
  friend class Client;
  friend class MapCalls;
  friend class MapOwner;
  friend absl::Status FillAttentionBlocks(const MappedBlocks&, std::size_t, std::size_t,
                                          std::size_t, std::size_t, absl::Span<AttentionBlock>);
  friend absl::Status FillGenerationChecks(const MappedBlocks&, std::size_t, std::size_t,
                                           std::size_t, std::size_t, absl::Span<GenerationCheck>);
  // Whether `count` blocks are there and may be read.
  absl::Status CheckEntries(std::size_t group, std::size_t layer_index, std::size_t first_block,
                            std::size_t count) const;
  // Of those pages that are on the GPU: one wait for all.
  absl::Status ReadTablesTogether(std::size_t group, std::size_t layer_index,
                                  std::size_t first_block, std::size_t count) const;
  std::unique_ptr<Content> content_;
};

// For AttentionSequence::blocks: the entry of block `first_block + b` and KV head h is
// table[b * kv_heads + h], for `count` whole blocks. Errors as MappedBlocks::Page;
// INVALID_ARGUMENT when the table is too small or a block is a tail. Raw heads lie as
// PackedRawLayout(format, source_dtype, block_tokens) says.
absl::Status FillAttentionBlocks(const MappedBlocks& mapped, std::size_t group,
                                 std::size_t layer_index, std::size_t first_block,
                                 std::size_t count, absl::Span<AttentionBlock> table);

// For DeviceStream::CheckGenerations behind the work that read those pages: checks[b] looks at the
// page of block `first_block + b`. `checks` is the caller's, in memory that the device reads.
// Errors as FillAttentionBlocks; FAILED_PRECONDITION when a block is not on the GPU. The words stay
// where the device can read them as long as `mapped` lives.
absl::Status FillGenerationChecks(const MappedBlocks& mapped, std::size_t group,
                                  std::size_t layer_index, std::size_t first_block,
                                  std::size_t count, absl::Span<GenerationCheck> checks);

// For AttentionSequence::tail: the heads of a tail, which is stored in 16 bits. `rows` (two a head)
// and `heads` are the caller's, and stay as long as `heads` is used; for a tail on the GPU both lie
// in memory that the device reads. Errors as MappedBlocks::Page; INVALID_ARGUMENT when the block is
// no tail or a list is too small.
absl::Status FillTailHeads(const MappedBlocks& mapped, std::size_t group, std::size_t layer_index,
                           std::size_t block, absl::Span<const std::byte*> rows,
                           absl::Span<TailHead> heads);

// The same with lists of its own, for the CPU.
class MappedTail {
 public:
  // `block` is the tail's number among the mapped ones.
  static absl::StatusOr<MappedTail> Create(const MappedBlocks& mapped, std::size_t group,
                                           std::size_t layer_index, std::size_t block);
  const TailHead* heads() const { return heads_.data(); }
  std::uint32_t token_count() const { return token_count_; }

 private:
  std::uint32_t token_count_ = 0;
  std::vector<const std::byte*> rows_;  // K and V of each head.
  std::vector<TailHead> heads_;
};

}  // namespace kvmill

#endif  // KVMILL_CLIENT_MAPPED_BLOCKS_H_
