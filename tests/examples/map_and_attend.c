/* Attends to a block where the daemon keeps it, without a copy, in C99: map_and_attend_c ADDRESS
 * (after store_and_fetch_c ADDRESS, which stores the block)
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "client/kvmill_map.h"

enum { HEADS = 8, Q_HEADS = 32, HEAD_DIM = 128 };

static void Need(kvmill_code code, const char* text) {
  if (code == KVMILL_OK) return;
  fprintf(stderr, "map_and_attend_c: %s: %s\n", kvmill_code_name(code), text);
  exit(1);
}

/* The result of the one operation that was started. */
static kvmill_result* Finish(kvmill_queue* queue, kvmill_code started) {
  kvmill_event event;
  KVMILL_INIT(&event);
  Need(started, kvmill_last_error());
  Need(kvmill_queue_next(queue, -1, &event), kvmill_last_error());
  Need(event.code, kvmill_result_message(event.result));
  return event.result;
}

int main(int argc, char** argv) {
  static float query[Q_HEADS * HEAD_DIM], output[Q_HEADS * HEAD_DIM], log_sum_exp[Q_HEADS];
  const char hash[] = "hash of all tokens up to here, in C";
  const kvmill_key key = {hash, sizeof(hash) - 1};
  double norm = 0;
  int i, tiles = 0;

  kvmill_queue* queue;
  kvmill_client* client;
  kvmill_namespace* ns;
  kvmill_mapped* mapped;
  kvmill_result* result;
  kvmill_client_options options;
  kvmill_block_result block;
  kvmill_mapped_head heads[HEADS];
  kvmill_attention attention;

  if (argc != 2) {
    fprintf(stderr, "usage: %s ADDRESS, as unix:/run/kvmill/kvmill.sock\n", argv[0]);
    return 2;
  }
  KVMILL_INIT(&options);
  options.address = argv[1];
  Need(kvmill_client_create(&options, &client), kvmill_last_error());
  Need(kvmill_queue_create(&queue), kvmill_last_error());
  result = Finish(queue, kvmill_find_namespace(client, "example-c", NULL, queue, 1));
  Need(kvmill_result_namespace(result, &ns), kvmill_last_error());
  kvmill_result_free(result);

  /* A lease on the block (10 seconds), and its pages as memory of this process. */
  result = Finish(queue, kvmill_map(client, ns, &key, 1, NULL, NULL, queue, 2));
  Need(kvmill_result_mapped(result, &mapped), kvmill_last_error());
  kvmill_result_free(result);
  KVMILL_INIT(&block);
  Need(kvmill_mapped_block(mapped, 0, &block), kvmill_last_error());
  if (block.code != KVMILL_OK) return 3; /* A miss: the engine computes K and V itself. */

  /* An engine with attention of its own walks this table, and then asks kvmill_mapped_check(). */
  Need(kvmill_mapped_heads(mapped, 0, 0, 1, heads, HEADS), kvmill_last_error());
  for (i = 0; i < HEADS; ++i) tiles += heads[i].kind == KVMILL_HEAD_TILE;
  Need(kvmill_mapped_check(mapped, 0, 1), kvmill_last_error());

  /* One query token right behind the block, with 32 query heads, each of ones. OK says that all
   * that was read was right: the lease held all the time. */
  for (i = 0; i < Q_HEADS * HEAD_DIM; ++i) query[i] = 1;
  KVMILL_INIT(&attention);
  attention.query = query;
  attention.output = output;
  attention.log_sum_exp = log_sum_exp;
  attention.q_heads = Q_HEADS;
  Need(kvmill_attend(mapped, 0, &attention), kvmill_last_error());

  for (i = 0; i < Q_HEADS * HEAD_DIM; ++i) norm += (double)output[i] * output[i];
  printf("attended to %d tokens in %d tiles in place; the output has norm %.2f\n",
         (int)block.token_count, tiles, sqrt(norm));
  kvmill_mapped_free(mapped);
  kvmill_namespace_free(ns);
  kvmill_client_destroy(client);
  kvmill_queue_destroy(queue);
  return 0;
}
