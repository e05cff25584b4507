#!/usr/bin/env python3
"""The job of deploy/quickstart.sh, on one node and on two (ctest `quickstart_test`).

What it prints and writes; that both daemons and their files are gone afterwards; and that it fails when the second process does
not go on from what the first one computed: a stand-in for `kvmill` changes one field of its answer at a time.
"""
import argparse
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import unittest

BIN_DIR = SOURCE_DIR = ETCD = ""
SECONDS = 600  # Of a busy machine.

# Runs the real program, with one prompt and without the reference, and replaces fields of one command's answer.
STAND_IN = """#!{python}
import json, subprocess, sys
arguments = " ".join(sys.argv[1:]).replace("--prompts 2", "--prompts 1").replace(" --reference", "").split()
done = subprocess.run([{kvmill!r}, *arguments], capture_output=True, text=True)
sys.stderr.write(done.stderr)
if done.returncode == 0 and sys.argv[1:3] == ["eval", "continue"]:
    said = json.loads(done.stdout)
    said.update({fields!r})
    print(json.dumps(said))
else:
    print(done.stdout, end="")
sys.exit(done.returncode)
"""


class Quickstart(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="kvmill-quickstart-test-")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)

    def job(self, *flags, bin_dir=None, code=0):
        """Output, error, and the document, of a job whose folders are below this test's."""
        path = os.path.join(self.folder, "report.json")
        environment = {**os.environ, "TMPDIR": self.folder, "PYTHONDONTWRITEBYTECODE": "1"}
        environment.pop("KVMILL_EXTRA_DATA", None)
        done = subprocess.run([sys.executable, os.path.join(SOURCE_DIR, "deploy", "quickstart_job.py"), "--bin-dir", bin_dir or BIN_DIR, "--etcd",
                               ETCD, "--json", path, *flags], capture_output=True, text=True, timeout=SECONDS, env=environment, check=False)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        left = [name for name in os.listdir(self.folder) if name.startswith("kvmill-quickstart-")]
        self.assertEqual(left, [], "its folder is gone")
        for pid in re.findall(r"process (\d+)", done.stdout):
            self.assertFalse(os.path.exists(f"/proc/{pid}"), f"process {pid} still runs")
        document = None
        if code == 0:
            with open(path, encoding="utf-8") as file:
                document = json.load(file)
        return done.stdout, done.stderr, document

    def check_demo(self, said, document, tier):
        first, second = document["prefill"], document["continue"]
        for what in ("records_sha256", "logits_sha256"):
            self.assertEqual(first[what], second[what])
        self.assertEqual(second["tokens_found"], first["tokens_stored"])
        self.assertEqual(second["tiers"], {tier: first["blocks_stored"]})
        self.assertEqual(second["exact_match"], second["exact_match_fp16"])
        self.assertGreater(second["exact_match"], 0)
        self.assertGreater(second["compression_total"], 4)
        text = second["texts"][0]
        self.assertIn(text["prompt"].split("\n")[0], said)
        self.assertIn(text["text"].split("\n")[0], said)
        count = round(second["exact_match"] * second["prompts"])
        self.assertRegex(said, rf"answers right +{count} of 2 +{count} of 2")
        self.assertIn(f"{second['compression_total']:.2f} times less", said)

    def test_one_node(self):
        said, error, document = self.job()
        self.assertEqual(error, "")
        self.check_demo(said, document, "disk")
        self.assertEqual(document["prefill"]["tail_tokens"], 2 * (782 % 128))
        self.assertEqual(document["checksum_failures"], 0)
        (values,) = document["data_sets"]
        self.assertAlmostEqual(values["compression_tiles"], 4.74, delta=0.01)
        self.assertIn(f"{100 * values['rel_error_k']:.2f} %", said)

    def test_two_nodes(self):
        said, error, document = self.job("--cluster")
        self.assertEqual(error, "")
        self.check_demo(said, document, "peer")
        self.assertEqual(document["prefill"]["tail_tokens"], 0)

    def test_it_fails_when_the_second_process_has_something_else(self):
        stand_ins = os.path.join(self.folder, "bin")
        os.mkdir(stand_ins)
        os.symlink(os.path.join(BIN_DIR, "kvmilld"), os.path.join(stand_ins, "kvmilld"))
        path = os.path.join(stand_ins, "kvmill")
        for fields, words in (({"records_sha256": "0"}, "records_sha256 is 0"), ({"logits_sha256": "0"}, "logits_sha256 is 0"),
                              ({"tokens_found": 7}, "7 tokens were found"), ({"tiers": {"host": 1}}, "want disk")):
            with self.subTest(fields=fields):
                with open(path, "w", encoding="utf-8") as file:
                    file.write(STAND_IN.format(python=sys.executable, kvmill=os.path.join(BIN_DIR, "kvmill"), fields=fields))
                os.chmod(path, stat.S_IRWXU)
                _, error, _ = self.job(bin_dir=stand_ins, code=1)
                self.assertIn(words, error)

    def test_wrong_options(self):
        self.assertIn("--keep", self.job("--cluster", "--keep", code=2)[1])
        _, error, _ = self.job("--cluster", "--etcd", "no-such-etcd", code=1)
        self.assertIn("--cluster needs etcd", error)


def main():
    global BIN_DIR, SOURCE_DIR, ETCD  # Set once, before any test runs.
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin-dir", required=True)
    parser.add_argument("--source-dir", required=True)
    parser.add_argument("--etcd", required=True)
    arguments, rest = parser.parse_known_args()
    BIN_DIR, SOURCE_DIR, ETCD = os.path.abspath(arguments.bin_dir), os.path.abspath(arguments.source_dir), arguments.etcd
    unittest.main(argv=[sys.argv[0], *rest])


if __name__ == "__main__":
    main()
