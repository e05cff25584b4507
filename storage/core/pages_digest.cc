#include "storage/core/pages_digest.h"

#include <cstring>
#include <vector>

#include "storage/core/checksum.h"
#include "storage/core/page_layout.h"

namespace kvmill {

std::uint64_t PagesDigest(absl::Span<const absl::Span<const std::byte>> pages) {
  std::vector<std::byte> checksums(pages.size() * sizeof(PageHeader::checksum));
  std::byte* to = checksums.data();
  for (const absl::Span<const std::byte> page : pages) {
    std::memcpy(to, page.data() + offsetof(PageHeader, checksum), sizeof(PageHeader::checksum));
    to += sizeof(PageHeader::checksum);
  }
  return Checksum(checksums);
}

}  // namespace kvmill
