#!/usr/bin/env python3
"""Counters that one daemon, read fast enough, leaves at 0 are what was done: of blocks, copies and tickets that go from node to
node, of a drain, and of events that a reader was too slow for (ctest `metrics_cluster_test`).

Real daemons and a real etcd on the loopback. Each step says what it adds; then every series of FAMILIES, at every node, must
be what the model says, and 0 where it says nothing. Bytes are known from docs/formats.md: records have one size.

cluster_workload_test.py --bin-dir DIR --source-dir DIR, with PYTHONPATH=BUILD/python and KVMILL_TEST_ETCD.
"""
import os
import re
import signal
import sys
import time
import unittest

import numpy as np

import kvmill

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path += [os.path.join(HERE, "..", "client", "cli"), os.path.join(HERE, "..", "client", "python"), os.path.join(HERE, "..")]
import cli_support  # noqa: E402  # pylint: disable=wrong-import-position
import exposition  # noqa: E402  # pylint: disable=wrong-import-position
import http2_raw  # noqa: E402  # pylint: disable=wrong-import-position
import python_cluster  # noqa: E402  # pylint: disable=wrong-import-position
from workload_test import LAYERS, TILE_BLOCK, blocks, families_of_kvmilld, keys, small_namespace  # noqa: E402  # pylint: disable=wrong-import-position

FAMILIES = {"pulled_blocks_total": ("result", ("stored", "miss", "damaged")), "pulled_bytes_total": ("transport", ("grpc",)),
            "replication_bytes_total": None, "replication_blocks_total": ("result", ("copied", "failed")),
            "handed_over_blocks_total": ("result", ("safe", "left")), "handing_over_blocks": None,
            "pointer_differences_total": None, "tickets_created_total": None,
            "tickets_ended_total": ("end", ("acknowledged", "revoked", "deadline")),
            "redeemed_blocks_total": ("result", ("sealed", "exists", "missed")),
            "ticket_pages_total": ("result", ("right", "damaged")), "ticket_pages_bytes_total": ("transport", ("grpc",)),
            "events_dropped_total": None}
SEQUENCES, SEQUENCE_BLOCKS = 12, 4  # Each a run of its own: so both of two nodes are homes of some.
STORED = SEQUENCES * SEQUENCE_BLOCKS
WAIT_SECONDS = 60
STORE_METHOD = "/kvmill.v1.Cache/Store"
WATCH_SEQUENCE, WATCH_SNAPSHOT_BEGIN = 2, 3  # Fields of WatchReply.


def sequences(name):
    return [f"{name} {i}" for i in range(SEQUENCES)]


class Node(cli_support.Daemon):
    """Of a cluster; with what its metrics must be."""

    def __init__(self, etcd, prefix, name, *flags):
        self.name = name
        super().__init__("--host-bytes", "64MiB", "--disk-bytes", "64MiB", "--metrics", "127.0.0.1:0", "--listen", "127.0.0.1:0", "--insecure",
                         "--node-id", name, "--cluster", f"etcd://{etcd.address}/{prefix}", "--lease-ttl", "60s",
                         "--peer-timeout", "10s", "--drain-timeout", "60s", *flags)
        self.families = families_of_kvmilld()
        self.model = exposition.Model(self.families)
        for family, labels in FAMILIES.items():
            for value in labels[1] if labels else [None]:
                self.model.set(family, 0, **({labels[0]: value} if labels else {}))

    def scrape(self):
        scrape = exposition.Scrape(exposition.get(self.ready), self.families)
        scrape.values = {key: value for key, value in scrape.values.items() if key.split("|")[0][len("kvmill_"):] in FAMILIES}
        return scrape

    def get(self, family, **labels):
        return self.scrape().values[exposition.series("kvmill_" + family, **labels)]

    def expect(self, family, more, **labels):
        """So much more than before."""
        key = exposition.series("kvmill_" + family, **labels)
        self.model.values[key] = self.model.values.get(key, 0) + more


class Case(unittest.TestCase):
    nodes = ()
    call = None  # That does not end.

    @staticmethod
    def wait(what, is_so):
        deadline = time.monotonic() + WAIT_SECONDS
        while not is_so():
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {WAIT_SECONDS} s: {what() if callable(what) else what}")
            time.sleep(0.02)

    def compare(self, step, nodes=None):
        """Soon, and as nothing else follows, for good."""
        different = []

        def same():
            if self.call is not None:
                self.call.stay()
            different[:] = [f"node {node.name}: {one}" for node in nodes or self.nodes
                            for one in node.model.differences(node.scrape())]
            return not different
        self.wait(lambda: f"after {step}:\n  " + "\n  ".join(different), same)

    def start(self, *nodes):
        self.nodes = nodes
        for node in nodes:
            self.addCleanup(node.remove)
            self.addCleanup(node.stop)
        for node in nodes:
            self.wait("the nodes know each other", lambda node=node: python_cluster.Cluster.members(node) == len(nodes))

    def open(self, node):
        client = kvmill.Client(node.server, timeout=60)
        self.addCleanup(client.close)
        return client, client.open_namespace("n", small_namespace("n"))

    def store(self, node, name):
        client, ns = self.open(node)
        for i, sequence in enumerate(sequences(name)):
            for block in client.store(ns, blocks(sequence, SEQUENCE_BLOCKS, 100 * i)).blocks:
                self.assertIsNone(block.error)


class ClusterTest(Case):
    @classmethod
    def setUpClass(cls):
        cls.etcd = python_cluster.Etcd()
        cls.addClassCleanup(cls.etcd.remove)

    def test_what_goes_from_node_to_node_and_what_a_node_leaves(self):
        a, b = (Node(self.etcd, "apart", name) for name in "ab")
        self.start(a, b)
        self.store(a, "first")
        self.compare("a store that nobody asks for elsewhere")
        self.fetch_elsewhere(b, "first")
        self.tickets(a, b)
        self.forged_announcements(a, b)
        self.drains(a, b)

    def fetch_elsewhere(self, b, name):
        client, ns = self.open(b)
        for sequence in sequences(name):
            wanted = keys(sequence, SEQUENCE_BLOCKS)
            # Once its home knows of it.
            self.wait("it is found", lambda wanted=wanted: client.lookup(ns, wanted).hit_blocks == SEQUENCE_BLOCKS)
            self.assertTrue(all(block.hit for block in client.fetch(ns, wanted, ns.empty(SEQUENCE_BLOCKS)).blocks))
        b.expect("pulled_blocks_total", STORED, result="stored")
        b.expect("pulled_bytes_total", STORED * TILE_BLOCK, transport="grpc")
        self.compare("fetches of what another node has")
        for sequence in sequences(name):
            client.fetch(ns, keys(sequence, SEQUENCE_BLOCKS), ns.empty(SEQUENCE_BLOCKS))
        self.compare("fetches of what is here now")

    def tickets(self, a, b):
        """One is redeemed, one revoked, and one ends by itself."""
        prefill, ns = self.open(a)
        decode, theirs = self.open(b)
        promised = [kvmill.PromisedBlock(block.key, parent=block.parent, block_index=block.block_index)
                    for block in blocks("ticket", SEQUENCE_BLOCKS)]
        ticket = prefill.create_ticket(ns, promised, consumer="b", ttl=600)
        a.expect("tickets_created_total", 1)
        self.compare("a ticket")
        prefill.store(ns, blocks("ticket", SEQUENCE_BLOCKS, 5000))
        self.assertEqual(decode.redeem_ticket(theirs, ticket, timeout=WAIT_SECONDS).missed, 0)
        a.expect("tickets_ended_total", 1, end="acknowledged")
        b.expect("redeemed_blocks_total", SEQUENCE_BLOCKS, result="sealed")
        b.expect("ticket_pages_total", SEQUENCE_BLOCKS * LAYERS, result="right")
        b.expect("ticket_pages_bytes_total", SEQUENCE_BLOCKS * TILE_BLOCK, transport="grpc")
        self.compare("its redemption")
        prefill.revoke_ticket(prefill.create_ticket(ns, promised))
        prefill.create_ticket(ns, promised, ttl=0.2)
        a.expect("tickets_created_total", 2)
        for end in ("revoked", "deadline"):
            a.expect("tickets_ended_total", 1, end=end)
        self.compare("tickets that nobody redeems")

    def forged_announcements(self, a, b):
        """Somebody tells b, in the name of a, of blocks that a does not have: five ranges of anchors differ."""
        ranges = (3, 17, 31, 32, 60)
        anchors = b"".join((one << 58 | 0x2345).to_bytes(8, "little") for one in ranges)

        def announce(count):
            counts = bytes([count] * len(ranges))
            message = b"".join(http2_raw.field_bytes(number, value) for number, value in (
                (1, bytes.fromhex(b.ready["boot_id"])), (2, b"a"), (3, bytes.fromhex(a.ready["boot_id"])), (4, anchors), (5, counts),
                (6, bytes(2 * count * len(ranges))), (7, anchors), (8, counts)))
            call = http2_raw.Call(b.ready["listen"], "/kvmill.v1.Peer/Announce", message)
            self.assertRegex(call.wait(), rb"grpc-status\x010")
            call.close()

        announce(1)
        a.expect("pointer_differences_total", len(ranges))
        self.compare("a comparison of digests")  # Up to 28 s after the nodes saw each other, or 30 s after that.
        announce(0)  # The next comparison, a minute later, finds nothing.

    def drains(self, a, b):
        """The rest of a goes to b, which is stopped at first; then b leaves, and nobody is left. A call that does not end keeps
        each of them for as long as it is looked at."""
        self.store(a, "last")
        held = 2 * STORED + SEQUENCE_BLOCKS
        self.call = http2_raw.Call(a.ready["listen"], STORE_METHOD)
        b.process.send_signal(signal.SIGSTOP)
        try:
            a.process.terminate()
            a.model.set("handing_over_blocks", held)
            self.compare("SIGTERM, with a peer that does not answer", [a])
        finally:
            b.process.send_signal(signal.SIGCONT)
        a.model.set("handing_over_blocks", 0)
        a.expect("handed_over_blocks_total", held, result="safe")
        # What b did not have.
        b.expect("replication_blocks_total", STORED, result="copied")
        b.expect("replication_bytes_total", STORED * TILE_BLOCK)
        b.expect("pulled_blocks_total", STORED, result="stored")
        b.expect("pulled_bytes_total", STORED * TILE_BLOCK, transport="grpc")
        self.compare("the handing over")
        self.ended(a)

        self.call = http2_raw.Call(b.ready["listen"], STORE_METHOD)
        b.process.terminate()
        b.expect("handed_over_blocks_total", held, result="left")
        self.compare("the end of the last one", [b])
        self.ended(b)

    def ended(self, node):
        """Once nothing keeps it."""
        self.call.close()
        self.call = None
        self.assertEqual(node.process.wait(WAIT_SECONDS), 0)
        node.process.stdout.close()

    def test_copies(self):
        c, d = (Node(self.etcd, "copies", name, "--copies", "1", "--ucx", "127.0.0.1") for name in "cd")
        self.start(c, d)
        for source, target, name in ((c, d, "there"), (d, c, "back")):
            self.store(source, name)
            self.wait("the copies", lambda: target.get("replication_blocks_total", result="copied") == STORED)  # pylint: disable=cell-var-from-loop
            by = [key for key in target.scrape().values if re.fullmatch(r"kvmill_pulled_bytes_total\|transport=tcp/.*", key)]
            self.assertEqual(len(by), 1, target.scrape().values)
            target.model.values[by[0]] = STORED * TILE_BLOCK
            target.expect("pulled_blocks_total", STORED, result="stored")
            target.expect("replication_blocks_total", STORED, result="copied")
            target.expect("replication_bytes_total", STORED * TILE_BLOCK)
            self.compare(f"copies on {target.name}")


class SlowReaderTest(Case):
    """Of events: all that it was not told, but for those that are kept, are dropped for it."""

    KEPT = 65536  # docs/events.md
    AT_ONCE = 3600

    def test_events_that_a_reader_was_too_slow_for(self):
        daemon = cli_support.Daemon("--metrics", "127.0.0.1:0", "--error-sample-interval", "0", "--listen", "127.0.0.1:0", "--insecure")
        self.addCleanup(daemon.remove)
        self.addCleanup(daemon.stop)
        families = families_of_kvmilld()

        def metric(name, **labels):
            return exposition.Scrape(exposition.get(daemon.ready), families).values[exposition.series("kvmill_" + name, **labels)]

        client = kvmill.Client(daemon.server, timeout=120)
        self.addCleanup(client.close)
        ns = client.open_namespace("n", kvmill.NamespaceSpec(groups=[kvmill.LayerGroup(range(1), 1, 64)], model="n", block_tokens=64))
        layers = [(np.zeros((64, 1, 64), np.float16),) * 2]
        names = [b"%064d" % i for i in range(self.AT_ONCE)]  # Long, so that few of them are under way.
        slow, quick = (http2_raw.Call(daemon.ready["listen"], "/kvmill.v1.Events/Watch", b"") for _ in range(2))
        self.addCleanup(slow.close)
        self.addCleanup(quick.close)
        told, position = 0, slow.next().get(WATCH_SEQUENCE, [0])[0]
        while told <= self.KEPT:
            client.store(ns, [kvmill.Block(name, layers) for name in names])
            told += self.AT_ONCE
            self.read_to(quick, told, slow)  # Changes that follow at once may be told as none.
            self.assertEqual(client.remove(ns, names), self.AT_ONCE)
            told += self.AT_ONCE
            self.read_to(quick, told, slow)
        self.assertEqual(metric("events_dropped_total"), 0)  # As long as it does not ask for more.
        reply = slow.next()
        while WATCH_SNAPSHOT_BEGIN not in reply:
            position = reply[WATCH_SEQUENCE][0]
            reply = slow.next()
        self.assertEqual(metric("events_dropped_total"), told - self.KEPT - position)
        self.assertGreater(told - self.KEPT - position, 0)
        self.assertEqual((metric("events_total", event="stored"), metric("events_total", event="removed")), (told // 2, told // 2))

    @staticmethod
    def read_to(watch, sequence, other):
        while watch.next().get(WATCH_SEQUENCE, [0])[0] < sequence:
            other.stay()


if __name__ == "__main__":
    cli_support.main()
