#include "tests/engine/engine.h"

#include <memory>

#include "absl/strings/str_cat.h"
#include "tests/engine/worker.h"

namespace kvmill::engine {
namespace {

// A run ends by itself long before; one that does not is a fault of the engine.
constexpr std::uint64_t kStepsMax = 20'000;

void Add(const ConnectorCounts& part, ConnectorCounts* sum) {
  sum->loaded_blocks += part.loaded_blocks;
  sum->failed_loads += part.failed_loads;
  sum->loaded_tails += part.loaded_tails;
  sum->stored_blocks += part.stored_blocks;
  sum->existing_blocks += part.existing_blocks;
  sum->partial_blocks += part.partial_blocks;
  sum->refused_blocks += part.refused_blocks;
  sum->failed_saves += part.failed_saves;
  sum->calls_started += part.calls_started;
  sum->calls_done += part.calls_done;
}

}  // namespace

EngineReport RunEngine(const EngineConfig& config, const std::string& worker_binary,
                       StoreModel* store, const OnStep& on_step) {
  EngineReport report;
  const auto broke_off = [&report](const absl::Status& status) {
    report.error = absl::StrCat("step ", report.steps, ": ", status.ToString());
    return report;
  };
  Client::Options options;
  options.address = config.address;
  const absl::StatusOr<std::unique_ptr<Client>> client = Client::Create(options);
  if (!client.ok()) return broke_off(client.status());
  const absl::StatusOr<ClientNamespace> ns =
      (*client)->OpenNamespace(config.namespace_name, SpecOf(config.shape));
  if (!ns.ok()) return broke_off(ns.status());

  std::vector<std::unique_ptr<Worker>> workers;
  for (std::uint32_t rank = 0; rank < config.ranks; ++rank) {
    if (config.ranks > 1) {
      workers.push_back(std::make_unique<ProcessWorker>(worker_binary, config, rank));
      continue;
    }
    auto worker = std::make_unique<LocalWorker>(config, rank);
    if (absl::Status connected = worker->Connect(); !connected.ok()) return broke_off(connected);
    workers.push_back(std::move(worker));
  }

  Scheduler scheduler(config, **client, *ns, store);
  for (bool last = false; !last;) {
    last = scheduler.done();
    StepPlan plan = scheduler.Schedule();
    plan.last = last;
    report.steps = plan.step;
    if (on_step != nullptr) on_step(plan.step, plan.loads.size());
    for (const auto& worker : workers) {
      if (absl::Status sent = worker->StartStep(plan); !sent.ok()) return broke_off(sent);
    }
    std::vector<StepReport> reports;
    for (const auto& worker : workers) {
      absl::StatusOr<StepReport> step = worker->FinishStep();
      if (!step.ok()) return broke_off(step.status());
      for (const std::string& wrong : step->violations) {
        report.violations.push_back(absl::StrCat("step ", plan.step, ": ", wrong));
      }
      reports.push_back(*std::move(step));
    }
    scheduler.Apply(reports);
    if (last) {
      for (const StepReport& step : reports) Add(step.counts, &report.connector);
    }
    if (plan.step == kStepsMax) return broke_off(absl::DeadlineExceededError("it does not end"));
  }
  report.failed_lookups = scheduler.failed_lookups();
  report.free_pages = scheduler.free_pages();
  report.scheduler = scheduler.counts();
  return report;
}

std::string Describe(const EngineReport& r) {
  return absl::StrCat(
      r.steps, " steps, ", r.scheduler.finished, " requests finished, ", r.scheduler.aborted,
      " aborted, ", r.scheduler.preempted, " preemptions; tokens: ", r.scheduler.computed_tokens,
      " computed, ", r.scheduler.local_tokens, " from the prefix cache, ",
      r.scheduler.external_tokens, " from the store; blocks: ", r.connector.stored_blocks,
      " stored, ", r.connector.existing_blocks, " existing, ", r.connector.partial_blocks,
      " partial, ", r.connector.refused_blocks, " refused, ", r.connector.failed_saves,
      " saves failed, ", r.connector.loaded_blocks, " loaded, ", r.connector.failed_loads,
      " loads failed (", r.scheduler.recomputed_loads,
      " requests recomputed); drafts: ", r.scheduler.accepted_drafts, " accepted, ",
      r.scheduler.rejected_drafts, " rejected; ", r.failed_lookups, " lookups failed");
}

}  // namespace kvmill::engine
