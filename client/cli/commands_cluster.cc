// cluster: who is in the cluster, as a daemon knows it.
#include <memory>
#include <string>

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

const char* StateOf(const ClusterMember& member) {
  return member.draining ? "draining" : "serving";
}

Json MembersJson(const ClusterStatus& status) {
  Json members = Json::array();
  for (const ClusterMember& member : status.members) {
    members.push_back({{"id", member.id},
                       {"incarnation", member.incarnation},
                       {"state", StateOf(member)},
                       {"zone", member.zone},
                       {"capacity_bytes", member.capacity_bytes},
                       {"address", member.address}});
  }
  return members;
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
               {"members", MembersJson(status)}});
    return absl::OkStatus();
  }
  Report report;
  report.Add("node", status.node_id.empty() ? "-" : status.node_id, status.registration);
  report.Add("members", HumanCount(status.members.size()),
             status.keeping ? "some are kept although etcd has lost them"
             : status.stale ? "etcd may know better"
                            : "");
  if (!status.problem.empty()) report.Add("problem", status.problem);
  report.Print();
  return absl::OkStatus();
}

absl::Status PrintMembers(const CommonFlags& common) {
  KVMILL_ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Connect(common));
  KVMILL_ASSIGN_OR_RETURN(const ClusterStatus status, client->Cluster());
  if (common.json) {
    PrintJson({{"members", MembersJson(status)}});
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

}  // namespace

void AddClusterCommands(CommandLine& line) {
  CLI::App* cluster = line.root().add_subcommand("cluster", "Who is in the daemon's cluster");
  cluster->require_subcommand(1);
  line.Add(*cluster, "status", "What the daemon knows of its cluster", kStatusHelp,
           [&line] { return PrintStatus(line.flags()); });
  line.Add(*cluster, "members", "The nodes of the cluster", kMembersHelp,
           [&line] { return PrintMembers(line.flags()); });
}

}  // namespace kvmill::cli
