#!/usr/bin/env python3
"""`kvmill eval prefill` and `kvmill eval continue` as a user runs them: two processes, and a daemon that is killed in between
(ctest `eval_engine_test`).

Digests of records and of the first logits say that what was fetched is bit by bit what was computed; the text that follows is
compared with what the process that computed the prompt would have written, and with the right answer. The daemon encodes on its
own, so that its encoder and that of the model's cache are compared, too.
"""
import os
import re
import sys
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.append(os.path.join(HERE, "..", "cli"))
import cli_support as support  # noqa: E402  # pylint: disable=wrong-import-position
from cli_support import Case, Daemon  # noqa: E402  # pylint: disable=wrong-import-position

# 433 characters are given, 432 of them handed over: 3 blocks and a tail of 48. 600 are written.
TASK = ("--task", "chain-60")
GIVEN, SHARED, BLOCKS, TAIL = 433, 432, 3, 48
FP16_TOKEN_BYTES = 2 * 2 * 4 * 128  # K and V of 4 layers, one head.
SAME = ("records_sha256", "logits_sha256", "exact_match")


class Engine(Case):
    def setUp(self):
        super().setUp()
        self.daemon = Daemon()
        self.addCleanup(self.daemon.remove)
        self.addCleanup(self.daemon.stop)
        self.server = self.daemon.server

    def prefill(self, *flags):
        return self.kvmill("eval", "prefill", *TASK, *flags, "--json").json()

    def go_on(self, *flags, code=0):
        said = self.kvmill("eval", "continue", *TASK, *flags, "--json", code=code)
        return said if code else said.json()

    def restart(self, damage=False):
        self.daemon.kill_hard()
        if damage:
            damage_pages(os.path.join(self.daemon.folder, "data"))
        self.daemon.start()

    def test_another_process_goes_on_after_kill_9_as_the_first_would_have(self):
        flags = ("--prompts", "2", "--seed", "3", "--sink-blocks", "1")
        first = self.prefill(*flags, "--wait", "--reference")
        self.assertEqual((first["blocks_stored"], first["blocks_existing"], first["tail_tokens"]), (2 * BLOCKS, 0, 2 * TAIL))
        self.assertEqual((first["tokens"], first["tokens_stored"], first["durable"]), (2 * GIVEN, 2 * SHARED, True))
        self.assertEqual(first["raw_bytes"], 2 * SHARED * FP16_TOKEN_BYTES)
        self.assertAlmostEqual(first["compression_tiles"], 4.74, delta=0.01)
        self.assertAlmostEqual(first["compression_total"], first["raw_bytes"] / first["encoded_bytes"])
        self.restart()
        second = self.go_on(*flags, "--reference")
        self.assertEqual((second["tokens_found"], second["tokens_recomputed"]), (2 * SHARED, 2))
        self.assertEqual((second["blocks"], second["tiers"], second["tokens_generated"]), (2 * BLOCKS, {"disk": 2 * BLOCKS}, 2 * 600))
        self.assertEqual(second["raw_bytes"], first["raw_bytes"])
        self.assertEqual(second["fetched_bytes"], first["encoded_bytes"])
        for what in SAME + ("exact_match_fp16",):
            self.assertEqual(first[what], second[what], what)
        digests = set()
        for a, b in zip(first["texts"], second["texts"]):
            self.assertEqual(len(b["text"]), 600)
            self.assertEqual(b["tokens_found"], SHARED)
            for what in ("prompt", "text", "text_fp16", "right", "right_fp16", "records_sha256", "logits_sha256"):
                self.assertEqual(a[what], b[what], what)
            self.assertEqual(b["right"], self.answer_of(b["prompt"]) == b["text"])
            digests |= {b["records_sha256"], b["logits_sha256"]}
        self.assertEqual(len(digests), 4)
        self.assertEqual(second["exact_match"], sum(text["right"] for text in second["texts"]) / 2)
        # What is there stays; now it is in memory.
        again = self.prefill(*flags)
        self.assertEqual((again["blocks_stored"], again["blocks_existing"], again["compression_total"]), (0, 2 * BLOCKS, None))
        self.assertEqual((again["durable"], again["exact_match"], again["texts"][0]["text"]), (False, None, None))
        self.assertEqual(again["logits_sha256"], first["logits_sha256"])

    @staticmethod
    def answer_of(prompt):
        """What the list of a chain says, by its rules."""
        lines = prompt.rstrip("\n").split("\n")
        steps = {line[:2]: line for line in lines[1:-1]}
        key, total = re.fullmatch(r"!!(..)!!=(\d\d)", lines[-1]).groups()
        total, answer = int(total[::-1]), ""
        while key != "..":
            step = steps[key]
            total = (total + int(step[4]) * (1 if step[5] == "+" else -1)) % 100
            answer += f"{step}={total % 10}{total // 10}\n"
            key = step[2:4]
        return answer

    def test_what_is_missing_is_computed_to_the_same_bits(self):
        first = self.prefill("--prompts", "1", "--reference")
        whole = self.go_on("--prompts", "1", "--no-tail")
        self.assertEqual((whole["tokens_found"], whole["tokens_recomputed"]), (SHARED - TAIL, TAIL + 1))
        for what in SAME:
            self.assertEqual(first[what], whole[what], what)
        self.assertEqual(first["texts"][0]["text"], whole["texts"][0]["text"])
        # Of two prompts one is there.
        two = self.go_on("--prompts", "2")
        self.assertEqual([text["tokens_found"] for text in two["texts"]], [SHARED, 0])
        self.assertEqual(two["texts"][0]["text"], first["texts"][0]["text"])
        other = self.prefill("--prompts", "2", "--no-tail", "--reference")
        self.assertEqual((other["blocks_stored"], other["tail_tokens"]), (BLOCKS, 0))
        self.assertEqual([text["text"] for text in two["texts"]], [text["text"] for text in other["texts"]])
        self.assertEqual(two["logits_sha256"], other["logits_sha256"])
        self.assertEqual(self.go_on("--prompts", "2")["texts"][1]["tokens_found"], SHARED - TAIL)

    def test_nothing_there_is_no_text_and_3(self):
        for case in ("absent", "damaged"):
            with self.subTest(case):
                if case == "damaged":
                    self.prefill("--prompts", "1", "--wait")
                    self.assertEqual(self.go_on("--prompts", "1")["tokens_found"], SHARED)
                    self.restart(damage=True)
                said = self.go_on("--prompts", "1", code=3)
                self.assertEqual((said.output, said.error.count("\n")), ("", 1), said.error)
                self.assertIn("'tiny-lm'", said.error)
        # Other texts, and a namespace of its own.
        self.go_on("--prompts", "1", "--seed", "2", code=3)
        self.go_on("--prompts", "1", "--namespace", "other", code=3)

    def test_wrong_flags_are_one_clear_line(self):
        self.prefill("--prompts", "1")
        for command, arguments, code, words in (
                ("prefill", ["--task", "chain-6"], 2, ["--task", "'chain-6'", "chain-60", "retrieval-200"]),
                ("continue", ["--format", "k9v2_g128"], 2, ["k9v2_g128"]),
                ("continue", ["--format", "k4v3_g128"], 2, ["k4v3_g128"]),
                ("prefill", ["--prompts", "0"], 2, ["--prompts"]),
                ("prefill", ["--prompts", "101"], 2, ["--prompts"]),
                ("continue", ["--wait"], 2, ["--wait"]),
                ("prefill", ["--model", self.path("none.json")], 1, [self.path("none.json")]),
                ("continue", ["--format", "k2v2_g128"], 1, ["tiny-lm", "key_bits"]),
                ("continue", ["--sink-blocks", "1"], 1, ["tiny-lm", "sink_blocks"])):
            with self.subTest(command=command, arguments=arguments):
                said = self.kvmill("eval", command, *arguments, code=code)
                self.assertEqual((said.output, said.error.count("\n")), ("", 1), said.error)
                for word in words:
                    self.assertIn(word, said.error)
        self.daemon.stop()
        said = self.kvmill("eval", "continue", code=1)
        self.assertEqual((said.output, said.error.count("\n")), ("", 1), said.error)
        self.assertIn("is kvmilld running there?", said.error)

    def test_tables_for_people(self):
        flags = ("--prompts", "1", "--reference")
        said = self.kvmill("eval", "prefill", *TASK, *flags).output
        self.assertRegex(said, r"(?m)^store .* sealed; 3 blocks, 0 existed before; 48 tokens in tails$")
        said = self.kvmill("eval", "continue", *TASK, *flags).output
        self.assertRegex(said, r"(?m)^found +432 +tokens, in blocks: 3 from host$")
        self.assertRegex(said, r"(?m)^exact match +\d of 1 +over 16 bits: \d of 1$")
        self.assertRegex(said, r"(?m)^prompt 1 ends +!![a-z]{2}!!=\d\d$")
        self.assertRegex(said, r"(?m)^and goes on +\S{9} \.\.\. \S{9}$")


def damage_pages(folder):
    """Flips bytes of every page on disk."""
    for name in os.listdir(folder):
        if not name.endswith(".blob"):
            continue
        with open(os.path.join(folder, name), "r+b") as file:
            data = bytearray(file.read())
            for at in range(1024, len(data) - 1024, 1024):
                data[at] ^= 0x40
            file.seek(0)
            file.write(data)


if __name__ == "__main__":
    support.main()
