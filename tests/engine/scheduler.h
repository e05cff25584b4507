// Continuous batching over paged K/V: chunked prefill, decode steps with speculative tokens,
// preemption, abort; requests from a seed. It decides, workers do.
#ifndef KVMILL_TESTS_ENGINE_SCHEDULER_H_
#define KVMILL_TESTS_ENGINE_SCHEDULER_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "tests/engine/connector.h"
#include "tests/engine/kv_memory.h"
#include "tests/engine/plan.h"
#include "tests/engine/shadow.h"

namespace kvmill::engine {

struct Request {
  std::uint64_t id = 0;
  std::vector<std::uint32_t> prompt;
  std::uint32_t output_tokens = 0;  // That it wants.
  std::uint64_t arrival = 0;        // Step.
  std::uint64_t abort = 0;          // Step; 0: it runs to its end.
};

// The requests of a seed, by arrival: shared system prompts, repeated prompts, and with `tails`
// conversations, in which each turn begins with all of the turns before, and pairs of them that go
// on differently after the same block.
std::vector<Request> MakeRequests(const EngineConfig& config);

struct SchedulerCounts {
  std::uint64_t finished = 0, aborted = 0, preempted = 0;
  std::uint64_t computed_tokens = 0, local_tokens = 0, external_tokens = 0;
  std::uint64_t recomputed_loads = 0;  // Requests that lost part of a load and computed it.
  std::uint64_t accepted_drafts = 0, rejected_drafts = 0;
};

class Scheduler {
 public:
  // `store` learns what may be stored.
  Scheduler(const EngineConfig& config, Client& client, const ClientNamespace& ns,
            StoreModel* store);

  // What the workers do in the next step.
  StepPlan Schedule();
  // One report of each rank, of the step that Schedule() gave last.
  void Apply(const std::vector<StepReport>& reports);
  // Nothing is left, neither requests nor loads and saves.
  bool done() const;
  const SchedulerCounts& counts() const { return counts_; }
  std::uint64_t failed_lookups() const { return connector_.failed_lookups(); }
  // Pages without users; all of them when done.
  std::size_t free_pages() const { return pages_.free_count(); }

 private:
  struct Sequence {
    Request request;
    std::vector<std::uint64_t> hashes;  // Of the accepted tokens.
    std::vector<PageId> pages;
    std::uint32_t length_max = 0;
    std::uint32_t computed = 0;
    std::uint32_t cached_pages = 0;  // In the prefix cache, or tried.
    std::uint32_t allowed_blocks = 0;
    // Of the step in flight.
    std::uint32_t scheduled = 0;  // Tokens, drafts included.
    std::vector<std::uint64_t> drafts;
    std::vector<std::uint64_t> rejected;
    // Of a load in flight.
    std::uint64_t load_order = 0;
    std::uint32_t load_begin = 0, load_end = 0;
    std::vector<std::uint64_t> load_sources;  // Per page from load_begin / kPageTokens.
    std::set<PageId> load_failed;
  };
  using SequencePtr = std::unique_ptr<Sequence>;

  RequestView ViewOf(const Sequence& s) const;
  SequenceView SequenceOf(const Sequence& s) const;
  void Arrive();
  void Abort();
  void ScheduleRunning(StepPlan* plan);
  void ScheduleWaiting(StepPlan* plan);
  // False: it could not start in this step.
  bool Start(SequencePtr& s, StepPlan* plan);
  void AddWork(Sequence& s, std::uint32_t token_count, StepPlan* plan);
  void Propose(Sequence& s);
  bool Grow(Sequence& s, std::uint32_t token_count);
  void Preempt(StepPlan* plan);  // The last running one.
  void EndLoad(Sequence& s);
  void FinishWork(Sequence& s);
  void Finish(SequencePtr s, bool aborted);
  void CachePages(Sequence& s);
  void FreePages(std::vector<PageId> pages);

  const EngineConfig config_;
  StoreModel* const store_;
  PageTable pages_;
  SchedulerConnector connector_;
  std::mt19937_64 random_;
  std::uint64_t step_ = 0;
  std::uint32_t budget_ = 0;
  std::deque<Request> future_;
  std::deque<SequencePtr> waiting_;
  std::vector<SequencePtr> running_;
  std::vector<SequencePtr> loading_;
  std::vector<SequencePtr> leaving_;  // Over, but the connector still uses their pages.
  SchedulerCounts counts_;
};

}  // namespace kvmill::engine

#endif  // KVMILL_TESTS_ENGINE_SCHEDULER_H_
