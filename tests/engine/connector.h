// The connector between engine and store, in the two halves that vLLM's interface (v1) has. The
// names there:
//
//   here                     there                             when
//   SchedulerConnector
//     MatchedTokens          get_num_new_matched_tokens        a request wants to be scheduled
//     UpdateAfterAllocation  update_state_after_alloc          it got pages
//     BuildPlan              build_connector_meta              once a step
//     UpdateFromReport       update_connector_output           after the step
//     RequestFinished        request_finished                  true: its pages are still in use
//   WorkerConnector
//     constructor            register_kv_caches
//     HandlePreemptions      handle_preemptions                before anything is written
//     HandleAborts           (with it)
//     StartLoads             start_load_kv
//     WaitForLoads           wait_for_layer_load, all layers   before attention, loads in the step
//     StartSaves             save_kv_layer, all layers, or with Ready one after the other
//     GetFinished            get_finished, wait_for_save,      once a step
//                            get_block_ids_with_load_errors
//
// Rules that it keeps, whatever happens: pages that the engine already has are never written; what
// is stored was computed in an earlier step, from accepted tokens, and its pages stay until the
// store is done (with StorePath::kPages: what is computed in the step is stored in it, each layer
// when it is there; pages get another use after a flush, and a cancellation when the request was
// aborted); what was decoded from a tile is not encoded again; a lookup or fetch that fails is
// a miss; after RESOURCE_EXHAUSTED nothing is stored until the hint's time is over.
#ifndef KVMILL_TESTS_ENGINE_CONNECTOR_H_
#define KVMILL_TESTS_ENGINE_CONNECTOR_H_

#include <chrono>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <vector>

#include "client/client.h"
#include "client/kv_sink.h"
#include "storage/core/check.h"
#include "storage/core/mutex.h"
#include "tests/engine/plan.h"

namespace kvmill::engine {

// The result of one asynchronous call of the client, which must come exactly once.
template <typename T>
class Result {
 public:
  void Set(absl::StatusOr<T> result) {
    MutexLock lock(mu_);
    KVMILL_CHECK(!result_.has_value());
    result_ = std::move(result);
    set_.NotifyAll();
  }
  const absl::StatusOr<T>& Wait() {
    MutexLock lock(mu_);
    while (!result_.has_value()) set_.Wait(mu_);
    return *result_;
  }

 private:
  Mutex mu_;
  CondVar set_;
  std::optional<absl::StatusOr<T>> result_ ABSL_GUARDED_BY(mu_);
};

// What the scheduler knows of a request (scheduler.h has the rest).
struct RequestView {
  std::uint64_t id = 0;
  const std::vector<std::uint64_t>* hashes = nullptr;  // Of all tokens, accepted ones.
  // Of drafts whose K/V is in the pages behind `computed`, and which were rejected.
  const std::vector<std::uint64_t>* rejected = nullptr;
  const std::vector<PageId>* pages = nullptr;
  std::uint32_t computed = 0;   // Tokens whose K/V is in the pages for good.
  std::uint32_t scheduled = 0;  // The same after the step that is being planned.
};

class SchedulerConnector {
 public:
  SchedulerConnector(const EngineConfig& config, Client& client, const ClientNamespace& ns,
                     const PageTable& pages)
      : config_(config), client_(client), ns_(ns), pages_(pages), random_(config.seed * 77 + 1) {}
  ~SchedulerConnector();

  // Tokens that can be loaded behind the first `local_tokens`. Nothing: ask again next step.
  std::optional<std::uint32_t> MatchedTokens(const RequestView& request,
                                             std::uint32_t local_tokens);
  // `external_tokens` as matched; 0: nothing is loaded. Returns the order of the load, 0 for none.
  std::uint64_t UpdateAfterAllocation(const RequestView& request, std::uint32_t local_tokens,
                                      std::uint32_t external_tokens);
  // `running`: requests that keep their pages in this step.
  void BuildPlan(const std::vector<RequestView>& running, StepPlan* plan);
  // True: the pages of the request stay in use until it is no longer Busy().
  bool RequestFinished(const RequestView& request, bool aborted);
  void RequestPreempted(const RequestView& request);
  void UpdateFromReport(const StepReport& report);

  // Of the last MatchedTokens: found as a block; false: as the tail.
  bool IsWholeBlock(std::uint64_t request, std::uint32_t block) const {
    return block < states_.at(request).hit_blocks;
  }
  bool Busy(std::uint64_t request) const;  // Loads or saves of it are in flight.
  bool idle() const { return orders_.empty() && next_saves_.empty() && deferred_.empty(); }
  std::uint64_t failed_lookups() const { return failed_lookups_; }

 private:
  struct Lookup {
    std::vector<BlockKey> keys;
    std::vector<TailCandidate> tails;
    Result<LookupResult> result;
  };
  struct State {
    std::unique_ptr<Lookup> lookup;
    std::uint32_t tail_tokens = 0;  // Of the last lookup.
    std::uint32_t hit_blocks = 0;
    std::uint32_t saved_blocks = 0;  // Need not be saved any more.
  };
  BlockPages BlockOf(const RequestView& request, const std::vector<std::uint64_t>& hashes,
                     std::uint32_t block) const;
  void Save(std::uint64_t request, std::vector<BlockPages> blocks);
  // Full blocks up to `tokens` that were not saved yet.
  std::vector<BlockPages> UnsavedBlocks(const RequestView& request, std::uint32_t tokens,
                                        State* state) const;
  std::uint64_t DueStep(std::uint64_t extra) { return step_ + extra + random_() % 3; }
  bool Holding() const { return std::chrono::steady_clock::now() < no_saves_before_; }

  const EngineConfig config_;
  Client& client_;
  const ClientNamespace ns_;
  const PageTable& pages_;
  std::mt19937_64 random_;
  std::uint64_t step_ = 0;
  std::uint64_t next_order_ = 1;
  std::uint64_t no_lookups_before_ = 0;  // Step. After a failure the store is left alone a while.
  std::chrono::steady_clock::time_point no_saves_before_{};
  std::uint64_t failed_lookups_ = 0;
  std::map<std::uint64_t, State> states_;  // By request.
  std::vector<Order> next_loads_;
  std::vector<Order> next_saves_;
  std::vector<std::uint64_t> next_aborted_;
  std::vector<std::pair<std::uint64_t, Order>> deferred_;  // A planted fault: (step, order).
  struct Open {
    std::uint64_t request = 0;
    std::uint32_t reports_left = 0;  // Ranks that did not report it yet.
  };
  std::map<std::uint64_t, Open> orders_;
};

class WorkerConnector {
 public:
  // `rank` has heads [rank * memory.head_count(), ...).
  WorkerConnector(const EngineConfig& config, std::uint32_t rank, KvMemory& memory);
  ~WorkerConnector();

  // INVALID_ARGUMENT for a bad address. A daemon that is not there is none: see OpenNamespace.
  absl::Status Connect();

  // Returns when nobody reads or writes the pages of these requests.
  void HandlePreemptions(const std::vector<std::uint64_t>& requests);
  // They have saves that nobody needs.
  void HandleAborts(const std::vector<std::uint64_t>& requests);
  void StartLoads(const std::vector<Order>& orders);
  // Waits for all loads. Pages that they should have filled and did not.
  std::set<PageId> WaitForLoads();
  // `lost`: requests of which this step computes nothing, since a load failed.
  void StartSaves(const std::vector<Order>& orders, const std::set<std::uint64_t>& lost);
  // The values of the layers below are in the pages.
  void Ready(std::uint32_t layers);
  void WaitForSaves();
  // What is over, and what is due by this step, for which it waits.
  void GetFinished(const StepPlan& plan, StepReport* report);

 private:
  struct Load;
  struct SaveCall;
  // Tried again with every load and save until it worked: an engine does not wait for its cache.
  absl::Status OpenNamespace();
  absl::Status RegisterMemory();
  // Returns when the daemon reads no pages of the request: asks until it says so.
  void FreePages(std::uint64_t request);
  void CollectLoad(Load& load);
  void CollectSave(SaveCall& save);

  const EngineConfig config_;
  const std::uint32_t head_begin_;
  KvMemory& memory_;
  const NamespaceSpec spec_;
  std::unique_ptr<Client> client_;
  ClientNamespace ns_;
  std::uint64_t registration_ = 0;  // 0: none.
  std::list<Load> loads_;
  std::list<SaveCall> saves_;
  std::set<PageId> failed_pages_;
  std::uint64_t retry_after_ms_ = 0;
  ConnectorCounts counts_;
};

}  // namespace kvmill::engine

#endif  // KVMILL_TESTS_ENGINE_CONNECTOR_H_
