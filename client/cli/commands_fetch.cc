// lookup and get: what of a sequence is there, and its K and V back into files.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "client/cli/commands.h"
#include "client/cli/fetched_layers.h"
#include "client/cli/human.h"
#include "client/cli/output.h"
#include "client/cli/sequence_lookup.h"
#include "storage/core/status_macros.h"

namespace kvmill::cli {
namespace {

constexpr const char* kLookupHelp =
    "Asks for the keys of blocks 0, 1, 2, ... of the sequence (how keys are made: 'kvmill put\n"
    "--help') and prints how many of them, from the first on, are there, and in which tier. Pins "
    "and\n"
    "moves nothing. Without --blocks it asks until a block is missing; the daemon counts the keys\n"
    "asked for past the end as misses in its hit rate. Exit code 3 when the first block is "
    "missing.\n"
    "A tail is found on the node that stored it only: nodes copy and hand over whole blocks.\n"
    "\n"
    "Example:\n"
    "  kvmill lookup --namespace demo --sequence chat-1\n";

constexpr const char* kGetHelp =
    "Fetches the blocks of the sequence from the first on, verifies them, and writes "
    "PREFIXL00_k.npy,\n"
    "PREFIXL00_v.npy, ... in the namespace's dtype, decoded, in the model's frame; the tail "
    "included\n"
    "when all blocks before it are there. With --tiles: PREFIXL00.records, the bytes of the tiles "
    "as\n"
    "they are stored (for 'kvmill decode'; no tail); a layer with heads in 16 bits (sink blocks) "
    "also\n"
    "gets PREFIXL00.raw, for 'kvmill decode --raw-in'.\n"
    "\n"
    "A block that is missing, damaged or cannot be read is a miss: what is written ends before "
    "it.\n"
    "A tail is found on the node that stored it only, so elsewhere the sequence ends with its last "
    "whole block.\n"
    "Exit code 3 when nothing was found.\n"
    "\n"
    "Example:\n"
    "  kvmill get --namespace demo --sequence chat-1 --out again_\n";

// Blocks of one call, by their 16-bit bytes.
constexpr std::uint64_t kBatchRawBytes = std::uint64_t{256} << 20;

struct SequenceFlags {
  std::string name, sequence, out;
  std::uint32_t blocks = 0;  // 0: all.
  bool tiles = false;
};

Json TiersJson(const std::vector<Tier>& tiers) {
  Json json = Json::object();
  for (const auto& [name, count] : CountTiers(tiers)) json[name] = count;
  return json;
}

std::string HumanTiers(const std::vector<Tier>& tiers) {
  std::vector<std::string> parts;
  for (const auto& [name, count] : CountTiers(tiers)) {
    parts.push_back(absl::StrCat(count, " from ", name));
  }
  return absl::StrJoin(parts, ", ");
}

absl::Status NothingFound(const SequenceFlags& flags) {
  return absl::NotFoundError(
      absl::StrCat("no block of sequence '", flags.sequence, "' in namespace '", flags.name, "'"));
}

absl::Status Lookup(const CommonFlags& common, const SequenceFlags& flags) {
  KVMILL_ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Connect(common));
  KVMILL_ASSIGN_OR_RETURN(const ClientNamespace ns, client->FindNamespace(flags.name));
  KVMILL_ASSIGN_OR_RETURN(const FoundSequence found,
                          FindSequence(*client, ns, flags.sequence, flags.blocks));
  if (common.json) {
    PrintJson({{"hit_blocks", found.keys.size()},
               {"hit_tokens", found.hit_tokens},
               {"tiers", TiersJson(found.tiers)},
               {"tail_tokens", found.tail_tokens}});
  } else {
    Report report;
    report.Add("hit blocks", HumanCount(found.keys.size()), HumanTiers(found.tiers));
    report.Add("hit tokens", HumanCount(found.hit_tokens),
               found.tail_tokens > 0 ? absl::StrCat("and a tail of ", found.tail_tokens, " tokens")
               : flags.blocks == 0   ? "no tail is here"
                                     : "");
    report.Print();
  }
  return found.keys.empty() && found.tail_tokens == 0 ? NothingFound(flags) : absl::OkStatus();
}

// What arrived, up to the first miss.
struct Fetched {
  std::uint32_t blocks = 0;  // Whole ones.
  std::uint32_t tail_tokens = 0;
  std::uint32_t misses = 0;
  std::uint64_t bytes = 0;
  std::vector<Tier> tiers;  // Of the whole blocks.
  absl::Status first_miss;

  // Takes the result of one call; false: a miss ended the prefix.
  bool Add(const FetchResult& result) {
    bytes += result.page_bytes;
    for (const FetchBlockResult& block : result.blocks) {
      if (!block.status.ok()) {
        first_miss = block.status;
        return false;
      }
      tiers.push_back(block.tier);
      ++blocks;
    }
    return true;
  }
};

template <typename MakeSink>
absl::StatusOr<Fetched> FetchBlocks(Client& client, const ClientNamespace& ns,
                                    const std::vector<BlockKey>& keys, const MakeSink& make_sink) {
  const std::size_t batch =
      std::max<std::size_t>(1, kBatchRawBytes / (RawTokenBytes(ns.spec) * ns.spec.block_tokens));
  Fetched fetched;
  Progress progress("fetching");
  for (std::size_t first = 0; first < keys.size(); first += batch) {
    const auto some = absl::MakeConstSpan(keys).subspan(first, batch);
    const std::unique_ptr<FetchSink> sink =
        make_sink(static_cast<std::uint32_t>(first), static_cast<std::uint32_t>(some.size()));
    KVMILL_ASSIGN_OR_RETURN(const FetchResult result, client.Fetch(ns, some, *sink));
    if (!fetched.Add(result)) break;
    progress.Update(first + some.size(), keys.size(), "blocks");
  }
  return fetched;
}

// A KvSink that owns its list of outputs.
class OwningKvSink : public FetchSink {
 public:
  OwningKvSink(const NamespaceSpec& spec, std::vector<LayerOutput> outputs)
      : outputs_(std::move(outputs)), sink_(spec, Frame::kModel, outputs_) {}
  absl::Status OnPage(const PageId& id, const PageView& page) override {
    return sink_.OnPage(id, page);
  }

 private:
  const std::vector<LayerOutput> outputs_;
  KvSink sink_;
};

absl::StatusOr<Fetched> FetchTensors(Client& client, const ClientNamespace& ns,
                                     const FoundSequence& found, FetchedTensors& tensors) {
  KVMILL_ASSIGN_OR_RETURN(
      Fetched fetched,
      FetchBlocks(client, ns, found.keys, [&](std::uint32_t first, std::uint32_t count) {
        return std::make_unique<OwningKvSink>(ns.spec, tensors.Outputs(first, count));
      }));
  if (found.tail_tokens > 0 && fetched.blocks == found.keys.size()) {
    OwningKvSink sink(ns.spec, tensors.Outputs(fetched.blocks, 1));
    KVMILL_ASSIGN_OR_RETURN(const FetchResult tail,
                            client.Fetch(ns, absl::MakeConstSpan(&found.tail_key, 1), sink));
    fetched.bytes += tail.page_bytes;
    fetched.first_miss = tail.blocks[0].status;
    if (tail.blocks[0].status.ok()) fetched.tail_tokens = found.tail_tokens;
  }
  tensors.Truncate(fetched.blocks * ns.spec.block_tokens + fetched.tail_tokens);
  return fetched;
}

void Print(const CommonFlags& common, const SequenceFlags& flags, const Fetched& fetched,
           std::uint64_t tokens, std::uint64_t us) {
  if (common.json) {
    PrintJson({{"blocks", fetched.blocks},
               {"tokens", tokens},
               {"misses", fetched.misses},
               {"bytes", fetched.bytes},
               {"us", us},
               {"tiers", TiersJson(fetched.tiers)},
               {"tail_tokens", fetched.tail_tokens}});
    return;
  }
  Report report;
  report.Add("blocks", HumanCount(fetched.blocks), HumanTiers(fetched.tiers));
  report.Add("tokens", HumanCount(tokens),
             fetched.tail_tokens > 0 ? absl::StrCat(fetched.tail_tokens, " of them from the tail")
             : flags.blocks == 0 && !flags.tiles ? "no tail is here"
                                                 : "");
  report.Add("misses", HumanCount(fetched.misses),
             fetched.first_miss.ok() ? "" : absl::StrCat("first: ", fetched.first_miss.message()));
  report.Add(
      "fetched", HumanBytes(fetched.bytes),
      us == 0
          ? ""
          : absl::StrCat(
                "in ", HumanMicroseconds(us), ", ",
                HumanNumber(static_cast<double>(fetched.bytes) / static_cast<double>(us) / 1e3, 2),
                " GB/s"));
  if (fetched.blocks > 0 || fetched.tail_tokens > 0) {
    report.Add("written",
               absl::StrCat(flags.out, flags.tiles ? "L*.records" : "L*_k.npy, L*_v.npy"));
  }
  report.Print();
}

absl::Status Get(const CommonFlags& common, const SequenceFlags& flags) {
  KVMILL_ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Connect(common));
  const absl::Time start = absl::Now();
  KVMILL_ASSIGN_OR_RETURN(const ClientNamespace ns, client->FindNamespace(flags.name));
  KVMILL_ASSIGN_OR_RETURN(FoundSequence found,
                          FindSequence(*client, ns, flags.sequence, flags.blocks));
  if (flags.tiles) found.tail_tokens = 0;
  const auto block_count = static_cast<std::uint32_t>(found.keys.size());
  Fetched fetched;
  absl::Duration elapsed;
  if (flags.tiles) {
    FetchedRecords records(ns.spec, block_count);
    KVMILL_ASSIGN_OR_RETURN(
        fetched, FetchBlocks(*client, ns, found.keys, [&](std::uint32_t first, std::uint32_t) {
          return std::make_unique<FetchedRecords::Sink>(records, first);
        }));
    elapsed = absl::Now() - start;
    records.Truncate(fetched.blocks);
    if (fetched.blocks > 0) KVMILL_RETURN_IF_ERROR(records.Save(flags.out));
  } else {
    FetchedTensors tensors(ns.spec, block_count * ns.spec.block_tokens + found.tail_tokens);
    KVMILL_ASSIGN_OR_RETURN(fetched, FetchTensors(*client, ns, found, tensors));
    elapsed = absl::Now() - start;
    if (fetched.blocks > 0 || fetched.tail_tokens > 0) {
      KVMILL_RETURN_IF_ERROR(tensors.Save(flags.out));
    }
  }
  const std::uint32_t wanted = flags.blocks > 0 ? flags.blocks : block_count;
  fetched.misses = wanted - fetched.blocks + (fetched.tail_tokens < found.tail_tokens ? 1 : 0);
  const std::uint64_t tokens =
      std::uint64_t{fetched.blocks} * ns.spec.block_tokens + fetched.tail_tokens;
  Print(common, flags, fetched, tokens,
        static_cast<std::uint64_t>(absl::ToInt64Microseconds(elapsed)));
  return tokens == 0 ? NothingFound(flags) : absl::OkStatus();
}

void AddSequenceFlags(CLI::App& app, SequenceFlags& flags) {
  app.add_option("--namespace", flags.name, "Name of the namespace")->required();
  app.add_option("--sequence", flags.sequence, "Name of the prompt")->required()->type_name("ID");
  app.add_option("--blocks", flags.blocks, "First blocks only, without a tail (default: all)")
      ->check(CLI::Range(1u, kSequenceBlocksMax));
}

}  // namespace

void AddFetchCommands(CommandLine& line) {
  auto lookup = std::make_shared<SequenceFlags>();
  CLI::App* app = line.Add(line.root(), "lookup", "How much of a sequence is there", kLookupHelp,
                           [&line, lookup] { return Lookup(line.flags(), *lookup); });
  AddSequenceFlags(*app, *lookup);

  auto get = std::make_shared<SequenceFlags>();
  app = line.Add(line.root(), "get", "Fetch a sequence into K and V files", kGetHelp,
                 [&line, get] { return Get(line.flags(), *get); });
  AddSequenceFlags(*app, *get);
  app->add_option("--out", get->out, "What stands before L00_k.npy")
      ->required()
      ->type_name("PREFIX");
  line.AddPath(*app);
  app->add_flag("--tiles", get->tiles, "Write records instead of decoded K and V");
}

}  // namespace kvmill::cli
