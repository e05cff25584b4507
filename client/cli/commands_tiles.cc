// encode and decode: tensors in files to records in files and back, without a daemon.
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cli/commands.h"
#include "client/cli/device_arena.h"
#include "client/cli/files.h"
#include "client/cli/human.h"
#include "client/cli/npy.h"
#include "client/cli/output.h"
#include "client/cli/raw_heads.h"
#include "client/cli/tile_codec.h"
#include "storage/core/status_macros.h"

namespace kvmill::cli {
namespace {

constexpr const char* kEncodeHelp =
    "K and V are [tokens, heads, head_dim] (.npy, '<f2'; with --bf16 '<u2' or '<V2' holding "
    "bfloat16\n"
    "bits), after RoPE, in the model's frame. They are cut into blocks of the format's group; "
    "each\n"
    "block and head becomes one record (docs/formats.md). The file of --records is "
    "records\n"
    "only, block after block and in it head after head: record i is block i / heads, head i mod "
    "heads. Tokens past "
    "the\n"
    "last whole block are the tail: counted, not written.\n"
    "\n"
    "A head that a tile cannot hold (its scales leave fp16) fails the command and is named, "
    "unless\n"
    "--raw-out takes it: then its record is zeros and FILE has its 16-bit values.\n"
    "\n"
    "--algorithm refined chooses scales, zeros and codes with less error in the same format "
    "(kernels/refine.h);\n"
    "any decoder reads them (docs/quality.md has what it wins). No GPU's encoder does it.\n"
    "\n"
    "  compression  = fp16 bytes of the tokens in tiles / bytes of their records\n"
    "  rel_error_k  = |K' - K| / |K| (Frobenius, all heads in tiles, model frame); 0/0 = 0\n"
    "\n"
    "Example:\n"
    "  kvmill encode --k p_L00_k.npy --v p_L00_v.npy --format k4v2_g128 --records p_L00.records\n";

constexpr const char* kDecodeHelp =
    "The file has no header: format, head_dim and heads must be those of the encoding. --frame\n"
    "rotated leaves K and V multiplied by the Hadamard matrix, as the tiles hold them (dot "
    "products\n"
    "of rotated q and K are those of q and K). Output is fp16, with --bf16 bfloat16 bits ('<u2').\n"
    "\n"
    "Example:\n"
    "  kvmill decode --records p_L00.records --format k4v2_g128 --head-dim 128 --heads 8 \\\n"
    "    --k again_k.npy --v again_v.npy\n";

struct EncodeFlags {
  std::string k, v, format, records, raw_out;
  std::string algorithm = "kvarn";
  std::string encoder = "cpu";
  bool bf16 = false;
};

Encoder EncoderFlag(const EncodeFlags& flags) {
  if (flags.encoder != "cpu" && flags.encoder != "reference") return Encoder::kDevice;
  return flags.encoder == "cpu" ? Encoder::kCpu : Encoder::kReference;
}

absl::Status Encode(const CommonFlags& common, const EncodeFlags& flags) {
  const Encoder encoder = EncoderFlag(flags);
  const Algorithm algorithm =
      flags.algorithm == "refined" ? Algorithm::kRefined : Algorithm::kKvarn;
  std::unique_ptr<Device> device;
  if (encoder == Encoder::kDevice) {
    KVMILL_ASSIGN_OR_RETURN(device, OpenDeviceFlag(flags.encoder));
  }
  // The name is checked before files are read; 128 stands in for the head_dim they will tell.
  KVMILL_RETURN_IF_ERROR(FormatFlag(flags.format, 128).status());
  const DType dtype = flags.bf16 ? DType::kBFloat16 : DType::kFloat16;
  KVMILL_ASSIGN_OR_RETURN(const Tensor k, ReadNpy(flags.k, dtype));
  KVMILL_ASSIGN_OR_RETURN(const Tensor v, ReadNpy(flags.v, dtype));
  absl::StatusOr<TileFormat> format = ParseTileFormat(flags.format, k.head_dim);
  if (!format.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat(flags.k, ": shape ", k.ShapeString(), ": ", format.status().message()));
  }
  KVMILL_ASSIGN_OR_RETURN(const EncodedTensors encoded,
                          EncodeTensors(k, v, *format, encoder, device.get(), algorithm));
  if (!encoded.raw_heads.empty() && flags.raw_out.empty()) {
    const RawHead& first = encoded.raw_heads.front();
    return absl::FailedPreconditionError(absl::StrCat(
        "block ", first.block, " head ", first.head, " cannot be held by a ", ToString(*format),
        " tile (", encoded.raw_heads.size(), " such heads); --raw-out FILE keeps them in 16 bits"));
  }
  KVMILL_RETURN_IF_ERROR(WriteFile(flags.records, {encoded.records}));
  if (!flags.raw_out.empty()) {
    KVMILL_RETURN_IF_ERROR(WriteFile(
        flags.raw_out,
        {SerializeRawHeads(encoded.raw_heads, *format, dtype, k.heads, encoded.block_count)}));
  }
  const std::size_t record_bytes = RecordBytes(*format);
  const double compression =
      static_cast<double>(RawBytes(*format, format->group)) / static_cast<double>(record_bytes);
  if (common.json) {
    PrintJson({{"tokens", k.tokens},
               {"blocks", encoded.block_count},
               {"heads", k.heads},
               {"head_dim", k.head_dim},
               {"record_bytes", record_bytes},
               {"compression", compression},
               {"rel_error_k", encoded.rel_error_k},
               {"rel_error_v", encoded.rel_error_v},
               {"raw_heads", encoded.raw_heads.size()},
               {"tail_tokens", encoded.tail_tokens}});
    return absl::OkStatus();
  }
  Report report;
  report.Add(
      "tokens", HumanCount(k.tokens),
      absl::StrCat("[", k.tokens, " tokens, ", k.heads, " heads, ", k.head_dim, " channels]"));
  report.Add("blocks", HumanCount(encoded.block_count),
             absl::StrCat("of ", format->group, " tokens; ", encoded.tail_tokens,
                          " tokens of the tail are not written"));
  report.Add("record", HumanBytes(record_bytes), "K and V of one block and head");
  report.Add("written", HumanBytes(encoded.records.size()), flags.records);
  report.Add("compression", HumanNumber(compression, 2), "fp16 bytes / record bytes");
  report.Add("error of K", HumanPercent(encoded.rel_error_k), "|K' - K| / |K|");
  report.Add("error of V", HumanPercent(encoded.rel_error_v), "|V' - V| / |V|");
  report.Add("raw heads", HumanCount(encoded.raw_heads.size()),
             flags.raw_out.empty() ? "" : flags.raw_out);
  report.Print();
  return absl::OkStatus();
}

struct DecodeFlags {
  std::string records, format, k, v, raw_in;
  std::string frame = "model";
  std::uint32_t head_dim = 0;
  std::uint32_t heads = 0;
  bool bf16 = false;
};

absl::Status Decode(const CommonFlags& common, const DecodeFlags& flags) {
  KVMILL_ASSIGN_OR_RETURN(const TileFormat format, FormatFlag(flags.format, flags.head_dim));
  if (!flags.raw_in.empty() && flags.frame != "model") {
    return UsageError("--raw-in goes with --frame model: raw heads are not rotated");
  }
  DType dtype = flags.bf16 ? DType::kBFloat16 : DType::kFloat16;
  KVMILL_ASSIGN_OR_RETURN(const std::string records, ReadFile(flags.records));
  RawHeads raw;
  if (!flags.raw_in.empty()) {
    KVMILL_ASSIGN_OR_RETURN(const std::string bytes, ReadFile(flags.raw_in));
    absl::StatusOr<RawHeads> parsed = ParseRawHeads(bytes, format, flags.heads);
    if (!parsed.ok()) {
      return absl::Status(parsed.status().code(),
                          absl::StrCat(flags.raw_in, ": ", parsed.status().message()));
    }
    raw = *std::move(parsed);
    if (raw.dtype != dtype) {
      return UsageError(absl::StrCat(flags.raw_in, " holds ",
                                     raw.dtype == DType::kBFloat16 ? "bf16; add" : "fp16; drop",
                                     " --bf16"));
    }
    const std::size_t block_bytes = RecordBytes(format) * flags.heads;
    if (records.size() != raw.block_count * block_bytes) {
      return absl::InvalidArgumentError(
          absl::StrCat(flags.raw_in, " belongs to ", raw.block_count, " blocks of ", block_bytes,
                       " bytes, ", flags.records, " has ", records.size(), " bytes"));
    }
  }
  absl::StatusOr<DecodedTensors> decoded =
      DecodeRecords(records, format, flags.heads, dtype,
                    flags.frame == "model" ? Frame::kModel : Frame::kRotated, raw.heads);
  if (!decoded.ok()) {
    return absl::Status(decoded.status().code(),
                        absl::StrCat(flags.records, ": ", decoded.status().message()));
  }
  if (decoded->block_count == 0) {
    return absl::InvalidArgumentError(absl::StrCat(flags.records, " is empty"));
  }
  KVMILL_RETURN_IF_ERROR(WriteNpy(flags.k, decoded->k));
  KVMILL_RETURN_IF_ERROR(WriteNpy(flags.v, decoded->v));
  if (common.json) {
    PrintJson({{"blocks", decoded->block_count},
               {"tokens", decoded->k.tokens},
               {"raw_heads", raw.heads.size()}});
    return absl::OkStatus();
  }
  Report report;
  report.Add("blocks", HumanCount(decoded->block_count),
             absl::StrCat(decoded->k.tokens, " tokens, frame: ", flags.frame));
  report.Add("K", flags.k, decoded->k.ShapeString());
  report.Add("V", flags.v, decoded->v.ShapeString());
  report.Print();
  return absl::OkStatus();
}

}  // namespace

void AddTileCommands(CommandLine& line) {
  auto encode = std::make_shared<EncodeFlags>();
  CLI::App* app = line.Add(line.root(), "encode", "Encode K and V files to records", kEncodeHelp,
                           [&line, encode] { return Encode(line.flags(), *encode); });
  app->add_option("--k", encode->k, "K, [tokens, heads, head_dim]")->required()->type_name("FILE");
  app->add_option("--v", encode->v, "V, the same shape")->required()->type_name("FILE");
  app->add_option("--format", encode->format, std::string(kFormatHelp))
      ->required()
      ->type_name("FORMAT");
  app->add_option("--records", encode->records, "Where the records go")
      ->required()
      ->type_name("FILE");
  app->add_option("--raw-out", encode->raw_out, "Takes the heads that a tile cannot hold")
      ->type_name("FILE");
  app->add_option("--algorithm", encode->algorithm, "kvarn or refined")
      ->check(CLI::IsMember({"kvarn", "refined"}))
      ->capture_default_str();
  app->add_option("--encoder", encode->encoder, "reference, cpu, cuda (the first GPU) or cuda:N")
      ->check([](const std::string& encoder) {
        if (encoder == "reference" || encoder == "cpu") return std::string();
        if (encoder != "host" && CheckDeviceFlag(encoder).empty()) return std::string();
        return absl::StrCat("'", encoder, "': want reference, cpu, cuda or cuda:N");
      })
      ->capture_default_str();
  app->add_flag("--bf16", encode->bf16, "The files hold bfloat16 bits");

  auto decode = std::make_shared<DecodeFlags>();
  app = line.Add(line.root(), "decode", "Decode records to K and V files", kDecodeHelp,
                 [&line, decode] { return Decode(line.flags(), *decode); });
  app->add_option("--records", decode->records, "Records, as encode or get --tiles wrote them")
      ->required()
      ->type_name("FILE");
  app->add_option("--format", decode->format, std::string(kFormatHelp))
      ->required()
      ->type_name("FORMAT");
  app->add_option("--head-dim", decode->head_dim, "64, 128 or 256")->required();
  app->add_option("--heads", decode->heads, "KV heads of the layer")
      ->required()
      ->check(CLI::Range(1u, 65535u));
  app->add_option("--k", decode->k, "Where K goes")->required()->type_name("FILE");
  app->add_option("--v", decode->v, "Where V goes")->required()->type_name("FILE");
  app->add_option("--frame", decode->frame, "Frame of the output")
      ->check(CLI::IsMember({"model", "rotated"}))
      ->capture_default_str();
  app->add_option("--raw-in", decode->raw_in, "What encode --raw-out wrote")->type_name("FILE");
  app->add_flag("--bf16", decode->bf16, "Write bfloat16 bits instead of fp16");
}

}  // namespace kvmill::cli
