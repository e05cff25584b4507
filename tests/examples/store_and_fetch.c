/* Stores one block of K and V, looks it up and fetches it back, in C99: store_and_fetch_c ADDRESS
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "client/kvmill.h"

enum { LAYERS = 2, HEADS = 8, HEAD_DIM = 128, TOKENS = 128, VALUES = TOKENS * HEADS * HEAD_DIM };

static uint16_t kv[2 * LAYERS][VALUES]; /* The engine's memory: K and V of each layer, bf16. */
static uint16_t out[2 * LAYERS][VALUES];

static void Need(kvmill_code code, const char* text) {
  if (code == KVMILL_OK) return;
  fprintf(stderr, "store_and_fetch_c: %s: %s\n", kvmill_code_name(code), text);
  exit(1);
}

/* The result of the one operation that was started. An engine with many in flight tells them apart
 * by their tags, and waits for kvmill_queue_fd() with whatever it waits for anyway. */
static kvmill_result* Finish(kvmill_queue* queue, kvmill_code started) {
  kvmill_event event;
  KVMILL_INIT(&event);
  Need(started, kvmill_last_error());
  Need(kvmill_queue_next(queue, -1, &event), kvmill_last_error());
  Need(event.code, kvmill_result_message(event.result));
  return event.result;
}

/* bf16 is the upper half of a float. */
static uint16_t ToBits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return (uint16_t)(bits >> 16);
}

static float ToFloat(uint16_t value) {
  const uint32_t bits = (uint32_t)value << 16;
  float result;
  memcpy(&result, &bits, sizeof(result));
  return result;
}

int main(int argc, char** argv) {
  const char hash[] = "hash of all tokens up to here, in C";
  const kvmill_key key = {hash, sizeof(hash) - 1};
  const uint16_t layers[LAYERS] = {0, 1};
  const ptrdiff_t head_stride = 2 * HEAD_DIM, token_stride = HEADS * head_stride;
  double difference = 0, norm = 0;
  int i;

  kvmill_queue* queue;
  kvmill_client* client;
  kvmill_namespace* ns;
  kvmill_result* result;
  kvmill_client_options options;
  kvmill_layer_group group;
  kvmill_namespace_spec spec;
  kvmill_store_layer inputs[LAYERS];
  kvmill_store_block block;
  kvmill_store_result stored;
  kvmill_lookup_result found;
  kvmill_fetch_output outputs[LAYERS];
  kvmill_block_result fetched;

  if (argc != 2) {
    fprintf(stderr, "usage: %s ADDRESS, as unix:/run/kvmill/kvmill.sock\n", argv[0]);
    return 2;
  }
  KVMILL_INIT(&options);
  options.address = argv[1];
  Need(kvmill_client_create(&options, &client), kvmill_last_error());
  Need(kvmill_queue_create(&queue), kvmill_last_error());

  /* What must be equal before bytes may be reused. Two layers, 8 KV heads, head_dim 128. */
  KVMILL_INIT(&group);
  group.layers = layers;
  group.layer_count = LAYERS;
  group.kv_heads = HEADS;
  group.head_dim = HEAD_DIM;
  KVMILL_INIT(&spec);
  spec.model = "example-model";
  spec.revision = "1";
  spec.hash_scheme = "example"; /* How the key above is made. */
  spec.source_dtype = KVMILL_BFLOAT16;
  spec.groups = &group;
  spec.group_count = 1;
  result = Finish(queue, kvmill_open_namespace(client, "example-c", &spec, NULL, queue, 1));
  Need(kvmill_result_namespace(result, &ns), kvmill_last_error());
  kvmill_result_free(result);

  for (i = 0; i < 2 * LAYERS * VALUES; ++i) { /* Made-up waves. */
    kv[i % 4][i / 4] = ToBits((float)sin(0.37 * (double)((long)i * i % 10007)));
  }

  /* Store. The memory is read in place until the operation's event is in the queue. */
  KVMILL_INIT(&block);
  block.key = key;
  block.token_count = TOKENS;
  block.layers = inputs;
  block.layer_count = LAYERS;
  for (i = 0; i < LAYERS; ++i) {
    KVMILL_INIT(&inputs[i]);
    inputs[i].k.data = kv[2 * i];
    inputs[i].v.data = kv[2 * i + 1];
    inputs[i].k.token_stride_bytes = inputs[i].v.token_stride_bytes = token_stride;
    inputs[i].k.head_stride_bytes = inputs[i].v.head_stride_bytes = head_stride;
  }
  result = Finish(queue, kvmill_store(client, ns, &block, 1, NULL, NULL, queue, 2));
  KVMILL_INIT(&stored);
  Need(kvmill_result_store(result, &stored), kvmill_last_error());
  KVMILL_INIT(&fetched);
  Need(kvmill_result_block(result, 0, &fetched), kvmill_last_error());
  Need(fetched.code, fetched.message);
  kvmill_result_free(result);

  /* Another request with the same prefix: how much of it is there? */
  result = Finish(queue, kvmill_lookup(client, ns, &key, 1, NULL, 0, NULL, queue, 3));
  KVMILL_INIT(&found);
  Need(kvmill_result_lookup(result, &found), kvmill_last_error());
  kvmill_result_free(result);

  /* Fetch, decoded on the way into the engine's memory. */
  for (i = 0; i < LAYERS; ++i) {
    KVMILL_INIT(&outputs[i]);
    outputs[i].k.data = out[2 * i];
    outputs[i].v.data = out[2 * i + 1];
    outputs[i].k.token_stride_bytes = outputs[i].v.token_stride_bytes = token_stride;
    outputs[i].k.head_stride_bytes = outputs[i].v.head_stride_bytes = head_stride;
  }
  result = Finish(queue, kvmill_fetch(client, ns, &key, 1, outputs, LAYERS, NULL, NULL, queue, 4));
  KVMILL_INIT(&fetched);
  Need(kvmill_result_block(result, 0, &fetched), kvmill_last_error());
  if (fetched.code != KVMILL_OK) return 3; /* A miss: the engine computes K and V itself. */

  for (i = 0; i < VALUES; ++i) {
    const double want = ToFloat(kv[0][i]);
    difference += pow(ToFloat(out[0][i]) - want, 2);
    norm += want * want;
  }
  printf("stored %d, found %d, fetched %d tokens; 4-bit keys are off by %.1f %%\n",
         (int)stored.blocks_stored, (int)found.hit_blocks, (int)fetched.token_count,
         100 * sqrt(difference / norm));
  kvmill_result_free(result);
  kvmill_namespace_free(ns);
  kvmill_client_destroy(client);
  kvmill_queue_destroy(queue);
  return 0;
}
