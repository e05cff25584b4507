#include "tests/engine/connector.h"

#include <algorithm>

#include "absl/time/time.h"
#include "client/mapped_blocks.h"
#include "storage/core/status_macros.h"

namespace kvmill::engine {

// --- Scheduler side ---

SchedulerConnector::~SchedulerConnector() {
  for (auto& [request, state] : states_) {
    if (state.lookup != nullptr) state.lookup->result.Wait();
  }
}

BlockPages SchedulerConnector::BlockOf(const RequestView& request,
                                       const std::vector<std::uint64_t>& hashes,
                                       std::uint32_t block) const {
  const std::uint32_t begin = block * config_.shape.block_tokens;
  const std::uint32_t end = std::min<std::uint32_t>(begin + config_.shape.block_tokens,
                                                    static_cast<std::uint32_t>(hashes.size()));
  BlockPages out;
  out.block_index = block;
  out.parent = begin == 0 ? 0 : hashes[begin - 1];
  out.hashes.assign(hashes.begin() + begin, hashes.begin() + end);
  for (std::uint32_t token = begin; token < end; token += kPageTokens) {
    const std::uint32_t page = token / kPageTokens;
    if (page < request.pages->size()) out.pages.push_back((*request.pages)[page]);
  }
  return out;
}

std::optional<std::uint32_t> SchedulerConnector::MatchedTokens(const RequestView& request,
                                                               std::uint32_t local_tokens) {
  State& state = states_[request.id];
  const std::uint32_t block_tokens = config_.shape.block_tokens;
  const auto known = static_cast<std::uint32_t>(request.hashes->size());
  if (state.lookup == nullptr) {
    if (step_ < no_lookups_before_) return 0;
    state.lookup = std::make_unique<Lookup>();
    for (std::uint32_t end = block_tokens; end <= known; end += block_tokens) {
      state.lookup->keys.push_back(KeyOf((*request.hashes)[end - 1]));
    }
    // Where in the sequence others stopped is not known: every token could be a tail's last.
    for (std::uint32_t end = config_.tails ? known : 0; end > 0; --end) {
      if (state.lookup->tails.size() == kTailCandidatesMax) break;
      if (end % block_tokens == 0) continue;
      state.lookup->tails.push_back(
          {KeyOf((*request.hashes)[end - 1]), end % block_tokens, end / block_tokens});
    }
    CallOptions call;
    call.timeout = absl::Milliseconds(config_.lookup_ms);
    client_.LookupAsync(ns_, state.lookup->keys, state.lookup->tails, call,
                        [lookup = state.lookup.get()](absl::StatusOr<LookupResult> result) {
                          lookup->result.Set(std::move(result));
                        });
    return std::nullopt;
  }
  const absl::StatusOr<LookupResult> found = state.lookup->result.Wait();
  state.lookup.reset();
  if (!found.ok()) {
    ++failed_lookups_;
    no_lookups_before_ = step_ + 4;
    return 0;
  }
  KVMILL_CHECK(found->hit_blocks * block_tokens + found->tail_tokens <= known);
  state.hit_blocks = found->hit_blocks;
  state.saved_blocks = std::max(state.saved_blocks, found->hit_blocks);
  state.tail_tokens = found->tail_tokens;
  // The last known token is always computed, since it gives the next one. Of a tile, whole pages
  // are taken: a page is computed or decoded, not both.
  std::uint32_t tokens = found->hit_blocks * block_tokens;
  if (tokens >= known) tokens = (known - 1) / kPageTokens * kPageTokens;
  if (found->tail_tokens > 0 && tokens == found->hit_blocks * block_tokens) {
    tokens = std::min(tokens + found->tail_tokens, known - 1);
  }
  return tokens > local_tokens ? tokens - local_tokens : 0;
}

std::uint64_t SchedulerConnector::UpdateAfterAllocation(const RequestView& request,
                                                        std::uint32_t local_tokens,
                                                        std::uint32_t external_tokens) {
  if (external_tokens == 0) return 0;
  const State& state = states_[request.id];
  const std::uint32_t block_tokens = config_.shape.block_tokens;
  const std::uint32_t end = local_tokens + external_tokens;
  Order order;
  order.id = next_order_++;
  order.request = request.id;
  order.due = config_.loads_in_step ? step_ + 1 : DueStep(1);
  for (std::uint32_t block = local_tokens / block_tokens; block * block_tokens < end; ++block) {
    std::vector<std::uint64_t> hashes = *request.hashes;
    if (block >= state.hit_blocks) hashes.resize(block * block_tokens + state.tail_tokens);
    BlockPages pages = BlockOf(request, hashes, block);
    const std::uint32_t first = block * block_tokens;
    pages.page_begin = local_tokens <= first ? 0 : (local_tokens - first) / kPageTokens;
    pages.page_end = std::min<std::uint32_t>(static_cast<std::uint32_t>(pages.pages.size()),
                                             (end - first + kPageTokens - 1) / kPageTokens);
    if (config_.fault == Fault::kLoadsOverSharedPages) pages.page_begin = 0;
    order.blocks.push_back(std::move(pages));
  }
  orders_[order.id] = {request.id, config_.ranks};
  next_loads_.push_back(std::move(order));
  return next_order_ - 1;
}

std::vector<BlockPages> SchedulerConnector::UnsavedBlocks(const RequestView& request,
                                                          std::uint32_t tokens,
                                                          State* state) const {
  std::vector<std::uint64_t> hashes = *request.hashes;
  if (config_.fault == Fault::kStoresRejectedTokens && !request.rejected->empty()) {
    hashes.resize(request.computed);
    hashes.insert(hashes.end(), request.rejected->begin(), request.rejected->end());
  }
  std::vector<BlockPages> blocks;
  const std::uint32_t block_tokens = config_.shape.block_tokens;
  for (; (state->saved_blocks + 1) * block_tokens <= tokens; ++state->saved_blocks) {
    BlockPages block = BlockOf(request, hashes, state->saved_blocks);
    const bool decoded = std::any_of(block.pages.begin(), block.pages.end(),
                                     [this](PageId page) { return pages_.source(page) != 0; });
    if (!decoded || config_.fault == Fault::kStoresDecodedPages) blocks.push_back(std::move(block));
  }
  return blocks;
}

void SchedulerConnector::Save(std::uint64_t request, std::vector<BlockPages> blocks) {
  if (blocks.empty()) return;
  Order order;
  order.id = next_order_++;
  order.request = request;
  order.due = config_.saves_in_step ? 0 : DueStep(0);
  order.blocks = std::move(blocks);
  orders_[order.id] = {request, config_.ranks};
  next_saves_.push_back(std::move(order));
}

void SchedulerConnector::BuildPlan(const std::vector<RequestView>& running, StepPlan* plan) {
  step_ = plan->step;
  for (const RequestView& request : running) {
    if (Holding() || config_.fault == Fault::kStoresAfterPreemption) break;
    std::uint32_t tokens = request.computed;
    if (config_.fault == Fault::kStoresBeforeComputing || config_.store_path == StorePath::kPages) {
      tokens = request.scheduled;
    }
    if (config_.fault == Fault::kStoresRejectedTokens) {
      tokens += static_cast<std::uint32_t>(request.rejected->size());
    }
    Save(request.id, UnsavedBlocks(request, tokens, &states_[request.id]));
  }
  for (std::size_t i = 0; i < deferred_.size();) {
    if (deferred_[i].first > step_) {
      ++i;
      continue;
    }
    next_saves_.push_back(std::move(deferred_[i].second));
    deferred_.erase(deferred_.begin() + static_cast<std::ptrdiff_t>(i));
  }
  plan->loads = std::move(next_loads_);
  plan->saves = std::move(next_saves_);
  plan->aborted = std::exchange(next_aborted_, {});
  next_loads_.clear();
  next_saves_.clear();
}

bool SchedulerConnector::RequestFinished(const RequestView& request, bool aborted) {
  if (aborted && Busy(request.id)) next_aborted_.push_back(request.id);
  if (!aborted && !Holding() && config_.fault != Fault::kStoresAfterPreemption) {
    State& state = states_[request.id];
    std::vector<BlockPages> blocks = UnsavedBlocks(request, request.computed, &state);
    const std::uint32_t tail_begin =
        request.computed / config_.shape.block_tokens * config_.shape.block_tokens;
    if (config_.tails && request.computed > tail_begin) {
      std::vector<std::uint64_t> hashes(request.hashes->begin(),
                                        request.hashes->begin() + request.computed);
      BlockPages tail = BlockOf(request, hashes, tail_begin / config_.shape.block_tokens);
      const bool decoded = std::any_of(tail.pages.begin(), tail.pages.end(),
                                       [this](PageId page) { return pages_.source(page) != 0; });
      if (!decoded) blocks.push_back(std::move(tail));
    }
    Save(request.id, std::move(blocks));
  }
  if (const auto it = states_.find(request.id); it != states_.end()) {
    if (it->second.lookup != nullptr) it->second.lookup->result.Wait();
    states_.erase(it);
  }
  return Busy(request.id);
}

void SchedulerConnector::RequestPreempted(const RequestView& request) {
  State& state = states_[request.id];
  if (config_.fault == Fault::kStoresAfterPreemption) {
    state.saved_blocks = 0;
    Order order;
    order.id = next_order_++;
    order.request = request.id;
    order.due = step_ + 4;
    order.blocks = UnsavedBlocks(request, request.computed, &state);
    if (!order.blocks.empty()) {
      orders_[order.id] = {request.id, config_.ranks};
      deferred_.emplace_back(step_ + 2, std::move(order));
    }
  }
  // When it comes back, the store may know more or less of it.
  state.saved_blocks = 0;
  state.hit_blocks = state.tail_tokens = 0;
}

void SchedulerConnector::UpdateFromReport(const StepReport& report) {
  for (const auto* finished : {&report.loaded, &report.saved}) {
    for (const std::uint64_t id : *finished) {
      const auto it = orders_.find(id);
      KVMILL_CHECK(it != orders_.end());
      if (--it->second.reports_left == 0) orders_.erase(it);
    }
  }
  if (report.retry_after_ms > 0) {
    no_saves_before_ =
        std::chrono::steady_clock::now() + std::chrono::milliseconds(report.retry_after_ms);
  }
}

bool SchedulerConnector::Busy(std::uint64_t request) const {
  return std::any_of(orders_.begin(), orders_.end(),
                     [request](const auto& order) { return order.second.request == request; });
}

// --- Worker side ---

// A fetch or a map of some blocks, and the sink that decodes this rank's heads into the pages.
struct WorkerConnector::Load : FetchSink {
  Load(const Order& o, WorkerConnector& connector) : order(o), owner(connector) {
    KvMemory& memory = owner.memory_;
    unwanted.resize(memory.page_bytes());
    const std::uint32_t layers = owner.config_.shape.layers;
    for (const BlockPages& block : order.blocks) {
      keys.push_back(block.hashes.size() == owner.config_.shape.block_tokens
                         ? KeyOf(block.hashes.back())
                         : TailKey(block.parent == 0 ? BlockKey() : KeyOf(block.parent),
                                   static_cast<std::uint32_t>(block.hashes.size()),
                                   KeyOf(block.hashes.back())));
      const std::size_t pages_in_block = (block.hashes.size() + kPageTokens - 1) / kPageTokens;
      for (std::uint32_t layer = 0; layer < layers; ++layer) {
        for (const bool value : {false, true}) {
          std::vector<std::byte*>& list = lists.emplace_back();
          for (std::uint32_t page = 0; page < pages_in_block; ++page) {
            const bool wanted = page >= block.page_begin && page < block.page_end;
            list.push_back(wanted ? memory.Page(layer, value, block.pages[page])
                                  : memory.InPage(unwanted.data(), layer, value));
          }
        }
      }
    }
  }

  absl::Status OnPage(const PageId& id, const PageView& page) override {
    const std::size_t first = 2 * (id.block * owner.config_.shape.layers + id.layer_index);
    LayerOutput out;
    for (MutableKvView* view : {&out.k, &out.v}) {
      view->pages = lists[first + (view == &out.v ? 1 : 0)].data();
      view->page_tokens = kPageTokens;
      view->token_stride_bytes = owner.memory_.token_stride_bytes();
      view->head_stride_bytes = owner.memory_.head_stride_bytes();
    }
    std::uint32_t head_begin = owner.head_begin_;
    if (owner.config_.fault == Fault::kLoadsTheNextHead &&
        head_begin + owner.memory_.head_count() < page.head_count()) {
      ++head_begin;
    }
    return DecodePage(page, Frame::kModel, head_begin, owner.memory_.head_count(), out, &scratch);
  }

  // One mapped block, read in place; what was read counts when the lease held until the end.
  absl::Status Read(const MappedBlocks& blocks, std::uint32_t block) {
    KVMILL_RETURN_IF_ERROR(blocks.status(block));
    for (std::uint32_t layer = 0; layer < owner.config_.shape.layers; ++layer) {
      KVMILL_ASSIGN_OR_RETURN(const PageView page, blocks.Page(block, 0, layer));
      KVMILL_RETURN_IF_ERROR(OnPage({.block = block, .layer_index = layer}, page));
    }
    return blocks.Check(block, 1);
  }

  // What came of the call: the tokens of each block, or why there are none.
  using Tokens = std::vector<absl::StatusOr<std::uint32_t>>;
  Tokens Wait() {
    Tokens tokens;
    if (owner.config_.load_path == LoadPath::kFetch) {
      const absl::StatusOr<FetchResult>& fetched = result.Wait();
      if (!fetched.ok()) return Tokens(keys.size(), fetched.status());
      for (const FetchBlockResult& block : fetched->blocks) {
        if (block.status.ok()) {
          tokens.emplace_back(block.token_count);
        } else {
          tokens.emplace_back(block.status);
        }
      }
      return tokens;
    }
    const auto& blocks = mapped.Wait();
    if (!blocks.ok()) return Tokens(keys.size(), blocks.status());
    for (std::uint32_t block = 0; block < keys.size(); ++block) {
      const absl::Status read = Read(**blocks, block);
      if (read.ok()) {
        tokens.emplace_back((*blocks)->token_count(block));
      } else {
        tokens.emplace_back(read);
      }
    }
    return tokens;
  }

  const Order order;
  WorkerConnector& owner;
  std::vector<BlockKey> keys;
  std::vector<std::vector<std::byte*>> lists;  // [block][layer][K, V]: a pointer for each page.
  std::vector<std::byte> unwanted;
  std::vector<std::byte> scratch;
  Result<FetchResult> result;        // LoadPath::kFetch.
  Result<Client::MappedPtr> mapped;  // LoadPath::kMap.
  bool collected = false;
};

struct WorkerConnector::SaveCall {
  SaveCall(const Order& o, WorkerConnector& connector) : order(o) {
    if (connector.config_.store_path == StorePath::kPages) {
      NamePages();
    } else {
      View(connector);
    }
  }

  // For Store.
  void View(WorkerConnector& connector) {
    KvMemory& memory = connector.memory_;
    const std::uint32_t layers = connector.config_.shape.layers;
    // Both lists are sized first: the blocks point into them.
    lists.reserve(order.blocks.size() * layers * 2);
    inputs.resize(order.blocks.size() * layers);
    for (std::size_t b = 0; b < order.blocks.size(); ++b) {
      const BlockPages& pages = order.blocks[b];
      for (std::uint32_t layer = 0; layer < layers; ++layer) {
        LayerInput& input = inputs[b * layers + layer];
        for (const bool value : {false, true}) {
          std::vector<const std::byte*>& list = lists.emplace_back();
          for (const PageId page : pages.pages) list.push_back(memory.Page(layer, value, page));
          KvView& view = value ? input.v : input.k;
          view.pages = list.data();
          view.page_tokens = kPageTokens;
          view.token_stride_bytes = memory.token_stride_bytes();
          view.head_stride_bytes = memory.head_stride_bytes();
        }
      }
      StoreBlock& block = blocks.emplace_back();
      Name(pages, &block);
      block.layers = absl::MakeConstSpan(&inputs[b * layers], layers);
    }
  }

  // For StorePages.
  void NamePages() {
    numbers.resize(order.blocks.size());
    page_lists.resize(order.blocks.size());
    for (std::size_t b = 0; b < order.blocks.size(); ++b) {
      const BlockPages& pages = order.blocks[b];
      numbers[b].assign(pages.pages.begin(), pages.pages.end());
      page_lists[b] = numbers[b];
      PageBlock& block = page_blocks.emplace_back();
      Name(pages, &block);
      block.pages = absl::MakeConstSpan(&page_lists[b], 1);
    }
  }

  template <typename Block>
  static void Name(const BlockPages& pages, Block* block) {
    block->key = KeyOf(pages.hashes.back());
    if (pages.parent != 0) block->parent = KeyOf(pages.parent);
    block->token_count = static_cast<std::uint32_t>(pages.hashes.size());
    block->block_index = pages.block_index;
  }

  const Order order;
  std::vector<std::vector<const std::byte*>> lists;
  std::vector<LayerInput> inputs;
  std::vector<StoreBlock> blocks;
  std::vector<std::vector<std::uint64_t>> numbers;
  std::vector<PageNumbers> page_lists;
  std::vector<PageBlock> page_blocks;
  Result<StoreResult> result;
  bool collected = false;
};

WorkerConnector::WorkerConnector(const EngineConfig& config, std::uint32_t rank, KvMemory& memory)
    : config_(config),
      head_begin_(rank * memory.head_count()),
      memory_(memory),
      spec_(SpecOf(config.shape)) {}

WorkerConnector::~WorkerConnector() {
  for (Load& load : loads_) load.Wait();
  client_.reset();  // Ends what still runs.
  for (SaveCall& save : saves_) save.result.Wait();
}

absl::Status WorkerConnector::Connect() {
  Client::Options options;
  options.address = config_.address;
  absl::StatusOr<std::unique_ptr<Client>> client = Client::Create(options);
  if (!client.ok()) return client.status();
  client_ = *std::move(client);
  return absl::OkStatus();
}

absl::Status WorkerConnector::OpenNamespace() {
  if (!ns_.name.empty()) return absl::OkStatus();
  CallOptions call;
  call.timeout = absl::Milliseconds(config_.lookup_ms);
  absl::StatusOr<ClientNamespace> ns = client_->OpenNamespace(config_.namespace_name, spec_, call);
  if (!ns.ok()) return ns.status();
  ns_ = *std::move(ns);
  return absl::OkStatus();
}

absl::Status WorkerConnector::RegisterMemory() {
  if (registration_ != 0) return absl::OkStatus();
  CallOptions call;
  call.timeout = absl::Milliseconds(config_.lookup_ms);
  KVMILL_ASSIGN_OR_RETURN(registration_,
                          client_->RegisterMemory(ns_, memory_.Geometry(head_begin_), call));
  return absl::OkStatus();
}

void WorkerConnector::FreePages(std::uint64_t request) {
  CallOptions call;
  call.timeout = absl::Milliseconds(config_.store_ms);
  while (!client_->CancelPages(request, call).ok()) {
  }
}

void WorkerConnector::HandlePreemptions(const std::vector<std::uint64_t>& requests) {
  if (config_.fault == Fault::kStoresAfterPreemption ||
      config_.fault == Fault::kReusesPagesUnasked) {
    return;
  }
  for (const std::uint64_t request : requests) {
    if (config_.store_path == StorePath::kPages) {
      CallOptions call;
      call.timeout = absl::Milliseconds(config_.store_ms);
      if (!client_->FlushPages(request, call).ok()) FreePages(request);
      continue;
    }
    for (SaveCall& save : saves_) {
      if (save.order.request == request) save.result.Wait();
    }
  }
}

void WorkerConnector::HandleAborts(const std::vector<std::uint64_t>& requests) {
  if (config_.store_path != StorePath::kPages) return;
  for (const std::uint64_t request : requests) FreePages(request);
}

void WorkerConnector::StartLoads(const std::vector<Order>& orders) {
  for (const Order& order : orders) {
    Load& load = loads_.emplace_back(order, *this);
    CallOptions call;
    call.timeout = absl::Milliseconds(config_.fetch_ms);
    ++counts_.calls_started;
    if (absl::Status opened = OpenNamespace(); !opened.ok()) {
      load.result.Set(opened);
      load.mapped.Set(opened);
      continue;
    }
    if (config_.load_path == LoadPath::kMap) {
      MapOptions options;
      options.lease = absl::Milliseconds(config_.lease_ms);
      client_->MapAsync(ns_, load.keys, options, call,
                        [&load](absl::StatusOr<Client::MappedPtr> mapped) {
                          load.mapped.Set(std::move(mapped));
                        });
      continue;
    }
    client_->FetchAsync(ns_, load.keys, load, call, [&load](absl::StatusOr<FetchResult> result) {
      load.result.Set(std::move(result));
    });
  }
}

void WorkerConnector::CollectLoad(Load& load) {
  if (load.collected) return;
  load.collected = true;
  const Load::Tokens tokens = load.Wait();
  ++counts_.calls_done;
  for (std::size_t i = 0; i < load.order.blocks.size(); ++i) {
    const BlockPages& block = load.order.blocks[i];
    // The whole call failed, or this block did, or it is not what was looked up.
    const bool ok = tokens[i].ok() && *tokens[i] == block.hashes.size();
    ++(ok ? counts_.loaded_blocks : counts_.failed_loads);
    if (ok && block.hashes.size() < config_.shape.block_tokens) ++counts_.loaded_tails;
    if (ok || config_.fault == Fault::kIgnoresLoadErrors) continue;
    for (std::uint32_t page = block.page_begin; page < block.page_end; ++page) {
      failed_pages_.insert(block.pages[page]);
    }
  }
}

std::set<PageId> WorkerConnector::WaitForLoads() {
  for (Load& load : loads_) CollectLoad(load);
  return failed_pages_;
}

void WorkerConnector::StartSaves(const std::vector<Order>& orders,
                                 const std::set<std::uint64_t>& lost) {
  for (const Order& order : orders) {
    SaveCall& save = saves_.emplace_back(order, *this);
    CallOptions call;
    call.timeout = absl::Milliseconds(config_.store_ms);
    const auto done = [&save](absl::StatusOr<StoreResult> result) {
      save.result.Set(std::move(result));
    };
    ++counts_.calls_started;
    const bool pages = config_.store_path == StorePath::kPages;
    absl::Status status = OpenNamespace();
    if (status.ok() && pages) status = RegisterMemory();
    if (status.ok() && pages && lost.count(order.request) != 0) {
      status = absl::CancelledError("its values are not computed");
    }
    if (!status.ok()) {
      save.result.Set(status);
    } else if (pages) {
      PageStoreOptions options;
      options.request = order.request;
      options.ready_layers = 0;
      client_->StorePagesAsync(ns_, registration_, save.page_blocks, options, call, done);
    } else {
      StoreOptions options;
      options.head_begin = head_begin_;
      options.head_count = memory_.head_count();
      client_->StoreAsync(ns_, save.blocks, options, call, done);
    }
  }
}

void WorkerConnector::Ready(std::uint32_t layers) {
  // A fault: the values are said to be there when the save is waited for, whatever is there then.
  if (config_.store_path != StorePath::kPages || config_.fault == Fault::kReusesPagesUnasked) {
    return;
  }
  for (const SaveCall& save : saves_) client_->ReadyPages(save.order.request, layers);
}

void WorkerConnector::CollectSave(SaveCall& save) {
  if (config_.fault == Fault::kReusesPagesUnasked) {
    client_->ReadyPages(save.order.request, config_.shape.layers);
  }
  const absl::StatusOr<StoreResult>& result = save.result.Wait();
  if (save.collected) return;
  save.collected = true;
  if (config_.store_path == StorePath::kPages) {
    if (absl::IsDeadlineExceeded(result.status())) FreePages(save.order.request);
    // Of another session or daemon.
    if (absl::IsAborted(result.status()) || absl::IsNotFound(result.status())) registration_ = 0;
  }
  ++counts_.calls_done;
  const auto note = [this](const absl::Status& status) {
    if (!absl::IsResourceExhausted(status)) {
      ++counts_.failed_saves;
      return;
    }
    ++counts_.refused_blocks;
    const std::int64_t hint_ms = absl::ToInt64Milliseconds(RetryAfter(status));
    retry_after_ms_ = std::max(retry_after_ms_, static_cast<std::uint64_t>(hint_ms));
  };
  if (!result.ok()) return note(result.status());
  for (const StoreBlockResult& block : result->blocks) {
    switch (block.outcome) {
      case StoreOutcome::kStored:
        ++counts_.stored_blocks;
        break;
      case StoreOutcome::kExisting:
        ++counts_.existing_blocks;
        break;
      case StoreOutcome::kPartial:
        ++counts_.partial_blocks;
        break;
      case StoreOutcome::kDropped:  // With WhenAway::kMiss only.
        break;
      case StoreOutcome::kFailed:
        note(block.status);
        break;
    }
  }
}

void WorkerConnector::WaitForSaves() {
  for (SaveCall& save : saves_) CollectSave(save);
}

void WorkerConnector::GetFinished(const StepPlan& plan, StepReport* report) {
  for (auto load = loads_.begin(); load != loads_.end();) {
    if (!plan.last && load->order.due > plan.step) {
      ++load;
      continue;
    }
    CollectLoad(*load);
    report->loaded.push_back(load->order.id);
    load = loads_.erase(load);
  }
  for (auto save = saves_.begin(); save != saves_.end();) {
    if (!plan.last && save->order.due > plan.step) {
      ++save;
      continue;
    }
    CollectSave(*save);
    report->saved.push_back(save->order.id);
    save = saves_.erase(save);
  }
  report->failed_pages.assign(failed_pages_.begin(), failed_pages_.end());
  failed_pages_.clear();
  report->retry_after_ms = std::exchange(retry_after_ms_, 0);
  report->counts = counts_;
}

}  // namespace kvmill::engine
