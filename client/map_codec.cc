#include "client/map_codec.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "client/convert.h"
#include "storage/core/page_layout.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

constexpr std::uint64_t kGenerationBytes = sizeof(std::uint64_t);

absl::Status Malformed(absl::string_view what, std::uint64_t got, std::uint64_t want) {
  return absl::InternalError(
      absl::StrCat("malformed reply to Map: ", what, " ", got, ", want ", want));
}

}  // namespace

std::uint32_t MapReplyWriter::AddArena(const ArenaId& arena, std::uint64_t arena_bytes,
                                       std::uint64_t generation_bytes) {
  // A handful: tenants have few arenas in use, and a prefix lies in few of them.
  const auto it = std::find(arenas_.begin(), arenas_.end(), arena);
  if (it != arenas_.end()) return static_cast<std::uint32_t>(it - arenas_.begin());
  arenas_.push_back(arena);
  v1::MappedArena* a = reply_->add_arenas();
  a->set_tier(ToProto(arena.tier));
  a->set_arena(arena.arena);
  a->set_arena_epoch(arena.epoch);
  a->set_arena_bytes(arena_bytes);
  a->set_generation_bytes(generation_bytes);
  return static_cast<std::uint32_t>(arenas_.size() - 1);
}

void MapReplyWriter::AddBlock(Tier found_in, std::uint32_t token_count,
                              absl::Span<const MappedRun> runs) {
  reply_->add_token_counts(token_count);
  reply_->add_tiers(ToProto(found_in));
  reply_->add_run_counts(static_cast<std::uint32_t>(runs.size()));
  for (const MappedRun& run : runs) {
    reply_->add_run_arenas(run.arena_index);
    reply_->add_run_offset_bytes(run.offset_bytes);
    reply_->add_run_pages(run.page_count);
    reply_->add_run_page_bytes(run.page_bytes);
    reply_->add_run_stride_bytes(run.stride_bytes);
    reply_->add_run_generation_offset_bytes(run.generation_offset_bytes);
  }
}

void MapReplyWriter::AddGenerations(absl::Span<const std::uint64_t> generations) {
  reply_->mutable_generations()->Add(generations.begin(), generations.end());
}

void MapReplyWriter::AddFailure(std::uint32_t index, const absl::Status& status) {
  v1::MapFailure* failure = reply_->add_failures();
  failure->set_index(index);
  ToProto(status, failure->mutable_status());
}

absl::StatusOr<MapReplyContent> ReadMapReply(const v1::MapReply& reply, const NamespaceSpec& spec,
                                             std::size_t block_count) {
  MapReplyContent content;
  for (const v1::MappedArena& a : reply.arenas()) {
    MappedArenaInfo& arena = content.arenas.emplace_back();
    KVMILL_ASSIGN_OR_RETURN(arena.id.tier, FromProto(a.tier()));
    arena.id.arena = a.arena();
    arena.id.epoch = a.arena_epoch();
    arena.arena_bytes = a.arena_bytes();
    arena.generation_bytes = a.generation_bytes();
    // The CPU cannot read a GPU's memory: whether it is one must agree.
    const bool on_gpu = arena.id.tier == Tier::kGpu;
    if (on_gpu != (arena.generation_bytes != 0) || (!on_gpu && arena.id.tier != Tier::kHost)) {
      return Malformed(
          absl::StrCat("generation_bytes of an arena of tier ", TierName(arena.id.tier)),
          arena.generation_bytes, on_gpu ? 1 : 0);
    }
  }
  const std::size_t entries = block_count * spec.groups.size();
  const auto failures = static_cast<std::size_t>(reply.failures_size());
  if (failures > entries) return Malformed("failures", failures, entries);
  const std::size_t mapped = entries - failures;
  const auto one_each = [](absl::string_view what, int got, std::size_t want) {
    return static_cast<std::size_t>(got) == want
               ? absl::OkStatus()
               : Malformed(what, static_cast<std::uint64_t>(got), want);
  };
  KVMILL_RETURN_IF_ERROR(one_each("token_counts", reply.token_counts_size(), mapped));
  KVMILL_RETURN_IF_ERROR(one_each("tiers", reply.tiers_size(), mapped));
  KVMILL_RETURN_IF_ERROR(one_each("run_counts", reply.run_counts_size(), mapped));
  const auto runs = static_cast<std::size_t>(reply.run_arenas_size());
  KVMILL_RETURN_IF_ERROR(one_each("run_offset_bytes", reply.run_offset_bytes_size(), runs));
  KVMILL_RETURN_IF_ERROR(one_each("run_pages", reply.run_pages_size(), runs));
  KVMILL_RETURN_IF_ERROR(one_each("run_page_bytes", reply.run_page_bytes_size(), runs));
  KVMILL_RETURN_IF_ERROR(one_each("run_stride_bytes", reply.run_stride_bytes_size(), runs));
  KVMILL_RETURN_IF_ERROR(
      one_each("run_generation_offset_bytes", reply.run_generation_offset_bytes_size(), runs));

  content.blocks.resize(entries);
  content.runs.reserve(runs);
  std::size_t failure = 0;
  int next = 0;  // Mapped so far.
  std::size_t run = 0;
  for (std::size_t entry = 0; entry < entries; ++entry) {
    MapReplyBlock& block = content.blocks[entry];
    if (failure < failures && reply.failures(static_cast<int>(failure)).index() == entry) {
      block.status = FromProto(reply.failures(static_cast<int>(failure)).status());
      if (block.status.ok()) return Malformed("status of a failure", 0, 1);
      ++failure;
      continue;
    }
    if (static_cast<std::size_t>(next) == mapped)
      return Malformed("mapped blocks", mapped, mapped + 1);
    KVMILL_ASSIGN_OR_RETURN(block.tier, FromProto(static_cast<v1::Tier>(reply.tiers(next))));
    block.token_count = reply.token_counts(next);
    if (block.token_count == 0 || block.token_count > spec.block_tokens) {
      return Malformed("token_count", block.token_count, spec.block_tokens);
    }
    block.lease = reply.first_lease() + static_cast<std::uint64_t>(next);
    block.first_run = run;
    block.first_page = content.page_count;
    const std::size_t want_pages = spec.groups[entry % spec.groups.size()].layers.size();
    std::size_t pages = 0;
    for (std::uint32_t r = 0; r < reply.run_counts(next); ++r, ++run) {
      if (run >= runs) return Malformed("runs", runs, run + 1);
      const int i = static_cast<int>(run);
      const std::uint32_t arena = reply.run_arenas(i);
      if (arena >= content.arenas.size()) {
        return Malformed("run_arena", arena, content.arenas.size());
      }
      const std::uint64_t arena_bytes = content.arenas[arena].arena_bytes;
      const std::uint64_t count = reply.run_pages(i);
      const std::uint64_t page_bytes = reply.run_page_bytes(i);
      const std::uint64_t stride = reply.run_stride_bytes(i);
      const std::uint64_t offset = reply.run_offset_bytes(i);
      const std::uint64_t generation_offset = reply.run_generation_offset_bytes(i);
      if (count == 0 || count > want_pages - pages) {
        return Malformed("run_pages", count, want_pages - pages);
      }
      // 32-bit factors: no product below overflows, and sums only after these checks.
      if (offset % kPageAlignment != 0) {
        return Malformed("run_offset_bytes", offset, offset - offset % kPageAlignment);
      }
      if (page_bytes == 0 || offset > arena_bytes ||
          (count - 1) * stride + page_bytes > arena_bytes - offset) {
        return Malformed("run_offset_bytes", offset, arena_bytes);
      }
      if (stride % kPageAlignment != 0) {
        return Malformed("run_stride_bytes", stride, stride - stride % kPageAlignment);
      }
      const std::uint64_t generation_bytes = content.arenas[arena].generation_bytes != 0
                                                 ? content.arenas[arena].generation_bytes
                                                 : arena_bytes;
      if (generation_offset % kGenerationBytes != 0 || generation_offset > generation_bytes ||
          count * kGenerationBytes > generation_bytes - generation_offset) {
        return Malformed("run_generation_offset_bytes", generation_offset, generation_bytes);
      }
      MappedRun& named = content.runs.emplace_back();
      named.arena_index = arena;
      named.page_count = static_cast<std::uint32_t>(count);
      named.page_bytes = static_cast<std::uint32_t>(page_bytes);
      named.stride_bytes = static_cast<std::uint32_t>(stride);
      named.offset_bytes = offset;
      named.generation_offset_bytes = generation_offset;
      pages += count;
    }
    if (pages != want_pages) return Malformed("pages of a block", pages, want_pages);
    block.run_count = run - block.first_run;
    content.page_count += pages;
    ++next;
  }
  if (failure != failures) return Malformed("failures in order", failure, failures);
  if (run != runs) return Malformed("runs", runs, run);
  return content;
}

}  // namespace kvmill
