// Prometheus metrics: every name, type, help text, labels and source in one table (metrics.cc).
// docs/metrics.md is that table, printed.
//
// Nothing is counted here: a scrape reads what the tiered store and the service counted, each at
// the place where it was decided.
#ifndef KVMILL_SERVICE_METRICS_H_
#define KVMILL_SERVICE_METRICS_H_

#include <prometheus/metric_family.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "service/service_context.h"

namespace kvmill {

class EventJournal;

// Namespaces are named after tenants' models. Who may not see names (metrics_names.h) sees one
// histogram over all of them (docs/decisions/0040-what-metrics-show.md).
enum class NamespaceNames { kShown, kLeftOut };

// Thread-safe. What it is given must outlive it.
class Metrics {
 public:
  struct CertificateEnd {
    const char* certificate = "";  // Of which connections: node, etcd.
    std::int64_t unix_seconds = 0;
  };
  using CertificateEnds = std::function<std::vector<CertificateEnd>()>;

  // `certificate_ends`: of those in use.
  Metrics(const ServiceContext& context, const EventJournal* events, double start_unix_seconds,
          CertificateEnds certificate_ends)
      : context_(context),
        events_(events),
        start_unix_seconds_(start_unix_seconds),
        certificate_ends_(std::move(certificate_ends)) {}

  std::vector<prometheus::MetricFamily> Collect(NamespaceNames names) const;
  // In the text exposition format.
  std::string Serialize(NamespaceNames names) const;

 private:
  const ServiceContext& context_;
  const EventJournal* const events_;
  const double start_unix_seconds_;
  const CertificateEnds certificate_ends_;
};

struct MetricInfo {
  std::string name;  // With prefix.
  const char* type = "";
  const char* labels = "";  // Separated by spaces.
  const char* help = "";
};
// Every family, in the order of /metrics.
std::vector<MetricInfo> MetricInfos();
// docs/metrics.md.
std::string MetricsReference();

}  // namespace kvmill

#endif  // KVMILL_SERVICE_METRICS_H_
