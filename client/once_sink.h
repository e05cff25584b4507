// A sink that is told of one attempt of a Fetch only. Internal to client/.
#ifndef KVMILL_CLIENT_ONCE_SINK_H_
#define KVMILL_CLIENT_ONCE_SINK_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "client/client.h"

namespace kvmill {

// Passes everything on. A Fetch is tried again after some errors, which a daemon says before it
// sends anything: one that says them afterwards must not have blocks told to the sink twice, which
// may be working on them by then.
class OnceSink final : public FetchSink {
 public:
  explicit OnceSink(FetchSink& sink) : sink_(sink) {}  // Borrowed.

  absl::Status OnGroup(std::uint32_t block, std::uint8_t group, std::uint32_t token_count,
                       absl::Span<const std::uint32_t> page_bytes) override {
    told_.store(true, std::memory_order_relaxed);
    return sink_.OnGroup(block, group, token_count, page_bytes);
  }
  absl::Span<std::byte> PageMemory(const PageId& id, std::size_t page_bytes) override {
    return sink_.PageMemory(id, page_bytes);
  }
  absl::Status OnPage(const PageId& id, const PageView& page) override {
    return sink_.OnPage(id, page);
  }
  bool verifies() const override { return sink_.verifies(); }

  // The result of an attempt, as one after which there is no other if the sink knows of blocks.
  absl::StatusOr<FetchResult> Final(absl::StatusOr<FetchResult> result) const {
    if (result.ok() || !told_.load(std::memory_order_relaxed)) return result;
    const absl::Status& status = result.status();
    if (!absl::IsUnauthenticated(status) && !absl::IsNotFound(status)) return result;
    return absl::InternalError(
        absl::StrCat("malformed reply to a fetch: after blocks came ", status.ToString()));
  }

 private:
  FetchSink& sink_;
  std::atomic<bool> told_{false};
};

}  // namespace kvmill

#endif  // KVMILL_CLIENT_ONCE_SINK_H_
