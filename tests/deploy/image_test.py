"""The Dockerfile, as far as it can be checked without docker (ctest `image_test`).

What it copies is there and not ignored; the packages of the final image are those of which the programs want libraries;
user, folders and version are those of the chart.

image_test.py --bin FOLDER --lib FOLDER --python FOLDER [unittest arguments]
"""
import argparse
import fnmatch
import glob
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

import yaml

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
OPTIONS = None
BASE_PACKAGES = {"libc6", "libgcc-s1", "libstdc++6"}  # Of debian:12-slim: apt itself needs them.
# Not linked, but opened by name: libibverbs finds its drivers so, and UCX the transports of RDMA.
LOADED_PACKAGES = {"ibverbs-providers"}
LOADED_LIBRARIES = "/usr/lib/x86_64-linux-gnu/ucx/*.so"


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        return file.read()


def instructions(text):
    """(name, words) of every instruction, by stage."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    stages, words = [[]], []
    for line in lines:
        more = line.endswith("\\")
        words += line.rstrip("\\").split()
        if not more:
            if words[0] == "FROM":
                stages.append([])
            stages[-1].append((words[0], words[1:]))
            words = []
    return stages[1:]


def packages(path, without_tests=False):
    text = read(path)
    if without_tests:
        text = text.split("\n# Tests")[0]
    return set(filter(None, (line.split("#")[0].strip() for line in text.splitlines())))


def is_ignored(path, patterns):
    """By the rules of .dockerignore: the last pattern that matches the path or a folder above it decides."""
    parts = path.split("/")
    above = ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]
    ignored = False
    for pattern in patterns:
        wanted = pattern.startswith("!")
        name = pattern.lstrip("!")
        if name.startswith("**/"):
            matches = any(fnmatch.fnmatchcase(part, name[3:]) for part in parts)
        else:
            matches = any(fnmatch.fnmatchcase(p, name) and p.count("/") == name.count("/") for p in above)
        if matches:
            ignored = not wanted
    return ignored


def problems_of_copies(text, ignore, root=ROOT):
    patterns = [line for line in ignore.splitlines() if line and not line.startswith("#")]
    for stage in instructions(text):
        for name, words in stage:
            if name == "ADD":
                yield "ADD: want COPY"
            if name != "COPY" or words[0].startswith("--from"):
                continue
            for source in words[:-1]:
                path = source.rstrip("/")
                if not os.path.exists(os.path.join(root, path)):
                    yield f"{source} is not there"
                elif os.path.isdir(os.path.join(root, path)) != source.endswith("/"):
                    yield f"{source}: folders end in / here, files do not"
                elif is_ignored(path, patterns):
                    yield f"{source} is ignored"


def libraries_of(program):
    """Paths of the libraries that a program or library needs, directly or not."""
    said = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    missing = re.findall(r"^\s*(\S+) => not found", said, re.MULTILINE)
    assert not missing, f"{program}: {missing} not found"
    return {os.path.realpath(path) for path in re.findall(r"=> (/\S+)", said)}


def packages_of(libraries):
    """Names of the packages that have these files; dpkg may know them without /usr."""
    asked = sorted(libraries | {path.removeprefix("/usr") for path in libraries})
    said = subprocess.run(["dpkg", "-S", *asked], capture_output=True, text=True, check=False).stdout
    found = {path: package for package, path in re.findall(r"^([^:\s]+)(?::\w+)?: (/\S+)$", said, re.MULTILINE)}
    return {found.get(path) or found.get(path.removeprefix("/usr")) or f"none has {path}" for path in libraries}


def programs():
    """What the image has of ours."""
    made = [os.path.join(OPTIONS.bin, "kvmilld"), os.path.join(OPTIONS.bin, "kvmill")]
    made += glob.glob(os.path.join(OPTIONS.lib, "*.so")) + glob.glob(os.path.join(OPTIONS.python, "kvmill/*.so"))
    return made


class ImageTest(unittest.TestCase):
    def setUp(self):
        self.text = read("deploy/Dockerfile")
        self.stages = instructions(self.text)

    def test_what_is_copied_is_there(self):
        self.assertEqual(list(problems_of_copies(self.text, read(".dockerignore"))), [])

    def test_copies_that_would_fail_are_found(self):
        ignore = read(".dockerignore")
        for line, message in (("COPY nothing/ x/", "nothing/ is not there"), ("COPY docs/ docs/", "docs/ is ignored"),
                              ("COPY deploy/quickstart.sh x", "deploy/quickstart.sh is ignored"),
                              ("COPY cmake x/", "folders end in /"), ("ADD cmake/ x/", "want COPY")):
            self.assertIn(message, "".join(problems_of_copies(f"FROM a\n{line}\n", ignore)))
        self.assertTrue(is_ignored("client/python/__pycache__", ignore.splitlines()))

    def test_every_folder_of_the_build_is_copied(self):
        copied = {word.rstrip("/") for name, words in self.stages[0] if name == "COPY" for word in words[:-1]}
        folders = re.findall(r"^add_subdirectory\((\w+)\)", read("CMakeLists.txt"), re.MULTILINE)
        self.assertGreaterEqual(len(folders), 5)
        self.assertLessEqual({"cmake", "CMakeLists.txt", "CMakePresets.json", *folders}, copied)

    def test_the_build_has_what_the_image_takes_from_it(self):
        places = {"/src/build/release/bin": OPTIONS.bin, "/src/build/release/lib": OPTIONS.lib,
                  "/src/build/release/python": OPTIONS.python}
        taken = [word for name, words in self.stages[1] if name == "COPY" and words[0] == "--from=build" for word in words[1:-1]]
        self.assertEqual(len(taken), 4)
        for path in taken:
            (place,) = [p for p in places if path.startswith(p)]
            self.assertTrue(os.path.exists(places[place] + path.removeprefix(place)), path)
        self.assertTrue(os.path.exists(os.path.join(OPTIONS.lib, "libkvmill.so")))
        self.assertTrue(glob.glob(os.path.join(OPTIONS.python, "kvmill/_native.*.so")))

    def test_the_programs_find_what_they_come_with(self):
        """The folders of the image as the Dockerfile makes them; files are links."""
        with tempfile.TemporaryDirectory() as image:
            for name, words in self.stages[1]:
                target = words[-1] if name == "COPY" else ""
                if not target.startswith(("/opt/kvmill/bin/", "/opt/kvmill/share/")):
                    continue
                os.makedirs(image + target)
                for source in words[:-1]:
                    if source == "/src/build/release/bin/kvmill":
                        shutil.copy(os.path.join(OPTIONS.bin, "kvmill"), image + target)
                    elif not source.startswith(("--from", "/src")):
                        os.rmdir(image + target)
                        os.symlink(os.path.join(ROOT, source), (image + target).rstrip("/"))
            said = subprocess.run([image + "/opt/kvmill/bin/kvmill", "eval", "error", "--json", "--methods", "kvarn", "--formats",
                                   "k4v2_g128"], capture_output=True, text=True, check=False, cwd="/", timeout=300)
        self.assertEqual((said.returncode, said.stderr), (0, ""))
        self.assertTrue(json.loads(said.stdout))

    def test_packages_are_those_of_the_libraries(self):
        listed = packages("deploy/runtime_packages.txt")
        modules = glob.glob(LOADED_LIBRARIES)
        self.assertTrue(modules)
        ours = {os.path.realpath(path) for path in programs()}
        libraries = set().union(*map(libraries_of, programs() + modules)) - ours
        needed = packages_of(libraries)
        self.assertEqual(listed, (needed - BASE_PACKAGES) | LOADED_PACKAGES)
        for package in LOADED_PACKAGES:
            self.assertEqual(subprocess.run(["dpkg", "-s", package], capture_output=True, check=False).returncode, 0, package)

    def test_packages_of_the_build(self):
        build = packages("deploy/packages.txt", without_tests=True)
        self.assertLess(build, packages("deploy/packages.txt"))
        for package, wanted in (("g++", True), ("libgrpc++-dev", True), ("libgtest-dev", False), ("golang-go", False)):
            self.assertEqual(package in build, wanted, package)
        said = subprocess.run([os.path.join(ROOT, "deploy/install_packages.sh"), "--without-tests"], capture_output=True,
                              text=True, check=False, stdin=subprocess.DEVNULL)
        self.assertEqual(said.returncode, 0, said.stderr)
        self.assertIn(f"all {len(build)} packages are installed", said.stdout)
        for bad in (["--list", "/nonexistent"], ["--lists"]):
            said = subprocess.run([os.path.join(ROOT, "deploy/install_packages.sh"), *bad], capture_output=True, text=True,
                                  check=False)
            self.assertEqual(said.returncode, 2)
            self.assertIn(bad[-1], said.stderr)

    def test_user_and_version_are_the_charts(self):
        values = yaml.safe_load(read("deploy/helm/kvmill/values.yaml"))
        final = dict(self.stages[1])
        self.assertEqual(final["USER"], [f"{values['user']['uid']}:{values['user']['gid']}"])
        self.assertIn(f"--uid {values['user']['uid']} --gid {values['user']['gid']}", self.text)
        self.assertEqual(final["ENTRYPOINT"], ['["kvmilld"]'])
        self.assertEqual(final["FROM"], ["debian:12-slim"])
        version = re.search(r"project\(kvmill VERSION (\S+)", read("CMakeLists.txt"))[1]
        self.assertEqual(yaml.safe_load(read("deploy/helm/kvmill/Chart.yaml"))["appVersion"], version)
        for path in ("deploy/Dockerfile", "deploy/kubernetes/check.yaml"):
            for tag in re.findall(r"kvmill(?:-cuda)?:([\w.]+)", read(path)):
                self.assertEqual(tag, version, path)


def main():
    global OPTIONS
    parser = argparse.ArgumentParser()
    for name in ("--bin", "--lib", "--python"):
        parser.add_argument(name, required=True)
    OPTIONS, rest = parser.parse_known_args()
    unittest.main(argv=sys.argv[:1] + rest)


if __name__ == "__main__":
    main()
