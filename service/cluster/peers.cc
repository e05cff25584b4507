#include "service/cluster/peers.h"

#include <algorithm>

#include "absl/container/flat_hash_map.h"
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

bool ValidAnswer(const std::vector<RunQuery>& queries, const std::vector<RunAnswer>& answers) {
  if (answers.size() != queries.size()) return false;
  for (std::size_t i = 0; i < answers.size(); ++i) {
    const std::uint32_t none = ~AllOf(queries[i]);
    if ((answers[i].present & none) != 0) return false;
    if (answers[i].pointers.size() > kPointersMax) return false;
    for (const Pointer& pointer : answers[i].pointers) {
      if (((pointer.blocks | pointer.perhaps) & none) != 0) return false;
      if ((pointer.blocks & pointer.perhaps) != 0) return false;
    }
  }
  return true;
}

bool ValidRuns(const std::vector<RunList>& lists, const std::vector<HeldRun>& runs) {
  absl::flat_hash_map<std::uint64_t, RunList> asked;
  for (const RunList& list : lists) asked[list.anchor_hash] = list;
  return std::all_of(runs.begin(), runs.end(), [&](const HeldRun& run) {
    const RunKeys& blocks = run.blocks;
    const auto list = asked.extract(run.anchor_hash);
    if (list.empty() || blocks.anchor.empty()) return false;
    if (AnchorHash(run.fingerprint, blocks.anchor) != run.anchor_hash) return false;
    if (blocks.places.size() != blocks.keys.size() || run.bytes < blocks.keys.size()) return false;
    // A page of nothing would be asked for without end.
    const RunList& after = list.mapped();
    if (blocks.keys.empty()) return after.after_hash != 0 && !run.more;
    if (blocks.places.front() < after.after_place) return false;
    if (blocks.keys.size() > kListKeysMax) return false;
    if (!std::is_sorted(blocks.places.begin(), blocks.places.end())) return false;
    absl::flat_hash_set<absl::string_view> keys;
    for (const BlockKey& key : blocks.keys) keys.insert(key.view());
    return keys.size() == blocks.keys.size() && !keys.contains("") &&
           blocks.places.back() < kRunBlocks;
  });
}

std::uint64_t DigestWord(std::uint64_t anchor_hash, std::uint8_t count, std::uint64_t sum) {
  if (count == 0) return 0;
  constexpr std::size_t kWord = sizeof(std::uint64_t);
  std::array<std::byte, 2 * kWord + 1> bytes;
  for (std::size_t i = 0; i < kWord; ++i) {
    bytes[i] = static_cast<std::byte>(anchor_hash >> (8 * i));
    bytes[kWord + i] = static_cast<std::byte>(sum >> (8 * i));
  }
  bytes.back() = static_cast<std::byte>(count);
  return Checksum(absl::MakeConstSpan(bytes));
}

}  // namespace kvmill
