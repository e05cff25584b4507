#!/usr/bin/env python3
"""Lints of the whole repository (ctest `style`): what a reviewer should not have to say.

Fails on: clang-format differences, shellcheck findings, wrong header guards, notes to be done later, paths of
somebody's machine, tabs, spaces at line ends, missing final newlines. Warns about sources past 500 lines.
`--self-test` plants one of each and checks that it is found (ctest `style_self_test`).

Run from anywhere: check_style.py [ROOT]
"""
import os
import re
import shutil
import subprocess
import sys
import tempfile

SOURCE_SUFFIXES = (".h", ".c", ".cc", ".cu", ".cuh")
TEXT_SUFFIXES = SOURCE_SUFFIXES + (
    ".py", ".sh", ".md", ".txt", ".cmake", ".proto", ".json", ".yaml", ".yml", ".in", ".html", ".supp", ".svg", ".tpl")
IGNORED_FOLDERS = {"build", "__pycache__", ".git", ".cache", "data"}
LINES_MAX = 500
CLANG_FORMAT = "clang-format-14"

# Written so that this file does not match itself.
LATER = re.compile(r"\b(" + "TO" + "DO|FIX" + "ME|XX" + r"X|HA" + r"CK)\b")
MACHINE_PATHS = re.compile(r"(?<![\w.$}])/(?:work|home|Users|root)/[\w.]")


def all_files(root):
    for folder, names, files in os.walk(root):
        names[:] = sorted(n for n in names if n not in IGNORED_FOLDERS)
        for name in sorted(files):
            path = os.path.normpath(os.path.join(os.path.relpath(folder, root), name))
            if not os.path.islink(os.path.join(root, path)):
                yield path


def is_script(root, path):
    if path.endswith(".sh"):
        return True
    if os.path.splitext(path)[1]:
        return False
    with open(os.path.join(root, path), "rb") as file:
        return re.match(rb"#!.*\b(ba)?sh\b", file.readline()) is not None


def is_text(root, path):
    return path.endswith(TEXT_SUFFIXES) or os.path.basename(path) in ("CMakeLists.txt", "Dockerfile") or is_script(root, path)


def guard_of(path):
    return "KVMILL_" + re.sub(r"\W", "_", path).upper() + "_"


def check_text(path, text):
    """Findings of one file as (line, sentence)."""
    found = []
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if LATER.search(line):
            found.append((number, "a note for later: finish it, or write an issue"))
        if MACHINE_PATHS.search(line):
            found.append((number, "a path of somebody's machine"))
        if "\t" in line:
            found.append((number, "a tab"))
        if line.endswith((" ", "\r")) and not path.endswith(".md"):
            found.append((number, "white space at the end of the line"))
    if text and not text.endswith("\n"):
        found.append((len(lines), "no newline at the end of the file"))
    if path.endswith(".h") and not path.endswith("-inl.h"):
        guard = guard_of(path)
        if f"#ifndef {guard}\n#define {guard}\n" not in text or f"#endif  // {guard}" not in text:
            found.append((1, f"the include guard must be {guard}"))
    return found


def run_tool(root, command, paths):
    """Output lines of a tool that finds something; empty when it finds nothing."""
    result = subprocess.run(command + paths, cwd=root, capture_output=True, text=True, check=False)
    return (result.stdout + result.stderr).splitlines() if result.returncode else []


def check_tree(root):
    """(problems, warnings, files read)"""
    problems, warnings, sources, scripts = [], [], [], []
    count = 0
    for path in all_files(root):
        if not is_text(root, path):
            continue
        count += 1
        with open(os.path.join(root, path), encoding="utf-8") as file:
            text = file.read()
        problems += [f"{path}:{line}: {what}" for line, what in check_text(path, text)]
        if path.endswith(SOURCE_SUFFIXES):
            sources.append(path)
            lines = text.count("\n")
            if lines > LINES_MAX:
                warnings.append(f"{path}: {lines} lines ask to be split by concept (past {LINES_MAX})")
        if is_script(root, path):
            scripts.append(path)
    if not shutil.which(CLANG_FORMAT):
        warnings.append(f"{CLANG_FORMAT} is not installed: formatting was not checked")
    elif sources:
        problems += [line for line in run_tool(root, [CLANG_FORMAT, "--dry-run", "-Werror"], sources) if "error:" in line]
    if not shutil.which("shellcheck"):
        warnings.append("shellcheck is not installed: scripts were not checked")
    elif scripts:
        problems += run_tool(root, ["shellcheck", "-f", "gcc"], scripts)
    return problems, warnings, count


def self_test():
    guard = "#ifndef KVMILL_CLIENT_A_H_\n#define KVMILL_CLIENT_A_H_\n\n#endif  // KVMILL_CLIENT_A_H_\n"
    good = {"client/a.h": guard, "client/a.cc": "int main() { return 0; }\n", "docs/a.md": "see docs/formats.md\n",
            "deploy/a.sh": "#!/bin/sh\necho \"$HOME/work/x\"\n"}
    planted = {
        "note": ("client/a.cc", "// TO" + "DO: more\nint main() { return 0; }\n"),
        "machine path": ("docs/a.md", "look into /wo" + "rk/x\n"),
        "home path": ("client/a.cc", "// See /ho" + "me/me/x\nint main() { return 0; }\n"),
        "tab": ("docs/a.md", "a\tb\n"),
        "white space": ("deploy/a.sh", "#!/bin/sh\necho 1 \n"),
        "newline": ("docs/a.md", "a"),
        "guard": ("client/a.h", guard.replace("CLIENT", "STORAGE")),
        "format": ("client/a.cc", "int  main( ) {return 0;}\n"),
        "shellcheck": ("deploy/a.sh", "#!/bin/sh\ncd $1\nrm -r *\n"),
    }
    if not shutil.which(CLANG_FORMAT):
        del planted["format"]
    if not shutil.which("shellcheck"):
        del planted["shellcheck"]
    style = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), ".clang-format")
    failures = 0
    for name, (path, text) in {**planted, "nothing": ("docs/b.md", "fine\n")}.items():
        with tempfile.TemporaryDirectory() as root:
            shutil.copy(style, root)
            for file_path, file_text in {**good, path: text}.items():
                os.makedirs(os.path.dirname(os.path.join(root, file_path)), exist_ok=True)
                with open(os.path.join(root, file_path), "w", encoding="utf-8") as file:
                    file.write(file_text)
            problems, _, _ = check_tree(root)
            if bool(problems) != (name in planted):
                failures += 1
                print(f"planted {name}: {problems or 'not found'}")
    print(f"style self-test: {len(planted)} planted faults, {failures} wrong")
    return 1 if failures else 0


def main():
    if "--self-test" in sys.argv[1:]:
        return self_test()
    root = sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    problems, warnings, count = check_tree(root)
    for warning in warnings:
        print(f"warning: {warning}")
    for problem in problems:
        print(problem)
    print(f"style: {count} files, {len(problems)} problems, {len(warnings)} warnings")
    return 1 if problems or count == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
