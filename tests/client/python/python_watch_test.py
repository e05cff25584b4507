#!/usr/bin/env python3
"""kvmill.watch against a real daemon (ctest `python_watch_test`): blocking and asyncio, positions, a restart, errors.
python_watch_test.py --bin-dir DIR --source-dir DIR, with PYTHONPATH=build/release/python."""
import asyncio
import pickle
import threading
import time
import unittest

import kvmill
from python_support import TOKENS, Case, cli_support, gaussian

PATIENCE = 60


class Index:
    """What a router believes."""

    def __init__(self):
        self.blocks, self.log, self.snapshots, self.position = {}, [], 0, None

    def apply(self, batch):
        if batch.snapshot_begin:
            self.blocks, self.snapshots = {}, self.snapshots + 1
        for event in batch.events:
            self.log.append(event)
            if event.kind == kvmill.EventKind.CLEARED:
                self.blocks = {}
            elif event.kind == kvmill.EventKind.REMOVED:
                del self.blocks[event.key]
            else:
                self.blocks[event.key] = event.tier
        self.position = batch.position

    def read_until(self, watch, keys):
        deadline = time.monotonic() + PATIENCE
        while self.position is None or set(self.blocks) != set(keys):
            batch = watch.next(max(deadline - time.monotonic(), 0.001))
            if batch is None:
                raise AssertionError(f"believes {self.blocks}, want {keys}")
            self.apply(batch)


class WatchTest(Case):
    def watch(self, ns, **fields):
        watch = kvmill.watch(self.daemon.server, ns.name, **fields)
        self.addCleanup(watch.close)
        return watch

    def test_blocks_come_and_go(self):
        ns = self.open()
        self.put(ns, b"block 0", gaussian(1))
        index, watch = Index(), self.watch(ns)
        index.read_until(watch, [b"block 0"])
        self.assertEqual(index.snapshots, 1)
        self.assertIsNone(watch.next(0))
        self.assertEqual(watch.trouble, "")
        self.put(ns, b"block 1", gaussian(2), parent=b"block 0", block_index=1)
        index.read_until(watch, [b"block 0", b"block 1"])
        stored = index.log[-1]
        self.assertEqual((stored.kind, stored.parent, stored.tier, stored.token_count),
                         (kvmill.EventKind.STORED, b"block 0", kvmill.Tier.HOST, TOKENS))
        self.assertEqual((stored.namespace.name, stored.namespace.fingerprint, stored.namespace.model,
                          stored.namespace.block_tokens), (ns.name, ns.fingerprint, "tiny", TOKENS))
        self.client.remove(ns, [b"block 0"])
        index.read_until(watch, [b"block 1"])
        self.assertEqual(index.log[-1].kind, kvmill.EventKind.REMOVED)
        self.client.clear(ns)
        index.read_until(watch, [])
        self.assertEqual(index.log[-1].kind, kvmill.EventKind.CLEARED)
        # Another one goes on where this one is.
        watch.close()
        self.put(ns, b"block 2", gaussian(3))
        again = Index()
        again.read_until(self.watch(ns, after=index.position), [b"block 2"])
        self.assertEqual(again.snapshots, 0)

    def test_it_is_an_iterator_that_ends_when_it_is_closed(self):
        ns = self.open()
        self.put(ns, b"block 0", gaussian(1))
        keys = []
        with self.watch(ns) as watch:
            for batch in watch:
                keys += [event.key for event in batch.events]
                if keys:  # In the snapshot, or behind it.
                    break
            self.assertEqual(keys, [b"block 0"])
            threading.Timer(0.2, watch.close).start()  # While the next one is waited for.
            self.assertEqual([event for batch in watch for event in batch.events], [])
        self.assertTrue(watch.closed)
        with self.assertRaises(kvmill.FailedPreconditionError):
            watch.next()
        watch.close()
        with self.assertRaises(TypeError):
            pickle.dumps(watch)

    def test_with_asyncio(self):
        ns = self.open()

        async def follow(index, keys):
            async with kvmill.watch(self.daemon.server, ns.name) as watch:
                async for batch in watch:
                    index.apply(batch)
                    if index.position is not None and set(index.blocks) == keys:
                        return

        async def run():
            indices = [Index(), Index()]
            tasks = [asyncio.ensure_future(follow(index, {b"a", b"b"})) for index in indices]
            async with kvmill.AsyncClient(self.daemon.server) as client:
                for key in (b"a", b"b"):
                    await client.store(ns, [kvmill.Block(key, gaussian(1))])
                    await asyncio.sleep(0.05)
                await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE)
            # A task that is cancelled while it waits leaves nothing behind.
            async with kvmill.watch(self.daemon.server, ns.name, snapshot=False) as watch:
                await watch.__anext__()  # Where it begins.
                with self.assertRaises(asyncio.TimeoutError):
                    await asyncio.wait_for(watch.__anext__(), 0.1)
                await asyncio.get_running_loop().run_in_executor(None, self.client.remove, ns, [b"a"])
                batch = await asyncio.wait_for(watch.__anext__(), PATIENCE)
                self.assertEqual([event.key for event in batch.events], [b"a"])

        asyncio.run(run())

    def test_what_cannot_be_mended_is_raised_again_and_again(self):
        watch = kvmill.watch(self.daemon.server, "nobody opened it")
        self.addCleanup(watch.close)
        for _ in range(2):
            with self.assertRaises(kvmill.NotFoundError):
                watch.next(PATIENCE)
        with self.assertRaises(kvmill.NotFoundError):
            next(iter(watch))
        with self.assertRaisesRegex(kvmill.InvalidArgumentError, "32 hexadecimal digits"):
            kvmill.watch(self.daemon.server, after=kvmill.EventPosition("0", 1))
        with self.assertRaisesRegex(kvmill.InvalidArgumentError, "zero character"):
            kvmill.watch(self.daemon.server, "a\0b")


class RestartTest(Case):
    own_daemon = True

    def test_a_daemon_that_restarts_is_followed(self):
        ns = self.open()
        self.put(ns, b"block 0", gaussian(1))
        index, watch = Index(), kvmill.watch(self.daemon.server, ns.name)
        self.addCleanup(watch.close)
        index.read_until(watch, [b"block 0"])
        before = index.position.epoch
        self.daemon.kill_hard()
        deadline = time.monotonic() + PATIENCE
        while not watch.trouble:
            self.assertLess(time.monotonic(), deadline)
            self.assertIsNone(watch.next(0.01))
        self.daemon.start()
        ns = self.open()
        self.put(ns, b"block 1", gaussian(1))
        while index.snapshots < 2 or b"block 1" not in index.blocks:
            batch = watch.next(PATIENCE)
            self.assertIsNotNone(batch)
            index.apply(batch)
        self.assertNotEqual(index.position.epoch, before)


if __name__ == "__main__":
    cli_support.main()
