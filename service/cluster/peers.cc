#include "service/cluster/peers.h"

#include <algorithm>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/cord.h"
#include "storage/core/checksum.h"

namespace kvmill {

namespace {

constexpr char kReplacedPayload[] = "kvmill/replaced";

std::uint32_t LowBits(std::size_t count) {
  return count >= 32 ? ~std::uint32_t{0} : (std::uint32_t{1} << count) - 1;
}
static_assert(kRunBlocks == 32, "a run's blocks are the bits of one word");

}  // namespace

absl::Status ReplacedError(absl::string_view message) {
  absl::Status status = absl::UnavailableError(message);
  status.SetPayload(kReplacedPayload, absl::Cord());
  return status;
}

bool IsReplaced(const absl::Status& status) {
  return absl::IsUnavailable(status) && status.GetPayload(kReplacedPayload).has_value();
}

std::uint32_t AllOf(const RunQuery& query) { return LowBits(query.keys.size()); }

std::uint32_t CoveredBy(std::uint8_t count, const RunQuery& query) {
  if (count <= query.first) return 0;
  return LowBits(std::min<std::size_t>(count - query.first, query.keys.size()));
}

bool ValidAnswer(const std::vector<RunQuery>& queries, const std::vector<RunAnswer>& answers) {
  if (answers.size() != queries.size()) return false;
  for (std::size_t i = 0; i < answers.size(); ++i) {
    if ((answers[i].present & ~AllOf(queries[i])) != 0) return false;
    if (answers[i].pointers.size() > kPointersMax) return false;
    for (const Pointer& pointer : answers[i].pointers) {
      if (pointer.count == 0 || pointer.count > kRunBlocks) return false;
    }
  }
  return true;
}

bool ValidRuns(const std::vector<std::uint64_t>& anchor_hashes, const std::vector<HeldRun>& runs) {
  absl::flat_hash_set<std::uint64_t> asked(anchor_hashes.begin(), anchor_hashes.end());
  return std::all_of(runs.begin(), runs.end(), [&](const HeldRun& run) {
    const RunKeys& blocks = run.blocks;
    if (asked.erase(run.anchor_hash) == 0 || blocks.anchor.empty()) return false;
    if (AnchorHash(run.fingerprint, blocks.anchor) != run.anchor_hash) return false;
    if (blocks.keys.empty() || blocks.keys.size() > kListKeysMax) return false;
    if (blocks.places.size() != blocks.keys.size() || run.bytes < blocks.keys.size()) return false;
    if (!std::is_sorted(blocks.places.begin(), blocks.places.end())) return false;
    absl::flat_hash_set<absl::string_view> keys;
    for (const BlockKey& key : blocks.keys) keys.insert(key.view());
    return keys.size() == blocks.keys.size() && !keys.contains("") &&
           blocks.places.back() < kRunBlocks;
  });
}

std::uint64_t DigestWord(const Announcement& announcement) {
  if (announcement.count == 0) return 0;
  std::array<std::byte, sizeof(std::uint64_t) + 1> bytes;
  for (std::size_t i = 0; i < sizeof(std::uint64_t); ++i) {
    bytes[i] = static_cast<std::byte>(announcement.anchor_hash >> (8 * i));
  }
  bytes.back() = static_cast<std::byte>(announcement.count);
  return Checksum(absl::MakeConstSpan(bytes));
}

}  // namespace kvmill
