#!/usr/bin/env python3
"""Two hosts and UCX between them (ctest `two_hosts_test`): two network namespaces joined by a veth pair, a daemon in each.

A process on host A stores real K and V in A's daemon, a process on host B takes it from there, byte by byte, and puts it
into B's daemon; both over UCX, once over IPv4 and once over IPv6, encrypted and not. Then a process on each host maps the
blocks of the daemon beside it and attends to them in place. The Python example (tests/examples/exchange.py) does the same
with a process of its own on each host. Another address of host B, which no client comes from, never reaches UCX's ports on A;
and gRPC on another network than UCX's works. Needs root and `ip netns`; exit code 77 without.

two_hosts_test.py BIN_DIR PROBE_DIR SOURCE_DIR [--python]
"""
import filecmp
import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

SKIPPED = 77
SECONDS = 60


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Host:
    """A network namespace with one end of the wire."""

    def __init__(self, name, folder):
        self.name, self.folder = name, os.path.join(folder, name)
        os.makedirs(os.path.join(self.folder, "run"), 0o750)
        ip("netns", "add", name)
        self.socket = os.path.join(self.folder, "run", "kvmill.sock")
        self.daemon = self.ready = None

    def run(self, *command):
        done = subprocess.run(["ip", "netns", "exec", self.name, *command], capture_output=True, text=True,
                              timeout=SECONDS, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}{self.log()}")
        return done.stdout

    def start(self, kvmilld, address, grpc_address, *flags):
        listen = f"[{grpc_address}]:0" if ":" in grpc_address else f"{grpc_address}:0"
        with open(os.path.join(self.folder, "log"), "wb") as log:
            self.daemon = subprocess.Popen(
                ["ip", "netns", "exec", self.name, kvmilld, "--socket", self.socket, "--host-bytes", "64MiB",
                 "--listen", listen, "--ucx", address, "--insecure", *flags],
                stdout=subprocess.PIPE, stderr=log)
        line = self.daemon.stdout.readline()
        if not line:
            raise RuntimeError(f"kvmilld did not start on {address}: {self.log()}")
        self.ready = json.loads(line)

    def log(self):
        path = os.path.join(self.folder, "log")
        if not os.path.exists(path):
            return ""
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()

    def stop(self):
        if self.daemon is None:
            return
        self.daemon.send_signal(signal.SIGTERM)  # `ip netns exec` has become the daemon.
        code = self.daemon.wait(SECONDS)
        self.daemon.stdout.close()
        self.daemon = None
        if code != 0:
            raise RuntimeError(f"kvmilld ended with {code}: {self.log()}")

    def remove(self):
        if self.daemon is not None:
            self.daemon.kill()
            self.daemon.wait()
        subprocess.run(["ip", "netns", "del", self.name], check=False, capture_output=True)


def relay(kvmill, probe_dir, a, b, kv, folder, flags):
    """Stores on A, moves to B, compares what both give, attends to both in place."""
    plain = ["--data-plane-plaintext"] if "--data-plane-plaintext" in flags else []
    name = ["--namespace", "relay", "--sequence", "s"]
    at_a, at_b = a.ready["listen"], b.ready["listen"]
    put = json.loads(a.run(kvmill, "put", *name, "--format", "k4v2_g128", "--kv", kv, "--path", "ucx", *plain, "--server", at_a,
                           "--json"))
    assert put["blocks_stored"] > 0 and put["blocks_failed"] == 0, put
    out = {}
    for host, server, path in ((a, at_a, "inline"), (b, at_a, "ucx")):
        out[host.name] = os.path.join(folder, f"{host.name}-{path}-")
        extra = plain if path == "ucx" else []
        got = json.loads(host.run(kvmill, "get", *name, "--tiles", "--out", out[host.name], "--path", path, *extra, "--server",
                                  server, "--json"))
        assert got["blocks"] == put["blocks_stored"] and got["misses"] == 0, got
    same(out[a.name], out[b.name])
    attend(probe_dir, a)
    if not plain:
        said = b.run(os.path.join(probe_dir, "relay_probe"), at_a, at_b, "relay", "s")
        assert said.startswith("moved "), said
        moved = os.path.join(folder, "moved-")
        got = json.loads(b.run(kvmill, "get", *name, "--tiles", "--out", moved, "--path", "ucx", "--server", at_b, "--json"))
        assert got["blocks"] == put["blocks_stored"], got
        same(out[a.name], moved)
        attend(probe_dir, b)


def exchange(example, a, b, kv, flags):
    """The Python example, each of its processes on the host that it is meant for."""
    plain = ["plaintext"] if "--data-plane-plaintext" in flags else []
    at_a, at_b = a.ready["listen"], b.ready["listen"]
    for host, said, command in ((a, "stored 14 blocks", ["store", at_a, kv]), (b, "moved 14 blocks", ["relay", at_a, at_b]),
                                (a, "attended to 1792 tokens", ["attend", f"unix:{a.socket}", at_b])):
        output = host.run(sys.executable, example, *command, *plain)
        assert output.startswith(said), output


def attend(probe_dir, host):
    """Without a copy: through the daemon's local door."""
    said = host.run(os.path.join(probe_dir, "attend_probe"), f"unix:{host.socket}", "relay", "s")
    assert said.startswith("attended to "), said


def expect_unreachable(a, b, stranger, address):
    """UCX's ports on host A, from an address of host B that nobody there uses."""
    listener = int(a.ready["ucx"].rsplit(":", 1)[1])
    open_ports = set()
    for table in ("tcp", "tcp6"):
        for line in a.run("cat", f"/proc/net/{table}").splitlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            open_ports.add(int(local.rsplit(":", 1)[1], 16) if state == "0A" else 0)
    ports = sorted(open_ports & set(range(listener, listener + 16)))
    assert len(ports) == 2, f"UCX listens on {ports}"
    connect = ("import socket, sys\n"
               "try:\n"
               "    socket.create_connection((sys.argv[2], int(sys.argv[3])), 0.3, (sys.argv[1], 0)).sendall(bytes(64))\n"
               "except TimeoutError:\n"
               "    print('nobody answers')\n")
    # Not for longer: UCX's client does not find its way between two IPv6 addresses of one interface.
    nodad = ["nodad"] if ":" in stranger else []
    prefix = stranger + ("/64" if nodad else "/24")
    ip("-n", b.name, "addr", "add", prefix, "dev", "eth0", *nodad)
    for port in ports:
        said = b.run(sys.executable, "-c", connect, stranger, address, str(port))
        assert said == "nobody answers\n", f"{stranger} reached {address} port {port}"
    ip("-n", b.name, "addr", "del", prefix, "dev", "eth0")
    assert a.daemon.poll() is None, a.log()


def same(left, right):
    files = sorted(glob.glob(left + "*.records"))
    assert files, f"no records at {left}"
    for file in files:
        other = right + os.path.basename(file)[len(os.path.basename(left)):]
        assert filecmp.cmp(file, other, shallow=False), f"{file} and {other} differ"


def main():
    bin_dir, probe_dir, source_dir, *python = sys.argv[1:]
    if os.getuid() != 0 or shutil.which("ip") is None:
        print("skipped: two network namespaces need root and the program ip (package iproute2)")
        return SKIPPED
    kvmilld, kvmill = os.path.join(bin_dir, "kvmilld"), os.path.join(bin_dir, "kvmill")
    prefix = sorted(glob.glob(os.path.join(source_dir, "tests", "data", "tiny-lm-kv", "*L00_k.npy")))[0][:-len("L00_k.npy")]
    folder = tempfile.mkdtemp(prefix="kvmill-two-hosts-")
    hosts = []
    try:
        names = [f"kvmill-{side}-{os.getpid()}" for side in "ab"]
        try:
            for name in names:
                hosts.append(Host(name, folder))
            ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        except subprocess.CalledProcessError as error:
            print(f"skipped: no network namespaces here: {error.stderr.strip()}")
            return SKIPPED
        for number, host in enumerate(hosts, 1):
            for arguments in (("link", "set", "lo", "up"), ("link", "set", "eth0", "up"),
                              ("addr", "add", f"10.77.0.{number}/24", "dev", "eth0"),
                              ("addr", "add", f"fd77::{number}/64", "dev", "eth0", "nodad"),
                              ("addr", "add", f"10.78.0.{number}/24", "dev", "eth0")):
                ip("-n", host.name, *arguments)
        ipv4, ipv6, other = ("10.77.0.1", "10.77.0.2"), ("fd77::1", "fd77::2"), ("10.78.0.1", "10.78.0.2")
        for addresses, grpc_addresses, flags in ((ipv4, ipv4, ()), (ipv6, ipv6, ()), (ipv4, ipv4, ("--data-plane-plaintext",)),
                                                 (ipv4, other, ())):
            for host, address, grpc_address in zip(hosts, addresses, grpc_addresses):
                host.start(kvmilld, address, grpc_address, *flags)
            begin = time.monotonic()
            expect_unreachable(*hosts, addresses[1] + "9", addresses[0])
            relay(kvmill, probe_dir, *hosts, prefix, folder, flags)
            expect_unreachable(*hosts, addresses[1] + "9", addresses[0])
            if python:
                exchange(os.path.join(source_dir, "tests", "examples", "exchange.py"), *hosts, prefix, flags)
            print(f"{addresses[0]} {' '.join(flags)}: byte by byte the same, {time.monotonic() - begin:.2f} s")
            for host in hosts:
                host.stop()
        return 0
    finally:
        for host in hosts:
            host.remove()
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
