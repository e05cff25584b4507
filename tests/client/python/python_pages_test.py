#!/usr/bin/env python3
"""Stores from an engine's own pages, and blocks on a GPU, for which host memory stands in (ctest `python_pages_test`):
python_pages_test.py --bin-dir DIR --source-dir DIR, with PYTHONPATH=build/release/python."""
import asyncio
import ctypes
import gc
import os
import pickle
import threading
import weakref

import numpy as np

import kvmill
from python_support import HEAD_DIM, HEADS, LAYERS, TOKENS, Case, cli_support, gaussian

PAGE_TOKENS, PAGES = 16, 8
PAGE_BYTES = 2 * PAGE_TOKENS * HEADS * HEAD_DIM
SHAPE = (LAYERS, 2, PAGES, PAGE_TOKENS, HEADS, HEAD_DIM)
NUMBERS = [6, 0, 3, 7]  # Of the block's pages.


def geometry(region, **fields):
    places = [kvmill.EnginePlace(0, i * PAGES * PAGE_BYTES) for i in range(2 * LAYERS)]
    layers = {"keys": places[::2], "values": places[1::2], "page_count": PAGES, "page_bytes": PAGE_BYTES,
              "page_stride_bytes": PAGE_BYTES, "token_stride_bytes": 2 * HEADS * HEAD_DIM, "head_stride_bytes": 2 * HEAD_DIM,
              "block_tokens": TOKENS, "page_tokens": PAGE_TOKENS, "head_dim": HEAD_DIM, "head_count": HEADS, **fields}
    return kvmill.EngineGeometry([region], [kvmill.EngineLayers(**layers)])


def fill(cache, layers, which=range(LAYERS)):
    for layer in which:
        for half in range(2):
            cache[layer, half, NUMBERS] = layers[layer][half].reshape(-1, PAGE_TOKENS, HEADS, HEAD_DIM)


class PagesTest(Case):
    def setUp(self):
        super().setUp()
        self.memory = kvmill.SharedMemory(4096 + 2 * int(np.prod(SHAPE)))
        self.cache = self.memory.array(SHAPE, np.float16, 4096)
        self.region = kvmill.EngineRegion.of(self.memory, 4096)

    def pages_of(self, ns, key):
        """Records of each layer; None for a miss."""
        out = [[bytearray(HEADS * ns.record_bytes(layer)) for layer in range(LAYERS)]]
        block = self.client.fetch_records(ns, [key], out).blocks[0]
        return out[0] if block.hit else None

    def want(self, ns, key, layers):
        """What a store by copy makes of it; then it is gone again."""
        self.put(ns, key, layers)
        want = self.pages_of(ns, key)
        self.client.clear(ns)
        self.assertIsNone(self.pages_of(ns, key))
        return want

    def test_pages_become_the_bytes_that_a_copy_becomes(self):
        ns = self.open()
        layers = gaussian(3)
        want = self.want(ns, b"key", layers)
        registration = self.client.register_memory(ns, geometry(self.region))
        fill(self.cache, layers)
        stored = self.client.store_pages(ns, registration, [kvmill.PageBlock(b"key", [NUMBERS])])
        self.assertEqual((stored.blocks_stored, stored.blocks[0].error), (1, None))
        self.assertEqual(self.pages_of(ns, b"key"), want)
        again = self.client.store_pages(ns, registration, [kvmill.PageBlock(b"key", [np.array(NUMBERS)])])
        self.assertEqual(again.blocks[0].outcome, kvmill.Outcome.EXISTING)
        self.assertIsNone(self.client.unregister_memory(registration))
        with self.assertRaises(kvmill.NotFoundError):
            self.client.store_pages(ns, registration, [kvmill.PageBlock(b"key", [NUMBERS])])

    def test_layers_are_read_when_they_are_ready(self):
        ns = self.open()
        layers = gaussian(4)
        want = self.want(ns, b"key", layers)
        registration = self.client.register_memory(ns, geometry(self.region))
        self.cache[:] = np.nan
        results = []
        thread = threading.Thread(target=lambda: results.append(self.client.store_pages(
            ns, registration, [kvmill.PageBlock(b"key", [NUMBERS])], request=5, ready_layers=0)))
        thread.start()
        for layer in range(LAYERS):
            thread.join(0.03)
            self.assertTrue(thread.is_alive())
            fill(self.cache, layers, [layer])
            self.client.ready_pages(5, layer + 1)
        thread.join(60)
        self.assertIsNone(results[0].blocks[0].error)
        self.assertEqual(self.pages_of(ns, b"key"), want)

    def test_what_is_flushed_or_cancelled_is_free(self):
        ns = self.open()
        fill(self.cache, gaussian(5))

        async def run():
            async with kvmill.AsyncClient(self.daemon.server, timeout=60) as client:
                registration = await client.register_memory(ns, geometry(self.region))
                for by, give_up in (("FlushPages", lambda: client.flush_pages(1)),
                                    ("FlushPages", lambda: client.flush_blocks([b"unready"])),
                                    ("CancelPages", lambda: client.cancel_pages(1))):
                    store = asyncio.ensure_future(client.store_pages(
                        ns, registration, [kvmill.PageBlock(b"unready", [NUMBERS])], request=1, ready_layers=1))
                    await asyncio.sleep(0.02)
                    self.assertFalse(store.done())
                    self.assertIsNone(await give_up())
                    block = (await store).blocks[0]
                    self.assertEqual(block.outcome, kvmill.Outcome.FAILED)
                    self.assertIsInstance(block.error, kvmill.CallCancelledError)
                    self.assertIn(by, block.error.message)
                self.assertIsNone(await client.cancel_pages(99))  # None of that name.
                ready = asyncio.ensure_future(client.store_pages(
                    ns, registration, [kvmill.PageBlock(b"ready", [NUMBERS])], request=2))
                await asyncio.sleep(0)
                await client.flush_pages(2)
                self.assertIsNone((await ready).blocks[0].error)

        asyncio.run(run())
        self.assertIsNone(self.pages_of(ns, b"unready"))
        self.assertIsNotNone(self.pages_of(ns, b"ready"))

    def test_memory_lives_as_long_as_somebody_shows_it(self):
        cache = kvmill.SharedMemory(8192).array((4096,), np.uint16)  # The object itself is dropped.
        gc.collect()
        cache[:] = 7
        self.assertEqual(int(cache.sum()), 7 * 4096)
        view = memoryview(self.memory._native)  # pylint: disable=protected-access
        self.assertFalse(view.readonly)
        self.assertEqual((len(view), self.memory.bytes % 4096), (self.memory.bytes, 0))
        self.assertEqual(self.cache.ctypes.data, self.memory.address + 4096)
        self.assertGreaterEqual(os.fstat(self.memory.fd).st_size, self.memory.bytes)
        with self.assertRaises((TypeError, ValueError)):
            self.memory.array((self.memory.bytes,), np.uint8, 1)
        with self.assertRaises(TypeError):
            pickle.dumps(self.memory)
        with self.assertRaisesRegex(ValueError, "of 0 bytes"):
            kvmill.SharedMemory(0)
        with self.assertRaisesRegex(ValueError, "bytes -1"):
            kvmill.SharedMemory(-1)

    def test_a_registration_in_flight_keeps_its_memory(self):
        ns = self.open()

        async def run():
            async with kvmill.AsyncClient(self.daemon.server, timeout=60) as client:
                with self.stopped():
                    memory = kvmill.SharedMemory(4096 + 2 * int(np.prod(SHAPE)))
                    fd = memory.fd
                    kept = weakref.ref(memory._native)  # pylint: disable=protected-access
                    task = asyncio.ensure_future(client.register_memory(ns, geometry(kvmill.EngineRegion.of(memory, 4096))))
                    await asyncio.sleep(0.01)
                    task.cancel()
                    with self.assertRaises(asyncio.CancelledError):
                        await task
                    del memory, task
                    gc.collect()
                    self.assertIsNotNone(kept())
                    os.fstat(fd)
                for _ in range(1000):
                    gc.collect()
                    if kept() is None:
                        return
                    await asyncio.sleep(0.01)
                self.fail("the memory is never let go of")

        asyncio.run(run())

    def test_what_is_wrong_is_named(self):
        ns = self.open()
        registration = self.client.register_memory(ns, geometry(self.region))

        def store(pages, **fields):
            return self.client.store_pages(ns, registration, [kvmill.PageBlock(b"key", pages)], **fields)

        with self.assertRaisesRegex(kvmill.InvalidArgumentError, "block 0: group_count 2, the namespace has 1"):
            store([NUMBERS, []])
        with self.assertRaisesRegex(kvmill.InvalidArgumentError, "3 pages, want 4 for 64 tokens"):
            store([NUMBERS[1:]])
        with self.assertRaisesRegex(ValueError, "page -1, want 0 to"):
            store([[-1, 0, 1, 2]])
        with self.assertRaisesRegex(ValueError, "ready_layers -1"):
            store([NUMBERS], ready_layers=-1)
        error = store([[0, 1, 2, PAGES]]).blocks[0].error
        self.assertIsInstance(error, kvmill.InvalidArgumentError)
        self.assertIn(f"page number {PAGES}, want below {PAGES}", str(error))
        with self.assertRaisesRegex(TypeError, "is not a SharedMemory"):
            self.client.register_memory(ns, geometry(kvmill.EngineRegion(0x10000, 1 << 20, bytearray(10))))
        handle = kvmill.DeviceHandle(bytes(64), 1 << 20)
        with self.assertRaisesRegex(ValueError, "in one of them"):
            self.client.register_memory(ns, geometry(kvmill.EngineRegion(0x10000, 1 << 20, self.memory, 0, handle)))
        with self.assertRaisesRegex(kvmill.InvalidArgumentError, "handle of 3 bytes, want 64"):
            self.client.register_memory(
                ns, geometry(kvmill.EngineRegion(0x10000, 1 << 20, device=kvmill.DeviceHandle(b"abc", 1 << 20))))
        with self.assertRaisesRegex(kvmill.FailedPreconditionError, "is memory of a GPU"):
            self.client.register_memory(ns, geometry(kvmill.EngineRegion(0x10000, 1 << 20, device=handle)))


class DeviceTest(Case):
    @classmethod
    def setUpClass(cls):
        cls.daemon = cli_support.Daemon("--device", "host", "--gpu-bytes", "64MiB")
        cls.addClassCleanup(cls.daemon.remove)
        cls.addClassCleanup(cls.daemon.stop)

    def test_without_a_device_that_is_said(self):
        with self.assertRaisesRegex(kvmill.UnavailableError, "device cuda:63: "):
            kvmill.Client(self.daemon.server, device="cuda:63")
        with self.assertRaisesRegex(kvmill.InvalidArgumentError, "device nonsense: "):
            kvmill.Client(self.daemon.server, device="nonsense")
        ns = self.open()
        self.assertIsNone(self.client.device)
        for memory in (kvmill.MapMemory.IN_PLACE, kvmill.MapMemory.GPU):
            with self.assertRaises(kvmill.FailedPreconditionError):
                self.client.map(ns, [b"key"], memory=memory)
        with self.assertRaisesRegex(kvmill.FailedPreconditionError, "has no device"):
            self.client.export_memory(0x10000, 4096)

    def test_blocks_on_the_gpu_are_addresses_of_the_device(self):
        ns = self.open()
        self.put(ns, b"key", gaussian(6))
        records = [[bytearray(HEADS * ns.record_bytes(layer)) for layer in range(LAYERS)]]
        self.assertTrue(self.client.fetch_records(ns, [b"key"], records).blocks[0].hit)
        with kvmill.Client(self.daemon.server, timeout=60, device="host") as client:
            with self.assertRaisesRegex(kvmill.InvalidArgumentError, "not within memory"):
                client.export_memory(np.zeros(4096, np.uint8).ctypes.data, 4096)
            with client.map(ns, [b"key"], memory=kvmill.MapMemory.GPU, lease=30) as mapped:
                self.assertEqual(mapped.memory(0, 1), kvmill.Tier.GPU)
                for layer in range(LAYERS):
                    heads = mapped.heads(0, layer)
                    self.assertTrue(all(isinstance(head.data, kvmill.DeviceArray) for head in heads))
                    # The device's memory is this host's.
                    self.assertEqual(b"".join(ctypes.string_at(head.data.address, head.data.nbytes) for head in heads),
                                     records[0][layer])
                    self.assertFalse(hasattr(heads[0].data, "__cuda_array_interface__"))  # It is no GPU.
                page = mapped.page(0, 0)
                self.assertGreater(page.nbytes, len(records[0][0]))
                mapped.check()
                mapped.verify()
                with self.assertRaisesRegex(kvmill.FailedPreconditionError, "block 0 is on the GPU"):
                    mapped.attend(0, np.ones((HEADS, HEAD_DIM), np.float32))
            with self.assertRaises(kvmill.AbortedError):
                mapped.memory(0, 0)
            with client.map(ns, [b"key"]) as copy:  # In host memory it is as ever.
                self.assertEqual(copy.memory(0, 0), kvmill.Tier.HOST)
                self.assertEqual(bytes(copy.heads(0, 0)[0].data), bytes(records[0][0][:ns.record_bytes(0)]))
        as_cuda = kvmill.DeviceArray(page._memory, True).__cuda_array_interface__  # pylint: disable=protected-access
        self.assertEqual(as_cuda, {"shape": (page.nbytes,), "typestr": "|u1", "data": (page.address, True), "strides": None,
                                   "version": 3})


if __name__ == "__main__":
    cli_support.main()
