// cluster: who is in the cluster, and where in it blocks are, as a daemon knows it.
#include <cstdint>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
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
    "command. The homes are those of the first block of the run of 32 that the block is in: "
    "without "
    "--anchor\n"
    "KEY is that first block.\n"
    "  holders: told = false: a home says that the node did\n";

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
          {"address", member.address}};
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
               {"incarnation", Table::Align::kLeft}});
  for (const ClusterMember& member : status.members) {
    table.Add({member.id, StateOf(member), member.zone, HumanBytes(member.capacity_bytes),
               member.address, member.incarnation});
  }
  table.Print();
  return absl::OkStatus();
}

struct WhereFlags {
  std::string ns, key, anchor;
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
                          client->Where(flags.ns, key, anchor, flags.place));
  if (common.json) {
    Json holders = Json::array();
    for (const BlockPlaces::Holder& holder : places.holders) {
      holders.push_back(MemberJson(holder.member));
      holders.back()["told"] = holder.told;
    }
    PrintJson({{"homes", MembersJson(places.homes)}, {"holders", std::move(holders)}});
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
  app->add_option("--anchor", where->anchor, "First block of its run of 32, in hex")
      ->type_name("KEY");
  app->add_option("--place", where->place, "Place in that run, 0 to 31")
      ->check(CLI::Range(0u, 31u))
      ->type_name("N");
}

}  // namespace kvmill::cli
