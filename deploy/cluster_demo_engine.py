#!/usr/bin/env python3
"""The engines of deploy/cluster_demo.py: small programs that do with kvmill what an engine's workers do.

    cluster_demo_engine.py prefill SERVER KV     "computes" the K and V of a prompt (KV + "L00_k.npy" and so on) and stores them
    cluster_demo_engine.py decode SERVER KV      pulls them meanwhile; when another line comes: attends to them
    cluster_demo_engine.py fill SERVER KV PROMPTS
    cluster_demo_engine.py load SERVER KV PROMPTS SEED

`prefill` first says a ticket for what it will store, and lives until its input ends; `decode` says that it is ready and reads a ticket
from its input. `fill` and `load` have many prompts whose blocks are those of the file in another order. `load` picks one at random, again and
again until its input ends: looks it up, fetches what is there, compares every byte with what must be there, and stores what is not,
as an engine that recomputes. Each prints lines of JSON. Needs PYTHONPATH=build/release/python.
"""
import concurrent.futures
import glob
import hashlib
import json
import random
import select
import sys
import time

import numpy as np

import kvmill

BLOCK_TOKENS = 128
QUERIES = 4  # Of each KV head.
SECONDS = 20  # Within which a prompt is computed and comes from another node.
PREFILL_SECONDS = 1.0  # That the prompt takes to "compute", all layers the same time.
REQUEST = 1


class Prompt:
    """K and V of the file's prompt, [tokens, heads, head_dim] a layer."""

    def __init__(self, prefix):
        self.layers = [tuple(np.load(path[:-len("k.npy")] + half + ".npy") for half in "kv")
                       for path in sorted(glob.glob(glob.escape(prefix) + "L*_k.npy"))]
        self.tokens, self.heads, self.head_dim = self.layers[0][0].shape
        self.blocks = self.tokens // BLOCK_TOKENS
        self.tail_tokens = self.tokens % BLOCK_TOKENS

    def spec(self):
        return kvmill.NamespaceSpec([kvmill.LayerGroup(range(len(self.layers)), self.heads, self.head_dim)], model="cluster-demo",
                                    revision="1", hash_scheme="demo", source_dtype=kvmill.DType.FLOAT16, block_tokens=BLOCK_TOKENS)

    def values(self, block):
        part = slice(block * BLOCK_TOKENS, min(self.tokens, (block + 1) * BLOCK_TOKENS))
        return [(k[part], v[part]) for k, v in self.layers]


def key_of(prompt, block):
    return hashlib.sha256(f"prompt {prompt} up to block {block}".encode()).digest()


def block_of(data, prompt, block):
    """Of made-up prompts, which block of the file theirs is."""
    return (block + int(prompt)) % data.blocks if prompt != "real" else block


def blocks_of(data, prompt, first=0):
    """To store from block `first` on."""
    return [kvmill.Block(key_of(prompt, b), data.values(block_of(data, prompt, b)), block_index=b,
                         parent=key_of(prompt, b - 1) if b else b"") for b in range(first, data.blocks)]


def say(**fields):
    print(json.dumps(fields), flush=True)


def stored(result):
    for block in result.blocks:
        if block.error:
            raise block.error
    return len(result.blocks)


def promised(data):
    """The blocks of the file's prompt, the last one a tail when it is not whole. Their names are known before their values."""
    return [kvmill.PromisedBlock(key_of("real", b), parent=key_of("real", b - 1) if b else b"", block_index=b,
                                 token_count=min(BLOCK_TOKENS, data.tokens - b * BLOCK_TOKENS))
            for b in range(data.blocks + bool(data.tail_tokens))]


def engine_cache(data, pages):
    """The engine's memory, which the daemon reads in place: [layer, k or v, page, token, head, channel], one page a block."""
    shape = (len(data.layers), 2, pages * BLOCK_TOKENS, data.heads, data.head_dim)
    head_bytes = 2 * data.head_dim
    page_bytes = BLOCK_TOKENS * data.heads * head_bytes
    memory = kvmill.SharedMemory(2 * int(np.prod(shape)))
    places = [kvmill.EnginePlace(0, half * pages * page_bytes) for half in range(2 * len(data.layers))]
    layers = kvmill.EngineLayers(keys=places[::2], values=places[1::2], page_count=pages, page_bytes=page_bytes,
                                 page_stride_bytes=page_bytes, token_stride_bytes=data.heads * head_bytes,
                                 head_stride_bytes=head_bytes, block_tokens=BLOCK_TOKENS, page_tokens=BLOCK_TOKENS,
                                 head_dim=data.head_dim, head_count=data.heads)
    return memory.array(shape, np.float16), kvmill.EngineGeometry([kvmill.EngineRegion.of(memory)], [layers])


def prefill(client, ns, data):
    blocks = promised(data)
    cache, geometry = engine_cache(data, len(blocks))
    registration = client.register_memory(ns, geometry)
    # Before anything is stored, so that all of it is held. An engine sends it along with the request.
    say(ticket=client.create_ticket(ns, blocks).hex(), blocks=len(blocks))
    pages = [kvmill.PageBlock(block.key, [[b]], parent=block.parent, token_count=block.token_count, block_index=b)
             for b, block in enumerate(blocks)]
    computed = []
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        store = thread.submit(client.store_pages, ns, registration, pages, request=REQUEST, ready_layers=0)
        for layer, halves in enumerate(data.layers):
            time.sleep(PREFILL_SECONDS / len(data.layers))
            cache[layer, :, :data.tokens] = halves
            computed.append(time.monotonic())
            client.ready_pages(REQUEST, layer + 1)
        stored(store.result())
    say(computed=computed, stored=time.monotonic())
    sys.stdin.read()  # With its client the ticket would end.


def attention(query, k, v):
    """[queries, head_dim] over [tokens, head_dim], in double."""
    weights = query.astype(float) @ k.astype(float).T / np.sqrt(k.shape[1])
    weights = np.exp(weights - weights.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True) @ v.astype(float)


def redeem(client, ns, data, ticket):
    """The keys of the blocks, all of them here by then, and when each layer had come of all blocks."""
    came = [0.0] * len(data.layers)

    def note(blocks, _):
        for layer, when in enumerate(came):
            if not when and all(block.has_layer(layer) for block in blocks):
                came[layer] = time.monotonic()
    redeemed = client.redeem_ticket(ns, ticket, update=note, timeout=SECONDS)
    if redeemed.error:
        raise redeemed.error
    # An engine would compute them again.
    missed = [f"block {block.block_index}: {block.miss.name}" for block in redeemed.blocks if not block.here]
    if missed:
        sys.exit("missed " + ", ".join(missed))
    return [block.key for block in redeemed.blocks], came


def decode(client, ns, data):
    say(ready=True)
    keys, came = redeem(client, ns, data, bytes.fromhex(sys.stdin.readline()))
    sealed = time.monotonic()
    with client.map(ns, keys) as mapped:
        page_bytes = sum(mapped.page(b, layer).nbytes for b in range(len(keys)) for layer in range(len(came)))
        mapped.verify()
    say(blocks=len(keys), bytes=page_bytes, came=came, sealed=sealed)
    sys.stdin.readline()
    error = norm = 0.0
    with client.map(ns, keys) as mapped:
        tokens = sum(block.token_count for block in mapped.blocks)
        begin = time.monotonic()
        for layer, (k, v) in enumerate(data.layers):
            query = np.random.default_rng(layer).standard_normal((data.heads * QUERIES, data.head_dim)).astype(np.float32)
            output, _ = mapped.attend(layer, query)
            for head in range(data.heads):
                mine = slice(head * QUERIES, (head + 1) * QUERIES)
                want = attention(query[mine], k[:tokens, head], v[:tokens, head])
                error += np.sum((output[mine] - want) ** 2)
                norm += np.sum(want ** 2)
        mapped.check()
    say(tokens=tokens, layers=len(data.layers), output_error=float(np.sqrt(error / norm)), ms=1e3 * (time.monotonic() - begin))


def fill(client, ns, data, prompts):
    say(blocks=sum(stored(client.store(ns, blocks_of(data, str(prompt)))) for prompt in range(int(prompts))))


class Load:
    def __init__(self, client, ns, data, prompts, seed):
        self.client, self.ns, self.data = client, ns, data
        self.prompts, self.random = int(prompts), random.Random(int(seed))
        self.said = {}
        # What the daemon must have of each block of the file: the encoder always gives the same bytes.
        name = f"reference {seed}"
        self.client.store(ns, [kvmill.Block(key_of(name, b), data.values(b), block_index=b, parent=key_of(name, b - 1) if b else b"")
                               for b in range(data.blocks)])
        self.records = self.empty(data.blocks)
        for block in client.fetch_records(ns, [key_of(name, b) for b in range(data.blocks)], self.records).blocks:
            if block.error:
                raise block.error

    def empty(self, blocks):
        return [[bytearray(self.data.heads * self.ns.record_bytes(layer)) for layer in range(len(self.data.layers))]
                for _ in range(blocks)]

    def add(self, name, count=1):
        self.said[name] = self.said.get(name, 0) + count

    def run(self):
        end = time.monotonic() + 1
        while not select.select([sys.stdin], [], [], 0)[0]:
            try:
                self.serve(str(self.random.randrange(self.prompts)))
            except kvmill.Error as error:
                self.add("errors")
                self.said["error"] = str(error)
            if time.monotonic() >= end:
                self.report()
                end = time.monotonic() + 1

    def report(self):
        say(time=time.monotonic(), **{name: self.said.get(name, 0) for name in ("prompts", "hits", "misses", "wrong", "errors")},
            slowest_ms=self.said.get("slowest_ms", 0), error=self.said.get("error", ""))
        self.said = {}

    def serve(self, prompt):
        begin = time.monotonic()
        keys = [key_of(prompt, b) for b in range(self.data.blocks)]
        found = self.client.lookup(self.ns, keys).hit_blocks
        came = 0
        if found:
            out = self.empty(found)
            for b, block in enumerate(self.client.fetch_records(self.ns, keys[:found], out).blocks):
                if block.error and not isinstance(block.error, kvmill.NotFoundError):
                    raise block.error
                if block.error:
                    break
                came += 1
                self.add("wrong", out[b] != self.records[block_of(self.data, prompt, b)])
        self.said["slowest_ms"] = max(self.said.get("slowest_ms", 0), 1e3 * (time.monotonic() - begin))
        self.add("prompts")
        self.add("hits", came)
        self.add("misses", self.data.blocks - came)
        if came < self.data.blocks:
            stored(self.client.store(self.ns, blocks_of(self.data, prompt, came)))


def main():
    command, server, kv, *more = sys.argv[1:]
    data = Prompt(kv)
    with kvmill.Client(server, timeout=20) as client:
        ns = client.open_namespace("cluster-demo", data.spec())
        if command == "load":
            Load(client, ns, data, *more).run()
        else:
            {"prefill": prefill, "decode": decode, "fill": fill}[command](client, ns, data, *more)


if __name__ == "__main__":
    try:
        main()
    except kvmill.Error as problem:
        sys.exit(f"cluster_demo_engine {sys.argv[1]}: {problem}")
