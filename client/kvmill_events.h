/* The C ABI's fifth part, since 2.4: what happens to the blocks of a daemon, for who keeps an index
 * of them: routers. Everything that client/kvmill.h says of calls, structs, errors, threads and
 * fork holds here; docs/events.md says what an event is, and what is guaranteed.
 *
 *   kvmill_watch_open(&daemon, &options, queue, tag, &watch);
 *   for (;;) {
 *     kvmill_queue_next(queue, -1, &event);
 *     if (event.operation == KVMILL_WATCH) break;       It does not help to wait: event.code.
 *     kvmill_result_watch(event.result, &batch);
 *     if (batch.snapshot_begin) ...                     What was known is void.
 *     for (i = 0; i < batch.event_count; ++i) kvmill_result_watched(event.result, i, &what);
 *     kvmill_result_free(event.result);                 The next one comes.
 *   }
 *
 * Connections that break, and daemons that restart, are the library's business: it connects again
 * and goes on where it was; when the daemon has not kept what follows it begins with a snapshot,
 * whose first batch says that what was known is void.
 */
#ifndef KVMILL_CLIENT_KVMILL_EVENTS_H_
#define KVMILL_CLIENT_KVMILL_EVENTS_H_

#include "client/kvmill.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A reader, with a connection of its own. */
typedef struct kvmill_watch kvmill_watch;

typedef struct kvmill_watch_options {
  size_t struct_bytes;
  const char* namespace_name; /* Only of this one; null or "": of all that the caller may see. */
  const char* epoch; /* Of a position, with `sequence`: after that one, as far as it is known; else
                        a snapshot. Null or "": with a snapshot. */
  uint64_t sequence;
  uint32_t no_snapshot; /* Not 0, without an epoch: only what happens from now on. */
} kvmill_watch_options;

/* Begins. `daemon`: where it is and who this is; the rest of it does not matter. Connects in the
 * background. KVMILL_WATCH_BATCH events with the tag come out of the queue, one at a time: the next
 * one comes when the result of the last was freed, so who is slow costs nobody memory. The
 * operation ends with one KVMILL_WATCH, whose code is
 *   CANCELLED            kvmill_watch_close
 *   NOT_FOUND            the namespace is unknown, and nothing was told before; later it is waited
 *                        for: a daemon that restarted knows it once an engine opens it
 *   PERMISSION_DENIED, UNAUTHENTICATED, INVALID_ARGUMENT, FAILED_PRECONDITION, UNIMPLEMENTED
 * INVALID_ARGUMENT also of this function for options that cannot be right. */
KVMILL_API kvmill_code kvmill_watch_open(const kvmill_client_options* daemon,
                                         const kvmill_watch_options* options, kvmill_queue* queue,
                                         uint64_t tag, kvmill_watch** watch);
/* Frees the handle; waits until the call has ended. The KVMILL_WATCH is in the queue when this
 * returns; a batch that was there before still is. Null is allowed. */
KVMILL_API kvmill_code kvmill_watch_close(kvmill_watch* watch);
/* While it waits to connect again: why, as text; "" otherwise. Cut where `out_bytes` end. */
KVMILL_API kvmill_code kvmill_watch_trouble(const kvmill_watch* watch, char* out, size_t out_bytes);

typedef struct kvmill_watch_batch {
  size_t struct_bytes;
  uint64_t event_count; /* May be 0: the first batch says where the stream begins. */
  const char* epoch;    /* With `sequence`: the position behind this batch, to begin with next time.
                           Lower-case hex; null within a snapshot, where there is none. */
  uint64_t sequence;
  uint32_t snapshot_begin; /* Not 0, before the events: what was known is void, and blocks that are
                              here follow until snapshot_end. */
  uint32_t snapshot_end;   /* Not 0, after the events: those were all. */
} kvmill_watch_batch;
/* WATCH_BATCH. Pointers are valid as long as the result. */
KVMILL_API kvmill_code kvmill_result_watch(const kvmill_result* result, kvmill_watch_batch* batch);

/* Strings are NUL-terminated and never null. */
typedef struct kvmill_watched_namespace {
  size_t struct_bytes;
  const char* name;
  const char* fingerprint; /* Lower-case hex. */
  const char* model;
  const char* adapter_digest;
  const char* hash_scheme;
  uint32_t block_tokens;
} kvmill_watched_namespace;

enum {
  KVMILL_WATCHED_STORED = 0,  /* It is here, in `tier`. */
  KVMILL_WATCHED_MOVED = 1,   /* It was in `from_tier` and is in `tier`. */
  KVMILL_WATCHED_REMOVED = 2, /* It was in `tier` and is gone. */
  KVMILL_WATCHED_CLEARED = 3  /* Of the namespace nothing is here any more. */
};

typedef struct kvmill_watched_event {
  size_t struct_bytes;
  kvmill_key key;    /* 0 bytes of CLEARED. */
  kvmill_key parent; /* Of STORED: the block before it; 0 bytes: none, or not known. */
  const kvmill_watched_namespace* ns; /* One for all events of it in a batch, of this library's
                                         size. */
  uint32_t what;                      /* KVMILL_WATCHED_... */
  uint32_t tier;                      /* KVMILL_TIER_... */
  uint32_t from_tier;
  uint32_t token_count; /* Of STORED; less than the namespace's block_tokens: a tail. */
} kvmill_watched_event;
/* WATCH_BATCH. OUT_OF_RANGE for an index that does not exist; pointers as above. */
KVMILL_API kvmill_code kvmill_result_watched(const kvmill_result* result, size_t index,
                                             kvmill_watched_event* event);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif  // KVMILL_CLIENT_KVMILL_EVENTS_H_
