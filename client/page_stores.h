// A client's stores of pages: which memory is registered, which stores run, and who waits for their
// pages. Internal to client/. Thread-safe. Uses the threads of its Connection, which must be
// destroyed first.
#ifndef KVMILL_CLIENT_PAGE_STORES_H_
#define KVMILL_CLIENT_PAGE_STORES_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "client/page_store_stream.h"

namespace kvmill {

class PageStores {
 public:
  using Deadline = Connection::Deadline;
  using StatusDone = std::function<void(absl::Status)>;

  PageStores(Connection& connection, ClientSession& session)
      : connection_(connection), session_(session) {}

  // Shares the regions that have descriptors with the daemon, and keeps the registration when all
  // of them are.
  void Register(RegisteredMemoryPtr memory, Deadline deadline, StatusDone done);
  // The daemon is about to be told, and: has said that it knows the registration no more.
  void Unregistering(std::uint64_t registration);
  void Unregistered(std::uint64_t registration);

  // `memory`: the one that is meant, where its number alone does not say so, since the next session
  // gives numbers anew; null: the one with that number.
  void Start(const ClientNamespace& ns, std::uint64_t registration,
             const RegisteredMemoryPtr& memory, absl::Span<const PageBlock> blocks,
             const PageStoreOptions& options, Deadline deadline, PageStoreStream::Done done);
  void Ready(std::uint64_t request, std::uint32_t layers);
  // `done` once, when the pages are free, or with DEADLINE_EXCEEDED.
  void FlushRequest(std::uint64_t request, Deadline deadline, StatusDone done);
  void FlushBlocks(absl::Span<const BlockKey> keys, Deadline deadline, StatusDone done);
  void Cancel(std::uint64_t request, Deadline deadline, StatusDone done);
  // Of all stores from a StandingMemory as earlier sessions had it, that is, not from `now`, which
  // may be null.
  void CancelStanding(std::uint64_t standing, const RegisteredMemoryPtr& now, Deadline deadline,
                      StatusDone done);

  // Ends all stores, and waits so long for their pages. No Start afterwards.
  void Stop(std::chrono::milliseconds wait);

 private:
  using StreamPtr = std::shared_ptr<PageStoreStream>;  // The table's, its own, and waits'.
  // Of a Flush or Cancel.
  struct Wait {
    struct Part {
      StreamPtr stream;
      std::vector<std::uint32_t> blocks;
    };
    std::vector<Part> parts;
    bool whole = false;  // The streams must be free, not only the blocks at rest.
    Deadline deadline;
    StatusDone done;
  };

  std::vector<StreamPtr> StreamsOf(std::uint64_t request);
  void Add(Wait wait);
  // Forgets what is free, answers who waited long enough.
  void Sweep();
  void SetTimer(Deadline when) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  Connection& connection_;
  ClientSession& session_;
  Mutex mu_;
  CondVar changed_;
  std::map<std::uint64_t, RegisteredMemoryPtr> memories_ ABSL_GUARDED_BY(mu_);
  std::map<std::uint64_t, StreamPtr> streams_ ABSL_GUARDED_BY(mu_);  // By number.
  std::uint64_t next_number_ ABSL_GUARDED_BY(mu_) = 1;
  std::vector<Wait> waits_ ABSL_GUARDED_BY(mu_);
  bool timer_set_ ABSL_GUARDED_BY(mu_) = false;
  Deadline timer_at_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace kvmill

#endif  // KVMILL_CLIENT_PAGE_STORES_H_
