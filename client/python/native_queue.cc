// Queues, and what comes out of them: results as tuples.
#include "client/kvmill_engine.h"
#include "client/python/mapped.h"
#include "client/python/native.h"
#include "client/python/tickets.h"
#include "client/python/watch.h"

namespace kvmill::python {
namespace {

// How often a waiting call looks for signals (Ctrl-C).
constexpr std::int64_t kSignalMs = 100;

// Others with the same tag follow.
bool IsOnTheWay(kvmill_operation operation) {
  return operation == KVMILL_REDEEM_UPDATE || operation == KVMILL_WATCH_BATCH;
}

std::shared_ptr<Namespace> NamespaceOf(const kvmill_result* result) {
  kvmill_namespace* ns = nullptr;
  Need(kvmill_result_namespace(result, &ns));
  return std::make_shared<Namespace>(ns);
}

// Why no daemon answered; empty: one did.
const char* AwayOf(const kvmill_result* result) {
  return kvmill_result_away(result) == KVMILL_OK ? "" : kvmill_result_message(result);
}

py::tuple LookupOf(const kvmill_result* result) {
  auto lookup = Init<kvmill_lookup_result>();
  Need(kvmill_result_lookup(result, &lookup));
  return py::make_tuple(
      lookup.hit_blocks, lookup.hit_tokens,
      py::bytes(reinterpret_cast<const char*>(lookup.tiers), lookup.hit_blocks), lookup.tail_tokens,
      py::bytes(static_cast<const char*>(lookup.tail_key.data), lookup.tail_key.bytes),
      AwayOf(result));
}

py::list BlocksOf(const kvmill_result* result, std::uint64_t count) {
  py::list blocks;
  for (std::uint64_t i = 0; i < count; ++i) {
    auto block = Init<kvmill_block_result>();
    Need(kvmill_result_block(result, i, &block));
    blocks.append(py::make_tuple(block.code, block.message, block.retry_after_ms, block.outcome,
                                 block.tier, block.token_count));
  }
  return blocks;
}

py::tuple StoreOf(const kvmill_result* result) {
  auto store = Init<kvmill_store_result>();
  Need(kvmill_result_store(result, &store));
  return py::make_tuple(BlocksOf(result, store.block_count), store.blocks_stored,
                        store.blocks_existing, store.blocks_failed, store.raw_bytes,
                        store.stored_bytes, store.tile_bytes, store.tile_raw_bytes, store.raw_heads,
                        store.blocks_dropped, AwayOf(result));
}

py::tuple FetchOf(const kvmill_result* result) {
  auto fetch = Init<kvmill_fetch_result>();
  Need(kvmill_result_fetch(result, &fetch));
  py::list page_bytes;  // Per block; empty unless pages were fetched.
  for (std::uint64_t block = 0; block < fetch.block_count; ++block) {
    py::list layers;
    std::size_t bytes = 0;
    for (std::size_t l = 0; kvmill_result_page_bytes(result, block, l, &bytes) == KVMILL_OK; ++l) {
      layers.append(bytes);
    }
    page_bytes.append(layers);
  }
  return py::make_tuple(BlocksOf(result, fetch.block_count), fetch.page_bytes, page_bytes,
                        AwayOf(result));
}

py::tuple StatOf(const kvmill_result* result) {
  auto stat = Init<kvmill_stat_result>();
  Need(kvmill_result_stat(result, &stat));
  py::list tiers;
  for (std::uint64_t i = 0; i < stat.tier_count; ++i) {
    auto usage = Init<kvmill_tier_usage>();
    Need(kvmill_result_tier(result, i, &usage));
    tiers.append(py::make_tuple(usage.tier, usage.used_bytes, usage.capacity_bytes, usage.blocks));
  }
  return py::make_tuple(stat.blocks, stat.pages, stat.sessions, stat.leases, tiers,
                        stat.raw_bytes_ingested, stat.encoded_bytes_stored, stat.lookup_blocks,
                        stat.hit_blocks, stat.checksum_failures, stat.unwritten_blocks,
                        stat.metadata_bytes, stat.boot_id, stat.uptime_s);
}

py::tuple SessionEventOf(const kvmill_result* result) {
  auto event = Init<kvmill_session_event>();
  Need(kvmill_result_session(result, &event));
  return py::make_tuple(event.what, event.leases);
}

py::bytes TicketBytesOf(const kvmill_result* result) {
  kvmill_ticket ticket = {};
  Need(kvmill_result_ticket(result, &ticket));
  return py::bytes(static_cast<const char*>(ticket.data), ticket.bytes);
}

py::object ValueOf(kvmill_operation operation, const kvmill_result* result) {
  switch (operation) {
    case KVMILL_OPEN_NAMESPACE:
    case KVMILL_FIND_NAMESPACE:
      return py::cast(NamespaceOf(result));
    case KVMILL_LOOKUP:
      return LookupOf(result);
    case KVMILL_STORE:
    case KVMILL_STORE_PAGES:
      return StoreOf(result);
    case KVMILL_FETCH:
      return FetchOf(result);
    case KVMILL_STAT:
      return StatOf(result);
    case KVMILL_MAP:
      return py::cast(MappedOf(result));
    case KVMILL_SESSION_EVENT:
      return SessionEventOf(result);
    case KVMILL_CREATE_TICKET:
      return TicketBytesOf(result);
    case KVMILL_REDEEM_UPDATE:
      return RedeemUpdateOf(result);
    case KVMILL_WATCH_BATCH:
      return WatchBatchOf(result);
    case KVMILL_REVOKE_TICKET:
    case KVMILL_RENEW:
    case KVMILL_UNREGISTER_MEMORY:
    case KVMILL_FLUSH_PAGES:
    case KVMILL_CANCEL_PAGES:
      return py::none();
    default:
      std::uint64_t count = 0;
      Need(kvmill_result_count(result, &count));
      return py::int_(count);
  }
}

}  // namespace

Queue::~Queue() {
  // Its operations have ended: their client is closed first. If not, this waits for them.
  {
    const py::gil_scoped_release release;
    static_cast<void>(kvmill_queue_drain(queue_, -1));
  }
  auto event = Init<kvmill_event>();
  while (kvmill_queue_next(queue_, 0, &event) == KVMILL_OK) {
    if (!IsOnTheWay(event.operation)) delete reinterpret_cast<Pending*>(event.tag);
    kvmill_result_free(event.result);
  }
  static_cast<void>(kvmill_queue_destroy(queue_));
}

py::object Queue::Take(std::int64_t timeout_ms) {
  auto event = Init<kvmill_event>();
  kvmill_code code = KVMILL_OK;
  for (;;) {
    const std::int64_t wait = timeout_ms < 0 || timeout_ms > kSignalMs ? kSignalMs : timeout_ms;
    if (wait == 0) {
      code = kvmill_queue_next(queue_, 0, &event);
    } else {
      const py::gil_scoped_release release;
      code = kvmill_queue_next(queue_, wait, &event);
    }
    if (code == KVMILL_OK) break;
    if (code != KVMILL_DEADLINE_EXCEEDED) Need(code);
    if (timeout_ms >= 0 && (timeout_ms -= wait) <= 0) return py::none();
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
  const std::unique_ptr<kvmill_result, void (*)(kvmill_result*)> result(event.result,
                                                                        &kvmill_result_free);
  const std::uint64_t tag = event.tag;
  const bool more = IsOnTheWay(event.operation);
  if (!more) delete reinterpret_cast<Pending*>(tag);
  if (event.operation == KVMILL_REDEEM_TICKET) {
    // It has a value whatever its code is.
    return py::make_tuple(tag, 0, "", 0, RedeemedOf(event), false);
  }
  py::object value = py::none();
  if (event.code == KVMILL_OK) value = ValueOf(event.operation, result.get());
  return py::make_tuple(tag, event.code, kvmill_result_message(result.get()), event.retry_after_ms,
                        value, more);
}

}  // namespace kvmill::python
