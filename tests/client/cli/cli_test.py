#!/usr/bin/env python3
"""Tests of the `kvmill` program as a user runs it, against a kvmilld of its own (ctest `cli_test`).

Python only: tensors are written and read by the few lines in cli_support.py, so that kvmill's own .npy code is not
its own judge. KVMILL_EXTRA_DATA (a folder with kv/) adds real K and V of head_dim 64.
"""
import json
import os
import signal
import stat
import struct
import subprocess
import sys
import time
import unittest
import unittest.mock

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import cli_support as support  # noqa: E402
from cli_support import Case, Daemon, Tensor, gaussian  # noqa: E402


class Files(Case):
    """encode and decode; no daemon."""

    ENCODE_FIELDS = ["tokens", "blocks", "heads", "head_dim", "record_bytes", "compression", "rel_error_k",
                     "rel_error_v", "raw_heads", "tail_tokens"]

    def encode(self, k, v, *options, **how):
        return self.kvmill("encode", "--k", self.write("k.npy", k), "--v", self.write("v.npy", v),
                           "--records", self.path("records"), *options, **how)

    def decode(self, *options, records="records", heads=2, head_dim=64, **how):
        return self.kvmill("decode", "--records", self.path(records), "--heads", heads, "--head-dim", head_dim,
                           "--k", self.path("k2.npy"), "--v", self.path("v2.npy"), *options, **how)

    def test_encode_says_what_the_contract_lists_and_decode_gives_it_back(self):
        for head_dim, name, compression in ((64, "k4v2_g128", 4.49), (128, "k4v2_g128", 4.74), (64, "k2v2_g64", 5.82),
                                            (256, "k4v4_g64", 3.58), (128, "k2v4_g128", 4.74), (128, "k3v2_g128", 5.57)):
            for encoder in ("cpu", "reference"):
                with self.subTest(name=name, head_dim=head_dim, encoder=encoder):
                    k, v = gaussian(200, 2, head_dim, 1), gaussian(200, 2, head_dim, 2)
                    said = self.encode(k, v, "--format", name, "--encoder", encoder).json()
                    self.assertEqual(list(said), self.ENCODE_FIELDS)
                    group = int(name.split("_g")[1])
                    self.assertEqual((said["tokens"], said["heads"], said["head_dim"], said["raw_heads"]),
                                     (200, 2, head_dim, 0))
                    self.assertEqual((said["blocks"], said["tail_tokens"]), divmod(200, group))
                    self.assertAlmostEqual(said["compression"], compression, delta=0.01)
                    self.assertEqual(os.path.getsize(self.path("records")),
                                     said["blocks"] * 2 * said["record_bytes"])
                    back = self.decode("--format", name, head_dim=head_dim).json()
                    self.assertEqual(back["blocks"], said["blocks"])
                    tiled = said["blocks"] * group
                    for original, file, error in ((k, "k2.npy", said["rel_error_k"]), (v, "v2.npy", said["rel_error_v"])):
                        decoded = Tensor.read(self.path(file))
                        self.assertEqual(decoded.shape, (tiled, 2, head_dim))
                        self.assertAlmostEqual(original.relative_error(decoded, tiled), error, delta=1e-3)

    def test_rotated_frame_keeps_dot_products(self):
        k = gaussian(128, 1, 64, 1)
        self.encode(k, k, "--format", "k4v4_g128")
        self.decode("--format", "k4v4_g128", heads=1)
        model = Tensor.read(self.path("k2.npy")).values()
        self.decode("--format", "k4v4_g128", "--frame", "rotated", heads=1)
        rotated = Tensor.read(self.path("k2.npy")).values()
        self.assertNotEqual(model, rotated)
        def dot(x, a, b):
            return sum(x[a * 64 + d] * x[b * 64 + d] for d in range(64))
        for a, b in ((0, 1), (5, 100), (127, 127)):
            self.assertAlmostEqual(dot(model, a, b), dot(rotated, a, b), delta=0.1)

    def test_bf16_in_and_out(self):
        k = Tensor((128, 1, 64), b"\x80\x3f" * (128 * 64), "<V2")  # 1.0
        self.encode(k, k, "--format", "k4v2_g128", "--bf16")
        self.decode("--format", "k4v2_g128", "--bf16", heads=1)
        decoded = Tensor.read(self.path("k2.npy"))
        self.assertEqual((decoded.descr, decoded.shape), ("<u2", (128, 1, 64)))
        for bits in struct.unpack(f"<{128 * 64}H", decoded.data):
            self.assertAlmostEqual(struct.unpack("<f", struct.pack("<I", bits << 16))[0], 1.0, delta=0.05)

    def test_a_head_that_must_stay_raw_is_named_or_goes_to_raw_out(self):
        values = list(gaussian(256, 2, 64, 1).values())
        for token in range(128, 256):  # Block 1, head 1: multiples of the smallest fp16 number.
            for d in range(64):
                values[(token * 2 + 1) * 64 + d] = ((token * 7 + d * 5) % 11) * 2.0 ** -24
        k, v = Tensor.of((256, 2, 64), values), gaussian(256, 2, 64, 2)
        refused = self.encode(k, v, "--format", "k4v2_g128", code=1)
        self.assertIn("block 1 head 1", refused.error)
        self.assertIn("--raw-out", refused.error)
        self.assertFalse(os.path.exists(self.path("records")))
        said = self.encode(k, v, "--format", "k4v2_g128", "--raw-out", self.path("raw")).json()
        self.assertEqual(said["raw_heads"], 1)
        self.decode("--format", "k4v2_g128", "--raw-in", self.path("raw"))
        for original, file in ((k, "k2.npy"), (v, "v2.npy")):
            decoded = Tensor.read(self.path(file))
            for token in (128, 200, 255):
                at = 2 * (token * 2 + 1) * 64
                self.assertEqual(decoded.data[at:at + 128], original.data[at:at + 128])
        with open(self.path("raw"), "r+b") as file:
            file.seek(100)
            file.write(b"\xff")
        self.assertIn("xxh3", self.decode("--format", "k4v2_g128", "--raw-in", self.path("raw"), code=1).error)

    def test_bad_npy_files_fail_with_one_line_and_leave_nothing(self):
        good = gaussian(128, 1, 64, 1)
        data = good.file_bytes()
        table = {
            "not npy": (b"hello", "truncated"),
            "other magic": (b"PK\3\4" + data[4:], "not a .npy file"),
            "version 3": (data[:6] + b"\3" + data[7:], "version 3"),
            "cut in the header": (data[:50], "truncated"),
            "cut in the values": (data[:-1], "truncated"),
            "one byte too many": (data + b"x", "trailing"),
            "fortran order": (good.file_bytes(fortran=True), "C order"),
            "big-endian": (good.file_bytes(descr=">f2"), "big-endian"),
            "fp32": (good.file_bytes(descr="<f4"), "want '<f2'"),
            "objects": (good.file_bytes(descr="|O"), "object arrays"),
            "bf16 without the flag": (good.file_bytes(descr="<u2"), "--bf16"),
            "two dimensions": (good.file_bytes(shape=(128, 64)), "2 dimensions"),
            "no tokens": (Tensor((0, 1, 64), b"", "<f2").file_bytes(), "1 to"),
            "a shape that overflows": (good.file_bytes(shape=(2 ** 31, 2 ** 31, 2)), "fit the file"),
            "head_dim 96": (gaussian(128, 1, 96, 1).file_bytes(), "head_dim 96"),
            "infinity": (data[:-2] + struct.pack("<e", float("inf")), "token 127 head 0 channel 63"),
            "nan": (data[:-2] + struct.pack("<e", float("nan")), "token 127 head 0 channel 63"),
        }
        for name, (content, says) in table.items():
            with self.subTest(name):
                with open(self.path("bad.npy"), "wb") as file:
                    file.write(content)
                for command in (("encode", "--k", self.path("bad.npy"), "--v", self.path("bad.npy"), "--records",
                                 self.path("records"), "--format", "k4v2_g128", "--json"),):
                    result = self.kvmill(*command, code=1)
                    self.assertIn(says, result.error)
                    self.assertEqual(result.error.count("\n"), 1)
                    self.assertEqual(result.output, "")
                    self.assertFalse(os.path.exists(self.path("records")))

    def test_k_and_v_must_have_the_same_shape(self):
        result = self.encode(gaussian(128, 2, 64, 1), gaussian(128, 1, 64, 1), "--format", "k4v2_g128", code=1)
        self.assertIn("[128, 2, 64]", result.error)
        self.assertIn("[128, 1, 64]", result.error)

    def test_records_of_another_format_are_refused(self):
        self.encode(gaussian(128, 2, 64, 1), gaussian(128, 2, 64, 2), "--format", "k4v2_g128")
        self.assertIn("whole number of blocks", self.decode("--format", "k4v4_g128", code=1).error)
        self.assertIn("whole number of blocks", self.decode("--format", "k4v2_g128", heads=3, code=1).error)
        # The same size, other widths: the scales are at other places.
        self.assertIn("damaged or not records", self.decode("--format", "k2v2_g64", records="noise", heads=1,
                                                            prepare=self.write_noise, code=1).error)

    def write_noise(self):
        with open(self.path("noise"), "wb") as file:
            file.write(b"\xff" * 2816)

    def test_refined_records_have_less_error_at_the_same_size(self):
        k, v = gaussian(128, 2, 64, 1), gaussian(128, 2, 64, 2)
        kvarn = self.encode(k, v, "--format", "k4v2_g128", "--json").json()
        for encoder in ("cpu", "reference"):
            with self.subTest(encoder):
                refined = self.encode(k, v, "--format", "k4v2_g128", "--algorithm", "refined", "--encoder", encoder, "--json").json()
                self.assertEqual(refined["record_bytes"], kvarn["record_bytes"])
                self.assertLess(refined["rel_error_v"], 0.85 * kvarn["rel_error_v"])
                self.assertLess(refined["rel_error_k"], kvarn["rel_error_k"])
        fast = self.kvmill("bench", "encode", "--algorithm", "refined", "--repetitions", "1", "--json").json()
        self.assertGreater(fast["us_per_tile"], fast["bound_us"])
        if not os.path.exists("/dev/nvidiactl"):
            self.assertIn("refined", self.kvmill("bench", "encode", "--algorithm", "refined", "--device", "cuda", code=1).error)

    @unittest.skipIf(os.path.exists("/dev/nvidiactl"), "there is a GPU")
    def test_without_a_gpu_says_what_is_missing(self):
        k = gaussian(128, 1, 64, 1)
        for result in (self.encode(k, k, "--format", "k4v2_g128", "--encoder", "cuda:0", code=1),
                       self.kvmill("bench", "encode", "--device", "cuda", code=1),
                       self.kvmill("bench", "attention", "--device", "cuda:0", code=1)):
            self.assertIn("cuda:0: ", result.error)
            self.assertIn("host", result.error)
        self.kvmill("bench", "encode", "--device", "gpu", code=2)
        self.kvmill("bench", "attention", "--device", "cuda:x", code=2)
        self.kvmill("bench", "attention", "--device", "cuda", "--simd", "AVX2", code=2)
        self.encode(k, k, "--format", "k4v2_g128", "--encoder", "host", code=2)

    def test_output_that_cannot_be_written_fails(self):
        k = gaussian(128, 1, 64, 1)
        result = self.kvmill("encode", "--k", self.write("k.npy", k), "--v", self.path("k.npy"), "--format",
                             "k4v2_g128", "--records", self.path("no/such/folder/records"), code=1)
        self.assertIn("no/such/folder", result.error)


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


class WithDaemon(Case):
    """put, get and the rest against one daemon."""
    PUT_FIELDS = ["blocks_stored", "blocks_existing", "tail_tokens", "raw_bytes", "encoded_bytes",
                  "compression_tiles", "compression_total", "us"]

    @classmethod
    def setUpClass(cls):
        cls.daemon = Daemon("--listen", "[::1]:0", "--admin", "127.0.0.1:0", "--insecure")
        cls.server = cls.daemon.server

    @classmethod
    def tearDownClass(cls):
        cls.daemon.stop()
        cls.daemon.remove()

    def layers(self, count, tokens, heads, head_dim, seed=1):
        """K and V of some layers under a prefix of this test."""
        tensors = []
        for layer in range(count):
            pair = [gaussian(tokens, heads, head_dim, seed * 1000 + 2 * layer + kind) for kind in (0, 1)]
            for kind, tensor in zip("kv", pair):
                self.write(f"in_L{layer:02d}_{kind}.npy", tensor)
            tensors.append(pair)
        return tensors

    def put(self, name, sequence="s", *options, **how):
        # Names of one identity share their blocks; the salt keeps the tests apart.
        return self.kvmill("put", "--namespace", name, "--format", how.pop("format", "k4v2_g128"), "--sequence",
                           sequence, "--kv", self.path("in_"), "--salt", name, *options, "--json", **how)

    def get(self, name, sequence="s", *options, **how):
        return self.kvmill("get", "--namespace", name, "--sequence", sequence, "--out", self.path("out_"), *options,
                           "--json", **how)

    def fetched(self, layer, kind):
        return Tensor.read(self.path(f"out_L{layer:02d}_{kind}.npy"))

    def test_put_and_get_say_what_the_contract_lists(self):
        tensors = self.layers(3, 300, 2, 128)
        put = self.put("round-trip", "s", "--wait", "durable").json()
        self.assertEqual(list(put)[:8], self.PUT_FIELDS)
        self.assertEqual((put["blocks_stored"], put["blocks_existing"], put["tail_tokens"]), (2, 0, 44))
        self.assertEqual(put["raw_bytes"], 3 * 2 * 300 * 2 * 128 * 2)
        self.assertAlmostEqual(put["compression_tiles"], 4.74, delta=0.01)
        self.assertAlmostEqual(put["compression_total"], put["raw_bytes"] / put["encoded_bytes"], delta=1e-6)
        self.assertLess(put["compression_total"], put["compression_tiles"])

        lookup = self.kvmill("lookup", "--namespace", "round-trip", "--sequence", "s", "--json").json()
        self.assertEqual(list(lookup)[:3], ["hit_blocks", "hit_tokens", "tiers"])
        self.assertEqual((lookup["hit_blocks"], lookup["hit_tokens"], lookup["tiers"]), (2, 256, {"host": 2}))

        get = self.get("round-trip").json()
        self.assertEqual(list(get)[:6], ["blocks", "tokens", "misses", "bytes", "us", "tiers"])
        self.assertEqual((get["blocks"], get["tokens"], get["misses"], get["tiers"]), (2, 300, 0, {"host": 2}))
        for layer, (k, v) in enumerate(tensors):
            for kind, original, low, high in (("k", k, 0.05, 0.15), ("v", v, 0.3, 0.6)):
                fetched = self.fetched(layer, kind)
                self.assertEqual((fetched.shape, fetched.descr), ((300, 2, 128), "<f2"))
                self.assertTrue(low < original.relative_error(fetched, 256) < high)
                at = 2 * 256 * 2 * 128
                self.assertEqual(fetched.data[at:], original.data[at:])  # The tail, bit by bit.

    def test_get_of_tiles_decodes_to_what_get_gives(self):
        self.layers(2, 200, 3, 64)
        self.put("tiles", "s", "--sink-blocks", "1", format="k3v4_g64")
        self.get("tiles")
        said = self.kvmill("get", "--namespace", "tiles", "--sequence", "s", "--out", self.path("t_"), "--tiles",
                           "--json").json()
        self.assertEqual((said["blocks"], said["tokens"]), (3, 192))
        for layer in (0, 1):
            self.kvmill("decode", "--records", self.path(f"t_L{layer:02d}.records"), "--raw-in",
                        self.path(f"t_L{layer:02d}.raw"), "--format", "k3v4_g64", "--head-dim", 64, "--heads", 3,
                        "--k", self.path("k2.npy"), "--v", self.path("v2.npy"))
            for kind in "kv":
                decoded = Tensor.read(self.path(f"{kind}2.npy"))
                self.assertEqual(decoded.shape, (192, 3, 64))
                self.assertEqual(decoded.data, self.fetched(layer, kind).data[:len(decoded.data)])

    def test_sink_blocks_come_back_bit_by_bit(self):
        tensors = self.layers(1, 256, 1, 64)
        self.put("sink", "s", "--sink-blocks", "1")
        self.get("sink")
        size = 2 * 128 * 64
        self.assertEqual(self.fetched(0, "k").data[:size], tensors[0][0].data[:size])
        self.assertNotEqual(self.fetched(0, "k").data[size:], tensors[0][0].data[size:])

    def test_bf16_keeps_its_dtype(self):
        tensor = Tensor((130, 1, 64), b"\x80\x3f\x00\x40" * (130 * 32), "<u2")  # 1.0, 2.0
        for kind in "kv":
            self.write(f"in_L00_{kind}.npy", tensor)
        self.put("bf16", "s", "--bf16")
        self.get("bf16")
        fetched = self.fetched(0, "k")
        self.assertEqual((fetched.descr, fetched.shape), ("<u2", (130, 1, 64)))
        self.assertEqual(fetched.data[2 * 128 * 64:], tensor.data[2 * 128 * 64:])

    def test_layers_of_two_geometries_are_two_groups(self):
        first = self.layers(1, 128, 1, 64)
        pair = [gaussian(128, 2, 128, seed) for seed in (71, 72)]
        for kind, tensor in zip("kv", pair):
            self.write(f"in_L01_{kind}.npy", tensor)
        self.put("mixed")
        self.get("mixed")
        self.assertEqual(self.fetched(0, "k").shape, (128, 1, 64))
        self.assertLess(first[0][0].relative_error(self.fetched(0, "k"), 128), 0.15)
        self.assertEqual(self.fetched(1, "v").shape, (128, 2, 128))
        listed = self.kvmill("ls", "--namespace", "mixed", "--json").json()
        self.assertEqual(sorted(entry["group"] for entry in listed), [0, 1])

    def test_the_first_bytes_of_a_key_stay(self):
        self.layers(1, 256, 1, 64, seed=1)
        self.put("existing")
        self.get("existing")
        first = self.fetched(0, "k").data
        self.layers(1, 256, 1, 64, seed=2)
        again = self.put("existing").json()
        self.assertEqual((again["blocks_stored"], again["blocks_existing"]), (0, 2))
        self.assertIsNone(again["compression_tiles"])
        self.get("existing")
        self.assertEqual(self.fetched(0, "k").data, first)

    def test_another_identity_under_a_name_is_refused(self):
        self.layers(1, 128, 1, 64)
        self.put("bound", "s", "--model", "a")
        self.assertIn('model is "b" in this request and "a" at the daemon', self.put("bound", "s", "--model", "b", code=1).error)
        self.assertIn("bits", self.put("bound", "s", "--model", "a", format="k2v2_g128", code=1).error)
        self.layers(2, 128, 1, 64)
        self.put("bound", "s", "--model", "a", code=1)

    def test_misses_are_exit_code_3(self):
        self.layers(1, 256, 1, 64)
        self.put("misses")
        for command in (["lookup"], ["get", "--out", self.path("x_")], ["rm"]):
            self.kvmill(*command, "--namespace", "misses", "--sequence", "never", code=3)
            self.kvmill(*command, "--namespace", "no-such-namespace", "--sequence", "s", code=3)
        self.assertFalse(os.path.exists(self.path("x_L00_k.npy")))
        said = self.get("misses", "s", "--blocks", "5").json()
        self.assertEqual((said["blocks"], said["misses"], said["tokens"]), (2, 3, 256))
        said = self.get("misses", "s", "--blocks", "1").json()
        self.assertEqual((said["blocks"], said["misses"], said["tokens"]), (1, 0, 128))

    def test_rm_and_clear_count_and_hide(self):
        self.layers(1, 300, 1, 64)
        self.put("removal", "a")
        self.put("removal", "b")
        keys = [entry["key"] for entry in self.kvmill("ls", "--namespace", "removal", "--json").json()]
        self.assertEqual(len(keys), 6)  # Two blocks and a tail each.
        self.assertTrue(all(len(key) == 64 and key == key.lower() for key in keys))
        self.assertEqual(self.kvmill("rm", "--namespace", "removal", "--key", keys[0], "--json").json(), {"blocks": 1})
        self.assertEqual(self.kvmill("rm", "--namespace", "removal", "--sequence", "a", "--json").json()["blocks"] +
                         self.kvmill("clear", "--namespace", "removal", "--json").json()["blocks"], 5)
        self.kvmill("lookup", "--namespace", "removal", "--sequence", "b", code=3)
        self.assertEqual(self.kvmill("clear", "--namespace", "removal", "--json").json(), {"blocks": 0})
        self.put("removal", "a")
        self.layers(1, 400, 1, 64)
        self.put("removal", "a")  # The tail of 44 tokens is a part of a whole block now.
        said = self.kvmill("lookup", "--namespace", "removal", "--sequence", "a", "--json").json()
        self.assertEqual((said["hit_blocks"], said["tail_tokens"]), (3, 16))
        self.assertEqual(self.kvmill("rm", "--namespace", "removal", "--sequence", "a", "--json").json(), {"blocks": 5})
        self.assertEqual(self.kvmill("ls", "--namespace", "removal", "--json").json(), [])

    def test_flush_and_evict_move_blocks_to_disk(self):
        self.layers(1, 256, 1, 64)
        self.put("evicted")
        self.assertEqual(list(self.kvmill("flush", "--json").json()), ["blocks"])
        self.assertGreaterEqual(self.kvmill("evict", "--tier", "host", "--json").json()["blocks"], 2)
        listed = self.kvmill("ls", "--namespace", "evicted", "--json").json()
        self.assertEqual([entry["tier"] for entry in listed], ["disk", "disk"])
        self.assertEqual(self.get("evicted").json()["tiers"], {"disk": 2})
        self.assertEqual(self.get("evicted").json()["tiers"], {"host": 2})

    def test_stat_ls_and_verify_have_their_fields(self):
        self.layers(1, 128, 1, 64)
        self.put("stat")
        self.get("stat")
        said = self.kvmill("stat", "--json").json()
        self.assertEqual(list(said)[:14], ["blocks", "pages", "sessions", "leases", "tiers", "raw_bytes_ingested",
                                           "encoded_bytes_stored", "compression", "lookup_blocks", "hit_blocks",
                                           "hit_rate", "checksum_failures", "boot_id", "uptime_s"])
        for tier in ("host", "disk"):
            self.assertEqual(list(said["tiers"][tier]), ["used_bytes", "capacity_bytes", "blocks"])
        self.assertTrue(0 < said["hit_rate"] <= 1)
        self.assertEqual(said["checksum_failures"], 0)
        entry = self.kvmill("ls", "--namespace", "stat", "--json").json()[0]
        self.assertEqual(list(entry), ["namespace", "key", "group", "blocks", "tier", "bytes", "age_s", "leases"])
        verify = self.kvmill("verify", "--json").json()
        self.assertEqual(list(verify), ["records_checked", "failures"])
        self.assertGreater(verify["records_checked"], 0)
        self.assertEqual(verify["failures"], 0)

    def test_people_get_aligned_lines(self):
        self.layers(1, 300, 1, 64)
        name = ("--namespace", "human", "--sequence", "s")
        put = self.kvmill("put", "--format", "k4v2_g128", "--kv", self.path("in_"), "--salt", "human", *name).output
        self.assertIn("4.49", put)
        get = self.kvmill("get", *name, "--out", self.path("out_")).output
        self.assertIn("2 from host", get)
        outputs = [put, get, self.kvmill("lookup", *name).output, self.kvmill("stat").output,
                   self.kvmill("ls", "--namespace", "human").output, self.kvmill("quota").output, self.kvmill("verify").output,
                   self.kvmill("flush").output]
        for output in outputs:
            self.assertFalse(output.startswith(("{", "[")))
            self.assertTrue(all(line == line.rstrip() and len(line) < 140 for line in output.splitlines()))
        columns = {line.index("  ") for line in put.splitlines()}
        self.assertEqual(len({line[:max(columns) + 2].rstrip() for line in put.splitlines()}), put.count("\n"))

    def test_bench_fetch_maps_and_gives_the_leases_back(self):
        small = ("--bytes", "64KiB", "--count", "5", "--json")
        said = self.kvmill("bench", "fetch", "--path", "map", "--blocks", "8", "--clients", "3", "--depth", "2", *small).json()
        self.assertEqual((said["transport"], said["blocks"]), ("shm", 8))
        self.assertEqual(list(said["clients_gb_per_s"]), ["1", "2", "3"])
        self.assertEqual(said["gb_per_s"], said["clients_gb_per_s"]["3"])
        self.assertTrue(0 < said["p50_us"] <= said["p99_us"])
        self.assertGreater(said["empty_rpc_p50_us"], 0)
        self.assertAlmostEqual(said["raw_gb_per_s"] / said["gb_per_s"], said["raw_bytes"] / said["page_bytes"])
        after = self.kvmill("stat", "--json").json()
        self.assertEqual(after["leases"], 0)
        self.assertEqual(self.kvmill("ls", "--json").output.count("kvmill-bench"), 0)
        inline = self.kvmill("bench", "fetch", "--path", "inline", "--blocks", "20", *small).json()
        self.assertEqual((inline["transport"], list(inline["clients_gb_per_s"])), ("grpc", ["1"]))
        self.assertIn("socket", self.kvmill("bench", "fetch", "--path", "map", *small, code=1,
                                            server=self.daemon.ready["listen"]).error)

    def test_bench_store_stores_from_shared_pages(self):
        small = ("--bytes", "64KiB", "--count", "5", "--json")
        before = self.kvmill("stat", "--json").json()
        for records in ((), ("--records",)):
            said = self.kvmill("bench", "store", "--path", "map", "--clients", "2", *records, *small).json()
            self.assertEqual((said["transport"], said["blocks"]), ("shm", 1))
            self.assertEqual(list(said["clients_gb_per_s"]), ["1", "2"])
            self.assertTrue(0 < said["p50_us"] <= said["p99_us"])
            self.assertAlmostEqual(said["raw_gb_per_s"] / said["gb_per_s"], said["raw_bytes"] / said["page_bytes"])
        after = self.kvmill("stat", "--json").json()
        self.assertEqual(after["blocks"], before["blocks"])
        self.assertEqual(self.kvmill("ls", "--json").output.count("kvmill-bench"), 0)
        self.assertIn("socket", self.kvmill("bench", "store", "--path", "map", *small, code=1,
                                            server=self.daemon.ready["listen"]).error)

    def test_tcp_over_ipv6_works_and_is_no_place_for_admin(self):
        server = self.daemon.ready["listen"]
        self.assertTrue(server.startswith("[::1]:"))
        self.layers(1, 128, 1, 64)
        # Another way in may be another tenant: a name of its own.
        self.put("v6", server=server)
        self.assertEqual(self.get("v6", server=server).json()["blocks"], 1)
        for command in (["evict", "--tier", "host"], ["verify"]):
            self.assertIn("admin", self.kvmill(*command, code=1, server=server).error)
        self.kvmill("verify", server=self.daemon.ready["admin"])
        # The other way round, too.
        error = self.kvmill("stat", server=self.daemon.ready["admin"], code=1).error
        self.assertIn("its admin listener has admin commands alone; use the address of its --listen", error)

    def test_bad_prompts_fail_before_anything_is_stored(self):
        self.assertIn("L00_k.npy", self.put("bad", code=1).error)
        self.layers(2, 128, 1, 64)
        os.remove(self.path("in_L01_v.npy"))
        self.assertIn("in_L01_v.npy", self.put("bad", code=1).error)
        self.write("in_L01_v.npy", gaussian(129, 1, 64, 1))
        self.assertIn("in_L01_v.npy", self.put("bad", code=1).error)
        for kind in "kv":
            self.write(f"in_L01_{kind}.npy", gaussian(129, 1, 64, 1))
        self.assertIn("129 tokens", self.put("bad", code=1).error)
        self.kvmill("lookup", "--namespace", "bad", "--sequence", "s", code=3)

    def test_a_block_with_a_nan_fails_and_the_others_are_stored(self):
        self.layers(1, 384, 1, 64)
        tensor = gaussian(384, 1, 64, 5)
        data = bytearray(tensor.data)
        data[2 * (200 * 64 + 7):2 * (200 * 64 + 7) + 2] = struct.pack("<e", float("nan"))
        self.write("in_L00_v.npy", Tensor(tensor.shape, bytes(data), "<f2"))
        result = self.put("nan", code=1)
        self.assertIn("block 1", result.error)
        self.assertIn("channel 7", result.error)
        self.assertEqual(result.json()["blocks_failed"], 1)
        self.assertEqual(self.get("nan").json()["blocks"], 1)


class DaemonGone(Case):
    def test_the_default_socket_is_named_with_where_else_a_daemon_may_have_it(self):
        with unittest.mock.patch.dict(os.environ, {"XDG_RUNTIME_DIR": self.path("nothing")}):
            error = self.kvmill("stat", "--timeout", "2s", code=1, server=False).error
        self.assertIn(self.path("nothing") + "/kvmill.sock", error)
        self.assertIn("unix:$XDG_RUNTIME_DIR/kvmill.sock", error)
        self.assertIn("unix:/run/kvmill/kvmill.sock", error)
        # Not where somebody said which one.
        self.assertNotIn("/run/kvmill", self.kvmill("stat", code=1, server="unix:" + self.path("none.sock")).error)

    def test_a_scheme_in_front_of_an_address_is_named(self):
        self.assertIn('leave out "http://"', self.kvmill("stat", code=2, server="http://localhost:1").error)

    def test_no_daemon_is_exit_code_1_and_says_where_it_looked(self):
        begin = time.monotonic()
        result = self.kvmill("stat", "--timeout", "2s", code=1, server="unix:" + self.path("none.sock"))
        self.assertLess(time.monotonic() - begin, 10)
        self.assertIn("kvmilld", result.error)
        self.assertEqual(result.error.count("\n"), 1)

    def test_a_stopped_daemon_does_not_hang_the_caller(self):
        daemon = Daemon()
        try:
            self.kvmill("stat", server=daemon.server)
            daemon.process.send_signal(signal.SIGSTOP)
            begin = time.monotonic()
            self.kvmill("stat", "--timeout", "500ms", code=1, server=daemon.server)
            self.assertLess(time.monotonic() - begin, 10)
            daemon.process.send_signal(signal.SIGCONT)
            self.kvmill("stat", server=daemon.server)
        finally:
            daemon.process.send_signal(signal.SIGCONT)
            daemon.stop()
            daemon.remove()

    def test_durable_blocks_survive_kill_9_and_a_damaged_one_is_a_miss(self):
        for kind in "kv":
            self.write(f"in_L00_{kind}.npy", gaussian(128 * 8, 4, 128, 1))
        name = ("--namespace", "n", "--sequence", "s")
        daemon = Daemon()
        try:
            self.kvmill("put", *name, "--format", "k4v2_g128", "--kv", self.path("in_"), "--wait", "durable",
                        server=daemon.server)
            self.kvmill("get", *name, "--out", self.path("a_"), server=daemon.server)
            daemon.kill_hard()
            daemon.start()
            said = self.kvmill("get", *name, "--out", self.path("b_"), "--json", server=daemon.server).json()
            self.assertEqual((said["blocks"], said["misses"], said["tiers"]), (8, 0, {"disk": 8}))
            self.assertEqual(Tensor.read(self.path("a_L00_k.npy")).data, Tensor.read(self.path("b_L00_k.npy")).data)
            daemon.kill_hard()
            damage_largest_files(os.path.join(daemon.folder, "data"))
            daemon.start()
            result = self.kvmill("get", *name, "--out", self.path("c_"), "--json", server=daemon.server, code=None)
            self.assertIn(result.code, (0, 3))
            said = result.json()
            self.assertLess(said["blocks"], 8)
            self.assertGreater(said["misses"], 0)
            if said["blocks"] > 0:
                good = Tensor.read(self.path("a_L00_k.npy")).data
                self.assertTrue(good.startswith(Tensor.read(self.path("c_L00_k.npy")).data))
        finally:
            daemon.stop()
            daemon.remove()


def damage_largest_files(folder):
    """Flips a byte every 4 KiB in the second half of the files that hold the pages."""
    for parent, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(parent, name)
            if not name.endswith(".blob") or not stat.S_ISREG(os.stat(path).st_mode):
                continue
            size = os.path.getsize(path)
            with open(path, "r+b") as file:
                for at in range(size // 2, size - 1024, 4096):
                    file.seek(at)
                    byte = file.read(1)
                    file.seek(at)
                    file.write(bytes([byte[0] ^ 0x40]))


class RealData(WithDaemon):
    """Real K and V: the repository's own, and KVMILL_EXTRA_DATA."""

    def check(self, prefix, name, head_dim, compression, tokens):
        put = self.kvmill("put", "--namespace", name, "--format", "k4v2_g128", "--sequence", "s", "--kv", prefix,
                          "--wait", "durable", "--json").json()
        self.assertAlmostEqual(put["compression_tiles"], compression, delta=0.01)
        self.assertEqual((put["blocks_stored"], put["tail_tokens"]), divmod(tokens, 128))
        self.assertEqual(self.get(name).json()["tokens"], tokens)
        layer = 0
        while os.path.exists(f"{prefix}L{layer:02d}_k.npy"):
            for kind, worst in (("k", 0.2), ("v", 0.7)):
                original = Tensor.read(f"{prefix}L{layer:02d}_{kind}.npy")
                fetched = self.fetched(layer, kind)
                self.assertEqual(fetched.shape[2], head_dim)
                self.assertTrue(0 < original.relative_error(fetched, tokens // 128 * 128) < worst)
            layer += 1
        return layer

    def test_the_repository_s_own(self):
        prefix = os.path.join(support.SOURCE_DIR, "tests/data/tiny-lm-kv/retrieval_")
        self.assertEqual(self.check(prefix, "tiny", 128, 4.74, 1918), 4)

    def test_twenty_layers_of_a_real_model(self):
        prefix = support.extra_kv_prefix()
        if prefix is None:
            self.skipTest("KVMILL_EXTRA_DATA names no folder with kv/*L00_k.npy")
        self.assertEqual(self.check(prefix, "extra", 64, 4.49, 284), 20)


# RealData borrows WithDaemon's helpers, not its tests.
for test in [name for name in vars(WithDaemon) if name.startswith("test_")]:
    setattr(RealData, test, None)

if __name__ == "__main__":
    support.main()
