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

constexpr std::size_t kPrivates = 6;

}  // namespace

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
  if (clients.other == nullptr) return;
  tickets_ = std::make_unique<TicketStorer>(
      model, *clients.local, *clients.other, clients.spaces,
      TicketStorer::Options{.seed = Mix(seed + 1),
                            .name = name_,
                            .store_pages =
                                [this](Space space, const std::string& sequence, unsigned variant) {
                                  return pages_.Start(space, sequence, variant, {});
                                },
                            .failed = [this](const absl::Status& status,
                                             const char* how) { CheckFailure(status, how); }});
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
  return {space, AnySharedName(space), nullptr};
}

Client& Worker::AnyClient() {
  const auto which = Below(5);
  if (which == 0) return *clients_.ucx;
  if (which == 1) return *clients_.inline_encoded;
  if (which == 2) return *clients_.ucx_raw;
  if (which == 3 && clients_.remote != nullptr) return *clients_.remote;
  return *clients_.local;
}

bool Worker::OnOtherNode(const Target& target) {
  return clients_.other != nullptr && target.own == nullptr && OneIn(3);
}

Client& Worker::AnyClientFor(const Target& target) {
  return OnOtherNode(target) ? *clients_.other : AnyClient();
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
  if (tickets_ != nullptr && OneIn(2)) tickets_->Step();
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

std::map<std::string, std::uint64_t> Worker::did() const {
  std::map<std::string, std::uint64_t> all = did_;
  for (const auto& [what, count] : pages_.did()) all[what] += count;
  if (tickets_ != nullptr) {
    for (const auto& [what, count] : tickets_->did()) all[what] += count;
  }
  return all;
}

void Worker::Lookup() {
  const Target target = Pick();
  const ClientNamespace& ns = clients_.spaces[static_cast<int>(target.space)];
  std::vector<BlockKey> keys = KeysOf(target.name);
  if (OneIn(3)) {
    const auto touched = AnyClientFor(target).Touch(ns, keys);
    if (!touched.ok()) CheckFailure(touched.status(), "touch");
    ++did_["touch"];
    return;
  }
  keys.pop_back();
  const TailCandidate tail{TailsOwnKey(target.name), TailTokens(target.name), kWholeBlocks};
  const auto found = AnyClientFor(target).Lookup(ns, keys, {&tail, 1});
  ++did_["lookup"];
  if (!found.ok()) return CheckFailure(found.status(), "lookup");
  if (std::count(found->tiers.begin(), found->tiers.end(), Tier::kPeer) > 0) {
    ++did_["found elsewhere"];
  }
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
  const auto removed = AnyClientFor(target).Remove(clients_.spaces[static_cast<int>(target.space)],
                                                   KeysOf(target.name));
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
