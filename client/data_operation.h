// What every operation over the data plane does alike, whatever it moves: starting calls, and
// ending. Internal to client/.
#ifndef KVMILL_CLIENT_DATA_OPERATION_H_
#define KVMILL_CLIENT_DATA_OPERATION_H_

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/data_link.h"
#include "client/request_metadata.h"
#include "client/transport/transport.h"
#include "kvmill/v1/data.pb.h"
#include "storage/core/mutex.h"

namespace kvmill {

// Made with new; End deletes it.
template <typename Result>
class DataOperation {
 protected:
  using Deadline = DataLink::Deadline;
  using Done = std::function<void(absl::StatusOr<Result>)>;

  // `link.Begin()` was called for it; End ends what that began. Calls carry the request of the
  // thread that makes it.
  DataOperation(DataLink& link, ConnectionPtr connection, Deadline deadline, Done done)
      : link_(link),
        connection_(std::move(connection)),
        deadline_(deadline),
        done_(std::move(done)) {}
  virtual ~DataOperation() = default;

  DataLink& link() { return link_; }
  const ConnectionPtr& connection() const { return connection_; }
  const RequestPtr& request() const { return request_; }

  // Starts `call`, which lacks its header and its time.
  void StartCall(v1::DataRequest* header, Call call) {
    AddRequest(request_, header);
    call.header.resize(header->ByteSizeLong());
    header->SerializeWithCachedSizesToArray(reinterpret_cast<std::uint8_t*>(call.header.data()));
    call.timeout_nanos =
        std::max<std::int64_t>(1, std::chrono::duration_cast<std::chrono::nanoseconds>(
                                      deadline_ - std::chrono::system_clock::now())
                                      .count());
    connection_->Start(std::move(call));
  }

  // The first failure is the one that End tells.
  void Fail(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (failed_.ok()) failed_ = why;
  }
  bool failed() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !failed_.ok(); }

  // No call is under way, no task posted. `result` is what there is if nothing failed. Deletes the
  // object.
  void End(Result result) {
    absl::StatusOr<Result> told = std::move(result);
    {
      MutexLock lock(mu_);
      if (failed()) {
        told = link_.stopping() ? absl::CancelledError("the client is being destroyed") : failed_;
      }
    }
    DataLink& link = link_;
    const auto done = std::move(done_);
    delete this;
    done(std::move(told));
    link.End();
  }

  Mutex mu_;

 private:
  DataLink& link_;
  const ConnectionPtr connection_;
  const RequestPtr request_ = CurrentRequest();
  const Deadline deadline_;
  Done done_;
  absl::Status failed_ ABSL_GUARDED_BY(mu_);  // Of the whole operation.
};

}  // namespace kvmill

#endif  // KVMILL_CLIENT_DATA_OPERATION_H_
