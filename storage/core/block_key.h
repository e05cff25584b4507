// Names of blocks: the engine's key, and the full identity inside a daemon.
#ifndef KVMILL_STORAGE_CORE_BLOCK_KEY_H_
#define KVMILL_STORAGE_CORE_BLOCK_KEY_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace kvmill {

inline constexpr std::size_t kBlockKeyBytesMax = 64;
inline constexpr std::size_t kBlockKeyBytesRecommended =
    16;  // Shorter keys are accepted; warn the operator once.

// The engine's opaque hash of a block and its whole prefix. A value type; equality compares all
// bytes and the length. The default-constructed key is empty and stands for "no key" (the parent of
// a first block).
class BlockKey {
 public:
  BlockKey() = default;
  // INVALID_ARGUMENT when empty or longer than kBlockKeyBytesMax.
  static absl::StatusOr<BlockKey> FromBytes(absl::string_view bytes);
  static absl::StatusOr<BlockKey> FromHex(absl::string_view hex);

  bool empty() const { return size_ == 0; }
  std::size_t size() const { return size_; }
  // kBlockKeyBytesMax bytes, zeros behind the key.
  const std::byte* data() const { return bytes_.data(); }
  absl::string_view view() const {
    return absl::string_view(reinterpret_cast<const char*>(bytes_.data()), size_);
  }
  std::string ToHex() const;  // Lower case.

  friend bool operator==(const BlockKey& a, const BlockKey& b) {
    return a.size_ == b.size_ && std::memcmp(a.bytes_.data(), b.bytes_.data(), a.size_) == 0;
  }

 private:
  std::array<std::byte, kBlockKeyBytesMax> bytes_{};
  std::uint8_t size_ = 0;
};

// Key under which an unfinished last block (a tail) is stored: SHA-256 over
//   "kvmill-tail-2" 00 <length of parent> <parent> <length of key> <key> <token_count>
// with lengths of one byte and token_count in four, little-endian. `key` is the engine's: as for
// whole blocks, it stands for the tail's tokens and all before them, and is not empty. Empty
// parent: the sequence has no block before the tail.
BlockKey TailKey(const BlockKey& parent, std::uint32_t token_count, const BlockKey& key);

// What the engine's block is stored under: a whole one under `key`, a tail under its TailKey.
BlockKey StoredKey(std::uint32_t block_tokens, const BlockKey& parent, std::uint32_t token_count,
                   const BlockKey& key);

// A tail that would be of use if it were stored: one that begins as the caller's sequence goes on.
struct TailCandidate {
  BlockKey key;                   // The engine's, as for TailKey.
  std::uint32_t token_count = 0;  // 1 to block_tokens - 1.
  std::uint32_t block_index = 0;  // Position in its sequence: so many whole blocks are before it.
};
inline constexpr std::size_t kTailCandidatesMax = 1024;  // Of one lookup.

// INVALID_ARGUMENT naming the count and kTailCandidatesMax, or the candidate that has no key or a
// token count that no tail has.
absl::Status CheckTailCandidates(absl::Span<const TailCandidate> tails, std::uint32_t block_tokens);

// Dense number of an open namespace in this daemon; not stable across restarts.
using NamespaceId = std::uint32_t;

// What is sealed, indexed and evicted as one: one layer group of one block of one namespace.
struct BlockId {
  NamespaceId namespace_id = 0;
  std::uint8_t group = 0;  // Index into NamespaceSpec::groups.
  BlockKey key;

  friend bool operator==(const BlockId& a, const BlockId& b) {
    return a.namespace_id == b.namespace_id && a.group == b.group && a.key == b.key;
  }
};

// 64-bit hash of all of it; equality is never decided by it.
std::uint64_t HashOf(NamespaceId namespace_id, std::uint8_t group, const BlockKey& key);
inline std::uint64_t HashOf(const BlockId& id) { return HashOf(id.namespace_id, id.group, id.key); }

template <typename H>
H AbslHashValue(H state, const BlockId& id) {
  return H::combine(std::move(state), HashOf(id));
}

}  // namespace kvmill

#endif  // KVMILL_STORAGE_CORE_BLOCK_KEY_H_
