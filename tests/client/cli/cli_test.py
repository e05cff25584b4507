#!/usr/bin/env python3
"""The `kvmill` program as a user runs it, where it needs no daemon: help, wrong usage, planning, benchmarks (ctest `cli_test`)."""
import json
import os
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import cli_support as support  # noqa: E402
from cli_support import Case  # noqa: E402


class Usage(Case):
    COMMANDS = ["encode", "decode", "put", "get", "lookup", "rm", "clear", "flush", "evict", "stat", "ls", "quota", "verify",
                "replay", "capacity", "bench encode", "bench attention", "bench lookup", "bench disk", "bench fetch",
                "bench store", "top"]

    def test_every_command_explains_itself(self):
        self.assertEqual(self.kvmill("--help").error, "")
        for command in self.COMMANDS:
            with self.subTest(command):
                text = self.kvmill(*command.split(), "--help").output
                self.assertIn("Usage: kvmill " + command, text)
                for flag in ("--json", "--server", "--timeout"):
                    self.assertIn(flag, text)
                self.assertTrue(all(len(line) <= 160 for line in text.splitlines()))
        put = self.kvmill("put", "--help").output
        self.assertIn("SHA-256", put)
        self.assertIn("kvmill-cli-1", put)
        self.assertIn("bytes_per_token_fp16 =", self.kvmill("capacity", "--help").output)

    def test_output_that_cannot_be_written_is_exit_code_1(self):
        command = [os.path.join(support.BIN_DIR, "kvmill"), "capacity", "--layers", "1", "--kv-heads", "1", "--head-dim", "128",
                   "--format", "k4v2_g128", "--memory", "1GiB", "--json"]
        self.assertEqual(subprocess.run(command, stdout=subprocess.DEVNULL, timeout=60).returncode, 0)
        with open("/dev/full", "w") as full:
            failed = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
        self.assertEqual(failed.returncode, 1)
        self.assertEqual(failed.stderr, "kvmill capacity: standard output could not be written\n")
        for program, flag in (("kvmill", "--help"), ("kvmill", "--version"), ("kvmilld", "--help"), ("kvmilld", "--version"),
                              ("kvmilld", "--print-config")):
            command = [os.path.join(support.BIN_DIR, program), flag]
            with self.subTest(program=program, flag=flag), open("/dev/full", "w") as full:
                self.assertEqual(subprocess.run(command, stdout=subprocess.DEVNULL, timeout=60).returncode, 0)
                failed = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
                self.assertEqual((failed.returncode, failed.stderr),
                                 (1, f"{program}: standard output could not be written\n"))

    def test_help_offers_what_is_taken(self):
        self.assertRegex(self.kvmill("evict", "--help").output, r"--tier TEXT:\{gpu,host\} ")
        self.assertIn("from gpu or host only", self.kvmill("evict", "--tier", "disk", code=2).error)
        self.assertNotIn("OUT", self.kvmill("encode", "--help").output)
        for timeout in ("0", "-1s", "8761h", "inf"):
            self.assertIn(f"'{timeout}' must be more than 0 and at most 8760h",
                          self.kvmill("stat", "--timeout", timeout, code=2).error)

    def test_wrong_usage_is_exit_code_2_and_one_line(self):
        table = [
            [], ["frobnicate"], ["bench"], ["bench", "frobnicate"], ["encode"], ["stat", "--frobnicate"],
            ["stat", "extra"], ["stat", "--server", "nowhere"], ["stat", "--server", "::1:7600"],
            ["stat", "--server", "[::1]:99999"], ["stat", "--timeout", "0"], ["stat", "--timeout", "soon"],
            ["put", "--namespace", "n", "--format", "k3v9_g128", "--sequence", "s", "--kv", "x"],
            ["put", "--namespace", "n", "--format", "k4v2_g100", "--sequence", "s", "--kv", "x"],
            ["put", "--namespace", "n", "--format", "k4v2_g128", "--sequence", "", "--kv", "x"],
            ["put", "--namespace", "n", "--format", "k4v2_g128", "--sequence", "s", "--kv", "x", "--wait", "never"],
            ["get", "--namespace", "n", "--sequence", "s", "--out", "x", "--blocks", "0"],
            ["get", "--namespace", "n", "--sequence", "s", "--out", "x", "--blocks", "-1"],
            ["rm", "--namespace", "n"], ["rm", "--namespace", "n", "--sequence", "s", "--key", "00"],
            ["evict"], ["evict", "--tier", "disk"], ["evict", "--tier", "moon"],
            ["evict", "--tier", "host", "--bytes", "lots"],
            ["decode", "--records", "r", "--format", "k4v2_g128", "--head-dim", "100", "--heads", "1", "--k", "k",
             "--v", "v"],
            ["decode", "--records", "r", "--format", "k4v2_g128", "--head-dim", "64", "--heads", "0", "--k", "k",
             "--v", "v"],
            ["capacity", "--layers", "0", "--kv-heads", "8", "--head-dim", "128", "--format", "k4v2_g128",
             "--memory", "1GiB"],
            ["capacity", "--layers", "1", "--kv-heads", "8", "--head-dim", "128", "--format", "k4v2_g128",
             "--memory", "1XB"],
            ["replay", "--trace", "t", "--blocks", "0"], ["replay", "--trace", "t", "--blocks", "1", "--policy", "x"],
            ["bench", "encode", "--format", "k9v9_g1"], ["bench", "encode", "--simd", "MMX"],
            ["bench", "attention", "--simd", "MMX"], ["bench", "attention", "--simd", "AVX3+MMX"],
            ["top", "--json"], ["top", "--interval", "0"], ["top", "--interval", "99ms"], ["top", "--interval", "2h"],
            ["bench", "attention", "--heads-q", "7", "--heads-kv", "2"], ["bench", "attention", "--context", "0"],
        ]
        for arguments in table:
            with self.subTest(" ".join(arguments)):
                result = self.kvmill(*arguments, code=2, server=False)
                self.assertEqual(result.output, "")
                self.assertEqual(result.error.count("\n"), 1)
                self.assertIn("--help", result.error)

    def test_the_unknown_word_is_named(self):
        self.assertIn("'frobnicate'", self.kvmill("frobnicate", code=2, server=False).error)

    def test_common_flags_work_before_and_after_the_command(self):
        arguments = ["capacity", "--layers", "2", "--kv-heads", "1", "--head-dim", "64", "--format", "k4v2_g128",
                     "--memory", "1MiB"]
        before = self.kvmill("--json", *arguments).output
        after = self.kvmill(*arguments, "--json").output
        self.assertEqual(json.loads(before), json.loads(after))


class Plan(Case):
    def test_capacity_is_the_formula(self):
        said = self.kvmill("capacity", "--layers", 36, "--kv-heads", 8, "--head-dim", 128, "--format", "k4v2_g128",
                           "--memory", "16GiB", "--json").json()
        self.assertEqual(list(said), ["tokens", "tokens_fp16", "gain", "bytes_per_token", "bytes_per_token_fp16"])
        self.assertEqual(said["bytes_per_token"], 36 * 8 * 13824 / 128)
        self.assertEqual(said["bytes_per_token_fp16"], 36 * 8 * 4 * 128)
        self.assertEqual(said["tokens"], int(2 ** 34 / said["bytes_per_token"]))
        self.assertEqual(said["tokens_fp16"], int(2 ** 34 / said["bytes_per_token_fp16"]))
        self.assertAlmostEqual(said["gain"], 4.7407, delta=1e-3)

    def replay(self, text, *options, **how):
        with open(self.path("trace.jsonl"), "w", encoding="utf-8") as file:
            file.write(text)
        return self.kvmill("replay", "--trace", self.path("trace.jsonl"), *options, **how)

    def test_replay_counts_the_prefix_that_was_there(self):
        lines = [[1, 2, 3], [1, 2, 4], [9, 2, 3], [1, 2, 3]]
        text = "".join(json.dumps({"hash_ids": ids, "timestamp": 0}) + "\n" for ids in lines)
        said = self.replay(text, "--blocks", 100, "--policy", "lru", "--json").json()
        self.assertEqual(list(said)[:5], ["lookups", "hits", "hit_rate", "blocks", "policy"])
        # 0 of the first, 1 and 2 of the second, none after the unknown 9, all of the last.
        self.assertEqual((said["lookups"], said["hits"], said["blocks"], said["policy"]), (12, 5, 100, "lru"))
        self.assertAlmostEqual(said["hit_rate"], 5 / 12)
        said = self.replay(text, "--blocks", 1, "--json").json()
        self.assertEqual(said["hits"], 0)

    def test_replay_of_a_bad_trace_names_the_line(self):
        for bad in ("{", "{}", '{"hash_ids": [-1]}', "[1]"):
            self.assertIn(":2: ", self.replay('{"hash_ids": [1]}\n' + bad, "--blocks", 5, code=1).error)
        self.kvmill("replay", "--trace", self.path("none"), "--blocks", 5, code=1)

    def test_replay_of_the_mooncake_trace_has_the_known_lru_rate(self):
        trace = os.path.join(os.environ.get("KVMILL_EXTRA_DATA") or "", "traces", "mooncake_conversation.jsonl")
        if not os.path.exists(trace):
            self.skipTest("KVMILL_EXTRA_DATA names no folder with traces/mooncake_conversation.jsonl")
        lru = self.kvmill("replay", "--trace", trace, "--blocks", 10000, "--policy", "lru", "--json").json()
        self.assertAlmostEqual(lru["hit_rate"], 0.2112, delta=0.0005)
        best = self.kvmill("replay", "--trace", trace, "--blocks", 10000, "--json").json()
        self.assertGreater(best["hit_rate"], lru["hit_rate"] + 0.01)


class Bench(Case):
    def test_bench_encode(self):
        said = self.kvmill("bench", "encode", "--format", "k4v2_g128", "--head-dim", 128, "--threads", 1,
                           "--repetitions", 3, "--json").json()
        self.assertEqual(list(said)[:6], ["gb_per_s", "us_per_tile", "reference_gb_per_s", "memcpy_gb_per_s", "simd",
                                          "bound_us"])
        # One thread: bytes of a tile over its time.
        self.assertAlmostEqual(said["gb_per_s"], 65536 / said["us_per_tile"] / 1e3, delta=0.01 * said["gb_per_s"])
        self.assertGreater(said["memcpy_gb_per_s"], 0)
        self.assertGreater(said["reference_gb_per_s"], 0)
        self.assertTrue(said["simd"])

    def test_bench_attention(self):
        said = self.kvmill("bench", "attention", "--context", 300, "--heads-q", 6, "--heads-kv", 2, "--head-dim", 64,
                           "--format", "k4v2_g64", "--threads", 2, "--repetitions", 3, "--json").json()
        self.assertEqual(list(said)[:8], ["tiles_us", "fp16_us", "ratio", "tiles_gb_per_s", "fp16_gb_per_s",
                                          "read_gb_per_s", "rel_error", "simd"])
        # Five blocks of two heads: bytes of their records over the time.
        self.assertAlmostEqual(said["tiles_gb_per_s"], 10 * 3840 / said["tiles_us"] / 1e3,
                               delta=0.01 * said["tiles_gb_per_s"])
        self.assertGreater(said["read_gb_per_s"], 0)
        self.assertLess(said["rel_error"], 1e-3)
        self.assertIn("+", said["simd"])
        forced = self.kvmill("bench", "attention", "--context", 64, "--heads-q", 1, "--heads-kv", 1,
                             "--repetitions", 1, "--simd", said["simd"].split("+")[0] + "+PORTABLE", "--json").json()
        self.assertTrue(forced["simd"].endswith("+PORTABLE"))
        self.assertLess(forced["rel_error"], 2e-5)

    def test_bench_attention_over_files_says_what_tiles_do_to_outputs(self):
        prefix = os.path.join(support.SOURCE_DIR, "tests/data/tiny-lm-kv/retrieval_")
        for layer in range(4):
            self.kvmill("encode", "--k", f"{prefix}L{layer:02d}_k.npy", "--v", f"{prefix}L{layer:02d}_v.npy",
                        "--format", "k4v4_g128", "--records", self.path(f"r_L{layer:02d}.records"))
        files = ("bench", "attention", "--kv", prefix, "--records", self.path("r_"), "--heads-q", 7, "--repetitions", 5)
        said = self.kvmill(*files, "--format", "k4v4_g128", "--json").json()
        self.assertEqual(list(said), ["tiles_us", "fp16_us", "ratio", "rel_error", "simd", "output_error", "layers",
                                      "tokens"])
        self.assertEqual((said["layers"], said["tokens"]), (4, 14 * 128))
        self.assertLess(said["rel_error"], 1e-3)
        self.assertGreater(said["output_error"], 0.01)  # 4-bit values are not the 16-bit ones,
        self.assertLess(said["output_error"], 0.15)     # but close.
        wrong = self.kvmill(*files, "--format", "k4v2_g128", code=1)
        self.assertIn("r_L00.records", wrong.error)
        self.kvmill("bench", "attention", "--kv", prefix, code=2)

    def test_bench_lookup(self):
        said = self.kvmill("bench", "lookup", "--keys", 20000, "--json").json()
        self.assertEqual(list(said)[0], "keys_per_s")
        self.assertGreater(said["keys_per_s"], 1000)
        self.assertGreater(said["metadata_bytes_per_key"], 32)

    def test_bench_disk_measures_and_cleans_up(self):
        said = self.kvmill("bench", "disk", "--bytes", "16MiB", "--dir", self.path(""), "--json").json()
        self.assertEqual(list(said)[:2], ["write_gb_per_s", "read_gb_per_s"])
        self.assertGreater(said["write_gb_per_s"], 0)
        self.assertGreater(said["read_gb_per_s"], 0)
        self.assertEqual(os.listdir(self.path("")), [])


if __name__ == "__main__":
    support.main()
