/* The C ABI's fourth part, since 2.3: tickets. A prompt's blocks go from the node that prefills to
 * the node that decodes, layer by layer, while they are computed. Everything that client/kvmill.h
 * says of calls, structs, errors, threads and fork holds here; docs/client.md tells it from the
 * engines' side.
 *
 *   kvmill_create_ticket(prefill, ns, blocks, ...);  At the prefill's daemon, before it stores.
 *   kvmill_redeem_ticket(decode, ns, ticket, ...);   At the decode's daemon, at once. Lasts until
 *                                                    every block is there, or will not come.
 *
 * A ticket ends when every block of it has its fate; when it is revoked, or the session of the
 * client that made it ends; when nobody redeems it any more; and when nothing of it made progress
 * for ttl_ms. Nothing is held for it then, on either side. To an engine every failure is a miss:
 * what is not sealed is recomputed.
 */
#ifndef KVMILL_CLIENT_KVMILL_TICKET_H_
#define KVMILL_CLIENT_KVMILL_TICKET_H_

#include "client/kvmill.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Some 100 bytes for the decode engine, to be passed on with the request. They know nothing of the
 * prompt; whoever has them may have its blocks. Never changes. */
typedef struct kvmill_ticket {
  const void* data;
  size_t bytes;
} kvmill_ticket;

/* --- At the prefill's daemon --- */

/* A block that will be stored, as kvmill_store_block names it. */
typedef struct kvmill_promised_block {
  size_t struct_bytes;
  kvmill_key key;    /* The engine's, that of a tail (token_count < block_tokens) as well. */
  kvmill_key parent; /* 0 bytes for the first block of a sequence. */
  uint32_t token_count;
  uint32_t block_index; /* Position in its sequence. */
} kvmill_promised_block;

typedef struct kvmill_ticket_options {
  size_t struct_bytes;
  const char* consumer; /* Node id of who may redeem it; null or "": whoever has it. */
  uint64_t ttl_ms;      /* Without progress. 0: 30 seconds. At most 10 minutes. */
  uint64_t life_ms;     /* With it. 0: 5 minutes. At most an hour. */
} kvmill_ticket_options;

/* The daemon holds the blocks from now on, what is there of them and what comes: at most 4096
 * blocks times layer groups. INVALID_ARGUMENT names what is wrong with a block, or the nodes that
 * there are when `consumer` is none of them; RESOURCE_EXHAUSTED which limit is reached;
 * FAILED_PRECONDITION: the daemon is in no cluster; PERMISSION_DENIED: nodes do
 * not share blocks of the caller's tenant. */
KVMILL_API kvmill_code kvmill_create_ticket(kvmill_client* client, const kvmill_namespace* ns,
                                            const kvmill_promised_block* blocks, size_t block_count,
                                            const kvmill_ticket_options* options,
                                            const kvmill_call_options* call, kvmill_queue* queue,
                                            uint64_t tag);
/* CREATE_TICKET. Valid as long as the result: copy it. */
KVMILL_API kvmill_code kvmill_result_ticket(const kvmill_result* result, kvmill_ticket* ticket);
/* The engine gave the prompt up. NOT_FOUND: the ticket has ended; FAILED_PRECONDITION: another
 * daemon made it. */
KVMILL_API kvmill_code kvmill_revoke_ticket(kvmill_client* client, kvmill_ticket ticket,
                                            const kvmill_call_options* call, kvmill_queue* queue,
                                            uint64_t tag);

/* --- At the decode's daemon --- */

typedef struct kvmill_redeem_options {
  size_t struct_bytes;
  uint32_t updates; /* Not 0: KVMILL_REDEEM_UPDATE events with the same tag come before the
                       operation's own. */
} kvmill_redeem_options;

/* Brings the blocks to the store of the daemon, any one of the cluster; at the one that made the
 * ticket they are there, and it only tells. Blocks are seen there (by lookup, fetch, map) when they
 * are sealed, with the bytes that were sealed at the producer. The call's time is how long the
 * caller waits, prefill included. Codes of the event:
 *   OK                   the ticket was redeemed, which says nothing of its blocks
 *   NOT_FOUND            there is no such ticket (any more); also of one of another tenant, or of a
 *                        namespace that this daemon does not know
 *   ABORTED              it was revoked, or its time was over
 *   FAILED_PRECONDITION  it is of another namespace, another process redeemed it, or the daemon is
 *                        in no cluster
 *   PERMISSION_DENIED    it is for another node; or as of kvmill_create_ticket
 *   RESOURCE_EXHAUSTED   the daemon redeems as many as it may
 *   UNAVAILABLE          the producer does not answer or left the cluster; or the daemon
 *   CANCELLED            kvmill_cancel_redeem, or the client was destroyed
 *   DEADLINE_EXCEEDED    the call's time was over
 * Whatever the code, kvmill_result_redeem says what became of the blocks. */
KVMILL_API kvmill_code kvmill_redeem_ticket(kvmill_client* client, const kvmill_namespace* ns,
                                            kvmill_ticket ticket,
                                            const kvmill_redeem_options* options,
                                            const kvmill_call_options* call, kvmill_queue* queue,
                                            uint64_t tag);
/* Redeems of it that this client started end with CANCELLED, soon. When nobody else redeems it at
 * that daemon, what is not sealed is discarded and the producer lets go. Waits for nobody, and has
 * no event. */
KVMILL_API kvmill_code kvmill_cancel_redeem(kvmill_client* client, kvmill_ticket ticket);

typedef struct kvmill_redeem_result {
  size_t struct_bytes;
  uint64_t block_count; /* (block, layer group)s, in the order of the ticket. 0: it was never told
                           which there are. */
  uint64_t missed;      /* Of them. */
  const uint32_t* changed; /* Indices of blocks. Of an update: those that changed since the last one
                              was taken. Of the last event: null. */
  uint64_t changed_count;
} kvmill_redeem_result;
/* REDEEM_TICKET, also of one that failed: each block has its fate. REDEEM_UPDATE: as it is when the
 * event is taken; there is never more than one of a redeem in the queue. Pointers are valid as long
 * as the result. */
KVMILL_API kvmill_code kvmill_result_redeem(const kvmill_result* result,
                                            kvmill_redeem_result* redeem);

enum {
  KVMILL_FATE_OPEN = 0,   /* On its way: in updates only. */
  KVMILL_FATE_SEALED = 1, /* In the store, as the producer sealed it. */
  KVMILL_FATE_EXISTS = 2, /* In the store; somebody else stored it. */
  KVMILL_FATE_MISSED = 3
};
/* Why a block was missed. For logs and counters: to an engine they are the same. Later versions may
 * have more. */
enum {
  KVMILL_MISS_NONE = 0,
  KVMILL_MISS_GIVEN_UP = 1,      /* By its writers; or the producer could not hold it. */
  KVMILL_MISS_DAMAGED = 2,       /* What came was not what the producer sealed, again and again. */
  KVMILL_MISS_NO_ROOM = 3,       /* For a copy, at the node that redeems. */
  KVMILL_MISS_PRODUCER_GONE = 4, /* It does not answer, or left the cluster. */
  KVMILL_MISS_REVOKED = 5,       /* The ticket was, or the session of who made it ended. */
  KVMILL_MISS_DEADLINE = 6,      /* The ticket's time was over. */
  KVMILL_MISS_ENDED = 7,         /* The ticket had ended, which way nobody knows any more. */
  KVMILL_MISS_REFUSED = 8,       /* The store of the node that redeems did not take it. */
  KVMILL_MISS_CALL_ENDED = 9     /* The redeem did before: the event's code says why. */
};
/* "given up"; never null. Static. */
KVMILL_API const char* kvmill_miss_name(uint32_t miss);

typedef struct kvmill_redeemed_block {
  size_t struct_bytes;
  kvmill_key key; /* What it is stored under: for kvmill_fetch, kvmill_map and kvmill_touch. Of a
                     tail not the engine's. */
  const uint64_t* layer_words; /* Layers that came, and are right: bit i of word w stands for layer
                                  64 w + i of the group. Words that are not there are zero. */
  size_t layer_word_count;
  uint32_t group;
  uint32_t block_index;
  uint32_t token_count;
  uint32_t layer_count; /* Of the group. */
  uint32_t layers_here; /* Of them. */
  uint32_t fate;        /* KVMILL_FATE_... */
  uint32_t miss;        /* KVMILL_MISS_... */
} kvmill_redeemed_block;
/* REDEEM_TICKET, REDEEM_UPDATE. OUT_OF_RANGE for an index that does not exist. */
KVMILL_API kvmill_code kvmill_result_redeemed_block(const kvmill_result* result, size_t index,
                                                    kvmill_redeemed_block* block);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif  // KVMILL_CLIENT_KVMILL_TICKET_H_
