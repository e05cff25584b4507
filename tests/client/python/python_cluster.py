"""A cluster for tests of the Python package: an etcd and daemons on the loopback."""
import os
import shutil
import socket
import subprocess
import tempfile
import time

import kvmill
from python_support import cli_support

SOON = 60  # Seconds in which it has happened on the slowest machine.


def until(is_so, what):
    end = time.monotonic() + SOON
    while not is_so():
        if time.monotonic() > end:
            raise AssertionError(f"not within {SOON} s: {what}")
        time.sleep(0.02)


def free_ports(count):
    """That nobody had a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class Etcd:
    def __init__(self):
        self.folder = tempfile.mkdtemp(prefix="kvmill-etcd-")
        client, peer = (f"http://127.0.0.1:{port}" for port in free_ports(2))
        self.address = client[len("http://"):]
        with open(os.path.join(self.folder, "log"), "wb") as log:
            self.process = subprocess.Popen(
                [os.environ.get("KVMILL_TEST_ETCD", "etcd"), "--data-dir", os.path.join(self.folder, "data"),
                 "--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer,
                 "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"],
                stdout=log, stderr=subprocess.STDOUT)
        host, port = self.address.split(":")

        def answers():
            if self.process.poll() is not None:
                raise AssertionError(f"etcd ended; its log is {self.folder}/log")
            try:
                socket.create_connection((host, int(port)), timeout=1).close()
                return True
            except OSError:
                return False

        until(answers, "etcd answers")

    def remove(self):
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


class Cluster:
    """Daemons "a", "b", ... that know each other."""

    def __init__(self, names="ab"):
        self.etcd = Etcd()
        self.nodes = {}
        try:
            for name in names:
                self.nodes[name] = cli_support.Daemon(
                    "--cluster", f"etcd://{self.etcd.address}", "--listen", "127.0.0.1:0", "--insecure", "--node-id", name,
                    "--lease-ttl", "60s", "--ucx", "127.0.0.1", "--metrics", "127.0.0.1:0")
            for node in self.nodes.values():
                until(lambda node=node: self.members(node) == len(names), "the nodes know each other")
        except BaseException:
            self.remove()
            raise

    @staticmethod
    def members(node):
        status = subprocess.run([os.path.join(cli_support.BIN_DIR, "kvmill"), "cluster", "members", "--json", "--server",
                                 node.server], capture_output=True, text=True, timeout=60, check=False)
        return status.stdout.count('"id"')

    def client(self, name, **fields):
        return kvmill.Client(self.nodes[name].server, timeout=60, **fields)

    def remove(self):
        for node in self.nodes.values():
            node.stop()
            node.remove()
        self.etcd.remove()
