// Attends to a sequence of the command line where the daemon keeps it, and to a copy of it:
//   attend_probe SERVER NAMESPACE SEQUENCE
// Says "attended to TOKENS tokens of LAYERS layers in place" when every layer gave the same output,
// bit by bit, from the daemon's memory as from private memory, and that output is what the
// reference computes.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "client/cli/sequence_lookup.h"
#include "client/client.h"
#include "client/mapped_blocks.h"
#include "kernels/attention.h"

namespace kvmill {
namespace {

constexpr std::uint32_t kQueriesOfAHead = 4;

void Need(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "attend_probe: %s\n", status.ToString().c_str());
  std::exit(1);
}

template <typename T>
T Need(absl::StatusOr<T> result) {
  Need(result.status());
  return *std::move(result);
}

// Whether this process can only read what is there, and shares it with another.
bool IsMappedReadOnly(const std::byte* address) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    std::uintptr_t begin = 0, end = 0;
    char dash = 0;
    std::string access;
    std::istringstream(line) >> std::hex >> begin >> dash >> end >> access;
    const auto at = reinterpret_cast<std::uintptr_t>(address);
    if (begin <= at && at < end) return access == "r--s";
  }
  return false;
}

// What the heads of every page hold, in memory of this process.
class PrivateCopy : public FetchSink {
 public:
  absl::Status OnPage(const PageId& id, const PageView& page) override {
    for (std::uint32_t head = 0; head < page.head_count(); ++head) {
      const absl::Span<const std::byte> bytes = page.contents(head);
      Head& kept = heads[{id.block, id.layer_index, head}];
      kept.kind = page.slot(head).kind;
      kept.bytes.assign(bytes.begin(), bytes.end());
    }
    return absl::OkStatus();
  }
  struct Head {
    SlotKind kind = SlotKind::kAbsent;
    std::vector<std::byte> bytes;
  };
  std::map<std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>, Head> heads;
};

class Probe {
 public:
  Probe(Client& client, const ClientNamespace& ns, const std::string& sequence)
      : ns_(ns), group_(ns.spec.groups[0]), format_(FormatOf(ns.spec, group_)) {
    const cli::FoundSequence found = Need(cli::FindSequence(client, ns, sequence, 0));
    keys_ = found.keys;
    block_count_ = static_cast<std::uint32_t>(keys_.size());
    tail_tokens_ = found.tail_tokens;
    if (tail_tokens_ > 0) keys_.push_back(found.tail_key);
    mapped_ = Need(client.Map(ns, keys_, {.lease = absl::Seconds(10)}));
    for (std::size_t b = 0; b < keys_.size(); ++b) Need(mapped_->status(b));
    const FetchResult fetched = Need(client.Fetch(ns, keys_, copy_));
    for (const FetchBlockResult& block : fetched.blocks) Need(block.status);
  }

  std::uint64_t tokens() const {
    return std::uint64_t{block_count_} * ns_.spec.block_tokens + tail_tokens_;
  }
  std::uint32_t layers() const { return static_cast<std::uint32_t>(group_.layers.size()); }

  void CheckLayer(std::uint32_t layer) {
    std::vector<AttentionBlock> in_place(std::size_t{block_count_} * group_.kv_heads);
    Need(FillAttentionBlocks(*mapped_, 0, layer, 0, block_count_, absl::MakeSpan(in_place)));
    for (const AttentionBlock& block : in_place) {
      if (!IsMappedReadOnly(block.data)) Need(absl::InternalError("a block is not the daemon's"));
    }
    std::vector<AttentionBlock> own;
    for (std::uint32_t b = 0; b < block_count_; ++b) {
      for (std::uint32_t h = 0; h < group_.kv_heads; ++h) {
        const PrivateCopy::Head& head = copy_.heads.at({b, layer, h});
        own.push_back(
            {head.kind == SlotKind::kTile ? BlockKind::kTile : BlockKind::kRaw, head.bytes.data()});
      }
    }
    std::vector<TailHead> mapped_tail, own_tail;
    if (tail_tokens_ > 0) {
      tail_ = Need(MappedTail::Create(*mapped_, 0, layer, block_count_));
      mapped_tail.assign(tail_.heads(), tail_.heads() + group_.kv_heads);
      own_tail = OwnTail(layer);
    }
    const std::vector<float> here = Attend(in_place, mapped_tail, false);
    Need(mapped_->Check());
    const std::vector<float> there = Attend(own, own_tail, false);
    if (std::memcmp(here.data(), there.data(), here.size() * sizeof(float)) != 0) {
      Need(absl::InternalError("attention in place and over a copy differ"));
    }
    const std::vector<float> reference = Attend(own, own_tail, true);
    double error = 0, norm = 0;
    for (std::size_t i = 0; i < here.size(); ++i) {
      error += std::pow(double{here[i]} - double{reference[i]}, 2);
      norm += std::pow(double{reference[i]}, 2);
    }
    if (norm == 0 || std::sqrt(error / norm) > 1e-3) {
      Need(absl::InternalError("attention is not what the reference computes"));
    }
  }

 private:
  std::vector<TailHead> OwnTail(std::uint32_t layer) {
    rows_.assign(std::size_t{2} * group_.kv_heads, nullptr);
    std::vector<TailHead> tail(group_.kv_heads);
    const std::ptrdiff_t row_bytes = std::ptrdiff_t{2} * group_.head_dim;
    for (std::uint32_t h = 0; h < group_.kv_heads; ++h) {
      rows_[2 * h] = copy_.heads.at({block_count_, layer, h}).bytes.data();
      rows_[2 * h + 1] = rows_[2 * h] + row_bytes * tail_tokens_;
      HeadPages* halves[] = {&tail[h].k, &tail[h].v};
      for (int half = 0; half < 2; ++half) {
        *halves[half] = tail_.heads()[h].k;  // The same layout, other memory.
        halves[half]->pages = &rows_[2 * h + static_cast<std::uint32_t>(half)];
      }
    }
    return tail;
  }

  std::vector<float> Attend(const std::vector<AttentionBlock>& table,
                            const std::vector<TailHead>& tail, bool reference) {
    AttentionSequence sequence;
    sequence.blocks = table.data();
    sequence.block_count = block_count_;
    sequence.tail = tail.data();
    sequence.token_end = tokens();
    sequence.query_position = sequence.token_end - 1;
    AttentionArgs args;
    args.shape.format = format_;
    args.shape.kv_heads = group_.kv_heads;
    args.shape.q_heads = kQueriesOfAHead * group_.kv_heads;
    args.shape.scale = 1 / std::sqrt(static_cast<float>(group_.head_dim));
    args.shape.raw = PackedRawLayout(format_, ns_.spec.source_dtype, ns_.spec.block_tokens);
    args.shape.frame = ns_.spec.frame;
    args.sequences = {&sequence, 1};
    std::vector<float> query(std::size_t{args.shape.q_heads} * group_.head_dim);
    for (std::size_t i = 0; i < query.size(); ++i) query[i] = std::sin(static_cast<float>(i));
    std::vector<float> output(query.size());
    args.query = query.data();
    args.output = output.data();
    Need(ValidateAttention(args));
    if (reference) {
      AttentionReference(args);
      return output;
    }
    std::vector<std::byte> scratch(AttentionScratchBytes(args, 1) + 64);
    const std::size_t over = reinterpret_cast<std::uintptr_t>(scratch.data()) % 64;
    AttentionCpu(args, {}, absl::MakeSpan(scratch).subspan(64 - over));
    return output;
  }

  const ClientNamespace& ns_;
  const LayerGroup& group_;
  const TileFormat format_;
  std::vector<BlockKey> keys_;
  std::uint32_t block_count_ = 0;
  std::uint32_t tail_tokens_ = 0;
  std::unique_ptr<MappedBlocks> mapped_;
  PrivateCopy copy_;
  MappedTail tail_;
  std::vector<const std::byte*> rows_;
};

int Main(const std::vector<std::string>& arguments) {
  if (arguments.size() != 3) return 2;
  Client::Options options;
  options.address = arguments[0];
  const auto client = Need(Client::Create(options));
  const ClientNamespace ns = Need(client->FindNamespace(arguments[1]));
  Probe probe(*client, ns, arguments[2]);
  for (std::uint32_t layer = 0; layer < probe.layers(); ++layer) probe.CheckLayer(layer);
  std::printf("attended to %d tokens of %d layers in place\n", static_cast<int>(probe.tokens()),
              static_cast<int>(probe.layers()));
  return 0;
}

}  // namespace
}  // namespace kvmill

int main(int argc, char** argv) {
  return kvmill::Main(std::vector<std::string>(argv + 1, argv + argc));
}
