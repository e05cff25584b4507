#!/usr/bin/env python3
"""The status page in a headless Chromium: what it shows is what a load did, with a keyboard and on a phone, and it asks
nobody but the daemon (ctest `status_page_test`). Screenshots are left in --out.

status_page_test.py --bin-dir DIR --source-dir DIR --chromium PROGRAM --out DIR, with PYTHONPATH=BUILD/python.
"""
import argparse
import hashlib
import http.server
import json
import os
import re
import shutil
import sys
import tempfile
import threading
import unittest
import urllib.request

import numpy as np

import kvmill

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path += [HERE, os.path.join(HERE, ".."), os.path.join(HERE, "..", "client", "cli")]
import certificates  # noqa: E402  # pylint: disable=wrong-import-position
import cli_support  # noqa: E402  # pylint: disable=wrong-import-position
import exposition  # noqa: E402  # pylint: disable=wrong-import-position
from chromium import Chromium  # noqa: E402  # pylint: disable=wrong-import-position

PROGRAM = OUT = ""
BYTES_MAX = 60_000
LAYERS, HEADS, HEAD_DIM, TOKENS = 2, 2, 64, 64


class StatusPageTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.daemon = cli_support.Daemon("--metrics", "127.0.0.1:0", "--error-sample-interval", "1")
        cls.addClassCleanup(cls.daemon.remove)
        cls.addClassCleanup(cls.daemon.stop)
        cls.url = f"http://{cls.daemon.ready['metrics']}/"
        with kvmill.Client(cls.daemon.server, timeout=60) as client:
            ns = client.open_namespace("<b>name</b>", kvmill.NamespaceSpec(
                groups=[kvmill.LayerGroup(range(LAYERS), HEADS, HEAD_DIM)], model="m", block_tokens=TOKENS))
            random = np.random.default_rng(1)
            keys = [b"block %08d" % i for i in range(4)]
            client.store(ns, [kvmill.Block(key, [tuple(random.standard_normal((TOKENS, HEADS, HEAD_DIM)).astype(np.float16)
                                                       for _ in "kv") for _ in range(LAYERS)]) for key in keys[:3]])
            assert client.lookup(ns, keys).hit_blocks == 3
        cls.chromium = Chromium(PROGRAM)
        cls.addClassCleanup(cls.chromium.stop)

    def open(self, width=1200, height=900, mobile=False):
        self.chromium.open(self.url, width, height, mobile)
        self.chromium.wait("document.querySelectorAll('#tiers tr').length > 0 && !!document.querySelector('#numbers dd')")

    def number(self, name):
        return self.chromium.run(f"[...document.querySelectorAll('#numbers div')].find(d => d.querySelector('dt').textContent === "
                                 f"{json.dumps(name)}).querySelector('dd').textContent")

    def table(self, name):
        return self.chromium.run(f"[...document.querySelectorAll('#{name} tr')].map(r => [...r.cells].map(c => c.textContent))")

    def test_the_page_is_small_and_may_ask_only_the_daemon(self):
        with urllib.request.urlopen(self.url, timeout=60) as answer:
            self.assertLess(len(answer.read()), BYTES_MAX)
            self.assertEqual(answer.headers["Content-Type"], "text/html; charset=utf-8")
            self.assertIn("default-src 'none'; connect-src 'self'", answer.headers["Content-Security-Policy"])

    def test_it_shows_what_the_load_did(self):
        self.open()
        self.assertEqual(self.chromium.run("document.getElementById('state').textContent"), "serving")
        self.assertEqual(self.number("Hit rate, tokens"), "75.0 %")
        self.assertEqual(self.number("Hit rate, blocks"), "75.0 %")
        self.assertEqual(self.number("Compression"), f"{4 * TOKENS * HEAD_DIM * HEADS / (192 + HEADS * 3840):.2f}×")
        self.assertEqual(self.number("Stored blocks"), "3")
        tiers = {row[0]: row for row in self.table("tiers")}
        self.assertEqual(set(tiers), {"host", "disk"})
        capacity = re.search(r'^kvmill_tier_capacity_bytes{tier="host"} (\S+)$', exposition.get(self.daemon.ready), re.MULTILINE)
        self.assertEqual((tiers["host"][2], tiers["host"][4], tiers["host"][5]),
                         (f"{float(capacity.group(1)) / 2**20:.1f} MiB", "3", str(3 * TOKENS)))
        namespace = self.table("namespaces")[0]  # As text, not as markup.
        stored = LAYERS * (192 + HEADS * 3840) * 3
        self.assertEqual(namespace[:4], ["<b>name</b>", f"{stored / 1024:.1f} KiB", "3", str(3 * LAYERS * HEADS)])
        self.assertEqual(self.table("peers"), [["none"]])
        self.chromium.wait("document.getElementById('hit-line').getAttribute('d').length > 0")
        self.chromium.screenshot(os.path.join(OUT, "status_page.png"))
        requested = self.chromium.requested()
        self.assertIn(self.url + "metrics", requested)
        self.assertEqual([url for url in requested if not url.startswith(self.url) and url != "about:blank"], [])
        self.assertEqual(self.chromium.complaints(), [])

    def test_what_fits_is_what_the_command_line_says(self):
        self.open()
        said = cli_support.Case.kvmill(self, "capacity", "--layers", 36, "--kv-heads", 8, "--head-dim", 128, "--format", "k4v2_g128",
                                       "--memory", "16GiB", "--json", server=False).json()
        fits = self.chromium.run("document.getElementById('fits').textContent")
        for part in (f"{said['tokens']:,} tokens", f"in 16 bits {said['tokens_fp16']:,} tokens", f"Gain {said['gain']:.2f}×"):
            self.assertIn(part, fits)

    def test_it_works_with_the_keyboard(self):
        self.open()
        seen = []
        while "memory" not in seen:
            self.assertLess(len(seen), 30, seen)
            self.chromium.press("Tab")
            seen.append(self.chromium.run("document.activeElement.name || document.activeElement.getAttribute('aria-labelledby')"))
            if seen[-1] == "vb":  # From 2 bits to 4.
                self.chromium.press("ArrowDown")
            if seen[-1] == "context":
                self.chromium.run("document.activeElement.select()")
                self.chromium.type("1000")
        self.assertEqual([name for name in seen if name in ("kb", "vb", "group", "dim", "layers", "heads", "context", "memory")],
                         ["kb", "vb", "group", "dim", "layers", "heads", "context", "memory"])
        self.chromium.run("document.activeElement.select()")
        self.chromium.type("1")
        said = cli_support.Case.kvmill(self, "capacity", "--layers", 36, "--kv-heads", 8, "--head-dim", 128, "--format", "k4v4_g128",
                                       "--memory", "1GiB", "--json", server=False).json()
        self.chromium.wait(f"document.getElementById('fits').textContent.startsWith('{said['tokens']:,} tokens, "
                           f"{said['tokens'] // 1000:,} contexts of 1,000;')")
        self.chromium.run("document.activeElement.select()")
        self.chromium.type("0")
        self.chromium.wait("document.getElementById('fits').textContent === 'Every field takes a number above 0.'")

    def test_it_fits_a_phone(self):
        self.open(360, 740, mobile=True)
        self.assertEqual(self.chromium.run("document.documentElement.scrollWidth"), 360)
        self.chromium.screenshot(os.path.join(OUT, "status_page_phone.png"))

    def test_namespaces_on_top_are_those_that_stored_most(self):
        """Not those that were sampled first, which have the histograms of errors."""
        daemon = cli_support.Daemon("--metrics", "127.0.0.1:0", "--error-sample-interval", "1", "--metrics-namespaces", "2")
        self.addCleanup(daemon.remove)
        self.addCleanup(daemon.stop)
        zeros = [(np.zeros((TOKENS, HEADS, HEAD_DIM), np.float16),) * 2] * LAYERS
        with kvmill.Client(daemon.server, timeout=60) as client:
            for name, count in (("first", 1), ("small", 1), ("large", 5), ("middle", 3)):
                ns = client.open_namespace(name, kvmill.NamespaceSpec(
                    groups=[kvmill.LayerGroup(range(LAYERS), HEADS, HEAD_DIM)], model=name, block_tokens=TOKENS))
                client.store(ns, [kvmill.Block(b"%s %08d" % (name.encode(), i), zeros) for i in range(count)])
        self.chromium.open(f"http://{daemon.ready['metrics']}/", 1200, 900)
        self.chromium.wait("document.querySelectorAll('#namespaces tr').length > 1")
        self.assertEqual([(row[0], row[2]) for row in self.table("namespaces")],
                         [("large", "5"), ("middle", "3"), ("other namespaces", "2")])
        self.leave()

    def leave(self):
        """The page, which would ask on; what was asked is forgotten."""
        self.chromium.ask("Page.navigate", url="about:blank")
        self.chromium.wait("location.href === 'about:blank'")
        self.chromium.events.clear()

    def daemon_with_tokens(self, tokens):
        """Whose names are for a token: {tenant: (token, rights)}."""
        folder = tempfile.mkdtemp(prefix="kvmill-status-page-")
        self.addCleanup(shutil.rmtree, folder)
        authority = certificates.Authority(folder)
        authority.issue("node", "IP:127.0.0.1")
        with open(os.path.join(folder, "tenants.yaml"), "w", encoding="utf-8") as file:
            json.dump({"tenants": {tenant: {"tokens": ["sha256:" + hashlib.sha256(token.encode()).hexdigest()], **rights}
                                   for tenant, (token, rights) in tokens.items()}}, file)
        daemon = cli_support.Daemon("--metrics", "127.0.0.1:0", "--listen", "127.0.0.1:0", "--tls-cert", authority.path("node.pem"),
                                    "--tls-key", authority.path("node.key"), "--tls-ca", authority.ca, "--tenants", file.name)
        self.addCleanup(daemon.remove)
        self.addCleanup(daemon.stop)
        zeros = [(np.zeros((TOKENS, HEADS, HEAD_DIM), np.float16),) * 2] * LAYERS
        with kvmill.Client(daemon.server, timeout=60) as client:
            ns = client.open_namespace("secret-model", kvmill.NamespaceSpec(
                groups=[kvmill.LayerGroup(range(LAYERS), HEADS, HEAD_DIM)], model="m", block_tokens=TOKENS))
            client.store(ns, [kvmill.Block(b"a block", zeros)])
        return daemon

    def press_tab_until(self, element):
        for _ in range(30):
            self.chromium.press("Tab")
            if self.chromium.run("document.activeElement.id") == element:
                return
        self.fail(f"{element} is not reached with Tab")

    def token_state(self):
        return self.chromium.run("document.getElementById('token-state').textContent")

    def test_a_token_shows_names_and_stays_in_the_tab(self):
        daemon = self.daemon_with_tokens({"watchers": ("watch-token", {"metrics": True}), "team": ("team-token", {})})
        url = f"http://{daemon.ready['metrics']}/"
        shows = "document.querySelector('#namespaces td')?.textContent === "
        self.chromium.open(url, 360, 740, mobile=True)
        self.chromium.wait(shows + "'all namespaces'")
        self.assertTrue(self.chromium.run("document.getElementById('forget').hidden"))

        # Of nobody, and of a tenant that may not: said once, and the page goes on without.
        for wrong, why in (("guess", "not one that --tenants of this daemon has"), ("team-token", 'tenant "team"')):
            self.press_tab_until("token")
            self.chromium.type(wrong)
            self.chromium.press("Enter")
            self.chromium.wait("document.getElementById('token-state').textContent.startsWith('Refused: ')")
            self.assertIn(why, self.token_state())
            self.chromium.wait("document.getElementById('state').textContent === 'serving'")
            self.assertEqual(self.chromium.run("[sessionStorage.length, document.getElementById('token').value]"), [0, ""])
        self.press_tab_until("token")
        self.chromium.type("two words")
        self.chromium.press("Enter")
        self.chromium.wait("document.getElementById('token-state').textContent === 'A token has no such characters.'")

        self.press_tab_until("token")
        self.chromium.type("watch-token")
        self.chromium.press("Enter")
        self.chromium.wait(shows + "'secret-model'")
        self.assertEqual(self.chromium.run("document.documentElement.scrollWidth"), 360)
        self.chromium.screenshot(os.path.join(OUT, "status_page_token.png"))
        self.chromium.run("location.reload()")
        self.chromium.wait("document.readyState === 'complete' && " + shows + "'secret-model'")
        self.assertEqual(self.chromium.run("[{...sessionStorage}, localStorage.length, document.cookie, location.href, "
                                           "document.getElementById('token').value, document.documentElement.outerHTML.includes('watch-token')]"),
                         [{"kvmill-token": "watch-token"}, 0, "", url, "", False])

        self.press_tab_until("forget")
        self.chromium.press("Enter")
        self.chromium.wait(shows + "'all namespaces'")
        self.assertEqual(self.chromium.run("[sessionStorage.length, document.activeElement.id]"), [0, "token"])
        sent = [request["headers"].get("Authorization") for request in self.chromium.requests() if request["url"] == url + "metrics"]
        self.assertEqual([sent.count("Bearer " + token) for token in ("guess", "team-token")], [1, 1])
        self.assertEqual(set(sent), {None, "Bearer guess", "Bearer team-token", "Bearer watch-token"})
        self.assertEqual([request["url"] for request in self.chromium.requests() if "token" in request["url"] or "guess" in request["url"]
                          or not request["url"].startswith((url, "about:blank"))], [])
        self.leave()
        with open(os.path.join(daemon.folder, "log"), encoding="utf-8") as file:
            log = file.read()
        self.assertEqual(log.count("a scrape is refused"), 2, log)
        for token in ("watch-token", "team-token", "guess"):
            self.assertNotIn(token, log)

    def answer_with(self, metrics):
        """The page from a server that answers so; its address."""
        with urllib.request.urlopen(self.url, timeout=60) as answer:
            page = answer.read()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):  # pylint: disable=invalid-name
                body = {"/": page, "/metrics": metrics.encode(), "/favicon.ico": b""}.get(self.path)
                self.send_response(404 if body is None else 200)
                self.send_header("Content-Type", "text/html; charset=utf-8" if self.path == "/" else "text/plain")
                self.end_headers()
                self.wfile.write(body or b"")

            def log_message(self, *_):  # pylint: disable=arguments-differ
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        self.addCleanup(thread.join)
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        return f"http://127.0.0.1:{server.server_address[1]}/"

    def test_it_shows_the_peers_of_a_cluster(self):
        peers = {"node-2": (1200, 3), "node <3>": (45, 45)}  # Answers of a node of four, of which one drains.
        lines = ['kvmill_members{state="serving"} 3', 'kvmill_members{state="draining"} 1', "kvmill_membership_stale 1"]
        for peer, (asked, failed) in peers.items():
            labels = f'{{peer="{peer}",transport="grpc"}}'
            lines += [f"kvmill_peer_info{labels} 1", f"kvmill_peer_requests_total{labels} {asked}",
                      f"kvmill_peer_failures_total{labels} {failed}"]
        own = ("kvmill_members", "kvmill_membership_stale", "kvmill_peer_")
        alone = [line for line in exposition.get(self.daemon.ready).splitlines() if not line.startswith(own)]
        self.chromium.open(self.answer_with("\n".join(alone + lines) + "\n"), 1200, 900)
        self.chromium.wait("document.querySelectorAll('#peers tr').length > 0")
        self.assertEqual(self.table("peers"), [["node-2", "1,200", "3"], ["node <3>", "45", "45"]])
        self.assertEqual(self.chromium.run("document.getElementById('members').textContent"),
                         "3 nodes serve, 1 drain; that may be out of date.")
        self.assertEqual(self.chromium.complaints(), [])
        self.leave()

    def test_it_says_when_nobody_answers(self):
        daemon = cli_support.Daemon("--metrics", "127.0.0.1:0")
        self.addCleanup(daemon.remove)
        self.addCleanup(daemon.stop)
        self.chromium.open(f"http://{daemon.ready['metrics']}/", 800, 600)
        self.chromium.wait("document.getElementById('state').textContent === 'serving'")
        daemon.stop()
        self.chromium.wait("document.getElementById('state').textContent === 'no answer'")
        self.leave()  # Failed requests are no fault of the page's here.

    server = None


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--chromium", required=True)
    parser.add_argument("--out", required=True)
    known, rest = parser.parse_known_args()
    PROGRAM, OUT = known.chromium, known.out
    os.makedirs(OUT, exist_ok=True)
    sys.argv = [sys.argv[0], *rest]
    cli_support.main()
