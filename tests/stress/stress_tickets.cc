#include "tests/stress/stress_tickets.h"

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/ticket.h"
#include "storage/core/mutex.h"

namespace kvmill::stress {
namespace {

constexpr std::size_t kRunningMax = 3;

// Each page is of the sequence and the variant, or the process ends.
class ComparingSink : public FetchSink {
 public:
  ComparingSink(const Model& model, Space space, const std::string& sequence, unsigned variant)
      : model_(model), space_(space), sequence_(sequence), variant_(variant) {}
  absl::Status OnPage(const PageId& id, const PageView& page) override {
    if ((model_.Matching(space_, sequence_, id.block, kVariants, page) >> variant_ & 1) == 0) {
      Wrong(absl::StrCat("ticket: ", sequence_, " in ", NameOf(space_), " block ", id.block,
                         " group ", id.group, " has bytes that were not stored"));
    }
    return absl::OkStatus();
  }

 private:
  const Model& model_;
  const Space space_;
  const std::string& sequence_;
  const unsigned variant_;
};

}  // namespace

// Of a redemption, which is told on threads of the client.
struct TicketStorer::Outcome {
  Mutex mu;
  std::optional<absl::StatusOr<RedeemResult>> result ABSL_GUARDED_BY(mu);
  std::uint64_t layers_told ABSL_GUARDED_BY(mu) = 0;
};

struct TicketStorer::Running {
  Client* producer = nullptr;
  Client* consumer = nullptr;
  Space space{};
  std::string sequence;
  unsigned variant = 0;
  std::string ticket;
  std::uint32_t heads_stored = 0;
  bool store_begun = false;
  bool given_up = false;  // Revoked, or no longer wanted.
  std::shared_ptr<Outcome> outcome = std::make_shared<Outcome>();
};

TicketStorer::TicketStorer(const Model& model, Client& here, Client& there,
                           const ClientNamespace* spaces, Options options)
    : model_(model),
      here_(here),
      there_(there),
      spaces_(spaces),
      options_(std::move(options)),
      random_(options_.seed) {}

TicketStorer::~TicketStorer() {
  for (const auto& running : running_) {
    running->given_up = true;
    running->consumer->CancelRedeem(running->ticket);
    while (!TakeOutcome(*running)) absl::SleepFor(absl::Milliseconds(1));
  }
}

void TicketStorer::Start() {
  auto running = std::make_unique<Running>();
  const bool from_here = Below(3) != 0;
  running->producer = from_here ? &here_ : &there_;
  running->consumer = from_here ? &there_ : &here_;
  running->space = static_cast<Space>(Below(kSpaces));
  running->sequence = absl::StrCat("ticket/", options_.name, "/", ++names_);
  running->variant = static_cast<unsigned>(Below(kVariants));
  const StoreInput input(model_, running->space, running->sequence, running->variant, {});
  std::vector<PromisedBlock> promised;
  for (const StoreBlock& block : input.blocks()) {
    promised.push_back({block.key, block.parent, block.token_count, block.block_index});
  }
  const ClientNamespace& ns = spaces_[static_cast<std::size_t>(running->space)];
  // What nobody stores, or redeems, is over soon.
  const auto ticket = running->producer->CreateTicket(
      ns, promised, {.ttl = absl::Seconds(3), .life = absl::Seconds(20)});
  if (!ticket.ok()) return options_.failed(ticket.status(), "create ticket");
  ++did_["ticket"];
  running->ticket = *ticket;
  running->consumer->RedeemTicketAsync(
      ns, running->ticket,
      [outcome = running->outcome](absl::Span<const RedeemedBlock> blocks,
                                   absl::Span<const std::uint32_t> changed) {
        MutexLock lock(outcome->mu);
        for (const std::uint32_t i : changed) outcome->layers_told += blocks[i].layers_here;
      },
      {.timeout = absl::Seconds(30)},
      [outcome = running->outcome](absl::StatusOr<RedeemResult> result) {
        MutexLock lock(outcome->mu);
        if (outcome->result.has_value()) Wrong("a redemption ended twice");
        outcome->result = std::move(result);
      });
  running_.push_back(std::move(running));
}

void TicketStorer::StoreHeads(Running& running, StoreInput::Heads heads) {
  const StoreInput input(model_, running.space, running.sequence, running.variant, heads);
  const auto stored =
      running.producer->Store(spaces_[static_cast<std::size_t>(running.space)], input.blocks(),
                              {.head_begin = heads.begin, .head_count = heads.count}, {});
  running.store_begun = true;
  running.heads_stored += heads.count;
  if (!stored.ok()) return options_.failed(stored.status(), "store for a ticket");
  for (const StoreBlockResult& block : stored->blocks) {
    if (!block.status.ok()) options_.failed(block.status, "store block for a ticket");
  }
}

void TicketStorer::Store(Running& running) {
  if (running.heads_stored == 0 && running.producer == &here_ && Below(3) == 0) {
    if (!options_.store_pages(running.space, running.sequence, running.variant)) return;
    running.store_begun = true;
    running.heads_stored = kHeads;
    ++did_["ticket from pages"];
    return;
  }
  if (running.heads_stored == 0 && Below(2) == 0) return StoreHeads(running, {0, kHeads});
  StoreHeads(running, {running.heads_stored, 1});
}

void TicketStorer::Compare(const Running& running, const RedeemResult& result) {
  if (result.blocks.empty() && !result.status.ok()) return;  // Nobody could say which there are.
  const std::vector<BlockKey> keys = KeysOf(running.sequence);
  if (result.blocks.size() != std::size_t{kBlocks} * GroupCount(running.space)) {
    Wrong(absl::StrCat("ticket: ", result.blocks.size(), " blocks of ", running.sequence));
  }
  bool came = false;
  for (const RedeemedBlock& block : result.blocks) {
    if (block.block_index >= kBlocks || block.key != keys[block.block_index]) {
      Wrong(absl::StrCat("ticket: ", running.sequence, " has a block ", block.block_index,
                         " with another key"));
    }
    const bool sealed = block.fate == TicketFate::kSealed || block.fate == TicketFate::kExists;
    if (sealed && !running.store_begun) {
      Wrong(absl::StrCat("ticket: ", running.sequence, " came, and nobody stored it"));
    }
    came |= sealed;
    ++did_[sealed ? "ticket blocks" : "ticket blocks missed"];
  }
  if (!came) return;
  ComparingSink sink(model_, running.space, running.sequence, running.variant);
  const auto fetched = running.consumer->Fetch(spaces_[static_cast<std::size_t>(running.space)],
                                               keys, sink, {.elsewhere = {.local_only = true}});
  if (!fetched.ok()) return options_.failed(fetched.status(), "fetch of a ticket");
  for (const FetchBlockResult& block : fetched->blocks) {
    if (block.status.ok()) ++did_["ticket blocks fetched"];
  }
}

bool TicketStorer::TakeOutcome(Running& running) {
  std::optional<absl::StatusOr<RedeemResult>> result;
  {
    MutexLock lock(running.outcome->mu);
    if (!running.outcome->result.has_value()) return false;
    result = std::move(running.outcome->result);
    running.outcome->result = absl::UnknownError("taken");  // Once is enough to find another.
    did_["ticket layers told"] += running.outcome->layers_told;
  }
  const absl::Status& status = result->status();
  if (result->ok()) {
    Compare(running, **result);
  } else if (absl::IsNotFound(status) || absl::IsFailedPrecondition(status) ||
             (absl::IsCancelled(status) && running.given_up)) {
    // The producer forgot it, or it was another process of the consumer's node that began.
    ++did_["ticket over"];
  } else {
    options_.failed(status, "redeem");
  }
  return true;
}

void TicketStorer::Step() {
  for (auto it = running_.begin(); it != running_.end();) {
    it = TakeOutcome(**it) ? running_.erase(it) : std::next(it);
  }
  if (running_.size() < kRunningMax && Below(8) == 0) return Start();
  if (running_.empty()) return;
  Running& running = *running_[Below(running_.size())];
  const auto what = Below(40);
  if (what < 16) {
    if (!running.given_up && running.heads_stored < kHeads) Store(running);
  } else if (what == 16) {
    running.given_up = true;
    ++did_["revoke ticket"];
    const absl::Status revoked = running.producer->RevokeTicket(running.ticket);
    if (!revoked.ok() && !absl::IsNotFound(revoked)) options_.failed(revoked, "revoke ticket");
  } else if (what == 17) {
    running.given_up = true;
    ++did_["cancel redeem"];
    running.consumer->CancelRedeem(running.ticket);
  }
}

}  // namespace kvmill::stress
