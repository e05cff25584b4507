#!/usr/bin/env python3
"""Checks that no program needs CUDA to start (ctest `link`): neither the driver (libcuda) nor the runtime as a shared
library is among what the loader would look for. A build with CUDA then starts on machines without it.

Run from anywhere: check_link.py PROGRAM_OR_FOLDER ...   Files that are no dynamic programs are left out.
"""
import os
import re
import subprocess
import sys

FORBIDDEN = re.compile(r"^\s*(libcuda\S*\.so\S*|libnvidia\S*\.so\S*)", re.MULTILINE)


def forbidden(ldd_output):
    return sorted(set(FORBIDDEN.findall(ldd_output)))


def programs(paths):
    for path in paths:
        if not os.path.isdir(path):
            yield path
            continue
        for name in sorted(os.listdir(path)):
            file = os.path.join(path, name)
            if os.path.isfile(file) and os.access(file, os.X_OK):
                yield file


def self_test():
    clean = "\tlinux-vdso.so.1 (0x1)\n\tlibc.so.6 => /lib/libc.so.6 (0x2)\n"
    cases = [(clean, []), (clean + "\tlibcuda.so.1 => not found\n", ["libcuda.so.1"]),
             (clean + "\tlibcudart.so.13 => /usr/lib/libcudart.so.13 (0x3)\n", ["libcudart.so.13"])]
    for output, want in cases:
        if forbidden(output) != want:
            print(f"link self-test: {output!r}: found {forbidden(output)}, want {want}")
            return 1
    return 0


def main(arguments):
    if arguments == ["--self-test"]:
        return self_test()
    failed = checked = 0
    for program in programs(arguments):
        ldd = subprocess.run(["ldd", program], capture_output=True, text=True, check=False)
        if ldd.returncode != 0:
            if program in arguments:
                print(f"{program}: {ldd.stderr.strip() or ldd.stdout.strip()}")
                failed += 1
            continue
        checked += 1
        for library in forbidden(ldd.stdout):
            print(f"{program}: needs {library} to start")
            failed += 1
    print(f"link: {checked} programs, {failed} problems")
    return 1 if failed or checked == 0 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
