"""Stores blocks straight from an engine's pages in asyncio, layer by layer as they are computed: store_pages.py unix:PATH"""
import asyncio
import sys

import numpy as np

import kvmill

LAYERS, HEADS, HEAD_DIM, BLOCK_TOKENS, PAGE_TOKENS, PAGES, BLOCKS = 2, 4, 64, 64, 16, 64, 3


def geometry(memory):
    """K and V of each layer, each PAGES pages [PAGE_TOKENS, HEADS, HEAD_DIM] of fp16."""
    row = 2 * HEAD_DIM
    page = PAGE_TOKENS * HEADS * row
    places = [kvmill.EnginePlace(0, i * PAGES * page) for i in range(2 * LAYERS)]
    layers = kvmill.EngineLayers(
        keys=places[::2], values=places[1::2], page_count=PAGES, page_bytes=page, page_stride_bytes=page,
        token_stride_bytes=HEADS * row, head_stride_bytes=row, block_tokens=BLOCK_TOKENS, page_tokens=PAGE_TOKENS,
        head_dim=HEAD_DIM, head_count=HEADS)
    return kvmill.EngineGeometry([kvmill.EngineRegion.of(memory)], [layers])


async def main(address):
    shape = (LAYERS, 2, PAGES, PAGE_TOKENS, HEADS, HEAD_DIM)
    memory = kvmill.SharedMemory(2 * int(np.prod(shape)))  # The daemon reads it in place.
    cache = memory.array(shape, np.float16)
    async with kvmill.AsyncClient(address) as client:
        ns = await client.open_namespace("example-pages", kvmill.NamespaceSpec(
            [kvmill.LayerGroup(range(LAYERS), HEADS, HEAD_DIM)], model="example-model", revision="1",
            hash_scheme="example", block_tokens=BLOCK_TOKENS))
        registration = await client.register_memory(ns, geometry(memory))

        # A prompt of whole blocks, in whichever pages are free.
        random = np.random.default_rng(1)
        pages = [int(page) for page in random.permutation(PAGES)[:BLOCKS * BLOCK_TOKENS // PAGE_TOKENS]]
        each = len(pages) // BLOCKS
        keys = [f"hash of the prompt up to block {b}".encode() for b in range(BLOCKS)]
        blocks = [kvmill.PageBlock(key, [pages[b * each:(b + 1) * each]], parent=keys[b - 1] if b else b"", block_index=b)
                  for b, key in enumerate(keys)]
        # The store begins with the prefill, and reads a layer when that is there.
        store = asyncio.ensure_future(client.store_pages(ns, registration, blocks, request=7, ready_layers=0))
        for layer in range(LAYERS):
            await asyncio.sleep(0)  # Whatever else the loop has to do.
            cache[layer][:, pages] = random.standard_normal((2, len(pages), PAGE_TOKENS, HEADS, HEAD_DIM))
            client.ready_pages(7, layer + 1)
        stored = await store
        for block in stored.blocks:
            if block.error:
                raise block.error
        want = cache[:, :, pages].astype(float).reshape(LAYERS, 2, BLOCKS * BLOCK_TOKENS, HEADS, HEAD_DIM)
        cache[:] = 0  # The pages are free.

        out = np.empty((LAYERS, 2, BLOCKS * BLOCK_TOKENS, HEADS, HEAD_DIM), np.float16)
        into = [[(out[layer, 0, b * BLOCK_TOKENS:(b + 1) * BLOCK_TOKENS], out[layer, 1, b * BLOCK_TOKENS:(b + 1) * BLOCK_TOKENS])
                 for layer in range(LAYERS)] for b in range(BLOCKS)]
        fetched = await client.fetch(ns, keys, into)
        misses = sum(not block.hit for block in fetched.blocks)
        off = np.linalg.norm(out[:, 0] - want[:, 0]) / np.linalg.norm(want[:, 0])
    print(f"stored {stored.blocks_stored} of {BLOCKS} blocks from {len(pages)} pages in place, {misses} misses; "
          f"4-bit keys are off by {100 * off:.1f} %")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        print(f"usage: {sys.argv[0]} ADDRESS, as unix:/run/kvmill/kvmill.sock", file=sys.stderr)
        sys.exit(2)
    try:
        asyncio.run(main(*sys.argv[1:]))
    except kvmill.Error as error:
        sys.exit(f"store_pages: {error}")
