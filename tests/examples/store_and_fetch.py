"""Stores one block of K and V, looks it up and fetches it back: store_and_fetch.py ADDRESS"""
import sys

import numpy as np

import kvmill


def main(address):
    with kvmill.Client(address) as client:  # unix:/run/kvmill/kvmill.sock
        # What must be equal before bytes may be reused. Two layers, 8 KV heads, head_dim 128.
        spec = kvmill.NamespaceSpec([kvmill.LayerGroup(layers=[0, 1], kv_heads=8, head_dim=128)],
                                    model="example-model", revision="1",
                                    hash_scheme="example")  # How the key below is made.
        ns = client.open_namespace("example-python", spec)

        # The engine's memory: K and V of each layer, fp16 [128 tokens, 8, 128]. Here made-up waves.
        i = np.arange(4 * 128 * 8 * 128)
        kv = np.sin(0.37 * (i * i % 10007)).astype(np.float16).reshape(-1, 4).T.reshape(4, 128, 8, 128).copy()

        # Store. The arrays are read in place.
        key = b"hash of all tokens up to here, in Python"
        stored = client.store(ns, [kvmill.Block(key, layers=[(kv[0], kv[1]), (kv[2], kv[3])])])
        if stored.blocks[0].error:
            raise stored.blocks[0].error

        # Another request with the same prefix: how much of it is there?
        found = client.lookup(ns, [key])

        # Fetch, decoded on the way into the engine's memory: per key, per layer (k, v).
        out = np.empty_like(kv)
        fetched = client.fetch(ns, [key], [[(out[0], out[1]), (out[2], out[3])]]).blocks[0]
        if not fetched.hit:
            return 3  # A miss: the engine computes K and V itself.

    off = np.linalg.norm(out[0].astype(float) - kv[0]) / np.linalg.norm(kv[0].astype(float))
    print(f"stored {stored.blocks_stored}, found {found.hit_blocks}, fetched {fetched.token_count} tokens; "
          f"4-bit keys are off by {100 * off:.1f} %")
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        print(f"usage: {sys.argv[0]} ADDRESS, as unix:/run/kvmill/kvmill.sock", file=sys.stderr)
        sys.exit(2)
    try:
        sys.exit(main(*sys.argv[1:]))
    except kvmill.Error as error:
        sys.exit(f"store_and_fetch: {error}")
