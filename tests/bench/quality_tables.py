#!/usr/bin/env python3
"""Writes the tables of docs/quality.md again, with what `kvmill eval error` and `kvmill eval decode` print now.

quality_tables.py [--kvmill build/release/bin/kvmill] [--only TABLE]

The K and V of this repository always; those of KVMILL_EXTRA_DATA (a folder with kv/) when it is set: otherwise their
tables stay as they are, and a line says so. Says how long each run took.
"""
import argparse
import glob
import os
import re
import subprocess
import sys
import time

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
PAGE = os.path.join(ROOT, "docs", "quality.md")
REFINED = ["--methods", "kvarn,refinements", "--formats", "k4v2_g128,k2v2_g128,k4v4_g128"]
POSITIONS = ["fp16", "kvarn", "refined", "turboquant", "kivi-g128"]  # 46 rows would be too many to read.
# Tables -> (whether they are of KVMILL_EXTRA_DATA, command, arguments). One run prints all tables of a key.
RUNS = {
    ("shipped",): (False, "error", []),
    ("extra",): (True, "error", []),
    ("ablations",): (True, "error", ["--methods", "kvarn,ablations"]),
    ("refined",): (True, "error", REFINED),
    ("refined shipped",): (False, "error", REFINED),
    ("decode", "decode by position"): (False, "decode", ["--by-position"]),
    ("decode ablations",): (False, "decode", ["--tasks", "chain-60", "--formats", "k2v2_g128", "--mode", "decode",
                                              "--methods", "kvarn,ablations"]),
    ("three bits",): (False, "decode", ["--tasks", "chain-60", "--formats", "k3v2_g128", "--mode", "decode",
                                        "--methods", "kvarn,refined,hadamard-kivi,kivi-g128,turboquant,kvquant-1pct"]),
    ("three bits extra",): (True, "error", ["--formats", "k3v2_g128", "--methods", "kvarn,refined,baselines"]),
    ("refined tasks",): (False, "decode", ["--tasks", "chain-60,chain-110,retrieval-60,retrieval-100,retrieval-200",
                                           "--formats", "k4v2_g128", "--mode", "decode", "--methods", "kvarn,refined"]),
    ("decode outliers",): (False, "decode", ["--tasks", "chain-60", "--outliers", "--answers", "50", "--mode", "decode"]),
}


def extra_prefix():
    extra = os.environ.get("KVMILL_EXTRA_DATA")
    found = sorted(glob.glob(os.path.join(extra, "kv", "*L00_k.npy"))) if extra else []
    return found[0][:-len("L00_k.npy")] if found else None


def some_positions(table):
    """Of all methods and formats those that say something: 2-bit keys."""
    lines = table.splitlines()

    def wanted(line):
        method, form = [cell.strip(" `") for cell in line.strip("|").split("|")][1:3]
        return method in POSITIONS and form in ("k2v2_g128", "fp16")
    return "\n".join(lines[:2] + [line for line in lines[2:] if wanted(line)])


def write(names, tables):
    with open(PAGE, encoding="utf-8") as file:
        text = file.read()
    for name, table in zip(names, tables):
        region = re.compile(rf"(<!-- table: {name} -->\n).*?(\n<!-- end -->)", re.DOTALL)
        if not region.search(text):
            sys.exit(f"{PAGE} has no table '{name}'")
        text = region.sub(lambda match, table=table: match.group(1) + table + match.group(2), text)
    with open(PAGE, "w", encoding="utf-8") as file:  # Now: the next run may take a while.
        file.write(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvmill", default=os.path.join(ROOT, "build", "release", "bin", "kvmill"))
    parser.add_argument("--only", choices=[name for names in RUNS for name in names], action="append",
                        help="this table, and those of the same run, and no other; may be repeated")
    options = parser.parse_args()
    for names, (of_extra, command, arguments) in RUNS.items():
        if options.only and not set(names) & set(options.only):
            continue
        if of_extra:
            prefix = extra_prefix()
            if prefix is None:
                print(f"table '{names[0]}' stays as it is: KVMILL_EXTRA_DATA names no folder with kv/*L00_k.npy")
                continue
            arguments = ["--kv", prefix, *arguments]
        start = time.monotonic()
        printed = subprocess.run([options.kvmill, "eval", command, *arguments, "--markdown"], check=True, capture_output=True,
                                 text=True).stdout.strip()
        tables = printed.split("\n\n")
        if "decode by position" in names:
            # The modes of all tasks; then each task that has parts.
            tables = [tables[0], "\n\n".join(some_positions(table) for table in tables[1:])]
        if len(tables) != len(names):
            sys.exit(f"kvmill eval {command} printed {len(tables)} tables, and {len(names)} were expected")
        write(names, tables)
        print(f"{' and '.join(repr(name) for name in names)}: written, {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
