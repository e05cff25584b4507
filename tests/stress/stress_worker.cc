#include "tests/stress/stress_worker.h"

#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace kvmill::stress {
namespace {

// What everybody stores: more than fits in host memory, little enough to meet again.
constexpr std::uint64_t kSharedSequences[kSpaces] = {400, 300};
constexpr std::size_t kPrivates = 6;
constexpr std::size_t kHeldMax = 4;
constexpr unsigned kAll = (1u << kVariants) - 1;

}  // namespace

std::unique_ptr<Clients> Clients::Connect(const std::string& unix_path, const std::string& tcp) {
  auto clients = std::make_unique<Clients>();
  const auto make = [](const std::string& address, DataPath path, EncodeIn encode_in) {
    Client::Options options;
    options.address = address;
    options.timeout = absl::Seconds(30);
    options.path = path;
    options.encode_in = encode_in;
    auto client = Client::Create(options);
    if (!client.ok()) Wrong(client.status().ToString());
    return *std::move(client);
  };
  const std::string local = "unix:" + unix_path;
  clients->local = make(local, DataPath::kInline, EncodeIn::kDaemon);
  clients->ucx = make(local, DataPath::kUcx, EncodeIn::kClient);
  clients->inline_encoded = make(local, DataPath::kInline, EncodeIn::kClient);
  clients->ucx_raw = make(local, DataPath::kUcx, EncodeIn::kDaemon);
  if (!tcp.empty()) clients->remote = make(tcp, DataPath::kUcx, EncodeIn::kClient);
  for (const Space space : {Space::kTiles, Space::kRaw}) {
    for (Client* client : {clients->local.get(), clients->ucx.get(), clients->inline_encoded.get(),
                           clients->ucx_raw.get(), clients->remote.get()}) {
      if (client == nullptr) continue;
      auto ns = client->OpenNamespace(NameOf(space), SpecOf(space));
      if (!ns.ok()) Wrong("open: " + ns.status().ToString());
      clients->spaces[static_cast<std::size_t>(space)] = *std::move(ns);
    }
  }
  return clients;
}

Worker::Worker(const Model& model, const Clients& clients, std::uint64_t seed, std::string name,
               std::uint32_t number, bool reuses_pages_unasked)
    : model_(model),
      clients_(clients),
      random_(seed),
      name_(std::move(name)),
      pages_(model, *clients.local, clients.spaces,
             {.seed = Mix(seed),
              .first_request = (std::uint64_t{number} << 32) + 1,
              .reuses_pages_unasked = reuses_pages_unasked,
              .ended = [this](const PageStorer::Ended& ended) { PagesStored(ended); },
              .failed = [this](const absl::Status& status,
                               const char* how) { CheckFailure(status, how); }}) {
  for (std::size_t i = 0; i < kPrivates; ++i) {
    privates_.push_back(std::make_unique<Private>());
    privates_.back()->space = i % 2 == 0 ? Space::kTiles : Space::kRaw;
    Forget(privates_.back().get());
  }
}

void Worker::Forget(Private* own) {
  own->name = absl::StrCat("own/", name_, "/", ++names_);
  own->allowed = {};
}

Worker::Target Worker::Pick() {
  if (OneIn(3)) {
    Private* own = privates_[Below(privates_.size())].get();
    return {own->space, own->name, own};
  }
  const auto space = static_cast<Space>(Below(kSpaces));
  return {space, absl::StrCat("all/", Below(kSharedSequences[static_cast<int>(space)])), nullptr};
}

Client& Worker::AnyClient() {
  const auto which = Below(5);
  if (which == 0) return *clients_.ucx;
  if (which == 1) return *clients_.inline_encoded;
  if (which == 2) return *clients_.ucx_raw;
  if (which == 3 && clients_.remote != nullptr) return *clients_.remote;
  return *clients_.local;
}

// Some give up in the middle.
CallOptions Worker::AnyTimeout() {
  if (!OneIn(20)) return {};
  return {.timeout = absl::Microseconds(static_cast<std::int64_t>(200 + Below(15'000)))};
}

// What the outside may do to a call: everything else is a fault. DATA_LOSS above all.
void Worker::CheckFailure(const absl::Status& status, const char* how) {
  switch (status.code()) {
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDeadlineExceeded:
    case absl::StatusCode::kAborted:
    case absl::StatusCode::kResourceExhausted:
      ++did_[absl::StrCat(how, " ", absl::StatusCodeToString(status.code()))];
      return;
    default:
      Wrong(absl::StrCat(how, ": ", status.ToString()));
  }
}

void Worker::NotePages(const Target& target, std::uint32_t block, std::uint32_t group,
                       unsigned matching, const char* how) {
  if (target.own == nullptr) {
    if ((matching & 1) != 0) return;
  } else {
    unsigned& allowed = target.own->allowed[block][group];
    if ((allowed & matching) != 0) {
      allowed &= matching;
      return;
    }
    if (matching != 0) {
      Wrong(absl::StrCat(how, ": ", target.name, " in ", NameOf(target.space), " block ", block,
                         " group ", group, " has variant bits ", matching, ", want one of ",
                         allowed));
    }
  }
  Wrong(absl::StrCat(how, ": ", target.name, " in ", NameOf(target.space), " block ", block,
                     " group ", group, " has bytes that nobody stored"));
}

void Worker::Step() {
  if (OneIn(2)) pages_.Step();
  const auto what = Below(1000);
  if (what < 200) {
    Store();
  } else if (what < 260) {
    StorePages();
  } else if (what < 320) {
    StoreByRanks();
  } else if (what < 325) {
    StoreNotFinite();
  } else if (what < 560) {
    Fetch();
  } else if (what < 780) {
    Map();
  } else if (what < 860) {
    if (!held_.empty()) LookAt(held_[Below(held_.size())]);
  } else if (what < 920) {
    Lookup();
  } else if (what < 960) {
    Remove();
  } else if (what < 985) {
    RegisterMemory();
  } else if (what < 992) {
    CutOneSocket();
  } else {
    Administer();
  }
}

void Worker::Store() {
  const Target target = Pick();
  const auto variant = static_cast<unsigned>(Below(target.variants()));
  const StoreInput input(model_, target.space, target.name, variant, {});
  const auto stored = AnyClient().Store(clients_.spaces[static_cast<int>(target.space)],
                                        input.blocks(), {.wait_durable = OneIn(50)}, AnyTimeout());
  ++did_["store"];
  if (!stored.ok()) {
    CheckFailure(stored.status(), "store");
    if (target.own != nullptr) Forget(target.own);
    return;
  }
  bool forget = false;
  for (std::uint32_t b = 0; b < kBlocks; ++b) {
    const StoreBlockResult& block = stored->blocks[b];
    if (!block.status.ok()) CheckFailure(block.status, "store block");
    if (target.own == nullptr) continue;
    auto& allowed = target.own->allowed[b];
    switch (block.outcome) {
      case StoreOutcome::kStored:
        // Of two layer groups one may have been there.
        for (unsigned& group : allowed) group |= 1u << variant;
        break;
      case StoreOutcome::kExisting:
        if (allowed[0] == 0) {
          Wrong(
              absl::StrCat("store: ", target.name, " block ", b, " existed before it was stored"));
        }
        break;
      case StoreOutcome::kPartial:
        Wrong(absl::StrCat("store: ", target.name, " block ", b, " owes heads of a whole store"));
      case StoreOutcome::kFailed:
        forget = true;  // One layer group may be there.
        break;
    }
  }
  if (forget) Forget(target.own);
}

void Worker::StoreByRanks() {
  const Target target = Pick();
  if (target.own != nullptr) return;  // Halves of two variants could meet.
  const auto rank = [&](Client& client, std::uint32_t head) {
    const StoreInput input(model_, target.space, target.name, 0, {head, 1});
    return client
        .Store(clients_.spaces[static_cast<int>(target.space)], input.blocks(),
               {.head_begin = head, .head_count = 1}, {})
        .status();
  };
  Client& first = AnyClient();
  Client& second = AnyClient();
  const bool both = !OneIn(8);  // Else a rank that never comes.
  absl::Status other;
  std::thread beside;
  if (both) beside = std::thread([&] { other = rank(second, 1); });
  const absl::Status one = rank(first, 0);
  if (both) beside.join();
  ++did_["store by ranks"];
  for (const absl::Status& status : {one, other}) {
    if (!status.ok()) CheckFailure(status, "store by ranks");
  }
}

void Worker::StoreNotFinite() {
  const Target target{Space::kRaw, absl::StrCat("nan/", name_, "/", Below(20)), nullptr};
  const StoreInput input(model_, target.space, target.name, 0, {}, true);
  const auto stored =
      AnyClient().Store(clients_.spaces[static_cast<int>(target.space)], input.blocks(), {}, {});
  ++did_["store not finite"];
  if (!stored.ok()) {
    CheckFailure(stored.status(), "store not finite");
  } else if (stored->blocks[0].outcome != StoreOutcome::kFailed) {
    Wrong("store: a block with a NaN was taken");
  }
}

void Worker::StorePages() {
  const bool own = OneIn(3);
  const auto space = static_cast<Space>(Below(kSpaces));
  // A private one has a name that nothing else has until it is all there.
  const std::string sequence =
      own ? absl::StrCat("own/", name_, "/", ++names_)
          : absl::StrCat("all/", Below(kSharedSequences[static_cast<int>(space)]));
  pages_.Start(space, sequence, own ? static_cast<unsigned>(Below(kVariants)) : 0, AnyTimeout());
}

void Worker::PagesStored(const PageStorer::Ended& ended) {
  if (ended.result == nullptr || ended.sequence.rfind("own/", 0) != 0) return;
  for (const StoreBlockResult& block : ended.result->blocks) {
    if (block.outcome != StoreOutcome::kStored) {
      Wrong(absl::StrCat("store pages: ", ended.sequence, " existed before it was stored"));
    }
  }
  Private& own = *privates_[Below(kPrivates)];
  own.space = ended.space;
  own.name = ended.sequence;
  for (auto& block : own.allowed) block.fill(1u << ended.variant);
}

std::map<std::string, std::uint64_t> Worker::did() const {
  std::map<std::string, std::uint64_t> all = did_;
  for (const auto& [what, count] : pages_.did()) all[what] += count;
  return all;
}

class Worker::Sink : public FetchSink {
 public:
  Sink(Worker& worker, const Target& target, bool own_memory)
      : worker_(worker), target_(target), own_memory_(own_memory) {}
  absl::Span<std::byte> PageMemory(const PageId& id, std::size_t page_bytes) override {
    if (!own_memory_) return {};
    std::vector<std::byte>& page = pages_[{id.block, id.group, id.layer_index}];
    page.resize(page_bytes);
    return absl::MakeSpan(page);
  }
  absl::Status OnPage(const PageId& id, const PageView& page) override {
    const unsigned got =
        worker_.model_.Matching(target_.space, target_.name, id.block, target_.variants(), page);
    matching[id.block][id.group] &= got;
    ++pages[id.block][id.group];
    return absl::OkStatus();
  }
  std::array<std::array<unsigned, 2>, kBlocks> matching = [] {
    std::array<std::array<unsigned, 2>, kBlocks> all;
    for (auto& block : all) block.fill(kAll);
    return all;
  }();
  std::array<std::array<unsigned, 2>, kBlocks> pages{};

 private:
  Worker& worker_;
  const Target& target_;
  const bool own_memory_;
  std::map<std::tuple<std::uint32_t, int, std::uint32_t>, std::vector<std::byte>> pages_;
};

void Worker::Fetch() {
  const Target target = Pick();
  Sink sink(*this, target, OneIn(2));
  const auto fetched = AnyClient().Fetch(clients_.spaces[static_cast<int>(target.space)],
                                         KeysOf(target.name), sink, AnyTimeout());
  ++did_["fetch"];
  if (!fetched.ok()) CheckFailure(fetched.status(), "fetch");
  const std::uint32_t layers = kLayers / GroupCount(target.space);
  for (std::uint32_t b = 0; b < kBlocks; ++b) {
    const absl::Status& status = fetched.ok() ? fetched->blocks[b].status : fetched.status();
    if (fetched.ok() && !status.ok() && !absl::IsNotFound(status)) {
      CheckFailure(status, "fetch block");
    }
    for (std::uint32_t g = 0; g < GroupCount(target.space); ++g) {
      // Whatever came was whole, also of a call that failed afterwards.
      if (sink.pages[b][g] > 0) NotePages(target, b, g, sink.matching[b][g], "fetch");
      if (status.ok() && sink.pages[b][g] != layers) {
        Wrong(absl::StrCat("fetch: ", sink.pages[b][g], " pages of group ", g, ", want ", layers));
      }
    }
    if (status.ok()) ++did_["fetched blocks"];
  }
}

void Worker::Map() {
  const Target target = Pick();
  const absl::Duration lease =
      absl::Milliseconds(static_cast<std::int64_t>(OneIn(3) ? 1 + Below(30) : 100 + Below(2000)));
  auto mapped = clients_.local->Map(clients_.spaces[static_cast<int>(target.space)],
                                    KeysOf(target.name), {.lease = lease}, AnyTimeout());
  ++did_["map"];
  if (!mapped.ok()) return CheckFailure(mapped.status(), "map");
  Held held;
  held.target = target;
  held.mapped = *std::move(mapped);
  if (target.own != nullptr) held.seen = *target.own;
  // What is stored after this moment is not what was mapped, but may have the same name.
  for (std::uint32_t b = 0; b < kBlocks; ++b) {
    const absl::Status& status = held.mapped->status(b);
    if (!status.ok() && !absl::IsNotFound(status)) CheckFailure(status, "map block");
    if (status.ok()) ++did_["mapped blocks"];
  }
  LookAt(held);
  if (target.space == Space::kTiles && target.own == nullptr) AttendTo(held);
  if (OneIn(4)) {
    const absl::Status renewed =
        clients_.local->Renew(*held.mapped, absl::Milliseconds(1 + static_cast<int>(Below(500))));
    if (!renewed.ok()) CheckFailure(renewed, "renew");
    ++did_["renew"];
    LookAt(held);
  }
  if (OneIn(12)) OutlastLease(held);
  if (!OneIn(3)) return;  // Released.
  if (held_.size() == kHeldMax) held_.erase(held_.begin() + static_cast<int>(Below(kHeldMax)));
  held_.push_back(std::move(held));
}

// Compares in place; what is read counts when Check says so afterwards.
void Worker::LookAt(Held& held) {
  const Target& target = held.target;
  const std::uint32_t groups = GroupCount(target.space);
  std::array<std::array<unsigned, 2>, kBlocks> matching{};
  std::array<std::array<bool, 2>, kBlocks> seen{};
  for (std::uint32_t b = 0; b < kBlocks; ++b) {
    for (std::uint32_t g = 0; g < groups; ++g) {
      matching[b][g] = kAll;
      for (std::uint32_t layer = 0; layer < kLayers / groups; ++layer) {
        const auto page = held.mapped->Page(b, g, layer);
        if (!page.ok()) {
          if (absl::IsAborted(page.status())) {
            ++did_["look aborted"];
            return;
          }
          if (!absl::IsNotFound(page.status())) CheckFailure(page.status(), "look");
          continue;
        }
        seen[b][g] = true;
        matching[b][g] &= model_.Matching(target.space, target.name, b, target.variants(), *page);
      }
    }
  }
  const absl::Status counts = held.mapped->Check();
  ++did_["look"];
  if (!counts.ok()) {
    if (!absl::IsAborted(counts)) Wrong("check: " + counts.ToString());
    ++did_["look aborted"];
    return;
  }
  Target then = target;
  if (target.own != nullptr) then.own = &held.seen;
  for (std::uint32_t b = 0; b < kBlocks; ++b) {
    for (std::uint32_t g = 0; g < groups; ++g) {
      if (seen[b][g]) NotePages(then, b, g, matching[b][g], "map");
    }
  }
}

void Worker::AttendTo(Held& held) {
  for (std::uint32_t b = 0; b < kWholeBlocks; ++b) {
    if (!held.mapped->status(b).ok()) return;
  }
  const auto layer = static_cast<std::uint32_t>(Below(kLayers));  // Each a group of its own.
  std::vector<AttentionBlock> table(kWholeBlocks * kHeads);
  const absl::Status filled =
      FillAttentionBlocks(*held.mapped, layer, 0, 0, kWholeBlocks, absl::MakeSpan(table));
  if (!filled.ok()) return CheckFailure(filled, "attend");
  const std::vector<float> in_place = Attend(table);
  const absl::Status counts = held.mapped->Check();
  if (!counts.ok()) return CheckFailure(counts, "attend");
  ++did_["attend"];
  if (in_place != Attend(model_.AttentionBlocksOf(held.target.name, 0, layer))) {
    Wrong("attention in place over " + held.target.name + " is not that over its records");
  }
}

void Worker::OutlastLease(Held& held) {
  const absl::Duration left = held.mapped->deadline() - absl::Now();
  if (left > absl::Milliseconds(150)) return;
  absl::SleepFor(std::max(left, absl::ZeroDuration()) + absl::Milliseconds(2));
  ++did_["outlast"];
  if (!absl::IsAborted(held.mapped->Check()) || held.mapped->Page(0, 0, 0).ok()) {
    Wrong("a reader past its lease was not told");
  }
}

void Worker::Lookup() {
  const Target target = Pick();
  const ClientNamespace& ns = clients_.spaces[static_cast<int>(target.space)];
  std::vector<BlockKey> keys = KeysOf(target.name);
  if (OneIn(3)) {
    const auto touched = AnyClient().Touch(ns, keys);
    if (!touched.ok()) CheckFailure(touched.status(), "touch");
    ++did_["touch"];
    return;
  }
  keys.pop_back();
  const TailCandidate tail{TailsOwnKey(target.name), TailTokens(target.name), kWholeBlocks};
  const auto found = AnyClient().Lookup(ns, keys, {&tail, 1});
  ++did_["lookup"];
  if (!found.ok()) return CheckFailure(found.status(), "lookup");
  if (found->tail_tokens != 0 && found->tail_tokens != TailTokens(target.name)) {
    Wrong(absl::StrCat("lookup: a tail of ", found->tail_tokens, " tokens"));
  }
  for (std::uint32_t b = 0; b < found->hit_blocks && target.own != nullptr; ++b) {
    if (target.own->allowed[b][0] == 0) {
      Wrong(
          absl::StrCat("lookup: ", target.name, " block ", b, " was found, and nobody stored it"));
    }
  }
}

void Worker::Remove() {
  const Target target = Pick();
  if (target.own == nullptr && !OneIn(4)) return;
  const auto removed =
      AnyClient().Remove(clients_.spaces[static_cast<int>(target.space)], KeysOf(target.name));
  ++did_["remove"];
  if (!removed.ok()) {
    CheckFailure(removed.status(), "remove");
    if (target.own != nullptr) Forget(target.own);
    return;
  }
  if (target.own != nullptr) target.own->allowed = {};
}

void Worker::RegisterMemory() {
  const ClientNamespace& ns = clients_.spaces[static_cast<int>(Space::kRaw)];
  EngineGeometry geometry;
  geometry.regions = {{0x10000, 1 << 20}};
  EngineLayers layers;
  layers.block_tokens = kBlockTokens;
  layers.head_dim = kHeadDim;
  layers.head_count = kHeads;
  layers.page_tokens = 16;
  layers.page_count = 4;
  layers.page_bytes = layers.page_stride_bytes = std::uint64_t{16} * kHeads * kHeadDim * 2;
  layers.head_stride_bytes = kHeadDim * 2;
  layers.token_stride_bytes = kHeads * kHeadDim * 2;
  layers.keys = {{0, 0}, {0, 1 << 18}};
  layers.values = {{0, 2 << 18}, {0, 3 << 18}};
  geometry.layers = {layers};
  Client& client = clients_.remote != nullptr && OneIn(2) ? *clients_.remote : *clients_.local;
  const auto registration = client.RegisterMemory(ns, geometry);
  ++did_["register"];
  if (!registration.ok()) return CheckFailure(registration.status(), "register");
  if (OneIn(4)) return;  // Its session ends with the client.
  const absl::Status gone = client.UnregisterMemory(*registration);
  // Another session after a cut socket: it has no such registration.
  if (!gone.ok() && !absl::IsNotFound(gone)) CheckFailure(gone, "unregister");
}

// Whatever it carried: gRPC, the door, the data plane. Their threads are not asked, so another one
// may have the number already. By system calls, of which ThreadSanitizer does not know: it would
// report what is meant here.
void Worker::CutOneSocket() {
  std::vector<int> sockets;
  for (int fd = 3; fd < 512; ++fd) {
    sockaddr_storage peer;
    socklen_t bytes = sizeof(peer);
    if (syscall(SYS_getpeername, fd, &peer, &bytes) == 0) sockets.push_back(fd);
  }
  if (sockets.empty()) return;
  syscall(SYS_shutdown, sockets[Below(sockets.size())], SHUT_RDWR);
  ++did_["cut"];
}

void Worker::Administer() {
  const bool may = geteuid() == 0;
  const auto what = Below(10);
  absl::Status status;
  if (what < 4 && may) {
    status = clients_.local->Evict(Tier::kHost, Below(8 << 20)).status();
    ++did_["evict"];
  } else if (what < 6) {
    status = clients_.local->Flush().status();
    ++did_["flush"];
  } else if (what < 9) {
    status = AnyClient().Stat().status();
  } else if (OneIn(8)) {
    status = clients_.local->Clear(clients_.spaces[Below(kSpaces)]).status();
    ++did_["clear"];
  }
  if (!status.ok()) CheckFailure(status, "administer");
}

}  // namespace kvmill::stress
