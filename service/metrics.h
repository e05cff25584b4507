// Prometheus metrics: every name, type, help text and source in one table (metrics.cc).
//
// Nothing is counted here: a scrape reads what the tiered store and the service counted, each at
// the place where it was decided.
#ifndef KVMILL_SERVICE_METRICS_H_
#define KVMILL_SERVICE_METRICS_H_

#include <prometheus/collectable.h>

#include <string>
#include <vector>

#include "service/service_context.h"

namespace kvmill {

// Thread-safe. `context` must outlive it.
class Metrics final : public prometheus::Collectable {
 public:
  Metrics(const ServiceContext& context, double start_unix_seconds)
      : context_(context), start_unix_seconds_(start_unix_seconds) {}

  std::vector<prometheus::MetricFamily> Collect() const override;
  // In the text exposition format.
  std::string Serialize() const;

 private:
  const ServiceContext& context_;
  const double start_unix_seconds_;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_METRICS_H_
