#include "service/block_mirror.h"

#include <cstring>

namespace kvmill {

BlockMirror::Entry& BlockMirror::Add(NamespaceId namespace_id, const BlockKey& key,
                                     const BlockKey& parent) {
  std::uint32_t place = 0;
  if (free_.empty()) {
    place = static_cast<std::uint32_t>(entries_.size());
    entries_.emplace_back();
  } else {
    place = free_.back();
    free_.pop_back();
  }
  Entry& entry = entries_[place];
  entry.bytes = std::make_unique_for_overwrite<char[]>(key.size() + parent.size());
  std::memcpy(entry.bytes.get(), key.data(), key.size());
  std::memcpy(entry.bytes.get() + key.size(), parent.data(), parent.size());
  entry.namespace_id = namespace_id;
  entry.key_bytes = static_cast<std::uint8_t>(key.size());
  entry.parent_bytes = static_cast<std::uint8_t>(parent.size());
  places_.insert(place);
  return entry;
}

void BlockMirror::Erase(std::uint32_t place) {
  places_.erase(place);
  entries_[place] = Entry();
  free_.push_back(place);
}

}  // namespace kvmill
