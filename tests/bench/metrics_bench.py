#!/usr/bin/env python3
"""What metrics cost a daemon: time of a scrape with many namespaces, and processor time of stores and fetches with the
sampling of errors and without. Two daemons take turns in one run; medians of rounds.

PYTHONPATH=build/release/python tests/bench/metrics_bench.py --bin-dir build/release/bin --source-dir .
"""
import argparse
import os
import statistics
import sys
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


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin-dir", required=True)
    parser.add_argument("--source-dir", required=True)
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    cli_support.BIN_DIR, cli_support.SOURCE_DIR = os.path.abspath(arguments.bin_dir), os.path.abspath(arguments.source_dir)
    per_scrape = scrapes(1, 16)
    scrapes(1000, 16)
    scrapes(1000, 256)
    costs(arguments.rounds, per_scrape)


if __name__ == "__main__":
    main()
