#!/usr/bin/env python3
"""Checks that includes point down only (ctest `layers`).

The table below says, for each folder, which folders of this project and which external libraries its files may
include. The longest matching folder decides. `--self-test` plants violations in a temporary tree and checks that
each one is found (ctest `layers_self_test`).

Run from anywhere: check_layers.py [ROOT]
"""
import os
import re
import sys

import lint

SOURCE_SUFFIXES = (".h", ".c", ".cc", ".cu", ".cuh")
ROOT_FOLDERS = {"deploy", "service", "client", "storage", "kernels", "proto", "tests", "docs", "cmake"}
IGNORED_FOLDERS = {"build", "__pycache__"}

# External libraries, by the beginning of the included path.
LIBRARIES = {
    "absl": ("absl/",),
    "hwy": ("hwy/",),
    "cuda": ("cuda", "cooperative_groups", "mma.h", "nvml.h", "nvtx3/"),
    "rocksdb": ("rocksdb/",),
    "grpc": ("grpc/", "grpcpp/", "grpc++/"),
    "protobuf": ("google/protobuf/", "google/rpc/"),
    "ucx": ("ucp/", "uct/", "ucs/", "ucm/"),
    "prometheus": ("prometheus/",),
    "http": ("httplib.h", "microhttpd.h"),
    "yaml": ("yaml-cpp/",),
    "cli11": ("CLI/",),
    "json": ("nlohmann/",),
    "zmq": ("zmq.h",),
    "msgpack": ("msgpack",),
    "spdlog": ("spdlog/", "fmt/"),
    "xxhash": ("xxhash.h", "xxh3.h"),
    "openssl": ("openssl/",),
    "ncurses": ("curses.h", "ncurses", "term.h"),
    "test": ("gtest/", "gmock/", "benchmark/"),
    "boost": ("boost/",),
    "isal": ("isa-l/", "isa-l.h"),
    "python": ("pybind11/", "Python.h"),
}

# Of absl, kernels use only what has no cost and no state.
KERNEL_ABSL = ("absl/status/", "absl/types/span.h", "absl/strings/", "absl/base/attributes.h")

# folder -> (project folders, external libraries). A folder may always include itself. absl is our vocabulary
# (Status, Span, Time) and allowed everywhere. The command line speaks to the daemon through client/client.h alone:
# no proto.
ANY = ("client", "kernels", "proto", "service", "storage", "tests")
LAYERS = {
    "kernels": ((), ("absl",)),
    "kernels/cpu": (("kernels",), ("absl", "hwy")),
    "kernels/cuda": (("kernels",), ("absl", "cuda")),
    "proto": ((), ("protobuf", "grpc")),
    "storage/core": (("kernels",), ("absl", "json", "openssl", "spdlog", "xxhash")),
    "storage/device": (("storage/core", "kernels"), ("absl", "cuda")),
    "storage": (("storage/core", "storage/device", "kernels"), ("absl", "rocksdb", "isal", "openssl")),
    "client/transport": (("storage/core", "storage/device", "kernels"), ("absl", "ucx", "openssl")),
    "client/tls": (("storage/core",), ("absl", "grpc", "openssl")),
    "client": (("proto", "storage/core", "kernels", "client/transport", "client/tls"), ("absl", "grpc", "protobuf")),
    "client/c_api": (("client", "storage/core", "storage/device", "kernels"), ("absl", "protobuf")),
    "client/python": (("client",), ("python",)),
    "client/cli": (("client", "storage", "kernels"), ("absl", "cli11", "json", "ncurses")),
    "client/eval": (("client", "storage", "kernels"), ("absl", "cli11", "json")),
    "service": (("service/cluster", "service/etcd", "client", "storage", "kernels", "proto"),
                ("absl", "grpc", "protobuf", "prometheus", "http", "yaml", "cli11", "json", "zmq", "msgpack")),
    # State machines without threads, locks or I/O: the simulator runs them (docs/decisions/0019).
    "service/cluster": (("storage/core", "kernels"), ("absl",)),
    "service/etcd": (("service/cluster", "client", "storage/core", "proto"), ("absl", "grpc", "protobuf")),
    "tests": (ANY, tuple(LIBRARIES)),
}

# Folders that implement a contract: from outside the layer only the contract's header, one level up, is included.
PRIVATE_FOLDERS = ("kernels/cpu", "kernels/cuda")

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')


def layer_of(path):
    """The row of LAYERS for a file, or None."""
    folder = os.path.dirname(path)
    while folder:
        if folder in LAYERS:
            return folder
        folder = os.path.dirname(folder)
    return None


def library_of(include):
    for library, prefixes in LIBRARIES.items():
        if include.startswith(prefixes):
            return library
    return None


def generated_from(include):
    """The .proto a generated header comes from: kvmill/v1/x.grpc.pb.h lies under proto/."""
    match = re.fullmatch(r"(?:proto/)?(.+?)(?:\.grpc)?\.pb\.h", include)
    return "proto/" + match.group(1) + ".proto" if match else None


def allowed_project(layer, target):
    allowed, _ = LAYERS[layer]
    target_layer = layer_of(target)
    if target_layer == layer or target_layer in allowed:
        return True
    # A row that names a folder means its subfolders too, but not the other way round: `storage` includes
    # storage/core because its row says so, storage/core never includes storage.
    return any(target_layer.startswith(folder + "/") and layer != folder for folder in allowed)


def check_include(path, include, quoted, exists):
    """One sentence saying what is wrong with this include, or None."""
    layer = layer_of(path)
    library = library_of(include)
    proto = generated_from(include) if library is None else None
    if library is not None:
        if library not in LAYERS[layer][1]:
            return f"{layer}/ may not use {library}; it may use: {', '.join(LAYERS[layer][1])}"
        if library == "absl" and layer.startswith("kernels") and not include.startswith(KERNEL_ABSL):
            return f"kernels/ uses of absl only {', '.join(KERNEL_ABSL)}"
        return None
    if proto is not None:
        if not exists(proto):
            return f"there is no {proto}"
        if layer != "proto" and layer != "tests" and "proto" not in LAYERS[layer][0]:
            return f"{layer}/ may not see the wire format"
        return None
    if not quoted:
        return None  # The C and C++ libraries and the operating system.
    if not exists(include):
        return "not a file of this project (paths start at the repository root) and not a library of the table"
    if layer_of(include) is None:
        return f"{include} lies in no layer"
    if not allowed_project(layer, include):
        allowed = ", ".join((layer,) + LAYERS[layer][0])
        return f"{layer}/ may include {allowed}"
    for private in PRIVATE_FOLDERS:
        parent = os.path.dirname(private)
        inside = path.startswith((private + "/", "tests/")) or os.path.dirname(path) == parent
        if include.startswith(private + "/") and not inside:
            return f"{private}/ is an implementation; include the contract in {parent}/"
    return None


def source_files(root):
    for folder, names, files in os.walk(root):
        relative = os.path.relpath(folder, root)
        if relative == ".":
            names[:] = [n for n in names if n not in IGNORED_FOLDERS and not n.startswith(".")]
        names[:] = sorted(n for n in names if n not in IGNORED_FOLDERS)
        for name in sorted(files):
            if name.endswith(SOURCE_SUFFIXES):
                yield os.path.normpath(os.path.join(relative, name))


def check_tree(root):
    """All violations, as lines "file:line: include: reason"; and the number of files read."""
    problems = []
    count = 0
    for name in sorted(os.listdir(root)):
        if os.path.isdir(os.path.join(root, name)) and not name.startswith("."):
            if name not in ROOT_FOLDERS and name not in IGNORED_FOLDERS:
                problems.append(f"{name}/: a top-level folder that the design does not have")

    def exists(path):
        return os.path.isfile(os.path.join(root, path))

    for path in source_files(root):
        count += 1
        if layer_of(path) is None:
            problems.append(f"{path}: this source file lies in no layer of the table")
            continue
        with open(os.path.join(root, path), encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                match = INCLUDE.match(line)
                if not match:
                    continue
                reason = check_include(path, match.group(2), match.group(1) == '"', exists)
                if reason:
                    problems.append(f"{path}:{number}: {match.group(2)}: {reason}")
    return problems, count


def self_test():
    """Each planted include must be refused, each good one accepted."""
    files = {
        "kernels/encode.h": "", "kernels/cpu/encode-inl.h": "", "kernels/cuda/device.h": "",
        "storage/core/clock.h": "", "storage/device/device.h": "", "storage/tiered_store.h": "",
        "storage/eviction/policy.h": "", "client/client.h": "", "client/transport/wire.h": "",
        "client/cli/npy.h": "", "client/c_api/queue.h": "", "client/kvmill.h": "",
        "service/node.h": "", "service/cluster/loop.h": "", "proto/kvmill/v1/cache.proto": "", "tests/support/fake.h": "",
    }
    refused = [
        ("kernels/a.cc", '"storage/core/clock.h"'),
        ("kernels/a.cc", '"hwy/highway.h"'),
        ("kernels/a.cc", '"absl/synchronization/mutex.h"'),
        ("kernels/cpu/a.cc", "<cuda_runtime.h>"),
        ("kernels/cuda/a.cu", '"kernels/cpu/encode-inl.h"'),
        ("storage/core/a.cc", '"storage/tiered_store.h"'),
        ("storage/core/a.cc", '"storage/device/device.h"'),
        ("storage/core/a.cc", '"rocksdb/db.h"'),
        ("storage/core/a.cc", '"kernels/cpu/encode-inl.h"'),
        ("storage/device/a.cc", '"storage/eviction/policy.h"'),
        ("storage/device/a.cc", "<openssl/sha.h>"),
        ("storage/a.cc", '"client/client.h"'),
        ("storage/a.cc", "<spdlog/spdlog.h>"),
        ("storage/a.cc", '"kernels/cpu/encode-inl.h"'),
        ("storage/disk/a.cc", "<xxhash.h>"),
        ("storage/a.cc", '"kvmill/v1/cache.pb.h"'),
        ("client/transport/a.cc", '"client/client.h"'),
        ("client/transport/a.cc", '"storage/tiered_store.h"'),
        ("client/transport/a.cc", '"grpcpp/grpcpp.h"'),
        ("client/a.cc", '"storage/tiered_store.h"'),
        ("client/a.cc", '"client/cli/npy.h"'),
        ("client/a.cc", '"client/c_api/queue.h"'),
        ("client/c_api/a.cc", '"kvmill/v1/cache.pb.h"'),
        ("client/c_api/a.cc", "<pybind11/pybind11.h>"),
        ("client/python/a.cc", '"absl/status/status.h"'),
        ("client/a.cc", '"nlohmann/json.hpp"'),
        ("client/a.cc", "<ucp/api/ucp.h>"),
        ("client/cli/a.cc", '"service/node.h"'),
        ("client/cli/a.cc", '"google/protobuf/message.h"'),
        ("client/cli/a.cc", '"kvmill/v1/cache.grpc.pb.h"'),
        ("client/cli/a.cc", "<prometheus/registry.h>"),
        ("storage/a.cc", "<CLI/CLI.hpp>"),
        ("client/a.cc", "<nlohmann/json.hpp>"),
        ("client/a.cc", "<curses.h>"),
        ("service/a.cc", "<curses.h>"),
        ("service/a.cc", '"rocksdb/db.h"'),
        ("service/a.cc", '"tests/support/fake.h"'),
        ("service/a.cc", "<ucp/api/ucp.h>"),
        ("service/a.cc", '"node.h"'),
        ("service/a.cc", '"service/missing.h"'),
        ("service/a.cc", '"kvmill/v1/missing.pb.h"'),
        ("service/cluster/a.cc", '"grpcpp/grpcpp.h"'),
        ("service/cluster/a.cc", '"service/node.h"'),
        ("service/cluster/a.cc", '"storage/tiered_store.h"'),
        ("service/cluster/a.cc", '"kvmill/v1/cache.pb.h"'),
        ("service/etcd/a.cc", '"service/node.h"'),
        ("storage/a.cc", '"service/cluster/loop.h"'),
        ("tests/a_test.cc", '"../service/node.h"'),
        ("tools/a.cc", "<vector>"),
        ("main.cc", "<vector>"),
    ]
    accepted = [
        ("kernels/a.cc", '"absl/types/span.h"'),
        ("kernels/cpu/a.cc", '"hwy/foreach_target.h"'),
        ("kernels/cpu/a.cc", '"kernels/encode.h"'),
        ("kernels/cuda/a.cu", "<cuda_fp16.h>"),
        ("storage/core/a.cc", "<openssl/sha.h>"),
        ("storage/core/a.cc", '"kernels/encode.h"'),
        ("storage/device/a.cc", '"storage/core/clock.h"'),
        ("storage/a.cc", '"rocksdb/db.h"'),
        ("storage/eviction/a.cc", '"storage/core/clock.h"'),
        ("client/transport/a.cc", "<ucp/api/ucp.h>"),
        ("client/a.cc", '"kvmill/v1/cache.grpc.pb.h"'),
        ("client/a.cc", '"client/transport/wire.h"'),
        ("client/cli/a.cc", '"storage/eviction/policy.h"'),
        ("client/c_api/a.cc", '"client/client.h"'),
        ("client/python/a.cc", '"client/kvmill.h"'),
        ("client/cli/a.cc", '"client/client.h"'),
        ("client/cli/a.cc", "<CLI/CLI.hpp>"),
        ("client/cli/a.cc", "<curses.h>"),
        ("service/a.cc", '"client/client.h"'),
        ("service/a.cc", "<httplib.h>"),
        ("service/a.cc", "<CLI/CLI.hpp>"),
        ("service/a.cc", "<nlohmann/json.hpp>"),
        ("service/a.cc", "<sys/socket.h>"),
        ("service/a.cc", '"service/cluster/loop.h"'),
        ("service/etcd/a.cc", '"service/cluster/loop.h"'),
        ("service/cluster/a.cc", '"storage/core/clock.h"'),
        ("tests/a_test.cc", '"service/node.h"'),
        ("tests/a_test.cc", '"gtest/gtest.h"'),
    ]
    failures = 0
    for path, include, want in ([(p, i, True) for p, i in refused] + [(p, i, False) for p, i in accepted]):
        with lint.planted_tree({**files, path: f"#include {include}\n"}) as root:
            problems, _ = check_tree(root)
            if bool(problems) != want:
                failures += 1
                print(f"{path} including {include}: {'not found' if want else problems}")
    print(f"layers self-test: {len(refused)} planted violations, {len(accepted)} good includes, {failures} wrong")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(lint.main("layers", check_tree, self_test))
