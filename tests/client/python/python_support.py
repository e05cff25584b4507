"""What the tests of the Python package stand on: a daemon, small namespaces, arrays of them."""
import contextlib
import os
import signal
import sys
import time
import unittest

import numpy as np

import kvmill

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
import cli_support  # noqa: E402  # pylint: disable=wrong-import-position

LAYERS, HEADS, HEAD_DIM, TOKENS = 2, 2, 64, 64
KEYS = [b"block 0", b"block 1", b"block 2"]


def spec(**fields):
    return kvmill.NamespaceSpec(**{"groups": [kvmill.LayerGroup(range(LAYERS), HEADS, HEAD_DIM)], "model": "tiny",
                                   "block_tokens": TOKENS, **fields})


def gaussian(seed, tokens=TOKENS, heads=HEADS):
    """Per layer (k, v) in fp16."""
    random = np.random.default_rng(seed)
    return [tuple(random.standard_normal((tokens, heads, HEAD_DIM)).astype(np.float16) for _ in "kv")
            for _ in range(LAYERS)]


def to_bits(array):
    """bfloat16 as uint16, by dropping the lower half of floats."""
    return (array.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def from_bits(array):
    return (array.astype(np.uint32) << 16).view(np.float32)


def relative_error(want, got):
    want, got = (np.concatenate([np.ravel(a).astype(float) for layer in kv for a in layer]) for kv in (want, got))
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def threads_of(pid):
    return [f"/proc/{pid}/task/{thread}/stat" for thread in os.listdir(f"/proc/{pid}/task")]


def state_of(path):
    with open(path, encoding="utf-8") as file:
        return file.read().rpartition(")")[2].split()[0]


class Case(unittest.TestCase):
    """A daemon for all classes, unless one wants to kill its own; a client for each test."""

    shared = None
    own_daemon = False

    @classmethod
    def setUpClass(cls):
        cls.daemon = None if cls.own_daemon else Case.shared
        if cls.daemon is None:
            cls.daemon = cli_support.Daemon()
            unittest.addModuleCleanup(cls.daemon.remove)
            unittest.addModuleCleanup(cls.daemon.stop)
            if not cls.own_daemon:
                Case.shared = cls.daemon

    def setUp(self):
        self.client = kvmill.Client(self.daemon.server, timeout=60)
        self.addCleanup(self.client.close)

    @contextlib.contextmanager
    def stopped(self):
        """While the daemon does not answer."""
        pid = self.daemon.process.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            while any(state != "T" for state in map(state_of, threads_of(pid))):  # The signal takes its time.
                time.sleep(0.001)
            yield
        finally:
            if self.daemon.process.returncode is None:
                os.kill(pid, signal.SIGCONT)

    def open(self, **fields):
        # With a revision of its own: equal specs share their blocks, whatever their names.
        return self.client.open_namespace(self.id(), spec(**{"revision": self.id(), **fields}))

    def put(self, ns, key, layers, **fields):
        result = self.client.store(ns, [kvmill.Block(key, layers, **fields)])
        self.assertIsNone(result.blocks[0].error)
        return result

    def get(self, ns, key, **fields):
        out = ns.empty(1)
        result = self.client.fetch(ns, [key], out, **fields)
        self.assertIsNone(result.blocks[0].error)
        return out[0]


class MapCase(Case):
    def fill(self, **fields):
        """A namespace with KEYS in it."""
        ns = self.open(**fields)
        for i, key in enumerate(KEYS):
            self.put(ns, key, gaussian(i), block_index=i)
        return ns

    def wait_for_leases(self, count):
        deadline = time.monotonic() + 20  # No lease has ended by itself by then.
        while time.monotonic() < deadline:
            if self.client.stat().leases == count:
                return
            time.sleep(0.005)
        self.fail(f"{self.client.stat().leases} leases, want {count}")
