#!/usr/bin/env python3
"""What a daemon counts of events, with the rest of /metrics, is what the script did and what a reader of them was told
(ctest `metrics_events_test`).

events_workload_test.py --bin-dir DIR --source-dir DIR --promtool PROGRAM, with PYTHONPATH=BUILD/python.
"""
import argparse
import sys

import kvmill

import workload_test
from workload_test import HEADS, LAYERS, RAW_BYTES, TILE_BLOCK, blocks, cli_support, exposition, keys


def event(kind):
    return exposition.series("kvmill_events_total", event=kind)


class Reader:
    """What one call of Watch was told."""

    def __init__(self, server):
        self.watch = kvmill.watch(server)
        self.counts, self.blocks = {}, {}
        self.position, self.snapshots = 0, 0
        self.in_snapshot = False

    def next(self):
        """False: nothing for some seconds."""
        batch = self.watch.next(5)
        if batch is None:
            return False
        if batch.snapshot_begin:
            self.snapshots, self.blocks, self.in_snapshot = self.snapshots + 1, {}, True
        for told in batch.events:
            kind = told.kind.name.lower()
            if not self.in_snapshot:
                self.counts[kind] = self.counts.get(kind, 0) + 1
            if kind == "cleared":
                self.blocks = {key: space for key, space in self.blocks.items() if space != told.namespace.name}
            elif kind == "removed":
                del self.blocks[told.key]
            else:
                self.blocks[told.key] = told.namespace.name
        if batch.snapshot_end:
            self.in_snapshot = False
        if batch.position is not None:
            self.position = batch.position.sequence
        return True

    def read_to(self, position):
        while self.position != position:
            if not self.next():
                raise AssertionError(f"event {position} does not come after {self.position}")


class EventsTest(workload_test.Case):
    flags = ("--error-sample-interval", "1")

    def put(self, name, first_key, count, seed):
        self.client.store(self.opened(name), blocks(first_key, count, seed), wait_durable=True)
        self.stored(count, count * RAW_BYTES, count * TILE_BLOCK, namespace=name)
        self.encoded(name, count * LAYERS, count * LAYERS * HEADS)
        self.came(count * RAW_BYTES)

    def told(self, kind, count, now):
        """So many events, and what is in the journal after them."""
        self.model.add("events_total", count, event=kind)
        self.model.set("event_blocks", now)

    def test_what_happens_is_counted_once_there_is_a_reader(self):
        self.put("n", "a", 3, 0)
        self.compare("a store that nobody hears of")
        reader = Reader(self.daemon.server)
        self.addCleanup(reader.watch.close)
        self.model.set("event_readers", 1)
        self.model.set("event_blocks", 3)
        self.model.set("event_walks_total", 1)
        self.compare("the first reader")

        self.put("n", "b", 2, 10)
        self.told("stored", 2, 5)
        self.compare("a store")
        self.client.store(self.opened("n"), blocks("b", 2, 10))
        self.model.add("stored_blocks_total", 2, result="existing")
        inline = exposition.series("kvmill_bytes_total", direction="in", path="inline", transport="grpc")
        # The rest of what is there already stays away or does not.
        self.model.values[inline] = (self.model.values[inline], self.model.values[inline] + 2 * RAW_BYTES)
        self.compare("a store that changes nothing")
        self.model.values[inline] = self.scrape().values[inline]

        self.assertEqual(self.command("evict", "--tier", "host")["blocks"], 5)
        self.evicted(5, "host", "admin")
        self.told("moved", 5, 5)
        self.compare("an eviction")
        self.assertEqual(self.fetch(self.client, self.opened("n"), keys("a", 1)), [True])
        self.fetched("inline", 1, tier="disk")
        self.came(TILE_BLOCK, direction="out")
        self.told("moved", 1, 5)
        self.compare("a fetch from disk")
        self.assertEqual(self.client.remove(self.opened("n"), keys("b", 1)), 1)
        self.evicted(1, "disk", "removed", ages=0)
        self.told("removed", 1, 4)
        self.compare("a removal")

        second = Reader(self.daemon.server)
        self.addCleanup(second.watch.close)
        self.model.set("event_readers", 2)
        self.compare("another reader, which asks for no other walk")
        self.put("other", "c", 2, 20)
        self.told("stored", 2, 6)
        self.assertEqual(self.client.clear(self.opened("n")), 4)
        self.evicted(1, "host", "removed", ages=0)  # In both tiers: it leaves the faster one.
        self.model.add("tier_blocks", -1, tier="disk")
        self.evicted(3, "disk", "removed", ages=0)
        self.told("cleared", 1, 2)
        self.compare("a namespace that is cleared")

        # Whom they were told has the same numbers: the first from its snapshot on, the other from its own.
        total = sum(self.model.values[event(kind)] for kind in ("stored", "moved", "removed", "cleared"))
        for one, want in ((reader, {"stored": 4, "moved": 6, "removed": 1, "cleared": 1}), (second, {"stored": 2, "cleared": 1})):
            one.read_to(total)
            self.assertEqual(one.counts, want)
            self.assertEqual(sorted(one.blocks), keys("c", 2))
            self.assertEqual(one.snapshots, 1)
        for one, left in ((reader, 1), (second, 0)):
            one.watch.close()
            self.model.set("event_readers", left)
            self.compare("the end of a reader")
        # They may come again: events go on for some minutes.
        self.put("other", "d", 1, 30)
        self.told("stored", 1, 3)
        self.compare("a store after the last reader")
        exposition.check(workload_test.PROMTOOL, exposition.get(self.daemon.ready))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--promtool", required=True)
    known, rest = parser.parse_known_args()
    workload_test.PROMTOOL = known.promtool
    sys.argv = [sys.argv[0], *rest]
    cli_support.main()
