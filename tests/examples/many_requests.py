"""Many requests in flight in one asyncio loop, out of and into a paged cache: many_requests.py ADDRESS"""
import asyncio
import hashlib
import sys

import numpy as np

import kvmill

LAYERS, HEADS, HEAD_DIM, BLOCK_TOKENS, PAGE_TOKENS, REQUESTS, BLOCKS = 2, 4, 64, 64, 16, 8, 3
PAGES_PER_BLOCK = BLOCK_TOKENS // PAGE_TOKENS


class Engine:
    """K and V of each layer in pages of 16 tokens, as engines keep them, and a table of free pages."""

    def __init__(self):
        shape = (2, LAYERS, 2 * REQUESTS * BLOCKS * PAGES_PER_BLOCK, PAGE_TOKENS, HEADS, HEAD_DIM)
        self.k, self.v = np.zeros(shape, np.float16)
        self.free = list(np.random.default_rng(1).permutation(shape[2]))

    def pages(self):
        return [int(self.free.pop()) for _ in range(PAGES_PER_BLOCK)]

    def layers(self, pages):
        """A block in these pages: per layer (k, v)."""
        return [(kvmill.Paged(self.k[layer], pages), kvmill.Paged(self.v[layer], pages)) for layer in range(LAYERS)]


async def request(client, ns, engine, number):
    """Prefills a prompt and stores it; then, as if another request had the same prompt, fetches it into other pages."""
    random = np.random.default_rng(number)
    keys = [hashlib.sha256(f"prompt {number}, block {b}".encode()).digest() for b in range(BLOCKS)]
    written = [engine.pages() for _ in keys]
    for pages in written:
        for cache in (engine.k, engine.v):
            cache[:, pages] = random.standard_normal((LAYERS, len(pages), PAGE_TOKENS, HEADS, HEAD_DIM))
    blocks = [kvmill.Block(key, engine.layers(pages), parent=keys[b - 1] if b else b"", block_index=b)
              for b, (key, pages) in enumerate(zip(keys, written))]
    for block in (await client.store(ns, blocks)).blocks:
        if block.error:
            raise block.error

    found = await client.lookup(ns, keys)
    read = [engine.pages() for _ in range(found.hit_blocks)]
    fetched = await client.fetch(ns, keys[:found.hit_blocks], [engine.layers(pages) for pages in read])
    misses = [b for b, block in enumerate(fetched.blocks) if not block.hit]  # Computed again by an engine.
    want, got = (engine.k[:, pages].astype(float) for pages in (written[:found.hit_blocks], read))
    return found.hit_blocks - len(misses), np.linalg.norm(got - want) / np.linalg.norm(want)


async def main(address):
    async with kvmill.AsyncClient(address) as client:
        ns = await client.open_namespace("example-async", kvmill.NamespaceSpec(
            [kvmill.LayerGroup(range(LAYERS), HEADS, HEAD_DIM)], model="example-model", revision="1",
            hash_scheme="example", block_tokens=BLOCK_TOKENS))
        engine = Engine()
        results = await asyncio.gather(*(request(client, ns, engine, number) for number in range(REQUESTS)))
    hits, errors = zip(*results)
    print(f"{REQUESTS} requests, {sum(hits)} of {REQUESTS * BLOCKS} blocks fetched; 4-bit keys are off by at most "
          f"{100 * max(errors):.1f} %")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        print(f"usage: {sys.argv[0]} ADDRESS, as unix:/run/kvmill/kvmill.sock", file=sys.stderr)
        sys.exit(2)
    try:
        asyncio.run(main(*sys.argv[1:]))
    except kvmill.Error as error:
        sys.exit(f"many_requests: {error}")
