// One watch: one stream to one server, until it breaks. On the loop only.
#ifndef KVMILL_SERVICE_ETCD_ETCD_WATCH_H_
#define KVMILL_SERVICE_ETCD_ETCD_WATCH_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "service/cluster/loop.h"
#include "service/cluster/registry.h"
#include "service/etcd/etcd_servers.h"
#include "service/etcd/etcd_stream.h"
#include "service/etcd/loop_inbox.h"

namespace kvmill {

// The first key that does not begin with `prefix`; a zero byte, etcd's word for "to the end", when
// every later one does.
std::string EndOfPrefix(std::string prefix);

class EtcdWatch : public std::enable_shared_from_this<EtcdWatch> {
 public:
  struct Options {
    std::string prefix;
    Registry::Revision from_revision = 0;
    std::int64_t silence_nanos = 0;
    Registry::WatchCalls calls;
  };
  EtcdWatch(Loop& loop, std::shared_ptr<LoopInbox> inbox, Options options);
  ~EtcdWatch() { Stop(); }

  // Runs just before the end is told: why (OK for `compacted`).
  using Ended = std::function<void(const absl::Status& why)>;
  void OnEnd(Ended ended) { ended_ = std::move(ended); }

  // The silence counts from here on. Once, before Open.
  void Begin();
  void Open(EtcdServer& server, std::shared_ptr<grpc::ClientContext> context);
  // Tells `why` as its end, unless it has ended.
  void Break(const absl::Status& why);
  // It tells nothing any more.
  void Stop();

 private:
  using Stream = EtcdStream<etcdserverpb::WatchRequest, etcdserverpb::WatchResponse>;
  using Calls = std::shared_ptr<const Registry::WatchCalls>;

  void Heard();
  void AskForProgress();
  void Read(bool ok);
  // False when the watch ended by it.
  bool Handle(const etcdserverpb::WatchResponse& response);
  void Deliver(const etcdserverpb::WatchResponse& response);
  Calls EndedBy(const absl::Status& why);

  Loop& loop_;
  const std::shared_ptr<LoopInbox> inbox_;
  const std::string prefix_;
  const std::int64_t silence_nanos_;
  Registry::Revision next_revision_;  // Of the next event: earlier ones are known.
  Calls calls_;  // Null: it ended. Whoever calls one holds all: the call may end the watch.
  Ended ended_;
  std::string server_;
  std::shared_ptr<Stream> stream_;
  Loop::TimerId silence_timer_ = 0;
  Loop::TimerId progress_timer_ = 0;
  bool started_ = false;
  bool writing_ = false;
  std::uint64_t cluster_id_ = 0;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_ETCD_ETCD_WATCH_H_
