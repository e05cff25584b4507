#!/usr/bin/env python3
"""Who sees names of namespaces and tenants on the metrics port of a real daemon (ctest `metrics_names_test`): by address
where nobody has a token for it, and by token where somebody has, from wherever.

The daemon has a network of its own, in which an address that is none of 127.0.0.0/8 belongs to this host, too.

names_test.py --bin-dir DIR --source-dir DIR --promtool PROGRAM, with PYTHONPATH=BUILD/python.
"""
import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

import kvmill

import workload_test
from workload_test import HEAD_DIM, HEADS, LAYERS, TOKENS, blocks, cli_support, exposition

import certificates  # workload_test knows where it is.

NAMES = ("secret", "hidden", "third", "fourth")
TILES = LAYERS * HEADS
# Asks once, and prints [status, body, WWW-Authenticate].
SCRAPER = """
import json, sys, urllib.error, urllib.request
request = urllib.request.Request(sys.argv[1])
if len(sys.argv) > 2:
    request.add_header("Authorization", sys.argv[2])
try:
    answer = urllib.request.urlopen(request, timeout=60)
except urllib.error.HTTPError as error:
    answer = error
print(json.dumps([answer.status, answer.read().decode(), answer.headers.get("WWW-Authenticate")]))
"""


class NamesTest(unittest.TestCase):
    ADDRESS = "198.51.100.1"

    def setUp(self):
        if os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("ip"):
            self.skipTest("a network of its own wants root, unshare and ip")
        self.folder = tempfile.mkdtemp(prefix="kvmill-names-")
        self.addCleanup(shutil.rmtree, self.folder)

    def start(self, *flags):
        real = cli_support.BIN_DIR
        wrapper = os.path.join(self.folder, "kvmilld")
        with open(wrapper, "w", encoding="utf-8") as file:
            file.write(f"#!/bin/sh\nexec unshare -n sh -c 'ip link set lo up && ip addr add {self.ADDRESS}/32 dev lo && "
                       f"exec {real}/kvmilld \"$@\"' kvmilld \"$@\"\n")
        os.chmod(wrapper, 0o755)
        cli_support.BIN_DIR = self.folder
        try:
            self.daemon = workload_test.Daemon("--metrics", "0.0.0.0:0", "--error-sample-interval", "1",
                                               "--metrics-namespaces", "2", *flags)
        finally:
            cli_support.BIN_DIR = real
        self.addCleanup(self.daemon.remove)
        self.addCleanup(self.daemon.stop)
        with kvmill.Client(self.daemon.server, timeout=60) as client:
            for seed, name in enumerate(NAMES):
                ns = client.open_namespace(name, kvmill.NamespaceSpec(
                    groups=[kvmill.LayerGroup(range(LAYERS), HEADS, HEAD_DIM)], model=name, block_tokens=TOKENS))
                client.store(ns, blocks("b", seed + 1, seed))

    def ask(self, host, authorization=None):
        """(status, body, WWW-Authenticate)."""
        port = self.daemon.ready["metrics"].rpartition(":")[2]
        said = subprocess.run(["nsenter", f"--net=/proc/{self.daemon.process.pid}/ns/net", sys.executable, "-c", SCRAPER,
                               f"http://{host}:{port}/metrics", *([] if authorization is None else [authorization])],
                              capture_output=True, text=True, check=True, timeout=60).stdout
        return tuple(json.loads(said))

    def expect(self, shown, host, authorization=None):
        status, text, _ = self.ask(host, authorization)
        self.assertEqual(status, 200, text)
        counts = dict(re.findall(r'^kvmill_quantization_error_ratio_count{namespace="([^"]*)",kind="k"} (\d+)$', text,
                                 re.MULTILINE))
        stored = dict(re.findall(r'^kvmill_namespace_stored_blocks{namespace="([^"]*)"} (\d+)$', text, re.MULTILINE))
        tenants = re.findall(r'^kvmill_quota_used_bytes{tenant="([^"]*)"} ', text, re.MULTILINE)
        if shown:
            self.assertEqual(counts, {"secret": str(TILES), "hidden": str(2 * TILES), "other namespaces": str(7 * TILES)})
            self.assertEqual(stored, {"fourth": "4", "third": "3", "other namespaces": "3"})  # The most.
            self.assertIn("default", tenants)
        else:
            self.assertEqual(counts, {"all namespaces": str(10 * TILES)})
            self.assertEqual(stored, {"all namespaces": "10"})
            self.assertEqual(tenants, ["all tenants"])
            for name in NAMES:
                self.assertNotIn(name, text)
        exposition.check(workload_test.PROMTOOL, text)

    def test_strangers_see_all_namespaces_as_one(self):
        self.start()
        self.expect(True, "127.0.0.1")
        self.expect(False, self.ADDRESS)
        # There is no token: none is one.
        for host in ("127.0.0.1", self.ADDRESS):
            self.assertEqual(self.ask(host, "Bearer guess")[0], 401)

    def test_a_token_shows_names_from_wherever(self):
        authority = certificates.Authority(self.folder)
        authority.issue("node", "DNS:node.example,IP:127.0.0.1")
        tokens = {"watchers": "watch-token", "team": "team-token", "operators": "operator-token"}
        tenants = os.path.join(self.folder, "tenants.yaml")
        with open(tenants, "w", encoding="utf-8") as file:
            json.dump({"tenants": {name: {
                "tokens": ["sha256:" + hashlib.sha256(token.encode()).hexdigest()],
                **{"watchers": {"metrics": True}, "operators": {"admin": True}}.get(name, {})} for name, token in tokens.items()}}, file)
        self.start("--listen", "127.0.0.1:0", "--tls-cert", authority.path("node.pem"), "--tls-key", authority.path("node.key"),
                   "--tls-ca", authority.ca, "--tenants", tenants)
        for host in ("127.0.0.1", self.ADDRESS):
            with self.subTest(host):
                self.expect(False, host)
                self.expect(True, host, "Bearer watch-token")
                self.expect(True, host, "Bearer operator-token")
                status, text, _ = self.ask(host, "Bearer team-token")
                self.assertEqual(status, 403)
                self.assertIn('tenant "team"', text)
                for wrong in ("Bearer guess", "Bearer ", "watch-token", "Basic d2F0Y2gtdG9rZW4=", "Bearer watch-token "):
                    status, text, challenge = self.ask(host, wrong)
                    self.assertEqual((status, challenge), (401, "Bearer"), wrong)
                    self.assertNotIn("watch-token", text)
        with open(os.path.join(self.daemon.folder, "log"), encoding="utf-8") as file:
            log = file.read()
        self.assertRegex(log, rf"a scrape is refused: .* peer={self.ADDRESS}")
        for token in (*tokens.values(), "guess"):
            self.assertNotIn(token, log)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--promtool", required=True)
    known, rest = parser.parse_known_args()
    workload_test.PROMTOOL = known.promtool
    sys.argv = [sys.argv[0], *rest]
    cli_support.main()
