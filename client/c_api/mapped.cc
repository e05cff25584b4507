// Map, Renew, and what a mapping shows.
#include "client/c_api/mapped.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/c_api/arguments.h"
#include "client/c_api/border.h"
#include "client/c_api/operation.h"
#include "client/c_api/results.h"
#include "storage/core/status_macros.h"

namespace kvmill::c_api {
namespace {

constexpr std::uint64_t kLeaseMsDefault = 10'000;
// The daemon's limit is far below; more would not fit what is sent.
constexpr std::uint64_t kLeaseMsMax = std::uint64_t{1} << 31;

absl::StatusOr<absl::Duration> LeaseOf(std::uint64_t lease_ms) {
  if (lease_ms > kLeaseMsMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("lease_ms ", lease_ms, ", at most ", kLeaseMsMax));
  }
  return absl::Milliseconds(lease_ms == 0 ? kLeaseMsDefault : lease_ms);
}

struct MappedInputs final : Inputs {
  std::shared_ptr<MappedBlocks> blocks;
};

absl::Status CheckMapped(const kvmill_mapped* mapped) {
  return mapped == nullptr ? Null("mapped") : absl::OkStatus();
}

kvmill_mapped_head HeadOf(const PageView& page, std::size_t head) {
  const absl::Span<const std::byte> contents = page.contents(head);
  kvmill_mapped_head to = {};
  to.kind = static_cast<std::uint32_t>(page.slot(head).kind);
  to.data = contents.empty() ? nullptr : contents.data();
  to.bytes = contents.size();
  to.tokens = page.header().token_count;
  return to;
}

static_assert(KVMILL_HEAD_ABSENT == static_cast<int>(SlotKind::kAbsent) &&
              KVMILL_HEAD_TILE == static_cast<int>(SlotKind::kTile) &&
              KVMILL_HEAD_RAW == static_cast<int>(SlotKind::kRaw));

}  // namespace

MappedData::MappedData(const kvmill_client* c, std::shared_ptr<Device> d,
                       std::shared_ptr<const NamespaceData> n, std::unique_ptr<MappedBlocks> b)
    : client(c), device(std::move(d)), ns(std::move(n)), blocks(std::move(b)) {
  for (std::size_t i = 0; i < blocks->block_count(); ++i) {
    messages.emplace_back(blocks->status(i).message());
  }
}

absl::StatusOr<PageView> MappedData::Page(std::size_t block, std::size_t layer) const {
  if (block >= blocks->block_count()) return OutOfRange("block", block, blocks->block_count());
  if (layer >= ns->layer_count()) return OutOfRange("layer", layer, ns->layer_count());
  const std::size_t group = ns->layer_groups[layer];
  return blocks->Page(block, group, layer - ns->group_begin[group]);
}

}  // namespace kvmill::c_api

using namespace kvmill;         // NOLINT(google-build-using-namespace): the functions are C's.
using namespace kvmill::c_api;  // NOLINT(google-build-using-namespace)

extern "C" {

kvmill_code kvmill_map(kvmill_client* client, const kvmill_namespace* ns, const kvmill_key* keys,
                       size_t key_count, const kvmill_map_options* options,
                       const kvmill_call_options* call, kvmill_queue* queue, uint64_t tag) {
  return Guard([&]() -> absl::Status {
    KVMILL_RETURN_IF_ERROR(CheckNamespace(ns));
    KVMILL_ASSIGN_OR_RETURN(Operation operation,
                            Operation::Prepare(KVMILL_MAP, client, call, queue, tag));
    kvmill_map_options from;
    KVMILL_RETURN_IF_ERROR(ReadOptions("options", options, &from));
    MapOptions to;
    KVMILL_ASSIGN_OR_RETURN(to.lease, LeaseOf(from.lease_ms));
    KVMILL_RETURN_IF_ERROR(ToEnum("memory", from.memory, PageMemory::kGpu, &to.memory));
    KeyInputs* const inputs = operation.Keep(std::make_unique<KeyInputs>());
    KVMILL_ASSIGN_OR_RETURN(inputs->keys, KeysOf(keys, key_count));
    using Shared = std::shared_ptr<const MappedData>;
    return operation.Start<Shared>([&](const CallOptions& call_options, auto done) {
      client->client->MapAsync(
          ns->data->ns, inputs->keys, to, call_options,
          [client, device = client->device, data = ns->data,
           done](absl::StatusOr<Client::MappedPtr> mapped) {
            if (!mapped.ok()) return done(mapped.status());
            done(Shared(std::make_shared<MappedData>(client, device, data, *std::move(mapped))));
          });
    });
  });
}

kvmill_code kvmill_renew(kvmill_client* client, const kvmill_mapped* mapped, uint64_t lease_ms,
                         const kvmill_call_options* call, kvmill_queue* queue, uint64_t tag) {
  return Guard([&]() -> absl::Status {
    KVMILL_RETURN_IF_ERROR(CheckMapped(mapped));
    KVMILL_ASSIGN_OR_RETURN(Operation operation,
                            Operation::Prepare(KVMILL_RENEW, client, call, queue, tag));
    if (mapped->data->client != client) {
      return absl::InvalidArgumentError("client is not the one that mapped the blocks");
    }
    KVMILL_ASSIGN_OR_RETURN(const absl::Duration lease, LeaseOf(lease_ms));
    MappedInputs* const inputs = operation.Keep(std::make_unique<MappedInputs>());
    inputs->blocks = mapped->data->blocks;
    return operation.Start<std::monostate>([&](const CallOptions& options, auto done) {
      client->client->RenewAsync(*inputs->blocks, lease, options, [done](const absl::Status& s) {
        done(s.ok() ? absl::StatusOr<std::monostate>(std::monostate()) : s);
      });
    });
  });
}

kvmill_code kvmill_mapped_release(const kvmill_mapped* mapped) {
  return Guard([&]() -> absl::Status {
    if (mapped != nullptr) mapped->data->blocks->Release();
    return absl::OkStatus();
  });
}

void kvmill_mapped_free(kvmill_mapped* mapped) { delete mapped; }

size_t kvmill_mapped_block_count(const kvmill_mapped* mapped) {
  return mapped == nullptr ? 0 : mapped->data->blocks->block_count();
}

kvmill_code kvmill_mapped_block(const kvmill_mapped* mapped, size_t block,
                                kvmill_block_result* out) {
  return Guard([&]() -> absl::Status {
    KVMILL_RETURN_IF_ERROR(CheckMapped(mapped));
    const MappedBlocks& blocks = *mapped->data->blocks;
    if (block >= blocks.block_count()) return OutOfRange("block", block, blocks.block_count());
    const absl::Status& status = blocks.status(block);
    kvmill_block_result to = {};
    to.code = static_cast<kvmill_code>(status.code());
    to.message = mapped->data->messages[block].c_str();
    to.retry_after_ms = RetryMs(status);
    to.tier = static_cast<std::uint32_t>(blocks.tier(block));
    to.token_count = blocks.token_count(block);
    return WriteStruct("block", to, out);
  });
}

uint64_t kvmill_mapped_left_ms(const kvmill_mapped* mapped) {
  if (mapped == nullptr) return 0;
  const MappedBlocks& blocks = *mapped->data->blocks;
  if (!blocks.Check(0, 0).ok()) return 0;
  const std::int64_t left = absl::ToInt64Milliseconds(blocks.deadline() - absl::Now());
  return static_cast<std::uint64_t>(std::max<std::int64_t>(left, 0));
}

kvmill_code kvmill_mapped_check(const kvmill_mapped* mapped, size_t first_block,
                                size_t block_count) {
  return Guard([&]() -> absl::Status {
    KVMILL_RETURN_IF_ERROR(CheckMapped(mapped));
    const MappedBlocks& blocks = *mapped->data->blocks;
    const std::size_t count = blocks.block_count();
    if (first_block > count) return OutOfRange("block", first_block, count);
    if (block_count > count - first_block) {
      return absl::OutOfRangeError(
          absl::StrCat(block_count, " blocks from block ", first_block, " on, there are ", count));
    }
    return blocks.Check(first_block, block_count);
  });
}

kvmill_code kvmill_mapped_verify(const kvmill_mapped* mapped) {
  return Guard([&]() -> absl::Status {
    KVMILL_RETURN_IF_ERROR(CheckMapped(mapped));
    return mapped->data->blocks->VerifyContents();
  });
}

kvmill_code kvmill_mapped_memory(const kvmill_mapped* mapped, size_t block, size_t layer,
                                 uint32_t* tier) {
  return Guard([&]() -> absl::Status {
    KVMILL_RETURN_IF_ERROR(CheckMapped(mapped));
    if (tier == nullptr) return Null("tier");
    const MappedData& data = *mapped->data;
    KVMILL_RETURN_IF_ERROR(data.Page(block, layer).status());
    *tier = static_cast<std::uint32_t>(data.blocks->memory(block, data.ns->layer_groups[layer]));
    return absl::OkStatus();
  });
}

kvmill_code kvmill_mapped_page(const kvmill_mapped* mapped, size_t block, size_t layer,
                               kvmill_page* page) {
  return Guard([&]() -> absl::Status {
    KVMILL_RETURN_IF_ERROR(CheckMapped(mapped));
    const MappedData& data = *mapped->data;
    KVMILL_ASSIGN_OR_RETURN(const PageView view, data.Page(block, layer));
    kvmill_page to = {};
    to.data = view.bytes().data();
    to.bytes = view.bytes().size();
    to.head_count = static_cast<std::uint32_t>(view.head_count());
    to.token_count = view.header().token_count;
    return WriteStruct("page", to, page);
  });
}

kvmill_code kvmill_mapped_heads(const kvmill_mapped* mapped, size_t layer, size_t first_block,
                                size_t block_count, kvmill_mapped_head* heads, size_t head_count) {
  return Guard([&]() -> absl::Status {
    KVMILL_RETURN_IF_ERROR(CheckMapped(mapped));
    const MappedData& data = *mapped->data;
    const std::size_t count = data.blocks->block_count();
    if (layer >= data.ns->layer_count()) return OutOfRange("layer", layer, data.ns->layer_count());
    if (first_block > count || block_count > count - first_block) {
      return absl::OutOfRangeError(
          absl::StrCat(block_count, " blocks from block ", first_block, " on, there are ", count));
    }
    const std::size_t kv_heads = data.ns->group_of(layer).kv_heads;
    if (head_count < block_count * kv_heads) {
      return absl::OutOfRangeError(
          absl::StrCat("head_count ", head_count, ", want ", block_count * kv_heads));
    }
    if (heads == nullptr && block_count > 0) return Null("heads");
    for (std::size_t b = 0; b < block_count; ++b) {
      KVMILL_ASSIGN_OR_RETURN(const PageView page, data.Page(first_block + b, layer));
      for (std::size_t h = 0; h < kv_heads; ++h) heads[b * kv_heads + h] = HeadOf(page, h);
    }
    return absl::OkStatus();
  });
}

}  // extern "C"
