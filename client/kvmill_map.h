/* The C ABI's second part: blocks in the daemon's own memory, mapped, and attention over them where
 * they lie. Only on the daemon's node, through its socket. Everything that client/kvmill.h says of
 * calls, structs, errors, threads and fork holds here.
 *
 *   kvmill_map(client, ns, keys, ...);         Leases on blocks: kvmill_result_mapped().
 *   kvmill_attend(mapped, layer, &attention);  Checks by itself. Or:
 *   kvmill_mapped_heads(mapped, layer, ...);   For attention of one's own,
 *   kvmill_mapped_check(mapped, 0, count);     which is right if this says OK afterwards.
 *
 * Reading is not holding: a lease has an end, and a process may be stopped for longer. What was
 * read counts only when kvmill_mapped_check() said OK afterwards: it looks at the time and at the
 * generation of every page that was read: that changes with the page's block. ABORTED (a lease
 * is over, the memory is another block's, the session ended, the client was destroyed) is final:
 * throw away what was computed, map again or compute K and V. In a child of fork() the memory is
 * not there at all: reading it ends the process, and every function answers FAILED_PRECONDITION.
 */
#ifndef KVMILL_CLIENT_KVMILL_MAP_H_
#define KVMILL_CLIENT_KVMILL_MAP_H_

#include "client/kvmill.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Blocks under lease. Any number of threads may use it at once. */
typedef struct kvmill_mapped kvmill_mapped;

/* Which memory the blocks are mapped in. IN_PLACE: where they are, in host memory or on the
 * daemon's GPU. GPU: there; they are brought to it first. */
enum { KVMILL_MEMORY_HOST = 0, KVMILL_MEMORY_IN_PLACE = 1, KVMILL_MEMORY_GPU = 2 };

typedef struct kvmill_map_options {
  size_t struct_bytes;
  uint64_t
      lease_ms;    /* From the moment of the call. 0: 10 seconds. The daemon has a limit (60 s). */
  uint32_t memory; /* Since 2.1. KVMILL_MEMORY_...; other than HOST with
                      kvmill_client_options.device only, FAILED_PRECONDITION without. A block that
                      this device cannot have has that code, too: map it again in host memory. */
} kvmill_map_options;

/* Blocks that are only on disk are loaded first. Misses are codes of blocks. FAILED_PRECONDITION:
 * not on the daemon's socket; INVALID_ARGUMENT: too many keys, too long a lease;
 * RESOURCE_EXHAUSTED: too much is under lease. */
KVMILL_API kvmill_code kvmill_map(kvmill_client* client, const kvmill_namespace* ns,
                                  const kvmill_key* keys, size_t key_count,
                                  const kvmill_map_options* options,
                                  const kvmill_call_options* call, kvmill_queue* queue,
                                  uint64_t tag);
/* MAP. A new handle each time, the caller's: kvmill_mapped_free. All of them and the result share
 * the leases, which end with the last. */
KVMILL_API kvmill_code kvmill_result_mapped(const kvmill_result* result, kvmill_mapped** mapped);

/* Makes the leases last lease_ms (0: 10 seconds) from now on; `client` is the one that mapped.
 * ABORTED when one had ended before: kvmill_mapped_check() says so from then on. */
KVMILL_API kvmill_code kvmill_renew(kvmill_client* client, const kvmill_mapped* mapped,
                                    uint64_t lease_ms, const kvmill_call_options* call,
                                    kvmill_queue* queue, uint64_t tag);
/* Gives the leases back now, without waiting for the daemon: ABORTED from here on. The memory can
 * still be read, whatever comes to lie there, until the last handle is freed. Null is allowed. */
KVMILL_API kvmill_code kvmill_mapped_release(const kvmill_mapped* mapped);
/* The last one gives the leases back and unmaps the memory. It may outlive client, namespace and
 * queue. Null is allowed. */
KVMILL_API void kvmill_mapped_free(kvmill_mapped* mapped);

/* The keys of the call; 0 for null. */
KVMILL_API size_t kvmill_mapped_block_count(const kvmill_mapped* mapped);
/* code: of the first of the block's layer groups that is not there (NOT_FOUND: a miss), else OK.
 * Groups that are there have their pages all the same. tier, token_count: as for FETCH. `message`
 * is valid as long as the handle. OUT_OF_RANGE for a block that does not exist. */
KVMILL_API kvmill_code kvmill_mapped_block(const kvmill_mapped* mapped, size_t block,
                                           kvmill_block_result* out);
/* Milliseconds until kvmill_mapped_check() can no longer be OK; 0 when that is past, or for null.
 */
KVMILL_API uint64_t kvmill_mapped_left_ms(const kvmill_mapped* mapped);

/* Whether everything that was read so far of these blocks was right: after reading. Some
 * nanoseconds a page. */
KVMILL_API kvmill_code kvmill_mapped_check(const kvmill_mapped* mapped, size_t first_block,
                                           size_t block_count);
/* Reads everything, all checksums of all pages: nobody but the daemon can write there, so that is
 * for those who want it. DATA_LOSS names the first that is wrong. */
KVMILL_API kvmill_code kvmill_mapped_verify(const kvmill_mapped* mapped);
/* Since 2.1. Where the pages of a block's layer are: KVMILL_TIER_HOST, or KVMILL_TIER_GPU. The
 * block's code when it is not there; OUT_OF_RANGE for a block or layer that does not exist. */
KVMILL_API kvmill_code kvmill_mapped_memory(const kvmill_mapped* mapped, size_t block, size_t layer,
                                            uint32_t* tier);

/* --- Memory --- */
/* Read only. Pointers are valid until the last handle is freed; what they point at counts as said
 * above. Those of pages and heads on the GPU are addresses of kvmill_client_options.device, for its
 * kernels; what those read counts when their stream was synchronized and kvmill_mapped_check() said
 * OK afterwards. Layers are counted as everywhere: in the order of the namespace's groups. Errors:
 * ABORTED as kvmill_mapped_check; the block's code when it is not there; DATA_LOSS when it is not
 * the page that was asked for; OUT_OF_RANGE for a block or layer that does not exist. */

typedef struct kvmill_page {
  size_t struct_bytes;
  const void* data; /* As docs/formats.md has it: header, slots, contents. */
  size_t bytes;
  uint32_t head_count;
  uint32_t token_count;
} kvmill_page;
KVMILL_API kvmill_code kvmill_mapped_page(const kvmill_mapped* mapped, size_t block, size_t layer,
                                          kvmill_page* page);

enum {
  KVMILL_HEAD_ABSENT = 0,
  KVMILL_HEAD_TILE = 1, /* One record: kvmill_namespace_record_bytes(). */
  KVMILL_HEAD_RAW = 2   /* 16 bits: K, then V, each [tokens][head_dim] without gaps. */
};

/* One KV head of one block. Never changes. */
typedef struct kvmill_mapped_head {
  const void* data; /* Null when absent. */
  size_t bytes;
  uint32_t kind;   /* KVMILL_HEAD_... */
  uint32_t tokens; /* block_tokens, or less in a tail. */
} kvmill_mapped_head;

/* The table that attention walks: heads[b * kv_heads + h] is KV head h of block first_block + b,
 * for block_count blocks. OUT_OF_RANGE when head_count is less than block_count * kv_heads. */
KVMILL_API kvmill_code kvmill_mapped_heads(const kvmill_mapped* mapped, size_t layer,
                                           size_t first_block, size_t block_count,
                                           kvmill_mapped_head* heads, size_t head_count);

/* --- Attention --- */

enum { KVMILL_VECTOR_FLOAT32 = 0, KVMILL_VECTOR_FLOAT16 = 1, KVMILL_VECTOR_BFLOAT16 = 2 };

/* Queries of one sequence over mapped blocks, which are consecutive blocks of it; only the last of
 * them may be a tail. Query head i reads KV head i / (q_heads / KV heads). Queries and outputs are
 * in the namespace's frame. */
typedef struct kvmill_attention {
  size_t struct_bytes;
  const void* query;  /* [query_count][q_heads][head_dim] without gaps. */
  void* output;       /* The same; overlaps nothing that is read. */
  float* log_sum_exp; /* [query_count][q_heads], natural logarithm, of what was seen; or null. With
                         it, outputs over other tokens of the sequence (those that the engine has
                         itself) are merged exactly. */
  size_t first_block;
  size_t block_count;   /* 0: all from first_block on. */
  uint32_t q_heads;     /* A multiple of the KV heads; at most 1024. */
  uint32_t query_count; /* 0: 1. At most 65536. */
  /* Position of the first query, counted from the end of the blocks: 0 is the token right behind
   * them, -1 their last token. Query i is query_offset + i, and sees no token behind itself. */
  int64_t query_offset;
  uint32_t query_type;    /* KVMILL_VECTOR_... */
  uint32_t output_type;   /* 16 bits: rounded to nearest, ties to even. */
  uint32_t head_begin;    /* KV heads that the queries belong to: a tensor-parallel rank's. */
  uint32_t head_count;    /* 0: all heads. */
  uint32_t window_tokens; /* A query sees that many tokens, its own included. 0: what the layer
                            group says. */
  float scale;            /* Multiplies q * k. 0: 1 / sqrt(head_dim). */
  float soft_cap;         /* c > 0: logits become c * tanh(logit / c). */
} kvmill_attention;

/* Of blocks in host memory: FAILED_PRECONDITION names one that is on the GPU, where kernels of the
 * engine's own attend. Attends on the calling thread, and checks the blocks when it is done: OK
 * means that `output` is right, after every other code it is of no use. Where a query sees no token
 * its output is 0 and its log_sum_exp minus infinity. ABORTED, DATA_LOSS as above; the block's code
 * for one that is not there; INVALID_ARGUMENT names the field. */
KVMILL_API kvmill_code kvmill_attend(const kvmill_mapped* mapped, size_t layer,
                                     const kvmill_attention* attention);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif  // KVMILL_CLIENT_KVMILL_MAP_H_
