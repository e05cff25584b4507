#include "client/away.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/map_calls.h"
#include "client/mapped_content.h"
#include "storage/core/log.h"

namespace kvmill {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kPauseMin{20};
constexpr milliseconds kPauseMax{500};
// How long one that looks may take before another one looks, too.
constexpr milliseconds kLookMax{1000};

absl::Status Miss(const absl::Status& why) {
  return absl::NotFoundError(absl::StrCat("the daemon is away: ", why.message()));
}

}  // namespace

Away::Look Away::Ask() {
  MutexLock lock(mu_);
  if (why_.ok()) return {};
  const auto now = now_();
  if (now < next_look_) return {why_, false};
  next_look_ = now + kLookMax;
  return {absl::OkStatus(), true};
}

bool Away::Note(const absl::Status& status, const Look& look, bool reads) {
  if (absl::IsCancelled(status)) return false;  // The client goes.
  const bool unavailable = absl::IsUnavailable(status);
  const bool answered = !unavailable && !absl::IsDeadlineExceeded(status);
  bool left = false, came_back = false;
  {
    MutexLock lock(mu_);
    if (answered) {
      came_back = !std::exchange(why_, absl::OkStatus()).ok();
      pause_ = milliseconds(0);
    } else if (look.is_probe && !why_.ok()) {
      pause_ = std::clamp(2 * pause_, kPauseMin, kPauseMax);
      next_look_ = now_() + pause_;
    } else if (unavailable && reads && why_.ok()) {
      // A deadline alone says nothing: it may have been short.
      left = true;
      why_ = status;
      pause_ = kPauseMin;
      next_look_ = now_() + pause_;
    }
  }
  if (left) {
    LogWarning(
        absl::StrCat("the daemon is away: until it is back all blocks are misses, and none "
                     "is stored: ",
                     status.message()));
  }
  if (came_back) LogInfo("the daemon is back");
  return answered;
}

bool Away::IsAway(const absl::Status& status) const {
  switch (status.code()) {
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDeadlineExceeded:
    case absl::StatusCode::kAborted:  // Its session was an earlier daemon's.
      return true;
    case absl::StatusCode::kUnauthenticated:
      return local_;
    default:
      return false;
  }
}

LookupResult MissedLookup(const absl::Status& why) {
  LookupResult result;
  result.away = why;
  return result;
}

FetchResult MissedFetch(std::size_t key_count, const absl::Status& why) {
  FetchResult result;
  result.blocks.resize(key_count);
  for (FetchBlockResult& block : result.blocks) block.status = Miss(why);
  result.away = why;
  return result;
}

StoreResult DroppedStore(std::size_t block_count, const absl::Status& why) {
  StoreResult result;
  result.blocks.resize(block_count);
  for (StoreBlockResult& block : result.blocks) block.outcome = StoreOutcome::kDropped;
  result.blocks_dropped = block_count;
  result.away = why;
  return result;
}

std::unique_ptr<MappedBlocks> MissedMap(const ClientNamespace& ns, absl::Span<const BlockKey> keys,
                                        std::uint32_t lease_ms, const absl::Status& why) {
  auto content = std::make_unique<MappedBlocks::Content>();
  content->ns = ns;
  content->keys.assign(keys.begin(), keys.end());
  content->blocks.resize(keys.size());
  content->entries.resize(keys.size() * ns.spec.groups.size());
  for (MappedBlocks::Content::Block& block : content->blocks) block.status = Miss(why);
  for (MappedBlocks::Content::Entry& entry : content->entries) entry.status = Miss(why);
  // Of no session and no client: nothing is leased, so nothing is to be given back.
  content->session = std::make_shared<SessionHandle>();
  content->owner = std::make_shared<MapOwner>(nullptr);
  content->deadline_nanos.store(
      std::chrono::nanoseconds(steady_clock::now().time_since_epoch()).count() +
      std::int64_t{lease_ms} * 1'000'000);
  content->away = why;
  return std::make_unique<MappedBlocks>(std::move(content));
}

void MissLostBlocks(const Away& away, FetchResult* result) {
  for (FetchBlockResult& block : result->blocks) {
    if (!away.IsAway(block.status)) continue;
    result->away = block.status;
    block.status = Miss(result->away);
  }
}

void DropLostBlocks(const Away& away, StoreResult* result) {
  for (StoreBlockResult& block : result->blocks) {
    if (block.outcome != StoreOutcome::kFailed || !away.IsAway(block.status)) continue;
    result->away = block.status;
    block = {absl::OkStatus(), StoreOutcome::kDropped};
    --result->blocks_failed;
    ++result->blocks_dropped;
  }
}

}  // namespace kvmill
