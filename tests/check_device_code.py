#!/usr/bin/env python3
"""Checks that CUDA kernels use nothing of CUDA but kernels/cuda/device.h and launch.h (ctest `device_code`).

What goes around those two headers cannot run under the harness of tests/cuda_harness and so would go untested.
Refused in every other source and header of kernels/cuda: names that begin with two underscores (raw intrinsics,
`__global__`, `__activemask`), inline assembly, the built-in indices, launches by `<<<`, cooperative groups, CUDA's own
headers, CUDA's atomics and runtime calls, preprocessor tests for the device, and `memcpy`, `memset` and `memmove`, whose
accesses the harness does not see. `--self-test` plants one of each (ctest `device_code_self_test`).

Run from anywhere: check_device_code.py [ROOT]
"""
import os
import re
import sys

import lint

FOLDER = "kernels/cuda"
FREE = {"device.h", "launch.h"}  # They wrap what the others may not use.
SUFFIXES = (".cu", ".cuh", ".h")
REFUSED = (
    (re.compile(r"\b__(?!builtin_)\w+"), "a raw intrinsic or attribute"),
    (re.compile(r"\basm\b"), "inline assembly"),
    (re.compile(r"\b(?:threadIdx|blockIdx|blockDim|gridDim|warpSize)\b"), "a built-in index"),
    (re.compile(r"<<<"), "a launch that is not Launch()"),
    (re.compile(r"\bcooperative_groups\b"), "cooperative groups"),
    (re.compile(r"#\s*include\s*[<\"](?:cuda|mma\.h|cooperative|nv)"), "a header of CUDA"),
    (re.compile(r"\batomic(?:Add|Sub|Exch|Min|Max|Inc|Dec|CAS|And|Or|Xor)\b"), "a raw atomic"),
    (re.compile(r"\bcuda[A-Z]\w*"), "a call of the CUDA runtime"),
    (re.compile(r"\bmem(?:cpy|set|move)\b"), "an access that the harness does not see"),
)


def without_comments(text):
    """The text with comments blanked, line by line."""
    blank = lambda match: re.sub(r"[^\n]", " ", match.group(0))
    return re.sub(r"//[^\n]*|/\*.*?\*/", blank, text, flags=re.S)


def check_tree(root):
    """(problems, files read)"""
    problems, count = [], 0
    folder = os.path.join(root, FOLDER)
    for name in sorted(os.listdir(folder) if os.path.isdir(folder) else []):
        if not name.endswith(SUFFIXES) or name in FREE:
            continue
        count += 1
        with open(os.path.join(folder, name), encoding="utf-8") as file:
            lines = without_comments(file.read()).split("\n")
        for number, line in enumerate(lines, 1):
            problems += [f"{FOLDER}/{name}:{number}: {match.group(0)}: {what}"
                         for pattern, what in REFUSED for match in pattern.finditer(line)]
    return problems, count


def self_test():
    good = ('#include "kernels/cuda/device.h"\n// Not __syncthreads: asm is banned.\nKVMILL_KERNEL(32, 1) K(float* p) {\n'
            "  SyncThreads();\n  p[ThreadIndex()] = Fma(1, 2, 3);\n}\n")
    planted = [
        "float x = __expf(y);", "unsigned m = __activemask();", "__shared__ float x[32];", "__global__ void K();",
        'asm volatile("bar.sync 0;");', "int i = threadIdx.x;", "K<<<1, 32>>>(p);",
        "namespace cg = cooperative_groups;", "#include <cuda_fp16.h>", "#include <mma.h>", "#include <cooperative_groups.h>",
        "atomicAdd(p, 1);", "cudaDeviceSynchronize();", "memcpy(a, b, 4);", "std::memset(a, 0, 4);", "#ifdef __CUDA_ARCH__",
    ]
    failures = 0
    for text, want in [(good, False)] + [(good + line + "\n", True) for line in planted]:
        with lint.planted_tree({f"{FOLDER}/a.cu": text, f"{FOLDER}/device.h": "__device__ int x;\n"}) as root:
            problems, _ = check_tree(root)
            if bool(problems) != want:
                failures += 1
                print(f"{text.splitlines()[-1]}: {problems or 'not found'}")
    print(f"device_code self-test: {len(planted)} planted violations, {failures} wrong")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(lint.main("device_code", check_tree, self_test))
