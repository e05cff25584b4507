"""What the tests of the program stand on (cli_test.py and others): a daemon of its own, one-word verbs, and .npy files in plain Python."""
import argparse
import glob
import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest

BIN_DIR = SOURCE_DIR = ""
READY_SECONDS = 60
COMMAND_SECONDS = 120


class Tensor:
    """A .npy file of 16-bit values: shape, bytes, dtype text."""

    def __init__(self, shape, data, descr="<f2"):
        self.shape, self.data, self.descr = shape, data, descr

    @classmethod
    def of(cls, shape, values):
        return cls(shape, struct.pack(f"<{len(values)}e", *values))

    @classmethod
    def read(cls, path):
        with open(path, "rb") as file:
            data = file.read()
        assert data[:8] == b"\x93NUMPY\1\0", path
        length = struct.unpack("<H", data[8:10])[0]
        assert (10 + length) % 64 == 0, path
        header = data[10:10 + length].decode("latin-1")
        assert "'fortran_order': False" in header, header
        shape = tuple(int(n) for n in re.search(r"'shape': \(([^)]*)\)", header).group(1).split(",") if n.strip())
        return cls(shape, data[10 + length:], re.search(r"'descr': '([^']*)'", header).group(1))

    def file_bytes(self, descr=None, fortran=False, shape=None):
        header = f"{{'descr': '{descr or self.descr}', 'fortran_order': {fortran}, 'shape': {shape or self.shape}, }}"
        header += " " * (-(10 + len(header) + 1) % 64) + "\n"
        return b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header.encode() + self.data

    def values(self):
        return struct.unpack(f"<{len(self.data) // 2}e", self.data)

    def relative_error(self, other, tokens):
        """|other - self| / |self| over the first tokens."""
        count = tokens * self.shape[1] * self.shape[2]
        mine, theirs = self.values()[:count], other.values()[:count]
        assert len(mine) == len(theirs) == count
        norm = sum(a * a for a in mine)
        return (sum((b - a) * (b - a) for a, b in zip(mine, theirs)) / norm) ** 0.5


def gaussian(tokens, heads, head_dim, seed):
    generator = random.Random(seed)
    return Tensor.of((tokens, heads, head_dim), [generator.gauss(0, 1) for _ in range(tokens * heads * head_dim)])


def extra_kv_prefix():
    extra = os.environ.get("KVMILL_EXTRA_DATA")
    for folder in (os.path.join(extra, "kv"), extra) if extra else ():
        found = sorted(glob.glob(os.path.join(folder, "*L00_k.npy")))
        if found:
            return found[0][:-len("L00_k.npy")]
    return None


class Daemon:
    """A kvmilld in a folder of its own; ends by its process id."""

    def __init__(self, *flags):
        self.folder = tempfile.mkdtemp(prefix="kvmill-cli-test-")
        os.mkdir(os.path.join(self.folder, "run"), 0o750)
        self.socket = os.path.join(self.folder, "run", "kvmill.sock")
        self.server = "unix:" + self.socket
        self.flags = flags
        self.process = self.ready = None
        self.start()

    def start(self):
        command = [os.path.join(BIN_DIR, "kvmilld"), "--socket", self.socket, "--data-dir",
                   os.path.join(self.folder, "data"), "--host-bytes", "256MiB", "--disk-bytes", "256MiB", *self.flags]
        with open(os.path.join(self.folder, "log"), "ab") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        os.set_blocking(self.process.stdout.fileno(), False)
        deadline = time.monotonic() + READY_SECONDS
        text = b""
        while b"\n" not in text:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill_hard()
                with open(os.path.join(self.folder, "log"), encoding="utf-8", errors="replace") as log:
                    raise RuntimeError("kvmilld did not become ready:\n" + log.read())
            text += self.process.stdout.read() or b""
            time.sleep(0.01)
        self.ready = json.loads(text)

    def kill_hard(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()

    def stop(self):
        if self.process.returncode is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.kill_hard()
        self.process.stdout.close()

    def remove(self):
        shutil.rmtree(self.folder, ignore_errors=True)


class Result:
    def __init__(self, code, output, error):
        self.code, self.output, self.error = code, output, error

    def json(self):
        assert self.output.count("\n") == 1, self.output
        return json.loads(self.output)


class Case(unittest.TestCase):
    server = None  # Of the daemon, when the class has one.

    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="kvmill-cli-case-")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)

    def path(self, name):
        return os.path.join(self.folder, name)

    def write(self, name, tensor):
        with open(self.path(name), "wb") as file:
            file.write(tensor.file_bytes())
        return self.path(name)

    def kvmill(self, *arguments, code=0, server=None, prepare=None):
        """Runs one command; fails the test when its exit code is another one (code None: any)."""
        if prepare:
            prepare()
        command = [os.path.join(BIN_DIR, "kvmill"), *map(str, arguments)]
        server = self.server if server is None else server
        if server:
            command += ["--server", server]
        # encode, decode and the like are asked for JSON by their callers through Result.json().
        if arguments and arguments[0] in ("encode", "decode") and "--json" not in command:
            command.append("--json")
        result = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
        if code is not None:
            self.assertEqual(result.returncode, code, f"{' '.join(command)}\n{result.stdout}{result.stderr}")
        return Result(result.returncode, result.stdout, result.stderr)


def main():
    global BIN_DIR, SOURCE_DIR  # Set once, before any test runs.
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin-dir", required=True)
    parser.add_argument("--source-dir", required=True)
    arguments, rest = parser.parse_known_args()
    BIN_DIR, SOURCE_DIR = os.path.abspath(arguments.bin_dir), os.path.abspath(arguments.source_dir)
    sys.modules.setdefault("cli_support", sys.modules[__name__])
    unittest.main(module="__main__", argv=[sys.argv[0], *rest])
