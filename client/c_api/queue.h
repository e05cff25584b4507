// Running operations, their results, and the queues that results come out of. Internal to
// client/c_api.
#ifndef KVMILL_CLIENT_C_API_QUEUE_H_
#define KVMILL_CLIENT_C_API_QUEUE_H_

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/c_api/tickets.h"
#include "client/c_api/watch.h"
#include "client/client.h"
#include "client/kvmill.h"
#include "storage/core/mutex.h"

namespace kvmill::c_api {

// A namespace and what is derived from it. Constant once made.
struct NamespaceData {
  explicit NamespaceData(ClientNamespace value);
  NamespaceData(const NamespaceData&) = delete;  // `groups` points into `ns`.
  NamespaceData& operator=(const NamespaceData&) = delete;

  const LayerGroup& group_of(std::size_t layer) const {
    return ns.spec.groups[layer_groups[layer]];
  }
  std::size_t layer_count() const { return layer_groups.size(); }

  const ClientNamespace ns;
  const std::string fingerprint_hex;
  std::vector<kvmill_layer_group> groups;
  std::vector<std::size_t> group_begin;   // First layer of each group.
  std::vector<std::size_t> layer_groups;  // Group of each layer.
};

// What an operation reads or writes while it runs; freed when it ends.
struct Inputs {
  virtual ~Inputs() = default;
};

struct MappedData;  // client/c_api/mapped.h

struct SessionNotice {
  SessionEvent event = SessionEvent::kEnded;
  std::uint64_t leases = 0;
};

class Queue {
 public:
  // RESOURCE_EXHAUSTED when there is no descriptor left.
  static absl::StatusOr<std::shared_ptr<Queue>> Create();
  ~Queue();
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  void Begin();
  // The queue owns the result until Next() hands it out. Neither allocates nor fails.
  void Finish(kvmill_result* result);
  // The same of an event of a session, which no operation began. One of the same kind that was not
  // taken yet takes it in: who does not listen does not pile them up.
  void Tell(std::unique_ptr<kvmill_result> result);
  // One more event of an operation that runs.
  void Add(std::unique_ptr<kvmill_result> result);
  absl::Status Next(std::int64_t timeout_ms, kvmill_event* event);
  absl::Status Drain(std::int64_t timeout_ms);
  std::size_t running();

  int fd() const { return fd_; }
  pid_t pid() const { return pid_; }

 private:
  void Append(kvmill_result* result) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  explicit Queue(int fd) : fd_(fd), pid_(getpid()) {}

  const int fd_;
  const pid_t pid_;
  Mutex mu_;
  CondVar changed_;
  kvmill_result* first_ ABSL_GUARDED_BY(mu_) = nullptr;
  kvmill_result* last_ ABSL_GUARDED_BY(mu_) = nullptr;
  std::size_t running_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace kvmill::c_api

// An operation, from its start until its result is freed: so ending it needs no memory.
struct kvmill_result {
  kvmill_operation operation = 0;
  std::uint64_t tag = 0;
  absl::Status status;
  std::string message;  // Of the status, once the event was taken.
  std::variant<std::monostate, kvmill::ClientNamespace, kvmill::LookupResult, kvmill::StoreResult,
               kvmill::FetchResult, std::uint64_t, kvmill::ServerStat,
               std::shared_ptr<const kvmill::c_api::MappedData>, kvmill::c_api::SessionNotice,
               std::string, kvmill::RedeemResult, kvmill::c_api::RedeemNews,
               std::unique_ptr<kvmill::c_api::WatchBatch>>
      value;
  std::vector<std::size_t> page_bytes;      // FETCH of pages: [block * layers + layer].
  std::size_t layer_count = 0;              // FETCH.
  std::vector<std::uint8_t> tiers;          // LOOKUP.
  std::vector<std::string> block_messages;  // STORE, FETCH.

  // While it runs.
  std::shared_ptr<kvmill::c_api::Queue> queue;
  std::unique_ptr<kvmill::c_api::Inputs> inputs;
  kvmill_result* next = nullptr;  // In the queue.

  // Called once, by the thread that takes the event: what the accessors hand out pointers to.
  void Prepare();
};

struct kvmill_queue {
  std::shared_ptr<kvmill::c_api::Queue> queue;  // Shared with the operations that report to it.
};

struct kvmill_namespace {
  std::shared_ptr<const kvmill::c_api::NamespaceData> data;  // Shared with running operations.
};

struct kvmill_client {
  // Null: none. Of the client, which goes first, and of its mapped blocks. In a child of fork() it
  // is left alone.
  std::shared_ptr<kvmill::Device> device;
  std::unique_ptr<kvmill::Client> client;
  pid_t pid = 0;
};

#endif  // KVMILL_CLIENT_C_API_QUEUE_H_
