/* The C ABI's third part: what a session with the daemon is about beside blocks. The engine's own
 * KV memory, described, and what the daemon says without being asked. Everything that
 * client/kvmill.h says holds here.
 *
 * A client opens a session by itself, when something needs one: mapped blocks and registrations
 * belong to it, and end with it.
 */
#ifndef KVMILL_CLIENT_KVMILL_ENGINE_H_
#define KVMILL_CLIENT_KVMILL_ENGINE_H_

#include "client/kvmill.h"

#ifdef __cplusplus
extern "C" {
#endif

/* --- Session events --- */

enum {
  KVMILL_SESSION_DRAINING = 0, /* The daemon takes no more stores and will end. */
  KVMILL_SESSION_LEASES_EXPIRED =
      1,                   /* `leases` were over before they were given back or renewed. */
  KVMILL_SESSION_ENDED = 2 /* Nothing of it is held any more: map and register again. */
};

typedef struct kvmill_session_event {
  size_t struct_bytes;
  uint64_t leases;
  uint32_t what; /* KVMILL_SESSION_... */
} kvmill_session_event;
/* An event is not repeated while one of its tag and kind is still in the queue: leases add up
 * there. Of a KVMILL_SESSION_EVENT, which comes out of kvmill_client_options.session_queue like the
 * events of operations, with code OK, and whose result is freed like theirs. */
KVMILL_API kvmill_code kvmill_result_session(const kvmill_result* result,
                                             kvmill_session_event* event);

/* --- The engine's memory --- */
/* Nothing is derived: the engine says where everything lies, and what does not fit the namespace is
 * refused by name and value. */

/* Consecutive bytes. `base` is an address in the engine's process. Never changes. */
typedef struct kvmill_engine_region {
  uint64_t base;
  uint64_t bytes;
} kvmill_engine_region;

/* Where page 0 of one layer's K (or V, or records) lies; page i is i * page_stride_bytes further.
 * Never changes. */
typedef struct kvmill_engine_place {
  uint64_t offset_bytes;
  uint32_t region; /* Index into the regions. */
  uint32_t zero;
} kvmill_engine_place;

enum { KVMILL_ELEMENT_FLOAT16 = 0, KVMILL_ELEMENT_BFLOAT16 = 1, KVMILL_ELEMENT_RECORDS = 2 };

/* The layers of one layer group that this rank holds. The 16-bit value of (token, head, channel) is
 * at page + (token % page_tokens) * token_stride_bytes + head * head_stride_bytes + 2 * channel,
 * where heads count from head_begin; the record of a head at page + head * head_stride_bytes. */
typedef struct kvmill_engine_layers {
  size_t struct_bytes;
  const kvmill_engine_place* keys;   /* layer_count, from layer_begin on; for records these too. */
  const kvmill_engine_place* values; /* layer_count; null for records. */
  size_t layer_count;
  uint64_t page_count;
  uint64_t page_bytes;         /* With contents, padding inside included. */
  uint64_t page_stride_bytes;  /* From one page to the next, padding behind included. */
  uint64_t token_stride_bytes; /* 0 for records. */
  uint64_t head_stride_bytes;
  uint32_t group;        /* Layer group of the namespace. */
  uint32_t layer_begin;  /* Within the group. */
  uint32_t element;      /* KVMILL_ELEMENT_... */
  uint32_t block_tokens; /* Of the blocks that the engine names by keys. */
  uint32_t head_dim;
  uint32_t head_begin; /* Of the model's heads: a tensor-parallel rank's range. */
  uint32_t head_count;
  uint32_t page_tokens; /* Divides block_tokens. */
} kvmill_engine_layers;

typedef struct kvmill_engine_geometry {
  size_t struct_bytes;
  const kvmill_engine_region* regions;
  size_t region_count; /* At most 4096. */
  const kvmill_engine_layers* layers;
  size_t layers_count;            /* At most 1024. */
  const char* assembling_boot_id; /* Of the daemon that assembles the blocks of all ranks,
                                     lower-case hex; null or "": the one that is asked. */
} kvmill_engine_geometry;

/* Describes the memory for as long as the session lives (KVMILL_SESSION_ENDED: again).
 * kvmill_result_count is the registration. FAILED_PRECONDITION names the field that does not fit
 * the namespace, INVALID_ARGUMENT one that makes no sense. */
KVMILL_API kvmill_code kvmill_register_memory(kvmill_client* client, const kvmill_namespace* ns,
                                              const kvmill_engine_geometry* geometry,
                                              const kvmill_call_options* call, kvmill_queue* queue,
                                              uint64_t tag);
/* NOT_FOUND when the session has no such registration. */
KVMILL_API kvmill_code kvmill_unregister_memory(kvmill_client* client, uint64_t registration,
                                                const kvmill_call_options* call,
                                                kvmill_queue* queue, uint64_t tag);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif  // KVMILL_CLIENT_KVMILL_ENGINE_H_
