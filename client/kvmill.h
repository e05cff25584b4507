/* kvmill's C ABI: what an engine that is not C++, or that may not share its gRPC, Protobuf or C++
 * runtime, links to keep K and V in a kvmilld. One shared library, libkvmill.so; nothing but the
 * functions below is visible of it, so it loads beside any other copy of those libraries.
 * docs/client.md has an example. C99 and C++.
 *
 * Calls. Every operation is asynchronous: it names a completion queue and a tag of the caller's.
 * When the function returns KVMILL_OK exactly one event with that tag will come out of the queue,
 * whatever happens (an answer, an error, the deadline, the client destroyed); when it returns
 * anything else none will come. The library calls no function of the caller's, on no thread.
 *
 * Memory. Arrays of structs, keys and strings that are passed in are copied before the function
 * returns. What they point at is not: K, V, records, page tables (kvmill_kv.pages) and the memory
 * that a fetch writes are borrowed until the operation's event is in the queue, also when it
 * failed, timed out, or the client was destroyed. What functions hand out says below how long it
 * lives.
 *
 * Beside this header: client/kvmill_map.h (blocks attended to in place), client/kvmill_engine.h
 * (the engine's own memory, stores from it without a copy, what the daemon says unasked),
 * client/kvmill_ticket.h (from prefill to decode) and client/kvmill_events.h (which blocks come and
 * go, for routers).
 *
 * Structs. Each begins with its own size, as the caller was compiled: set it with KVMILL_INIT. Zero
 * in any other field is its default. New versions add fields at the end. An older caller's missing
 * fields are zero. A newer caller's fields that this library does not know must be zero, else
 * INVALID_ARGUMENT: nothing that was asked for is left out in silence. In an array of structs all
 * elements have the same struct_bytes. kvmill_key, kvmill_kv and kvmill_mutable_kv never change.
 *
 * Errors. Functions that can fail return a kvmill_code; kvmill_last_error() has the text of the
 * last failure on the calling thread. An operation's own outcome is in its event and its result.
 * Any function: INVALID_ARGUMENT for null handles, bad sizes, values out of range;
 * FAILED_PRECONDITION in a child of fork() for handles of its parent; RESOURCE_EXHAUSTED without
 * memory; INTERNAL is a bug. No exception leaves the library.
 *
 * Threads. Functions may be called from any thread, at once, with the same handles, save: nothing
 * else uses a handle while it is destroyed or afterwards, and one result is used by one thread at a
 * time.
 *
 * Fork. The library has threads, which a child does not get: there every function on the parent's
 * handles, and making clients, is FAILED_PRECONDITION; destroying handles lets go of what can be.
 * Fork before the first client is made, or start processes by exec.
 *
 * Once loaded the library stays: dlclose() does not unload it.
 */
#ifndef KVMILL_CLIENT_KVMILL_H_
#define KVMILL_CLIENT_KVMILL_H_

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__)
#define KVMILL_API __attribute__((visibility("default")))
#else
#define KVMILL_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The same major number: compatible both ways. A larger minor number: more functions and fields. */
#define KVMILL_ABI_MAJOR 2
#define KVMILL_ABI_MINOR 5

/* Zeroes a struct and sets its size: kvmill_client_options options; KVMILL_INIT(&options); */
#define KVMILL_INIT(pointer) \
  (memset((pointer), 0, sizeof(*(pointer))), (void)((pointer)->struct_bytes = sizeof(*(pointer))))

/* (major << 16) | minor of the library that is loaded; and its release, as "0.1.0". */
KVMILL_API uint32_t kvmill_abi_version(void);
KVMILL_API const char* kvmill_version(void);

/* --- Errors --- */

typedef int32_t kvmill_code;
enum { /* The numbers of google.rpc.Code. What they mean to an engine: docs/architecture.md. */
       KVMILL_OK = 0,
       KVMILL_CANCELLED = 1, /* The client was destroyed; of a block: its pages were given up. */
       KVMILL_UNKNOWN = 2,
       KVMILL_INVALID_ARGUMENT = 3,
       KVMILL_DEADLINE_EXCEEDED = 4, /* Outcome unknown. */
       KVMILL_NOT_FOUND = 5,         /* Of a block: a miss. */
       KVMILL_ALREADY_EXISTS = 6,
       KVMILL_PERMISSION_DENIED = 7,
       KVMILL_RESOURCE_EXHAUSTED = 8, /* Full: wait retry_after_ms. */
       KVMILL_FAILED_PRECONDITION = 9,
       KVMILL_ABORTED = 10,
       KVMILL_OUT_OF_RANGE = 11, /* Memory of the caller's that is too small. */
       KVMILL_UNIMPLEMENTED = 12,
       KVMILL_INTERNAL = 13,
       KVMILL_UNAVAILABLE = 14, /* No daemon there, it died during the call, or it drains. */
       KVMILL_DATA_LOSS = 15,
       KVMILL_UNAUTHENTICATED = 16
};

/* "NOT_FOUND"; never null. Static. */
KVMILL_API const char* kvmill_code_name(kvmill_code code);
/* Text of the last failure of a function on this thread, "" before any. Never null; valid until the
 * next failure on this thread. Text is for people: compare codes. */
KVMILL_API const char* kvmill_last_error(void);

/* --- Completion queues --- */

typedef struct kvmill_queue kvmill_queue;
typedef struct kvmill_result kvmill_result;

typedef uint32_t kvmill_operation;
enum {
  KVMILL_OPEN_NAMESPACE = 1,
  KVMILL_FIND_NAMESPACE = 2,
  KVMILL_LOOKUP = 3,
  KVMILL_STORE = 4,
  KVMILL_FETCH = 5,
  KVMILL_REMOVE = 6,
  KVMILL_CLEAR = 7,
  KVMILL_FLUSH = 8,
  KVMILL_STAT = 9,
  KVMILL_TOUCH = 10,
  KVMILL_MAP = 11, /* client/kvmill_map.h */
  KVMILL_RENEW = 12,
  KVMILL_REGISTER_MEMORY = 13, /* client/kvmill_engine.h */
  KVMILL_UNREGISTER_MEMORY = 14,
  KVMILL_SESSION_EVENT = 15, /* Of no operation: kvmill_client_options.session_queue. */
  KVMILL_STORE_PAGES = 16,   /* client/kvmill_engine.h */
  KVMILL_FLUSH_PAGES = 17,
  KVMILL_CANCEL_PAGES = 18,
  KVMILL_CREATE_TICKET = 19, /* client/kvmill_ticket.h */
  KVMILL_REVOKE_TICKET = 20,
  KVMILL_REDEEM_TICKET = 21,
  KVMILL_REDEEM_UPDATE = 22, /* Before a KVMILL_REDEEM_TICKET, with its tag, when asked for. */
  KVMILL_WATCH = 23,         /* client/kvmill_events.h: the watch has ended. */
  KVMILL_WATCH_BATCH = 24    /* Before it, with its tag. */
};

typedef struct kvmill_event {
  size_t struct_bytes;
  uint64_t tag; /* As given when the operation was started. */
  kvmill_operation operation;
  kvmill_code code;        /* Of the operation as a whole; blocks have codes of their own. */
  uint64_t retry_after_ms; /* 0: no hint. */
  kvmill_result* result;   /* The caller's: kvmill_result_free. Never null. */
} kvmill_event;

/* A queue serves any number of clients. RESOURCE_EXHAUSTED when the process has no descriptor left.
 */
KVMILL_API kvmill_code kvmill_queue_create(kvmill_queue** queue);
/* Frees the queue and the events in it. FAILED_PRECONDITION, and nothing happens, while operations
 * that will report to it run: destroy their clients, or drain, first. Null is allowed. */
KVMILL_API kvmill_code kvmill_queue_destroy(kvmill_queue* queue);
/* A descriptor (an eventfd) that is readable, for poll(), epoll and their like, exactly while
 * events are in the queue. Do not read, write or close it. -1 for null. */
KVMILL_API int kvmill_queue_fd(const kvmill_queue* queue);
/* Takes the oldest event. Waits up to timeout_ms for one: 0 does not wait, a negative one waits for
 * ever. DEADLINE_EXCEEDED when none came; the struct is then left alone. */
KVMILL_API kvmill_code kvmill_queue_next(kvmill_queue* queue, int64_t timeout_ms,
                                         kvmill_event* event);
/* Waits, as above, until no operation that reports to this queue runs: then all memory that they
 * borrowed is free again. Events stay in the queue. DEADLINE_EXCEEDED when some still run. */
KVMILL_API kvmill_code kvmill_queue_drain(kvmill_queue* queue, int64_t timeout_ms);
/* Operations that report to this queue and have not ended. 0 for null. */
KVMILL_API size_t kvmill_queue_running(const kvmill_queue* queue);

/* --- Clients --- */

typedef struct kvmill_client kvmill_client;

/* How the bytes of stores and fetches travel. AUTO: over UCX to a daemon that is not local and
 * offers it, else with the gRPC messages. UCX: so, or the operations fail. */
enum { KVMILL_PATH_AUTO = 0, KVMILL_PATH_INLINE = 1, KVMILL_PATH_UCX = 2 };
/* Where 16-bit values become tiles. AUTO: here for a daemon that is not local. */
enum { KVMILL_ENCODE_AUTO = 0, KVMILL_ENCODE_CLIENT = 1, KVMILL_ENCODE_DAEMON = 2 };
/* Since 2.5. What operations come to while no daemon answers: it is being restarted, or died, or
 * drains. FAIL: they fail. MISS: kvmill_lookup, kvmill_fetch and kvmill_map find nothing,
 * kvmill_store and kvmill_store_pages drop their blocks (KVMILL_BLOCK_DROPPED), kvmill_touch is 0,
 * and kvmill_result_away says why; registrations of memory stay, and are made again when the daemon
 * is back, from descriptors that the library duplicated. Others fail as ever, so do stores with
 * wait_durable, and a kvmill_store_pages with DEADLINE_EXCEEDED, whose pages may be read still. */
enum { KVMILL_AWAY_FAIL = 0, KVMILL_AWAY_MISS = 1 };

typedef struct kvmill_client_options {
  size_t struct_bytes;
  const char* address; /* "unix:/run/kvmill/kvmill.sock" or "host:port". */
  uint64_t timeout_ms; /* Of operations that say nothing. 0: 10 seconds. At most a year. */
  uint32_t path;       /* KVMILL_PATH_... */
  uint32_t data_plane_plaintext; /* Not 0: UCX without encryption; the daemon must say so too. */
  uint32_t encode_in;            /* KVMILL_ENCODE_... */
  uint32_t encode_threads;       /* Of encoding, and of verifying what UCX brought. 0: one a core,
                                    up to 4. At most 1024. */
  kvmill_queue* session_queue;   /* Where KVMILL_SESSION_EVENTs go, with tag session_tag; null: they
                                    are not told. Once the queue is destroyed they are lost. */
  uint64_t session_tag;
  const char* device; /* Since 2.1. The GPU that reads blocks which a map leaves on the daemon's
                         (kvmill_map_options.memory), and that kvmill_export_memory is about:
                         "cuda", "cuda:N", or "host", which stands in for one in tests. Null: none.
                         UNAVAILABLE says what is missing. It goes with the client and the last of
                         its mapped blocks. */
  /* Since 2.3. TLS of a connection over TCP: PEM files, read again when they change. Null: none.
     tls_ca: the authorities of the daemon's certificate; without it there is no TLS, which a daemon
     takes with --insecure only. */
  const char* tls_ca;
  const char* tls_certificate; /* The client's own, and its key; both or none. */
  const char* tls_key;
  const char*
      tls_server_name; /* In the daemon's certificate, where it is not the address's host. */
  const char* token;   /* Shows who the client is in place of a certificate. Needs tls_ca. */
  uint32_t when_away;  /* Since 2.5. KVMILL_AWAY_... */
} kvmill_client_options;

struct kvmill_elsewhere;

/* Of one operation. Null wherever it is taken: defaults. */
typedef struct kvmill_call_options {
  size_t struct_bytes;
  uint64_t timeout_ms; /* 0: the client's. At most a year. */
  /* Since 2.2. Of lookup, fetch and map, on a daemon of a cluster: where it looks for blocks that
   * it does not have itself. Null: wherever the keys say. */
  const struct kvmill_elsewhere* elsewhere;
  /* Since 2.4. What the call is known by: the daemon's log lines about it have them, and the nodes
   * that it asks get them, too. Null: none; the daemon then makes an id. What is not valid is left
   * out: no call fails for it. */
  const char* request_id;  /* 1 to 64 letters, digits, and . _ - : / + = @ */
  const char* traceparent; /* W3C trace context: "00-TRACE_ID-SPAN_ID-FLAGS", lower-case hex. */
  const char* tracestate;  /* Only with a traceparent. */
} kvmill_call_options;

/* Checks the options; connects in the background, when first needed and again after a break. */
KVMILL_API kvmill_code kvmill_client_create(const kvmill_client_options* options,
                                            kvmill_client** client);
/* Cancels what runs and waits until all of it has ended: its events are in their queues when this
 * returns, and nothing touches borrowed memory any more. Null is allowed. */
KVMILL_API kvmill_code kvmill_client_destroy(kvmill_client* client);
/* The boot id that the daemon last showed, lower-case hex, NUL-terminated; "" before the first
 * answer. Another one than before means that the daemon was restarted. OUT_OF_RANGE when out_bytes
 * is too small; 65 is enough. */
KVMILL_API kvmill_code kvmill_client_boot_id(const kvmill_client* client, char* out,
                                             size_t out_bytes);
/* What UCX negotiated for the connection that is open now, as "tcp/eth0"; "": there is none. As
 * above; 257 bytes are enough. */
KVMILL_API kvmill_code kvmill_client_ucx_transport(const kvmill_client* client, char* out,
                                                   size_t out_bytes);

/* --- Namespaces --- */

typedef struct kvmill_namespace kvmill_namespace;

enum { KVMILL_FLOAT16 = 0, KVMILL_BFLOAT16 = 1 };
enum { KVMILL_FRAME_MODEL = 0, KVMILL_FRAME_ROTATED = 1 };
enum { KVMILL_ATTENTION_FULL = 0, KVMILL_ATTENTION_WINDOW = 1 };

/* Layers that share geometry and attention rule. */
typedef struct kvmill_layer_group {
  size_t struct_bytes;
  const uint16_t* layers; /* Layer numbers of the model, ascending, disjoint between groups. */
  size_t layer_count;
  uint32_t kv_heads;      /* Of the whole model, not of one tensor-parallel rank. */
  uint32_t head_dim;      /* 64, 128 or 256. */
  uint32_t attention;     /* KVMILL_ATTENTION_... */
  uint32_t window_tokens; /* KVMILL_ATTENTION_WINDOW only. */
} kvmill_layer_group;

/* Everything that must be equal before bytes may be reused. Strings are NUL-terminated UTF-8; null:
 * empty. The tenant is the daemon's business. */
typedef struct kvmill_namespace_spec {
  size_t struct_bytes;
  const kvmill_layer_group* groups;
  size_t group_count;
  const char* model;
  const char* revision;
  const char* adapter_digest;
  const char* salt;
  const char* hash_scheme; /* How the engine makes block keys. */
  uint32_t source_dtype;   /* KVMILL_FLOAT16 or KVMILL_BFLOAT16. */
  uint32_t block_tokens;   /* 64 or 128; 0: 128. */
  uint32_t key_bits;       /* 2, 3 or 4; 0: 4. */
  uint32_t value_bits;     /* 2 or 4; 0: 2. */
  uint32_t frame;          /* KVMILL_FRAME_... of what is stored and fetched. */
  uint32_t sink_blocks;    /* First blocks of a sequence that stay in 16 bits. */
} kvmill_namespace_spec;

/* Registers `spec` under `name`. The event's result has the namespace; FAILED_PRECONDITION names
 * the first difference when the name is bound to another spec. */
KVMILL_API kvmill_code kvmill_open_namespace(kvmill_client* client, const char* name,
                                             const kvmill_namespace_spec* spec,
                                             const kvmill_call_options* call, kvmill_queue* queue,
                                             uint64_t tag);
/* The same; where the daemon refuses stores into it because its tiles lose too much of K or V, and
 * names what to use instead, that is opened: kvmill_namespace_name and kvmill_namespace_get_spec
 * say what it is. After a store that is answered FAILED_PRECONDITION call this again, and use what
 * it gives for everything. The event is one of KVMILL_OPEN_NAMESPACE. */
KVMILL_API kvmill_code kvmill_open_namespace_or_fallback(kvmill_client* client, const char* name,
                                                         const kvmill_namespace_spec* spec,
                                                         const kvmill_call_options* call,
                                                         kvmill_queue* queue, uint64_t tag);
/* One that was registered before. NOT_FOUND. */
KVMILL_API kvmill_code kvmill_find_namespace(kvmill_client* client, const char* name,
                                             const kvmill_call_options* call, kvmill_queue* queue,
                                             uint64_t tag);
/* A namespace is a value of its own: it outlives the client that opened it, works with every client
 * of the same daemon, and may be freed while operations on it run. Null is allowed. */
KVMILL_API void kvmill_namespace_free(kvmill_namespace* ns);
/* Both valid as long as the namespace; null for null. The fingerprint is lower-case hex. */
KVMILL_API const char* kvmill_namespace_name(const kvmill_namespace* ns);
KVMILL_API const char* kvmill_namespace_fingerprint(const kvmill_namespace* ns);
/* What it was registered with, defaults filled in. Pointers are valid as long as the namespace.
 * `groups` has elements of this library's size: their struct_bytes is the distance between them. */
KVMILL_API kvmill_code kvmill_namespace_get_spec(const kvmill_namespace* ns,
                                                 kvmill_namespace_spec* spec);
/* Layers of all groups; layers are counted in the order of the groups and of the layers in them. 0
 * for null. */
KVMILL_API size_t kvmill_namespace_layer_count(const kvmill_namespace* ns);
/* Bytes of one head's record, and the most that a page of all heads can have; 0 for a layer that
 * does not exist. docs/formats.md describes both. */
KVMILL_API size_t kvmill_namespace_record_bytes(const kvmill_namespace* ns, size_t layer);
KVMILL_API size_t kvmill_namespace_page_bytes_max(const kvmill_namespace* ns, size_t layer);

/* --- Blocks --- */

/* 1 to 64 bytes: the engine's hash of a block's tokens and all before them. */
typedef struct kvmill_key {
  const void* data;
  size_t bytes;
} kvmill_key;

/* Where blocks are looked for that the daemon does not have. */
typedef struct kvmill_elsewhere {
  size_t struct_bytes;
  const char* hint; /* Node id of who probably has them, and is asked first; null: nobody. */
  /* Of the sequence that the keys are consecutive blocks of: the position of the first one, and the
   * key of block first_block / 32 * 32 when that is not among them (0 bytes: not known). Without
   * effect in a lookup, whose keys begin with block 0. */
  kvmill_key anchor;
  uint32_t first_block;
  uint32_t local_only; /* Not 0: nowhere. */
} kvmill_elsewhere;

/* What an unfinished last block (a tail) of token_count tokens is stored under. `parent` is the
 * block before it, with 0 bytes when there is none; `key` is the engine's, not empty. */
KVMILL_API kvmill_code kvmill_tail_key(kvmill_key parent, uint32_t token_count, kvmill_key key,
                                       uint8_t out[32]);

/* K or V of some heads of one layer of one block in the engine's memory: the 16-bit value of
 * (token, head, channel) lies at
 *
 *   page(token) + token % page_tokens * token_stride_bytes + head * head_stride_bytes + 2 * channel
 *
 * where page(token) is `data` when page_tokens is 0 (token then counts from 0), else
 * pages[token / page_tokens] + offset_bytes. Not copied when the heads of a token are adjacent, or
 * whole pages are. */
typedef struct kvmill_kv {
  const void* data;
  const void* const* pages;
  size_t offset_bytes;
  ptrdiff_t token_stride_bytes;
  ptrdiff_t head_stride_bytes;
  uint32_t page_tokens;
  uint32_t tokens; /* That are there; 0: as many as needed. */
} kvmill_kv;

/* The same, to be written. A block of more tokens than `tokens` (0: block_tokens) is not written:
 * its code is OUT_OF_RANGE. */
typedef struct kvmill_mutable_kv {
  void* data;
  void* const* pages;
  size_t offset_bytes;
  ptrdiff_t token_stride_bytes;
  ptrdiff_t head_stride_bytes;
  uint32_t page_tokens;
  uint32_t tokens;
} kvmill_mutable_kv;

/* A tail that would be of use if it were stored: one that begins as the caller's sequence goes on.
 */
typedef struct kvmill_tail {
  size_t struct_bytes;
  kvmill_key key;       /* The engine's: of its tokens and all before them. */
  uint32_t token_count; /* 1 to block_tokens - 1. */
  uint32_t block_index; /* Position in its sequence: so many whole blocks are before it. */
} kvmill_tail;

/* Length of the longest available prefix of `keys` (those of a sequence, from its first block on),
 * and the longest of `tails` (at most 1024) behind it. Only those whose block_index is the number
 * of hit blocks count: give those of every block that may turn out to be the first missing one. */
KVMILL_API kvmill_code kvmill_lookup(kvmill_client* client, const kvmill_namespace* ns,
                                     const kvmill_key* keys, size_t key_count,
                                     const kvmill_tail* tails, size_t tail_count,
                                     const kvmill_call_options* call, kvmill_queue* queue,
                                     uint64_t tag);

/* One layer of a block to be stored: K and V in 16 bits, or records. */
typedef struct kvmill_store_layer {
  size_t struct_bytes;
  kvmill_kv k;
  kvmill_kv v;
  const void* records; /* Not null: [heads][record_bytes], sent unchanged; k and v are ignored. */
  size_t records_bytes;
} kvmill_store_layer;

typedef struct kvmill_store_block {
  size_t struct_bytes;
  kvmill_key key;    /* The engine's, that of a tail (token_count < block_tokens) as well. */
  kvmill_key parent; /* 0 bytes for the first block of a sequence. */
  const kvmill_store_layer* layers; /* One per layer of the namespace, in its order. */
  size_t layer_count;
  uint32_t token_count;
  uint32_t block_index; /* Position in its sequence. */
} kvmill_store_block;

typedef struct kvmill_store_options {
  size_t struct_bytes;
  uint32_t wait_durable; /* Not 0: answer when the blocks survive a crash. */
  uint32_t head_begin;   /* Heads that the layers hold: a tensor-parallel rank's. */
  uint32_t head_count;   /* 0: all heads. */
} kvmill_store_options;

/* Results are per block; the event has a code only when the call failed as a whole (some blocks may
 * have been stored), or when not everything became durable though asked for. */
KVMILL_API kvmill_code kvmill_store(kvmill_client* client, const kvmill_namespace* ns,
                                    const kvmill_store_block* blocks, size_t block_count,
                                    const kvmill_store_options* options,
                                    const kvmill_call_options* call, kvmill_queue* queue,
                                    uint64_t tag);

enum {
  KVMILL_FORM_VALUES16 = 0, /* Decoded to the namespace's dtype, into k and v. */
  KVMILL_FORM_RECORDS = 1,  /* Records into `data`: [heads][record_bytes]. A block with heads in 16
                               bits (a tail, a sink block) is FAILED_PRECONDITION. */
  KVMILL_FORM_PAGES = 2     /* Whole pages into `data`, as docs/formats.md has them. */
};

/* Where one layer of one block goes. */
typedef struct kvmill_fetch_output {
  size_t struct_bytes;
  kvmill_mutable_kv k;
  kvmill_mutable_kv v;
  void* data;
  size_t data_bytes; /* A block whose page is longer is OUT_OF_RANGE. */
} kvmill_fetch_output;

typedef struct kvmill_fetch_options {
  size_t struct_bytes;
  uint32_t form;       /* KVMILL_FORM_... */
  uint32_t frame;      /* KVMILL_FRAME_... of the values; VALUES16 only. */
  uint32_t head_begin; /* Heads that the outputs hold; not with PAGES. */
  uint32_t head_count; /* 0: all heads. */
} kvmill_fetch_options;

/* outputs[block * layer_count + layer]; output_count is key_count * layer_count. Every page is
 * verified before it is handed over. Results are per block; the memory of a block that is not OK
 * holds nothing of use. To an engine every failure is a miss: compute K and V again. */
KVMILL_API kvmill_code kvmill_fetch(kvmill_client* client, const kvmill_namespace* ns,
                                    const kvmill_key* keys, size_t key_count,
                                    const kvmill_fetch_output* outputs, size_t output_count,
                                    const kvmill_fetch_options* options,
                                    const kvmill_call_options* call, kvmill_queue* queue,
                                    uint64_t tag);

/* Of each key all layer groups; kvmill_result_count is how many (block, layer group)s were there.
 */
KVMILL_API kvmill_code kvmill_remove(kvmill_client* client, const kvmill_namespace* ns,
                                     const kvmill_key* keys, size_t key_count,
                                     const kvmill_call_options* call, kvmill_queue* queue,
                                     uint64_t tag);
/* The blocks were used, for eviction; kvmill_result_count is how many (block, layer group)s of them
 * are in memory. */
KVMILL_API kvmill_code kvmill_touch(kvmill_client* client, const kvmill_namespace* ns,
                                    const kvmill_key* keys, size_t key_count,
                                    const kvmill_call_options* call, kvmill_queue* queue,
                                    uint64_t tag);
/* Everything in the namespace. */
KVMILL_API kvmill_code kvmill_clear(kvmill_client* client, const kvmill_namespace* ns,
                                    const kvmill_call_options* call, kvmill_queue* queue,
                                    uint64_t tag);
/* Ends when every sealed block of the daemon is durable. */
KVMILL_API kvmill_code kvmill_flush(kvmill_client* client, const kvmill_call_options* call,
                                    kvmill_queue* queue, uint64_t tag);
/* The daemon's state, for people and monitors. */
KVMILL_API kvmill_code kvmill_stat(kvmill_client* client, const kvmill_call_options* call,
                                   kvmill_queue* queue, uint64_t tag);

/* --- Results --- */
/* Each function that reads a result: FAILED_PRECONDITION when the operation failed or was another
 * one. */

/* Null is allowed. */
KVMILL_API void kvmill_result_free(kvmill_result* result);
/* Why the operation failed, or why no daemon answered it (kvmill_result_away); "" otherwise. Valid
 * as long as the result. */
KVMILL_API const char* kvmill_result_message(const kvmill_result* result);

/* LOOKUP, STORE, STORE_PAGES, FETCH, MAP, since 2.5: why no daemon answered, which was no failure
 * (KVMILL_AWAY_MISS): misses are misses for that, and blocks were dropped. KVMILL_OK: one did; and
 * of any other result. */
KVMILL_API kvmill_code kvmill_result_away(const kvmill_result* result);

/* OPEN_NAMESPACE, FIND_NAMESPACE. A new handle each time, the caller's. */
KVMILL_API kvmill_code kvmill_result_namespace(const kvmill_result* result, kvmill_namespace** ns);

/* REMOVE, CLEAR, TOUCH: (block, layer group)s; FLUSH: blocks; REGISTER_MEMORY: the registration. */
KVMILL_API kvmill_code kvmill_result_count(const kvmill_result* result, uint64_t* count);

enum { KVMILL_TIER_GPU = 0, KVMILL_TIER_HOST = 1, KVMILL_TIER_DISK = 2, KVMILL_TIER_PEER = 3 };

typedef struct kvmill_lookup_result {
  size_t struct_bytes;
  uint64_t hit_tokens;  /* Of the hit blocks, the tail not counted. */
  const uint8_t* tiers; /* One per hit block: KVMILL_TIER_..., the slowest over its layer groups. */
  kvmill_key tail_key;  /* What the tail is stored under: for kvmill_fetch and kvmill_remove. */
  uint32_t hit_blocks;
  uint32_t tail_tokens; /* Of the longest tail asked for that is there; 0: none. */
} kvmill_lookup_result;
/* Pointers are valid as long as the result. */
KVMILL_API kvmill_code kvmill_result_lookup(const kvmill_result* result,
                                            kvmill_lookup_result* lookup);

typedef struct kvmill_store_result {
  size_t struct_bytes;
  uint64_t block_count;
  uint64_t blocks_stored;
  uint64_t blocks_existing;
  uint64_t blocks_failed;
  uint64_t raw_bytes;      /* 16-bit bytes of the stored blocks. */
  uint64_t stored_bytes;   /* Bytes of all their pages, */
  uint64_t tile_bytes;     /*   of their records alone, */
  uint64_t tile_raw_bytes; /*   and the 16-bit bytes of the tokens and heads in records. */
  uint64_t raw_heads;      /* (layer, head) pairs of them kept in 16 bits. */
  uint64_t blocks_dropped; /* Since 2.5. */
} kvmill_store_result;
/* STORE, STORE_PAGES. */
KVMILL_API kvmill_code kvmill_result_store(const kvmill_result* result, kvmill_store_result* store);

typedef struct kvmill_fetch_result {
  size_t struct_bytes;
  uint64_t block_count;
  uint64_t page_bytes; /* That arrived and were verified. */
} kvmill_fetch_result;
KVMILL_API kvmill_code kvmill_result_fetch(const kvmill_result* result, kvmill_fetch_result* fetch);

enum {
  KVMILL_BLOCK_FAILED = 0,
  KVMILL_BLOCK_STORED = 1,   /* Complete, and completed by this call. */
  KVMILL_BLOCK_EXISTING = 2, /* It was there: the first bytes stay. */
  KVMILL_BLOCK_PARTIAL = 3,  /* This call's heads are in place; other writers still owe some. */
  KVMILL_BLOCK_DROPPED = 4   /* No daemon was there to take it; its code is OK. KVMILL_AWAY_MISS. */
};

typedef struct kvmill_block_result {
  size_t struct_bytes;
  const char* message; /* "" when OK. Valid as long as the result. */
  uint64_t retry_after_ms;
  kvmill_code code;
  uint32_t outcome;     /* STORE, STORE_PAGES: KVMILL_BLOCK_... */
  uint32_t tier;        /* FETCH: KVMILL_TIER_..., the slowest over its layer groups. */
  uint32_t token_count; /* FETCH. */
} kvmill_block_result;
/* STORE, STORE_PAGES, FETCH. OUT_OF_RANGE for an index that does not exist. */
KVMILL_API kvmill_code kvmill_result_block(const kvmill_result* result, size_t block,
                                           kvmill_block_result* out);
/* FETCH with KVMILL_FORM_PAGES: the length of a page; 0 when it did not come. */
KVMILL_API kvmill_code kvmill_result_page_bytes(const kvmill_result* result, size_t block,
                                                size_t layer, size_t* page_bytes);

typedef struct kvmill_stat_result {
  size_t struct_bytes;
  uint64_t blocks;
  uint64_t pages;
  uint64_t sessions;
  uint64_t leases;
  uint64_t raw_bytes_ingested;
  uint64_t encoded_bytes_stored;
  uint64_t lookup_blocks;
  uint64_t hit_blocks;
  uint64_t checksum_failures;
  uint64_t unwritten_blocks;
  uint64_t metadata_bytes;
  double uptime_s;
  const char* boot_id; /* Lower-case hex. Valid as long as the result. */
  uint64_t tier_count;
} kvmill_stat_result;
KVMILL_API kvmill_code kvmill_result_stat(const kvmill_result* result, kvmill_stat_result* stat);

typedef struct kvmill_tier_usage {
  size_t struct_bytes;
  uint64_t used_bytes;
  uint64_t capacity_bytes;
  uint64_t blocks;
  uint32_t tier; /* KVMILL_TIER_... */
} kvmill_tier_usage;
/* STAT. OUT_OF_RANGE for an index that does not exist. */
KVMILL_API kvmill_code kvmill_result_tier(const kvmill_result* result, size_t index,
                                          kvmill_tier_usage* usage);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif  // KVMILL_CLIENT_KVMILL_H_
