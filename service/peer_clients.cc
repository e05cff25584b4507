#include "service/peer_clients.h"

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "service/cluster/peers.h"

namespace kvmill {

PeerClients::Peer::Peer(const Member& member)
    : member_(member), boot_id_(absl::BytesToHexString(member.incarnation)) {}

PeerClients::PeerClients(Loop& loop, const Options& options)
    : loop_(loop),
      options_(options),
      mail_(std::make_shared<LoopMail>(loop)),
      closer_(std::make_unique<WorkerPool>(1, "peer-close")) {}

void PeerClients::Close() {
  if (std::exchange(over_, true)) return;
  mail_->Close();
  if (idle_timer_ != 0) loop_.Cancel(idle_timer_);
  while (!peers_.empty()) {
    Shut(PeerPtr(peers_.begin()->second), absl::UnavailableError("this node stops"));
  }
  closer_.reset();
}

absl::StatusOr<PeerClients::PeerPtr> PeerClients::Get(const Member& member) {
  if (over_) return absl::UnavailableError("this node stops");
  const PeerId id(member);
  if (const auto found = peers_.find(id); found != peers_.end()) return found->second;
  const std::int64_t now = loop_.clock().MonotonicNanos();
  if (const auto replaced = replaced_.find(id); replaced != replaced_.end()) {
    if (now < replaced->second.until) return replaced->second.why;
    replaced_.erase(replaced);
  }
  if (peers_.size() >= options_.clients_max && !MakeRoom()) {
    refused_ = true;
    return absl::ResourceExhaustedError(
        absl::StrCat(options_.clients_max, " other nodes are pulled from: no more than that"));
  }
  Client::Options options;
  options.address = member.address;
  options.path = options_.path;
  options.data_plane_plaintext = options_.data_plane_plaintext;
  options.rdma = options_.rdma;
  options.tls = options_.tls;
  options.encode_threads = 1;  // It neither encodes nor verifies.
  absl::StatusOr<std::unique_ptr<Client>> client = Client::Create(options);
  if (!client.ok()) return absl::UnavailableError(client.status().message());
  const PeerPtr peer(new Peer(member));  // Not make_shared: it is private.
  peer->client_ = *std::move(client);
  peer->used_nanos_ = now;
  peers_[id] = peer;
  size_.store(peers_.size(), std::memory_order_relaxed);
  if (idle_timer_ == 0) idle_timer_ = loop_.After(options_.idle_nanos / 2, [this] { DropIdle(); });
  return peer;
}

bool PeerClients::MakeRoom() {
  PeerPtr oldest;
  for (const auto& [id, peer] : peers_) {
    if (peer->used()) continue;
    if (oldest == nullptr || peer->used_nanos_ < oldest->used_nanos_) oldest = peer;
  }
  if (oldest == nullptr) return false;
  Shut(oldest, absl::UnavailableError("other peers are asked"));
  return true;
}

void PeerClients::End(const PeerPtr& peer) {
  peer->used_nanos_ = loop_.clock().MonotonicNanos();
  if (--peer->uses_ == 0 && std::exchange(refused_, false)) TellWatchers();
}

void PeerClients::Greet(const PeerPtr& peer, std::function<void(absl::Status)> done) {
  if (peer->client_ == nullptr) {
    return mail_->Post([done = std::move(done), why = peer->closed_] { done(why); });
  }
  peer->greetings_.push_back(std::move(done));
  if (peer->greetings_.size() > 1) return;
  // A call that asks for nothing: whatever its answer is, it says who answers.
  CallOptions call;
  call.timeout = absl::Nanoseconds(options_.greet_nanos);
  peer->client_->TouchAsync(
      ClientNamespace(), {}, call,
      [this, mail = mail_, peer](const absl::StatusOr<std::uint64_t>& touched) {
        mail->Post([this, peer, status = touched.status()] { Greeted(peer, status); });
      });
}

void PeerClients::Greeted(const PeerPtr& peer, const absl::Status& status) {
  absl::Status said = Check(peer);  // Who was waiting when it was closed has been told.
  const auto waiting = std::exchange(peer->greetings_, {});
  if (said.ok() && !peer->known_) {
    said = absl::UnavailableError(absl::StrCat("node \"", peer->member_.id, "\" at ",
                                               peer->member_.address,
                                               " does not answer: ", status.message()));
  }
  for (const auto& done : waiting) done(said);
  // A peer that was greeted in vain may make room now.
  if (!peer->used() && std::exchange(refused_, false)) TellWatchers();
}

absl::Status PeerClients::Check(const PeerPtr& peer) {
  if (peer->client_ == nullptr) return peer->closed_;
  const std::string boot_id = peer->client_->boot_id();
  if (boot_id.empty()) return absl::OkStatus();
  peer->known_ = boot_id == peer->boot_id_;
  if (peer->known_) return absl::OkStatus();
  const Member& member = peer->member_;
  const absl::Status why =
      ReplacedError(absl::StrCat("at ", member.address, " answers incarnation ", boot_id,
                                 ", not node \"", member.id, "\" with ", peer->boot_id_));
  const std::int64_t now = loop_.clock().MonotonicNanos();
  std::erase_if(replaced_, [now](const auto& entry) { return entry.second.until <= now; });
  replaced_[PeerId(member)] = {why, now + options_.replaced_nanos};
  Shut(peer, why);
  return why;
}

void PeerClients::Shut(const PeerPtr& peer, const absl::Status& why) {
  peer->closed_ = why;
  peers_.erase(PeerId(peer->member_));
  size_.store(peers_.size(), std::memory_order_relaxed);
  closer_->Post([client = std::exchange(peer->client_, nullptr)]() mutable { client.reset(); });
  for (auto& done : std::exchange(peer->greetings_, {})) {
    mail_->Post([done = std::move(done), why] { done(why); });
  }
  refused_ = false;  // There is room.
  TellWatchers();
}

void PeerClients::TellWatchers() {
  if (std::exchange(telling_, true)) return;
  mail_->Post([this] {
    telling_ = false;
    for (const auto& changed : watchers_) changed();
  });
}

void PeerClients::Keep(const std::vector<Member>& members) {
  std::map<std::string, const Member*> by_id;
  for (const Member& member : members) by_id[member.id] = &member;
  const auto now_there = [&by_id](const PeerId& id) -> const Member* {
    const auto found = by_id.find(std::get<0>(id));
    return found == by_id.end() ? nullptr : found->second;
  };
  std::vector<PeerPtr> gone;
  for (const auto& [id, peer] : peers_) {
    const Member* const member = now_there(id);
    if (member == nullptr || PeerId(*member) != id) gone.push_back(peer);
  }
  for (const PeerPtr& peer : gone) {
    const std::string node = absl::StrCat("node \"", peer->member_.id, "\"");
    const Member* const member = now_there(PeerId(peer->member_));
    const bool restarted = member != nullptr && member->incarnation != peer->member_.incarnation;
    Shut(peer, restarted ? ReplacedError(absl::StrCat(node, " was restarted"))
                         : absl::UnavailableError(absl::StrCat(node, " is no member any more")));
  }
}

void PeerClients::DropIdle() {
  const std::int64_t oldest = loop_.clock().MonotonicNanos() - options_.idle_nanos;
  std::vector<PeerPtr> idle;
  for (const auto& [id, peer] : peers_) {
    if (!peer->used() && peer->used_nanos_ <= oldest) idle.push_back(peer);
  }
  for (const PeerPtr& peer : idle) Shut(peer, absl::UnavailableError("the peer was idle"));
  idle_timer_ = peers_.empty() ? 0 : loop_.After(options_.idle_nanos / 2, [this] { DropIdle(); });
}

}  // namespace kvmill
