#include "tests/stress/stress_model.h"

#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <random>

#include "absl/strings/str_cat.h"
#include "kernels/encode.h"
#include "kernels/float16.h"
#include "storage/core/check.h"

namespace kvmill::stress {
namespace {

// Whole blocks of Space::kTiles share so many contents: encoding each would take the time that the
// stress is for. Two blocks have the same one in a 256th of the cases, and then keys that differ.
constexpr std::size_t kContents = 256;
constexpr std::size_t kRowValues = std::size_t{kHeads} * kHeadDim;

std::uint64_t HashOfText(const std::string& text) {
  std::uint64_t hash = 0;
  for (const char c : text) hash = Mix(hash ^ static_cast<unsigned char>(c));
  return hash;
}

}  // namespace

NamespaceSpec SpecOf(Space space) {
  NamespaceSpec spec;
  spec.model = "stress";
  spec.revision = NameOf(space);
  spec.hash_scheme = "test";
  spec.block_tokens = kBlockTokens;
  LayerGroup group;
  group.kv_heads = kHeads;
  group.head_dim = kHeadDim;
  if (space == Space::kRaw) {
    group.layers = {0, 1};
    spec.groups = {group};
    spec.sink_blocks = kBlocks;
  } else {
    group.layers = {0};
    spec.groups.push_back(group);
    group.layers = {1};
    group.attention = AttentionKind::kWindow;
    group.window_tokens = 2 * kBlockTokens;
    spec.groups.push_back(group);
  }
  return spec;
}

const char* NameOf(Space space) { return space == Space::kTiles ? "tiles" : "raw"; }

std::uint32_t TailTokens(const std::string& sequence) {
  return 1 + static_cast<std::uint32_t>(HashOfText(sequence) % (kBlockTokens - 1));
}

BlockKey TailsOwnKey(const std::string& sequence) {
  return *BlockKey::FromBytes(absl::StrCat(sequence, "/tail"));
}

std::vector<BlockKey> KeysOf(const std::string& sequence) {
  std::vector<BlockKey> keys;
  for (std::uint32_t block = 0; block < kWholeBlocks; ++block) {
    keys.push_back(*BlockKey::FromBytes(absl::StrCat(sequence, "/", block)));
  }
  keys.push_back(TailKey(keys.back(), TailTokens(sequence), TailsOwnKey(sequence)));
  return keys;
}

Model::Model(uid_t tenant) : tenant_(Mix(tenant)), contents_(kContents) {
  const TileFormat format = FormatOf(SpecOf(Space::kTiles), SpecOf(Space::kTiles).groups[0]);
  std::vector<std::byte> scratch(EncodeScratchBytes(format) + 64);
  const std::size_t off = reinterpret_cast<std::uintptr_t>(scratch.data()) % 64;
  for (std::size_t c = 0; c < contents_.size(); ++c) {
    std::mt19937 random(static_cast<std::uint32_t>(c) + 1);
    std::normal_distribution<float> normal;
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      for (Values* values : {&contents_[c].k[layer], &contents_[c].v[layer]}) {
        values->resize(kBlockTokens * kRowValues);
        for (std::uint16_t& v : *values) v = FromFloat(normal(random), DType::kFloat16);
      }
      for (std::uint32_t head = 0; head < kHeads; ++head) {
        std::vector<std::byte>& record = contents_[c].records[layer][head];
        record.resize(RecordBytes(format));
        const auto* const k = reinterpret_cast<const std::byte*>(contents_[c].k[layer].data());
        const auto* const v = reinterpret_cast<const std::byte*>(contents_[c].v[layer].data());
        EncodeArgs args;
        args.k.pages = &k;
        args.v.pages = &v;
        args.k.page_tokens = args.v.page_tokens = kBlockTokens;
        args.k.offset_bytes = args.v.offset_bytes = std::size_t{head} * kHeadDim * 2;
        args.k.token_stride_bytes = args.v.token_stride_bytes = kRowValues * 2;
        args.record = record.data();
        EncodeResult result;
        EncodeTilesCpu(format, Frame::kModel, absl::MakeConstSpan(&args, 1),
                       absl::MakeSpan(&result, 1), absl::MakeSpan(scratch).subspan(64 - off));
        KVMILL_CHECK(result == EncodeResult::kTile);
      }
    }
  }
}

std::uint64_t Model::HashOf(Space space, const std::string& sequence, std::uint32_t block,
                            unsigned variant) const {
  const std::uint64_t where = static_cast<std::uint64_t>(space) << 32 | block << 8 | variant;
  return Mix(HashOfText(sequence) ^ Mix(tenant_ ^ where));
}

void Model::FillRow(std::uint64_t hash, std::uint32_t layer, bool value, std::uint32_t token,
                    std::uint32_t head, std::uint16_t* row) {
  std::uint64_t bits = Mix(hash ^ (layer << 20 | (value ? 1u : 0u) << 16 | token << 4 | head));
  for (std::uint32_t channel = 0; channel < kHeadDim; ++channel) {
    row[channel] = static_cast<std::uint16_t>(0x3000 + (bits & 0x7FF));  // Finite.
    bits = bits >> 11 | bits << 53;
  }
}

unsigned Model::Matching(Space space, const std::string& sequence, std::uint32_t block,
                         unsigned variants, const PageView& page) const {
  unsigned matching = 0;
  const std::uint32_t layer = page.header().layer;
  const std::uint32_t tokens = block == kWholeBlocks ? TailTokens(sequence) : kBlockTokens;
  if (layer >= kLayers || page.head_count() != kHeads || page.header().token_count != tokens) {
    return 0;
  }
  const bool tiles = space == Space::kTiles && block < kWholeBlocks;
  for (unsigned variant = 0; variant < variants; ++variant) {
    const std::uint64_t hash = HashOf(space, sequence, block, variant);
    bool equal = true;
    for (std::uint32_t head = 0; head < kHeads && equal; ++head) {
      const absl::Span<const std::byte> got = page.contents(head);
      if (tiles) {
        const std::vector<std::byte>& want = ContentOf(hash).records[layer][head];
        equal = page.slot(head).kind == SlotKind::kTile && got == absl::MakeConstSpan(want);
        continue;
      }
      equal = page.slot(head).kind == SlotKind::kRaw &&
              got.size() == std::size_t{2} * tokens * kHeadDim * 2;
      for (std::uint32_t row = 0; row < 2 * tokens && equal; ++row) {
        std::uint16_t want[kHeadDim];
        FillRow(hash, layer, row >= tokens, row % tokens, head, want);
        equal = std::memcmp(got.data() + std::size_t{row} * sizeof(want), want, sizeof(want)) == 0;
      }
    }
    if (equal) matching |= 1u << variant;
  }
  return matching;
}

std::vector<AttentionBlock> Model::AttentionBlocksOf(const std::string& sequence, unsigned variant,
                                                     std::uint32_t layer) const {
  std::vector<AttentionBlock> blocks;
  for (std::uint32_t block = 0; block < kWholeBlocks; ++block) {
    const Content& content = ContentOf(HashOf(Space::kTiles, sequence, block, variant));
    for (const std::vector<std::byte>& record : content.records[layer]) {
      AttentionBlock& entry = blocks.emplace_back();
      entry.kind = BlockKind::kTile;
      entry.data = record.data();
    }
  }
  return blocks;
}

StoreInput::StoreInput(const Model& model, Space space, const std::string& sequence,
                       unsigned variant, Heads heads, bool not_finite) {
  const std::vector<BlockKey> keys = KeysOf(sequence);
  layers_.resize(std::size_t{kBlocks} * kLayers);
  values_.reserve(2 * layers_.size());
  for (std::uint32_t b = 0; b < kBlocks; ++b) {
    StoreBlock& block = blocks_.emplace_back();
    block.key = b == kWholeBlocks ? TailsOwnKey(sequence) : keys[b];
    if (b > 0) block.parent = keys[b - 1];
    block.block_index = b;
    block.token_count = b == kWholeBlocks ? TailTokens(sequence) : kBlockTokens;
    const std::uint64_t hash = model.HashOf(space, sequence, b, variant);
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      const std::uint16_t* halves[2];
      for (const bool value : {false, true}) {
        if (space == Space::kTiles && b < kWholeBlocks) {
          const Model::Content& content = model.ContentOf(hash);
          halves[value ? 1 : 0] = (value ? content.v : content.k)[layer].data();
          continue;
        }
        Model::Values& values = values_.emplace_back(block.token_count * kRowValues);
        for (std::uint32_t token = 0; token < block.token_count; ++token) {
          for (std::uint32_t head = 0; head < kHeads; ++head) {
            std::uint16_t* const row = &values[token * kRowValues + head * kHeadDim];
            Model::FillRow(hash, layer, value, token, head, row);
            if (not_finite && b == 0) row[0] = 0x7E00;
          }
        }
        halves[value ? 1 : 0] = values.data();
      }
      LayerInput& input = layers_[b * kLayers + layer];
      input.k = KvView::Array(halves[0] + heads.begin * kHeadDim, kHeads, kHeadDim);
      input.v = KvView::Array(halves[1] + heads.begin * kHeadDim, kHeads, kHeadDim);
    }
    block.layers = absl::MakeConstSpan(layers_).subspan(b * kLayers, kLayers);
  }
}

std::vector<float> Attend(const std::vector<AttentionBlock>& blocks) {
  const NamespaceSpec spec = SpecOf(Space::kTiles);
  AttentionSequence sequence;
  sequence.blocks = blocks.data();
  sequence.block_count = static_cast<std::uint32_t>(blocks.size() / kHeads);
  sequence.token_end = sequence.block_count * kBlockTokens;
  sequence.query_position = sequence.token_end - 1;
  AttentionArgs args;
  args.shape.format = FormatOf(spec, spec.groups[0]);
  args.shape.q_heads = args.shape.kv_heads = kHeads;
  args.shape.scale = 0.125f;
  args.shape.raw = PackedRawLayout(args.shape.format, spec.source_dtype, kBlockTokens);
  args.sequences = absl::MakeConstSpan(&sequence, 1);
  std::vector<float> query(kHeads * kHeadDim);
  for (std::size_t i = 0; i < query.size(); ++i) query[i] = 0.01f * static_cast<float>(i % 97);
  std::vector<float> output(query.size());
  args.query = query.data();
  args.output = output.data();
  const absl::Status valid = ValidateAttention(args);
  if (!valid.ok()) Wrong(valid.ToString());
  std::vector<std::byte> scratch(AttentionScratchBytes(args, 1) + 64);
  const std::size_t off = reinterpret_cast<std::uintptr_t>(scratch.data()) % 64;
  AttentionCpu(args, {}, absl::MakeSpan(scratch).subspan(64 - off));
  return output;
}

void Wrong(const std::string& what) {
  std::printf("WRONG: %s\n", what.c_str());
  std::fflush(stdout);
  _exit(kWrongBytes);
}

}  // namespace kvmill::stress
