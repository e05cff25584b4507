#include "service/node_http.h"

#include <atomic>
#include <string>

#include "absl/strings/str_cat.h"
#include "service/metrics_names.h"
#include "service/tls_config.h"
#include "storage/core/log.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

absl::StatusOr<std::string> Scrape(const HttpServer::Asker& asker, const Callers& callers,
                                   const Metrics& metrics) {
  const absl::StatusOr<NamespaceNames> names = NamesFor(asker, *callers.identities());
  if (names.ok()) return metrics.Serialize(*names);
  LogInfo(absl::StrCat("a scrape is refused: ", names.status().message()), {{"peer", asker.host}});
  return names.status();
}

}  // namespace

NodeHttp::NodeHttp(const Config& config, const ServiceContext& context, const EventJournal& journal)
    : metrics_(context, &journal, static_cast<double>(context.clock.UnixMillis()) / 1000.0,
               [&config] { return CertificateEndsOf(config); }) {}

absl::StatusOr<std::unique_ptr<NodeHttp>> NodeHttp::Start(const Config& config,
                                                          const ServiceContext& context,
                                                          const EventJournal& journal) {
  KVMILL_ASSIGN_OR_RETURN(const HostPort address, ParseHostPort(config.metrics));
  std::unique_ptr<NodeHttp> http(new NodeHttp(config, context, journal));
  HttpServer::Handlers handlers;
  handlers.metrics = [&context, &metrics = http->metrics_](const HttpServer::Asker& asker) {
    return Scrape(asker, context.callers, metrics);
  };
  handlers.ready = [&context] { return !context.draining.load(std::memory_order_relaxed); };
  KVMILL_ASSIGN_OR_RETURN(http->server_, HttpServer::Start(address, handlers));
  return http;
}

}  // namespace kvmill
