#include "tests/cluster/ticket_sim_node.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "service/cluster/peers.h"
#include "storage/core/check.h"
#include "storage/core/checksum.h"

namespace kvmill {

namespace {

std::uint64_t ChecksumOf(const std::string& bytes) {
  return Checksum(
      absl::MakeConstSpan(reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()));
}

SimPage PageOf(const std::string& key, std::size_t layer, std::uint64_t encoding) {
  SimPage page;
  page.bytes = absl::StrCat(key, "|", layer, "|", encoding);
  page.checksum = ChecksumOf(page.bytes);
  return page;
}

std::string NameOf(const BlockKey& key) { return std::string(key.view()); }

}  // namespace

std::uint64_t SimDigest(const SimPages& pages) {
  std::string all;
  for (const SimPage& page : pages) absl::StrAppend(&all, page.checksum, ",");
  return ChecksumOf(all);
}

// --- TicketSimStore ---

bool TicketSimStore::BeginAssembly(const BlockKey& key, std::size_t layer_count) {
  const std::string name = NameOf(key);
  if (sealed_.contains(name) || assemblies_.contains(name)) return false;
  auto assembly = std::make_shared<Assembly>();
  const std::uint64_t encoding = ++world_.encodings;
  assembly->layer_count = layer_count;
  for (std::size_t layer = 0; layer < layer_count; ++layer) {
    assembly->pages.push_back(PageOf(name, layer, encoding));
  }
  assemblies_[name] = assembly;
  for (auto& [id, held] : held_) {
    for (std::size_t i = 0; i < held.blocks.size(); ++i) {
      if (held.blocks[i].key == key && !held.over[i]) held.bound[i] = assembly;
    }
  }
  return true;
}

void TicketSimStore::FinishLayer(const BlockKey& key, std::size_t layer) {
  const auto found = assemblies_.find(NameOf(key));
  if (found == assemblies_.end() || found->second->finished.Has(layer)) return;
  Assembly& assembly = *found->second;
  assembly.finished.Add(layer);
  TellHolds(found->second, false,
            [this, layers = assembly.finished, digest = SimDigest(assembly.pages)](
                HoldId hold, std::uint32_t block) { TellFinished(hold, block, layers, digest); });
}

void TicketSimStore::Seal(const BlockKey& key) {
  const std::string name = NameOf(key);
  const auto found = assemblies_.find(name);
  if (found == assemblies_.end()) return;
  const std::shared_ptr<Assembly> assembly = found->second;
  if (assembly->finished.count() < assembly->layer_count) return;
  const std::uint64_t digest = SimDigest(assembly->pages);
  world_.sealed[name].insert(digest);
  sealed_[name] = assembly->pages;
  assembly->sealed = true;
  assemblies_.erase(found);
  if (world_.fault == TicketFault::kLosesSeals) return;
  TellHolds(assembly, true,
            [this, digest](HoldId hold, std::uint32_t block) { TellSealed(hold, block, digest); });
}

void TicketSimStore::AbandonAssembly(const BlockKey& key) {
  const auto found = assemblies_.find(NameOf(key));
  if (found == assemblies_.end()) return;
  const std::shared_ptr<Assembly> assembly = found->second;
  assemblies_.erase(found);
  TellHolds(assembly, true, [this](HoldId hold, std::uint32_t block) {
    Tell(hold, block, [&](Held& held) { held.events->Failed(hold, block); });
  });
}

bool TicketSimStore::IsHeld(const std::string& key) const {
  if (world_.fault == TicketFault::kEvictsHeld) return false;
  for (const auto& [id, held] : held_) {
    for (const TicketBlock& block : held.blocks) {
      if (block.key.view() == key) return true;
    }
  }
  return false;
}

void TicketSimStore::Evict(const BlockKey& key) {
  if (!IsHeld(NameOf(key))) sealed_.erase(NameOf(key));
}

const SimPages* TicketSimStore::Sealed(const BlockKey& key) const {
  const auto found = sealed_.find(NameOf(key));
  return found == sealed_.end() ? nullptr : &found->second;
}

void TicketSimStore::TellHolds(const std::shared_ptr<Assembly>& assembly, bool end,
                               const std::function<void(HoldId, std::uint32_t)>& tell) {
  for (auto& [id, held] : held_) {
    for (std::uint32_t i = 0; i < held.blocks.size(); ++i) {
      if (held.bound[i] != assembly || held.over[i]) continue;
      held.over[i] = end;
      loop_.Post([id = id, i, tell] { tell(id, i); });
    }
  }
}

void TicketSimStore::Tell(HoldId hold, std::uint32_t, const std::function<void(Held&)>& tell) {
  const auto found = held_.find(hold);
  if (found != held_.end() && !found->second.released) tell(found->second);
}

void TicketSimStore::TellFinished(HoldId hold, std::uint32_t block, const LayerSet& layers,
                                  std::uint64_t digest) {
  Tell(hold, block, [&](Held& held) {
    const std::size_t layer_count = held.blocks[block].layer_count;
    held.progress_at = loop_.clock().MonotonicNanos();
    LayerSet told = layers;
    if (world_.fault == TicketFault::kReadsUnfinished) {
      told = LayerSet::First(std::min<std::size_t>(told.end() + 1, layer_count));
    }
    held.events->Finished(hold, block, told);
    if (world_.fault == TicketFault::kSealsEarly && layers.count() == layer_count) {
      held.events->Sealed(hold, block, digest);
    }
  });
}

void TicketSimStore::TellSealed(HoldId hold, std::uint32_t block, std::uint64_t digest) {
  Tell(hold, block, [&](Held& held) {
    held.progress_at = loop_.clock().MonotonicNanos();
    held.events->Sealed(hold, block, digest);
  });
}

absl::StatusOr<TicketHolds::HoldId> TicketSimStore::Hold(const Fingerprint&,
                                                         const std::vector<TicketBlock>& blocks,
                                                         Events* events) {
  const HoldId id = next_hold_++;
  Held& held = held_[id];
  held.blocks = blocks;
  held.bound.resize(blocks.size());
  held.over.assign(blocks.size(), false);
  held.pulled.resize(blocks.size());
  held.events = events;
  held.made_at = held.progress_at = loop_.clock().MonotonicNanos();
  for (std::uint32_t i = 0; i < blocks.size(); ++i) {
    const std::string name = NameOf(blocks[i].key);
    if (const auto sealed = sealed_.find(name); sealed != sealed_.end()) {
      held.over[i] = true;
      loop_.Post([this, id, i, digest = SimDigest(sealed->second)] { TellSealed(id, i, digest); });
    } else if (const auto open = assemblies_.find(name); open != assemblies_.end()) {
      held.bound[i] = open->second;
      if (open->second->finished.empty()) continue;
      loop_.Post(
          [this, id, i, layers = open->second->finished, digest = SimDigest(open->second->pages)] {
            TellFinished(id, i, layers, digest);
          });
    }
  }
  return id;
}

void TicketSimStore::Promise(const TicketName& name, std::int64_t ttl_nanos,
                             std::int64_t life_nanos) {
  promised_[name] = next_hold_ - 1;
  Held& held = held_.at(next_hold_ - 1);
  held.name = name;
  held.ttl_nanos = ttl_nanos;
  held.life_nanos = life_nanos;
}

void TicketSimStore::Asked(const TicketName& name) {
  const auto found = promised_.find(name);
  if (found == promised_.end()) return;
  Held& held = held_.at(found->second);
  if (!held.asked) held.progress_at = loop_.clock().MonotonicNanos();
  held.asked = true;
}

void TicketSimStore::Pulled(HoldId hold, std::uint32_t block, const LayerSet& layers) {
  Held& held = held_.at(hold);
  if (held.pulled[block].HasAll(layers)) return;
  held.pulled[block].Add(layers);
  held.progress_at = loop_.clock().MonotonicNanos();
}

void TicketSimStore::Release(HoldId hold) {
  const auto found = held_.find(hold);
  if (found == held_.end() || found->second.released) {
    return world_.fail(absl::StrCat(node_, " released hold ", hold, " twice"));
  }
  Held& held = found->second;
  const bool by_deadline = expired() != expired_;
  expired_ = expired();
  const std::int64_t now = loop_.clock().MonotonicNanos();
  if (by_deadline && now < held.progress_at + held.ttl_nanos &&
      now < held.made_at + held.life_nanos) {
    world_.fail(absl::StrCat(node_, " let go of hold ", hold, " before its deadline"));
  }
  held.released = true;
  promised_.erase(held.name);
  if (world_.fault != TicketFault::kKeepsHolds) held_.erase(found);
}

std::string TicketSimStore::Overdue() const {
  const std::int64_t now = loop_.clock().MonotonicNanos();
  for (const auto& [id, held] : held_) {
    if (now <= std::min(held.progress_at + held.ttl_nanos, held.made_at + held.life_nanos))
      continue;
    return absl::StrCat(node_, " has hold ", id, " after its deadline");
  }
  return "";
}

SimPage TicketSimStore::ReadPage(HoldId hold, std::uint32_t block, std::size_t layer) {
  const Held& held = held_.at(hold);
  if (const std::shared_ptr<Assembly>& bound = held.bound[block];
      bound != nullptr && !bound->sealed) {
    if (!bound->finished.Has(layer)) {
      world_.fail(absl::StrCat(node_, " read layer ", layer, " before it was finished"));
    }
    return bound->pages[layer];
  }
  const auto sealed = sealed_.find(NameOf(held.blocks[block].key));
  if (sealed != sealed_.end()) return sealed->second[layer];
  world_.fail(absl::StrCat(node_, " no longer has block ", block, " of hold ", hold));
  return {};
}

TicketCopies::CopyId TicketSimStore::Begin(const Fingerprint&, const TicketBlock& block,
                                           Done done) {
  const CopyId id = next_copy_++;
  Copy& copy = copies_[id];
  copy.block = block;
  copy.pages.resize(block.layer_count);
  loop_.After(world_.events.Uniform(0, 3 * kSimMs), [this, id, done = std::move(done)] {
    const auto found = copies_.find(id);
    if (found == copies_.end() || found->second.begun) return;
    absl::Status status;
    const std::string name = NameOf(found->second.block.key);
    if (sealed_.contains(name)) status = absl::AlreadyExistsError("it is here");
    if (assemblies_.contains(name)) status = absl::AbortedError("it is being assembled here");
    if (world_.events.Chance(world_.full)) status = absl::ResourceExhaustedError("full");
    if (status.ok()) {
      found->second.begun = true;
    } else {
      copies_.erase(found);
    }
    done(status);
  });
  return id;
}

void TicketSimStore::Abandon(CopyId id) {
  if (committing_.erase(id) != 0) return;
  if (world_.fault == TicketFault::kLeaksCopies && copies_.contains(id)) {
    copies_.at(id).begun = true;
    return;
  }
  if (copies_.erase(id) == 0) world_.fail(absl::StrCat(node_, " gave up copy ", id, " twice"));
}

bool TicketSimStore::Land(CopyId id, std::size_t layer, const SimPage& page) {
  const auto found = copies_.find(id);
  if (found == copies_.end()) return true;  // Given up meanwhile.
  Copy& copy = found->second;
  const std::string want = absl::StrCat(copy.block.key.view(), "|", layer, "|");
  const bool right = ChecksumOf(page.bytes) == page.checksum && page.bytes.starts_with(want);
  if (!right && world_.fault != TicketFault::kTrustsPages) {
    ++world_.report->damaged;
    return false;
  }
  if (copy.here.Has(layer)) world_.fail(absl::StrCat(node_, " pulled a page twice"));
  copy.pages[layer] = page;
  copy.here.Add(layer);
  return true;
}

void TicketSimStore::Commit(CopyId id, std::uint64_t digest, Done done) {
  const auto found = copies_.find(id);
  if (found == copies_.end()) return world_.fail(absl::StrCat(node_, " commits no copy"));
  Copy copy = std::move(found->second);
  copies_.erase(found);
  if (pulls_.contains(id)) world_.fail(absl::StrCat(node_, " commits while pages come"));
  if (copy.here.count() < copy.block.layer_count) {
    world_.fail(absl::StrCat(node_, " commits a copy without all its pages"));
  }
  committing_[id] = std::move(done);
  loop_.After(world_.events.Uniform(0, 2 * kSimMs), [this, id, digest, copy = std::move(copy)] {
    const std::string name = NameOf(copy.block.key);
    const std::uint64_t have = SimDigest(copy.pages);
    absl::Status status;
    if (have != digest && world_.fault != TicketFault::kTrustsSeals &&
        world_.fault != TicketFault::kTrustsPages) {
      ++world_.report->damaged;
      status = absl::DataLossError("other pages than were sealed");
    } else if (sealed_.contains(name)) {
      status = absl::AlreadyExistsError("it is here");
    } else {
      bool right = world_.sealed[name].contains(have);
      for (const SimPage& page : copy.pages) right &= ChecksumOf(page.bytes) == page.checksum;
      if (!right) world_.fail(absl::StrCat(node_, " sealed ", name, ", which nobody sealed so"));
      sealed_[name] = copy.pages;
      ++world_.report->blocks_sealed;
    }
    auto node = committing_.extract(id);
    if (!node.empty()) node.mapped()(status);
  });
}

// --- TicketSimPeers ---

TicketSimPeers::~TicketSimPeers() {
  *alive_ = false;
  for (auto& [id, call] : calls_) loop_.Cancel(call.timer);
}

void TicketSimPeers::Send(std::size_t from, std::size_t to, const std::function<void()>& arrive) {
  world_.network.Send(from, to, arrive);
  if (world_.events.Chance(world_.duplicates)) world_.network.Send(from, to, arrive);
}

TicketPeers::CallId TicketSimPeers::Start(const Member& producer, std::int64_t deadline_nanos,
                                          Fail fail, std::function<void()> over,
                                          std::function<void(TicketSimNode&, const Reply&)> serve) {
  const CallId id = next_++;
  Call& call = calls_[id];
  call.over = std::move(over);
  if (world_.fault != TicketFault::kLosesCalls) {
    call.timer = loop_.At(deadline_nanos, [this, id, fail] {
      End(id, [&] { fail(absl::DeadlineExceededError("no answer in time")); });
    });
  }
  std::size_t to = 0;
  KVMILL_CHECK(absl::SimpleAtoi(producer.address, &to));
  const Reply reply = [this, id, to, alive = alive_, from = machine_,
                       world = &world_](std::function<void()> run) {
    const auto arrive = [this, id, alive, run = std::move(run)] {
      if (!*alive) return;
      loop_.Post([this, id, alive, run] {
        if (*alive) End(id, run);
      });
    };
    world->network.Send(to, from, arrive);
    if (world->events.Chance(world->duplicates)) world->network.Send(to, from, arrive);
  };
  Send(machine_, to, [world = &world_, to, producer, reply, fail, serve = std::move(serve)] {
    TicketSimNode& host = *world->nodes[to];
    if (!host.running()) {
      return reply([fail] { fail(absl::UnavailableError("nobody is there")); });
    }
    if (host.member().id != producer.id || host.member().incarnation != producer.incarnation) {
      return reply([fail] { fail(ReplacedError("another process is there")); });
    }
    host.process().loop.Post([&host, reply, serve, alive = host.process().alive] {
      if (*alive) serve(host, reply);
    });
  });
  return id;
}

void TicketSimPeers::End(CallId id, const std::function<void()>& run) {
  auto node = calls_.extract(id);
  if (node.empty()) return;
  loop_.Cancel(node.mapped().timer);
  if (node.mapped().over != nullptr) node.mapped().over();
  run();
}

void TicketSimPeers::Cancel(CallId call) {
  End(call, [] {});
}

TicketPeers::CallId TicketSimPeers::Redeem(const Member& producer, const TicketName& name,
                                           std::uint64_t seen, std::int64_t wait_nanos,
                                           std::int64_t deadline_nanos, Done<TicketNews> done) {
  return Start(
      producer, deadline_nanos, done, nullptr,
      [world = &world_, name, consumer = self_, seen, wait_nanos, done](TicketSimNode& host,
                                                                        const Reply& reply) {
        host.process().table.Redeem(
            name, consumer, seen, wait_nanos,
            [world, &host, name, reply, done](absl::StatusOr<TicketNews> news) {
              if (news.ok()) host.process().store.Asked(name);
              if (news.ok() && world->events.Chance(host.lies) && !news->changed.empty()) {
                TicketBlockNews& change = news->changed[static_cast<std::size_t>(
                    world->events.Uniform(0, static_cast<std::int64_t>(news->changed.size()) - 1))];
                switch (world->events.Uniform(0, 4)) {
                  case 0:
                    change.digest ^= 1;
                    break;
                  case 1:
                    change.block += 1;
                    break;
                  case 2:
                    change.finished.Add(static_cast<std::size_t>(world->events.Uniform(0, 7)));
                    break;
                  case 3:
                    change.state = static_cast<TicketBlockState>(world->events.Uniform(0, 4));
                    break;
                  default:
                    news->version += 1;
                }
              }
              reply([done, news = std::move(news)] { done(news); });
            });
      });
}

TicketPeers::CallId TicketSimPeers::Pull(const Member& producer, const TicketName& name,
                                         std::vector<Piece> pieces, std::int64_t deadline_nanos,
                                         Done<std::vector<Landed>> done) {
  for (const Piece& piece : pieces) store_.PullBegins(piece.copy);
  return Start(
      producer, deadline_nanos, done,
      [this, pieces] {
        for (const Piece& piece : pieces) store_.PullEnds(piece.copy);
      },
      [this, world = &world_, name, consumer = self_, pieces, done](TicketSimNode& host,
                                                                    const Reply& reply) {
        struct Came {
          std::size_t piece = 0, layer = 0;
          SimPage page;
        };
        std::vector<Came> came;
        for (std::size_t p = 0; p < pieces.size(); ++p) {
          const absl::StatusOr<TicketHolds::HoldId> hold =
              host.process().table.Read(name, consumer, pieces[p].block, pieces[p].layers);
          if (absl::IsInvalidArgument(hold.status())) continue;  // Such pages are not there.
          if (!hold.ok()) {
            return reply([done, status = hold.status()] { done(status); });
          }
          host.process().store.Pulled(*hold, pieces[p].block, pieces[p].layers);
          for (std::size_t layer = 0; layer < pieces[p].layers.end(); ++layer) {
            if (!pieces[p].layers.Has(layer)) continue;
            came.push_back(
                {p, layer, host.process().store.ReadPage(*hold, pieces[p].block, layer)});
          }
        }
        if (!came.empty() && world->events.Chance(host.lies)) {
          SimPage& page = came[static_cast<std::size_t>(world->events.Uniform(
                                   0, static_cast<std::int64_t>(came.size()) - 1))]
                              .page;
          if (world->events.Chance(0.5)) {
            page.bytes += "7";  // A page that is right in itself, and not what was sealed.
            page.checksum = ChecksumOf(page.bytes);
          } else {
            page.bytes[0] ^= 1;
          }
        }
        // Where it comes to, it is run only while the caller lives: `this` is the caller.
        reply([this, pieces, came, done] {
          std::vector<Landed> landed(pieces.size());
          for (const Came& page : came) {
            if (store_.Land(pieces[page.piece].copy, page.layer, page.page)) {
              landed[page.piece].layers.Add(page.layer);
            } else {
              landed[page.piece].damaged = true;
            }
          }
          done(std::move(landed));
        });
      });
}

TicketPeers::CallId TicketSimPeers::Acknowledge(const Member& producer, const TicketName& name,
                                                std::int64_t deadline_nanos,
                                                std::function<void(absl::Status)> done) {
  return Start(
      producer, deadline_nanos, done, nullptr,
      [world = &world_, name, consumer = self_, done](TicketSimNode& host, const Reply& reply) {
        absl::Status status;
        if (world->fault != TicketFault::kNoAcknowledgement) {
          status = host.process().table.Acknowledge(name, consumer);
        }
        reply([done, status] { done(status); });
      });
}

// --- TicketSimNode ---

TicketSimNode::TicketSimNode(TicketSimWorld& world, std::size_t machine)
    : world_(world), machine_(machine) {
  member_.id = absl::StrCat("node", machine);
  member_.address = absl::StrCat(machine);
  member_.capacity_bytes = 1;
}

TicketSimNode::~TicketSimNode() { Kill(); }

TicketSimNode::Process::Process(TicketSimNode* node, std::uint64_t seed)
    : loop(node->world_.events, node->world_.events.Uniform(0, 1000 * kSimSecond),
           node->world_.events.Uniform(-200, 200)),
      table_loop(loop, node->world_.fault != TicketFault::kImmortal),
      store(node->world_, loop, node->member_.incarnation),
      peers(node->world_, loop, store, node->machine_,
            {node->member_.id, node->member_.incarnation}),
      health(loop.clock()),
      secrets(seed),
      table(table_loop, store,
            [this] {
              TicketSecret secret{};
              const std::uint64_t words[2] = {++secrets, 0x7469636B};
              std::memcpy(secret.data(), words, sizeof(words));
              return secret;
            },
            {.tickets_max = 64, .blocks_max = 512}),
      redeem(loop, peers, store, health, seed,
             {.pulls_max = 2,
              .pull_pages_max = 4,
              .begins_max = 3,
              .wait_nanos = kSimSecond,
              .call_nanos = 300 * kSimMs,
              .silence_nanos = 3 * kSimSecond,
              .acknowledge_nanos = 5 * kSimSecond}) {
  store.expired = [this] { return table.counts().expired; };
}

void TicketSimNode::Start() {
  member_.incarnation = absl::StrCat(member_.id, ".", ++lives_);
  process_ = std::make_unique<Process>(this, (machine_ + 1) << 40 | lives_ << 20);
}

void TicketSimNode::Kill() {
  if (process_ == nullptr) return;
  *process_->alive = false;
  const TicketTable::Counts& counts = process_->table.counts();
  world_.report->acknowledged += counts.acknowledged;
  world_.report->revoked += counts.revoked;
  world_.report->expired += counts.expired;
  process_ = nullptr;
}

std::string TicketSimNode::Unfinished() const {
  const Process& p = *process_;
  const std::string what = absl::StrCat(
      p.table.size(), " tickets, ", p.table.blocks(), " blocks promised, ", p.table.waiting(),
      " waits, ", p.store.holds(), " holds, ", p.store.copies(), " copies, ", p.redeem.running(),
      " redemptions, ", p.redeem.callers(), " callers, ", p.redeem.acknowledging(),
      " acknowledgements, ", p.peers.open(), " calls");
  const std::size_t sum = p.table.size() + p.table.blocks() + p.table.waiting() + p.store.holds() +
                          p.store.copies() + p.redeem.running() + p.redeem.callers() +
                          p.redeem.acknowledging() + p.peers.open();
  return sum == 0 ? "" : absl::StrCat(member_.incarnation, " is left with ", what);
}

}  // namespace kvmill
