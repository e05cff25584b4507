// Attends to blocks where the daemon keeps them, without a copy: map_and_attend ADDRESS
// (after store_and_fetch ADDRESS, which stores the block)
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "client/client.h"
#include "client/mapped_blocks.h"
#include "kernels/attention.h"

using namespace kvmill;  // NOLINT(google-build-using-namespace): the program is short.

template <typename T>
T Need(absl::StatusOr<T> result) {
  if (result.ok()) return *std::move(result);
  std::fprintf(stderr, "map_and_attend: %s\n", result.status().ToString().c_str());
  std::exit(1);
}

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s ADDRESS, as unix:/run/kvmill/kvmill.sock\n", argv[0]);
    return 2;
  }
  const auto client = Need(Client::Create({.address = argv[1]}));
  const ClientNamespace ns = Need(client->FindNamespace("example"));
  const BlockKey key = Need(BlockKey::FromBytes("hash of all tokens up to here"));

  // A lease on the block, and its pages as memory of this process.
  const auto mapped = Need(client->Map(ns, {&key, 1}, {.lease = absl::Seconds(10)}));
  if (!mapped->status(0).ok()) return 3;  // A miss: the engine computes K and V itself.

  // The heads of layer 0: pointers into the daemon's memory.
  const LayerGroup& group = ns.spec.groups[0];
  std::vector<AttentionBlock> table(mapped->block_count() * group.kv_heads);
  const absl::Status filled =
      FillAttentionBlocks(*mapped, /*group=*/0, /*layer_index=*/0,
                          /*first_block=*/0, mapped->block_count(), absl::MakeSpan(table));
  if (!filled.ok()) return 4;

  // One query token with 32 query heads, each of ones.
  AttentionSequence sequence;
  sequence.blocks = table.data();
  sequence.block_count = 1;
  sequence.token_end = ns.spec.block_tokens;
  sequence.query_position = sequence.token_end - 1;
  AttentionArgs args;
  args.shape.format = FormatOf(ns.spec, group);
  args.shape.q_heads = 32;
  args.shape.kv_heads = group.kv_heads;
  args.shape.scale = 1 / std::sqrt(static_cast<float>(group.head_dim));
  args.shape.raw = PackedRawLayout(args.shape.format, ns.spec.source_dtype, ns.spec.block_tokens);
  args.sequences = {&sequence, 1};
  const std::vector<float> query(32 * group.head_dim, 1);
  std::vector<float> output(query.size());
  args.query = query.data();
  args.output = output.data();
  std::vector<std::byte> scratch(AttentionScratchBytes(args, 1) + 64);
  const std::size_t off = reinterpret_cast<std::uintptr_t>(scratch.data()) % 64;
  AttentionCpu(args, {}, absl::MakeSpan(scratch).subspan(64 - off));

  // Only now is it known that what was read was right: the lease held all the time.
  const absl::Status whole = mapped->Check();
  if (!whole.ok()) return 5;  // ABORTED: throw the output away.
  double norm = 0;
  for (const float value : output) norm += double{value} * value;
  std::printf("attended to %d tokens in place; the output has norm %.2f\n",
              static_cast<int>(mapped->token_count(0)), std::sqrt(norm));
  return 0;
}
