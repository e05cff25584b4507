#include "tests/stress/stress_pages.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "storage/core/mutex.h"

namespace kvmill::stress {
namespace {

constexpr std::uint32_t kPageTokens = 16;
constexpr std::uint32_t kPagesOfBlock = kBlockTokens / kPageTokens;
constexpr std::uint64_t kPages = 96;
constexpr std::uint64_t kTokenBytes = std::uint64_t{2} * kHeads * kHeadDim;
constexpr std::uint64_t kPageBytes = kPageTokens * kTokenBytes;
constexpr std::size_t kRunningMax = 3;

}  // namespace

// Of a store, and of its completion on a thread of the client.
struct PageStorer::Outcome {
  Mutex mu;
  std::optional<absl::StatusOr<StoreResult>> result ABSL_GUARDED_BY(mu);
};

struct PageStorer::Running {
  Space space{};
  std::string sequence;
  unsigned variant = 0;
  std::uint64_t request = 0;
  std::unique_ptr<StoreInput> input;
  std::vector<std::uint64_t> pages;
  std::uint32_t ready_layers = 0;
  bool withdrawn = false;
  bool free = false;
  std::shared_ptr<Outcome> outcome = std::make_shared<Outcome>();
};

PageStorer::PageStorer(const Model& model, Client& client, const ClientNamespace* spaces,
                       Options options)
    : model_(model),
      client_(client),
      spaces_(spaces),
      options_(std::move(options)),
      random_(options_.seed),
      next_request_(options_.first_request) {
  auto memory = SharedMemory::Create(2 * kLayers * kPages * kPageBytes);
  if (!memory.ok()) Wrong(memory.status().ToString());
  memory_ = *std::move(memory);
  for (std::uint64_t page = 0; page < kPages; ++page) free_pages_.push_back(page);
}

PageStorer::~PageStorer() {
  for (const auto& running : running_) {
    if (!running->free) Withdraw(*running);
    while (!TakeOutcome(*running)) absl::SleepFor(absl::Milliseconds(1));
  }
}

std::byte* PageStorer::PageAt(std::uint32_t layer, bool value, std::uint64_t page) const {
  return memory_.data() + ((2 * layer + (value ? 1 : 0)) * kPages + page) * kPageBytes;
}

bool PageStorer::Register(Space space) {
  std::optional<std::uint64_t>& registration = registrations_[static_cast<std::size_t>(space)];
  if (registration.has_value()) return true;
  EngineGeometry geometry;
  EngineRegion region;
  region.base = reinterpret_cast<std::uintptr_t>(memory_.data());
  region.bytes = memory_.bytes();
  region.fd = memory_.fd();
  geometry.regions = {region};
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    const bool own_group = GroupCount(space) == kLayers;
    if (layer == 0 || own_group) {
      EngineLayers& l = geometry.layers.emplace_back();
      l.group = own_group ? layer : 0;
      l.block_tokens = kBlockTokens;
      l.head_dim = kHeadDim;
      l.head_count = kHeads;
      l.page_tokens = kPageTokens;
      l.page_count = kPages;
      l.page_bytes = l.page_stride_bytes = kPageBytes;
      l.token_stride_bytes = kTokenBytes;
      l.head_stride_bytes = std::uint64_t{2} * kHeadDim;
    }
    for (const bool value : {false, true}) {
      EngineLayers& l = geometry.layers.back();
      (value ? l.values : l.keys)
          .push_back({0, static_cast<std::uint64_t>(PageAt(layer, value, 0) - memory_.data())});
    }
  }
  const auto made = client_.RegisterMemory(spaces_[static_cast<std::size_t>(space)], geometry);
  if (!made.ok()) {
    options_.failed(made.status(), "register pages");
    return false;
  }
  ++did_["register pages"];
  registration = *made;
  return true;
}

void PageStorer::FillLayer(const Running& running, std::uint32_t layer) {
  const std::uint64_t* page = running.pages.data();
  for (const StoreBlock& block : running.input->blocks()) {
    for (std::uint32_t token = 0; token < block.token_count; token += kPageTokens, ++page) {
      const std::uint64_t bytes = std::min(kPageTokens, block.token_count - token) * kTokenBytes;
      for (const bool value : {false, true}) {
        const KvView& from = value ? block.layers[layer].v : block.layers[layer].k;
        std::memcpy(PageAt(layer, value, *page), from.data + token * kTokenBytes, bytes);
      }
    }
  }
}

bool PageStorer::Start(Space space, const std::string& sequence, unsigned variant,
                       CallOptions call) {
  const std::uint32_t tail_pages = (TailTokens(sequence) + kPageTokens - 1) / kPageTokens;
  const std::size_t count = kWholeBlocks * kPagesOfBlock + tail_pages;
  if (running_.size() >= kRunningMax || free_pages_.size() < count || !Register(space))
    return false;
  running_.push_back(std::make_unique<Running>());
  Running& running = *running_.back();
  running.space = space;
  running.sequence = sequence;
  running.variant = variant;
  running.request = next_request_++;
  running.input =
      std::make_unique<StoreInput>(model_, space, sequence, variant, StoreInput::Heads{0, kHeads});
  std::shuffle(free_pages_.begin(), free_pages_.end(), random_);
  running.pages.assign(free_pages_.end() - static_cast<std::ptrdiff_t>(count), free_pages_.end());
  free_pages_.resize(free_pages_.size() - count);
  running.ready_layers = static_cast<std::uint32_t>(Below(kLayers + 1));
  for (std::uint32_t layer = 0; layer < running.ready_layers; ++layer) FillLayer(running, layer);

  std::vector<PageNumbers> lists;
  std::vector<PageBlock> blocks;
  lists.reserve(kBlocks * GroupCount(space));
  std::size_t first = 0;
  for (const StoreBlock& from : running.input->blocks()) {
    const std::size_t pages = (from.token_count + kPageTokens - 1) / kPageTokens;
    const std::size_t first_list = lists.size();
    for (std::uint32_t group = 0; group < GroupCount(space); ++group) {
      lists.push_back(absl::MakeConstSpan(running.pages).subspan(first, pages));
    }
    first += pages;
    PageBlock& block = blocks.emplace_back();
    block.key = from.key;
    block.parent = from.parent;
    block.token_count = from.token_count;
    block.block_index = from.block_index;
    block.pages = absl::MakeConstSpan(lists).subspan(first_list);
  }
  ++did_["store pages"];
  PageStoreOptions options;
  options.request = running.request;
  options.ready_layers = running.ready_layers;
  options.wait_durable = Below(50) == 0;
  client_.StorePagesAsync(spaces_[static_cast<std::size_t>(space)],
                          *registrations_[static_cast<std::size_t>(space)], blocks, options, call,
                          [outcome = running.outcome](absl::StatusOr<StoreResult> result) {
                            MutexLock lock(outcome->mu);
                            if (outcome->result.has_value()) Wrong("a store of pages ended twice");
                            outcome->result = std::move(result);
                          });
  return true;
}

void PageStorer::Free(Running& running) {
  if (std::exchange(running.free, true)) return;
  for (const std::uint64_t page : running.pages) {
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      for (const bool value : {false, true}) {
        std::memset(PageAt(layer, value, page), 0x22, kPageBytes);  // Finite.
      }
    }
  }
  free_pages_.insert(free_pages_.end(), running.pages.begin(), running.pages.end());
}

void PageStorer::Withdraw(Running& running) {
  running.withdrawn = true;
  if (options_.reuses_pages_unasked) {
    client_.ReadyPages(running.request, kLayers);  // So that somebody reads them.
    return Free(running);
  }
  const bool flush = Below(2) == 0;
  ++did_[flush ? "flush pages" : "cancel pages"];
  for (;;) {
    const CallOptions call{.timeout = absl::Milliseconds(
                               Below(4) == 0 ? 1 + static_cast<std::int64_t>(Below(20)) : 30'000)};
    const absl::Status free = flush ? client_.FlushPages(running.request, call)
                                    : client_.CancelPages(running.request, call);
    if (free.ok()) break;
    if (!absl::IsDeadlineExceeded(free)) options_.failed(free, "free pages");
    ++did_["free pages asked again"];
  }
  Free(running);
}

bool PageStorer::TakeOutcome(Running& running) {
  std::optional<absl::StatusOr<StoreResult>> result;
  {
    MutexLock lock(running.outcome->mu);
    if (!running.outcome->result.has_value()) return false;
    result = std::move(running.outcome->result);
    running.outcome->result = absl::UnknownError("taken");  // Once is enough to find another.
  }
  if (!result->ok()) {
    const absl::Status& status = result->status();
    if (absl::IsDeadlineExceeded(status) && !running.free) Withdraw(running);
    if (absl::IsAborted(status) || absl::IsNotFound(status)) {  // The session is another one.
      registrations_[static_cast<std::size_t>(running.space)].reset();
      ++did_["pages of another session"];
    } else {
      options_.failed(status, "store pages");
    }
  }
  Free(running);
  bool whole = result->ok();
  if (result->ok()) {
    const bool ended =
        std::any_of((*result)->blocks.begin(), (*result)->blocks.end(),
                    [](const StoreBlockResult& block) { return absl::IsAborted(block.status); });
    if (ended) ++did_["pages given up with their session"];
    for (const StoreBlockResult& block : (*result)->blocks) {
      const bool given_up = running.withdrawn && absl::IsCancelled(block.status);
      if (!block.status.ok() && !given_up && !absl::IsAborted(block.status)) {
        options_.failed(block.status, "store pages block");
      }
      // Of a block that others store, too, some layers may be theirs, and under way.
      if (block.outcome == StoreOutcome::kPartial && !absl::StartsWith(running.sequence, "all/")) {
        Wrong(absl::StrCat("store pages: ", running.sequence, " owes layers of a whole store"));
      }
      whole = whole &&
              (block.outcome == StoreOutcome::kStored || block.outcome == StoreOutcome::kExisting);
    }
    if (whole) ++did_["stored pages whole"];
  }
  options_.ended({running.space, running.sequence, running.variant, whole ? &**result : nullptr});
  return true;
}

void PageStorer::Step() {
  for (auto it = running_.begin(); it != running_.end();) {
    it = TakeOutcome(**it) ? running_.erase(it) : std::next(it);
  }
  if (running_.empty()) return;
  Running& running = *running_[Below(running_.size())];
  if (running.free) return;
  const auto what = Below(10);
  if (running.ready_layers < kLayers && what < 6) {
    FillLayer(running, running.ready_layers);
    client_.ReadyPages(running.request, ++running.ready_layers);
  } else if (what == 9) {
    Withdraw(running);
  }
}

}  // namespace kvmill::stress
