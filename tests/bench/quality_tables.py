#!/usr/bin/env python3
"""Writes the tables of docs/quality.md again, with what `kvmill eval error` and `kvmill eval decode` print now.

quality_tables.py [--kvmill build/release/bin/kvmill] [--only TABLE]

The K and V of this repository always; those of KVMILL_EXTRA_DATA (a folder with kv/) when it is set: otherwise their
tables stay as they are, and a line says so.
"""
import argparse
import glob
import os
import re
import subprocess
import sys

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
PAGE = os.path.join(ROOT, "docs", "quality.md")
REFINED = ["--methods", "kvarn,refined", "--formats", "k4v2_g128,k2v2_g128,k4v4_g128"]
# Name of the table -> (whether it is of KVMILL_EXTRA_DATA, command, arguments).
TABLES = {
    "shipped": (False, "error", []),
    "extra": (True, "error", []),
    "ablations": (True, "error", ["--methods", "kvarn,ablations"]),
    "refined": (True, "error", REFINED),
    "refined shipped": (False, "error", REFINED),
    "decode": (False, "decode", []),
    "decode by position": (False, "decode", ["--tasks", "chain-60", "--formats", "k2v2_g128", "--methods",
                                             "kvarn,refined-refit,turboquant,kivi-g128", "--by-position"]),
    "decode outliers": (False, "decode", ["--tasks", "chain-60", "--outliers", "--answers", "50"]),
}


def extra_prefix():
    extra = os.environ.get("KVMILL_EXTRA_DATA")
    found = sorted(glob.glob(os.path.join(extra, "kv", "*L00_k.npy"))) if extra else []
    return found[0][:-len("L00_k.npy")] if found else None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvmill", default=os.path.join(ROOT, "build", "release", "bin", "kvmill"))
    parser.add_argument("--only", choices=TABLES, action="append", help="this table and no other; may be repeated")
    arguments = parser.parse_args()
    kvmill, only = arguments.kvmill, arguments.only or list(TABLES)
    with open(PAGE, encoding="utf-8") as file:
        text = file.read()
    for name, (of_extra, command, arguments) in TABLES.items():
        if name not in only:
            continue
        if of_extra:
            prefix = extra_prefix()
            if prefix is None:
                print(f"table '{name}' stays as it is: KVMILL_EXTRA_DATA names no folder with kv/*L00_k.npy")
                continue
            arguments = ["--kv", prefix, *arguments]
        table = subprocess.run([kvmill, "eval", command, *arguments, "--markdown"], check=True, capture_output=True,
                               text=True).stdout.strip()
        region = re.compile(rf"(<!-- table: {name} -->\n).*?(\n<!-- end -->)", re.DOTALL)
        if not region.search(text):
            sys.exit(f"{PAGE} has no table '{name}'")
        text = region.sub(lambda match, table=table: match.group(1) + table + match.group(2), text)
        with open(PAGE, "w", encoding="utf-8") as file:  # Now: the next one may take a while.
            file.write(text)
        print(f"table '{name}' is written", flush=True)


if __name__ == "__main__":
    main()
