// A reference engine: the scheduler and memory side of an LLM engine, without the model.
//
// It does what an engine does to a KV store, and knows at every moment what every byte must be:
//
//   kv_model    K and V as a pure function of (prefix hash of the token, layer, head, channel)
//   kv_memory   paged K/V in five layouts with strides and padding; reference-counted pages with a
//               prefix cache
//   scheduler   continuous batching: chunked prefill, decode steps, speculative tokens, preemption,
//               abort
//   connector   between the two and client/client.h, cut as vLLM's connector interface cuts it; the
//               only file here that calls the client for loads, saves and lookups
//   worker      one tensor-parallel rank: memory, connector, and the shadow's checks; in this
//               process, or one process a rank
//   shadow      what every page must hold and what may be in the store
//
// A run is a sequence of steps. The scheduler plans one (plan.h), the workers start its loads and
// saves, check every page that attention would read, write the tokens that are computed, and report
// what finished. Loads and saves really run beside the steps; each is waited for at a step that the
// seed chose. With saves_in_step a run repeats itself exactly.
//
// A new way to reach the daemon (map, shared memory, another transport) is tried by changing
// WorkerConnector alone. The planted faults (plan.h: Fault) show that the shadow sees what it
// should.
#ifndef KVMILL_TESTS_ENGINE_ENGINE_H_
#define KVMILL_TESTS_ENGINE_ENGINE_H_

#include <functional>
#include <string>
#include <vector>

#include "tests/engine/plan.h"
#include "tests/engine/scheduler.h"
#include "tests/engine/shadow.h"

namespace kvmill::engine {

struct EngineReport {
  std::vector<std::string> violations;  // Of the shadow model, of rank 0 first.
  std::string error;                    // Not empty: the run broke off.
  std::uint64_t steps = 0;
  std::uint64_t failed_lookups = 0;
  std::uint64_t free_pages = 0;  // At the end: all of them.
  SchedulerCounts scheduler;
  ConnectorCounts connector;  // Summed over the ranks.
};

// Called before the workers run a step, and while the loads that the step starts are planned but
// not begun: here tests do to the daemon what they want to see survived.
using OnStep = std::function<void(std::uint64_t step, std::uint64_t loads_planned)>;

// Runs all requests of `config` to their end. `store` outlives it: what may be in the store stays
// there. `worker_binary`: engine_worker, for ranks > 1.
EngineReport RunEngine(const EngineConfig& config, const std::string& worker_binary,
                       StoreModel* store, const OnStep& on_step = nullptr);

// One line, for people.
std::string Describe(const EngineReport& report);

}  // namespace kvmill::engine

#endif  // KVMILL_TESTS_ENGINE_ENGINE_H_
