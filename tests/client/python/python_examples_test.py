#!/usr/bin/env python3
"""The Python package's examples, as their readers run them (ctest `python_examples_test`):
python_examples_test.py --bin-dir DIR --source-dir DIR, with PYTHONPATH=build/release/python."""
import os
import re
import subprocess
import sys

import kvmill
from python_support import Case, cli_support


class ExamplesTest(Case):
    def run_example(self, name, *arguments):
        path = os.path.join(cli_support.SOURCE_DIR, "tests", "examples", name)
        return subprocess.run([sys.executable, path, *arguments], capture_output=True, text=True, timeout=60, check=False)

    def test_store_and_fetch(self):
        for stored in ("1", "0"):  # The second run finds the block of the first.
            done = self.run_example("store_and_fetch.py", self.daemon.server)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            match = re.fullmatch(r"stored (\d), found (\d), fetched (\d+) tokens; 4-bit keys are off by (.*) %\n",
                                 done.stdout)
            self.assertEqual(match.groups()[:3], (stored, "1", "128"))
            self.assertTrue(2 < float(match.group(4)) < 20, done.stdout)
        done = self.run_example("store_and_fetch.py", "unix:/nowhere/kvmill.sock")
        self.assertEqual(done.returncode, 1)
        self.assertIn("UNAVAILABLE", done.stderr)

    def test_without_arguments_they_say_what_they_take(self):
        for name in ("store_and_fetch.py", "store_pages.py", "many_requests.py", "exchange.py", "prefill_decode.py"):
            for arguments in ((), ("a", "b", "c")):
                done = self.run_example(name, *arguments)
                self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
                self.assertTrue(done.stderr.startswith("usage: "), done.stderr)
                self.assertIn(name, done.stderr)
                self.assertNotIn("Traceback", done.stderr)

    def test_many_requests(self):
        done = self.run_example("many_requests.py", self.daemon.server)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        match = re.fullmatch(r"8 requests, 24 of 24 blocks fetched; 4-bit keys are off by at most (.*) %\n", done.stdout)
        self.assertTrue(match and 2 < float(match.group(1)) < 20, done.stdout)

    def test_store_pages(self):
        done = self.run_example("store_pages.py", self.daemon.server)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        match = re.fullmatch(r"stored 3 of 3 blocks from 12 pages in place, 0 misses; 4-bit keys are off by (.*) %\n",
                             done.stdout)
        self.assertTrue(match and 2 < float(match.group(1)) < 20, done.stdout)

    def exchange(self, prefix):
        nodes = [cli_support.Daemon("--listen", "127.0.0.1:0", "--ucx", "127.0.0.1", "--insecure") for _ in range(2)]
        for node in nodes:
            self.addCleanup(node.remove)
            self.addCleanup(node.stop)
        done = self.run_example("exchange.py", "all", *(node.ready["listen"] for node in nodes), nodes[0].server, prefix)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        match = re.fullmatch(r"stored (\d+) blocks of (\d+) layers over \S+\nmoved (\d+) blocks, (\d+) bytes of records\n"
                             r"attended to (\d+) tokens of (\d+) layers in place; the same bytes on both nodes, "
                             r"off by (\S+) at most\n", done.stdout)
        self.assertTrue(match, done.stdout)
        stored, layers, moved, moved_bytes, tokens, attended, off = match.groups()
        self.assertEqual((moved, int(tokens), attended), (stored, 128 * int(stored), layers))
        self.assertLess(float(off), 1e-3)
        return int(stored), int(layers), int(moved_bytes)

    def test_two_nodes_exchange_real_kv_and_a_third_process_attends_in_place(self):
        prefix = os.path.join(cli_support.SOURCE_DIR, "tests", "data", "tiny-lm-kv", "retrieval_")
        self.assertEqual(self.exchange(prefix), (14, 4, 14 * 4 * 13824))

    def test_kv_that_is_not_there_is_named(self):
        done = self.run_example("exchange.py", "store", "127.0.0.1:1", "/nowhere/prompt_")
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertEqual(done.stderr, "exchange: there is no K of a first layer: no file /nowhere/prompt_L00_k.npy\n")

    def test_the_same_with_other_kv(self):
        prefix = cli_support.extra_kv_prefix()
        if prefix is None:
            self.skipTest("KVMILL_EXTRA_DATA is not set")
        self.exchange(prefix)


if __name__ == "__main__":
    cli_support.main()
