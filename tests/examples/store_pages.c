/* Stores a block straight from the engine's pages, layer by layer as they are computed, and fetches
 * it back, in C99: store_pages_c unix:PATH
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "client/kvmill_engine.h"

enum { LAYERS = 2, HEADS = 8, HEAD_DIM = 128, TOKENS = 128, PAGE_TOKENS = 16, PAGES = 32 };
enum { BLOCK_PAGES = TOKENS / PAGE_TOKENS, ROW = HEADS * HEAD_DIM, PAGE = PAGE_TOKENS * ROW };

static uint16_t out[2 * LAYERS][TOKENS * ROW];

static void Need(kvmill_code code, const char* text) {
  if (code == KVMILL_OK) return;
  fprintf(stderr, "store_pages_c: %s: %s\n", kvmill_code_name(code), text);
  exit(1);
}

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
  const char hash[] = "hash of all tokens up to here, from pages";
  const kvmill_key key = {hash, sizeof(hash) - 1};
  const uint16_t model_layers[LAYERS] = {0, 1};
  const uint64_t numbers[BLOCK_PAGES] = {17, 3, 30, 4, 12, 0, 31, 8}; /* As the engine has them. */
  const kvmill_page_numbers pages = {numbers, BLOCK_PAGES};
  uint16_t* kv; /* The engine's cache: [layer][k or v][page][token][head][channel]. */
  double difference = 0, norm = 0;
  uint64_t registration;
  uint32_t layer;
  int i;

  kvmill_queue* queue;
  kvmill_client* client;
  kvmill_namespace* ns;
  kvmill_shared_memory* memory;
  kvmill_result* result;
  kvmill_client_options client_options;
  kvmill_layer_group group;
  kvmill_namespace_spec spec;
  kvmill_engine_region region;
  kvmill_region_source source;
  kvmill_engine_place places[2 * LAYERS]; /* K of each layer, then V of each. */
  kvmill_engine_layers layers;
  kvmill_engine_geometry geometry;
  kvmill_page_block block;
  kvmill_page_store_options store_options;
  kvmill_store_result stored;
  kvmill_fetch_output outputs[LAYERS];
  kvmill_block_result said;
  kvmill_event event;

  if (argc != 2) {
    fprintf(stderr, "usage: %s ADDRESS, as unix:/run/kvmill/kvmill.sock\n", argv[0]);
    return 2;
  }
  KVMILL_INIT(&client_options);
  client_options.address = argv[1];
  Need(kvmill_client_create(&client_options, &client), kvmill_last_error());
  Need(kvmill_queue_create(&queue), kvmill_last_error());
  KVMILL_INIT(&group);
  group.layers = model_layers;
  group.layer_count = LAYERS;
  group.kv_heads = HEADS;
  group.head_dim = HEAD_DIM;
  KVMILL_INIT(&spec);
  spec.model = "example-model";
  spec.revision = "1";
  spec.hash_scheme = "example";
  spec.source_dtype = KVMILL_BFLOAT16;
  spec.groups = &group;
  spec.group_count = 1;
  result = Finish(queue, kvmill_open_namespace(client, "example-c-pages", &spec, NULL, queue, 1));
  Need(kvmill_result_namespace(result, &ns), kvmill_last_error());
  kvmill_result_free(result);

  /* The cache lives in memory that the daemon can read, and is described once. */
  Need(kvmill_shared_memory_create(sizeof(uint16_t) * 2 * LAYERS * PAGES * PAGE, &memory),
       kvmill_last_error());
  kv = kvmill_shared_memory_data(memory);
  region.base = (uint64_t)(uintptr_t)kv;
  region.bytes = kvmill_shared_memory_bytes(memory);
  KVMILL_INIT(&source);
  source.kind = KVMILL_REGION_MEMFD;
  source.fd = kvmill_shared_memory_fd(memory);
  memset(places, 0, sizeof(places));
  for (layer = 0; layer < LAYERS; ++layer) {
    places[layer].offset_bytes = sizeof(uint16_t) * (2 * layer) * PAGES * PAGE;
    places[LAYERS + layer].offset_bytes = sizeof(uint16_t) * (2 * layer + 1) * PAGES * PAGE;
  }
  KVMILL_INIT(&layers);
  layers.keys = places;
  layers.values = places + LAYERS;
  layers.layer_count = LAYERS;
  layers.page_count = PAGES;
  layers.page_bytes = layers.page_stride_bytes = sizeof(uint16_t) * PAGE;
  layers.token_stride_bytes = sizeof(uint16_t) * ROW;
  layers.head_stride_bytes = sizeof(uint16_t) * HEAD_DIM;
  layers.element = KVMILL_ELEMENT_BFLOAT16;
  layers.block_tokens = TOKENS;
  layers.head_dim = HEAD_DIM;
  layers.head_count = HEADS;
  layers.page_tokens = PAGE_TOKENS;
  KVMILL_INIT(&geometry);
  geometry.regions = &region;
  geometry.region_count = 1;
  geometry.layers = &layers;
  geometry.layers_count = 1;
  geometry.sources = &source;
  geometry.source_count = 1;
  result = Finish(queue, kvmill_register_memory(client, ns, &geometry, NULL, queue, 2));
  Need(kvmill_result_count(result, &registration), kvmill_last_error());
  kvmill_result_free(result);

  /* The store begins with the prefill, and reads a layer when that is there. */
  KVMILL_INIT(&block);
  block.key = key;
  block.token_count = TOKENS;
  block.pages = &pages;
  block.group_count = 1;
  KVMILL_INIT(&store_options);
  store_options.request = 42;
  store_options.by_layer = 1;
  Need(kvmill_store_pages(client, ns, registration, &block, 1, &store_options, NULL, queue, 3),
       kvmill_last_error());
  for (layer = 0; layer < LAYERS; ++layer) {
    for (i = 0; i < 2 * TOKENS * ROW; ++i) { /* Computes a layer: made-up waves. */
      const int half = i % 2, token = i / 2 / ROW, channel = i / 2 % ROW;
      kv[((size_t)(2 * layer + half) * PAGES + numbers[token / PAGE_TOKENS]) * PAGE +
         token % PAGE_TOKENS * ROW + channel] =
          ToBits((float)sin(0.37 * (double)((long)(i + layer) * i % 10007)));
    }
    Need(kvmill_ready_pages(client, 42, layer + 1), kvmill_last_error());
  }
  KVMILL_INIT(&event);
  Need(kvmill_queue_next(queue, -1, &event), kvmill_last_error());
  Need(event.code, kvmill_result_message(event.result));
  KVMILL_INIT(&said);
  Need(kvmill_result_block(event.result, 0, &said), kvmill_last_error());
  Need(said.code, said.message);
  KVMILL_INIT(&stored);
  Need(kvmill_result_store(event.result, &stored), kvmill_last_error());
  kvmill_result_free(event.result); /* From here on the pages may get another use. */

  for (i = 0; i < LAYERS; ++i) {
    KVMILL_INIT(&outputs[i]);
    outputs[i].k.data = out[2 * i];
    outputs[i].v.data = out[2 * i + 1];
    outputs[i].k.token_stride_bytes = outputs[i].v.token_stride_bytes = sizeof(uint16_t) * ROW;
    outputs[i].k.head_stride_bytes = outputs[i].v.head_stride_bytes = sizeof(uint16_t) * HEAD_DIM;
  }
  result = Finish(queue, kvmill_fetch(client, ns, &key, 1, outputs, LAYERS, NULL, NULL, queue, 4));
  Need(kvmill_result_block(result, 0, &said), kvmill_last_error());
  if (said.code != KVMILL_OK) return 3; /* A miss: the engine computes K and V itself. */
  for (i = 0; i < TOKENS * ROW; ++i) {
    const double want = ToFloat(kv[numbers[i / PAGE] * PAGE + i % PAGE]);
    difference += pow(ToFloat(out[0][i]) - want, 2);
    norm += want * want;
  }
  printf(
      "stored %d block from %d pages in place, fetched %d tokens; 4-bit keys are off by %.1f %%\n",
      (int)stored.blocks_stored, (int)BLOCK_PAGES, (int)said.token_count,
      100 * sqrt(difference / norm));
  kvmill_result_free(result);
  kvmill_namespace_free(ns);
  kvmill_client_destroy(client);
  kvmill_queue_destroy(queue);
  kvmill_shared_memory_free(memory);
  return 0;
}
