#include "service/cluster_node.h"

#include <algorithm>
#include <future>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/core/log.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

std::size_t ServingCount(const MembershipSnapshot& snapshot) {
  return static_cast<std::size_t>(
      std::count_if(snapshot.members.begin(), snapshot.members.end(),
                    [](const Member& member) { return member.state == MemberState::kServing; }));
}

// A line a change, none for what goes on as it was.
void LogChanges(const MembershipSnapshot& before, const MembershipSnapshot& now,
                const Membership::Options& options) {
  const std::string& id = options.self.member.id;
  if (now.registration != before.registration) {
    switch (now.registration) {
      case Registrar::State::kRegistered:
        LogInfo(absl::StrCat("cluster: registered as node \"", id, "\""));
        break;
      case Registrar::State::kRefused:
        LogError(absl::StrCat("cluster: ", now.problem.message()));
        break;
      case Registrar::State::kLeft:
        LogInfo(absl::StrCat("cluster: node \"", id, "\" leaves"));
        break;
      case Registrar::State::kJoining:
        LogWarning(absl::StrCat("cluster: node \"", id,
                                "\" is registered no more; it serves on, "
                                "and registers again"));
        break;
    }
  } else if (!now.problem.ok() && now.problem.code() != before.problem.code()) {
    LogWarning(absl::StrCat("cluster: ", now.problem.message(), "; trying again"));
  }
  if (now.stale != before.stale) {
    if (now.stale) {
      LogWarning(absl::StrCat("cluster: no word of etcd for ", options.lease_seconds,
                              " s: the members are those of then"));
    } else {
      LogInfo("cluster: the members are what etcd has");
    }
  }
  if (now.keeping && !before.keeping) {
    LogWarning(absl::StrCat("cluster: more than a third of the members vanished within ",
                            options.lease_seconds, " s: they are kept for ", options.grace_seconds,
                            " s, unless they come back"));
  }
  if (now.version != before.version) {
    LogInfo(absl::StrCat("cluster: nodes registered in etcd: ", now.members.size(),
                         ", of which serve: ", ServingCount(now)));
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<ClusterNode>> ClusterNode::Start(const Clock& clock,
                                                                TieredStore& store, Options options,
                                                                const MakeRegistry& make_registry) {
  KVMILL_RETURN_IF_ERROR(Membership::Check(options.membership));
  std::unique_ptr<ClusterNode> node(new ClusterNode(clock, options.membership));
  KVMILL_ASSIGN_OR_RETURN(node->registry_, make_registry(node->loop_));
  node->view_maker_ = std::make_unique<WorkerPool>(1, "views");
  options.blocks.self = options.tickets.self = options.membership.self.member;
  options.blocks.tls = options.clients.tls;
  node->loop_.Run([&] {
    node->clients_ = std::make_unique<PeerClients>(node->loop_, options.clients);
    node->blocks_ =
        std::make_unique<ClusterBlocks>(node->loop_, store, *node->clients_, options.blocks);
    node->tickets_ =
        std::make_unique<ClusterTickets>(node->loop_, store, node->blocks_->peers(),
                                         *node->clients_, node->blocks_->health(), options.tickets);
    node->views_ = std::make_unique<ViewKeeper>(node->ViewOptions());
    node->membership_ = std::make_unique<Membership>(
        node->loop_, *node->registry_, node->membership_options_,
        [self = node.get()](std::shared_ptr<const MembershipSnapshot> snapshot) {
          self->Published(std::move(snapshot));
        });
    node->membership_->Start();
  });
  return node;
}

ClusterNode::~ClusterNode() {
  loop_.Stop();
  view_maker_.reset();
  membership_.reset();
  registry_.reset();
  views_.reset();
  tickets_.reset();
  blocks_.reset();
  clients_.reset();
}

ViewKeeper::Options ClusterNode::ViewOptions() {
  ViewKeeper::Options options;
  options.background = [this](std::function<void()> work, std::function<void()> done) {
    view_maker_->Post([this, work = std::move(work), done = std::move(done)]() mutable {
      work();
      loop_.Post(std::move(done));
    });
  };
  options.publish = [this](const std::shared_ptr<const ClusterView>& view) {
    blocks_->SetView(view);
  };
  options.refuse = [](const absl::Status& status) {
    LogError(
        absl::StrCat("cluster: the members make no view, the last one stays: ", status.message()));
  };
  return options;
}

std::shared_ptr<const MembershipSnapshot> ClusterNode::snapshot() const {
  MutexLock lock(mu_);
  return snapshot_;
}

void ClusterNode::Published(std::shared_ptr<const MembershipSnapshot> snapshot) {
  const std::shared_ptr<const MembershipSnapshot> before = this->snapshot();
  LogChanges(*before, *snapshot, membership_options_);
  if (snapshot->version != before->version) {
    clients_->Keep(snapshot->members);
    blocks_->SetMembers(snapshot->members);
    views_->SetMembers(snapshot->members);
  }
  tickets_->SetMembers(snapshot->members, !snapshot->stale);
  MutexLock lock(mu_);
  snapshot_ = std::move(snapshot);
}

void ClusterNode::SetDraining() {
  loop_.Post([this] { membership_->SetState(MemberState::kDraining); });
}

absl::Status ClusterNode::Leave(std::chrono::milliseconds limit) {
  std::promise<absl::Status> left;
  std::future<absl::Status> future = left.get_future();
  loop_.Run([&] {
    const std::int64_t deadline =
        loop_.clock().MonotonicNanos() +
        std::chrono::duration_cast<std::chrono::nanoseconds>(limit).count();
    membership_->Leave(deadline, [&left](const absl::Status& status) { left.set_value(status); });
  });
  return future.get();
}

}  // namespace kvmill
