// How an operation of the C ABI begins and ends. Internal to client/c_api.
#ifndef KVMILL_CLIENT_C_API_OPERATION_H_
#define KVMILL_CLIENT_C_API_OPERATION_H_

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "client/c_api/arguments.h"
#include "client/c_api/border.h"
#include "client/c_api/queue.h"
#include "client/client.h"
#include "storage/core/status_macros.h"

namespace kvmill::c_api {

inline constexpr std::uint64_t kTimeoutMsMax = std::uint64_t{1000} * 3600 * 24 * 365;

inline absl::StatusOr<absl::Duration> TimeoutOf(std::uint64_t timeout_ms) {
  if (timeout_ms > kTimeoutMsMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("timeout_ms ", timeout_ms, ", at most ", kTimeoutMsMax));
  }
  return absl::Milliseconds(timeout_ms);
}

// An operation to be. Dropped before Start() it leaves nothing behind.
class Operation {
 public:
  // Checks what all operations have in common.
  static absl::StatusOr<Operation> Prepare(kvmill_operation kind, kvmill_client* client,
                                           const kvmill_call_options* call, kvmill_queue* queue,
                                           std::uint64_t tag) {
    if (client == nullptr) return Null("client");
    if (queue == nullptr) return Null("queue");
    KVMILL_RETURN_IF_ERROR(CheckProcess(client->pid));
    KVMILL_RETURN_IF_ERROR(CheckProcess(queue->queue->pid()));
    kvmill_call_options options;
    KVMILL_RETURN_IF_ERROR(ReadOptions("call", call, &options));
    Operation operation;
    KVMILL_ASSIGN_OR_RETURN(operation.call_.timeout, TimeoutOf(options.timeout_ms));
    KVMILL_ASSIGN_OR_RETURN(operation.call_.elsewhere, ElsewhereOf(options.elsewhere));
    operation.request_ = RequestOf(options);
    operation.result_ = std::make_unique<kvmill_result>();
    operation.result_->operation = kind;
    operation.result_->tag = tag;
    operation.result_->queue = queue->queue;
    return operation;
  }

  kvmill_result& result() { return *result_; }

  // The arguments live until the operation ends.
  template <typename T>
  T* Keep(std::unique_ptr<T> inputs) {
    T* const kept = inputs.get();
    result_->inputs = std::move(inputs);
    return kept;
  }

  // Calls `start(options, done)`. From here on there is exactly one event. What could throw in the
  // client from here on (no memory) ends the process, as it does in gRPC.
  template <typename T, typename StartFn>
  absl::Status Start(StartFn start) noexcept {
    kvmill_result* const result = result_.release();
    result->queue->Begin();
    const RequestScope scope(std::move(request_));
    start(call_, [result](absl::StatusOr<T> value) {
      if (value.ok()) {
        result->value = *std::move(value);
      } else {
        result->status = value.status();
      }
      End(result);
    });
    return absl::OkStatus();
  }

  // The same of what has a value beside its status, `T::status`.
  template <typename T, typename StartFn>
  absl::Status StartBoth(StartFn start) noexcept {
    kvmill_result* const result = result_.release();
    result->queue->Begin();
    const RequestScope scope(std::move(request_));
    start(call_, [result](T value) {
      result->status = value.status;
      result->value = std::move(value);
      End(result);
    });
    return absl::OkStatus();
  }

 private:
  static void End(kvmill_result* result) {
    result->inputs.reset();
    const std::shared_ptr<Queue> queue = std::move(result->queue);
    queue->Finish(result);  // It may be gone now.
  }

  CallOptions call_;
  RequestPtr request_;
  std::unique_ptr<kvmill_result> result_;
};

inline absl::Status CheckNamespace(const kvmill_namespace* ns) {
  return ns == nullptr ? Null("ns") : absl::OkStatus();
}

struct KeyInputs final : Inputs {
  std::vector<BlockKey> keys;
};

}  // namespace kvmill::c_api

#endif  // KVMILL_CLIENT_C_API_OPERATION_H_
