#include "client/store_results.h"

#include "absl/strings/str_cat.h"
#include "client/convert.h"

namespace kvmill {
namespace {

// A block is what its worst group is: failed, partial, then stored, and existing if all are.
int RankOf(StoreOutcome outcome) {
  switch (outcome) {
    case StoreOutcome::kDropped:  // No daemon says so.
    case StoreOutcome::kFailed:
      return 3;
    case StoreOutcome::kPartial:
      return 2;
    case StoreOutcome::kStored:
      return 1;
    case StoreOutcome::kExisting:
      return 0;
  }
  return 3;
}

}  // namespace

StoreResults::StoreResults(std::size_t block_count, std::size_t group_count)
    : group_count_(group_count),
      open_groups_(block_count, static_cast<std::uint32_t>(group_count)),
      closed_(block_count * group_count, false) {
  result_.blocks.resize(block_count);
  for (StoreBlockResult& block : result_.blocks) {
    block.status = absl::UnknownError("the daemon gave no result for the block");
  }
}

bool StoreResults::closed(std::uint32_t block, std::uint32_t group) const {
  return block >= open_groups_.size() || group >= group_count_ ||
         closed_[block * group_count_ + group];
}

void StoreResults::Add(const v1::StoreResult& r) {
  if (closed(r.sequence(), r.group())) return;
  closed_[r.sequence() * group_count_ + r.group()] = true;
  StoreBlockResult& block = result_.blocks[r.sequence()];
  const std::uint32_t groups_left = --open_groups_[r.sequence()];
  absl::Status status = FromProto(r.status());
  const bool first = groups_left + 1 == group_count_;
  StoreOutcome outcome = StoreOutcome::kFailed;
  if (v1::StoreOutcome_IsValid(r.outcome()) && status.ok()) {
    outcome = static_cast<StoreOutcome>(r.outcome());
  }
  if (outcome == StoreOutcome::kFailed && status.ok()) {
    status = absl::InternalError(absl::StrCat("malformed reply to Store: outcome ",
                                              static_cast<int>(r.outcome()), " without a reason"));
  }
  if (first || RankOf(outcome) > RankOf(block.outcome)) block.outcome = outcome;
  if (first || (block.status.ok() && !status.ok())) block.status = status;
  if (outcome == StoreOutcome::kStored) {
    result_.raw_bytes += r.raw_bytes();
    result_.stored_bytes += r.stored_bytes();
    result_.tile_bytes += r.tile_bytes();
    result_.tile_raw_bytes += r.tile_raw_bytes();
    result_.raw_heads += r.raw_heads();
  }
  if (groups_left > 0) return;
  switch (block.outcome) {
    case StoreOutcome::kStored:
      ++result_.blocks_stored;
      break;
    case StoreOutcome::kExisting:
      ++result_.blocks_existing;
      break;
    case StoreOutcome::kFailed:
      ++result_.blocks_failed;
      break;
    case StoreOutcome::kPartial:
    case StoreOutcome::kDropped:
      break;
  }
}

}  // namespace kvmill
