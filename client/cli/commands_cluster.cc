// cluster: who is in the cluster, and where in it blocks are, as a daemon knows it; and taking a
// node out.
#include <cstdint>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cli/commands.h"
#include "client/cli/human.h"
#include "client/cli/output.h"
#include "storage/core/status_macros.h"

namespace kvmill::cli {
namespace {

constexpr const char* kStatusHelp =
    "What this daemon knows of its cluster. An admin command: on the daemon's --admin address, or "
    "on its\n"
    "socket for its own user and root.\n"
    "  registration = none (no --cluster), joining, registered, refused (another process holds "
    "the id), left\n"
    "  stale        = no word of etcd for one --lease-ttl: the members are those of then\n"
    "  keeping      = more than a third of the members vanished at once; they are kept for "
    "--member-grace\n";
constexpr const char* kMembersHelp =
    "The nodes of the cluster, as this daemon knows them. An admin command.\n";

constexpr const char* kWhereHelp =
    "Which nodes are asked for a block (its homes), and which say that they have it (its holders). "
    "An admin\n"
    "command. The homes are those of the first block of the run of 32 that the block is in, its "
    "anchor.\n"
    "Without --anchor and --place the daemon finds that when it has the block itself; otherwise "
    "KEY "
    "is taken\n"
    "for an anchor, and all members are asked.\n"
    "  holders: told = false: a home says that the node did\n";

constexpr const char* kDrainHelp =
    "Takes a node out of service, as SIGTERM does: it takes no stores any more, other nodes copy "
    "the blocks\n"
    "that only it has, calls in flight end, it leaves the cluster, and its process ends with 0: "
    "for "
    "good, where\n"
    "nobody starts it again. An admin command, of any node: another one is asked at its --admin. "
    "Returns when\n"
    "the node has left; Ctrl-C ends the waiting, not the drain. A daemon without --cluster is "
    "called by its\n"
    "--node-id, or else by the name of its host.\n"
    "  blocks      = of the node's, those that other nodes have\n"
    "  blocks_left = those that none has: they are missed, or lost without --data-dir; a longer\n"
    "                --drain-timeout of the node leaves fewer\n"
    "  blocks_left_out = those that no node is asked to take: tails, and blocks of tenants that "
    "nodes do not share\n"
    "  alone       = no other node stays in the cluster\n"
    "Exit code 3 when there is no such node.\n";

constexpr const char* kAlone = "this node is alone: its kvmilld was started without --cluster";

bool IsAlone(const ClusterStatus& status) { return status.node_id.empty(); }

const char* StateOf(const ClusterMember& member) {
  return member.draining ? "draining" : "serving";
}

Json MemberJson(const ClusterMember& member) {
  return {{"id", member.id},
          {"incarnation", member.incarnation},
          {"state", StateOf(member)},
          {"zone", member.zone},
          {"capacity_bytes", member.capacity_bytes},
          {"address", member.address},
          {"admin_address", member.admin_address}};
}

Json MembersJson(const std::vector<ClusterMember>& members) {
  Json list = Json::array();
  for (const ClusterMember& member : members) list.push_back(MemberJson(member));
  return list;
}

absl::Status PrintStatus(const CommonFlags& common) {
  KVMILL_ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Connect(common));
  KVMILL_ASSIGN_OR_RETURN(const ClusterStatus status, client->Cluster());
  if (common.json) {
    PrintJson({{"node_id", status.node_id},
               {"registration", status.registration},
               {"stale", status.stale},
               {"keeping", status.keeping},
               {"version", status.version},
               {"problem", status.problem},
               {"members", MembersJson(status.members)}});
    return absl::OkStatus();
  }
  if (IsAlone(status)) {
    std::cout << kAlone << std::endl;
    return absl::OkStatus();
  }
  Report report;
  report.Add("node", status.node_id, status.registration);
  report.Add("members", HumanCount(status.members.size()),
             status.keeping ? "some are kept although etcd has lost them"
             : status.stale ? "as etcd last told; it is silent"
                            : "");
  if (!status.problem.empty()) report.Add("problem", status.problem);
  report.Print();
  return absl::OkStatus();
}

absl::Status PrintMembers(const CommonFlags& common) {
  KVMILL_ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Connect(common));
  KVMILL_ASSIGN_OR_RETURN(const ClusterStatus status, client->Cluster());
  if (common.json) {
    PrintJson({{"members", MembersJson(status.members)}});
    return absl::OkStatus();
  }
  if (IsAlone(status)) {
    std::cout << kAlone << std::endl;
    return absl::OkStatus();
  }
  Table table({{"id", Table::Align::kLeft},
               {"state", Table::Align::kLeft},
               {"zone", Table::Align::kLeft},
               {"capacity", Table::Align::kRight},
               {"address", Table::Align::kLeft},
               {"admin", Table::Align::kLeft},
               {"incarnation", Table::Align::kLeft}});
  for (const ClusterMember& member : status.members) {
    table.Add({member.id, StateOf(member), member.zone, HumanBytes(member.capacity_bytes),
               member.address, member.admin_address, member.incarnation});
  }
  table.Print();
  return absl::OkStatus();
}

struct WhereFlags {
  std::string ns, key, anchor, tenant;
  std::uint32_t place = 0;
};

absl::StatusOr<BlockKey> KeyFlag(const std::string& name, const std::string& hex) {
  absl::StatusOr<BlockKey> key = BlockKey::FromHex(hex);
  if (!key.ok()) return UsageError(absl::StrCat(name, ": ", key.status().message()));
  return key;
}

absl::Status PrintWhere(const CommonFlags& common, const WhereFlags& flags) {
  KVMILL_ASSIGN_OR_RETURN(const BlockKey key, KeyFlag("KEY", flags.key));
  BlockKey anchor;
  if (!flags.anchor.empty()) {
    KVMILL_ASSIGN_OR_RETURN(anchor, KeyFlag("--anchor", flags.anchor));
  } else if (flags.place > 0) {
    return UsageError(absl::StrCat("--place ", flags.place, ": give --anchor KEY, too"));
  }
  KVMILL_ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Connect(common));
  KVMILL_ASSIGN_OR_RETURN(const BlockPlaces places,
                          client->Where(flags.ns, key, anchor, flags.place, {}, flags.tenant));
  if (common.json) {
    Json holders = Json::array();
    for (const BlockPlaces::Holder& holder : places.holders) {
      holders.push_back(MemberJson(holder.member));
      holders.back()["told"] = holder.told;
    }
    PrintJson({{"homes", MembersJson(places.homes)}, {"holders", std::move(holders)}});
    return absl::OkStatus();
  }
  if (places.homes.empty() && places.holders.empty()) {
    KVMILL_ASSIGN_OR_RETURN(const ClusterStatus status, client->Cluster());
    std::cout << (IsAlone(status) ? kAlone : "this node has not heard of any node yet")
              << "; what it has itself 'kvmill ls' says" << std::endl;
    return absl::OkStatus();
  }
  Table table({{"", Table::Align::kLeft},
               {"id", Table::Align::kLeft},
               {"state", Table::Align::kLeft},
               {"zone", Table::Align::kLeft},
               {"address", Table::Align::kLeft},
               {"incarnation", Table::Align::kLeft}});
  const auto add = [&table](const char* what, const ClusterMember& member) {
    table.Add({what, member.id, StateOf(member), member.zone, member.address, member.incarnation});
  };
  for (const ClusterMember& home : places.homes) add("home", home);
  for (const BlockPlaces::Holder& holder : places.holders) {
    add(holder.told ? "holder" : "holder, told of", holder.member);
  }
  table.Print();
  if (places.holders.empty()) {
    std::cout << "no node says that it has this block";
    if (flags.anchor.empty()) {
      std::cout << "; the homes are its own only if it is the first of its run of 32 blocks: for "
                   "another one give --anchor, the key of the first one, and --place, 0 to 31";
    }
    std::cout << std::endl;
  }
  return absl::OkStatus();
}

// A node that drains is gone after its --drain-timeout, which is an hour at most.
constexpr absl::Duration kDrainMax = absl::Hours(2);

// Until the daemon that was asked, and drains itself, answers no more.
absl::Status WaitForEnd(Client& client, Progress& progress, const NodeDrain& drain) {
  const std::string boot_id = client.boot_id();
  for (const absl::Time end = absl::Now() + kDrainMax; absl::Now() < end;) {
    const absl::StatusOr<ServerStatus> status = client.Status({.timeout = absl::Seconds(1)});
    const bool slow = absl::IsDeadlineExceeded(status.status());
    if (!slow && (!status.ok() || client.boot_id() != boot_id)) return absl::OkStatus();
    progress.Update(drain.blocks, drain.blocks + drain.blocks_left,
                    "blocks are on other nodes; calls in flight end");
    absl::SleepFor(absl::Milliseconds(100));
  }
  return absl::DeadlineExceededError("the daemon drains and does not end");
}

absl::Status Drain(const CommonFlags& common, const std::string& node) {
  KVMILL_ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Connect(common));
  // A daemon that does not answer at all is known by --timeout.
  KVMILL_RETURN_IF_ERROR(client->Status().status());
  Progress progress(absl::StrCat("draining ", node));
  const auto show = [&progress](const NodeDrain& drain) {
    progress.Update(drain.blocks, drain.blocks + drain.blocks_left,
                    drain.phase == NodeDrain::Phase::kHandingOver
                        ? "blocks are on other nodes"
                        : "blocks are on other nodes; calls in flight end");
  };
  KVMILL_ASSIGN_OR_RETURN(const NodeDrain drain,
                          client->DrainNode(node, show, {.timeout = kDrainMax}));
  const bool left = drain.phase == NodeDrain::Phase::kLeft;
  if (!left) KVMILL_RETURN_IF_ERROR(WaitForEnd(*client, progress, drain));
  if (common.json) {
    PrintJson({{"node", node},
               {"state", left ? "left" : "ended"},
               {"blocks", drain.blocks},
               {"blocks_left", drain.blocks_left},
               {"blocks_left_out", drain.blocks_left_out},
               {"alone", drain.alone}});
    return absl::OkStatus();
  }
  Report report;
  report.Add("node", node, left ? "has left the cluster" : "answers no more");
  report.Add("blocks", HumanCount(drain.blocks), "are on other nodes");
  report.Add("left", HumanCount(drain.blocks_left),
             drain.blocks_left == 0 ? ""
             : drain.alone          ? "are on its disk, if it has one: no other node stays"
                                    : "are on its disk, if it has one, and on no other node");
  if (drain.blocks_left_out > 0) {
    report.Add("left out", HumanCount(drain.blocks_left_out),
               "tails and others that nodes do not copy: on its disk, if it has one");
  }
  report.Print();
  return absl::OkStatus();
}

}  // namespace

void AddClusterCommands(CommandLine& line) {
  CLI::App* cluster = line.root().add_subcommand("cluster", "Who is in the daemon's cluster");
  cluster->require_subcommand(1);
  line.Add(*cluster, "status", "What the daemon knows of its cluster", kStatusHelp,
           [&line] { return PrintStatus(line.flags()); });
  line.Add(*cluster, "members", "The nodes of the cluster", kMembersHelp,
           [&line] { return PrintMembers(line.flags()); });
  const auto where = std::make_shared<WhereFlags>();  // Of the command's closure.
  CLI::App* app = line.Add(*cluster, "where", "Which nodes have a block", kWhereHelp,
                           [&line, where] { return PrintWhere(line.flags(), *where); });
  app->add_option("key", where->key, "The block, in hex")->required()->type_name("KEY");
  app->add_option("--namespace", where->ns, "Name of the namespace")->required();
  app->add_option("--tenant", where->tenant, "Whose namespace; none: that of who asks")
      ->type_name("NAME");
  app->add_option("--anchor", where->anchor, "First block of its run of 32, in hex")
      ->type_name("KEY");
  app->add_option("--place", where->place, "Place in that run, 0 to 31")
      ->check(CLI::Range(0u, 31u))
      ->type_name("N");
  const auto drained = std::make_shared<std::string>();
  app = line.Add(*cluster, "drain", "Has a node hand over its blocks, leave and end", kDrainHelp,
                 [&line, drained] { return Drain(line.flags(), *drained); });
  app->add_option("node", *drained, "Its id, of 'kvmill cluster members'")
      ->required()
      ->type_name("NODE");
}

}  // namespace kvmill::cli
