#!/usr/bin/env python3
"""Tickets through the Python package, between two real daemons with a real etcd (ctest `python_ticket_test`):
python_ticket_test.py --bin-dir DIR --source-dir DIR, with PYTHONPATH=build/release/python."""
import asyncio
import os
import re
import subprocess
import sys
import threading
import unittest
import urllib.request

import numpy as np

import kvmill
from kvmill import Code, TicketFate, TicketMiss
from python_cluster import Cluster, until
from python_support import LAYERS, TOKENS, cli_support, gaussian, spec

WHOLE, TAIL_TOKENS = 3, 23


class TicketTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.cluster = Cluster("ab")
        cls.addClassCleanup(cls.cluster.remove)

    def setUp(self):
        self.prefill, self.decode = self.cluster.client("a"), self.cluster.client("b")
        self.ns = {}
        for name, client in (("a", self.prefill), ("b", self.decode)):
            self.addCleanup(client.close)
            self.ns[name] = client.open_namespace(self.id(), spec(revision=self.id()))

    @staticmethod
    def key(block):
        return f"the prompt up to block {block}".encode()

    def promised(self):
        """Whole blocks and a tail."""
        return [kvmill.PromisedBlock(self.key(b), parent=self.key(b - 1) if b else b"", block_index=b,
                                     token_count=TAIL_TOKENS if b == WHOLE else None) for b in range(WHOLE + 1)]

    def stored_keys(self):
        return [*map(self.key, range(WHOLE)), kvmill.tail_key(self.key(WHOLE - 1), TAIL_TOKENS, self.key(WHOLE))]

    def store(self, blocks=range(WHOLE + 1), client=None):
        rows = [kvmill.Block(block.key, gaussian(b, TOKENS if block.token_count is None else block.token_count),
                             parent=block.parent, token_count=block.token_count, block_index=b)
                for b, block in enumerate(self.promised()) if b in blocks]
        for block in (client or self.prefill).store(self.ns["a"], rows).blocks:
            self.assertIsNone(block.error)

    def check_here(self, result, fate=TicketFate.SEALED, node="b"):
        self.assertIsNone(result.error)
        self.assertEqual((result.missed, [block.key for block in result.blocks]), (0, self.stored_keys()))
        for b, block in enumerate(result.blocks):
            self.assertEqual((block.fate, block.miss, block.here), (fate, TicketMiss.NONE, True))
            self.assertEqual((block.block_index, block.group, block.layer_count, block.layers_here), (b, 0, LAYERS, LAYERS))
            self.assertEqual(block.token_count, TAIL_TOKENS if b == WHOLE else TOKENS)
            self.assertEqual([block.has_layer(layer) for layer in range(LAYERS + 1)], [True] * LAYERS + [False])
        client = self.cluster.client(node)
        self.addCleanup(client.close)
        out = self.ns[node].empty(WHOLE + 1)
        for b, block in enumerate(client.fetch(self.ns[node], self.stored_keys(), out).blocks):
            self.assertIsNone(block.error)
            tokens = block.token_count
            for got, want in zip(out[b], gaussian(b, tokens)):
                error = np.linalg.norm(got[0][:tokens].astype(float) - want[0]) / np.linalg.norm(want[0].astype(float))
                self.assertLess(error, 0.2)

    def redeem_in_thread(self, ticket, client=None, ns="b", **fields):
        """(thread, results): what a redeem that runs came to, and its updates."""
        results, updates, told = [], [], threading.Event()

        def update(blocks, changed):
            updates.append((blocks, changed))
            told.set()

        def run():
            results.append((client or self.decode).redeem_ticket(self.ns[ns], ticket, update=update, **fields))

        thread = threading.Thread(target=run)
        thread.start()
        self.addCleanup(thread.join)
        self.assertTrue(told.wait(60))
        return thread, results, updates

    def test_blocks_come_while_they_are_stored(self):
        ticket = self.prefill.create_ticket(self.ns["a"], self.promised(), consumer="b", ttl=600)
        self.assertLess(len(ticket), 200)
        thread, results, updates = self.redeem_in_thread(ticket)
        for b in range(WHOLE + 1):
            self.store([b])
        thread.join(60)
        self.check_here(results[0])
        # At first all of them; then each as often as it changed.
        self.assertEqual(updates[0][1], tuple(range(WHOLE + 1)))
        self.assertTrue(all(block.fate == TicketFate.OPEN for block in updates[0][0]))
        last = updates[0][0]
        for blocks, changed in updates[1:]:
            self.assertEqual([b for b, pair in enumerate(zip(last, blocks)) if pair[0] != pair[1]], list(changed))
            last = blocks
        self.assertEqual(last, results[0].blocks)
        # Who comes later is told how it ended; the ticket is no more.
        self.check_here(self.decode.redeem_ticket(self.ns["b"], ticket))
        with self.assertRaises(kvmill.NotFoundError):
            self.prefill.revoke_ticket(ticket)

    def test_what_is_there_is_part_of_it_and_so_is_the_node_that_made_it(self):
        self.store()
        self.check_here(self.decode.redeem_ticket(self.ns["b"], self.prefill.create_ticket(self.ns["a"], self.promised())))
        again = self.prefill.create_ticket(self.ns["a"], self.promised())
        self.check_here(self.decode.redeem_ticket(self.ns["b"], again), TicketFate.EXISTS)
        same = self.prefill.create_ticket(self.ns["a"], self.promised(), consumer="a")
        self.check_here(self.prefill.redeem_ticket(self.ns["a"], same), node="a")

    def test_whoever_ends_it_leaves_misses_with_a_reason(self):
        ticket = self.prefill.create_ticket(self.ns["a"], self.promised())
        thread, results, updates = self.redeem_in_thread(ticket)
        self.store([0])
        until(lambda: updates[-1][0][0].here, "the first block is sealed")
        self.prefill.revoke_ticket(ticket)
        thread.join(60)
        self.assertIsInstance(results[0].error, kvmill.AbortedError)
        self.assertEqual([(block.fate, block.miss) for block in results[0].blocks],
                         [(TicketFate.SEALED, TicketMiss.NONE)] + [(TicketFate.MISSED, TicketMiss.REVOKED)] * WHOLE)

        ticket = self.prefill.create_ticket(self.ns["a"], self.promised())
        thread, results, _ = self.redeem_in_thread(ticket)
        self.decode.cancel_redeem(ticket)
        thread.join(60)
        self.assertIsInstance(results[0].error, kvmill.CallCancelledError)
        self.assertEqual({block.miss for block in results[0].blocks if not block.here}, {TicketMiss.CALL_ENDED})

        ticket = self.prefill.create_ticket(self.ns["a"], self.promised())
        late = self.decode.redeem_ticket(self.ns["b"], ticket, timeout=0.3)
        self.assertIsInstance(late.error, kvmill.DeadlineExceededError)

        other = self.cluster.client("a")
        ticket = other.create_ticket(self.ns["a"], self.promised())
        thread, results, _ = self.redeem_in_thread(ticket)
        other.close()  # And its session with it.
        thread.join(60)
        self.assertIsInstance(results[0].error, kvmill.AbortedError)
        self.assertEqual(results[0].blocks[-1].miss, TicketMiss.REVOKED)

    def test_wrong_tickets_and_blocks_are_refused_with_the_value_and_the_limit(self):
        def create(blocks, **options):
            return self.prefill.create_ticket(self.ns["a"], blocks, **options)

        for blocks, options, said in (
                ([], {}, "0 blocks"),
                (self.promised(), {"ttl": 601}, "600000"),
                (self.promised(), {"life": 3601}, "3600000"),
                (self.promised(), {"consumer": "nobody"}, "a, b"),
                (self.promised() + self.promised()[:1], {}, "twice"),
                ([kvmill.PromisedBlock(b"x" * 65)], {}, "64"),
                ([kvmill.PromisedBlock(b"own", parent=b"own")], {}, "own parent"),
                ([kvmill.PromisedBlock(b"own", parent=b"own", token_count=7)], {}, "own parent")):
            with self.subTest(said=said):
                with self.assertRaisesRegex(kvmill.InvalidArgumentError, said):
                    create(blocks, **options)
        with self.assertRaises(ValueError):
            create(self.promised(), ttl=0)
        with self.assertRaises(TypeError):
            self.prefill.create_ticket("not a namespace", self.promised())

        for_a = create(self.promised(), consumer="a")
        refused = self.decode.redeem_ticket(self.ns["b"], for_a)
        self.assertEqual((refused.error.code, refused.blocks), (Code.PERMISSION_DENIED, ()))
        nonsense = self.decode.redeem_ticket(self.ns["b"], b"nonsense")
        self.assertIsInstance(nonsense.error, kvmill.InvalidArgumentError)
        with self.assertRaises(kvmill.InvalidArgumentError):
            self.decode.redeem_ticket(self.ns["b"], b"")
        with self.assertRaises(TypeError):
            self.decode.redeem_ticket(self.ns["b"], "text")
        with self.assertRaises(kvmill.FailedPreconditionError):
            self.decode.revoke_ticket(for_a)
        self.prefill.revoke_ticket(for_a)
        with self.assertRaises(kvmill.NotFoundError):
            self.prefill.revoke_ticket(for_a)
        self.assertIsInstance(self.prefill.redeem_ticket(self.ns["a"], for_a).error, kvmill.NotFoundError)
        self.decode.close()
        with self.assertRaises(kvmill.FailedPreconditionError):
            self.decode.redeem_ticket(self.ns["b"], for_a)

    def test_an_update_that_raises_cancels_the_redeem(self):
        class Enough(Exception):
            pass

        def update(*_):
            raise Enough

        before = self.tickets_ended("a")
        ticket = self.prefill.create_ticket(self.ns["a"], self.promised(), ttl=600)
        with self.assertRaises(Enough):
            self.decode.redeem_ticket(self.ns["b"], ticket, update=update)
        # Nobody wants it any more: the producer is told.
        self.wait_until_ended(ticket, before)

    def wait_until_ended(self, ticket, ended_before):
        """Cancelling is told to the producer in its own time; asking with the same ticket would start it again."""
        until(lambda: self.tickets_ended("a") > ended_before, "the ticket has ended")
        with self.assertRaises(kvmill.NotFoundError):
            self.prefill.revoke_ticket(ticket)

    def tickets_ended(self, name):
        """By their consumers."""
        with urllib.request.urlopen(f"http://{self.cluster.nodes[name].ready['metrics']}/metrics", timeout=60) as answer:
            return int(re.search(r'kvmill_tickets_ended_total{end="acknowledged"} (\d+)', answer.read().decode()).group(1))

    def test_asyncio(self):
        ended = self.tickets_ended("a")

        async def run():
            nonlocal ended
            async with kvmill.AsyncClient(self.cluster.nodes["a"].server, timeout=60) as prefill, \
                    kvmill.AsyncClient(self.cluster.nodes["b"].server, timeout=60) as decode:
                a = await prefill.open_namespace(self.id(), spec(revision=self.id()))
                b = await decode.open_namespace(self.id(), spec(revision=self.id()))
                ticket = await prefill.create_ticket(a, self.promised(), ttl=600)
                told = asyncio.Event()
                ranks = [asyncio.ensure_future(decode.redeem_ticket(b, ticket, update=lambda *_: told.set()))
                         for _ in range(3)]
                await told.wait()
                ranks.pop().cancel()  # The others still want it.
                await asyncio.get_running_loop().run_in_executor(None, self.store)
                for result in await asyncio.gather(*ranks):
                    self.check_here(result)

                # The last one who waits takes the redeem with it.
                loop = asyncio.get_running_loop()
                until(lambda: self.tickets_ended("a") > ended, "the first one has ended")
                ended = self.tickets_ended("a")
                ticket = await prefill.create_ticket(a, [kvmill.PromisedBlock(b"never")], ttl=600)
                told.clear()
                task = asyncio.ensure_future(decode.redeem_ticket(b, ticket, update=lambda *_: told.set()))
                await told.wait()
                task.cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await task
                await loop.run_in_executor(None, self.wait_until_ended, ticket, ended)

                # What an update raises is the caller's.
                def update(*_):
                    raise KeyError("mine")

                ended = self.tickets_ended("a")
                ticket = await prefill.create_ticket(a, [kvmill.PromisedBlock(b"never")], ttl=600)
                with self.assertRaises(KeyError):
                    await decode.redeem_ticket(b, ticket, update=update)
                await loop.run_in_executor(None, self.wait_until_ended, ticket, ended)
                decode.cancel_redeem(ticket)  # Of nothing that runs.

        asyncio.run(run())

    def test_a_daemon_without_a_cluster_has_no_tickets(self):
        alone = cli_support.Daemon()
        self.addCleanup(alone.remove)
        self.addCleanup(alone.stop)
        with kvmill.Client(alone.server, timeout=60) as client:
            ns = client.open_namespace("n", spec())
            with self.assertRaisesRegex(kvmill.FailedPreconditionError, "cluster"):
                client.create_ticket(ns, self.promised())
            self.assertIsInstance(client.redeem_ticket(ns, b"whatever").error, kvmill.FailedPreconditionError)

    def test_the_example(self):
        path = os.path.join(cli_support.SOURCE_DIR, "tests", "examples", "prefill_decode.py")
        sockets = [node.server for node in self.cluster.nodes.values()]
        for _ in range(2):
            done = subprocess.run([sys.executable, path, "all", *sockets], capture_output=True, text=True, timeout=120,
                                  check=False)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            match = re.fullmatch(r"redeemed 7 blocks of 4 layers, 407 tokens; layers came in the order (\[.*\]); attention "
                                 r"over 4-bit keys and 2-bit values of noise is off by (\d+) %\n", done.stdout)
            self.assertTrue(match, done.stdout)
            self.assertEqual(sorted(eval(match.group(1))), [0, 1, 2, 3])  # pylint: disable=eval-used
            self.assertLess(int(match.group(2)), 60)
            # The second run has nothing to bring, unless it is gone here.
            self.decode.clear(self.decode.find_namespace("example-prefill-decode"))
        done = subprocess.run([sys.executable, path, "decode", sockets[1], "no ticket"], capture_output=True, text=True,
                              timeout=120, check=False)
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertTrue(done.stderr.startswith("prefill_decode: "), done.stderr)


if __name__ == "__main__":
    cli_support.main()
