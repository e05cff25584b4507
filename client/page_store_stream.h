// One store of pages: a Store call whose chunks name pages, and the certainty afterwards that the
// daemon reads them no more. Internal to client/.
#ifndef KVMILL_CLIENT_PAGE_STORE_STREAM_H_
#define KVMILL_CLIENT_PAGE_STORE_STREAM_H_

#include <grpcpp/support/async_stream.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/client.h"
#include "client/client_session.h"
#include "client/connection.h"
#include "client/page_pieces.h"
#include "client/store_results.h"
#include "storage/core/mutex.h"

namespace kvmill {

// Memory that was registered and shared. Constant but for one word; every store from it holds it.
struct RegisteredMemory {
  std::uint64_t registration = 0;
  SessionPtr session;
  Fingerprint fingerprint{};
  EngineGeometry geometry;
  std::uint64_t standing = 0;  // Its number as a StandingMemory; 0: it is none.
  // UnregisterMemory was called: the daemon may hear of it before a store that was started earlier.
  mutable std::atomic<bool> unregistering{false};
};
using RegisteredMemoryPtr = std::shared_ptr<const RegisteredMemory>;

// What becomes of blocks that were not stored when their memory was unregistered.
absl::Status MemoryUnregistered();

// Thread-safe. Kept alive by its owner's table until its pages are free, and by itself while the
// call runs.
class PageStoreStream : public std::enable_shared_from_this<PageStoreStream> {
 public:
  using Deadline = Connection::Deadline;
  using Done = std::function<void(absl::StatusOr<StoreResult>)>;

  // `changed` is called without a lock when blocks came to rest, and when the pages are free.
  // `number`: of the session, never used before. Blocks passed CheckPageBlocks.
  PageStoreStream(Connection& connection, ClientSession& session, const ClientNamespace& ns,
                  RegisteredMemoryPtr memory, std::uint64_t number,
                  absl::Span<const PageBlock> blocks, const PageStoreOptions& options,
                  std::function<void()> changed, Done done);

  void Start(Deadline deadline);

  std::uint64_t request() const { return options_.request; }
  std::uint64_t registration() const { return memory_->registration; }
  const RegisteredMemoryPtr& memory() const { return memory_; }
  // Indexes of blocks with one of these keys; all blocks without keys.
  std::vector<std::uint32_t> Find(absl::Span<const BlockKey> keys);

  void Ready(std::uint32_t layers);
  // Blocks whose values are not all ready are not sent (any more). `why` is what becomes of them,
  // unless they turn out to be there.
  void GiveUpUnready(absl::Span<const std::uint32_t> blocks, const absl::Status& why);
  // Ends the call, and nothing more is sent. `why`, which is CANCELLED, is what becomes of blocks
  // that had no result yet, with kWholeCall of the call.
  enum class CancelAs { kBlocks, kWholeCall };
  void Cancel(CancelAs as, const absl::Status& why);
  // When the call has ended and it is not known whether somebody reads: asks, at least until then.
  void AskUntil(Deadline deadline);

  // Nobody reads any of its pages, and nobody will.
  bool free();
  // The same of these blocks.
  bool AtRest(absl::Span<const std::uint32_t> blocks);
  // `done` was called.
  bool over();

 private:
  void OnStart(bool ok);
  void OnWrite(bool ok);
  void OnHalfClose(bool ok);
  void OnRead(bool ok);
  void OnFinish(bool ok);
  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void FinishIfIdle() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void CancelRest(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void AddFailure(std::uint32_t block, std::uint32_t group, v1::StoreOutcome outcome,
                  const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Confirm(Deadline deadline);
  void Confirmed(const absl::Status& status);
  void Complete(absl::Status status);

  Connection& connection_;
  ClientSession& session_;
  const ClientNamespace ns_;
  const RegisteredMemoryPtr memory_;
  const std::uint64_t number_;
  const PageStoreOptions options_;
  const std::function<void()> changed_;
  Deadline deadline_;

  std::shared_ptr<PageStoreStream> self_;  // From Start to Complete.
  grpc::ClientContext context_;
  std::uint64_t pass_ = 0;
  bool started_ = false;
  ChannelPtr channel_;
  std::unique_ptr<grpc::ClientAsyncReaderWriter<v1::StoreRequest, v1::StoreReply>> stream_;
  MemberCompletion<PageStoreStream> start_done_{this, &PageStoreStream::OnStart};
  MemberCompletion<PageStoreStream> write_done_{this, &PageStoreStream::OnWrite};
  MemberCompletion<PageStoreStream> half_close_done_{this, &PageStoreStream::OnHalfClose};
  MemberCompletion<PageStoreStream> read_done_{this, &PageStoreStream::OnRead};
  MemberCompletion<PageStoreStream> finish_done_{this, &PageStoreStream::OnFinish};
  grpc::Status grpc_status_;
  v1::StoreReply reply_;  // Of the read in progress.

  Mutex mu_;
  Done done_ ABSL_GUARDED_BY(mu_);            // Null: was called.
  absl::Status status_ ABSL_GUARDED_BY(mu_);  // Of the call.
  PagePieces pieces_ ABSL_GUARDED_BY(mu_);
  StoreResults results_ ABSL_GUARDED_BY(mu_);
  absl::Status durable_ ABSL_GUARDED_BY(mu_) = absl::UnknownError("the daemon sent no summary");
  v1::StoreRequest message_ ABSL_GUARDED_BY(mu_);  // Of the write in progress.
  bool begun_ ABSL_GUARDED_BY(mu_) = false;        // The daemon said so.
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool writes_ended_ ABSL_GUARDED_BY(mu_) = false;  // Or half-closed.
  bool reads_ended_ ABSL_GUARDED_BY(mu_) = false;
  bool finishing_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status cancelled_ ABSL_GUARDED_BY(mu_);  // Not OK: nothing is sent any more.
  CancelAs cancelled_as_ ABSL_GUARDED_BY(mu_) = CancelAs::kWholeCall;
  // By block. Not OK: was given up, with parts of it sent or not.
  std::vector<absl::Status> given_up_ ABSL_GUARDED_BY(mu_);
  bool confirming_ ABSL_GUARDED_BY(mu_) = false;
  Deadline ask_until_ ABSL_GUARDED_BY(mu_);  // Somebody wants to know.
  bool free_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace kvmill

#endif  // KVMILL_CLIENT_PAGE_STORE_STREAM_H_
