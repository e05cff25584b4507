// Who is reading engines' pages right now, and who must not any more.
//
// A store of pages (StoreBegin.pages) begins, reads chunk by chunk, and is over when its handle
// goes. Cancelled, it never reads again: what waits in a queue is refused when its turn comes. The
// answer to a cancellation comes when nobody is in the middle of a read, which takes as long as
// encoding one chunk. The first reason stays: CANCELLED, or ABORTED when the session ended.
//
// Stores belong to sessions, and outlive them: whoever lost a session can still ask by its id
// whether somebody reads. A state machine without threads. Thread-safe; answers are given without a
// lock.
#ifndef KVMILL_SERVICE_PAGE_READERS_H_
#define KVMILL_SERVICE_PAGE_READERS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "storage/core/mutex.h"

namespace kvmill {

class PageReaders {
 public:
  class Store;
  using StorePtr = std::shared_ptr<Store>;  // Held by the call and by each of its tasks.
  // How many of the stores were not over.
  using Answer = std::function<void(std::uint64_t stores)>;

  PageReaders() = default;
  ~PageReaders();  // No store is left.

  // `number`: of the session, as the client counts. ALREADY_EXISTS while there is one with it.
  absl::StatusOr<StorePtr> Begin(const std::string& tenant, const std::string& session,
                                 std::uint64_t number, std::uint64_t registration);
  // Of that tenant. `answer` is called once, maybe at once.
  void Cancel(const std::string& tenant, const std::string& session,
              absl::Span<const std::uint64_t> numbers, Answer answer);
  void CancelRegistration(std::uint64_t registration, Answer answer);
  // Nobody waits for it.
  void CancelSession(const std::string& session);

  std::size_t stores() const;  // That are not over.

 private:
  // One answer that is due when all its stores are at rest.
  struct Wait {
    std::size_t reading = 0;
    std::uint64_t stores = 0;
    Answer answer;
  };
  using WaitPtr = std::shared_ptr<Wait>;  // Of each store that it waits for.
  using Id = std::pair<std::string, std::uint64_t>;

  // `select` calls its argument, under the lock, with the stores that are meant.
  template <typename Select>
  void CancelThese(const Select& select, const absl::Status& why, Answer answer);
  void CancelOne(Store& store, const absl::Status& why, const WaitPtr& wait)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  mutable Mutex mu_;
  std::map<Id, Store*> stores_ ABSL_GUARDED_BY(mu_);  // Each takes itself out.
};

class PageReaders::Store {
 public:
  ~Store();  // No read is in progress.
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  // Before and after each read of pages. Not OK: cancelled, and why; then there is nothing to end.
  absl::Status BeginRead();
  void EndRead();

 private:
  friend class PageReaders;
  Store(PageReaders& owner, std::string tenant, Id id, std::uint64_t registration)
      : owner_(owner),
        tenant_(std::move(tenant)),
        id_(std::move(id)),
        registration_(registration) {}

  PageReaders& owner_;
  const std::string tenant_;
  const Id id_;
  const std::uint64_t registration_;
  // Guarded by owner_.mu_.
  absl::Status cancelled_;  // Not OK: it is.
  std::uint32_t reading_ = 0;
  std::vector<WaitPtr> waits_;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_PAGE_READERS_H_
