"""From prefill to decode: a prompt's K and V go from one node of a cluster to another while they are computed.

    prefill_decode.py all SOCKET_A SOCKET_B

Two processes, each with the daemon of its own node (kvmilld --cluster etcd://... --listen ..., docs/client.md). One plays an
engine that prefills: it makes a ticket, computes a layer at a time and has its daemon store it. The other one plays the
engine that decodes: it redeems the ticket at its daemon, which brings layers over as they are finished, and attends to the
blocks where its daemon keeps them. Each is also a command of its own, for a node of its own:

    prefill_decode.py prefill SOCKET_A          prints the ticket, and stays until its standard input ends
    prefill_decode.py decode SOCKET_B TICKET

SOCKET_A and SOCKET_B are as unix:/run/kvmill/kvmill.sock. K and V are noise here, of which 2-bit values keep least: attention
is some 50 % off. That of K and V of a small model is 20 % off (deploy/quickstart.sh prints it).
"""
import asyncio
import subprocess
import sys

import numpy as np

import kvmill

LAYERS, HEADS, HEAD_DIM, BLOCK_TOKENS, BLOCKS, TAIL_TOKENS = 4, 4, 64, 64, 6, 23
TOKENS = BLOCKS * BLOCK_TOKENS + TAIL_TOKENS
LAYER_SECONDS = 0.05  # That a layer takes to "compute".
REQUEST = 7
SPEC = kvmill.NamespaceSpec([kvmill.LayerGroup(range(LAYERS), HEADS, HEAD_DIM)], model="example-model", revision="1",
                            hash_scheme="example", block_tokens=BLOCK_TOKENS)


def key(block):
    """What both engines call a block: a hash of its tokens and all before them."""
    return f"hash of the prompt up to block {block}".encode()


def promised():
    """The blocks of the prompt, the last one a tail. Their names are known before anything is computed."""
    return [kvmill.PromisedBlock(key(b), parent=key(b - 1) if b else b"", block_index=b,
                                 token_count=min(BLOCK_TOKENS, TOKENS - b * BLOCK_TOKENS))
            for b in range(BLOCKS + 1)]


def values(layer):
    """K and V of a layer, [k or v, tokens, heads, head_dim]: here noise that both sides can make."""
    return np.random.default_rng(layer).standard_normal((2, TOKENS, HEADS, HEAD_DIM)).astype(np.float16)


def geometry(memory):
    """The engine's cache, [layer, k or v, page, token, head, channel], one page a block."""
    row, page = 2 * HEAD_DIM, 2 * BLOCK_TOKENS * HEADS * HEAD_DIM
    places = [kvmill.EnginePlace(0, i * (BLOCKS + 1) * page) for i in range(2 * LAYERS)]
    return kvmill.EngineGeometry([kvmill.EngineRegion.of(memory)], [kvmill.EngineLayers(
        keys=places[::2], values=places[1::2], page_count=BLOCKS + 1, page_bytes=page, page_stride_bytes=page,
        token_stride_bytes=HEADS * row, head_stride_bytes=row, block_tokens=BLOCK_TOKENS, page_tokens=BLOCK_TOKENS,
        head_dim=HEAD_DIM, head_count=HEADS)])


async def prefill(socket):
    shape = (LAYERS, 2, (BLOCKS + 1) * BLOCK_TOKENS, HEADS, HEAD_DIM)
    memory = kvmill.SharedMemory(2 * int(np.prod(shape)))  # The daemon reads it in place.
    cache = memory.array(shape, np.float16)
    async with kvmill.AsyncClient(socket, timeout=60) as client:
        ns = await client.open_namespace("example-prefill-decode", SPEC)
        await client.clear(ns)  # What an earlier run left here would be no prefill.
        registration = await client.register_memory(ns, geometry(memory))

        # First of all the ticket, so that whatever is stored from now on is held; it travels with the request.
        ticket = await client.create_ticket(ns, promised())
        print(ticket.hex(), flush=True)

        blocks = [kvmill.PageBlock(block.key, [[b]], parent=block.parent, token_count=block.token_count, block_index=b)
                  for b, block in enumerate(promised())]
        store = asyncio.ensure_future(client.store_pages(ns, registration, blocks, request=REQUEST, ready_layers=0))
        for layer in range(LAYERS):
            await asyncio.sleep(LAYER_SECONDS)
            cache[layer, :, :TOKENS] = values(layer)
            client.ready_pages(REQUEST, layer + 1)
        stored = await store
        for block in stored.blocks:
            if block.error:
                raise block.error

        # An engine would go on. The end of its client would be the end of its tickets.
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


async def decode(socket, ticket):
    async with kvmill.AsyncClient(socket, timeout=60) as client:
        ns = await client.open_namespace("example-prefill-decode", SPEC)
        whole_layers = []  # In the order in which they came of every block.

        def progress(blocks, _):
            for layer in range(LAYERS):
                if layer not in whole_layers and all(block.has_layer(layer) for block in blocks):
                    whole_layers.append(layer)

        redeemed = await client.redeem_ticket(ns, ticket, update=progress)
        # However it ended: what is here is here, and the rest of the prompt is computed again.
        hits = [block for block in redeemed.blocks if block.here]
        for block in redeemed.blocks:
            if not block.here:
                print(f"missed block {block.block_index}: {block.miss.name}", file=sys.stderr)
        if redeemed.error:
            print(f"the ticket: {redeemed.error}", file=sys.stderr)
        if len(hits) < BLOCKS + 1:
            return 3

        # Where the daemon keeps them, without a copy.
        worst = 0
        with await client.map(ns, [block.key for block in hits]) as mapped:
            for layer in range(LAYERS):
                query = np.random.default_rng(100 + layer).standard_normal((HEADS, HEAD_DIM)).astype(np.float32)
                output, _ = mapped.attend(layer, query)
                k, v = values(layer).astype(float)
                weights = np.exp(np.einsum("hd,thd->ht", query, k) / np.sqrt(HEAD_DIM))
                want = np.einsum("ht,thd->hd", weights / weights.sum(axis=1, keepdims=True), v)
                worst = max(worst, np.linalg.norm(output - want) / np.linalg.norm(want))
    print(f"redeemed {len(hits)} blocks of {LAYERS} layers, {sum(block.token_count for block in hits)} tokens; layers came in "
          f"the order {whole_layers}; attention over 4-bit keys and 2-bit values of noise is off by {100 * worst:.0f} %")
    return 0


def everything(socket_a, socket_b):
    with subprocess.Popen([sys.executable, __file__, "prefill", socket_a], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True) as producer:
        ticket = producer.stdout.readline().strip()
        if not ticket:
            return producer.wait()
        done = subprocess.run([sys.executable, __file__, "decode", socket_b, ticket], check=False)
        producer.stdin.close()
        return producer.wait() or done.returncode


COMMANDS = {"all": (everything, 2), "prefill": (lambda socket: asyncio.run(prefill(socket)), 1),
            "decode": (lambda socket, ticket: asyncio.run(decode(socket, bytes.fromhex(ticket))), 2)}

if __name__ == "__main__":
    command, *arguments = sys.argv[1:] or [""]
    run, count = COMMANDS.get(command, (None, 0))
    if run is None or len(arguments) != count:
        print(f"usage: {__doc__}", file=sys.stderr)
        sys.exit(2)
    try:
        sys.exit(run(*arguments))
    except (kvmill.Error, ValueError) as error:  # A ticket that is no hex, for example.
        sys.exit(f"prefill_decode: {error}")
