#!/usr/bin/env python3
"""Quotas of a real daemon: two users of the host, `kvmill` as each of them, and what the daemon says of both (ctest
`quota_test`).

quota_test.py --bin-dir DIR --source-dir DIR. Needs root to act as other users; without, it skips what needs them.
"""
import os
import re
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.request

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.append(os.path.join(HERE, "..", "client", "cli"))
import cli_support  # noqa: E402  # pylint: disable=wrong-import-position

USER, OTHER = 65533, 65534
BLOCK_TOKENS = 128  # Of the format's blocks.
FORMAT = "k4v2_g128"


class QuotaTest(cli_support.Case):
    def setUp(self):
        super().setUp()
        os.chmod(self.folder, 0o755)
        self.tenants = self.path("tenants.yaml")
        for name, seed in (("k", 1), ("v", 2)):
            self.write(f"pL00_{name}.npy", cli_support.gaussian(4 * BLOCK_TOKENS, 1, 64, seed))
        self.daemon = None

    def say(self, text):
        with open(self.tenants, "w", encoding="utf-8") as file:
            file.write(text)

    def start(self, *flags):
        """Starts the daemon, or the same one again, where every user can reach it."""
        if self.daemon is None:
            self.daemon = cli_support.Daemon("--metrics", "127.0.0.1:0", "--tenants", self.tenants, *flags)
            self.addCleanup(self.daemon.remove)
            self.addCleanup(self.daemon.stop)
        else:
            self.daemon.stop()
            self.daemon.start()
        self.server = self.daemon.server
        for folder in (self.daemon.folder, os.path.dirname(self.daemon.socket)):
            os.chmod(folder, 0o755)
        for path in (self.daemon.socket, self.daemon.socket + ".door"):
            os.chmod(path, 0o666)

    def run_as(self, user, *arguments, code=0):
        command = [os.path.join(cli_support.BIN_DIR, "kvmill"), *arguments, "--server", self.server]
        result = subprocess.run(command, capture_output=True, text=True, timeout=cli_support.COMMAND_SECONDS, check=False,
                                user=user, group=user, extra_groups=[])
        self.assertEqual(result.returncode, code, f"{' '.join(command)}\n{result.stdout}{result.stderr}")
        return cli_support.Result(result.returncode, result.stdout, result.stderr)

    def put(self, user, sequence, code=0):
        return self.run_as(user, "put", "--namespace", "n", "--format", FORMAT, "--sequence", sequence, "--kv", self.path("p"),
                           "--wait", "durable", "--json", code=code)

    def quota(self):
        return {entry["tenant"]: entry for entry in self.kvmill("quota", "--json").json()}

    def listed(self, user):
        return self.run_as(user, "ls", "--json").json()

    def metrics(self):
        with urllib.request.urlopen(f"http://{self.daemon.ready['metrics']}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        return {labels: float(value) for labels, value in re.findall(r"^kvmill_(quota_[a-z_]+\{.*\}) (\S+)$", text, re.MULTILINE)}

    @unittest.skipIf(os.geteuid() != 0, "needs root to act as other users")
    def test_a_user_has_what_its_quota_says_and_no_more(self):
        self.say("tenants: {default: {quota: {soft: 1GiB}}}\n")
        self.start()
        self.put(USER, "first")
        blocks = self.listed(USER)
        self.assertEqual(len(blocks), 4)
        size = blocks[0]["bytes"]
        self.assertEqual({block["bytes"] for block in blocks}, {size})
        self.put(OTHER, "first")
        self.put(0, "first")
        self.assertEqual(self.quota()[f"uid-{USER}"], {
            "tenant": f"uid-{USER}", "used_bytes": 4 * size, "charged_bytes": 4 * size, "gpu_bytes": 0, "host_bytes": 4 * size, "disk_bytes": 4 * size,
            "soft_bytes": None, "hard_bytes": None, "rejections": 0})

        # Found on disk by a daemon that knows of a quota.
        self.say(f"tenants: {{uid-{USER}: {{quota: {{soft: {4 * size}, hard: {6 * size}}}}}}}\n")
        self.start()
        mine = self.quota()[f"uid-{USER}"]
        self.assertEqual((mine["used_bytes"], mine["host_bytes"], mine["disk_bytes"]), (4 * size, 0, 4 * size))
        self.put(USER, "second")
        mine = self.quota()[f"uid-{USER}"]
        self.assertEqual((mine["used_bytes"], mine["soft_bytes"], mine["hard_bytes"], mine["rejections"]),
                         (6 * size, 4 * size, 6 * size, 0))
        self.assertEqual(len(self.listed(USER)), 6)
        self.assertEqual(len(self.run_as(USER, "lookup", "--namespace", "n", "--sequence", "second", "--json").json()["tiers"]), 1)
        for user in (OTHER, 0):
            self.assertEqual(len(self.listed(user)), 4)
        said = self.metrics()
        self.assertEqual(said[f'quota_used_bytes{{tenant="uid-{USER}"}}'], 6 * size)
        self.assertEqual(said[f'quota_charged_bytes{{tenant="uid-{USER}"}}'], 6 * size)
        self.assertEqual(said[f'quota_used_bytes{{tenant="uid-{OTHER}"}}'], 4 * size)
        self.assertEqual(said[f'quota_tier_bytes{{tenant="uid-{USER}",tier="disk"}}'], 6 * size)
        self.assertEqual(said[f'quota_limit_bytes{{tenant="uid-{USER}",kind="hard"}}'], 6 * size)
        self.assertEqual(said[f'quota_limit_bytes{{tenant="uid-{USER}",kind="soft"}}'], 4 * size)
        self.assertNotIn(f'quota_limit_bytes{{tenant="uid-{OTHER}",kind="hard"}}', said)
        self.assertEqual(said[f'quota_rejections_total{{tenant="uid-{USER}"}}'], 0)

        # Lower than one block: what is there leaves in the background, what comes is refused.
        self.say(f"tenants: {{uid-{USER}: {{quota: {{hard: {size - 1}}}}}}}\n")
        self.start()
        refused = self.put(USER, "third", code=1)
        for part in (f'tenant "uid-{USER}"', "hard quota", f"of {size - 1} bytes", "--tenants"):
            self.assertIn(part, refused.error)
        self.put(OTHER, "third")
        deadline = time.monotonic() + cli_support.COMMAND_SECONDS
        while self.quota()[f"uid-{USER}"]["used_bytes"] > 0:
            self.assertLess(time.monotonic(), deadline, "its blocks are still there")
        mine = self.quota()[f"uid-{USER}"]
        self.assertGreaterEqual(mine["rejections"], 1)
        self.assertEqual(self.metrics()[f'quota_rejections_total{{tenant="uid-{USER}"}}'], mine["rejections"])
        self.assertEqual(self.quota()[f"uid-{OTHER}"]["rejections"], 0)
        self.assertEqual(self.listed(USER), [])
        self.assertEqual(len(self.listed(OTHER)), 8)
        # And a restart does not bring it back.
        self.start()
        self.assertEqual(self.quota()[f"uid-{USER}"]["used_bytes"], 0)

        self.assertIn("admin", self.run_as(OTHER, "quota", code=1).error)
        lines = self.kvmill("quota").output.splitlines()
        self.assertEqual(lines[0].split(), ["tenant", "used", "charged", "gpu", "host", "disk", "soft", "hard", "rejections"])
        self.assertIn(f"uid-{OTHER}", "\n".join(lines))

    def check(self, text, *flags):
        self.say(text)
        with tempfile.TemporaryDirectory() as folder:
            command = [os.path.join(cli_support.BIN_DIR, "kvmilld"), "--socket", os.path.join(folder, "s.sock"), "--tenants",
                       self.tenants, "--check-config", *flags]
            result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        return result.stderr if result.returncode != 0 else "OK"

    def test_errors_have_file_and_line(self):
        good = ("tenants: {uid-7: {quota: {soft: 1GiB, hard: 1GiB}}}\n", "tenants: {a: {quota: {soft: 1.5GB}}}\n",
                "tenants:\n  default:\n    quota:\n      hard: 4096\n")
        for text in good:
            self.assertEqual(self.check(text), "OK", text)
        # Line, and what is said there.
        wrong = (
            ("tenants:\n  a:\n    quota: {soft: 2GiB, hard: 1GiB}\n", 3, "quota.soft 2GiB: want at most quota.hard, 1GiB"),
            ("tenants:\n  a:\n    quota:\n      hard: 3 bananas\n", 4, "3 bananas"),
            ("tenants:\n  a:\n    quota:\n      hard: 0\n", 4, "more than 0 bytes"),
            ("tenants:\n  a:\n    quota:\n      hard: -1\n", 4, "-1"),
            ("tenants:\n  a:\n    quota:\n      most: 1GiB\n", 4, 'unknown key "most"'),
            ("tenants:\n  a:\n    quota: 1GiB\n", 3, "want soft, hard or both"),
            ("tenants:\n  a:\n    quota: {}\n", 3, "want soft, hard or both"),
            ("tenants:\n  a:\n    quota: {hard: 1GiB, hard: 2GiB}\n", 3, "quota.hard again"),
            ("tenants:\n  a:\n    quotas: {hard: 1GiB}\n", 3, 'unknown key "quotas"'),
            ("tenants:\n  uid-x:\n    quota: {hard: 1GiB}\n", 2, "uid-x"),
            ("tenants:\n  uid-007:\n    quota: {hard: 1GiB}\n", 2, "uid-007"),
            ("tenants:\n  uid-7:\n    admin: true\n", 2, "want a quota only"),
            ("tenants:\n  a:\n    quota: {hard: 1GiB}\n  a:\n    quota: {hard: 1GiB}\n", 4, '"a" again'),
        )
        for text, line, what in wrong:
            said = self.check(text)
            self.assertIn(f"{self.tenants}:{line}: ", said, text)
            self.assertIn(what, said, text)
        # Who somebody is over TCP wants TLS; quotas do not.
        said = self.check("tenants: {a: {certificates: [x], quota: {hard: 1GiB}}}\n")
        self.assertIn("needs --tls-cert", said)
        self.assertIn("nobody could come in", self.check("tenants: {}\n"))
        self.assertIn("cannot be read", self.check("", "--tenants", self.path("none")))
        self.assertEqual(self.check("tenants: {a: {quota: {hard: 1GiB}}}\n", "--listen", "127.0.0.1:0", "--insecure"), "OK")


if __name__ == "__main__":
    cli_support.main()
