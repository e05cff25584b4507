#!/usr/bin/env python3
"""`kvmill eval` as a user runs it, and its reports in a headless Chromium (ctest `eval_cli_test`).

Its own judge: rows for per-token RTN are computed again here, in plain Python. docs/quality.md must have the numbers that
the program prints for the K and V of this repository. KVMILL_EXTRA_DATA (a folder with kv/) adds real K and V of
head_dim 64. KVMILL_CHROMIUM names the browser; screenshots go to KVMILL_SCREENSHOTS.
"""
import html.parser
import json
import math
import os
import re
import struct
import subprocess
import sys
import unittest
import unittest.mock

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path += [os.path.join(HERE, "..", "cli"), os.path.join(HERE, "..", "..", "deploy")]
import cli_support as support  # noqa: E402  # pylint: disable=wrong-import-position
from chromium import Chromium  # noqa: E402  # pylint: disable=wrong-import-position
from cli_support import Case, Tensor, gaussian  # noqa: E402  # pylint: disable=wrong-import-position

BASELINES = ["rtn", "kivi-g32", "kivi-g128", "hadamard-kivi", "quarot", "turboquant", "polarquant", "kvquant-1pct",
             "kitty", "kitty-pro"]


def half(x):
    return struct.unpack("<e", struct.pack("<e", x))[0]


class Strict(html.parser.HTMLParser):
    """Every element is closed where it must be; no script, no address."""

    VOID = {"meta", "br"}

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        assert tag != "script" and not {"src", "href", "style"} & {name for name, _ in attrs} - {"style"}, (tag, attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, (self.open, tag)
        self.open.pop()


class EvalError(Case):
    def eval(self, *arguments, **how):
        return self.kvmill("eval", "error", *arguments, server=False, **how)

    def small(self, tokens=150, heads=2, head_dim=64, prefix="p"):
        for layer in range(2):
            for kind in "kv":
                self.write(f"{prefix}L{layer:02d}_{kind}.npy", gaussian(tokens, heads, head_dim, 2 * layer + (kind == "v")))
        return self.path(prefix)

    def test_rtn_is_what_its_definition_says(self):
        rows = self.eval("--kv", self.small(), "--methods", "rtn", "--formats", "k4v2_g128", "--json").json()
        self.assertEqual([(r["layer"], r["head"]) for r in rows], [(0, 0), (0, 1), (1, 0), (1, 1)])
        k = Tensor.read(self.path("pL01_k.npy")).values()
        row, errors, error, magnitude, norm = rows[3], [], 0, 0, 0
        for token in range(128):
            x = k[(token * 2 + 1) * 64:(token * 2 + 2) * 64]
            zero, scale = half(min(x)), half((max(x) - min(x)) / 15)
            y = [min(15, max(0, round((a - zero) / scale))) * scale + zero for a in x]
            xx, dd = sum(a * a for a in x), sum((b - a) ** 2 for a, b in zip(x, y))
            magnitude += (math.sqrt(sum(b * b for b in y)) - math.sqrt(xx)) ** 2
            error, norm = error + dd, norm + xx
            errors.append(math.sqrt(dd / xx))
        self.assertAlmostEqual(row["rel_error_k"], math.sqrt(error / norm), delta=1e-6)
        self.assertAlmostEqual(row["magnitude_error"], math.sqrt(magnitude / norm), delta=1e-6)
        errors.sort()
        at = 0.95 * 127
        self.assertAlmostEqual(row["token_p95_k"], errors[int(at)] + (at - int(at)) * (errors[int(at) + 1] - errors[int(at)]), delta=1e-6)
        self.assertAlmostEqual(row["bits_per_element"], (4 + 2) / 2 + 32 / 64)
        self.assertEqual((row["n"], row["queries"]), (128, "surrogate"))

    def test_kvarn_is_what_encode_says(self):
        said = self.eval("--kv", self.small(heads=1), "--methods", "kvarn", "--formats", "k4v2_g128", "--json").json()
        encoded = self.kvmill("encode", "--k", self.path("pL00_k.npy"), "--v", self.path("pL00_v.npy"), "--format", "k4v2_g128",
                              "--records", self.path("r"), "--json", server=False).json()
        self.assertAlmostEqual(said[0]["rel_error_k"], encoded["rel_error_k"], delta=1e-5)
        self.assertAlmostEqual(said[0]["rel_error_v"], encoded["rel_error_v"], delta=1e-5)
        self.assertAlmostEqual(16 / said[0]["bits_per_element"], encoded["compression"], delta=1e-9)

    def test_queries_that_are_given_are_used_and_marked(self):
        prefix = self.small()
        once = self.eval("--kv", prefix, "--methods", "kvarn", "--json").json()
        self.assertEqual(once, self.eval("--kv", prefix, "--methods", "kvarn", "--json").json())
        other = self.eval("--kv", prefix, "--methods", "kvarn", "--seed", "2", "--json").json()
        self.assertEqual(once[0]["rel_error_k"], other[0]["rel_error_k"])
        self.assertNotEqual(once[0]["attention_error"], other[0]["attention_error"])
        self.write("pL00_q.npy", gaussian(150, 4, 64, 9))
        self.assertIn("1 of 2 layers have a file of queries", self.eval("--kv", prefix, code=1).error)
        self.write("pL01_q.npy", gaussian(150, 4, 64, 10))
        given = self.eval("--kv", prefix, "--methods", "kvarn", "--json").json()
        self.assertEqual({row["queries"] for row in given}, {"given"})
        self.assertNotEqual(once[0]["attention_error"], given[0]["attention_error"])

    def test_bad_input_is_one_clear_line(self):
        prefix = self.small()
        for arguments, code, words in (
                (["--methods", "kvarn,kivvi"], 2, ["'kivvi'", *BASELINES, "ablations"]),
                (["--formats", "k9v2_g128"], 2, ["k9v2_g128"]),
                (["--json", "--markdown"], 2, ["exclude"]),
                (["--methods", "kitty", "--formats", "k4v2_g128"], 1, ["2-bit keys"]),
                (["--kv", self.path("none")], 1, [self.path("noneL00_k.npy")]),
                (["--kv", self.small(100, prefix="short")], 1, ["100 tokens", "128"]),
                (["--html", self.path("no/such/folder.html"), "--methods", "rtn"], 1, ["no/such/folder.html"])):
            with self.subTest(arguments=arguments):
                data = () if "--kv" in arguments else ("--kv", prefix)
                said = self.eval(*data, *arguments, code=code)
                self.assertEqual((said.output, said.error.count("\n")), ("", 1), said.error)
                for word in words:
                    self.assertIn(word, said.error)
        values = list(gaussian(150, 2, 64, 0).values())
        values[(100 * 2 + 1) * 64 + 7] = math.inf
        self.write("pL00_k.npy", Tensor.of((150, 2, 64), values))
        self.assertIn("K of layer 0: token 100 head 1 channel 7 is inf", self.eval("--kv", prefix, code=1).error)

    def test_the_table_names_what_it_is_of_and_every_method(self):
        said = self.eval("--kv", self.small()).output
        self.assertIn("2 layers, 4 heads (layer by layer), 128 of 150 tokens", said)
        self.assertIn("queries: surrogate", said)
        for name in ["kvarn", *BASELINES]:
            self.assertRegex(said, rf"(?m)^{re.escape(name)}( \*)? +k2v2_g128 ")
        self.assertNotRegex(said, r"(?m)^kitty.* k4v2_g128 ")

    def test_without_arguments_it_is_the_table_of_the_documentation(self):
        """The numbers of docs/quality.md, to what SIMD levels may differ by."""
        with open(os.path.join(support.SOURCE_DIR, "docs", "quality.md"), encoding="utf-8") as file:
            text = file.read()
        documented = re.search(r"<!-- table: shipped -->\n(.*?)\n<!-- end -->", text, re.DOTALL).group(1).splitlines()
        # The longest run here; on a busy machine, minutes.
        with unittest.mock.patch.object(support, "COMMAND_SECONDS", 500):
            printed = self.eval("--markdown").output.splitlines()
        self.assertEqual(len(documented), len(printed), "run tests/bench/quality_tables.py")
        self.assertGreater(len(printed), 20)
        for old, new in zip(documented, printed):
            old_cells, new_cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in (old, new))
            self.assertEqual(old_cells[:3], new_cells[:3], "run tests/bench/quality_tables.py")
            if old_cells[2].replace(".", "").isdigit():
                for a, b in zip((old_cells[3], *old_cells[5:10]), (new_cells[3], *new_cells[5:10])):
                    self.assertAlmostEqual(float(a), float(b), delta=0.02 + 0.01 * float(a), msg=f"{old}\n{new}")

    def test_twenty_layers_of_a_real_model(self):
        prefix = support.extra_kv_prefix()
        if prefix is None:
            self.skipTest("KVMILL_EXTRA_DATA names no folder with kv/*L00_k.npy")
        rows = self.eval("--kv", prefix, "--methods", "kvarn,rtn,hadamard-kivi", "--formats", "k4v2_g128", "--json").json()
        self.assertEqual(len(rows), 3 * 20 * 2)
        self.assertEqual({row["n"] for row in rows}, {256})
        error = {name: [row["attention_error"] for row in rows if row["method"] == name] for name in ("kvarn", "rtn")}
        self.assertTrue(all(0 < value < 1 for value in error["kvarn"]))
        self.assertLess(sum(error["kvarn"]), sum(error["rtn"]))

    def test_the_report_is_one_file_that_reads_on_a_phone_and_in_the_dark(self):
        prefix, path = self.small(), self.path("report.html")
        rows = self.eval("--kv", prefix, "--html", path, "--json").json()
        with open(path, encoding="utf-8") as file:
            text = file.read()
        parser = Strict()
        parser.feed(text)
        parser.close()
        self.assertEqual(parser.open, [])
        self.assertEqual(parser.seen.count("h3"), 6 * 2)  # Metrics and formats.
        # A plot of bits, and for every metric one of each method and format.
        pairs = len({(row["method"], row["format"]) for row in rows})
        self.assertEqual(parser.seen.count("svg"), 1 + 6 * pairs)
        self.assertEqual(text.count("n = 4"), (1 + 2 * 6) * pairs)  # In plots twice: for screen readers, too.
        self.assertEqual(len(re.findall(r"smaller in \d+, greater in \d+, p = ", text)), 7 * (pairs - 2))
        look_at(self, path, "eval")


class EvalDecode(Case):
    def eval(self, *arguments, **how):
        return self.kvmill("eval", "decode", *arguments, server=False, **how)

    SHORT = ("--tasks", "chain-60", "--answers", "2", "--methods", "kvarn,rtn", "--formats", "k2v2_g128")

    def test_a_short_run_has_the_rows_that_it_should(self):
        rows = self.eval(*self.SHORT, "--json").json()
        # All positions and 6 parts, of fp32, fp16, and two methods in two modes.
        self.assertEqual(len(rows), 7 * 6)
        self.assertEqual([(row["method"], row["mode"]) for row in rows[::7]],
                         [("fp32", "decode"), ("fp16", "decode"), ("kvarn", "decode"), ("kvarn", "prefill"), ("rtn", "decode"), ("rtn", "prefill")])
        self.assertEqual([(row["position_from"], row["position_to"], row["part"]) for row in rows[:3]],
                         [(0, 600, False), (0, 100, True), (100, 200, True)])
        fp32, fp16, kvarn, kvarn_prefill, rtn = rows[0], rows[7], rows[14], rows[21], rows[28]
        self.assertEqual((fp32["exact_match"], fp32["kl"], fp32["top1"], fp32["n"], fp32["bits_per_element"]), (1, 0, 1, 2, 32))
        self.assertEqual((fp16["exact_match"], fp16["top1"], fp16["bits_per_element"]), (1, 1, 16))
        self.assertLess(fp16["kl"], 1e-6)
        self.assertAlmostEqual(kvarn["bits_per_element"], 2.375)
        self.assertAlmostEqual(rtn["bits_per_element"], 2.25)
        self.assertGreater(rtn["kl"], kvarn["kl"])
        self.assertGreater(kvarn["kl"], kvarn_prefill["kl"])
        self.assertGreater(rtn["perplexity"], fp32["perplexity"])
        self.assertEqual(rtn["exact_match"], 0)
        for row in rows:
            self.assertTrue(0 <= row["exact_match"] <= 1 and 0 <= row["top1"] <= 1 and row["kl"] >= 0 and row["perplexity"] >= 1, row)
        again = self.eval(*self.SHORT, "--json", "--threads", "1", "--mode", "decode").json()
        self.assertEqual(again, [row for row in rows if row["mode"] == "decode"])

    def test_outliers_hurt_the_methods_that_do_not_spread_them(self):
        short = ("--tasks", "retrieval-60", "--answers", "20", "--methods", "kvarn,rtn", "--formats", "k4v2_g128", "--mode", "decode", "--json")
        plain, hard = self.eval(*short).json(), self.eval(*short, "--outliers").json()
        self.assertEqual(plain[0], hard[0])  # fp32: the same function.
        self.assertGreater(hard[3]["kl"], 20 * plain[3]["kl"])  # RTN.
        self.assertLess(hard[2]["kl"], hard[3]["kl"] / 20)  # KVarN.

    def test_tables_for_people(self):
        said = self.eval(*self.SHORT).output
        self.assertIn("the first 1 block and the unfinished one in 16 bits", said)
        self.assertRegex(said, r"(?m)^chain-60 +rtn +k2v2_g128 +2\.25 +2 +0\.0 ")
        both = self.eval(*self.SHORT, "--by-position").output
        self.assertTrue(both.startswith(said), both)
        said = both[len(said):]
        self.assertRegex(said, r"(?m)^task +method +format +mode +0-100 +100-200 .* 500-600$")
        self.assertRegex(said, r"(?m)^chain-60 +kvarn +k2v2_g128 +prefill ")
        tables = self.eval(*self.SHORT, "--markdown", "--by-position").output.split("\n\n")
        self.assertEqual([table.splitlines()[1].count("|") for table in tables], [14, 11])

    def test_bad_input_is_one_clear_line(self):
        broken = self.path("broken.json")
        with open(broken, "w", encoding="utf-8") as file:
            file.write('{"config": {"vocab": 64, "dim": 7}}')
        for arguments, code, words in (
                (["--tasks", "chain-6"], 2, ["'chain-6'", "chain-60", "retrieval-200"]),
                (["--methods", "kivvi"], 2, ["'kivvi'", "kivi-g32"]),
                (["--formats", "k9v2_g128"], 2, ["k9v2_g128"]),
                (["--mode", "both"], 2, ["both"]),
                (["--json", "--markdown"], 2, ["exclude"]),
                (["--methods", "kitty", "--formats", "k4v2_g128"], 1, ["2-bit keys"]),
                (["--model", self.path("none.json")], 1, [self.path("none.json")]),
                (["--model", broken], 1, [broken, "config.dim", "7", "multiple of 16"])):
            with self.subTest(arguments=arguments):
                said = self.eval(*arguments, code=code)
                self.assertEqual(said.output, "")
                for word in words:
                    self.assertIn(word, said.error)

    def test_the_documentation_has_every_method_with_its_bits(self):
        """The numbers of docs/quality.md take minutes; which rows there are, and at how many bits, does not."""
        with open(os.path.join(support.SOURCE_DIR, "docs", "quality.md"), encoding="utf-8") as file:
            text = file.read()
        documented = re.search(r"<!-- table: decode -->\n(.*?)\n<!-- end -->", text, re.DOTALL).group(1).splitlines()
        if not documented[0].startswith("|"):
            self.skipTest("the table is not written yet")
        printed = self.eval("--tasks", "retrieval-60", "--answers", "1", "--mode", "decode", "--markdown").output.splitlines()

        def rows(lines):
            return [[cell.strip() for cell in line.strip("|").split("|")][1:4] for line in lines[2:]]
        self.assertEqual(documented[0], printed[0], "run tests/bench/quality_tables.py")
        self.assertEqual(rows(documented)[:len(printed) - 2], rows(printed), "run tests/bench/quality_tables.py")

    def test_the_report_reads_on_a_phone_and_in_the_dark(self):
        path = self.path("report.html")
        rows = self.eval(*self.SHORT, "--html", path, "--json").json()
        with open(path, encoding="utf-8") as file:
            text = file.read()
        parser = Strict()
        parser.feed(text)
        parser.close()
        self.assertEqual(parser.open, [])
        self.assertEqual(parser.seen.count("h3"), 3)
        self.assertEqual(parser.seen.count("polyline"), 4)
        self.assertEqual(text.count("right where it is wrong in"), 1)
        self.assertEqual(len(rows), 42)
        look_at(self, path, "eval_decode")


def look_at(case, path, name_of_page):
    """The report in a browser: wide, dark and on a phone."""
    program = os.environ.get("KVMILL_CHROMIUM")
    case.assertTrue(program, "KVMILL_CHROMIUM names no browser")
    chromium = Chromium(program)
    case.addCleanup(chromium.stop)
    out = os.environ.get("KVMILL_SCREENSHOTS") or case.path("")
    os.makedirs(out, exist_ok=True)
    colours = set()
    for name, width, scheme in (("wide", 1200, "light"), ("dark", 1200, "dark"), ("phone", 360, "light")):
        chromium.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        chromium.open("file://" + path, width, 900, width < 500)
        chromium.screenshot(os.path.join(out, f"{name_of_page}_{name}.png"))
        # Nothing wider than the screen, text and ground far apart, every box drawn.
        case.assertLessEqual(chromium.run("document.documentElement.scrollWidth"), width)
        ground, ink = (chromium.run(f"getComputedStyle(document.body).{what}") for what in ("backgroundColor", "color"))
        colours.add(ground)
        bright = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (ground, ink)]
        case.assertGreater(abs(bright[0] - bright[1]), 450)
        case.assertEqual(chromium.run("[...document.querySelectorAll('.row rect')].filter(r => !(r.getBoundingClientRect().height "
                                      "> 5)).length"), 0)
        case.assertGreaterEqual(chromium.run("Math.min(...[...document.querySelectorAll('.row>span')].filter(s => s.textContent)"
                                             ".map(s => parseFloat(getComputedStyle(s).fontSize)))"), 12)
    case.assertEqual(len(colours), 2)
    case.assertEqual({address for address in chromium.requested() if not address.startswith("file://")}, set())
    case.assertEqual(chromium.complaints(), [])


if __name__ == "__main__":
    support.main()
