#!/usr/bin/env python3
"""docs/hosts.md as it stands: its certificates, files and commands, with etcd and two nodes on loopback (ctest `hosts_test`).

Blocks of the page that a `<!-- hosts_test: NAME -->` marks are run, or are the files that programs get, with addresses, ports
and folders of this test in place of the page's. What one node stored the other one has, over TLS and UCX; new certificates are
taken over; a node is drained through the other one; and a node whose certificate has a name of its own gets nothing, as the
page says. The unit deploy/systemd/kvmilld.service starts what the page wrote, and gives it time to drain.

hosts_test.py --bin-dir DIR --source-dir DIR --etcd PROGRAM
"""
import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.request

BIN_DIR = SOURCE_DIR = ETCD = ""
WAIT_SECONDS = 300  # Of a busy machine.
BLOCKS = 14  # Of the prompt that the page stores.


def read(*path):
    with open(os.path.join(*path), encoding="utf-8") as file:
        return file.read()


def marked_blocks(page):
    found = re.findall(r"^<!-- hosts_test: (\S+) -->\n```\w*\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    blocks = dict(found)
    assert len(blocks) == len(found), "two blocks of one name"
    return blocks


def settings(unit):
    return dict(re.findall(r"^(\w+)=(.*)$", unit, re.MULTILINE))


def seconds(duration):
    number, unit = re.fullmatch(r"(\d+)(s|min|m|h)", duration).groups()
    return int(number) * {"s": 1, "m": 60, "min": 60, "h": 3600}[unit]


class Ports:
    """Of every address of the page, as 192.0.2.11:7600, one on loopback that was free."""

    def __init__(self):
        self.ports, self.taken = {}, []

    def of(self, address):
        if address not in self.ports:
            taken = socket.socket()  # Until all are known, so that none is given twice.
            taken.bind(("127.0.0.1", 0))
            self.taken.append(taken)
            self.ports[address] = taken.getsockname()[1]
        return f"127.0.0.1:{self.ports[address]}"

    def free(self):
        for taken in self.taken:
            taken.close()
        self.taken = []


class HostsTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="kvmill-hosts-")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.blocks = marked_blocks(read(SOURCE_DIR, "docs", "hosts.md"))
        self.unit = settings(read(SOURCE_DIR, "deploy", "systemd", "kvmilld.service"))
        self.ports = Ports()
        self.addCleanup(self.ports.free)
        self.daemons = {}

    def host(self, n, *path):
        return os.path.join(self.folder, f"host-{n}", *path)

    def here(self, text, n):
        """A text of the page as host n has it here."""
        text = re.sub(r"-o root -g \w+ ", "", text)  # This test is one user.
        text = re.sub(r"(?<![\w/.-])/(etc|run|var/lib|tmp)/", lambda match: self.host(n, match.group(1)) + "/", text)
        text = text.replace("/opt/kvmill/tests", os.path.join(SOURCE_DIR, "tests")).replace("/opt/kvmill/bin", BIN_DIR)
        text = re.sub(r"\b192\.0\.2\.\d+:\d+", lambda match: self.ports.of(match.group()), text)
        return re.sub(r"\b192\.0\.2\.\d+", "127.0.0.1", text)

    def run_script(self, script):
        return subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=self.folder, capture_output=True, text=True, check=False,
                              env={"PATH": f"{BIN_DIR}:{os.environ['PATH']}", "HOME": self.folder}, timeout=WAIT_SECONDS)

    def shell(self, script, want=0):
        done = self.run_script(script)
        self.assertEqual(done.returncode, want, f"{script}\n{done.stdout}{done.stderr}{self.logs()}")
        return done.stdout + done.stderr

    def block(self, name, n, want=0):
        return self.shell(self.here(self.blocks[name], n), want)

    def logs(self):
        names = [name for name in sorted(os.listdir(self.folder)) if name.startswith("log-kvmilld")]
        return "".join(f"--- {name}\n{read(self.folder, name)[-3000:]}" for name in names)

    def wait(self, what, condition):
        deadline = time.monotonic() + WAIT_SECONDS
        while not condition():
            self.assertLess(time.monotonic(), deadline, f"{what}\n{self.logs()}")
            time.sleep(0.1)

    def process(self, name, command, environment=None):
        with open(os.path.join(self.folder, f"out-{name}"), "wb") as out, open(os.path.join(self.folder, f"log-{name}"), "wb") as log:
            process = subprocess.Popen(command, stdout=out, stderr=log, env=environment)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    def files(self):
        """Certificates and a folder for each host, as the page makes them, and then with this test's addresses."""
        self.shell(re.sub(r"192\.0\.2\.\d+", "127.0.0.1", self.blocks["certificates"]))
        for name in ("kvmilld.yaml", "etcd"):
            with open(os.path.join(self.folder, name), "w", encoding="utf-8") as file:
                file.write(self.blocks[name])
        self.shell(self.blocks["folders"])
        for n in (1, 2, 3):
            for name in ("kvmilld.yaml", "etcd"):
                path = os.path.join(self.folder, f"node-{n}", name)
                text = self.here(read(path), n)
                if name == "kvmilld.yaml":
                    text = re.sub(r"(?m)^(host_bytes|disk_bytes): .*", r"\1: 64MiB", text) + "peer_timeout: 10s\n"  # Of a busy machine.
                with open(path, "w", encoding="utf-8") as file:
                    file.write(text)
            os.makedirs(self.host(n, "etc", "default"))
            os.makedirs(self.host(n, "tmp"))
            os.makedirs(self.host(n, "run", self.unit["RuntimeDirectory"]), int(self.unit["RuntimeDirectoryMode"], 8))
            os.makedirs(self.host(n, "var", "lib", self.unit["StateDirectory"]), int(self.unit["StateDirectoryMode"], 8))
        for n in (1, 2, 3):
            self.shell(self.here(self.blocks["install"].replace("node-1", f"node-{n}"), n))

    def start_etcd(self, n):
        environment = dict(line.split("=", 1) for line in read(self.host(n, "etc", "default", "etcd")).splitlines())
        os.makedirs(os.path.dirname(environment["ETCD_DATA_DIR"]), exist_ok=True)
        self.process(f"etcd-{n}", [ETCD], {**environment, "PATH": os.environ["PATH"]})

    def start_daemon(self, n):
        command = self.here(self.unit["ExecStart"], n).split()
        subprocess.run([*command, "--check-config"], check=True, capture_output=True, timeout=WAIT_SECONDS)
        daemon = self.daemons[n] = self.process(f"kvmilld-{n}", command)
        self.wait(f"node {n} is ready", lambda: daemon.poll() is not None or '"ready":true' in read(self.folder, f"out-kvmilld-{n}"))
        self.assertIsNone(daemon.poll(), self.logs())

    def members(self, n):
        said = self.shell(f"kvmill cluster members --json --server unix:{self.host(n, 'run/kvmill/kvmill.sock')}")
        return sorted(member["id"] for member in json.loads(said)["members"] if member["state"] == "serving")

    def metric(self, n, name):
        url = re.search(r"http://\S+", self.here(self.blocks["metrics"].replace("192.0.2.12", f"192.0.2.1{n}"), n)).group()
        with urllib.request.urlopen(url, timeout=WAIT_SECONDS) as answer:
            text = answer.read().decode()
        return sum(float(value) for value in re.findall(rf"^{name} (\S+)$", text, re.MULTILINE))

    def test_the_page_makes_a_cluster(self):
        self.files()
        self.ports.free()
        for n in (1, 2):  # Two of three: a majority.
            self.start_etcd(n)
        for n in (1, 2):
            self.start_daemon(n)
        for n in (1, 2):
            self.wait(f"node {n} sees both", lambda n=n: self.members(n) == ["node-1", "node-2"])

        said = self.block("first", 1)
        self.assertIn("registered", said)
        self.assertNotIn("problem", said)
        self.assertRegex(said, rf"blocks stored +{BLOCKS}\b")
        # It lists its members a moment before it asks them.
        second = self.here(self.blocks["second"], 2)
        self.wait("node 2 asks node 1", lambda: "is not known here" not in self.run_script(second).stderr)
        said = self.shell(second)
        self.assertRegex(said, rf"(?m)^blocks +{BLOCKS}\b")
        self.assertRegex(said, r"(?m)^misses +0$")
        self.assertLess(self.metric(2, r"kvmill_peer_failures_total\{.*\}"), self.metric(2, r"kvmill_peer_requests_total\{.*\}"))
        self.assertEqual(self.metric(2, r'kvmill_pulled_blocks_total\{result="stored"\}'), BLOCKS)
        # What the second one sees of what it pulled is on its own page, and not among the bytes of its own data plane.
        self.assertGreater(self.metric(1, r'kvmill_bytes_total\{direction="out",path="ucx",.*\}'), 0)
        self.assertEqual(self.metric(2, r'kvmill_peer_info\{peer="node-1",transport="tcp/[^"]*"\}'), 1)
        self.assertGreater(self.metric(2, r'kvmill_pulled_bytes_total\{transport="tcp/[^"]*"\}'), 0)
        self.assertEqual(self.metric(2, r'kvmill_pulled_bytes_total\{transport="grpc"\}'), 0)

        self.assertIn("blocks", self.block("client", 2))
        self.shell(re.sub("--tls-cert.*", "", self.here(self.blocks["client"], 2)), want=1)  # Who shows nothing is nobody.

        self.names_that_differ()
        self.new_certificates()

        said = self.block("drain", 1)
        self.assertRegex(said, r"(?m)^left +0$")
        self.assertEqual(self.daemons[2].wait(timeout=WAIT_SECONDS), 0)
        self.daemons[1].send_signal(signal.SIGTERM)
        self.assertEqual(self.daemons[1].wait(timeout=seconds(self.unit["TimeoutStopSec"])), 0)

    def names_that_differ(self):
        """What the page warns of: the third node has a certificate with a name of its own, and says nothing of the others'."""
        lines = self.blocks["certificates"].splitlines(keepends=True)
        issue = "".join(lines[next(i for i, line in enumerate(lines) if line.startswith("certificate()")):])
        issue = issue[:issue.index("\n}\n") + 3] + "certificate own DNS:node-3,IP:127.0.0.1 serverAuth,clientAuth\n"
        self.shell(issue + f"cp own.pem {self.host(3, 'etc/kvmill/tls/node.pem')}; cp own.key {self.host(3, 'etc/kvmill/tls/node.key')}")
        config = self.host(3, "etc", "kvmill", "kvmilld.yaml")
        text = read(config)
        with open(config, "w", encoding="utf-8") as file:
            file.write(re.sub(r"(?m)^tls_peers:.*\n", "", text))
        self.start_daemon(3)
        self.wait("all are members", lambda: self.members(3) == ["node-1", "node-2", "node-3"])

        def asked_in_vain():
            self.block("second", 3, want=3)
            requests = self.metric(3, r"kvmill_peer_requests_total\{.*\}")
            return requests > 0 and self.metric(3, r"kvmill_peer_failures_total\{.*\}") >= requests

        self.wait("node 3 asks the others, who do not answer", asked_in_vain)
        self.daemons[3].send_signal(signal.SIGTERM)
        self.assertEqual(self.daemons[3].wait(timeout=seconds(self.unit["TimeoutStopSec"])), 0)

    def serial_of(self, n):
        """Of the certificate that connections to node n get."""
        address = self.here(f"192.0.2.1{n}:7600", n)
        return self.shell(f"openssl s_client -connect {address} -alpn h2 -CAfile ca.pem -cert operator.pem -key operator.key </dev/null "
                          "2>/dev/null | openssl x509 -noout -serial")

    def new_certificates(self):
        before = self.serial_of(2)
        self.assertEqual(self.serial_of(2), before)
        second = next(line for line in self.blocks["certificates"].splitlines() if line.startswith("certificate node-2"))
        function = re.search(r"^certificate\(\).*?^}\n", self.blocks["certificates"], re.MULTILINE | re.DOTALL).group()
        tls = self.host(2, "etc", "kvmill", "tls-2")
        self.shell(self.here(f"{function}{second}\n", 2) + f"mkdir {tls}; cp ca.pem {tls}; cp node-2.pem {tls}/node.pem; cp node-2.key {tls}/node.key")
        self.block("rotate", 2)
        self.wait("node 2 has its new certificate", lambda: self.serial_of(2) != before)

    def test_tenants_are_apart_and_the_operator_sees_what_they_have(self):
        self.files()
        self.ports.free()
        function = re.search(r"^certificate\(\).*?^}\n", self.blocks["certificates"], re.MULTILINE | re.DOTALL).group()
        self.shell("umask 077\n" + function + self.blocks["tenant-certificate"])
        with open(os.path.join(self.folder, "tenants.yaml"), "w", encoding="utf-8") as file:
            file.write(self.blocks["tenants.yaml"])
        self.block("tenants", 1)
        for n in (1, 2):
            self.start_etcd(n)
        self.start_daemon(1)
        put, quota = self.here(self.blocks["tenant"], 1).splitlines()
        self.assertRegex(self.shell(put), rf"blocks stored +{BLOCKS}\b")
        said = self.shell(quota + " --json")
        tenants = {tenant["tenant"]: tenant for tenant in json.loads(said)}
        self.assertEqual(tenants["team-a"]["soft_bytes"], 20 << 30, said)
        self.assertGreater(tenants["team-a"]["used_bytes"], 0, said)
        # Neither the team's blocks for another one, nor the administrator's commands for the team.
        get = "kvmill get --server 192.0.2.11:7600 --tls-ca ca.pem --tls-cert operator.pem --tls-key operator.key --namespace demo --sequence s1 --out o_"
        self.shell(self.here(get, 1), want=3)
        self.shell(quota.replace("operator.", "engine.team-a."), want=1)
        self.daemons[1].send_signal(signal.SIGTERM)
        self.assertEqual(self.daemons[1].wait(timeout=seconds(self.unit["TimeoutStopSec"])), 0)

    def test_the_unit_gives_time_to_drain(self):
        drain = re.search(r"^drain_timeout: (\S+)", self.blocks["kvmilld.yaml"], re.MULTILINE).group(1)
        self.assertGreaterEqual(seconds(self.unit["TimeoutStopSec"]), seconds(drain) + 60)
        self.assertEqual(self.unit["Restart"], "on-failure")  # What a drain ended stays ended.
        self.assertEqual(self.unit["UMask"], "0027")
        self.assertRegex(self.blocks["kvmilld.yaml"], rf"(?m)^socket: /run/{self.unit['RuntimeDirectory']}/")
        self.assertRegex(self.blocks["kvmilld.yaml"], rf"(?m)^data_dir: /var/lib/{self.unit['StateDirectory']}/")
        if shutil.which("systemd-analyze"):
            path = os.path.join(self.folder, "kvmilld.service")
            with open(path, "w", encoding="utf-8") as file:  # It looks for the program.
                file.write(read(SOURCE_DIR, "deploy", "systemd", "kvmilld.service").replace("/opt/kvmill/bin", BIN_DIR))
            self.assertEqual(self.shell(f"systemd-analyze verify --man=no {path} 2>&1"), "")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for option in ("--bin-dir", "--source-dir", "--etcd"):
        parser.add_argument(option, required=True)
    known, rest = parser.parse_known_args()
    BIN_DIR, SOURCE_DIR, ETCD = known.bin_dir, known.source_dir, known.etcd
    unittest.main(argv=[sys.argv[0], *rest], verbosity=2)
