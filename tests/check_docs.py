#!/usr/bin/env python3
"""Checks that the documents say what the tree has (ctest `docs`).

Fails on: a link to a file that is not there, or to a heading that is not; a listing marked `<!-- from FILE -->` that FILE
does not contain; a metric family of service/metrics.cc that docs/contracts.md lacks, or the other way round, or with
another type; a flag of kvmilld that docs/contracts.md lacks, or the other way round, or with another default; a
docs/configuration.md that is not what `kvmilld --print-options` says.
`--self-test` plants one of each and checks that it is found (ctest `docs_self_test`).

Run from anywhere: check_docs.py [--kvmilld PROGRAM] [ROOT]; without --kvmilld flags are not compared.
"""
import os
import re
import subprocess
import sys
import tempfile

IGNORED_FOLDERS = {"build", "__pycache__", ".git", ".cache"}
CONTRACTS = "docs/contracts.md"
METRICS = "service/metrics.cc"
OPTIONS = "docs/configuration.md"
FAMILY = re.compile(r'^\s*\{"([a-z_]+)",\s*MetricType::(\w+),', re.MULTILINE)
NOT_IN_THE_FILE = {"config", "check-config", "print-config", "print-metrics", "print-options", "help", "version"}


def read(root, path):
    with open(os.path.join(root, path), encoding="utf-8") as file:
        return file.read()


def documents(root):
    for folder, names, files in os.walk(root):
        names[:] = sorted(n for n in names if n not in IGNORED_FOLDERS)
        for name in sorted(files):
            if name.endswith(".md"):
                yield os.path.normpath(os.path.join(os.path.relpath(folder, root), name))


def section(text, title):
    """The lines below a heading up to the next heading of any level."""
    match = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#+ |\Z)", text, re.MULTILINE | re.DOTALL)
    return match.group(1) if match else ""


def table_rows(text):
    """Cells of every table row but headings and rules; an escaped | stays inside its cell."""
    lines = text.splitlines()
    for line, following in zip(lines, lines[1:] + [""]):
        if line.startswith("|") and not line.startswith("|---") and not following.startswith("|---"):
            yield [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def names_in(cell):
    return re.findall(r"`([^`]+)`", cell)


def documented_flags(text):
    """Flag without dashes -> default as the table has it."""
    return {name.split()[0].lstrip("-"): cells[1].strip("`") for cells in table_rows(section(text, "Flags"))
            for name in names_in(cells[0])[:1]}


def documented_families(text, title):
    return {names_in(cells[0])[0]: (cells[1], names_in(cells[2])) for cells in table_rows(section(text, title))}


def anchor_of(heading):
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def check_links(root, path, text):
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", prose):
        if re.match(r"[a-z]+:", target):
            continue  # Another site; nothing here asks the network.
        file, _, anchor = target.partition("#")
        other = os.path.normpath(os.path.join(os.path.dirname(path), file)) if file else path
        if not os.path.exists(os.path.join(root, other)):
            yield f"{path}: links to {target}, which is not there"
        elif anchor and anchor not in map(anchor_of, re.findall(r"^#+ (.*)$", read(root, other), re.MULTILINE)):
            yield f"{path}: links to {target}, a heading that is not there"


def check_listings(root, path, text):
    for source, listing in re.findall(r"^<!-- from (\S+) -->\n+```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if not os.path.exists(os.path.join(root, source)):
            yield f"{path}: shows {source}, which is not there"
        elif listing not in read(root, source):
            yield f"{path}: the listing is not in {source}; copy it again"


def check_families(root):
    text = read(root, CONTRACTS)
    code = {name: kind.lower() for name, kind in FAMILY.findall(read(root, METRICS))}
    here = documented_families(text, "Metrics")
    later = documented_families(text, "Metrics that this version does not have")
    if not code:
        yield f"{METRICS}: no metric family was found: has its table another form?"
    for name in sorted(code.keys() - here.keys()):
        yield f"{CONTRACTS}: lacks the metric {name} of {METRICS}"
    for name in sorted(here.keys() - code.keys()):
        yield f"{CONTRACTS}: the metric {name} is not in {METRICS}"
    for name in sorted(code.keys() & here.keys()):
        if code[name] != here[name][0]:
            yield f"{CONTRACTS}: the metric {name} is a {code[name]}, not a {here[name][0]}"
    for name in sorted(code.keys() & later.keys()):
        yield f"{CONTRACTS}: the metric {name} is among those that this version does not have"


def check_flags(root, help_text, printed):
    flags = set(re.findall(r"^ +(?:-\w,)?--([a-z-]+)", help_text, re.MULTILINE))
    defaults = {key.replace("_", "-"): value for key, value in re.findall(r'^(\w+): "(.*)"$', printed, re.MULTILINE)}
    table = documented_flags(read(root, CONTRACTS))
    if not flags or flags - NOT_IN_THE_FILE != defaults.keys():
        yield f"kvmilld: --help and --print-config differ in {sorted((flags - NOT_IN_THE_FILE) ^ defaults.keys())}"
    for name in sorted(flags - table.keys()):
        yield f"{CONTRACTS}: lacks the flag --{name}"
    for name in sorted(table.keys() - flags):
        yield f"{CONTRACTS}: kvmilld has no flag --{name}"
    for name in sorted(flags & table.keys()):
        want = defaults.get(name)
        if want is not None and (want or "none") != table[name]:
            yield f"{CONTRACTS}: the default of --{name} is {want or 'none'}, not {table[name]}"


def check_reference(root, printed):
    if read(root, OPTIONS) != printed:
        yield f"{OPTIONS} is not what the code says: kvmilld --print-options > {OPTIONS}"


def check_tree(root, program_says=None):
    """(problems, documents read); `program_says` is what kvmilld prints for --help, --print-config and --print-options."""
    problems, count = [], 0
    for path in documents(root):
        count += 1
        text = read(root, path)
        problems += check_links(root, path, text)
        problems += check_listings(root, path, text)
    problems += check_families(root)
    if program_says:
        problems += check_flags(root, *program_says[:2])
        problems += check_reference(root, program_says[2])
    return problems, count


def ask(program):
    environment = {name: value for name, value in os.environ.items() if name != "XDG_RUNTIME_DIR"}
    return tuple(subprocess.run([program, flag], env=environment, capture_output=True, text=True, check=True).stdout
                 for flag in ("--help", "--print-config", "--print-options"))


def self_test():
    good = {
        "README.md": "# A\nSee [b](docs/b.md), [c](docs/b.md#a-word-more) and [d](https://example.com).\n",
        "docs/b.md": "## A word: more\n<!-- from tests/a.cc -->\n```cpp\nint a;\n```\n```\n[x](y)\n```\n",
        OPTIONS: "# C\n",
        "tests/a.cc": "// A.\nint a;\nint b;\n",
        METRICS: 'const Family kFamilies[] = {\n    {"up", MetricType::Gauge, "Up."},\n    {"n_total", MetricType::Counter,\n',
        CONTRACTS: "### Flags\n| flag | default | meaning |\n|---|---|---|\n| `--size SIZE` | `4GiB` | s |\n"
                   "| `--at a\\|b` | none | a |\n| `--help`, `-h` | | |\n## Metrics\n| family | type | labels | meaning |\n"
                   "|---|---|---|---|\n| `up` | gauge | | u |\n| `n_total` | counter | `tier` | n |\n"
                   "### Metrics that this version does not have\n| family | type | labels |\n|---|---|---|\n| `later` | gauge | |\n",
    }
    help_text = "Options:\n  --size SIZE   How much\n  --at a|b      Where\n  -h,--help     This\n"
    printed = 'size: "4GiB"\nat: ""\n'

    def changed(path, before, after):
        assert before in good[path], before
        return {path: good[path].replace(before, after)}

    planted = {
        "link": changed("README.md", "docs/b.md)", "docs/none.md)"),
        "anchor": changed("README.md", "#a-word-more", "#another"),
        "listing": changed("tests/a.cc", "int a;", "int c;"),
        "source of a listing": changed("docs/b.md", "tests/a.cc", "tests/b.cc"),
        "new metric": changed(METRICS, "up", "down"),
        "metric of no code": changed(CONTRACTS, "`n_total`", "`n_total` | counter | | n |\n| `m_total`"),
        "type of a metric": changed(METRICS, "Gauge", "Histogram"),
        "metric said to be missing": changed(CONTRACTS, "`later`", "`up`"),
        "no metrics": {METRICS: ""},
        "flag of no program": changed(CONTRACTS, "| `--help`", "| `--more` | none | |\n| `--help`"),
        "default": changed(CONTRACTS, "4GiB", "8GiB"),
    }
    options = good[OPTIONS]
    said = {"new flag": (help_text + "  --new N  New\n", printed + 'new: "1"\n', options),
            "new switch": (help_text + "  --new    New\n", printed, options),
            "other default": (help_text, printed.replace("4GiB", "1GiB"), options),
            "old options": (help_text, printed, options + "more\n")}
    failures = 0
    for name in ["nothing", *planted, *said]:
        with tempfile.TemporaryDirectory() as root:
            for path, text in {**good, **planted.get(name, {})}.items():
                os.makedirs(os.path.dirname(os.path.join(root, path)) or root, exist_ok=True)
                with open(os.path.join(root, path), "w", encoding="utf-8") as file:
                    file.write(text)
            problems, _ = check_tree(root, said.get(name, (help_text, printed, options)))
            if bool(problems) != (name != "nothing"):
                failures += 1
                print(f"planted {name}: {problems or 'not found'}")
    print(f"docs self-test: {len(planted) + len(said)} planted faults, {failures} wrong")
    return 1 if failures else 0


def main():
    arguments = sys.argv[1:]
    if "--self-test" in arguments:
        return self_test()
    program_says = None
    if "--kvmilld" in arguments:
        at = arguments.index("--kvmilld")
        program_says = ask(arguments[at + 1])
        del arguments[at:at + 2]
    root = arguments[0] if arguments else os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    problems, count = check_tree(root, program_says)
    for problem in problems:
        print(problem)
    print(f"docs: {count} documents, {len(problems)} problems")
    return 1 if problems or count == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
