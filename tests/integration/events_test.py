#!/usr/bin/env python3
"""What happens to blocks, as routers read it: from ZeroMQ and msgpack as others wrote them, and from `kvmill watch`.

A real kvmilld publishes; a reader that works as those of engines' events do (docs/events.md) follows it through stores,
evictions, removals, a clear and restarts, asks for what it missed, and must believe what `kvmill ls` lists. Every message
is checked byte by byte: the payload is what msgpack makes of the same values.

events_test.py BIN_DIR SOURCE_DIR
"""
import contextlib
import importlib.util
import json
import os
import pathlib
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time

import msgpack
import numpy
import zmq

BLOCK_TOKENS = 64
PATIENCE = 120  # Seconds, for what must happen on a busy machine.
END = b"\xff" * 8
TOPIC = "kv@node-1@demo"
FORMATS = {"demo": "k4v2_g64", "other": "k2v2_g64"}


class Failure(Exception):
    pass


def expect(truth, *what):
    if not truth:
        raise Failure(" ".join(str(part) for part in what))


class Daemon:
    """kvmilld and the command line, in a folder."""

    def __init__(self, bin_dir, folder):
        self.bin_dir, self.folder = bin_dir, folder
        self.process = None
        self.socket = folder / "run" / "kvmill.sock"
        (folder / "run").mkdir(mode=0o750)

    def start(self, *flags):
        self.log = open(self.folder / "kvmilld.log", "ab")
        self.process = subprocess.Popen(
            [self.bin_dir / "kvmilld", "--socket", self.socket, "--device", "host", "--host-bytes", "64MiB",
             "--data-dir", self.folder / "disk", "--disk-bytes", "1GiB", *flags],
            stdout=subprocess.PIPE, stderr=self.log, text=True)
        line = self.process.stdout.readline()
        expect(line, "kvmilld does not start:", (self.folder / "kvmilld.log").read_text())
        self.ready = json.loads(line)
        return self.ready

    def stop(self):
        if self.process is None:
            return
        self.process.send_signal(signal.SIGTERM)
        expect(self.process.wait(PATIENCE) == 0, "kvmilld ended with", self.process.returncode)
        self.process = None

    def kill(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def kvmill(self, *arguments, code=0):
        done = subprocess.run([self.bin_dir / "kvmill", *arguments, "--server", f"unix:{self.socket}"],
                              capture_output=True, text=True, timeout=PATIENCE, check=False)
        expect(done.returncode == code, arguments, "ended with", done.returncode, done.stderr)
        return done.stdout

    def put(self, namespace, sequence, tokens):
        prefix = self.folder / f"{sequence}-"
        random = numpy.random.default_rng(len(sequence))
        for kind in "kv":
            numpy.save(f"{prefix}L00_{kind}.npy", random.standard_normal((tokens, 1, 64)).astype(numpy.float16))
        # Names alone make no other namespace.
        self.kvmill("put", "--namespace", namespace, "--format", FORMATS[namespace], "--sequence", sequence, "--kv",
                    str(prefix), "--wait", "durable")

    def listed(self):
        """{(key, tier)}."""
        blocks = json.loads(self.kvmill("ls", "--json"))
        return {(block["key"], block["tier"]) for block in blocks}


def number_of(key):
    return int.from_bytes(bytes.fromhex(key)[-8:], "big")


MEDIUM = {"gpu": "GPU", "host": "CPU", "disk": "DISK"}


class Router:
    """Follows a publisher as readers of engines' events do: applies messages in their order, asks for those that it
    missed, and begins anew when the sequence does. `index` counts how often a block was stored in a medium."""

    def __init__(self, context, live, replay, topic=TOPIC, replay_topic=True, hash_of=number_of):
        self.context, self.replay_address = context, replay
        self.topic, self.replay_topic, self.hash_of = topic.encode(), replay_topic, hash_of
        self.live_address = live
        self.index, self.last, self.live, self.log, self.resets = {}, None, None, [], 0
        self.connect()

    def connect(self):
        self.sub = self.context.socket(zmq.SUB)
        self.sub.setsockopt(zmq.SUBSCRIBE, self.topic)
        self.sub.setsockopt(zmq.LINGER, 0)
        self.sub.connect(self.live_address)

    def close(self):
        self.sub.close()

    def replay(self, first):
        """The (sequence, payload) from `first` on."""
        dealer = self.context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        try:
            dealer.connect(self.replay_address)
            dealer.send_multipart([b"", struct.pack(">Q", first)])
            answers = []
            while True:
                expect(dealer.poll(PATIENCE * 1000), "no answer to a replay")
                frames = dealer.recv_multipart()
                expect(frames[0] == b"", "no empty frame", frames)
                if self.replay_topic:
                    expect(len(frames) == 4 and frames[1] == self.topic, "a replay's frames", frames)
                else:
                    expect(len(frames) == 3, "a replay's frames", frames)
                sequence, payload = frames[-2:]
                if sequence == END:
                    expect(payload == b"", "an end marker with", payload)
                    return answers
                answers.append((struct.unpack(">Q", sequence)[0], payload))
        finally:
            dealer.close()

    def catch_up(self, first):
        for sequence, payload in self.replay(first):
            if self.last is not None and sequence > self.last + 1:
                self.reset()  # What it was to follow is not kept.
            elif self.last is not None:
                expect(sequence == self.last + 1, "after", self.last, "comes", sequence)
            self.apply(payload)
            self.last = sequence

    def reset(self):
        self.index, self.resets, self.last = {}, self.resets + 1, None

    def read(self, timeout_ms=0):
        """What came, in order; whether something did."""
        if not self.sub.poll(timeout_ms):
            return False
        topic, sequence, payload = self.sub.recv_multipart()
        expect(topic == self.topic, "topic", topic)
        expect(len(sequence) == 8, "sequence of", len(sequence), "bytes")
        sequence = struct.unpack(">Q", sequence)[0]
        if self.live is not None and sequence < self.live:  # Another incarnation.
            self.reset()
            self.catch_up(0)
        self.live = sequence
        if self.last is not None and sequence <= self.last:
            return True  # Replayed before.
        if self.last is None and sequence > 0 or self.last is not None and sequence > self.last + 1:
            self.catch_up(0 if self.last is None else self.last + 1)
            if self.last is not None and sequence <= self.last:
                return True
        self.apply(payload)
        self.last = sequence
        return True

    def apply(self, payload):
        batch = msgpack.unpackb(payload, strict_map_key=True)
        expect(msgpack.packb(batch) == payload, "not what msgpack makes of", batch, payload.hex())
        expect(len(batch) == 3 and isinstance(batch[0], float) and batch[2] == 0, "a batch", batch)
        expect(abs(batch[0] - time.time()) < 3600, "time stamp", batch[0])
        for event in batch[1]:
            self.log.append(event)
            if event[0] == "BlockStored":
                expect(len(event) == 8, "fields", event)
                _, hashes, parent, tokens, block_size, lora_id, medium, lora_name = event
                expect((parent, tokens, block_size, lora_id, lora_name) == (None, [], BLOCK_TOKENS, None, None), event)
                expect(hashes and medium in MEDIUM.values(), event)
                for one in hashes:
                    key = (one, medium)
                    self.index[key] = self.index.get(key, 0) + 1
            elif event[0] == "BlockRemoved":
                expect(len(event) == 3, "fields", event)
                for one in event[1]:
                    expect(self.index.get((one, event[2]), 0) == 1, one, "is removed from", event[2],
                           "but was stored there", self.index.get((one, event[2]), 0), "times")
                    del self.index[one, event[2]]
            else:
                expect(event == ["AllBlocksCleared"], event)
                self.index = {}

    def wait_for(self, blocks, what):
        """Until it believes exactly these {(key, tier)}."""
        want = {(self.hash_of(key), MEDIUM[tier]): 1 for key, tier in blocks}
        deadline = time.monotonic() + PATIENCE
        while self.index != want:
            expect(time.monotonic() < deadline, what + ": believes", self.index, "want", want)
            if not self.read(100) and self.replay_address:
                self.catch_up(0 if self.last is None else self.last + 1)  # Nothing may come any more.
        return self


class Watcher:
    """`kvmill watch --json`."""

    def __init__(self, daemon, *arguments):
        self.process = subprocess.Popen(
            [daemon.bin_dir / "kvmill", "watch", "--json", "--server", f"unix:{daemon.socket}", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.index, self.spaces, self.position, self.complete = {}, {}, None, False

    def read(self):
        line = self.process.stdout.readline()
        expect(line, "kvmill watch ended")
        event = json.loads(line)
        kind = event["event"]
        if kind == "snapshot_begin":
            self.index, self.complete = {}, False
        elif kind in ("position", "snapshot_end"):
            self.position, self.complete = f"{event['epoch']}:{event['sequence']}", True
        elif kind == "stored" or kind == "moved":
            self.index[event["key"]] = event["tier"]
            self.spaces[event["key"]] = event["namespace"]
        elif kind == "removed":
            del self.index[event["key"]]
        elif kind == "cleared":
            self.index = {key: tier for key, tier in self.index.items() if self.spaces[key] != event["namespace"]}
        return event

    def wait_for(self, blocks):
        # A hang is the runner's to end: every line that is missing is a failure.
        while not self.complete or self.index != dict(blocks):
            self.read()

    def stop(self):
        self.process.send_signal(signal.SIGINT)
        self.process.communicate(timeout=PATIENCE)  # It may be writing what nobody wants to read any more.
        expect(self.process.returncode == 0, "kvmill watch ended with", self.process.returncode)


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def whole(daemon, blocks):
    """Of what is listed, so many blocks, those that are no tails."""
    told = [json.loads(line) for line in daemon.kvmill("watch", "--json", "--count", str(blocks)).splitlines()]
    tails = {event["key"] for event in told if event.get("tokens", BLOCK_TOKENS) < BLOCK_TOKENS}
    return {(key, tier) for key, tier in daemon.listed() if key not in tails}


def refused(bin_dir, folder, code, *flags):
    done = subprocess.run([bin_dir / "kvmilld", "--socket", folder / "run" / "other.sock", "--check-config", *flags],
                          capture_output=True, text=True, timeout=PATIENCE, check=False)
    expect(done.returncode == code, flags, "ended with", done.returncode)
    return done.stderr


def main():
    bin_dir, source_dir = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    context = zmq.Context()
    with tempfile.TemporaryDirectory(prefix="kvmill-events-") as folder:
        folder = pathlib.Path(folder)
        daemon = Daemon(bin_dir, folder)
        try:
            run(daemon, context, bin_dir, source_dir)
        except BaseException:
            sys.stderr.write((folder / "kvmilld.log").read_text(errors="replace")[-4000:])
            raise
        finally:
            daemon.kill()
            context.destroy(linger=0)


def run(daemon, context, bin_dir, source_dir):
    print("what is refused")
    expect("needs --events" in refused(bin_dir, daemon.folder, 1, "--events-replay", "127.0.0.1:0"), "replay alone")
    expect("ZeroMQ has no TLS" in refused(bin_dir, daemon.folder, 1, "--events", "0.0.0.0:0"), "off loopback")
    expect("numeric" in refused(bin_dir, daemon.folder, 2, "--events", "localhost:0"), "a name")
    refused(bin_dir, daemon.folder, 0, "--events", "tcp://0.0.0.0:0", "--insecure")

    print("stored, moved, removed")
    ports = free_ports(2)
    live, replay = (f"tcp://127.0.0.1:{port}" for port in ports)
    flags = ["--events", live, "--events-replay", replay, "--events-topic", TOPIC]
    ready = daemon.start(*flags)
    expect((ready["events"], ready["events_replay"]) == (live, replay), ready)
    router = Router(context, live, replay)
    watcher = Watcher(daemon)
    deadline = time.monotonic() + PATIENCE
    while router.last is None:  # Its first message is there before anything is stored.
        router.catch_up(0)
        expect(time.monotonic() < deadline, "nothing is published")
    expect(router.log == [["AllBlocksCleared"]] and router.last == 0, router.log)
    daemon.put("demo", "first", 4 * BLOCK_TOKENS)
    daemon.put("demo", "second", 2 * BLOCK_TOKENS + 9)  # With a tail, of which routers do not hear.
    blocks = whole(daemon, 7)
    expect(len(blocks) == 6 and len(daemon.listed()) == 7, daemon.listed())
    router.wait_for(blocks, "stored")
    watcher.wait_for(daemon.listed())
    daemon.kvmill("evict", "--tier", "host")
    on_disk = {(key, "disk") for key, _ in blocks}
    expect(whole(daemon, 7) == on_disk, daemon.listed())
    router.wait_for(on_disk, "evicted")
    watcher.wait_for(daemon.listed())
    stored = [i for i, event in enumerate(router.log) if event[0] == "BlockStored" and event[6] == "DISK"]
    removed = [i for i, event in enumerate(router.log) if event[0] == "BlockRemoved" and event[2] == "CPU"]
    expect(stored[0] < removed[0], "a block was nowhere for a while")
    gone = sorted(blocks)[0][0]
    daemon.kvmill("rm", "--namespace", "demo", "--key", gone)
    left = {block for block in on_disk if block[0] != gone}
    router.wait_for(left, "removed")
    watcher.wait_for(daemon.listed())

    print("what was missed is asked for")
    router.close()
    daemon.put("demo", "third", 3 * BLOCK_TOKENS)
    daemon.kvmill("rm", "--namespace", "demo", "--sequence", "first", code=0)
    before, resets = router.last, router.resets
    router.connect()
    router.wait_for(whole(daemon, len(daemon.listed())), "missed")
    expect(router.last > before and router.resets == resets, "it did not go on after", before)

    print("cleared: only this namespace")
    daemon.put("other", "fourth", 2 * BLOCK_TOKENS)
    daemon.kvmill("clear", "--namespace", "demo")
    router.wait_for(daemon.listed(), "cleared")
    expect(len(router.index) == 2 and ["AllBlocksCleared"] in router.log[1:], router.log)
    watcher.wait_for(daemon.listed())

    print("a restart")
    position, epoch = watcher.position, ready["boot_id"]
    expect(position.startswith(epoch + ":"), position)
    # Nothing followed: it goes on without a snapshot.
    again = Watcher(daemon, "--after", position)
    line = again.read()
    again.stop()
    expect(line == {"event": "position", "epoch": epoch, "sequence": int(position.split(":")[1])}, line)
    resets = router.resets
    daemon.stop()
    ready = daemon.start(*flags)
    on_disk = {(key, "disk") for key, _ in daemon.listed()}
    deadline = time.monotonic() + PATIENCE
    while router.resets == resets:
        # Its first messages may have been missed: the sequence is less than before.
        daemon.put("other", f"more-{time.monotonic()}", BLOCK_TOKENS)
        router.read(200)
        expect(time.monotonic() < deadline, "the restart was not seen")
    router.reset()
    router.log = []
    router.catch_up(0)
    expect(router.log[0] == ["AllBlocksCleared"], router.log[0])
    first = router.log[1]
    expect(first[0] == "BlockStored" and first[6] == "DISK" and len(first[1]) == len(on_disk), first)
    router.wait_for(daemon.listed(), "found on disk")
    watcher.wait_for(daemon.listed())
    expect(watcher.position.startswith(ready["boot_id"] + ":"), watcher.position)
    line = daemon.kvmill("watch", "--json", "--after", position, "--count", "1")
    expect(json.loads(line.splitlines()[0])["event"] == "snapshot_begin", "another epoch", line)
    watcher.stop()
    router.close()

    print("more than is kept, keys as hashes, bare replays")
    daemon.stop()
    daemon.start(*flags, "--events-buffer-steps", "3", "--events-hashes", "bytes", "--events-replay-frames", "bare",
                 "--events-high-water-mark", "1")
    router = Router(context, live, replay, replay_topic=False, hash_of=bytes.fromhex)
    for i in range(8):
        daemon.put("other", f"step-{i}", BLOCK_TOKENS)
        daemon.kvmill("flush")
    router.wait_for(daemon.listed(), "late")
    answers = router.replay(0)
    sequences = [sequence for sequence, _ in answers]
    expect(sequences == list(range(sequences[0], sequences[-1] + 1)) and sequences[0] > 0, sequences)
    expect(msgpack.unpackb(answers[0][1])[1][0] == ["AllBlocksCleared"], "no snapshot")
    expect(router.replay(sequences[-1] + 100) == [], "what never was")
    daemon.put("other", "and-on", BLOCK_TOKENS)
    router.wait_for(daemon.listed(), "after a snapshot")
    # Requests that are none do no harm.
    stranger = context.socket(zmq.DEALER)
    stranger.connect(replay)
    for frames in ([b"x"], [b"", b"short"], [b"", b"", b"\0" * 8], [b"", b"\0" * 9]):
        stranger.send_multipart(frames)
    expect(len(router.replay(0)) > 0, "strange requests")
    stranger.close(linger=0)
    router.close()

    print("the example of docs/events.md")
    example = load_example(source_dir)
    index = example.follow(live, replay, bare=True, until=lambda index: len(index) == len(daemon.listed()))
    expect(index == {(bytes.fromhex(key), MEDIUM[tier]) for key, tier in daemon.listed()}, index)
    daemon.stop()


def load_example(source_dir):
    spec = importlib.util.spec_from_file_location("follow_events", source_dir / "tests/examples/follow_events.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
