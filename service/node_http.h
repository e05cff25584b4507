// What a daemon answers on --metrics: its metrics, with names for those who may see them, and
// whether it is ready.
//
// For node.cc. Paths and the server are in http_server.h, who sees names in metrics_names.h, every
// metric in metrics.cc; here they are joined.
#ifndef KVMILL_SERVICE_NODE_HTTP_H_
#define KVMILL_SERVICE_NODE_HTTP_H_

#include <memory>

#include "absl/status/statusor.h"
#include "client/server_address.h"
#include "service/config.h"
#include "service/event_journal.h"
#include "service/http_server.h"
#include "service/metrics.h"
#include "service/service_context.h"

namespace kvmill {

class NodeHttp {
 public:
  // `config` has `metrics`. All outlive it. Errors of HttpServer::Start.
  static absl::StatusOr<std::unique_ptr<NodeHttp>> Start(const Config& config,
                                                         const ServiceContext& context,
                                                         const EventJournal& journal);

  // With the real port.
  const HostPort& address() const { return server_->address(); }

 private:
  NodeHttp(const Config& config, const ServiceContext& context, const EventJournal& journal);

  const Metrics metrics_;
  std::unique_ptr<HttpServer> server_;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_NODE_HTTP_H_
