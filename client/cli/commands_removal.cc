// rm, clear, flush, evict: blocks out of the daemon, or down to its disk.
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cli/block_keys.h"
#include "client/cli/commands.h"
#include "client/cli/human.h"
#include "client/cli/output.h"
#include "client/cli/sequence_lookup.h"
#include "storage/core/status_macros.h"

namespace kvmill::cli {
namespace {

constexpr const char* kRmHelp =
    "Removes the blocks of a sequence (keys: 'kvmill put --help') with its tail, or the first\n"
    "--blocks of them, or single blocks by --key HEX, from every tier. 'blocks' counts (block, "
    "layer\n"
    "group) pairs. Exit code 3 when nothing was there.\n"
    "\n"
    "Examples:\n"
    "  kvmill rm --namespace demo --sequence chat-1\n"
    "  kvmill rm --namespace demo --key "
    "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08\n";
constexpr const char* kClearHelp =
    "Removes every block of the namespace from every tier; the name stays bound to its identity.\n";
constexpr const char* kFlushHelp =
    "Returns when every block that was complete before the call is durable: it survives a crash "
    "of\n"
    "the daemon and of the machine. 'blocks' counts those that were not durable before.\n";
constexpr const char* kEvictHelp =
    "Moves blocks out of host memory until --bytes are free (default: everything that can leave).\n"
    "With a disk tier they stay there and are found again; without one they are gone. Of the gpu\n"
    "tier they go to host memory. An admin command: on the daemon's --admin address, or on its\n"
    "socket for its own user and root.\n"
    "\n"
    "Example:\n"
    "  kvmill evict --tier host --bytes 512MiB\n";

struct RemoveFlags {
  std::string name, sequence;
  std::vector<std::string> keys;
  std::uint32_t blocks = 0;
};

struct EvictFlags {
  std::string tier;
  std::uint64_t bytes = 0;
};

void PrintBlocks(const CommonFlags& common, std::uint64_t blocks, absl::string_view what) {
  if (common.json) {
    PrintJson({{"blocks", blocks}});
  } else {
    Report report;
    report.Add(what, HumanCount(blocks), blocks == 1 ? "block" : "blocks");
    report.Print();
  }
}

// Removes keys in batches as large as a daemon takes.
class Removal {
 public:
  Removal(Client& client, const ClientNamespace& ns) : client_(client), ns_(ns) {}
  absl::Status Add(const BlockKey& key) {
    keys_.push_back(key);
    return keys_.size() < kSequenceBlocksMax ? absl::OkStatus() : Flush();
  }
  absl::Status Flush() {
    KVMILL_ASSIGN_OR_RETURN(const std::uint64_t blocks, client_.Remove(ns_, keys_));
    blocks_ += blocks;
    keys_.clear();
    return absl::OkStatus();
  }
  std::uint64_t blocks() const { return blocks_; }

 private:
  Client& client_;
  const ClientNamespace& ns_;
  std::vector<BlockKey> keys_;
  std::uint64_t blocks_ = 0;
};

absl::Status RemoveSequence(Client& client, const ClientNamespace& ns, const RemoveFlags& flags,
                            Removal* removal) {
  const std::vector<BlockKey> keys =
      SequenceKeys(flags.sequence, flags.blocks > 0 ? flags.blocks : kSequenceBlocksMax);
  if (flags.blocks == 0) {
    // Tails of every length, behind every block that is there: those that were completed since are
    // still in the store.
    KVMILL_ASSIGN_OR_RETURN(const FoundSequence found, FindSequence(client, ns, flags.sequence, 0));
    for (std::size_t n = 0; n <= found.keys.size() && n < keys.size(); ++n) {
      const BlockKey parent = n == 0 ? BlockKey() : keys[n - 1];
      for (std::uint32_t tokens = 1; tokens < ns.spec.block_tokens; ++tokens) {
        KVMILL_RETURN_IF_ERROR(removal->Add(TailKey(parent, tokens, keys[n])));
      }
    }
  }
  // Blocks may be missing in the middle: what is there does not tell where to stop.
  for (const BlockKey& key : keys) KVMILL_RETURN_IF_ERROR(removal->Add(key));
  return absl::OkStatus();
}

absl::Status Remove(const CommonFlags& common, const RemoveFlags& flags) {
  if (flags.keys.empty() == flags.sequence.empty()) {
    return UsageError("give --sequence ID or --key HEX");
  }
  std::vector<BlockKey> keys;
  for (const std::string& hex : flags.keys) {
    absl::StatusOr<BlockKey> key = BlockKey::FromHex(hex);
    if (!key.ok()) return UsageError(absl::StrCat("--key: ", key.status().message()));
    keys.push_back(*key);
  }
  KVMILL_ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Connect(common));
  KVMILL_ASSIGN_OR_RETURN(const ClientNamespace ns, client->FindNamespace(flags.name));
  Removal removal(*client, ns);
  for (const BlockKey& key : keys) KVMILL_RETURN_IF_ERROR(removal.Add(key));
  if (!flags.sequence.empty()) {
    KVMILL_RETURN_IF_ERROR(RemoveSequence(*client, ns, flags, &removal));
  }
  KVMILL_RETURN_IF_ERROR(removal.Flush());
  PrintBlocks(common, removal.blocks(), "removed");
  if (removal.blocks() > 0) return absl::OkStatus();
  return absl::NotFoundError(
      absl::StrCat("none of these blocks is in namespace '", flags.name, "'"));
}

absl::Status Clear(const CommonFlags& common, const std::string& name) {
  KVMILL_ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Connect(common));
  KVMILL_ASSIGN_OR_RETURN(const ClientNamespace ns, client->FindNamespace(name));
  KVMILL_ASSIGN_OR_RETURN(const std::uint64_t blocks, client->Clear(ns));
  PrintBlocks(common, blocks, "removed");
  return absl::OkStatus();
}

absl::Status Flush(const CommonFlags& common) {
  KVMILL_ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Connect(common));
  KVMILL_ASSIGN_OR_RETURN(const std::uint64_t blocks, client->Flush());
  PrintBlocks(common, blocks, "made durable");
  return absl::OkStatus();
}

absl::Status Evict(const CommonFlags& common, const EvictFlags& flags) {
  KVMILL_ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Connect(common));
  KVMILL_ASSIGN_OR_RETURN(
      const std::uint64_t blocks,
      client->Evict(flags.tier == "gpu" ? Tier::kGpu : Tier::kHost, flags.bytes));
  PrintBlocks(common, blocks, "evicted");
  return absl::OkStatus();
}

}  // namespace

void AddRemovalCommands(CommandLine& line) {
  auto remove = std::make_shared<RemoveFlags>();
  CLI::App* app = line.Add(line.root(), "rm", "Remove blocks", kRmHelp,
                           [&line, remove] { return Remove(line.flags(), *remove); });
  app->add_option("--namespace", remove->name, "Name of the namespace")->required();
  app->add_option("--sequence", remove->sequence, "Name of the prompt")->type_name("ID");
  app->add_option("--blocks", remove->blocks, "First blocks of the sequence only")
      ->check(CLI::Range(1u, kSequenceBlocksMax - 1));
  app->add_option("--key", remove->keys, "Block key, as ls prints it; may be repeated")
      ->type_name("HEX");

  auto name = std::make_shared<std::string>();
  app = line.Add(line.root(), "clear", "Remove every block of a namespace", kClearHelp,
                 [&line, name] { return Clear(line.flags(), *name); });
  app->add_option("--namespace", *name, "Name of the namespace")->required();

  line.Add(line.root(), "flush", "Wait until everything is durable", kFlushHelp,
           [&line] { return Flush(line.flags()); });

  auto evict = std::make_shared<EvictFlags>();
  app = line.Add(line.root(), "evict", "Move blocks out of a tier", kEvictHelp,
                 [&line, evict] { return Evict(line.flags(), *evict); });
  app->add_option("--tier", evict->tier, "The tier they leave")
      ->required()
      ->check(CLI::Validator(
          [](const std::string& tier) -> std::string {
            if (tier == "gpu" || tier == "host") return "";
            return "'" + tier + "': blocks leave by command from gpu or host only";
          },
          "{gpu,host}"));
  AddBytes(*app, "--bytes", evict->bytes, "How much to free (default: all)");
}

}  // namespace kvmill::cli
