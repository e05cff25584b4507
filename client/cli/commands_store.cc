// put: K and V from files into the daemon.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cli/block_keys.h"
#include "client/cli/commands.h"
#include "client/cli/human.h"
#include "client/cli/kv_files.h"
#include "client/cli/output.h"
#include "storage/core/status_macros.h"

namespace kvmill::cli {
namespace {

constexpr const char* kPutHelp =
    "Reads PREFIXL00_k.npy, PREFIXL00_v.npy, PREFIXL01_k.npy, ... (one pair a layer, [tokens,\n"
    "kv_heads, head_dim], '<f2'; --bf16: '<u2' or '<V2'), cuts them into blocks of the format's\n"
    "group and hands them to the daemon, which encodes and keeps them. The tail (tokens past the "
    "last\n"
    "whole block) is kept in 16 bits, as are the first --sink-blocks blocks.\n"
    "\n"
    "Block keys: key(n) = SHA-256(\"kvmill-cli-1\" | 0x00 | u64le(length of ID) | ID | key(n-1) |\n"
    "u64le(n)), nothing in place of key(-1): 32 bytes, chained from the sequence id and the block\n"
    "number (hash_scheme kvmill-cli-1). The content is not in the key, so one --sequence must "
    "always\n"
    "mean the same tokens: a second put of it finds its blocks 'existing' and changes nothing.\n"
    "\n"
    "The namespace is bound to model, revision, adapter, salt, dtype, geometry, format and\n"
    "sink-blocks at its first put; a put with others is refused. Two names with the same of these "
    "are one\n"
    "namespace: what was put under the one is there under the other.\n"
    "\n"
    "  compression_tiles = fp16 bytes of the tokens in tiles / bytes of their records\n"
    "  compression_total = raw_bytes / encoded_bytes (raw pages, headers and padding included)\n"
    "Both are of the blocks that this put stored; null when all existed.\n"
    "--wait sealed: returns when the blocks can be found; durable: when they survive a crash.\n"
    "\n"
    "Example:\n"
    "  kvmill put --namespace demo --format k4v2_g128 --sequence chat-1 --kv run1/prefill_ \\\n"
    "    --wait durable\n";

// Blocks of one call: bounds what a deadline has to cover, and lets progress show.
constexpr std::uint64_t kBatchRawBytes = std::uint64_t{256} << 20;

struct PutFlags {
  std::string name, format, sequence, kv;
  std::string model, revision, adapter, salt;
  std::string wait = "sealed";
  std::uint32_t sink_blocks = 0;
  bool bf16 = false;
};

absl::StatusOr<NamespaceSpec> SpecOf(const PutFlags& flags, const TileFormat& format,
                                     const std::vector<LayerTensors>& layers) {
  for (std::size_t n = 0; n < layers.size(); ++n) {
    absl::Status status = ParseTileFormat(flags.format, layers[n].k.head_dim).status();
    if (!status.ok() || layers[n].k.heads > kKvHeadsMax) {
      return absl::InvalidArgumentError(absl::StrCat(
          LayerPath(flags.kv, n, "_k.npy"), ": shape ", layers[n].k.ShapeString(), ": ",
          status.ok() ? absl::StrCat("at most ", kKvHeadsMax, " heads") : status.message()));
    }
  }
  NamespaceSpec spec;
  spec.model = flags.model;
  spec.revision = flags.revision;
  spec.adapter_digest = flags.adapter;
  spec.salt = flags.salt;
  spec.hash_scheme = std::string(kHashScheme);
  spec.source_dtype = flags.bf16 ? DType::kBFloat16 : DType::kFloat16;
  spec.groups = GroupLayers(layers);
  spec.block_tokens = format.group;
  spec.key_bits = format.key_bits;
  spec.value_bits = format.value_bits;
  spec.sink_blocks = flags.sink_blocks;
  return spec;
}

// The blocks of a prompt as the client library takes them; borrows the tensors.
class PromptBlocks {
 public:
  PromptBlocks(const std::vector<LayerTensors>& layers, const NamespaceSpec& spec,
               absl::string_view sequence)
      : tokens_(layers[0].k.tokens),
        whole_((tokens_) / spec.block_tokens),
        keys_(SequenceKeys(sequence, whole_ + 1)) {
    const std::vector<std::uint16_t> order = LayerOrder(spec);
    const std::uint32_t count = (tokens_ + spec.block_tokens - 1) / spec.block_tokens;
    inputs_.resize(count * order.size());
    for (std::uint32_t b = 0; b < count; ++b) {
      const std::uint32_t first_token = b * spec.block_tokens;
      for (std::size_t l = 0; l < order.size(); ++l) {
        const LayerTensors& layer = layers[order[l]];
        inputs_[b * order.size() + l].k = View(layer.k, first_token);
        inputs_[b * order.size() + l].v = View(layer.v, first_token);
      }
      StoreBlock block;
      block.key = keys_[b];
      if (b > 0) block.parent = keys_[b - 1];
      block.token_count = std::min(spec.block_tokens, tokens_ - first_token);
      block.block_index = b;
      block.layers = absl::MakeConstSpan(inputs_).subspan(b * order.size(), order.size());
      blocks_.push_back(block);
    }
  }

  absl::Span<const StoreBlock> blocks() const { return blocks_; }
  std::uint32_t whole_count() const { return whole_; }
  std::uint32_t tail_tokens() const {
    return whole_ == blocks_.size() ? 0 : blocks_.back().token_count;
  }

 private:
  static KvView View(const Tensor& tensor, std::uint32_t first_token) {
    const std::size_t at = std::size_t{first_token} * tensor.heads * tensor.head_dim;
    return KvView::Array(tensor.values.data() + at, tensor.heads, tensor.head_dim);
  }

  const std::uint32_t tokens_;
  const std::uint32_t whole_;
  const std::vector<BlockKey> keys_;  // The last one is the tail's.
  std::vector<LayerInput> inputs_;
  std::vector<StoreBlock> blocks_;
};

struct PutTotals {
  std::uint64_t stored = 0, existing = 0, failed = 0;  // Whole blocks.
  bool tail_existing = false, tail_failed = false;
  absl::Status first_failure;
  std::string first_failed;
  std::uint64_t raw_bytes = 0, stored_bytes = 0, tile_bytes = 0, tile_raw_bytes = 0, raw_heads = 0;

  void Add(const StoreResult& result, std::size_t first_block, std::size_t whole_count) {
    raw_bytes += result.raw_bytes;
    stored_bytes += result.stored_bytes;
    tile_bytes += result.tile_bytes;
    tile_raw_bytes += result.tile_raw_bytes;
    raw_heads += result.raw_heads;
    for (std::size_t i = 0; i < result.blocks.size(); ++i) {
      const StoreBlockResult& block = result.blocks[i];
      const bool whole = first_block + i < whole_count;
      if (!block.status.ok()) {
        ++failed;
        tail_failed = tail_failed || !whole;
        if (first_failure.ok()) {
          first_failure = block.status;
          first_failed = whole ? absl::StrCat("block ", first_block + i) : "the tail";
        }
      } else if (block.outcome == StoreOutcome::kExisting) {
        whole ? ++existing : tail_existing = true;
      } else if (whole) {
        ++stored;
      }
    }
  }
};

Json Ratio(std::uint64_t above, std::uint64_t below) {
  if (below == 0) return nullptr;
  return static_cast<double>(above) / static_cast<double>(below);
}

std::string HumanRatio(std::uint64_t above, std::uint64_t below) {
  if (below == 0) return "-";
  return HumanNumber(static_cast<double>(above) / static_cast<double>(below), 2);
}

void Print(const CommonFlags& common, const PutFlags& flags, const PutTotals& totals,
           std::uint32_t tail_tokens, std::uint64_t us) {
  if (common.json) {
    Json json = {{"blocks_stored", totals.stored},
                 {"blocks_existing", totals.existing},
                 {"tail_tokens", tail_tokens},
                 {"raw_bytes", totals.raw_bytes},
                 {"encoded_bytes", totals.stored_bytes},
                 {"compression_tiles", Ratio(totals.tile_raw_bytes, totals.tile_bytes)},
                 {"compression_total", Ratio(totals.raw_bytes, totals.stored_bytes)},
                 {"us", us},
                 {"raw_heads", totals.raw_heads},
                 {"blocks_failed", totals.failed}};
    PrintJson(json);
    return;
  }
  Report report;
  report.Add("blocks stored", HumanCount(totals.stored),
             absl::StrCat(flags.wait == "durable" ? "durable" : "sealed", ", ", totals.existing,
                          " existed before"));
  report.Add("tail", absl::StrCat(tail_tokens, " tokens"),
             totals.tail_failed     ? "not stored"
             : tail_tokens == 0     ? ""
             : totals.tail_existing ? "existed before"
                                    : "in 16 bits");
  report.Add("raw", HumanBytes(totals.raw_bytes), "16-bit bytes of what was stored");
  report.Add("encoded", HumanBytes(totals.stored_bytes), "all bytes stored for them");
  report.Add("compression", HumanRatio(totals.tile_raw_bytes, totals.tile_bytes),
             absl::StrCat("of the tiles; ", HumanRatio(totals.raw_bytes, totals.stored_bytes),
                          " in total, raw pages and headers included"));
  if (totals.raw_heads > 0) {
    report.Add("raw heads", HumanCount(totals.raw_heads), "(layer, head) pairs kept in 16 bits");
  }
  report.Add("time", HumanMicroseconds(us),
             us == 0 ? ""
                     : absl::StrCat(HumanNumber(static_cast<double>(totals.raw_bytes) /
                                                    static_cast<double>(us) / 1e3,
                                                2),
                                    " GB/s of 16-bit K and V"));
  report.Print();
}

// What `put` has to be given instead once the namespace has tripped; empty: it has not.
std::string FallbackFlags(Client& client, const std::string& name) {
  const absl::StatusOr<ClientNamespace> ns = client.FindNamespace(name);
  if (!ns.ok() || !ns->trip.has_value() || ns->trip->fallback_name.empty()) return "";
  TileFormat format;
  format.key_bits = ns->trip->fallback_key_bits;
  format.value_bits = ns->trip->fallback_value_bits;
  format.group = static_cast<std::uint16_t>(ns->spec.block_tokens);
  std::string text = absl::StrCat("; give --namespace '", ns->trip->fallback_name, "' --format ",
                                  ToString(format));
  if (ns->trip->fallback_sink_blocks != ns->spec.sink_blocks) {
    absl::StrAppend(&text, " --sink-blocks ", ns->trip->fallback_sink_blocks);
  }
  return text;
}

absl::Status Put(const CommonFlags& common, const PutFlags& flags) {
  KVMILL_ASSIGN_OR_RETURN(const TileFormat format, FormatFlag(flags.format, 128));
  if (flags.sequence.empty()) return UsageError("--sequence must not be empty");
  KVMILL_ASSIGN_OR_RETURN(const std::vector<LayerTensors> layers,
                          LoadLayers(flags.kv, flags.bf16 ? DType::kBFloat16 : DType::kFloat16));
  KVMILL_ASSIGN_OR_RETURN(const NamespaceSpec spec, SpecOf(flags, format, layers));
  KVMILL_ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Connect(common));
  KVMILL_ASSIGN_OR_RETURN(const ClientNamespace ns, client->OpenNamespace(flags.name, spec));

  const PromptBlocks prompt(layers, spec, flags.sequence);
  const std::uint64_t block_raw_bytes = RawTokenBytes(spec) * spec.block_tokens;
  const std::size_t batch = std::max<std::size_t>(1, kBatchRawBytes / block_raw_bytes);
  StoreOptions options;
  options.wait_durable = flags.wait == "durable";
  PutTotals totals;
  Progress progress("storing");
  const absl::Time start = absl::Now();
  for (std::size_t first = 0; first < prompt.blocks().size(); first += batch) {
    KVMILL_ASSIGN_OR_RETURN(const StoreResult result,
                            client->Store(ns, prompt.blocks().subspan(first, batch), options));
    totals.Add(result, first, prompt.whole_count());
    progress.Update(std::min(first + batch, prompt.blocks().size()), prompt.blocks().size(),
                    "blocks");
  }
  const auto us = static_cast<std::uint64_t>(absl::ToInt64Microseconds(absl::Now() - start));
  Print(common, flags, totals, totals.tail_failed ? 0 : prompt.tail_tokens(), us);
  if (totals.failed == 0) return absl::OkStatus();
  // A failed block is not a miss (exit 3), whatever its code.
  const absl::StatusCode code = absl::IsNotFound(totals.first_failure)
                                    ? absl::StatusCode::kAborted
                                    : totals.first_failure.code();
  return absl::Status(
      code, absl::StrCat(totals.failed, " of ", prompt.blocks().size(), " blocks were not stored; ",
                         totals.first_failed, ": ", totals.first_failure.message(),
                         absl::IsFailedPrecondition(totals.first_failure)
                             ? FallbackFlags(*client, flags.name)
                             : ""));
}

}  // namespace

void AddStoreCommands(CommandLine& line) {
  auto put = std::make_shared<PutFlags>();
  CLI::App* app = line.Add(line.root(), "put", "Store K and V files in the daemon", kPutHelp,
                           [&line, put] { return Put(line.flags(), *put); });
  app->add_option("--namespace", put->name, "Name of the namespace, bound at first use")
      ->required();
  app->add_option("--format", put->format, std::string(kFormatHelp))
      ->required()
      ->type_name("FORMAT");
  app->add_option("--sequence", put->sequence, "Name of the prompt; the keys come from it")
      ->required()
      ->type_name("ID");
  app->add_option("--kv", put->kv, "What stands before L00_k.npy")->required()->type_name("PREFIX");
  app->add_flag("--bf16", put->bf16, "The files hold bfloat16 bits");
  app->add_option("--sink-blocks", put->sink_blocks, "First blocks that stay in 16 bits")
      ->capture_default_str();
  app->add_option("--wait", put->wait, "sealed or durable")
      ->check(CLI::IsMember({"sealed", "durable"}))
      ->capture_default_str();
  line.AddPath(*app);
  const std::string identity = "Identity of the namespace";
  app->add_option("--model", put->model, "Name of the model")->group(identity);
  app->add_option("--revision", put->revision, "Revision of its weights")->group(identity);
  app->add_option("--adapter", put->adapter, "Digest of the adapter (LoRA)")->group(identity);
  app->add_option("--salt", put->salt, "Keeps users apart who must not share a cache")
      ->group(identity);
}

}  // namespace kvmill::cli
