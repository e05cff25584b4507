#!/usr/bin/env python3
"""Readers of events that stop reading, against a real kvmilld: a ZeroMQ subscriber, and a stopped `kvmill watch`.

Stores and other readers do not wait for them, the subscriber costs the daemon no more memory than the high-water mark
says, and what they see afterwards is a gap that a replay fills, or everything.

slow_readers_test.py BIN_DIR SOURCE_DIR, with PYTHONPATH=build/release/python
"""
import os
import pathlib
import signal
import statistics
import struct
import sys
import tempfile
import time

import msgpack
import numpy
import zmq

import kvmill
from events_test import BLOCK_TOKENS, PATIENCE, TOPIC, Daemon, Router, Watcher, expect, free_ports

BLOCKS = 4000  # A message has 512 at most.
STEPS, HIGH_WATER_MARK = 8, 50
# What a stopped subscriber may hold: messages of 512 keys of 64 bytes, and their frames.
HELD_BYTES = HIGH_WATER_MARK * 512 * 72
# The kernel keeps some megabytes for a connection; memory that was freed is not given back at once.
SLACK_BYTES = 12 << 20


def spec(name):
    return kvmill.NamespaceSpec([kvmill.LayerGroup([0], 1, 64)], model=name, hash_scheme="h", block_tokens=BLOCK_TOKENS)


class Stores:
    """One namespace with many blocks, and one that is cleared again and again: each time everything that is left is
    published anew, which is 34 KB for 512 blocks."""

    def __init__(self, daemon):
        self.client = kvmill.Client(f"unix:{daemon.socket}", timeout=PATIENCE)
        self.kept = self.client.open_namespace("kept", spec("kept"))
        self.cleared = self.client.open_namespace("cleared", spec("cleared"))
        self.layers = [tuple(numpy.zeros((BLOCK_TOKENS, 1, 64), numpy.float16) for _ in "kv")]
        self.number = 0

    def keep(self, count):
        for first in range(0, count, 500):
            keys = [self.key() for _ in range(min(500, count - first))]
            result = self.client.store(self.kept, [kvmill.Block(key, self.layers) for key in keys])
            expect(result.blocks_stored == len(keys), result)

    def key(self):
        self.number += 1
        return b"%064d" % self.number

    def store_one(self):
        """Seconds that it took."""
        begin = time.monotonic()
        self.client.store(self.cleared, [kvmill.Block(self.key(), self.layers)])
        return time.monotonic() - begin

    def clear(self):
        self.client.clear(self.cleared)


def memory_of(daemon):
    """Anonymous memory of the daemon, in bytes."""
    with open(f"/proc/{daemon.process.pid}/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon:"))


class Subscriber:
    """Keeps only the sequences that it sees."""

    def __init__(self, context, live, small=False):
        self.socket = context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.SUBSCRIBE, TOPIC.encode())
        self.socket.setsockopt(zmq.LINGER, 0)
        if small:
            self.socket.setsockopt(zmq.RCVHWM, 1)
            self.socket.setsockopt(zmq.RCVBUF, 1 << 16)
        self.socket.connect(live)
        self.seen = []

    def read(self, timeout_ms):
        if not self.socket.poll(timeout_ms):
            return False
        _, sequence, _ = self.socket.recv_multipart()
        self.seen.append(struct.unpack(">Q", sequence)[0])
        return True

    def read_all(self, timeout_ms):
        while self.read(timeout_ms):
            pass
        return self.seen


def rounds(stores, count, reader):
    """So many clears, while somebody reads; how long the stores took."""
    times = []
    for _ in range(count):
        times.append(stores.store_one())
        time.sleep(0.02)  # So that it is told of before it is cleared.
        stores.clear()
        time.sleep(0.02)
        reader.read_all(0)
    reader.read_all(300)
    return times


def check_subscriber(daemon, context):
    live, replay = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
    daemon.start("--events", live, "--events-replay", replay, "--events-topic", TOPIC, "--events-hashes", "bytes",
                 "--events-high-water-mark", str(HIGH_WATER_MARK), "--events-buffer-steps", str(STEPS))
    stores = Stores(daemon)
    stores.keep(BLOCKS)
    reader = Subscriber(context, live)
    alone = rounds(stores, 20, reader)  # What is to be allocated is.
    slow = Subscriber(context, live, small=True)
    while not slow.read(100):
        rounds(stores, 1, reader)
    before, first = memory_of(daemon), reader.seen[-1]
    together = rounds(stores, 150, reader)
    published = reader.seen[-1] - first
    grown = memory_of(daemon) - before
    sent = published * 512 * 66  # About.
    print(f"  {published} messages, about {sent >> 20} MB; memory grew by {grown >> 20} MB; a store took "
          f"{statistics.median(alone) * 1e3:.2f} ms, and {statistics.median(together) * 1e3:.2f} beside a slow one")
    expect(sent > 2 * (HELD_BYTES + SLACK_BYTES), "too little was published to see anything:", sent)
    expect(grown < HELD_BYTES + SLACK_BYTES, "memory grew by", grown)
    # Nobody waits: neither who stores, nor who reads. Times are of a busy machine.
    expect(statistics.median(together) < 10 * statistics.median(alone) + 0.01, "stores wait for a subscriber")
    expect(reader.seen == list(range(reader.seen[0], reader.seen[-1] + 1)), "another subscriber missed something")

    print("  what it sees afterwards")
    slow.read_all(500)
    # In order; where its connection took a little now and then, with gaps.
    expect(len(slow.seen) < published and slow.seen == sorted(set(slow.seen)), "what it was sent, in order:", slow.seen)
    missed = slow.seen[-1] + 1 - slow.seen[0] - len(slow.seen)
    stores.store_one()
    deadline = time.monotonic() + PATIENCE
    while not slow.read(100):
        expect(time.monotonic() < deadline, "it is not sent anything any more")
    missed += slow.seen[-1] - 1 - slow.seen[-2]
    expect(missed > published // 2, "it did not read, and missed only", missed)
    # It asks for what it missed, of which too little is kept: everything that is here now follows.
    router = Router(context, live, replay, hash_of=bytes.fromhex)
    router.last = next(a for a, b in zip(slow.seen, slow.seen[1:]) if b != a + 1)
    router.catch_up(router.last + 1)
    expect(router.resets == 1, "a replay does not say that something is gone", router.resets)
    router.wait_for(daemon.listed(), "after a gap")
    # One that missed no more than is kept is given just that.
    last = router.last
    stores.store_one()
    while not router.read(100):
        pass
    answers = router.replay(last + 1)
    expect(answers and answers[0][0] == last + 1, "what is kept is not replayed", last, [a for a, _ in answers])
    expect(["AllBlocksCleared"] not in msgpack.unpackb(answers[0][1])[1], "everything is told again")
    router.close()
    daemon.stop()


def check_stopped_watch(daemon):
    daemon.start()
    stores = Stores(daemon)
    watcher, stopped = Watcher(daemon), Watcher(daemon)
    for one in (watcher, stopped):
        one.wait_for(daemon.listed())
    os.kill(stopped.process.pid, signal.SIGSTOP)
    alone, together = [], []
    for _ in range(3):
        stores.keep(BLOCKS)
        watcher.wait_for(daemon.listed())  # It hangs when the other one holds it up.
        for _ in range(20):
            together.append(stores.store_one())
    watcher.wait_for(daemon.listed())
    os.kill(stopped.process.pid, signal.SIGCONT)
    stopped.wait_for(daemon.listed())
    for _ in range(20):
        alone.append(stores.store_one())
    expect(statistics.median(together) < 10 * statistics.median(alone) + 0.01, "stores wait for who is stopped")
    stopped.wait_for(daemon.listed())

    print("  a daemon ends that has one")
    os.kill(stopped.process.pid, signal.SIGSTOP)
    stores.keep(BLOCKS)
    watcher.wait_for(daemon.listed())
    begin = time.monotonic()
    daemon.stop()
    expect(time.monotonic() - begin < 30, "it took", time.monotonic() - begin, "s to stop")
    os.kill(stopped.process.pid, signal.SIGCONT)
    for one in (watcher, stopped):
        one.stop()


def main():
    bin_dir = pathlib.Path(sys.argv[1])
    context = zmq.Context()
    for name, check in (("a subscriber that does not read", lambda d: check_subscriber(d, context)),
                        ("a watch that is stopped", check_stopped_watch)):
        print(name, flush=True)
        with tempfile.TemporaryDirectory(prefix="kvmill-slow-readers-") as folder:
            daemon = Daemon(bin_dir, pathlib.Path(folder))
            try:
                check(daemon)
            except BaseException:
                sys.stderr.write((pathlib.Path(folder) / "kvmilld.log").read_text(errors="replace")[-4000:])
                raise
            finally:
                daemon.kill()
    context.destroy(linger=0)


if __name__ == "__main__":
    main()
