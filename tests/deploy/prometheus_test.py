#!/usr/bin/env python3
"""kvmilld, a Prometheus with the rules of deploy/prometheus, and a load, all on loopback: what Prometheus answers about hit
rates, compression and tiers is what the load did (ctest `prometheus_test`). So is what every panel of the dashboard asks.

prometheus_test.py --bin-dir DIR --source-dir DIR --prometheus PROGRAM, with PYTHONPATH=BUILD/python.
"""
import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.error
import urllib.parse
import urllib.request

import numpy as np
import yaml

import kvmill

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.append(os.path.join(HERE, "..", "client", "cli"))
import cli_support  # noqa: E402  # pylint: disable=wrong-import-position

PROMETHEUS = ""
WAIT_SECONDS = 120
LAYERS, HEADS, HEAD_DIM, TOKENS = 2, 2, 64, 64
BLOCKS, ABSENT, LOOKUPS = 16, 4, 10  # Of each of two rounds.
# docs/formats.md: a page has a header and a table of 192 bytes, and two records of 3840 bytes.
STORED_BYTES, RAW_BYTES = LAYERS * (192 + HEADS * 3840), 2 * LAYERS * HEADS * TOKENS * HEAD_DIM * 2
# Panels about what this load does not do: they ask for series that are not there, or have no rate. Those of compression
# and of quantization error begin with the first block, and all blocks come at once: no rate.
EMPTY_PANELS = {"UCX connections, by transport", "Failures of peers", "Compression", "Quantization error"}
MAYBE_EMPTY = {"Refused by quotas"}  # It begins with the first namespace, and has a rate after two scrapes.


class Prometheus:
    """Scrapes one daemon every second and evaluates the rules as often. In a folder of its own; ends by its process id."""

    def __init__(self, target):
        self.folder = tempfile.mkdtemp(prefix="kvmill-prometheus-")
        self.process = None
        rules = []
        for name in ("kvmill-recording.yml", "kvmill-alerts.yml"):
            with open(os.path.join(cli_support.SOURCE_DIR, "deploy", "prometheus", name), encoding="utf-8") as file:
                content = yaml.safe_load(file)
            for group in content["groups"]:
                group["interval"] = "1s"
            rules.append(os.path.join(self.folder, name))
            with open(rules[-1], "w", encoding="utf-8") as file:
                yaml.safe_dump(content, file)
        self.config = os.path.join(self.folder, "prometheus.yml")
        with open(self.config, "w", encoding="utf-8") as file:
            yaml.safe_dump({"global": {"scrape_interval": "1s", "evaluation_interval": "1s"}, "rule_files": rules,
                            "scrape_configs": [{"job_name": "kvmill", "static_configs": [{"targets": [target]}]}]}, file)
        for attempt in range(5):  # Somebody else may take the port meanwhile.
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self.port = free.getsockname()[1]
            if self.start():
                return
        raise RuntimeError("Prometheus did not start:\n" + self.log())

    def log(self):
        with open(os.path.join(self.folder, "log"), encoding="utf-8", errors="replace") as log:
            return log.read()

    def start(self):
        with open(os.path.join(self.folder, "log"), "wb") as log:
            self.process = subprocess.Popen(
                [PROMETHEUS, f"--config.file={self.config}", f"--storage.tsdb.path={self.folder}/data",
                 f"--web.listen-address=127.0.0.1:{self.port}"], stdout=log, stderr=log)
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                return False
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/ready", timeout=10):
                    return True
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        self.stop()
        return False

    def api(self, path, **parameters):
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                said = json.loads(answer.read())
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None
        assert said["status"] == "success", said
        return said["data"]

    def query(self, expression):
        """Values by the labels that are not the scrape's."""
        values = {}
        for sample in self.api("query", query=expression)["result"]:
            labels = {k: v for k, v in sample["metric"].items() if k not in ("__name__", "job", "instance")}
            values[",".join(f"{k}={labels[k]}" for k in sorted(labels))] = float(sample["value"][1])
        return values

    def stop(self):
        if self.process is not None and self.process.returncode is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def remove(self):
        shutil.rmtree(self.folder, ignore_errors=True)


class PrometheusTest(unittest.TestCase):
    def setUp(self):
        self.daemon = cli_support.Daemon("--metrics", "127.0.0.1:0", "--error-sample-interval", "1")
        self.addCleanup(self.daemon.remove)
        self.addCleanup(self.daemon.stop)
        self.prometheus = Prometheus(self.daemon.ready["metrics"])
        self.addCleanup(self.prometheus.remove)
        self.addCleanup(self.prometheus.stop)
        self.client = kvmill.Client(self.daemon.server, timeout=60)
        self.addCleanup(self.client.close)

    def wait(self, expression, want):
        deadline = time.monotonic() + WAIT_SECONDS
        while (said := self.prometheus.query(expression)) != want:
            self.assertLess(time.monotonic(), deadline, f"{expression}: {said}, want {want}\n{self.prometheus.log()}")
            time.sleep(0.1)

    def about(self, expression, want):
        """Ratios of rates settle with the next evaluation of the rules."""
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            said = self.prometheus.query(expression)
            if said.keys() == want.keys() and all(abs(said[key] - want[key]) <= 1e-3 * want[key] for key in want):
                return
            self.assertLess(time.monotonic(), deadline, f"{expression}: {said}, want {want}\n{self.prometheus.log()}")
            time.sleep(0.1)

    def load(self):
        """Stores, and finds the blocks in one round in memory, in the other on disk."""
        ns = self.client.open_namespace("load", kvmill.NamespaceSpec(
            groups=[kvmill.LayerGroup(range(LAYERS), HEADS, HEAD_DIM)], model="load", block_tokens=TOKENS))
        random = np.random.default_rng(1)
        keys = [b"block %08d" % i for i in range(BLOCKS + ABSENT)]
        blocks = [kvmill.Block(key, [tuple(random.standard_normal((TOKENS, HEADS, HEAD_DIM)).astype(np.float16) for _ in "kv")
                                     for _ in range(LAYERS)]) for key in keys[:BLOCKS]]
        self.assertEqual(self.client.store(ns, blocks, wait_durable=True).blocks_stored, BLOCKS)
        for evict in (False, True):
            if evict:
                said = subprocess.run([os.path.join(cli_support.BIN_DIR, "kvmill"), "evict", "--tier", "host", "--server",
                                       self.daemon.server, "--json"], capture_output=True, text=True, check=True, timeout=60)
                self.assertEqual(json.loads(said.stdout), {"blocks": BLOCKS})
            for _ in range(LOOKUPS):
                self.assertEqual(self.client.lookup(ns, keys).hit_blocks, BLOCKS)
        self.client.fetch(ns, keys[:4], ns.empty(4))

    def test_prometheus_says_what_the_load_did(self):
        self.wait('up{job="kvmill"}', {"": 1})
        self.wait("kvmill_lookup_blocks_total", {"": 0})  # A rate needs to see where it began.
        self.load()
        asked, found = 2 * LOOKUPS * (BLOCKS + ABSENT), LOOKUPS * BLOCKS
        self.wait('kvmill_fetched_blocks_total{result="hit",path="inline",tier="disk"}', {"path=inline,result=hit,tier=disk": 4})
        self.wait("kvmill_lookup_blocks_total", {"": asked})
        self.wait("kvmill_lookup_tokens_total", {"": asked * TOKENS})
        self.wait("kvmill_hit_blocks_total", {"tier=host": found, "tier=disk": found})
        self.wait("kvmill_hit_tokens_total", {"tier=host": found * TOKENS, "tier=disk": found * TOKENS})
        self.wait("kvmill_tier_blocks", {"tier=host": 4, "tier=disk": BLOCKS})
        self.wait('kvmill_evicted_blocks_total{reason="admin"}', {"reason=admin,tier=host": BLOCKS, "reason=admin,tier=disk": 0})
        self.wait("sum(kvmill_raw_bytes_ingested_total)", {"": BLOCKS * RAW_BYTES})
        self.wait("sum(kvmill_encoded_bytes_stored_total)", {"": BLOCKS * STORED_BYTES})
        # And what the rules make of it.
        for metric in ("hit_blocks", "hit_tokens"):
            self.about(f"instance:kvmill_{metric}:ratio_rate5m", {"": 2 * found / asked})
            self.about(f"job:kvmill_{metric}:ratio_rate5m", {"": 2 * found / asked})
            self.about(f"instance_tier:kvmill_{metric}:ratio_rate5m", {"tier=host": found / asked, "tier=disk": found / asked})
        self.about("instance:kvmill_compression:ratio", {"": RAW_BYTES / STORED_BYTES})
        self.about("instance_tier:kvmill_tier_used:ratio * kvmill_tier_capacity_bytes", self.prometheus.query("kvmill_tier_used_bytes"))
        self.wait("sum(kvmill_quantization_error_ratio_count)", {"": 2 * BLOCKS * LAYERS * HEADS})
        error = self.prometheus.query('sum by (kind) (kvmill_quantization_error_ratio_sum) / sum by (kind) (kvmill_quantization_error_ratio_count)')
        self.assertTrue(0.05 < error["kind=k"] < 0.15 and 0.4 < error["kind=v"] < 0.6, error)
        self.dashboard()  # While the daemon answers: gauges of one that does not are nowhere.
        self.rules_and_alerts()

    def rules_and_alerts(self):
        rules = [rule for group in self.prometheus.api("rules")["groups"] for rule in group["rules"]]
        self.assertGreater(len(rules), 30)
        self.assertEqual([(rule["name"], rule.get("lastError")) for rule in rules if rule["health"] != "ok"], [])
        self.wait("count(ALERTS) or vector(0)", {"": 0})
        self.daemon.stop()
        self.wait('ALERTS{alertname="KvmillDown",alertstate="pending"}',
                  {"alertname=KvmillDown,alertstate=pending,severity=critical": 1})
        self.daemon.start()

    def dashboard(self):
        with open(os.path.join(cli_support.SOURCE_DIR, "deploy", "grafana", "kvmill.json"), encoding="utf-8") as file:
            board = json.load(file)
        replaced = {"job": "kvmill.*", "instance": ".*", "__rate_interval": "5m"}
        empty = set()
        for panel in board["panels"]:
            found = [self.prometheus.query(re.sub(r"\$(\w+)", lambda match: replaced[match.group(1)], target["expr"]))
                     for target in panel.get("targets", [])]
            if found and not any(found):
                empty.add(panel["title"])
        self.assertEqual(empty - MAYBE_EMPTY, EMPTY_PANELS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--prometheus", required=True)
    known, rest = parser.parse_known_args()
    PROMETHEUS = known.prometheus
    sys.argv = [sys.argv[0], *rest]
    cli_support.main()
