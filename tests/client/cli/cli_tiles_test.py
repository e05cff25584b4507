#!/usr/bin/env python3
"""encode and decode of the `kvmill` program as a user runs it, on files; no daemon (ctest `cli_tiles_test`).

Python only: tensors are written and read by the few lines in cli_support.py, so that kvmill's own .npy code is not
its own judge.
"""
import os
import struct
import sys
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import cli_support as support  # noqa: E402
from cli_support import Case, Tensor, gaussian  # noqa: E402


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


if __name__ == "__main__":
    support.main()
