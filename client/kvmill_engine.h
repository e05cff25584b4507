/* The C ABI's third part: what a session with the daemon is about beside blocks. The engine's own
 * KV memory, described, stores from it without a copy, and what the daemon says without being
 * asked. Everything that client/kvmill.h says holds here.
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

/* How a daemon of the same node gets at a region, to store from it without a copy. */
enum {
  KVMILL_REGION_PRIVATE = 0,   /* Not at all. */
  KVMILL_REGION_MEMFD = 1,     /* Shared memory. */
  KVMILL_REGION_DEVICE_IPC = 2 /* Memory of a GPU that the daemon uses as well. */
};

/* Since 2.1. */
typedef struct kvmill_region_source {
  size_t struct_bytes;
  uint64_t offset_bytes; /* Where the region begins in the memory behind fd, or in the
                            allocation. */
  uint64_t
      allocation_bytes; /* DEVICE_IPC: of the allocation, or at least up to the region's end. */
  uint32_t kind;        /* KVMILL_REGION_... */
  int32_t fd; /* MEMFD: ordinary pages, with F_SEAL_SHRINK; from users other than the daemon's own
                 also F_SEAL_FUTURE_WRITE, and no holes. kvmill_shared_memory_create makes such
                 memory. Borrowed until the event of the registration. */
  uint8_t handle[64]; /* DEVICE_IPC: cudaIpcGetMemHandle's. The allocation stays until the
                         registration has ended and nobody reads. */
  uint8_t device[16]; /* DEVICE_IPC: the GPU's UUID; zeros: unsaid. */
} kvmill_region_source;

typedef struct kvmill_engine_geometry {
  size_t struct_bytes;
  const kvmill_engine_region* regions;
  size_t region_count; /* At most 4096. */
  const kvmill_engine_layers* layers;
  size_t layers_count;                 /* At most 1024. */
  const char* assembling_boot_id;      /* Of the daemon that assembles the blocks of all ranks,
                                          lower-case hex; null or "": the one that is asked. */
  const kvmill_region_source* sources; /* Since 2.1. One a region; null: all are private. */
  size_t source_count;                 /* region_count, or 0. */
} kvmill_engine_geometry;

/* Describes the memory for as long as the session lives (KVMILL_SESSION_ENDED: again).
 * kvmill_result_count is the registration. FAILED_PRECONDITION names the field that does not fit
 * the namespace, INVALID_ARGUMENT one that makes no sense. */
KVMILL_API kvmill_code kvmill_register_memory(kvmill_client* client, const kvmill_namespace* ns,
                                              const kvmill_engine_geometry* geometry,
                                              const kvmill_call_options* call, kvmill_queue* queue,
                                              uint64_t tag);
/* NOT_FOUND when the session has no such registration. OK: nobody reads its pages any more. */
KVMILL_API kvmill_code kvmill_unregister_memory(kvmill_client* client, uint64_t registration,
                                                const kvmill_call_options* call,
                                                kvmill_queue* queue, uint64_t tag);

/* --- Shared memory (since 2.1) --- */

typedef struct kvmill_shared_memory kvmill_shared_memory;

/* `bytes` zeros, rounded up to whole pages of the system. A memfd that can neither shrink nor grow,
 * mapped to read and write; not there in a child of fork(). RESOURCE_EXHAUSTED when the system has
 * no room. */
KVMILL_API kvmill_code kvmill_shared_memory_create(size_t bytes, kvmill_shared_memory** memory);
/* Nobody in this process uses it any more; a daemon that has it mapped keeps its pages. Null is
 * allowed. */
KVMILL_API void kvmill_shared_memory_free(kvmill_shared_memory* memory);
/* Null, 0 and -1 for null. The descriptor is the memory's own. */
KVMILL_API void* kvmill_shared_memory_data(const kvmill_shared_memory* memory);
KVMILL_API size_t kvmill_shared_memory_bytes(const kvmill_shared_memory* memory);
KVMILL_API int kvmill_shared_memory_fd(const kvmill_shared_memory* memory);

/* Fills `source` for memory of kvmill_client_options.device that this process allocated with
 * cudaMalloc, or a library of its did. FAILED_PRECONDITION without a device; INVALID_ARGUMENT when
 * the bytes are in no such memory. */
KVMILL_API kvmill_code kvmill_export_memory(const kvmill_client* client, const void* start,
                                            size_t bytes, kvmill_region_source* source);

/* --- Stores from registered pages (since 2.1) --- */
/* A daemon of the same node encodes straight from regions that have a source.
 *
 * When values are read: never before they are ready, which kvmill_page_store_options and
 * kvmill_ready_pages say. For memory of a GPU that is said when the work that writes them has ended
 * there, not when it was enqueued: nothing else orders the daemon's streams behind the engine's.
 * Layers are stored as they become ready. Values that are ready stay until the pages are free.
 *
 * When pages are free, that is, when nobody reads them and nobody will: when the store is done,
 * with whichever code but DEADLINE_EXCEEDED; when kvmill_flush_... or kvmill_cancel_pages said OK;
 * when kvmill_unregister_memory did, all pages of the registration. After DEADLINE_EXCEEDED the
 * daemon may be in the middle of a read: ask again. A daemon that has died reads nothing: that is
 * OK, too. Pages that get another use earlier make wrong blocks, and nothing can find out.
 *
 * FAILED_PRECONDITION: the daemon is not on this node (kvmill_store reads pages here and sends
 * them). NOT_FOUND, ABORTED: register the memory again. */

/* The pages with a block's tokens, in order. Never changes. */
typedef struct kvmill_page_numbers {
  const uint64_t* numbers; /* Each below page_count of the layers. Copied. */
  size_t count;
} kvmill_page_numbers;

typedef struct kvmill_page_block {
  size_t struct_bytes;
  kvmill_key key;    /* The engine's, that of a tail (token_count < block_tokens) as well. */
  kvmill_key parent; /* 0 bytes for the first block of a sequence. */
  const kvmill_page_numbers* pages; /* One a layer group of the namespace; none of a group of which
                                       the registration has no layers. */
  size_t group_count;
  uint32_t token_count;
  uint32_t block_index; /* Position in its sequence. */
} kvmill_page_block;

typedef struct kvmill_page_store_options {
  size_t struct_bytes;
  uint64_t request;  /* The engine's name for what the blocks belong to: kvmill_ready_pages,
                        kvmill_flush_pages and kvmill_cancel_pages find the store by it. Several
                        running stores may have the same. */
  uint32_t by_layer; /* 0: all values are in the pages. Else those of layers of the model below
                        ready_layers, and kvmill_ready_pages says when there are more. */
  uint32_t ready_layers;
  uint32_t wait_durable; /* Not 0: answer when the blocks survive a crash. */
} kvmill_page_store_options;

/* At most 4096 blocks times layer groups. The operation lasts until the last layer is stored: its
 * timeout is at least what computing them takes. Results as those of kvmill_store; a block that was
 * given up is CANCELLED and says by whom, one that met the end of its session is ABORTED. */
KVMILL_API kvmill_code kvmill_store_pages(kvmill_client* client, const kvmill_namespace* ns,
                                          uint64_t registration, const kvmill_page_block* blocks,
                                          size_t block_count,
                                          const kvmill_page_store_options* options,
                                          const kvmill_call_options* call, kvmill_queue* queue,
                                          uint64_t tag);
/* Layers of the model below `layers` have their values in the pages, for all running stores of the
 * request. Waits for nobody, and has no event. */
KVMILL_API kvmill_code kvmill_ready_pages(kvmill_client* client, uint64_t request, uint32_t layers);
/* For preemption and eviction: blocks whose values are all ready are stored first, the others are
 * given up. FLUSH_PAGES, of all running stores of the request; of these blocks, whosever. */
KVMILL_API kvmill_code kvmill_flush_pages(kvmill_client* client, uint64_t request,
                                          const kvmill_call_options* call, kvmill_queue* queue,
                                          uint64_t tag);
KVMILL_API kvmill_code kvmill_flush_blocks(kvmill_client* client, const kvmill_key* keys,
                                           size_t key_count, const kvmill_call_options* call,
                                           kvmill_queue* queue, uint64_t tag);
/* For aborted requests: gives up what is not stored yet. */
KVMILL_API kvmill_code kvmill_cancel_pages(kvmill_client* client, uint64_t request,
                                           const kvmill_call_options* call, kvmill_queue* queue,
                                           uint64_t tag);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif  // KVMILL_CLIENT_KVMILL_ENGINE_H_
