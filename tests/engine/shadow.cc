#include "tests/engine/shadow.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/decode.h"
#include "kernels/encode.h"
#include "storage/core/check.h"

namespace kvmill::engine {
namespace {

// The kernels want scratch at a multiple of 64.
class Scratch {
 public:
  explicit Scratch(std::size_t bytes) : bytes_(bytes + 64) {}
  absl::Span<std::byte> span() {
    const std::size_t misaligned = reinterpret_cast<std::uintptr_t>(bytes_.data()) % 64;
    return absl::MakeSpan(bytes_).subspan((64 - misaligned) % 64);
  }

 private:
  std::vector<std::byte> bytes_;
};

}  // namespace

void Shadow::Remember(const std::vector<std::uint64_t>& hashes) { blocks_[hashes.back()] = hashes; }

const ExpectedHead& Shadow::Head(const std::vector<std::uint64_t>& hashes, bool raw,
                                 std::uint32_t layer, std::uint32_t head) {
  // A bound on memory; what is forgotten is computed again.
  if (heads_.size() > 4096) heads_.clear();
  const auto [it, made] = heads_.try_emplace({hashes.back(), layer, head, raw});
  ExpectedHead& expected = it->second;
  if (!made) return expected;
  const std::size_t half = hashes.size() * shape_.head_dim;
  expected.rows.resize(2 * half);
  for (std::size_t token = 0; token < hashes.size(); ++token) {
    for (const bool value : {false, true}) {
      FillRow(shape_, hashes[token], layer, head, value,
              &expected.rows[(value ? half : 0) + token * shape_.head_dim]);
    }
  }
  if (!raw) {
    KVMILL_CHECK(hashes.size() == shape_.block_tokens);
    const NamespaceSpec spec = SpecOf(shape_);
    const TileFormat format = FormatOf(spec, spec.groups[0]);
    std::byte* halves[2] = {reinterpret_cast<std::byte*>(expected.rows.data()),
                            reinterpret_cast<std::byte*>(expected.rows.data() + half)};
    std::vector<std::byte> record(RecordBytes(format));
    EncodeArgs encode;
    const std::byte* const const_halves[2] = {halves[0], halves[1]};
    const auto pages_of = [&](auto* pages, auto* list) {
      pages->pages = list;
      pages->page_tokens = shape_.block_tokens;
      pages->token_stride_bytes = static_cast<std::ptrdiff_t>(shape_.row_bytes());
      pages->dtype = shape_.dtype();
    };
    pages_of(&encode.k, &const_halves[0]);
    pages_of(&encode.v, &const_halves[1]);
    encode.record = record.data();
    EncodeResult result = EncodeResult::kRaw;
    Scratch scratch(std::max(EncodeScratchBytes(format), DecodeScratchBytes(format)));
    EncodeTilesCpu(format, spec.frame, {&encode, 1}, {&result, 1}, scratch.span());
    KVMILL_CHECK(result != EncodeResult::kNonFinite);
    if (result == EncodeResult::kTile) {
      DecodeArgs decode;
      decode.record = record.data();
      pages_of(&decode.k, &halves[0]);
      pages_of(&decode.v, &halves[1]);
      DecodeTilesCpu(format, spec.frame, {&decode, 1}, scratch.span());
      expected.kind = SlotKind::kTile;
      expected.contents = std::move(record);
      return expected;
    }
  }
  const auto* bytes = reinterpret_cast<const std::byte*>(expected.rows.data());
  expected.contents.assign(bytes, bytes + 2 * expected.rows.size());
  return expected;
}

std::string Shadow::Check(const SequenceView& sequence, std::uint32_t token_count,
                          std::uint32_t head_begin, KvMemory& memory) {
  std::vector<std::uint16_t> computed(shape_.head_dim);
  for (std::uint32_t token = 0; token < token_count; ++token) {
    const std::uint32_t in_page = token % kPageTokens;
    const PageId page = sequence.pages[token / kPageTokens];
    const std::uint64_t source = sequence.sources[token / kPageTokens];
    const std::vector<std::uint64_t>* block = nullptr;
    if (source != 0) {
      const auto it = blocks_.find(source);
      KVMILL_CHECK(it != blocks_.end());
      block = &it->second;
    }
    for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
      for (std::uint32_t head = 0; head < memory.head_count(); ++head) {
        for (const bool value : {false, true}) {
          const std::uint16_t* want = computed.data();
          if (block == nullptr) {
            FillRow(shape_, sequence.hashes[token], layer, head_begin + head, value,
                    computed.data());
          } else {
            const std::size_t row = (value ? shape_.block_tokens : 0) + token % shape_.block_tokens;
            want = &Head(*block, false, layer, head_begin + head).rows[row * shape_.head_dim];
          }
          const std::byte* got = memory.Row(layer, value, page, in_page, head);
          if (std::memcmp(got, want, shape_.row_bytes()) == 0) continue;
          std::uint32_t channel = 0;
          std::uint16_t bits = 0;
          for (;; ++channel) {
            std::memcpy(&bits, got + 2 * channel, 2);
            if (bits != want[channel]) break;
          }
          return absl::StrFormat(
              "request %d token %d: %s of layer %d head %d channel %d is 0x%04x, want 0x%04x (page "
              "%d, %s)",
              sequence.request, token, value ? "V" : "K", layer, head_begin + head, channel, bits,
              want[channel], page, block == nullptr ? "computed" : "decoded from a tile");
        }
      }
    }
  }
  return "";
}

void StoreModel::Allow(std::uint64_t request, const std::vector<std::uint64_t>& hashes,
                       std::uint32_t begin, std::uint32_t end) {
  Block block;
  block.request = request;
  block.begin = begin;
  block.hashes.assign(hashes.begin() + begin, hashes.begin() + end);
  const bool tail = end - begin < shape_.block_tokens;
  block.raw = tail || begin / shape_.block_tokens < shape_.sink_blocks;
  const BlockKey own = KeyOf(hashes[end - 1]);
  const BlockKey parent = begin == 0 ? BlockKey() : KeyOf(hashes[begin - 1]);
  const BlockKey key = tail ? TailKey(parent, end - begin, own) : own;
  block.parent = begin == 0 ? 0 : hashes[begin - 1];
  blocks_.emplace(std::string(key.view()), std::move(block));
}

std::vector<BlockKey> StoreModel::keys() const {
  std::vector<BlockKey> keys;
  for (const auto& [bytes, block] : blocks_) keys.push_back(*BlockKey::FromBytes(bytes));
  return keys;
}

class StoreModel::Comparer : public FetchSink {
 public:
  Comparer(StoreModel& model, const std::vector<const Block*>& blocks)
      : model_(model), blocks_(blocks) {}

  absl::Status OnPage(const PageId& id, const PageView& page) override {
    const Block& block = *blocks_[id.block];
    for (std::uint32_t head = 0; head < page.head_count(); ++head) {
      const ExpectedHead& want = model_.shadow_.Head(block.hashes, block.raw, id.layer_index, head);
      const absl::Span<const std::byte> got = page.contents(head);
      const bool same = page.slot(head).kind == want.kind && got.size() == want.contents.size() &&
                        std::memcmp(got.data(), want.contents.data(), got.size()) == 0;
      if (same) continue;
      wrong.push_back(absl::StrCat("the store has other bytes than request ", block.request,
                                   " computed: tokens ", block.begin, " to ",
                                   block.begin + block.hashes.size(), ", layer ", id.layer_index,
                                   ", head ", head));
      break;
    }
    return absl::OkStatus();
  }

  std::vector<std::string> wrong;

 private:
  StoreModel& model_;
  const std::vector<const Block*>& blocks_;
};

std::vector<std::string> StoreModel::Audit(Client& client, const ClientNamespace& ns) {
  const absl::StatusOr<std::vector<ListedBlock>> listed = client.List(ns.name);
  if (!listed.ok()) return {absl::StrCat("List: ", listed.status().ToString())};
  std::vector<std::string> wrong;
  std::vector<BlockKey> keys;
  std::vector<const Block*> blocks;
  for (const ListedBlock& there : *listed) {
    const auto it = blocks_.find(std::string(there.key.view()));
    if (it == blocks_.end()) {
      wrong.push_back(absl::StrCat("the store has block ", there.key.ToHex(),
                                   ", which no request computed and accepted"));
      continue;
    }
    keys.push_back(there.key);
    blocks.push_back(&it->second);
  }
  Comparer comparer(*this, blocks);
  const absl::StatusOr<FetchResult> fetched = client.Fetch(ns, keys, comparer);
  if (!fetched.ok()) {
    wrong.push_back(absl::StrCat("Fetch: ", fetched.status().ToString()));
    return wrong;
  }
  audited_blocks_ = audited_rivals_ = 0;
  std::map<std::pair<std::uint64_t, std::size_t>, std::size_t> tails;  // Of one parent and length.
  for (std::size_t i = 0; i < keys.size(); ++i) {
    // It may have been evicted since it was listed; anything else is a fault.
    const FetchBlockResult& block = fetched->blocks[i];
    if (absl::IsNotFound(block.status)) continue;
    if (!block.status.ok()) {
      wrong.push_back(absl::StrCat("block ", keys[i].ToHex(), ": ", block.status.ToString()));
    } else if (block.token_count != blocks[i]->hashes.size()) {
      wrong.push_back(absl::StrCat("block ", keys[i].ToHex(), " has ", block.token_count,
                                   " tokens, want ", blocks[i]->hashes.size()));
    }
    ++audited_blocks_;
    const std::size_t tokens = blocks[i]->hashes.size();
    if (tokens < shape_.block_tokens && ++tails[{blocks[i]->parent, tokens}] > 1) ++audited_rivals_;
  }
  wrong.insert(wrong.end(), comparer.wrong.begin(), comparer.wrong.end());
  return wrong;
}

}  // namespace kvmill::engine
