// What goes from the scheduler to the workers and back, once a step.
#ifndef KVMILL_TESTS_ENGINE_PLAN_H_
#define KVMILL_TESTS_ENGINE_PLAN_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/engine/kv_model.h"
#include "tests/engine/shadow.h"

namespace kvmill::engine {

// Mistakes that the connector makes on request, one at a time: the shadow model must see each.
enum class Fault : std::uint8_t {
  kNone,
  kStoresBeforeComputing,
  kIgnoresLoadErrors,
  kLoadsOverSharedPages,
  kLoadsTheNextHead,
  kStoresRejectedTokens,
  kStoresAfterPreemption,
  kStoresDecodedPages,
  kReusesPagesUnasked,  // With StorePath::kPages: what was preempted is not flushed.
};
inline constexpr int kFaultCount = 9;

// How a load gets a block into the pages.
enum class LoadPath : std::uint8_t {
  kFetch,  // Over the wire, decoded as it comes.
  kMap,  // From the daemon's memory, decoded when the load is waited for: under leases until then.
};

// How the store gets at the values of a block.
enum class StorePath : std::uint8_t {
  kCopy,   // The client reads the pages and sends them; blocks of earlier steps.
  kPages,  // The daemon reads the pages: layer by layer, in the step that computes them.
};

struct EngineConfig {
  std::uint64_t seed = 1;
  ModelShape shape;
  Layout layout = Layout::kNhdApart;
  std::uint32_t ranks = 1;  // Tensor parallelism: 2 is two processes, each with half the heads.
  std::uint32_t page_count = 128;  // Of 16 tokens.
  LoadPath load_path = LoadPath::kFetch;
  StorePath store_path = StorePath::kCopy;
  std::uint64_t lease_ms = 10'000;  // Of mapped blocks.
  // Loads happen inside the step that needs them (true), or while the request waits (false).
  bool loads_in_step = false;
  // Saves end in the step that starts them (true), or run beside the next ones (false): then what a
  // lookup finds depends on the clock, too.
  bool saves_in_step = false;
  bool tails = false;  // Finished sequences leave their unfinished block, and later turns use it.
  std::uint32_t drafts = 3;  // Speculative tokens of a decode step, at most.
  std::uint32_t request_count = 24;
  std::uint32_t output_tokens_max = 40;
  std::uint32_t arrival_steps = 3;  // Between two requests, on average.
  std::uint32_t batch_tokens = 160;
  std::uint32_t chunk_tokens = 96;
  std::uint32_t batch_requests = 6;
  std::uint32_t abort_percent = 12;
  std::uint64_t lookup_ms = 10'000;  // Deadlines of the client's calls.
  std::uint64_t fetch_ms = 10'000;
  std::uint64_t store_ms = 10'000;
  std::string address;
  std::string namespace_name = "engine";
  Fault fault = Fault::kNone;
  std::uint64_t last_rank_dies_at = 0;  // Step in which its process is killed; 0: none.
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(EngineConfig, seed, shape, layout, ranks, page_count, load_path,
                                   store_path, lease_ms, loads_in_step, saves_in_step, tails,
                                   drafts, request_count, output_tokens_max, arrival_steps,
                                   batch_tokens, chunk_tokens, batch_requests, abort_percent,
                                   lookup_ms, fetch_ms, store_ms, address, namespace_name, fault,
                                   last_rank_dies_at)

// One block in the engine's pages.
struct BlockPages {
  std::uint32_t block_index = 0;
  std::uint64_t parent = 0;           // Prefix hash before the block; 0: none.
  std::vector<std::uint64_t> hashes;  // Of its tokens; fewer than block_tokens: a tail.
  std::vector<PageId> pages;          // The page of each 16 tokens.
  // Loads: pages[page_begin, page_end) take the block's tokens; the others are not to be touched.
  std::uint32_t page_begin = 0;
  std::uint32_t page_end = 0;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(BlockPages, block_index, parent, hashes, pages, page_begin,
                                   page_end)

// A load or a save. It runs on its own; at step `due` the worker waits for it, so that when it ends
// depends on the seed and not on the clock.
struct Order {
  std::uint64_t id = 0;
  std::uint64_t request = 0;
  std::uint64_t due = 0;
  std::vector<BlockPages> blocks;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Order, id, request, due, blocks)

// Tokens [begin, end) of a sequence are computed in this step, attending to all before.
struct Work {
  SequenceView sequence;
  std::uint32_t begin = 0;
  std::uint32_t end = 0;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Work, sequence, begin, end)

struct StepPlan {
  std::uint64_t step = 0;
  bool last = false;                     // The run ends after it: everything is checked.
  std::vector<std::uint64_t> preempted;  // Requests whose pages are given to others in this step.
  std::vector<std::uint64_t> aborted;    // Whose saves nobody needs any more.
  std::vector<Order> loads;
  std::vector<Order> saves;
  std::vector<Work> work;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(StepPlan, step, last, preempted, aborted, loads, saves, work)

struct ConnectorCounts {
  std::uint64_t loaded_blocks = 0, failed_loads = 0;
  std::uint64_t loaded_tails = 0;  // Of the loaded blocks.
  std::uint64_t stored_blocks = 0, existing_blocks = 0, partial_blocks = 0;
  std::uint64_t refused_blocks = 0;  // RESOURCE_EXHAUSTED.
  std::uint64_t failed_saves = 0;
  std::uint64_t calls_started = 0, calls_done = 0;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(ConnectorCounts, loaded_blocks, failed_loads, loaded_tails,
                                   stored_blocks, existing_blocks, partial_blocks, refused_blocks,
                                   failed_saves, calls_started, calls_done)

struct StepReport {
  std::vector<std::uint64_t> loaded;  // Orders that are over, well or badly.
  std::vector<std::uint64_t> saved;
  std::vector<PageId> failed_pages;     // Pages that a load should have filled and did not.
  std::uint64_t retry_after_ms = 0;     // The store is full: no saves for so long.
  std::vector<std::string> violations;  // What the shadow model found.
  ConnectorCounts counts;               // Of this worker, since its start.
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(StepReport, loaded, saved, failed_pages, retry_after_ms,
                                   violations, counts)

}  // namespace kvmill::engine

#endif  // KVMILL_TESTS_ENGINE_PLAN_H_
