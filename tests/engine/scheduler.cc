#include "tests/engine/scheduler.h"

#include <algorithm>
#include <map>
#include <utility>

#include "storage/core/check.h"

namespace kvmill::engine {

namespace {

// Enough for the requests before to end, and their tails to be stored.
constexpr std::uint64_t kLateSteps = 80;

// So short that the answer ends in the block in which the prompt does.
void EndInOneBlock(std::uint32_t block_tokens, Request* request) {
  while ((request->prompt.size() - 1) % block_tokens + request->output_tokens >= block_tokens) {
    request->prompt.pop_back();
  }
}

// What the model answers.
void AppendAnswer(const Request& before, std::vector<std::uint32_t>* prompt) {
  std::uint64_t hash = 0;
  for (const std::uint32_t token : *prompt) hash = Extend(hash, token);
  for (std::uint32_t t = 0; t < before.output_tokens; ++t) {
    prompt->push_back(NextToken(hash));
    hash = Extend(hash, prompt->back());
  }
}

}  // namespace

std::vector<Request> MakeRequests(const EngineConfig& config) {
  std::mt19937_64 random(config.seed);
  const auto between = [&random](std::uint32_t low, std::uint32_t high) {
    return low + static_cast<std::uint32_t>(random() % (high - low + 1));
  };
  const auto append = [&](std::vector<std::uint32_t>* tokens, std::uint32_t count) {
    for (std::uint32_t i = 0; i < count; ++i) tokens->push_back(between(0, 49'999));
  };
  std::vector<std::vector<std::uint32_t>> system_prompts(3);
  for (auto& prompt : system_prompts) append(&prompt, between(40, 150));
  std::vector<Request> requests;
  // With tails: pairs of requests that part with the last token of the prompt, and leave tails of
  // one length behind one parent. The last quarter are later turns of these.
  std::vector<std::size_t> twins;
  const std::uint32_t late_begin =
      config.request_count - (config.tails ? config.request_count / 4 : 0);
  std::uint64_t arrival = 1;
  for (std::uint32_t i = 0; i < config.request_count; ++i) {
    Request request;
    request.id = i + 1;
    if (config.tails && i == late_begin) arrival += kLateSteps;
    request.arrival = arrival;
    arrival += random() % (2 * config.arrival_steps + 1);
    request.output_tokens = between(3, config.output_tokens_max);
    if (i >= late_begin && !twins.empty()) {
      const Request& before = requests[twins[i % twins.size()]];
      request.prompt = before.prompt;
      AppendAnswer(before, &request.prompt);
      append(&request.prompt, 20);
      requests.push_back(std::move(request));
      continue;
    }
    if (config.tails && i % 6 == 5) {
      Request& first = requests.back();
      first.abort = 0;
      EndInOneBlock(config.shape.block_tokens, &first);
      request.prompt = first.prompt;
      request.prompt.back() = (request.prompt.back() + 1) % 50'000;
      request.output_tokens = first.output_tokens;
      twins.insert(twins.end(), {requests.size() - 1, requests.size()});
      requests.push_back(std::move(request));
      continue;
    }
    const bool again = !requests.empty() && random() % 4 == 0;
    const Request* before = again ? &requests[random() % requests.size()] : nullptr;
    if (before != nullptr && before->prompt.size() < 300) {
      request.prompt = before->prompt;
      if (config.tails) {  // The next turn: after the answer, more of the user's words.
        AppendAnswer(*before, &request.prompt);
        append(&request.prompt, 20);
      }
    } else {
      request.prompt = system_prompts[random() % system_prompts.size()];
      append(&request.prompt, between(10, 160));
    }
    if (random() % 100 < config.abort_percent) request.abort = request.arrival + between(1, 25);
    requests.push_back(std::move(request));
  }
  return requests;
}

Scheduler::Scheduler(const EngineConfig& config, Client& client, const ClientNamespace& ns,
                     StoreModel* store)
    : config_(config),
      store_(store),
      pages_(config.page_count),
      connector_(config, client, ns, pages_),
      random_(config.seed * 31 + 7) {
  for (Request& request : MakeRequests(config)) {
    // One sequence alone must fit.
    KVMILL_CHECK(request.prompt.size() + request.output_tokens + config.drafts + kPageTokens <
                 std::size_t{config.page_count} * kPageTokens);
    future_.push_back(std::move(request));
  }
}

bool Scheduler::done() const {
  return future_.empty() && waiting_.empty() && running_.empty() && loading_.empty() &&
         leaving_.empty() && connector_.idle();
}

RequestView Scheduler::ViewOf(const Sequence& s) const {
  RequestView view;
  view.id = s.request.id;
  view.hashes = &s.hashes;
  view.rejected = &s.rejected;
  view.pages = &s.pages;
  view.computed = s.computed;
  view.scheduled = std::min(s.computed + s.scheduled, static_cast<std::uint32_t>(s.hashes.size()));
  return view;
}

SequenceView Scheduler::SequenceOf(const Sequence& s) const {
  SequenceView view;
  view.request = s.request.id;
  view.pages = s.pages;
  view.hashes = s.hashes;
  view.hashes.insert(view.hashes.end(), s.drafts.begin(), s.drafts.end());
  for (const PageId page : s.pages) view.sources.push_back(pages_.source(page));
  return view;
}

StepPlan Scheduler::Schedule() {
  StepPlan plan;
  plan.step = ++step_;
  budget_ = config_.batch_tokens;
  Arrive();
  Abort();
  ScheduleRunning(&plan);
  // Who was preempted a moment ago does not come back in the same step.
  if (plan.preempted.empty()) ScheduleWaiting(&plan);
  std::vector<RequestView> running;
  for (const SequencePtr& s : running_) running.push_back(ViewOf(*s));
  connector_.BuildPlan(running, &plan);
  return plan;
}

void Scheduler::Arrive() {
  while (!future_.empty() && future_.front().arrival <= step_) {
    auto s = std::make_unique<Sequence>();
    s->request = std::move(future_.front());
    future_.pop_front();
    std::uint64_t hash = 0;
    for (const std::uint32_t token : s->request.prompt)
      s->hashes.push_back(hash = Extend(hash, token));
    s->length_max = static_cast<std::uint32_t>(s->hashes.size()) + s->request.output_tokens;
    waiting_.push_back(std::move(s));
  }
}

void Scheduler::Abort() {
  const auto take = [this](auto& from) {
    for (std::size_t i = 0; i < from.size();) {
      if (from[i]->request.abort == 0 || from[i]->request.abort > step_) {
        ++i;
        continue;
      }
      SequencePtr s = std::move(from[i]);
      from.erase(from.begin() + static_cast<std::ptrdiff_t>(i));
      Finish(std::move(s), true);
    }
  };
  take(waiting_);
  take(running_);
  take(loading_);
}

void Scheduler::ScheduleRunning(StepPlan* plan) {
  for (std::size_t i = 0; i < running_.size(); ++i) {
    Sequence& s = *running_[i];
    Propose(s);
    std::uint32_t count =
        static_cast<std::uint32_t>(s.hashes.size() + s.drafts.size()) - s.computed;
    count = std::min({count, config_.chunk_tokens, budget_});
    if (count == 0) continue;
    bool grown = Grow(s, s.computed + count);
    while (!grown && running_.size() > i + 1) {
      Preempt(plan);
      grown = Grow(s, s.computed + count);
    }
    if (!grown) {
      // It is the last one. Alone, it waits for loads and saves that still use pages.
      if (i > 0 || running_.size() > 1) Preempt(plan);
      return;
    }
    AddWork(s, count, plan);
  }
}

void Scheduler::Propose(Sequence& s) {
  s.drafts.clear();
  s.scheduled = 0;
  const auto known = static_cast<std::uint32_t>(s.hashes.size());
  if (config_.drafts == 0 || known - s.computed != 1 || known < s.request.prompt.size() + 1) return;
  const std::uint32_t count = std::min<std::uint32_t>(
      static_cast<std::uint32_t>(random_() % (config_.drafts + 1)), s.length_max - known - 1);
  std::uint64_t hash = s.hashes.back();
  for (std::uint32_t i = 0; i < count; ++i) {
    const bool right = random_() % 3 != 0;
    hash = Extend(hash, right ? NextToken(hash) : 50'000);
    s.drafts.push_back(hash);
  }
}

void Scheduler::AddWork(Sequence& s, std::uint32_t count, StepPlan* plan) {
  const auto known = static_cast<std::uint32_t>(s.hashes.size());
  // Fewer tokens than proposed: the last drafts fall away.
  if (s.computed + count < known + s.drafts.size()) {
    s.drafts.resize(s.computed + count > known ? s.computed + count - known : 0);
  }
  s.scheduled = count;
  budget_ -= count;
  plan->work.push_back({SequenceOf(s), s.computed, s.computed + count});
}

bool Scheduler::Grow(Sequence& s, std::uint32_t token_count) {
  const std::size_t want = (token_count + kPageTokens - 1) / kPageTokens;
  if (want <= s.pages.size()) return true;
  const std::optional<std::vector<PageId>> more = pages_.Allocate(want - s.pages.size());
  if (!more.has_value()) return false;
  s.pages.insert(s.pages.end(), more->begin(), more->end());
  return true;
}

void Scheduler::FreePages(std::vector<PageId> pages) {
  // From the end: beginnings are worth more to others.
  for (auto page = pages.rbegin(); page != pages.rend(); ++page) pages_.RemoveUser(*page);
}

void Scheduler::Preempt(StepPlan* plan) {
  SequencePtr s = std::move(running_.back());
  running_.pop_back();
  ++counts_.preempted;
  connector_.RequestPreempted(ViewOf(*s));
  plan->preempted.push_back(s->request.id);
  FreePages(std::exchange(s->pages, {}));
  s->computed = s->cached_pages = s->scheduled = 0;
  s->drafts.clear();
  s->rejected.clear();
  waiting_.push_front(std::move(s));
}

void Scheduler::ScheduleWaiting(StepPlan* plan) {
  for (std::size_t i = 0; i < waiting_.size();) {
    if (budget_ == 0 || running_.size() + loading_.size() >= config_.batch_requests) return;
    if (!Start(waiting_[i], plan)) {
      ++i;
      continue;
    }
    waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

bool Scheduler::Start(SequencePtr& waiting, StepPlan* plan) {
  Sequence& s = *waiting;
  std::vector<PageId> local;
  const auto known = static_cast<std::uint32_t>(s.hashes.size());
  // The last known token is computed in any case.
  while ((local.size() + 1) * kPageTokens < known) {
    const std::optional<PageId> page = pages_.Find(s.hashes[(local.size() + 1) * kPageTokens - 1]);
    if (!page.has_value()) break;
    local.push_back(*page);
  }
  const auto local_tokens = static_cast<std::uint32_t>(local.size() * kPageTokens);
  const std::optional<std::uint32_t> matched = connector_.MatchedTokens(ViewOf(s), local_tokens);
  if (!matched.has_value()) return false;
  const bool loads = *matched > 0;
  const std::uint32_t have = local_tokens + *matched;
  const std::uint32_t count = std::min({known - have, config_.chunk_tokens, budget_});
  for (const PageId page : local) pages_.AddUser(page);
  s.pages = local;
  if (!Grow(s, loads && !config_.loads_in_step ? have : have + count)) {
    FreePages(std::exchange(s.pages, {}));
    return false;
  }
  s.computed = local_tokens;
  s.cached_pages = static_cast<std::uint32_t>(local.size());
  counts_.local_tokens += local_tokens;
  s.load_order = connector_.UpdateAfterAllocation(ViewOf(s), local_tokens, *matched);
  if (loads) {
    // What the loaded pages hold if all goes well. A tail and a sink block are raw.
    s.load_begin = local_tokens;
    s.load_end = have;
    s.load_sources.clear();
    const std::uint32_t block_tokens = config_.shape.block_tokens;
    for (std::uint32_t token = local_tokens; token < have; token += kPageTokens) {
      const std::uint32_t block = token / block_tokens;
      const bool tile = block >= config_.shape.sink_blocks && (block + 1) * block_tokens <= known &&
                        connector_.IsWholeBlock(s.request.id, block);
      s.load_sources.push_back(tile ? s.hashes[(block + 1) * block_tokens - 1] : 0);
      if (config_.loads_in_step) {
        pages_.SetSource(s.pages[token / kPageTokens], s.load_sources.back());
      }
    }
    counts_.external_tokens += *matched;
  }
  if (loads && !config_.loads_in_step) {
    loading_.push_back(std::move(waiting));
    return true;
  }
  s.computed = have;
  AddWork(s, count, plan);
  running_.push_back(std::move(waiting));
  return true;
}

void Scheduler::Apply(const std::vector<StepReport>& reports) {
  std::set<PageId> failed;
  for (const StepReport& report : reports) {
    failed.insert(report.failed_pages.begin(), report.failed_pages.end());
    connector_.UpdateFromReport(report);
  }
  // A load is over when every rank has said so; the connector counts.
  for (std::size_t i = 0; i < loading_.size();) {
    Sequence& s = *loading_[i];
    for (const PageId page : s.pages) {
      if (failed.count(page) != 0) s.load_failed.insert(page);
    }
    if (connector_.Busy(s.request.id)) {
      ++i;
      continue;
    }
    EndLoad(s);
    running_.push_back(std::move(loading_[i]));
    loading_.erase(loading_.begin() + static_cast<std::ptrdiff_t>(i));
  }
  for (const SequencePtr& s : running_) {
    if (s->load_order != 0) {  // In this step.
      for (const PageId page : s->pages) {
        if (failed.count(page) != 0) s->load_failed.insert(page);
      }
      if (!s->load_failed.empty()) s->scheduled = 0;  // Computed from bad context: not to be used.
      EndLoad(*s);
    }
    if (s->scheduled > 0) FinishWork(*s);
    s->scheduled = 0;
  }
  for (std::size_t i = 0; i < running_.size();) {
    if (running_[i]->hashes.size() < running_[i]->length_max) {
      ++i;
      continue;
    }
    SequencePtr s = std::move(running_[i]);
    running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(i));
    Finish(std::move(s), false);
  }
  for (std::size_t i = 0; i < leaving_.size();) {
    if (connector_.Busy(leaving_[i]->request.id)) {
      ++i;
      continue;
    }
    FreePages(std::move(leaving_[i]->pages));
    leaving_.erase(leaving_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

void Scheduler::EndLoad(Sequence& s) {
  // The first page that did not come ends what is there; later ones are computed again.
  std::uint32_t end = s.load_end;
  for (std::size_t page = s.load_begin / kPageTokens; page < s.pages.size(); ++page) {
    const auto token = static_cast<std::uint32_t>(page * kPageTokens);
    if (token < end && s.load_failed.count(s.pages[page]) != 0) end = token;
  }
  for (std::size_t page = s.load_begin / kPageTokens; page < s.pages.size(); ++page) {
    const std::size_t loaded = page - s.load_begin / kPageTokens;
    const bool there = page * kPageTokens < end;
    pages_.SetSource(s.pages[page],
                     there && loaded < s.load_sources.size() ? s.load_sources[loaded] : 0);
  }
  if (end < s.load_end) {
    ++counts_.recomputed_loads;
    s.drafts.clear();
  }
  s.computed = end;
  s.load_order = 0;
  s.load_failed.clear();
  CachePages(s);
}

void Scheduler::FinishWork(Sequence& s) {
  counts_.computed_tokens += s.scheduled;
  const auto known = static_cast<std::uint32_t>(s.hashes.size());
  const std::uint32_t reached = s.computed + s.scheduled;
  s.rejected.clear();
  if (reached < known) {  // More of the prompt is to come.
    s.computed = reached;
  } else {
    // The drafts that the model agrees with, then the one token that it gives itself.
    std::size_t accepted = 0;
    while (accepted < s.drafts.size() &&
           s.drafts[accepted] == Extend(s.hashes.back(), NextToken(s.hashes.back()))) {
      s.hashes.push_back(s.drafts[accepted++]);
    }
    s.computed = static_cast<std::uint32_t>(s.hashes.size());
    s.rejected.assign(s.drafts.begin() + static_cast<std::ptrdiff_t>(accepted), s.drafts.end());
    s.hashes.push_back(Extend(s.hashes.back(), NextToken(s.hashes.back())));
    counts_.accepted_drafts += accepted;
    counts_.rejected_drafts += s.rejected.size();
  }
  s.drafts.clear();
  const std::uint32_t block_tokens = config_.shape.block_tokens;
  for (; (s.allowed_blocks + 1) * block_tokens <= s.computed; ++s.allowed_blocks) {
    store_->Allow(s.request.id, s.hashes, s.allowed_blocks * block_tokens,
                  (s.allowed_blocks + 1) * block_tokens);
  }
  CachePages(s);
}

void Scheduler::CachePages(Sequence& s) {
  for (; (s.cached_pages + 1) * kPageTokens <= s.computed; ++s.cached_pages) {
    pages_.Cache(s.pages[s.cached_pages], s.hashes[(s.cached_pages + 1) * kPageTokens - 1]);
  }
}

void Scheduler::Finish(SequencePtr s, bool aborted) {
  ++(aborted ? counts_.aborted : counts_.finished);
  const std::uint32_t tail = s->computed % config_.shape.block_tokens;
  if (config_.tails && !aborted && tail > 0) {
    store_->Allow(s->request.id, s->hashes, s->computed - tail, s->computed);
  }
  if (connector_.RequestFinished(ViewOf(*s), aborted)) {
    leaving_.push_back(std::move(s));
  } else {
    FreePages(std::move(s->pages));
  }
}

}  // namespace kvmill::engine
