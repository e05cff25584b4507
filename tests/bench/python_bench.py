#!/usr/bin/env python3
"""What the Python package costs beside the calls themselves: PYTHONPATH=build/release/python python_bench.py ADDRESS

Latency of an empty call, blocking and in asyncio; the part of a fetch into 512 arrays that holds the GIL; fetches.
"""
import asyncio
import sys
import time

import numpy as np

import kvmill
from kvmill import _calls, _native

BLOCKS, LAYERS = 8, 32


def timed(call, count):
    """Median of wall time, and of this thread's processor time, in microseconds."""
    wall, processor = [], []
    for _ in range(count):
        begin, processor_begin = time.perf_counter(), time.thread_time()
        call()
        processor.append(time.thread_time() - processor_begin)
        wall.append(time.perf_counter() - begin)
    return 1e6 * np.median(wall), 1e6 * np.median(processor)


def show(what, wall, processor):
    print(f"{what:<42} {wall:9.0f} us {processor:9.0f} us of the calling thread")


async def awaited(address):
    async with kvmill.AsyncClient(address) as client:
        await client.stat()
        wall = []
        for _ in range(2000):
            begin = time.perf_counter()
            await client.stat()
            wall.append(time.perf_counter() - begin)
    return 1e6 * np.median(wall)


def main(address):
    with kvmill.Client(address) as client:
        client.stat()
        show("stat, blocking", *timed(client.stat, 2000))
        print(f"{'stat, asyncio':<42} {asyncio.run(awaited(address)):9.0f} us")
        spec = kvmill.NamespaceSpec([kvmill.LayerGroup(range(LAYERS), 8, 128)], model="bench")
        ns = client.open_namespace("python-bench", spec)
        k, v = np.random.default_rng(1).standard_normal((2, 128, 8, 128)).astype(np.float16)
        keys = [b"block %d" % i for i in range(BLOCKS)]
        client.store(ns, [kvmill.Block(key, [(k, v)] * LAYERS) for key in keys], timeout=60)
        out = ns.empty(BLOCKS)
        queue = _native.Queue()

        def start():
            call = _calls.fetch(client._native, ns, keys, out, _calls.VALUES16,  # pylint: disable=protected-access
                                kvmill.Frame.MODEL, 0, 0, 60)
            call.start(queue)

        starts = []
        for _ in range(20):
            starts.append(timed(start, 1))
            assert queue.take(-1)[1] == kvmill.Code.OK
        show(f"start of a fetch into {2 * BLOCKS * LAYERS} arrays", *np.median(starts, axis=0))
        show(f"that fetch, decoded ({k.nbytes * 2 * BLOCKS * LAYERS >> 20} MiB of fp16)",
             *timed(lambda: client.fetch(ns, keys, out), 20))
        pages = [[bytearray(ns.page_bytes_max(layer)) for layer in range(LAYERS)] for _ in keys]
        show("the same as pages", *timed(lambda: client.fetch_pages(ns, keys, pages), 20))


if __name__ == "__main__":
    main(*sys.argv[1:])
