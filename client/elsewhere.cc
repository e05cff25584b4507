#include "client/elsewhere.h"

#include "absl/strings/str_cat.h"

namespace kvmill {
namespace {

// As service/cluster/anchor.h and docs/formats.md ("Placement") have it.
constexpr std::uint64_t kRunBlocks = 32;

}  // namespace

absl::Status CheckElsewhere(const Elsewhere& elsewhere) {
  if (elsewhere.hint.size() <= kHintBytesMax) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("hint of ", elsewhere.hint.size(),
                                                 " bytes: a node id has at most ", kHintBytesMax));
}

Elsewhere From(const Elsewhere& of_all, absl::Span<const BlockKey> keys, std::size_t first_key) {
  Elsewhere part = of_all;
  const std::uint64_t first_block = of_all.first_block + first_key;
  const std::uint64_t anchor_block = first_block / kRunBlocks * kRunBlocks;
  if (anchor_block >= of_all.first_block) {
    const std::size_t anchor = static_cast<std::size_t>(anchor_block - of_all.first_block);
    part.anchor = anchor < keys.size() ? keys[anchor] : BlockKey();
  }
  part.first_block = static_cast<std::uint32_t>(first_block);
  return part;
}

}  // namespace kvmill
