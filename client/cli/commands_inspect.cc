// stat, ls, quota, verify: looking at a daemon.
#include <iostream>
#include <memory>
#include <optional>
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

constexpr const char* kStatHelp =
    "Counters since the daemon started, and what it holds now.\n"
    "  compression = 16-bit bytes taken in / bytes stored for them (raw pages, headers and "
    "padding\n"
    "                included); null before the first block\n"
    "  hit_rate    = hit_blocks / lookup_blocks, from 0 to 1\n"
    "'blocks' counts (block, layer group) pairs; 'pages' those blocks' layers in host memory and "
    "on the GPU.\n"
    "'disk_keys' are the keys that encrypt files of the disk tier, by their ids: one of state "
    "'old' "
    "without\n"
    "files may be taken out of --disk-key-file.\n";
constexpr const char* kLsHelp =
    "One entry a (block, layer group): the fastest tier that holds it, its bytes there, its age "
    "since\n"
    "it was stored (or found on disk when the daemon started), and the leases on it.\n";
constexpr const char* kQuotaHelp =
    "What each tenant has in the store, and may have (quota: in the daemon's --tenants file). An "
    "admin\n"
    "command: on the daemon's --admin address, or on its socket for its own user and root.\n"
    "  used       = bytes of its blocks, each once, as ls shows them\n"
    "  charged    = what the hard quota limits: those, blocks on their way in, and removed ones "
    "that are\n"
    "                still read\n"
    "  gpu, host, disk = those in each tier; a block can be in two. What is over the soft quota "
    "in a tier\n"
    "                leaves it first when room is needed there\n"
    "  rejections = blocks that the hard quota refused since the daemon started\n";
constexpr const char* kVerifyHelp =
    "Reads every record of every tier and compares checksums. Damaged copies are dropped (to "
    "readers\n"
    "they are misses) and counted in 'failures'. Exit code 1 when there are any. An admin "
    "command:\n"
    "on the daemon's --admin address, or on its socket for its own user and root.\n";

Json TiersJson(const std::vector<TierUsage>& tiers) {
  Json json = Json::object();
  for (const TierUsage& tier : tiers) {
    json[TierName(tier.tier)] = {{"used_bytes", tier.used_bytes},
                                 {"capacity_bytes", tier.capacity_bytes},
                                 {"blocks", tier.blocks}};
  }
  return json;
}

const char* StateOf(const DiskKeyUse& key) { return key.is_current ? "current" : "old"; }

Json DiskKeysJson(const std::vector<DiskKeyUse>& keys) {
  Json json = Json::array();
  for (const DiskKeyUse& key : keys) {
    json.push_back(
        {{"key", key.key}, {"state", StateOf(key)}, {"files", key.files}, {"bytes", key.bytes}});
  }
  return json;
}

void PrintDiskKeys(const std::vector<DiskKeyUse>& keys) {
  if (keys.empty()) return;
  std::cout << "\n";
  Table table({{"disk key", Table::Align::kLeft},
               {"state", Table::Align::kLeft},
               {"files", Table::Align::kRight},
               {"bytes", Table::Align::kRight}});
  for (const DiskKeyUse& key : keys) {
    table.Add({key.key, !key.is_current && key.files == 0 ? "old, may go" : StateOf(key),
               HumanCount(key.files), HumanBytes(key.bytes)});
  }
  table.Print();
}

absl::Status Stat(const CommonFlags& common) {
  KVMILL_ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Connect(common));
  KVMILL_ASSIGN_OR_RETURN(const ServerStat stat, client->Stat());
  const double hit_rate = stat.lookup_blocks == 0 ? 0
                                                  : static_cast<double>(stat.hit_blocks) /
                                                        static_cast<double>(stat.lookup_blocks);
  const double compression = stat.encoded_bytes_stored == 0
                                 ? 0
                                 : static_cast<double>(stat.raw_bytes_ingested) /
                                       static_cast<double>(stat.encoded_bytes_stored);
  if (common.json) {
    PrintJson({{"blocks", stat.blocks},
               {"pages", stat.pages},
               {"sessions", stat.sessions},
               {"leases", stat.leases},
               {"tiers", TiersJson(stat.tiers)},
               {"raw_bytes_ingested", stat.raw_bytes_ingested},
               {"encoded_bytes_stored", stat.encoded_bytes_stored},
               {"compression", stat.encoded_bytes_stored == 0 ? Json(nullptr) : Json(compression)},
               {"lookup_blocks", stat.lookup_blocks},
               {"hit_blocks", stat.hit_blocks},
               {"hit_rate", hit_rate},
               {"checksum_failures", stat.checksum_failures},
               {"boot_id", stat.boot_id},
               {"uptime_s", stat.uptime_s},
               {"unwritten_blocks", stat.unwritten_blocks},
               {"metadata_bytes", stat.metadata_bytes},
               {"disk_keys", DiskKeysJson(stat.disk_keys)}});
    return absl::OkStatus();
  }
  Report report;
  report.Add("up", HumanSeconds(stat.uptime_s), absl::StrCat("boot ", stat.boot_id));
  report.Add("blocks", HumanCount(stat.blocks),
             absl::StrCat(stat.unwritten_blocks, " of them not yet handed to the disk tier"));
  report.Add("pages", HumanCount(stat.pages), "in host memory and on the GPU");
  report.Add("sessions", HumanCount(stat.sessions));
  report.Add("leases", HumanCount(stat.leases));
  report.Add("taken in", HumanBytes(stat.raw_bytes_ingested), "16-bit K and V since start");
  report.Add("stored", HumanBytes(stat.encoded_bytes_stored),
             stat.encoded_bytes_stored == 0
                 ? ""
                 : absl::StrCat("compression ", HumanNumber(compression, 2), " in total"));
  report.Add(
      "looked up", HumanCount(stat.lookup_blocks),
      absl::StrCat("blocks, ", HumanCount(stat.hit_blocks), " hits, ", HumanPercent(hit_rate)));
  report.Add("metadata", HumanBytes(stat.metadata_bytes), "of index and eviction");
  report.Add("bad checksums", HumanCount(stat.checksum_failures));
  report.Print();
  std::cout << "\n";
  Table table({{"tier", Table::Align::kLeft},
               {"used", Table::Align::kRight},
               {"capacity", Table::Align::kRight},
               {"blocks", Table::Align::kRight}});
  for (const TierUsage& tier : stat.tiers) {
    table.Add({TierName(tier.tier), HumanBytes(tier.used_bytes), HumanBytes(tier.capacity_bytes),
               HumanCount(tier.blocks)});
  }
  table.Print();
  PrintDiskKeys(stat.disk_keys);
  return absl::OkStatus();
}

absl::Status List(const CommonFlags& common, const std::string& name) {
  KVMILL_ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Connect(common));
  KVMILL_ASSIGN_OR_RETURN(const std::vector<ListedBlock> blocks, client->List(name));
  if (common.json) {
    Json list = Json::array();
    for (const ListedBlock& block : blocks) {
      list.push_back({{"namespace", block.namespace_name},
                      {"key", block.key.ToHex()},
                      {"group", block.group},
                      {"blocks", 1},
                      {"tier", TierName(block.tier)},
                      {"bytes", block.bytes},
                      {"age_s", block.age_s},
                      {"leases", block.leases}});
    }
    PrintJson(list);
    return absl::OkStatus();
  }
  Table table({{"namespace", Table::Align::kLeft},
               {"key", Table::Align::kLeft},
               {"group", Table::Align::kRight},
               {"tier", Table::Align::kLeft},
               {"bytes", Table::Align::kRight},
               {"age", Table::Align::kRight},
               {"leases", Table::Align::kRight}});
  for (const ListedBlock& block : blocks) {
    table.Add({block.namespace_name, block.key.ToHex(), absl::StrCat(block.group),
               TierName(block.tier), HumanBytes(block.bytes), HumanSeconds(block.age_s),
               absl::StrCat(block.leases)});
  }
  table.Print();
  return absl::OkStatus();
}

absl::Status Quota(const CommonFlags& common) {
  KVMILL_ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Connect(common));
  KVMILL_ASSIGN_OR_RETURN(const std::vector<TenantQuotaUse> tenants, client->Quota());
  if (common.json) {
    const auto limit = [](const std::optional<std::uint64_t>& bytes) {
      return bytes.has_value() ? Json(*bytes) : Json(nullptr);
    };
    Json list = Json::array();
    for (const TenantQuotaUse& of : tenants) {
      list.push_back({{"tenant", of.tenant},
                      {"used_bytes", of.used_bytes},
                      {"charged_bytes", of.charged_bytes},
                      {"gpu_bytes", of.gpu_bytes},
                      {"host_bytes", of.host_bytes},
                      {"disk_bytes", of.disk_bytes},
                      {"soft_bytes", limit(of.soft_bytes)},
                      {"hard_bytes", limit(of.hard_bytes)},
                      {"rejections", of.rejections}});
    }
    PrintJson(list);
    return absl::OkStatus();
  }
  const auto limit = [](const std::optional<std::uint64_t>& bytes) {
    return bytes.has_value() ? HumanBytes(*bytes) : std::string("-");
  };
  Table table({{"tenant", Table::Align::kLeft},
               {"used", Table::Align::kRight},
               {"charged", Table::Align::kRight},
               {"gpu", Table::Align::kRight},
               {"host", Table::Align::kRight},
               {"disk", Table::Align::kRight},
               {"soft", Table::Align::kRight},
               {"hard", Table::Align::kRight},
               {"rejections", Table::Align::kRight}});
  for (const TenantQuotaUse& of : tenants) {
    table.Add({of.tenant, HumanBytes(of.used_bytes), HumanBytes(of.charged_bytes),
               HumanBytes(of.gpu_bytes), HumanBytes(of.host_bytes), HumanBytes(of.disk_bytes),
               limit(of.soft_bytes), limit(of.hard_bytes), HumanCount(of.rejections)});
  }
  table.Print();
  return absl::OkStatus();
}

absl::Status Verify(const CommonFlags& common) {
  KVMILL_ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Connect(common));
  KVMILL_ASSIGN_OR_RETURN(const VerifyResult result, client->Verify());
  if (common.json) {
    PrintJson({{"records_checked", result.records_checked}, {"failures", result.failures}});
  } else {
    Report report;
    report.Add("records checked", HumanCount(result.records_checked));
    report.Add("failures", HumanCount(result.failures));
    report.Print();
  }
  if (result.failures == 0) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(result.failures, " of ", result.records_checked,
                                          " records were damaged and have been dropped; look at "
                                          "the disk below --data-dir"));
}

}  // namespace

void AddInspectCommands(CommandLine& line) {
  line.Add(line.root(), "stat", "Counters and tiers of the daemon", kStatHelp,
           [&line] { return Stat(line.flags()); });
  auto name = std::make_shared<std::string>();
  CLI::App* app = line.Add(line.root(), "ls", "List blocks", kLsHelp,
                           [&line, name] { return List(line.flags(), *name); });
  app->add_option("--namespace", *name, "Only this namespace");
  line.Add(line.root(), "quota", "What each tenant has and may have", kQuotaHelp,
           [&line] { return Quota(line.flags()); });
  line.Add(line.root(), "verify", "Check every record in every tier", kVerifyHelp,
           [&line] { return Verify(line.flags()); });
}

}  // namespace kvmill::cli
