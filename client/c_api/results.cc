// What a result tells.
#include "client/c_api/results.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "client/c_api/border.h"
#include "client/c_api/mapped.h"
#include "client/c_api/queue.h"
#include "client/kvmill_engine.h"
#include "client/kvmill_map.h"

namespace kvmill::c_api {
namespace {

absl::Status StatusOfBlock(const kvmill_result& result, std::size_t block) {
  if (const auto* store = std::get_if<StoreResult>(&result.value)) {
    return store->blocks[block].status;
  }
  return std::get<FetchResult>(result.value).blocks[block].status;
}

// OK for results without.
absl::Status AwayOf(const kvmill_result& result) {
  if (const auto* lookup = std::get_if<LookupResult>(&result.value)) return lookup->away;
  if (const auto* fetch = std::get_if<FetchResult>(&result.value)) return fetch->away;
  if (const auto* store = std::get_if<StoreResult>(&result.value)) return store->away;
  const auto* mapped = std::get_if<std::shared_ptr<const MappedData>>(&result.value);
  return mapped == nullptr ? absl::OkStatus() : (*mapped)->blocks->away();
}

std::size_t BlockCount(const kvmill_result& result) {
  if (const auto* store = std::get_if<StoreResult>(&result.value)) return store->blocks.size();
  if (const auto* fetch = std::get_if<FetchResult>(&result.value)) return fetch->blocks.size();
  return 0;
}

}  // namespace
}  // namespace kvmill::c_api

void kvmill_result::Prepare() {
  using namespace kvmill;  // NOLINT(google-build-using-namespace): a struct of the C ABI.
  message = std::string((status.ok() ? c_api::AwayOf(*this) : status).message());
  if (auto* const news = std::get_if<c_api::RedeemNews>(&value)) {
    news->progress->Take(&news->blocks, &news->changed);
  }
  if (const auto* lookup = std::get_if<LookupResult>(&value)) {
    tiers.clear();
    for (const Tier tier : lookup->tiers) tiers.push_back(static_cast<std::uint8_t>(tier));
  }
  block_messages.resize(c_api::BlockCount(*this));
  for (std::size_t i = 0; i < block_messages.size(); ++i) {
    block_messages[i] = std::string(c_api::StatusOfBlock(*this, i).message());
  }
}

using namespace kvmill;         // NOLINT(google-build-using-namespace): the functions are C's.
using namespace kvmill::c_api;  // NOLINT(google-build-using-namespace)

extern "C" {

void kvmill_result_free(kvmill_result* result) { delete result; }

const char* kvmill_result_message(const kvmill_result* result) {
  return result == nullptr ? "" : result->message.c_str();
}

kvmill_code kvmill_result_away(const kvmill_result* result) {
  return result == nullptr ? KVMILL_OK : static_cast<kvmill_code>(AwayOf(*result).code());
}

kvmill_code kvmill_result_namespace(const kvmill_result* result, kvmill_namespace** ns) {
  return Guard([&]() -> absl::Status {
    if (ns != nullptr) *ns = nullptr;
    const auto value = ValueOf<ClientNamespace>(result, ns);
    if (!value.ok()) return value.status();
    *ns = new kvmill_namespace{std::make_shared<const NamespaceData>(**value)};
    return absl::OkStatus();
  });
}

kvmill_code kvmill_result_count(const kvmill_result* result, uint64_t* count) {
  return Guard([&]() -> absl::Status {
    const auto value = ValueOf<std::uint64_t>(result, count);
    if (!value.ok()) return value.status();
    *count = **value;
    return absl::OkStatus();
  });
}

kvmill_code kvmill_result_mapped(const kvmill_result* result, kvmill_mapped** mapped) {
  return Guard([&]() -> absl::Status {
    if (mapped != nullptr) *mapped = nullptr;
    const auto value = ValueOf<std::shared_ptr<const MappedData>>(result, mapped);
    if (!value.ok()) return value.status();
    *mapped = new kvmill_mapped{**value};
    return absl::OkStatus();
  });
}

kvmill_code kvmill_result_session(const kvmill_result* result, kvmill_session_event* event) {
  return Guard([&]() -> absl::Status {
    const auto value = ValueOf<SessionNotice>(result, event);
    if (!value.ok()) return value.status();
    kvmill_session_event to = {};
    to.leases = (*value)->leases;
    to.what = static_cast<std::uint32_t>((*value)->event);
    return WriteStruct("event", to, event);
  });
}

kvmill_code kvmill_result_lookup(const kvmill_result* result, kvmill_lookup_result* lookup) {
  return Guard([&]() -> absl::Status {
    const auto value = ValueOf<LookupResult>(result, lookup);
    if (!value.ok()) return value.status();
    const LookupResult& from = **value;
    kvmill_lookup_result to = {};
    to.hit_blocks = from.hit_blocks;
    to.hit_tokens = from.hit_tokens;
    to.tiers = result->tiers.data();
    to.tail_tokens = from.tail_tokens;
    to.tail_key = {from.tail_key.data(), from.tail_key.size()};
    return WriteStruct("lookup", to, lookup);
  });
}

kvmill_code kvmill_result_store(const kvmill_result* result, kvmill_store_result* store) {
  return Guard([&]() -> absl::Status {
    const auto value = ValueOf<StoreResult>(result, store);
    if (!value.ok()) return value.status();
    const StoreResult& from = **value;
    kvmill_store_result to = {};
    to.block_count = from.blocks.size();
    to.blocks_stored = from.blocks_stored;
    to.blocks_existing = from.blocks_existing;
    to.blocks_failed = from.blocks_failed;
    to.raw_bytes = from.raw_bytes;
    to.stored_bytes = from.stored_bytes;
    to.tile_bytes = from.tile_bytes;
    to.tile_raw_bytes = from.tile_raw_bytes;
    to.raw_heads = from.raw_heads;
    to.blocks_dropped = from.blocks_dropped;
    return WriteStruct("store", to, store);
  });
}

kvmill_code kvmill_result_fetch(const kvmill_result* result, kvmill_fetch_result* fetch) {
  return Guard([&]() -> absl::Status {
    const auto value = ValueOf<FetchResult>(result, fetch);
    if (!value.ok()) return value.status();
    kvmill_fetch_result to = {};
    to.block_count = (*value)->blocks.size();
    to.page_bytes = (*value)->page_bytes;
    return WriteStruct("fetch", to, fetch);
  });
}

kvmill_code kvmill_result_block(const kvmill_result* result, size_t block,
                                kvmill_block_result* out) {
  return Guard([&]() -> absl::Status {
    if (result == nullptr) return Null("result");
    const auto* store = std::get_if<StoreResult>(&result->value);
    if (store == nullptr) {
      const auto value = ValueOf<FetchResult>(result, out);
      if (!value.ok()) return value.status();
    }
    const std::size_t count = BlockCount(*result);
    if (block >= count) return OutOfRange("block", block, count);
    const absl::Status status = StatusOfBlock(*result, block);
    kvmill_block_result to = {};
    to.code = static_cast<kvmill_code>(status.code());
    to.message = result->block_messages[block].c_str();
    to.retry_after_ms = RetryMs(status);
    if (store != nullptr) {
      to.outcome = static_cast<std::uint32_t>(store->blocks[block].outcome);
    } else {
      const FetchBlockResult& from = std::get<FetchResult>(result->value).blocks[block];
      to.tier = static_cast<std::uint32_t>(from.tier);
      to.token_count = from.token_count;
    }
    return WriteStruct("block", to, out);
  });
}

kvmill_code kvmill_result_page_bytes(const kvmill_result* result, size_t block, size_t layer,
                                     size_t* page_bytes) {
  return Guard([&]() -> absl::Status {
    const auto value = ValueOf<FetchResult>(result, page_bytes);
    if (!value.ok()) return value.status();
    const std::size_t blocks = (*value)->blocks.size();
    if (block >= blocks) return OutOfRange("block", block, blocks);
    if (layer >= result->layer_count) return OutOfRange("layer", layer, result->layer_count);
    if (result->page_bytes.empty()) {
      return absl::FailedPreconditionError("the fetch was not one of pages");
    }
    *page_bytes = result->page_bytes[block * result->layer_count + layer];
    return absl::OkStatus();
  });
}

kvmill_code kvmill_result_stat(const kvmill_result* result, kvmill_stat_result* stat) {
  return Guard([&]() -> absl::Status {
    const auto value = ValueOf<ServerStat>(result, stat);
    if (!value.ok()) return value.status();
    const ServerStat& from = **value;
    kvmill_stat_result to = {};
    to.blocks = from.blocks;
    to.pages = from.pages;
    to.sessions = from.sessions;
    to.leases = from.leases;
    to.raw_bytes_ingested = from.raw_bytes_ingested;
    to.encoded_bytes_stored = from.encoded_bytes_stored;
    to.lookup_blocks = from.lookup_blocks;
    to.hit_blocks = from.hit_blocks;
    to.checksum_failures = from.checksum_failures;
    to.unwritten_blocks = from.unwritten_blocks;
    to.metadata_bytes = from.metadata_bytes;
    to.uptime_s = from.uptime_s;
    to.boot_id = from.boot_id.c_str();
    to.tier_count = from.tiers.size();
    return WriteStruct("stat", to, stat);
  });
}

kvmill_code kvmill_result_tier(const kvmill_result* result, size_t index,
                               kvmill_tier_usage* usage) {
  return Guard([&]() -> absl::Status {
    const auto value = ValueOf<ServerStat>(result, usage);
    if (!value.ok()) return value.status();
    const std::vector<TierUsage>& tiers = (*value)->tiers;
    if (index >= tiers.size()) return OutOfRange("tier", index, tiers.size());
    kvmill_tier_usage to = {};
    to.tier = static_cast<std::uint32_t>(tiers[index].tier);
    to.used_bytes = tiers[index].used_bytes;
    to.capacity_bytes = tiers[index].capacity_bytes;
    to.blocks = tiers[index].blocks;
    return WriteStruct("usage", to, usage);
  });
}

}  // extern "C"
