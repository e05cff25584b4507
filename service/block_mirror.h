// What readers of a tenant's events have been told of: each block, and where it is.
//
// A block's entry keeps its place, so that the mirror can be read in steps while it changes: what
// is there from the first step to the last is read. About 105 bytes a block with keys of 32 bytes.
//
// Not thread-safe.
#ifndef KVMILL_SERVICE_BLOCK_MIRROR_H_
#define KVMILL_SERVICE_BLOCK_MIRROR_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/hash/hash.h"
#include "absl/strings/string_view.h"
#include "storage/core/block_key.h"
#include "storage/core/tier.h"

namespace kvmill {

class BlockMirror {
 public:
  static constexpr std::uint32_t kNone = 0xFFFFFFFF;

  struct Entry {
    std::unique_ptr<char[]> bytes;  // The key, then the parent's; null: the place is free.
    NamespaceId namespace_id = 0;
    std::uint16_t token_count = 0;
    Tier tier = Tier::kHost;
    std::uint8_t key_bytes = 0;
    std::uint8_t parent_bytes = 0;  // 0: it has none, or it is not known.
    bool seen = false;              // For who compares the mirror with the store.

    bool used() const { return bytes != nullptr; }
    absl::string_view key_view() const { return {bytes.get(), key_bytes}; }
    BlockKey key() const { return KeyOf(key_view()); }
    BlockKey parent() const { return KeyOf({bytes.get() + key_bytes, parent_bytes}); }
  };

  BlockMirror() : places_(0, Hash{this}, Equal{this}) {}
  BlockMirror(const BlockMirror&) = delete;
  BlockMirror& operator=(const BlockMirror&) = delete;

  std::uint32_t Find(NamespaceId namespace_id, const BlockKey& key) const {
    const auto it = places_.find(Name{namespace_id, key.view()});
    return it == places_.end() ? kNone : *it;
  }
  // There is none of that name. The entry has tier and token count yet to get.
  Entry& Add(NamespaceId namespace_id, const BlockKey& key, const BlockKey& parent);
  // The place becomes free.
  void Erase(std::uint32_t place);

  Entry& at(std::uint32_t place) { return entries_[place]; }
  const Entry& at(std::uint32_t place) const { return entries_[place]; }
  // Places are below this; some are free.
  std::uint32_t places() const { return static_cast<std::uint32_t>(entries_.size()); }
  std::size_t size() const { return places_.size(); }

 private:
  struct Name {
    NamespaceId namespace_id;
    absl::string_view key;
    friend bool operator==(const Name&, const Name&) = default;
    template <typename H>
    friend H AbslHashValue(H state, const Name& name) {
      return H::combine(std::move(state), name.namespace_id, name.key);
    }
  };
  Name NameOf(std::uint32_t place) const {
    return {entries_[place].namespace_id, entries_[place].key_view()};
  }
  struct Hash {
    using is_transparent = void;
    const BlockMirror* mirror;
    std::size_t operator()(const Name& name) const { return absl::Hash<Name>()(name); }
    std::size_t operator()(std::uint32_t place) const { return (*this)(mirror->NameOf(place)); }
  };
  struct Equal {
    using is_transparent = void;
    const BlockMirror* mirror;
    bool operator()(std::uint32_t a, std::uint32_t b) const { return a == b; }
    bool operator()(std::uint32_t place, const Name& name) const {
      return mirror->NameOf(place) == name;
    }
    bool operator()(const Name& name, std::uint32_t place) const { return (*this)(place, name); }
  };
  static BlockKey KeyOf(absl::string_view bytes) {
    return bytes.empty() ? BlockKey() : *BlockKey::FromBytes(bytes);
  }

  std::deque<Entry> entries_;
  std::vector<std::uint32_t> free_;
  absl::flat_hash_set<std::uint32_t, Hash, Equal> places_;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_BLOCK_MIRROR_H_
