// Attention of one layer on a device, over blocks where the daemon keeps them or over copies.
#ifndef KVMILL_TESTS_INTEGRATION_DEVICE_ATTENTION_H_
#define KVMILL_TESTS_INTEGRATION_DEVICE_ATTENTION_H_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "client/client.h"
#include "client/mapped_blocks.h"
#include "storage/core/status_macros.h"
#include "storage/device/device.h"

namespace kvmill::testing {

// What the heads of every page hold, in memory of this process.
class HeadCollector : public FetchSink {
 public:
  absl::Status OnPage(const PageId& id, const PageView& page) override {
    for (std::uint32_t head = 0; head < page.head_count(); ++head) {
      const absl::Span<const std::byte> bytes = page.contents(head);
      heads[{id.block, id.layer_index, head}] = {page.slot(head).kind,
                                                 {bytes.begin(), bytes.end()}};
    }
    return absl::OkStatus();
  }
  // By block, layer and head.
  std::map<std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>,
           std::pair<SlotKind, std::vector<std::byte>>>
      heads;
};

// Whole blocks of the first layer group; queries that depend on nothing. One thread at a time.
class DeviceAttention {
 public:
  static absl::StatusOr<std::unique_ptr<DeviceAttention>> Create(Device& device,
                                                                 const NamespaceSpec& spec,
                                                                 std::uint32_t block_count) {
    std::unique_ptr<DeviceAttention> made(new DeviceAttention(device, spec, block_count));
    KVMILL_ASSIGN_OR_RETURN(made->stream_, device.CreateStream());
    // Everything that kernels are given but blocks: lists and vectors are in pinned memory.
    KVMILL_RETURN_IF_ERROR(device.Pin(absl::MakeSpan(made->lists_)));
    made->is_pinned_ = true;
    KVMILL_ASSIGN_OR_RETURN(
        made->workspace_,
        device.Allocate(device.AttendWorkspaceBytes(made->Shape(), 1, 1, kWorkers), "workspace"));
    return made;
  }
  ~DeviceAttention() {
    stream_ = nullptr;
    if (is_pinned_) device_.Unpin(absl::MakeSpan(lists_));
  }

  struct Result {
    std::vector<float> output;
    std::uint32_t changed = 0;  // Pages whose generation was another one afterwards.
  };
  // Looks up where the pages are.
  absl::Status Prepare(const MappedBlocks& mapped, std::size_t layer) {
    KVMILL_RETURN_IF_ERROR(FillAttentionBlocks(mapped, 0, layer, 0, block_count_, Table()));
    return FillGenerationChecks(mapped, 0, layer, 0, block_count_, Checks());
  }
  // Attends to what was prepared; the look at the generations is behind it on the stream.
  absl::StatusOr<Result> Run() { return Attend(block_count_); }
  // The same over copies in the device's memory.
  absl::StatusOr<Result> OverCopies(const HeadCollector& copies, std::uint32_t layer) {
    std::size_t bytes = 0;
    for (const auto& [where, head] : copies.heads) bytes += (head.second.size() + 63) / 64 * 64;
    KVMILL_ASSIGN_OR_RETURN(const auto memory, device_.Allocate(bytes, "copies"));
    std::byte* at = memory->address();
    for (std::uint32_t b = 0; b < block_count_; ++b) {
      for (std::uint32_t h = 0; h < group().kv_heads; ++h) {
        const auto& [kind, contents] = copies.heads.at({b, layer, h});
        Table()[b * group().kv_heads + h] = {
            kind == SlotKind::kTile ? BlockKind::kTile : BlockKind::kRaw, at};
        KVMILL_RETURN_IF_ERROR(stream_->Copy(at, contents.data(), contents.size()));
        at += (contents.size() + 63) / 64 * 64;
      }
    }
    return Attend(0);
  }

 private:
  static constexpr std::uint32_t kWorkers = 2;
  static constexpr std::uint32_t kQueriesOfAHead = 2;

  DeviceAttention(Device& device, const NamespaceSpec& spec, std::uint32_t block_count)
      : device_(device), spec_(spec), block_count_(block_count) {
    lists_.resize(VectorAt() + 2 * OutputFloats() * sizeof(float) + 64);
  }
  const LayerGroup& group() const { return spec_.groups[0]; }
  std::size_t OutputFloats() const {
    return std::size_t{kQueriesOfAHead} * group().kv_heads * group().head_dim;
  }
  // Places in lists_: sequence, count of changes, table, checks, query and output.
  static constexpr std::size_t kChangedAt = 256;
  static constexpr std::size_t kTableAt = 512;
  std::size_t ChecksAt() const {
    return kTableAt + std::size_t{block_count_} * group().kv_heads * sizeof(AttentionBlock);
  }
  std::size_t VectorAt() const {
    return (ChecksAt() + block_count_ * sizeof(GenerationCheck) + 63) / 64 * 64;
  }
  template <typename T>
  T* At(std::size_t offset) {
    return reinterpret_cast<T*>(lists_.data() + offset);
  }
  absl::Span<AttentionBlock> Table() {
    return {At<AttentionBlock>(kTableAt), std::size_t{block_count_} * group().kv_heads};
  }
  absl::Span<GenerationCheck> Checks() { return {At<GenerationCheck>(ChecksAt()), block_count_}; }

  AttentionShape Shape() const {
    AttentionShape shape;
    shape.format = FormatOf(spec_, group());
    shape.kv_heads = group().kv_heads;
    shape.q_heads = kQueriesOfAHead * group().kv_heads;
    shape.scale = 0.125f;
    shape.raw = PackedRawLayout(shape.format, spec_.source_dtype, spec_.block_tokens);
    return shape;
  }

  absl::StatusOr<Result> Attend(std::size_t check_count) {
    auto* sequence = new (lists_.data()) AttentionSequence;
    sequence->blocks = Table().data();
    sequence->block_count = block_count_;
    sequence->token_end = std::uint64_t{block_count_} * spec_.block_tokens;
    sequence->query_position = sequence->token_end - 1;
    auto* query = At<float>(VectorAt());
    for (std::size_t i = 0; i < OutputFloats(); ++i) query[i] = std::sin(static_cast<float>(i));
    float* output = query + OutputFloats();
    auto* changed = At<std::uint32_t>(kChangedAt);
    *changed = 0;
    AttentionArgs args;
    args.shape = Shape();
    args.sequences = {sequence, 1};
    args.query = query;
    args.output = output;
    KVMILL_RETURN_IF_ERROR(stream_->Attend(args, kWorkers, workspace_->address()));
    KVMILL_RETURN_IF_ERROR(stream_->CheckGenerations(Checks().data(), check_count, changed));
    KVMILL_RETURN_IF_ERROR(stream_->Synchronize());
    return Result{{output, output + OutputFloats()}, *changed};
  }

  Device& device_;
  const NamespaceSpec spec_;
  const std::uint32_t block_count_;
  std::vector<std::byte> lists_;
  bool is_pinned_ = false;
  std::unique_ptr<DeviceMemory> workspace_;
  std::unique_ptr<DeviceStream> stream_;
};

}  // namespace kvmill::testing

#endif  // KVMILL_TESTS_INTEGRATION_DEVICE_ATTENTION_H_
