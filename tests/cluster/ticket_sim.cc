#include "tests/cluster/ticket_sim.h"

#include <algorithm>
#include <deque>
#include <memory>

#include "absl/strings/str_cat.h"
#include "tests/cluster/ticket_sim_node.h"

namespace kvmill {

namespace {

constexpr std::int64_t kStorm = 20 * kSimSecond;
// The longest life of a ticket, and then what a consumer takes to give up.
constexpr std::int64_t kCalm = 30 * kSimSecond;
constexpr int kTransfersInPeace = 6;
// An answer, a question and the pages: three messages, each of which may be late; and a pause.
constexpr std::int64_t kLastLayer = 3 * 20 * kSimMs + 10 * kSimMs;

struct NamedFault {
  const char* name;
  TicketFault fault;
};
constexpr NamedFault kFaults[] = {{"trusts-pages", TicketFault::kTrustsPages},
                                  {"trusts-seals", TicketFault::kTrustsSeals},
                                  {"seals-early", TicketFault::kSealsEarly},
                                  {"reads-unfinished", TicketFault::kReadsUnfinished},
                                  {"loses-seals", TicketFault::kLosesSeals},
                                  {"immortal", TicketFault::kImmortal},
                                  {"keeps-holds", TicketFault::kKeepsHolds},
                                  {"evicts-held", TicketFault::kEvictsHeld},
                                  {"loses-calls", TicketFault::kLosesCalls},
                                  {"no-acknowledgement", TicketFault::kNoAcknowledgement},
                                  {"no-revocation", TicketFault::kNoRevocation},
                                  {"leaks-copies", TicketFault::kLeaksCopies}};

using Outcome = TicketRedeem::Outcome;
using Fate = TicketRedeem::Fate;

class TicketSim {
 public:
  explicit TicketSim(const TicketSimOptions& options)
      : events_(options.seed, options.trace),
        machines_(static_cast<std::size_t>(events_.Uniform(2, 4))),
        network_(events_,
                 {.machines = machines_, .late = 0.02, .loss = events_.Chance(0.5) ? 0.02 : 0}) {
    world_.fault = options.fault;
    world_.report = &report_;
    world_.duplicates = events_.Chance(0.5) ? 0.1 : 0;
    world_.full = events_.Chance(0.3) ? 0.05 : 0;
    world_.fail = [this](const std::string& what) { Fail(what); };
  }

  TicketSimReport Run() {
    for (std::size_t i = 0; i < machines_; ++i) {
      world_.nodes.push_back(std::make_unique<TicketSimNode>(world_, i));
      world_.nodes[i]->Start();
    }
    storm_ = true;
    ScheduleWork();
    ScheduleTrouble();
    RunFor(kStorm);
    storm_ = false;
    Heal();
    RunFor(kCalm);
    CheckRest();
    for (int i = 0; i < kTransfersInPeace && ok(); ++i) TransferInPeace();
    RunFor(kCalm);
    CheckRest();
    for (auto& node : world_.nodes) node->Kill();
    RunFor(kSimSecond);
    if (ok() && events_.pending() > 0) Fail("something is left when every process is gone");
    report_.events = events_.events_run();
    return report_;
  }

 private:
  // A prompt on its way from one engine to another.
  struct Transfer {
    std::size_t producer = 0, consumer = 0;
    std::string producer_life, consumer_life;
    std::vector<TicketBlock> blocks;
    std::vector<std::size_t> layers_left;
    TicketName name{};
    bool peace = false;
    bool engine_gone = false;
    std::map<std::uint32_t, std::int64_t> finished_at;  // The last layer.
    int callers = 0, done = 0;
    std::int64_t done_at = 0;
    Outcome outcome;
  };
  using TransferPtr = std::shared_ptr<Transfer>;  // Events of several kinds refer to it.
  // A call of Start that has not ended.
  struct Redemption {
    std::size_t node = 0;
    std::string life;
    std::int64_t deadline = 0;
    std::uint64_t stops = 0;  // Of the node, when it began.
  };

  bool ok() const { return report_.failure.empty(); }
  void Fail(const std::string& what) {
    events_.Trace("FAILED: " + what);
    if (ok()) {
      report_.failure = absl::StrCat(what, " at ", static_cast<double>(events_.now()) / 1e9, " s");
    }
  }
  TicketSimNode& Node(std::size_t i) { return *world_.nodes[i]; }
  bool Works(std::size_t i) { return Node(i).running() && !Node(i).stopped(); }
  bool Lives(std::size_t i, const std::string& life) {
    return Works(i) && Node(i).member().incarnation == life;
  }
  std::size_t Any() {
    return static_cast<std::size_t>(events_.Uniform(0, static_cast<std::int64_t>(machines_) - 1));
  }

  void RunFor(std::int64_t nanos) {
    for (const std::int64_t end = events_.now() + nanos; events_.now() < end && ok();) {
      events_.RunUntil(std::min(end, events_.now() + 100 * kSimMs), [] {});
      Check();
    }
  }

  void Check() {
    for (const auto& node : world_.nodes) {
      if (!node->running() || node->stopped()) continue;
      if (const std::string what = node->process().store.Overdue(); !what.empty()) Fail(what);
    }
    for (const auto& [id, redemption] : redemptions_) {
      if (stops_[redemption.node] != redemption.stops) continue;
      if (!Lives(redemption.node, redemption.life)) continue;
      if (events_.now() > redemption.deadline + kSimSecond) {
        Fail(absl::StrCat(redemption.life, " never ended a redemption"));
      }
    }
  }

  void CheckRest() {
    for (const auto& node : world_.nodes) {
      const std::string what = node->Unfinished();
      if (ok() && !what.empty()) Fail(what);
    }
  }

  // --- Work ---

  void ScheduleWork() {
    events_.After(events_.Exponential(150 * kSimMs), [this] {
      if (!storm_) return;
      const std::size_t producer = Any(), consumer = Any();
      if (producer != consumer && Works(producer) && Works(consumer)) {
        StartTransfer(producer, consumer, false);
      }
      for (std::size_t i = 0; i < machines_; ++i) {
        if (Works(i)) Node(i).process().store.Evict(KeyOf(AnyPrompt(), 0));
      }
      ScheduleWork();
    });
  }

  std::uint64_t AnyPrompt() {
    return static_cast<std::uint64_t>(events_.Uniform(
        0, static_cast<std::int64_t>(std::max<std::uint64_t>(next_prompt_, 1)) - 1));
  }
  static BlockKey KeyOf(std::uint64_t prompt, std::size_t block) {
    return *BlockKey::FromBytes(absl::StrCat("prompt ", prompt, " block ", block));
  }

  TransferPtr StartTransfer(std::size_t producer, std::size_t consumer, bool peace) {
    auto transfer = std::make_shared<Transfer>();
    transfer->producer = producer;
    transfer->consumer = consumer;
    transfer->producer_life = Node(producer).member().incarnation;
    transfer->consumer_life = Node(consumer).member().incarnation;
    transfer->peace = peace;
    // Some prompts have been seen before, here or there.
    const std::uint64_t prompt =
        peace || next_prompt_ == 0 || events_.Chance(0.7) ? next_prompt_++ : AnyPrompt();
    const std::size_t layers = 1 + prompt % 5;
    const std::size_t count = static_cast<std::size_t>(events_.Uniform(1, 6));
    for (std::size_t i = 0; i < count; ++i) {
      TicketBlock& block = transfer->blocks.emplace_back();
      block.key = KeyOf(prompt, i);
      block.layer_count = static_cast<std::uint16_t>(layers);
      block.token_count = 128;
      block.block_index = static_cast<std::uint32_t>(i);
      transfer->layers_left.push_back(layers);
    }
    if (peace || events_.Chance(0.8)) {
      Create(transfer);
      Prefill(transfer);
    } else {
      // Part of it is there before the ticket.
      Prefill(transfer);
      events_.After(events_.Uniform(0, 200 * kSimMs), [this, transfer] { Create(transfer); });
    }
    return transfer;
  }

  void Create(const TransferPtr& transfer) {
    if (!Lives(transfer->producer, transfer->producer_life) || transfer->engine_gone) return;
    TicketSimNode::Process& process = Node(transfer->producer).process();
    TicketTable::Request request;
    request.blocks = transfer->blocks;
    if (events_.Chance(0.5)) request.consumer = Node(transfer->consumer).member().id;
    request.owner = absl::StrCat("session ", report_.tickets % 7);
    request.ttl_nanos =
        transfer->peace ? 5 * kSimSecond : events_.Uniform(kSimSecond / 2, 4 * kSimSecond);
    request.life_nanos = events_.Uniform(5 * kSimSecond, 12 * kSimSecond);
    const auto [ttl, life] = std::pair(request.ttl_nanos, request.life_nanos);
    const absl::StatusOr<TicketName> name = process.table.Create(std::move(request));
    if (!name.ok()) return;  // There are too many, and nothing came of it.
    process.store.Promise(*name, ttl, life);
    ++report_.tickets;
    report_.blocks_promised += transfer->blocks.size();
    transfer->name = *name;
    events_.Trace(absl::StrCat(transfer->producer_life, " promises ", transfer->blocks.size(),
                               " blocks to ", transfer->consumer_life));
    const int callers = static_cast<int>(events_.Uniform(1, 2));
    transfer->callers = transfer->peace || events_.Chance(0.9) ? callers : 0;
    for (int i = 0; i < transfer->callers; ++i) {
      events_.After(transfer->peace ? 0 : events_.Exponential(200 * kSimMs),
                    [this, transfer] { Redeem(transfer); });
    }
    if (!transfer->peace && events_.Chance(transfer->callers == 0 ? 0.5 : 0.1)) {
      events_.After(events_.Exponential(kSimSecond), [this, transfer] { Abort(transfer); });
    }
  }

  // The engine at the producer has no use for it any more, or is gone.
  void Abort(const TransferPtr& transfer) {
    if (!Lives(transfer->producer, transfer->producer_life)) return;
    TicketSimNode::Process& process = Node(transfer->producer).process();
    transfer->engine_gone = true;
    if (world_.fault != TicketFault::kNoRevocation) {
      process.table.Revoke(transfer->name).IgnoreError();  // It may have ended.
    }
    if (process.store.Holds(transfer->name)) Fail("a revoked ticket is held");
    for (const TicketBlock& block : transfer->blocks) {
      if (events_.Chance(0.5)) process.store.AbandonAssembly(block.key);
    }
  }

  // Stores layer by layer, all blocks at once, as a chunk of a prompt is computed.
  void Prefill(const TransferPtr& transfer) {
    events_.After(transfer->peace        ? events_.Uniform(kSimMs, 20 * kSimMs)
                  : events_.Chance(0.03) ? events_.Uniform(0, 3 * kSimSecond)
                                         : events_.Uniform(0, 60 * kSimMs),
                  [this, transfer] {
                    if (Step(transfer)) Prefill(transfer);
                  });
  }

  // False: there is nothing more to do.
  bool Step(const TransferPtr& transfer) {
    if (!Node(transfer->producer).running() ||
        Node(transfer->producer).member().incarnation != transfer->producer_life) {
      return false;
    }
    if (Node(transfer->producer).stopped()) return true;
    TicketSimStore& store = Node(transfer->producer).process().store;
    const std::size_t left =
        *std::max_element(transfer->layers_left.begin(), transfer->layers_left.end());
    if (transfer->engine_gone || left == 0) {
      // What a dead engine left is given up.
      for (const TicketBlock& block : transfer->blocks) {
        if (transfer->engine_gone) store.AbandonAssembly(block.key);
      }
      return false;
    }
    for (std::uint32_t i = 0; i < transfer->blocks.size(); ++i) {
      const TicketBlock& block = transfer->blocks[i];
      if (transfer->layers_left[i] < left) continue;
      if (left == block.layer_count) store.BeginAssembly(block.key, block.layer_count);
      store.FinishLayer(block.key, block.layer_count - left);
      transfer->layers_left[i] = left - 1;
      if (left > 1) continue;
      transfer->finished_at[i] = events_.now();
      const bool fails = !transfer->peace && events_.Chance(0.05);
      events_.After(events_.Uniform(0, 5 * kSimMs), [this, transfer, key = block.key, fails] {
        if (!Node(transfer->producer).running() ||
            Node(transfer->producer).member().incarnation != transfer->producer_life) {
          return;
        }
        TicketSimStore& now = Node(transfer->producer).process().store;
        fails ? now.AbandonAssembly(key) : now.Seal(key);
      });
    }
    return true;
  }

  void Redeem(const TransferPtr& transfer) {
    if (!Lives(transfer->consumer, transfer->consumer_life)) return;
    TicketSimNode& node = Node(transfer->consumer);
    const std::uint64_t id = next_redemption_++;
    TicketRedeem::Request request;
    request.name = transfer->name;
    request.producer = Node(transfer->producer).member();
    request.producer.incarnation = transfer->producer_life;
    const std::int64_t limit =
        transfer->peace ? 10 * kSimSecond : events_.Uniform(100 * kSimMs, 10 * kSimSecond);
    request.deadline_nanos = node.process().loop.clock().MonotonicNanos() + limit;
    redemptions_[id] = {transfer->consumer, transfer->consumer_life, events_.now() + limit,
                        stops_[transfer->consumer]};
    ++report_.redemptions;
    const TicketRedeem::CallerId caller = node.process().redeem.Start(
        request,
        [this, transfer](const std::vector<TicketRedeem::Block>& blocks,
                         const std::vector<std::uint32_t>& changed) {
          for (const std::uint32_t i : changed) CheckLayers(*transfer, i, blocks[i]);
        },
        [this, transfer, id](const Outcome& outcome) { Done(transfer, id, outcome); });
    if (transfer->peace || !events_.Chance(0.1)) return;
    events_.After(events_.Exponential(300 * kSimMs), [this, transfer, id, caller] {
      if (!Lives(transfer->consumer, transfer->consumer_life)) return;
      Node(transfer->consumer).process().redeem.Cancel(caller);
      redemptions_.erase(id);
    });
  }

  // In peace a finished block is here soon.
  void CheckLayers(const Transfer& transfer, std::uint32_t i, const TicketRedeem::Block& block) {
    if (!transfer.peace || network_.loses() || block.here.count() < block.what.layer_count) return;
    if (block.fate != Fate::kOpen) return;
    const auto finished = transfer.finished_at.find(i);
    if (finished == transfer.finished_at.end()) return Fail("a layer came before it was stored");
    if (events_.now() > finished->second + kLastLayer) {
      Fail(absl::StrCat("the last layer of a block took ",
                        (events_.now() - finished->second) / kSimMs, " ms"));
    }
  }

  void Done(const TransferPtr& transfer, std::uint64_t id, const Outcome& outcome) {
    if (redemptions_.erase(id) == 0) Fail("a redemption ended twice, or after it was cancelled");
    ++transfer->done;
    transfer->done_at = events_.now();
    transfer->outcome = outcome;
    events_.Trace(absl::StrCat(transfer->consumer_life, ": ", outcome.status.ToString()));
    const TicketSimStore& store = Node(transfer->consumer).process().store;
    for (const TicketRedeem::Block& block : outcome.blocks) {
      if (block.fate == Fate::kOpen) {
        Fail("a redemption ended with an open block");
        continue;
      }
      if ((block.fate == Fate::kMissed) != (block.miss != TicketRedeem::Miss::kNone)) {
        Fail("a block was missed for no reason, or has one and was not");
      }
      if (block.fate == Fate::kMissed) continue;
      const SimPages* pages = store.Sealed(block.what.key);
      if (pages == nullptr) continue;  // Evicted since.
      if (!world_.sealed[std::string(block.what.key.view())].contains(SimDigest(*pages))) {
        Fail("a consumer has what nobody sealed");
      }
    }
  }

  void TransferInPeace() {
    const std::size_t producer = Any();
    const std::size_t consumer = (producer + 1) % machines_;
    world_.full = 0;
    const TransferPtr transfer = StartTransfer(producer, consumer, true);
    const std::int64_t end = events_.now() + 12 * kSimSecond;
    while (ok() && events_.now() < end &&
           (transfer->callers == 0 || transfer->done < transfer->callers)) {
      RunFor(20 * kSimMs);
    }
    if (!ok() || network_.loses()) return;
    if (!transfer->outcome.status.ok()) {
      return Fail(absl::StrCat("in peace: ", transfer->outcome.status.ToString()));
    }
    if (transfer->outcome.blocks.size() != transfer->blocks.size())
      return Fail("blocks are missing");
    for (const TicketRedeem::Block& block : transfer->outcome.blocks) {
      if (block.fate != Fate::kSealed) Fail("in peace a block was not sealed");
    }
    RunFor(100 * kSimMs);
    if (Node(producer).process().store.Holds(transfer->name)) {
      Fail("a ticket that was done is held");
    }
  }

  // --- Trouble ---

  void ScheduleTrouble() {
    events_.After(events_.Exponential(800 * kSimMs), [this] {
      if (!storm_) return;
      Trouble(Any());
      ScheduleTrouble();
    });
  }

  void Trouble(std::size_t i) {
    TicketSimNode& node = Node(i);
    if (!node.running()) return Start(i);
    switch (events_.Uniform(0, 9)) {
      case 0:
      case 1:
        return Kill(i);
      case 2:
        Kill(i);
        return Start(i);
      case 3:
      case 4:
        ++stops_[i];
        events_.Trace(absl::StrCat("stop or continue ", node.member().incarnation));
        return node.stopped() ? node.Continue() : node.Stop();
      case 5:
      case 6:
        events_.Trace(absl::StrCat("part or join ", node.member().id));
        return network_.SetGroup(i, network_.group(i) == 0 ? 1 : 0);
      case 7:
        return network_.SetSlow(i, network_.slow(i) ? 0 : events_.Uniform(0, 400 * kSimMs));
      case 8:
        node.lies = node.lies > 0 ? 0 : 0.3;
        return;
      default:
        // A session ends, and with it all its tickets.
        if (!node.stopped() && world_.fault != TicketFault::kNoRevocation) {
          node.process().table.RevokeAll(absl::StrCat("session ", events_.Uniform(0, 6)));
        }
    }
  }

  void Start(std::size_t i) {
    Node(i).Start();
    events_.Trace(absl::StrCat("start ", Node(i).member().incarnation));
  }
  void Kill(std::size_t i) {
    events_.Trace(absl::StrCat("kill ", Node(i).member().incarnation));
    std::erase_if(redemptions_, [i](const auto& entry) { return entry.second.node == i; });
    Node(i).Kill();
  }

  void Heal() {
    events_.Trace("everything is well");
    for (std::size_t i = 0; i < machines_; ++i) {
      network_.SetGroup(i, 0);
      network_.SetSlow(i, 0);
      Node(i).lies = 0;
      if (!Node(i).running()) Start(i);
      if (Node(i).stopped()) Node(i).Continue();
    }
  }

  SimEvents events_;
  const std::size_t machines_;
  SimNetwork network_;
  TicketSimReport report_;
  TicketSimWorld world_{.events = events_, .network = network_};
  bool storm_ = false;
  std::uint64_t next_prompt_ = 0;
  std::uint64_t next_redemption_ = 1;
  std::map<std::uint64_t, Redemption> redemptions_;
  std::map<std::size_t, std::uint64_t> stops_;
};

}  // namespace

std::optional<TicketFault> TicketFaultNamed(const std::string& name) {
  for (const NamedFault& fault : kFaults) {
    if (name == fault.name) return fault.fault;
  }
  return std::nullopt;
}

std::vector<std::string> TicketFaultNames() {
  std::vector<std::string> names;
  for (const NamedFault& fault : kFaults) names.emplace_back(fault.name);
  return names;
}

TicketSimReport RunTicketSim(const TicketSimOptions& options) { return TicketSim(options).Run(); }

}  // namespace kvmill
