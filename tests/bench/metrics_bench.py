#!/usr/bin/env python3
"""What a daemon pays for being watched and for sharing. Daemons take turns in one run; medians of rounds.

--of metrics: time of a scrape with many namespaces, and processor time of stores and fetches with the sampling of errors and
without. --of limits: stores into full memory, with a disk tier, with quotas and watermarks and without.

PYTHONPATH=build/release/python tests/bench/metrics_bench.py --bin-dir build/release/bin --source-dir . --of limits
"""
import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import urllib.request

import numpy as np

import kvmill

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.append(os.path.join(HERE, "..", "client", "cli"))
import cli_support  # noqa: E402  # pylint: disable=wrong-import-position


def processor_seconds(daemon):
    """Of all threads, from the scheduler's clock: finer than the ticks of /proc/PID/stat."""
    total, tasks = 0, f"/proc/{daemon.process.pid}/task"
    for task in os.listdir(tasks):
        with open(f"{tasks}/{task}/schedstat", encoding="utf-8") as file:
            total += int(file.read().split()[0])
    return total / 1e9


def scrape(daemon):
    with urllib.request.urlopen(f"http://{daemon.ready['metrics']}/metrics", timeout=60) as answer:
        return answer.read()


def spec(name, layers, heads, dim, tokens):
    return kvmill.NamespaceSpec(groups=[kvmill.LayerGroup(range(layers), heads, dim)], model=name, block_tokens=tokens)


def scrapes(namespaces, named):
    daemon = cli_support.Daemon("--metrics", "127.0.0.1:0", "--error-sample-interval", "1", "--metrics-namespaces", str(named))
    try:
        with kvmill.Client(daemon.server, timeout=60) as client:
            layer = tuple(np.random.default_rng(1).standard_normal((64, 1, 64)).astype(np.float16) for _ in "kv")
            for i in range(namespaces):
                client.store(client.open_namespace(f"model-{i:04}", spec(f"model-{i:04}", 1, 1, 64, 64)), [kvmill.Block(b"block key", [layer])])
            for _ in range(5):
                text = scrape(daemon)
            times, processor = [], processor_seconds(daemon)
            for _ in range(100):
                begin = time.perf_counter()
                scrape(daemon)
                times.append(time.perf_counter() - begin)
            processor = (processor_seconds(daemon) - processor) / len(times)
        times.sort()
        print(f"{namespaces} namespaces, {named} named: {text.count(10)} lines, {len(text)} bytes; a scrape takes "
              f"{times[50] * 1e3:.2f} ms (median; 95 % within {times[95] * 1e3:.2f}), {processor * 1e3:.2f} ms of the processor")
        return processor
    finally:
        daemon.stop()
        daemon.remove()


def costs(rounds, per_scrape):
    flags = {"without": ("--error-sample-interval", "0"), "with": ()}
    daemons = {name: cli_support.Daemon("--metrics", "127.0.0.1:0", *more) for name, more in flags.items()}
    times = {(name, what): [] for name in daemons for what in ("store", "fetch")}
    try:
        clients = {name: kvmill.Client(daemon.server, timeout=60) for name, daemon in daemons.items()}
        spaces = {name: client.open_namespace("n", spec("n", 8, 8, 128, 128)) for name, client in clients.items()}
        layers = [tuple(np.random.default_rng(i).standard_normal((128, 8, 128)).astype(np.float16) for _ in "kv") for i in range(8)]
        for i in range(rounds):
            keys = [b"block %05d %05d" % (i, j) for j in range(8)]
            for name in list(daemons) if i % 2 else list(daemons)[::-1]:
                daemon, client, ns = daemons[name], clients[name], spaces[name]
                begin = processor_seconds(daemon)
                client.store(ns, [kvmill.Block(key, layers) for key in keys])
                client.flush()
                middle = processor_seconds(daemon)
                records = [[bytearray(8 * ns.record_bytes(layer)) for layer in range(8)] for _ in keys]
                for _ in range(8):
                    client.fetch_records(ns, keys, records)
                times[name, "store"].append(middle - begin)
                times[name, "fetch"].append(processor_seconds(daemon) - middle)
                client.clear(ns)
        for what in ("store", "fetch"):
            with_, without = (statistics.median(times[name, what]) for name in ("with", "without"))
            ratios = sorted(a / b for a, b in zip(times["with", what], times["without", what]))
            print(f"{what}: {with_ * 1e3:.2f} ms of the processor with samples, {without * 1e3:.2f} without; ratio of the medians "
                  f"{with_ / without:.4f}, of rounds {ratios[len(ratios) // 2]:.4f} ({ratios[len(ratios) // 4]:.4f}-{ratios[3 * len(ratios) // 4]:.4f})")
        said = dict(line.rsplit(" ", 1) for line in scrape(daemons["with"]).decode().splitlines() if "seconds_sum" in line)
        decode, encode = (float(said[f'kvmill_stage_duration_seconds_sum{{op="store",stage="{stage}"}}']) for stage in ("decode", "encode"))
        print(f"sampling took {100 * decode / encode:.3f} % of the time of encoding; a scrape every 15 s takes {100 * per_scrape / 15:.4f} % of one processor")
    finally:
        for daemon in daemons.values():
            daemon.stop()
            daemon.remove()


LIMITS_HOST_BYTES = 64 << 20
OFF = ("--host-high-watermark", "100")
# name: (flags, quota). A quota that is never met counts, and has orders of its own; one that is full makes room for each store.
LIMITS = {"neither": (OFF, None), "quotas": (OFF, {"soft": LIMITS_HOST_BYTES // 2, "hard": 1 << 40}), "watermarks": ((), None),
          "both": ((), {"soft": LIMITS_HOST_BYTES // 2, "hard": 1 << 40}),
          "full quota": (OFF, {"hard": LIMITS_HOST_BYTES // 2})}
# (layers, heads, head_dim, tokens), blocks of a round. The smallest block, of which accounting is the most, and one as of a model.
LIMITS_BLOCKS = {"small blocks": ((1, 1, 64, 64), 1000), "large blocks": ((8, 8, 128, 128), 24)}


def spread(values, unit="", scale=1.0):
    values = sorted(values)
    return f"{statistics.median(values) * scale:.3f}{unit} ({values[0] * scale:.3f}-{values[-1] * scale:.3f})"


def store_all(client, space, blocks):
    """Stores them, those again that a full quota refused, for which room is made in the background; how many these were."""
    refused, end = 0, time.monotonic() + 60
    while blocks:
        results = client.store(space, blocks).blocks
        blocks = [block for block, result in zip(blocks, results) if result.error]
        errors = [result.error for result in results if result.error]
        assert all("at its hard quota" in str(error) for error in errors) and time.monotonic() < end, errors[:1]
        refused += len(blocks)
    return refused


def limits_of(what, shape, count, rounds):
    layers, heads, dim, tokens = shape
    daemons, clients, spaces, times = {}, {}, {}, {name: [] for name in LIMITS}
    refused = dict.fromkeys(LIMITS, 0)
    with tempfile.TemporaryDirectory(prefix="kvmill-bench-") as folder:
        try:
            for name, (flags, quota) in LIMITS.items():
                if quota is not None:
                    path = os.path.join(folder, name)
                    with open(path, "w", encoding="utf-8") as file:
                        json.dump({"tenants": {"default": {"quota": quota}}}, file)
                    flags = (*flags, "--tenants", path)
                daemons[name] = cli_support.Daemon("--host-bytes", str(LIMITS_HOST_BYTES), "--disk-bytes", "1GiB", *flags)
                clients[name] = kvmill.Client(daemons[name].server, timeout=60)
                spaces[name] = clients[name].open_namespace("n", spec("n", layers, heads, dim, tokens))
            record = spaces["neither"].record_bytes(0)
            # Encoded by the client beforehand, as far as the daemon knows: what is measured is the store.
            values = [tuple(np.random.default_rng(i).standard_normal((tokens, heads, dim)).astype(np.float16) for _ in "kv") for i in range(layers)]
            clients["neither"].store(spaces["neither"], [kvmill.Block(b"sample", values)])
            sample = [bytearray(heads * record) for _ in range(layers)]
            assert clients["neither"].fetch_records(spaces["neither"], [b"sample"], [sample]).blocks[0].hit
            to_fill = -(-LIMITS_HOST_BYTES * 5 // 4 // (count * layers * heads * record))  # Rounds until memory is full.
            for i in range(to_fill + rounds):
                order = list(LIMITS)
                for name in order[i % len(order):] + order[:i % len(order)]:
                    blocks = [kvmill.Block(b"block %05d %05d" % (i, j), sample) for j in range(count)]
                    processor, begin = processor_seconds(daemons[name]), time.perf_counter()
                    again = store_all(clients[name], spaces[name], blocks)
                    seconds = time.perf_counter() - begin
                    clients[name].flush()  # So that none works while another one is measured.
                    if i >= to_fill:
                        refused[name] += again
                        times[name].append((seconds / count, (processor_seconds(daemons[name]) - processor) / count))
        finally:
            for client in clients.values():
                client.close()
            for daemon in daemons.values():
                daemon.stop()
                daemon.remove()
    print(f"{what} of {layers * heads * record} bytes, {count} a round, {rounds} rounds; median (range); ratios to neither, round by round")
    for name, rows in times.items():
        stores, processor = zip(*rows)
        ratios = [[mine[k] / base[k] for mine, base in zip(rows, times["neither"])] for k in (0, 1)]
        print(f"{name:>12}: {spread([1 / s for s in stores], ' blocks/s')}, {spread(processor, ' us of the processor a block', 1e6)}; "
              f"time {spread(ratios[0])}, processor {spread(ratios[1])}; {refused[name] / (count * rounds):.3f} refusals a block")


def limits(rounds):
    for what, (shape, count) in LIMITS_BLOCKS.items():
        limits_of(what, shape, count, rounds)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin-dir", required=True)
    parser.add_argument("--source-dir", required=True)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--of", choices=("metrics", "limits"), default="metrics")
    arguments = parser.parse_args()
    cli_support.BIN_DIR, cli_support.SOURCE_DIR = os.path.abspath(arguments.bin_dir), os.path.abspath(arguments.source_dir)
    if arguments.of == "limits":
        return limits(arguments.rounds)
    per_scrape = scrapes(1, 16)
    scrapes(1000, 16)
    scrapes(1000, 256)
    return costs(arguments.rounds, per_scrape)


if __name__ == "__main__":
    main()
