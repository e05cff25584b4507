#!/usr/bin/env python3
"""docs/contracts.md against the programs: every table row is compared with what a kvmill or kvmilld really says (ctest
`contracts_test`)."""
import json
import os
import re
import socket
import subprocess
import sys
import unittest
import urllib.request

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import cli_support  # noqa: E402
from cli_support import Case, Daemon, gaussian  # noqa: E402

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
import check_docs  # noqa: E402


GUIDES = ["README.md", *(f"docs/{name}.md" for name in ("client", "events", "hosts", "kubernetes", "operations", "security"))]


class Contracts(Case):
    @classmethod
    def setUpClass(cls):
        cls.text = check_docs.read(cli_support.SOURCE_DIR, check_docs.CONTRACTS)

    def setUp(self):
        super().setUp()
        with open(self.path("tenants"), "w", encoding="utf-8") as file:
            file.write("tenants: {default: {quota: {soft: 1GiB, hard: 2GiB}}}\n")
        self.daemon = Daemon("--metrics", "127.0.0.1:0", "--tenants", self.path("tenants"))
        self.addCleanup(self.daemon.remove)
        self.addCleanup(self.daemon.stop)
        self.server = self.daemon.server
        self.seen = set()

    def rows(self, title):
        """Names in the first cell of each row below a heading -> names in the second."""
        cells = check_docs.table_rows(check_docs.section(self.text, title))
        return {names[0]: check_docs.names_in(row[1]) for row in cells for names in [check_docs.names_in(row[0])] if names}

    def ask(self, *arguments, server=None, row_flag=""):
        """Runs a command and compares its fields with its row; the JSON. `row_flag`: which changes the fields."""
        command = " ".join(arguments[:2 if arguments[0] in ("bench", "cluster", "eval") else 1]) + row_flag
        said = self.kvmill(*arguments, "--json", server=server).json()
        self.assertEqual(list(said[0] if isinstance(said, list) else said), self.rows("kvmill")[command],
                         f"fields of {command}: left the program's, right those of docs/contracts.md")
        self.seen.add(command)
        return said

    def scrape(self):
        with urllib.request.urlopen(f"http://{self.daemon.ready['metrics']}/metrics", timeout=30) as answer:
            return answer.read().decode()

    def test_every_command_has_the_fields_of_its_row(self):
        k, v = self.write("pL00_k.npy", gaussian(300, 2, 64, 1)), self.write("pL00_v.npy", gaussian(300, 2, 64, 2))
        shape = ("--format", "k4v2_g128", "--head-dim", "64")
        self.ask("encode", "--k", k, "--v", v, "--format", "k4v2_g128", "--records", self.path("r"), server=False)
        self.ask("decode", "--records", self.path("r"), *shape, "--heads", "2", "--k", self.path("k"), "--v",
                 self.path("v"), server=False)
        name = ("--namespace", "n", "--sequence", "s")
        self.ask("put", *name, "--format", "k4v2_g128", "--kv", self.path("p"), "--wait", "durable")
        self.ask("lookup", *name)
        self.ask("get", *name, "--out", self.path("out_"))
        self.ask("get", *name, "--out", self.path("tiles_"), "--tiles")
        self.ask("bench", "attention", "--kv", self.path("p"), "--records", self.path("tiles_"), "--format", "k4v2_g128",
                 "--heads-q", "2", "--repetitions", "1", server=False, row_flag=" --kv")
        self.ask("eval", "error", "--kv", self.path("p"), "--methods", "kvarn", server=False)
        self.ask("eval", "decode", "--tasks", "retrieval-60", "--answers", "20", "--methods", "kvarn", "--formats", "k2v2_g128",
                 server=False)
        # Two whole blocks and a tail: three (block, layer group) pairs.
        self.assertEqual(self.ask("stat")["blocks"], 3)
        listed = self.ask("ls")
        self.assertEqual(len(listed), 3)
        (quota,) = self.ask("quota")
        self.assertEqual((quota["tenant"], quota["used_bytes"], quota["soft_bytes"], quota["hard_bytes"], quota["rejections"]),
                         ("default", sum(block["bytes"] for block in listed), 1 << 30, 2 << 30, 0))
        self.assertEqual(quota["charged_bytes"], quota["used_bytes"])
        self.assertEqual(self.ask("verify")["records_checked"], 3 * 2 * 2)  # Heads and tiers.
        (space,) = self.ask("namespaces")
        self.assertEqual((space["namespace"], space["tenant"], space["format"], space["tripped"], space["error_k"]),
                         ("n", "default", "k4v2_g128", False, None))
        self.ask("config")
        self.ask("flush")
        self.assertEqual(self.ask("evict", "--tier", "host")["blocks"], 3)
        self.assertEqual(self.ask("rm", *name)["blocks"], 3)
        self.ask("clear", "--namespace", "n")
        self.ask("eval", "prefill", "--task", "retrieval-60", "--prompts", "1")
        self.ask("eval", "continue", "--task", "retrieval-60", "--prompts", "1")
        with open(self.path("trace"), "w", encoding="utf-8") as file:
            file.write(json.dumps({"hash_ids": [1, 2]}) + "\n")
        self.ask("replay", "--trace", self.path("trace"), "--blocks", "5", server=False)
        self.ask("capacity", "--layers", "2", "--kv-heads", "2", *shape, "--memory", "1GiB", server=False)
        self.ask("bench", "encode", *shape, "--repetitions", "1", server=False)
        self.ask("bench", "attention", "--context", "1024", "--repetitions", "1", server=False)
        self.ask("bench", "lookup", "--keys", "1000", server=False)
        self.ask("bench", "fetch", "--bytes", "64KiB", "--count", "3")
        self.ask("bench", "store", "--bytes", "64KiB", "--count", "3")
        self.ask("bench", "disk", "--bytes", "16MiB", "--dir", self.path(""), server=False)
        self.assertEqual(self.ask("cluster", "status")["registration"], "none")
        self.assertEqual(self.ask("cluster", "members")["members"], [])
        for command in ("status", "members"):  # For people.
            self.assertEqual(self.kvmill("cluster", command).output,
                             "this node is alone: its kvmilld was started without --cluster\n")
        self.assertEqual(self.ask("cluster", "where", "ab" * 16, "--namespace", "n")["homes"], [])
        for wrong in (["zz"], ["ab" * 8, "--anchor", "zz"], ["ab" * 16, "--place", "3"], ["ab" * 16, "--place", "32"]):
            self.kvmill("cluster", "where", *wrong, "--namespace", "n", code=2)
        self.assertEqual(self.kvmill("cluster", "where", "ab" * 16, "--namespace", "n").output,
                         "this node is alone: its kvmilld was started without --cluster; what it has itself 'kvmill ls' says\n")
        self.assertIn(f'is called "{socket.gethostname()}"', self.kvmill("cluster", "drain", "nobody", code=3).error)
        # The last thing that this daemon does.
        self.assertEqual(self.ask("cluster", "drain", socket.gethostname())["state"], "ended")
        rows = set(self.rows("kvmill"))
        self.assertEqual(self.rows("kvmill")["top"], [])
        self.kvmill("top", "--json", code=2)
        self.assertEqual(self.rows("kvmill")["watch"], [])  # Fields by event: events_test.
        self.assertEqual(self.seen | {"top", "watch"}, rows)
        # And the table has every command of the program.
        commands = set()
        for group in ("", "bench", "cluster", "eval"):
            said = self.kvmill(*filter(None, [group, "--help"]), server=False).output
            listed = re.findall(r"^  ([a-z]+) ", said.split("Subcommands:")[1].split("\n\n")[0], re.MULTILINE)
            commands |= {f"{group} {command}".strip() for command in listed}
        self.assertEqual(commands - {"bench", "cluster", "eval"}, {row.split(" --")[0] for row in rows})

    def test_commands_that_guides_name_are_those_of_the_programs(self):
        """With their options, in `code` and in blocks of it; a command there may be cut short."""
        helps = {}

        def said(*command):
            if command not in helps:
                helps[command] = subprocess.run([os.path.join(cli_support.BIN_DIR, command[0]), *command[1:], "--help"],
                                                capture_output=True, text=True, check=True).stdout
            return helps[command]

        seen = 0
        for guide in GUIDES:
            text = check_docs.read(cli_support.SOURCE_DIR, guide).replace("\\\n", " ")
            for program, rest in re.findall(r"(?m)(?:^ *|`|&& |; |\| |-- |bin/)(kvmilld?)((?: [^\s`|;&<>()#'\"]+)+)", "\n".join(
                    re.findall(r"^```\w*\n.*?^```$|`[^`\n]+`", text, re.MULTILINE | re.DOTALL))):
                words, command = rest.split(), [program]
                while program == "kvmill" and words and re.search(rf"(?m)^  {re.escape(words[0])} ", said(*command).partition("Subcommands:")[2]):
                    command.append(words.pop(0))
                if program == "kvmill" and (len(command) == 1 or "Subcommands:" in said(*command)):
                    self.assertTrue(words and not re.fullmatch("[a-z]+", words[0]), f"{guide}: no such command: {program}{rest}")
                    continue  # COMMAND, a group with …, or a name.
                options = [word.partition("=")[0] for word in words if re.match("--[a-z]", word)]
                unknown = [option for option in options if not re.search(rf"(?m)(?<![\w-]){option}(?![\w-])", said(*command))]
                self.assertEqual(unknown, [], f"{guide}: {program}{rest}")
                seen += 1
        self.assertGreater(seen, 60)

    def test_a_miss_prints_its_json_and_ends_with_3(self):
        self.write("pL00_k.npy", gaussian(128, 1, 64, 1))
        self.write("pL00_v.npy", gaussian(128, 1, 64, 2))
        self.kvmill("put", "--namespace", "misses", "--sequence", "s", "--format", "k4v2_g128", "--kv", self.path("p"))
        for command in (["get", "--out", self.path("x")], ["lookup"], ["rm"]):
            said = self.kvmill(*command, "--namespace", "misses", "--sequence", "none", "--json", code=3).json()
            self.assertEqual(list(said), self.rows("kvmill")[command[0]])
        self.assertEqual(self.kvmill("clear", "--namespace", "none", "--json", code=3).output, "")

    def test_the_ready_line_has_the_fields_of_its_table(self):
        cells = check_docs.table_rows(check_docs.section(self.text, "Ready line"))
        self.assertEqual(list(self.daemon.ready), [name for row in cells for name in check_docs.names_in(row[0])])
        self.assertRegex(self.daemon.ready["boot_id"], "^[0-9a-f]{32}$")
        self.assertIsNone(self.daemon.ready["listen"])

    def test_the_metrics_are_those_of_the_table(self):
        self.write("mL00_k.npy", gaussian(128, 1, 64, 1))
        self.write("mL00_v.npy", gaussian(128, 1, 64, 2))
        self.kvmill("put", "--namespace", "m", "--sequence", "s", "--format", "k4v2_g128", "--kv", self.path("m"))
        want = {name: family for name, family in check_docs.documented_families(self.text, "Metrics").items()
                if not {"peer", "transport", "key", "certificate"} & set(family[1])  # There are none here.
                or name in ("bytes_total", "pulled_bytes_total", "ticket_pages_bytes_total")}
        del want["guard_tripped"]  # Nothing trips here; guard_test has it.
        said = self.scrape()
        types = dict(re.findall(r"^# TYPE kvmill_(\w+) (\w+)$", said, re.MULTILINE))
        self.assertEqual(types, {name: kind for name, (kind, _) in want.items()})
        for name, (kind, labels) in want.items():
            sample = re.search(rf"^kvmill_{name}{'_count' if kind == 'histogram' else ''}(?:{{(.*)}})? ", said,
                               re.MULTILINE)
            self.assertIsNotNone(sample, name)
            self.assertEqual(re.findall(r'(\w+)="', sample.group(1) or ""), labels, f"labels of {name}")
            if kind == "counter":
                self.assertTrue(name.endswith("_total"), name)


if __name__ == "__main__":
    cli_support.main()
