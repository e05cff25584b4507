#!/usr/bin/env python3
"""The Python package: blocks in place, what a session says (ctest `python_map_test`):
python_map_test.py --bin-dir DIR --source-dir DIR, with PYTHONPATH=build/release/python."""
import asyncio
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import numpy as np

import kvmill
from python_support import HEAD_DIM, HEADS, KEYS, LAYERS, TOKENS, Case, MapCase, cli_support, gaussian, spec

# Maps a block, looks at it, says so, and looks again when it was told to.
READER = """
import sys, kvmill
with kvmill.Client(sys.argv[1]) as client:
    ns = client.find_namespace(sys.argv[2])
    for attempt in range(20):  # A machine that stands still may let a lease end before the first look.
        mapped = client.map(ns, [b"block 0"], lease=1)
        try:
            page = mapped.page(0, 0)
            break
        except kvmill.AbortedError:
            pass
    first = page.tobytes()
    print("mapped", flush=True)
    sys.stdin.readline()
    same = page.tobytes() == first
    for method in (mapped.check, lambda: mapped.page(0, 0), lambda: mapped.heads(0, 0), mapped.verify,
                   lambda: mapped.renew(1)):
        try:
            method()
            print("no error")
        except kvmill.AbortedError:
            print("aborted")
    print("the same" if same else "other bytes")
"""


class MapTest(MapCase):
    def test_pages_and_heads_are_what_a_fetch_brings(self):
        ns = self.fill(sink_blocks=1)
        pages = [[np.zeros(ns.page_bytes_max(layer), np.uint8) for layer in range(LAYERS)] for _ in KEYS]
        fetched = self.client.fetch_pages(ns, KEYS, pages).blocks
        out = ns.empty(1)
        self.client.fetch(ns, KEYS[:1], out)
        with self.client.map(ns, [*KEYS, b"missing"], lease=30) as mapped:
            self.assertEqual(len(mapped), 4)
            self.assertEqual([block.hit for block in mapped.blocks], [True] * 3 + [False])
            self.assertEqual((mapped.blocks[0].tier, mapped.blocks[0].token_count), (kvmill.Tier.HOST, TOKENS))
            self.assertIsInstance(mapped.blocks[3].error, kvmill.NotFoundError)
            self.assertIs(mapped.namespace, ns)
            self.assertTrue(1 < mapped.seconds_left <= 30)
            for block in range(3):
                for layer in range(LAYERS):
                    page = mapped.page(block, layer)
                    np.testing.assert_array_equal(page, pages[block][layer][:fetched[block].page_bytes[layer]])
                    self.assertFalse(page.flags.writeable)
                    with self.assertRaises(ValueError):
                        page.flags.writeable = True
                    heads = mapped.heads(block, layer)
                    self.assertEqual([head.kind for head in heads],
                                     [kvmill.HeadKind.TILE if block else kvmill.HeadKind.RAW] * HEADS)
                    for number, head in enumerate(heads):
                        self.assertTrue(np.may_share_memory(head.data, page))
                        self.assertEqual(head.tokens, TOKENS)
                        if block:
                            self.assertEqual((head.data.size, head.k), (ns.record_bytes(layer), None))
                        else:
                            np.testing.assert_array_equal(head.k, out[0][layer][0][:, number])
                            np.testing.assert_array_equal(head.v, out[0][layer][1][:, number])
            with self.assertRaises(kvmill.NotFoundError):
                mapped.page(3, 0)
            mapped.check()
            mapped.check(1, 2)
            mapped.verify()
            self.assertEqual(self.client.stat().leases, 3)
            self.assertEqual(self.client.touch(ns, [*KEYS, b"missing"]), 3)
        self.wait_for_leases(0)

    def test_memory_goes_to_dlpack_without_a_copy(self):
        ns = self.fill(sink_blocks=1)
        with self.client.map(ns, KEYS) as mapped:
            page = mapped.page(1, 0)
            there = np.from_dlpack(kvmill.DLPack(page, None, read_only=True))
            self.assertEqual((there.dtype, there.ctypes.data), (np.uint8, page.ctypes.data))
            k = mapped.heads(0, 0)[1].k
            there = np.from_dlpack(kvmill.DLPack(k, kvmill.DType.FLOAT16, read_only=True))
            self.assertEqual((there.dtype, there.shape, there.ctypes.data), (np.float16, k.shape, k.ctypes.data))
            for read_only, dtype in ((False, None), (True, kvmill.DType.FLOAT16)):
                with self.assertRaises((kvmill.InvalidArgumentError, BufferError, ValueError)):
                    kvmill.DLPack(page, dtype, read_only=read_only).__dlpack__()

    def test_wrong_arguments_are_named(self):
        ns = self.fill()
        mapped = self.client.map(ns, KEYS)
        for call, text in ((lambda: mapped.page(3, 0), "block 3 of 3"), (lambda: mapped.page(0, LAYERS), "layer 2 of 2"),
                           (lambda: mapped.page(-1, 0), "block -1, want 0 to"),
                           (lambda: mapped.heads(0, 2 ** 64), "layer 18446744073709551616, want 0 to"),
                           (lambda: mapped.heads(0, 5), "layer 5 of 2"), (lambda: mapped.check(4), "block 4 of 3"),
                           (lambda: mapped.check(0, 4), "4 blocks"), (lambda: mapped.check(-1), "first -1, want 0 to")):
            with self.assertRaisesRegex(ValueError, text):
                call()
        for lease in (0, -1, float("nan"), 2 ** 41):
            with self.assertRaisesRegex(ValueError, "lease"):
                self.client.map(ns, KEYS, lease=lease)
            with self.assertRaisesRegex(ValueError, "lease"):
                mapped.renew(lease)
        for call in (lambda: self.client.map(ns, KEYS, lease="5"), lambda: mapped.renew("5")):
            with self.assertRaisesRegex(TypeError, "lease: a str, want a number of seconds"):
                call()
        with self.assertRaisesRegex(TypeError, "timeout: a list, want a number of seconds"):
            self.client.lookup(ns, KEYS, timeout=[1])
        with self.assertRaisesRegex(kvmill.InvalidArgumentError, "lease of 3600000 ms, want 1 to 60000"):
            self.client.map(ns, KEYS, lease=3600)
        with self.assertRaises(TypeError):
            mapped.page("0", 0)
        with self.assertRaises(TypeError):
            self.client.renew(None)
        with self.assertRaises(TypeError):
            pickle.dumps(mapped)
        with kvmill.Client(self.daemon.server) as other:
            with self.assertRaises(kvmill.InvalidArgumentError):
                other.renew(mapped)
        mapped.check()

    def test_integers_out_of_range_are_value_errors_that_name_the_limit(self):
        ns = self.open()
        layers, huge = gaussian(1), 10 ** 5000
        group = kvmill.LayerGroup([0], HEADS, HEAD_DIM)
        calls = [
            (lambda n: self.client.store(ns, [kvmill.Block(b"k", layers, token_count=n)]), "token_count", 2 ** 32 - 1),
            (lambda n: self.client.store(ns, [kvmill.Block(b"k", layers, block_index=n)]), "block_index", 2 ** 32 - 1),
            (lambda n: self.client.store(ns, [kvmill.Block(b"k", layers)], head_begin=n), "head_begin", 2 ** 32 - 1),
            (lambda n: self.client.fetch(ns, [b"k"], [layers], head_count=n), "head_count", 2 ** 32 - 1),
            (lambda n: self.open(key_bits=n), "key_bits", 2 ** 32 - 1),
            (lambda n: self.open(sink_blocks=n), "sink_blocks", 2 ** 32 - 1),
            (lambda n: self.open(groups=[kvmill.LayerGroup([n], 1, 64)]), "layer", 2 ** 16 - 1),
            (lambda n: self.open(groups=[kvmill.LayerGroup([0], n, 64)]), "kv_heads", 2 ** 32 - 1),
            (lambda n: self.open(groups=[kvmill.LayerGroup([0], 1, n)]), "head_dim", 2 ** 32 - 1),
            (lambda n: self.open(groups=[kvmill.LayerGroup([0], 1, 64, window_tokens=n), group]), "window_tokens",
             2 ** 32 - 1),
            (lambda n: kvmill.Client(self.daemon.server, encode_threads=n), "encode_threads", 2 ** 32 - 1),
            (lambda n: kvmill.Client(self.daemon.server, path=n), "path", 2 ** 32 - 1),
            (self.client.unregister_memory, "registration", 2 ** 64 - 1),
            (ns.record_bytes, "layer", 2 ** 64 - 1),
            (ns.page_bytes_max, "layer", 2 ** 64 - 1),
        ]
        for call, name, most in calls:
            for wrong in (-1, most + 1, huge):
                with self.assertRaisesRegex(ValueError, f"{name} .*, want 0 to {most}"):
                    call(wrong)
            # Texts are no numbers; a path can be named by one.
            with self.assertRaises(ValueError if name == "path" else TypeError):
                call("1")
        with self.assertRaisesRegex(ValueError, "encode_threads 1025, at most 1024"):
            kvmill.Client(self.daemon.server, encode_threads=1025)
        cache = np.zeros((4, 16, HEADS, HEAD_DIM), np.float16)
        paged = [(kvmill.Paged(cache, [0, 1, 2, 2 ** 70]), layers[0][1])] * LAYERS
        with self.assertRaisesRegex(ValueError, "page 1180591620717411303424, want -9223372036854775808 to"):
            self.client.store(ns, [kvmill.Block(b"k", paged)])


class LeaseTest(MapCase):
    def test_views_outlive_everything_but_count_for_nothing(self):
        ns = self.fill()
        client = kvmill.Client(self.daemon.server)
        mapped = client.map(ns, KEYS)
        page, head = mapped.page(0, 0), mapped.heads(1, 1)[0].data
        kept = page.tobytes(), head.tobytes()
        mapped.release()
        mapped.release()
        self.wait_for_leases(0)
        self.assertEqual(mapped.seconds_left, 0)
        for method in (mapped.check, mapped.verify, lambda: mapped.page(0, 0), lambda: mapped.heads(0, 0), mapped.renew,
                       lambda: mapped.attend(0, np.zeros((HEADS, HEAD_DIM), np.float32))):
            with self.assertRaisesRegex(kvmill.AbortedError, "given back"):
                method()
        self.assertEqual((page.tobytes(), head.tobytes()), kept, "nobody needed the memory yet")
        del mapped
        gc.collect()
        client.close()
        self.assertEqual((page.tobytes(), head.tobytes()), kept)

    def test_a_client_that_is_closed_takes_its_leases_along(self):
        ns = self.fill()
        client = kvmill.Client(self.daemon.server)
        mapped = client.map(ns, KEYS)
        mapped.check()
        client.close()
        with self.assertRaises(kvmill.AbortedError):
            mapped.check()
        with self.assertRaises(kvmill.FailedPreconditionError):
            mapped.renew()
        mapped.release()
        self.wait_for_leases(0)
        # And one that nobody else has lives as long as its blocks.
        mapped = kvmill.Client(self.daemon.server).map(ns, KEYS)
        gc.collect()
        mapped.check()
        del mapped
        gc.collect()
        self.wait_for_leases(0)

    def test_renewing_moves_the_end(self):
        ns = self.fill()
        short = self.client.map(ns, KEYS, lease=0.2)
        for attempt in range(50):  # A machine that stands still may let a lease end before it is renewed.
            renewed = self.client.map(ns, KEYS, lease=0.2)
            try:
                self.assertIsNone(self.client.renew(renewed, 30))
                break
            except kvmill.AbortedError:
                self.assertLess(attempt, 49)
        self.assertIsNone(renewed.renew(30))
        time.sleep(0.21)
        with self.assertRaisesRegex(kvmill.AbortedError, "ended"):
            short.check()
        with self.assertRaises(kvmill.AbortedError):
            short.renew()
        renewed.check()
        self.assertGreater(renewed.seconds_left, 10)

    def test_a_reader_that_was_stopped_past_its_lease_gets_an_error(self):
        ns = self.fill()
        reader = subprocess.Popen([sys.executable, "-c", READER, self.daemon.server, ns.name], stdin=subprocess.PIPE,
                                  stdout=subprocess.PIPE, text=True)
        try:
            self.assertEqual(reader.stdout.readline(), "mapped\n")
            reader.send_signal(signal.SIGSTOP)
            time.sleep(1.1)
            self.client.remove(ns, KEYS)
            other = self.client.open_namespace(self.id() + "-other", spec(revision="another"))
            for i in range(8):  # One of them gets the memory.
                self.put(other, b"%d" % i, gaussian(100 + i))
            reader.send_signal(signal.SIGCONT)
            said, _ = reader.communicate("look\n", timeout=60)
        finally:
            reader.kill()
            reader.communicate()
        self.assertEqual(said.splitlines()[:5], ["aborted"] * 5)

    def test_in_a_child_of_fork_there_is_nothing(self):
        ns = self.fill()
        mapped = self.client.map(ns, KEYS)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            said = []
            for method in (mapped.check, lambda: mapped.page(0, 0), lambda: mapped.heads(0, 0), mapped.renew,
                           lambda: mapped.attend(0, np.zeros((HEADS, HEAD_DIM), np.float32)), self.client.session_event):
                try:
                    method()
                    said.append("nothing")
                except kvmill.FailedPreconditionError:
                    said.append("refused")
            mapped.release()
            os.write(write, " ".join(said).encode())
            os._exit(0)  # pylint: disable=protected-access
        os.close(write)
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        with os.fdopen(read) as pipe:
            self.assertEqual(pipe.read(), " ".join(["refused"] * 6))
        mapped.check()

    def test_threads_share_a_mapping_until_it_is_released(self):
        ns = self.fill()
        mapped = self.client.map(ns, KEYS)
        query = np.ones((2 * HEADS, HEAD_DIM), np.float32)
        want = mapped.attend(1, query)[0]
        released, wrong, counts = threading.Event(), [], []

        def read():
            for count in range(10 ** 6):
                over = released.is_set()
                try:
                    output, _ = mapped.attend(1, query)
                except kvmill.AbortedError:
                    counts.append(count)
                    return
                if over or not np.array_equal(output, want):
                    wrong.append(output)
                    return

        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(20):
            self.client.renew(mapped)
        mapped.release()
        released.set()
        for thread in threads:
            thread.join()
        self.assertEqual((wrong, len(counts)), ([], 4))


class SessionTest(MapCase):
    own_daemon = True

    def geometry(self, **fields):
        page = 16 * HEADS * HEAD_DIM * 2
        layers = {"keys": [kvmill.EnginePlace(0, 0), kvmill.EnginePlace(0, 1 << 18)],
                  "values": [kvmill.EnginePlace(0, 2 << 18), kvmill.EnginePlace(0, 3 << 18)], "page_count": 4,
                  "page_bytes": page, "page_stride_bytes": page, "token_stride_bytes": HEADS * HEAD_DIM * 2,
                  "head_stride_bytes": 2 * HEAD_DIM, "block_tokens": TOKENS, "page_tokens": 16, "head_dim": HEAD_DIM,
                  "head_count": HEADS, **fields}
        return kvmill.EngineGeometry([kvmill.EngineRegion(0x10000, 1 << 20)], [kvmill.EngineLayers(**layers)])

    def test_memory_is_registered_and_what_does_not_fit_is_named(self):
        ns = self.open()
        registration = self.client.register_memory(ns, self.geometry())
        self.assertIsNone(self.client.unregister_memory(registration))
        with self.assertRaises(kvmill.NotFoundError):
            self.client.unregister_memory(registration)
        with self.assertRaisesRegex(kvmill.FailedPreconditionError, "head_dim"):
            self.client.register_memory(ns, self.geometry(head_dim=128))
        with self.assertRaisesRegex(ValueError, "page_count -1, want 0 to"):
            self.client.register_memory(ns, self.geometry(page_count=-1))
        with self.assertRaisesRegex(ValueError, "1 values"):
            self.client.register_memory(ns, self.geometry(values=[kvmill.EnginePlace(0, 0)]))

    def test_events_are_told_to_threads_and_loops(self):
        ns = self.fill()
        self.assertIsNone(self.client.session_event(timeout=0.01))
        mapped = self.client.map(ns, KEYS, lease=0.1)
        expired = kvmill.SessionEvent(kvmill.SessionEventKind.LEASES_EXPIRED, 3)
        self.assertEqual(self.client.session_event(timeout=60), expired)
        del mapped

        async def listen():
            async with kvmill.AsyncClient(self.daemon.server, timeout=60) as client:
                self.assertIsNone(await client.session_event(timeout=0.01))
                told = []

                async def collect():
                    async for event in client.session_events():
                        told.append(event)

                task = asyncio.ensure_future(collect())
                cancelled = asyncio.ensure_future(client.session_event())
                await asyncio.sleep(0)
                cancelled.cancel()
                with await client.map(ns, KEYS, lease=0.1):
                    while not told:
                        await asyncio.sleep(0.005)
            await asyncio.wait_for(task, 10)  # Ends with the client.
            with self.assertRaises(kvmill.FailedPreconditionError):
                await client.session_event()
            return told

        self.assertEqual(asyncio.run(listen()), [expired])
        ended = []
        thread = threading.Thread(target=lambda: ended.append(self.client.session_event()))
        thread.start()
        self.daemon.kill_hard()
        thread.join(60)
        self.assertEqual(ended, [kvmill.SessionEvent(kvmill.SessionEventKind.ENDED, 0)])
        self.daemon.start()

        def closed():
            try:
                self.client.session_event()
            except kvmill.FailedPreconditionError as error:
                ended.append(error.message)

        thread = threading.Thread(target=closed)
        thread.start()
        self.client.close()
        thread.join(60)
        self.assertEqual(ended[1:], ["the client is closed"])


class AsyncMapTest(MapCase):
    def test_coroutines_map_renew_and_are_cancelled(self):
        ns = self.fill()

        async def body():
            async with kvmill.AsyncClient(self.daemon.server, timeout=60, encode_in=kvmill.EncodeIn.CLIENT) as client:
                with await client.map(ns, KEYS) as mapped:
                    await mapped.renew(20)
                    await client.renew(mapped, 30)
                    query = np.ones((HEADS, HEAD_DIM), np.float32)
                    results = await asyncio.gather(*(asyncio.to_thread(mapped.attend, 0, query) for _ in range(8)))
                    self.assertEqual(len({output.tobytes() for output, _ in results}), 1)
                    self.assertEqual(await client.touch(ns, KEYS), 3)
                    with self.stopped():
                        tasks = [asyncio.ensure_future(c) for c in (client.map(ns, KEYS), client.renew(mapped, 30))]
                        await asyncio.sleep(0.05)
                        for task in tasks:
                            task.cancel()
                        for task in tasks:
                            with self.assertRaises(asyncio.CancelledError):
                                await task
                    mapped.check()
                # What nobody waited for gives its leases back.
                for _ in range(1000):
                    gc.collect()
                    if (await client.stat()).leases == 0:
                        return
                    await asyncio.sleep(0.005)
                self.fail("leases are left")

        asyncio.run(body())


class DataPathTest(Case):
    def test_ucx_and_grpc_bring_the_same_bytes(self):
        daemon = cli_support.Daemon("--listen", "127.0.0.1:0", "--ucx", "127.0.0.1", "--insecure")
        self.addCleanup(daemon.remove)
        self.addCleanup(daemon.stop)
        address = daemon.ready["listen"]
        layers = gaussian(1)
        with kvmill.Client(address, path=kvmill.DataPath.UCX, encode_in=kvmill.EncodeIn.CLIENT, encode_threads=1) as ucx, \
                kvmill.Client(address, path=kvmill.DataPath.INLINE, encode_in=kvmill.EncodeIn.DAEMON) as inline, \
                kvmill.Client(address, path=kvmill.DataPath.UCX, plaintext=True) as plain:
            self.assertEqual(ucx.ucx_transport, "")
            ns = ucx.open_namespace("n", spec())
            records = []
            for client, key in ((ucx, b"ucx"), (inline, b"inline")):
                self.assertIsNone(client.store(ns, [kvmill.Block(key, layers)]).blocks[0].error)
                for reader in (ucx, inline):
                    records.append([bytearray(HEADS * ns.record_bytes(layer)) for layer in range(LAYERS)])
                    self.assertTrue(reader.fetch_records(ns, [key], records[-1:]).blocks[0].hit)
            self.assertEqual(records[1:], records[:1] * 3)
            self.assertRegex(ucx.ucx_transport, "tcp|sm|cma|sysv|posix|rc")
            self.assertEqual(inline.ucx_transport, "")
            with self.assertRaises(kvmill.FailedPreconditionError):
                plain.store(ns, [kvmill.Block(b"plain", layers)])
            with self.assertRaisesRegex(kvmill.FailedPreconditionError, "socket|local"):
                ucx.map(ns, [b"ucx"])
            with self.assertRaises(ValueError):
                kvmill.Client(address, path=7)


if __name__ == "__main__":
    cli_support.main()
