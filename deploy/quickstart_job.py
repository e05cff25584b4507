#!/usr/bin/env python3
"""The main job of kvmill, once, on real K and V: store, kill -9, restart, fetch, decode, compare.

Called by deploy/quickstart.sh after the build. Needs Python only; the comparison is its own and does not trust
kvmill's numbers.
"""
import argparse
import glob
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time

NAMESPACE = "quickstart"
FORMAT = "k4v2_g128"
QUERY_HEADS = 8  # Of the attention line, for each KV head.
BLOCK_TOKENS = 128
READY_SECONDS = 60
COMMAND_SECONDS = 120
# Of KVarN k4v2 tiles with blocks of 128, by head_dim (docs/formats.md).
COMPRESSION = {64: 4.49, 128: 4.74, 256: 4.88}


class JobError(Exception):
    """Something did not come out as it must; the text says what."""


def step(text):
    print(f"\n== {text}", flush=True)


class Daemon:
    """A kvmilld that this program started; stopped by its process id, nothing else is touched."""

    def __init__(self, bin_dir, folder):
        self.program = os.path.join(bin_dir, "kvmilld")
        self.folder = folder
        self.socket = os.path.join(folder, "run", "kvmill.sock")
        self.log = os.path.join(folder, "kvmilld.log")
        self.process = None
        os.mkdir(os.path.join(folder, "run"), 0o750)

    def start(self):
        """Seconds until it was ready, and its ready line."""
        if not os.path.exists(self.program):
            raise JobError(f"there is no {self.program}; deploy/quickstart.sh builds it")
        begin = time.monotonic()
        command = [self.program, "--socket", self.socket, "--data-dir", os.path.join(self.folder, "data"),
                   "--host-bytes", "256MiB", "--disk-bytes", "1GiB"]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, start_new_session=True)
        timer_end = begin + READY_SECONDS
        os.set_blocking(self.process.stdout.fileno(), False)
        text = b""
        while b"\n" not in text:
            if self.process.poll() is not None or time.monotonic() > timer_end:
                raise JobError(f"kvmilld did not become ready; its log:\n{self.log_tail()}")
            text += self.process.stdout.read() or b""
            time.sleep(0.005)
        return time.monotonic() - begin, json.loads(text)

    def log_tail(self):
        with open(self.log, encoding="utf-8", errors="replace") as log:
            return "".join(log.readlines()[-20:])

    def kill_hard(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self):
        if self.process is None or self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.kill_hard()


class Cli:
    def __init__(self, bin_dir, socket):
        self.program = os.path.join(bin_dir, "kvmill")
        self.server = "unix:" + socket

    def __call__(self, *arguments):
        """Runs one command in a process of its own and returns its JSON."""
        command = [self.program, *arguments, "--json", "--server", self.server]
        result = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
        if result.returncode != 0:
            raise JobError(f"{' '.join(command)}\nended with {result.returncode}: {result.stderr.strip()}")
        return json.loads(result.stdout)


def read_npy(path):
    """Shape and fp16 values of a .npy file as a tuple of floats, and their raw bytes."""
    with open(path, "rb") as file:
        data = file.read()
    length = struct.unpack("<H", data[8:10])[0]
    header = data[10:10 + length].decode("latin-1")
    shape = tuple(int(n) for n in re.search(r"'shape':\s*\(([^)]*)\)", header).group(1).split(",") if n.strip())
    if data[:7] != b"\x93NUMPY\x01" or "'<f2'" not in header:
        raise JobError(f"{path} is not a .npy file of fp16")
    body = data[10 + length:]
    return shape, struct.unpack(f"<{len(body) // 2}e", body), body


class Comparison:
    """Squares of differences and of inputs, over the tokens that are in tiles; and whether the tail is the same."""

    def __init__(self):
        self.difference = self.norm = 0.0
        self.tail_is_exact = True

    def add(self, original_path, fetched_path, tiled_tokens):
        shape, original, original_bytes = read_npy(original_path)
        fetched_shape, fetched, fetched_bytes = read_npy(fetched_path)
        if shape != fetched_shape:
            raise JobError(f"{fetched_path} is {fetched_shape}, stored was {shape}")
        tiled = tiled_tokens * shape[1] * shape[2]
        for a, b in zip(original[:tiled], fetched[:tiled]):
            self.difference += (b - a) * (b - a)
            self.norm += a * a
        self.tail_is_exact &= original_bytes[2 * tiled:] == fetched_bytes[2 * tiled:]

    def relative_error(self):
        return 0.0 if self.difference == 0 else (self.difference / self.norm) ** 0.5


class DataSet:
    def __init__(self, title, sequence, prefix):
        self.title, self.sequence, self.prefix = title, sequence, prefix
        self.layers = len(glob.glob(glob.escape(prefix) + "L*_k.npy"))
        self.tokens, self.heads, self.head_dim = read_npy(prefix + "L00_k.npy")[0]
        self.blocks = self.tokens // BLOCK_TOKENS


def data_sets(root):
    sets = [DataSet("tiny-lm, in this repository", "tiny-lm", os.path.join(root, "tests/data/tiny-lm-kv/retrieval_"))]
    extra = os.environ.get("KVMILL_EXTRA_DATA")
    if extra:
        for folder in (os.path.join(extra, "kv"), extra):
            found = sorted(glob.glob(os.path.join(folder, "*L00_k.npy")))
            if found:
                prefix = found[0][:-len("L00_k.npy")]
                sets.append(DataSet("a 0.5B model, KVMILL_EXTRA_DATA", "extra", prefix))
                break
        else:
            print(f"KVMILL_EXTRA_DATA={extra} has no kv/*L00_k.npy: going on without it")
    return sets


def store(cli, data):
    put = cli("put", "--namespace", f"{NAMESPACE}-{data.sequence}", "--format", FORMAT, "--sequence", data.sequence,
              "--kv", data.prefix, "--model", data.sequence, "--wait", "durable")
    if put["blocks_stored"] != data.blocks:
        raise JobError(f"put stored {put['blocks_stored']} blocks, want {data.blocks}")
    return put


def fetch(cli, data, folder):
    """Fetches decoded K and V and compares them with the files; fetches tiles and decodes them by `kvmill decode`."""
    name = ("--namespace", f"{NAMESPACE}-{data.sequence}", "--sequence", data.sequence)
    lookup = cli("lookup", *name)
    out = os.path.join(folder, f"{data.sequence}_")
    first = cli("get", *name, "--out", out)
    second = cli("get", *name, "--out", out + "tiles_", "--tiles")
    if first["misses"] or first["tokens"] != data.tokens or lookup["hit_blocks"] != data.blocks:
        raise JobError(f"get returned {first['tokens']} of {data.tokens} tokens and {first['misses']} misses")
    errors = {"k": Comparison(), "v": Comparison()}
    for layer in range(data.layers):
        decoded = {kind: f"{out}tiles_L{layer:02d}_{kind}.npy" for kind in errors}
        cli("decode", "--records", f"{out}tiles_L{layer:02d}.records", "--format", FORMAT, "--head-dim",
            str(data.head_dim), "--heads", str(data.heads), "--k", decoded["k"], "--v", decoded["v"])
        for kind, comparison in errors.items():
            fetched = f"{out}L{layer:02d}_{kind}.npy"
            comparison.add(f"{data.prefix}L{layer:02d}_{kind}.npy", fetched, data.blocks * BLOCK_TOKENS)
            if not read_npy(fetched)[2].startswith(read_npy(decoded[kind])[2]):
                raise JobError(f"layer {layer}: the fetched {kind} is not what its tiles decode to")
    attention = cli("bench", "attention", "--kv", data.prefix, "--records", f"{out}tiles_", "--format", FORMAT,
                    "--heads-q", str(QUERY_HEADS))
    if not (errors["k"].tail_is_exact and errors["v"].tail_is_exact):
        raise JobError("the tail did not come back bit by bit")
    return lookup, first, second, errors, attention


def check(data, result):
    want = COMPRESSION[data.head_dim]
    if abs(result["compression_tiles"] - want) > 0.01:
        raise JobError(f"compression of the tiles is {result['compression_tiles']:.3f}, want {want}")
    if not 0 < result["attention_output_error"] < 0.5:
        raise JobError(f"attention over the tiles is {result['attention_output_error']:.3f} off: makes no sense")
    if not 0 < result["rel_error_k"] < 0.25 or not 0 < result["rel_error_v"] < 0.75:
        raise JobError(f"errors of K {result['rel_error_k']:.3f} and V {result['rel_error_v']:.3f} make no sense")


def size(count):
    return f"{count / 2**20:.2f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


def table(rows):
    widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
    for row in rows:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def report(results, restart):
    step("What happened")
    print(f"""
A daemon took in the K and V that a model had computed for a prompt, cut them into blocks of {BLOCK_TOKENS} tokens,
and kept each block as tiles: 4-bit keys and 2-bit values with their scales ({FORMAT}). It answered when the
blocks were on disk. Then it was killed with SIGKILL, started again on the same folder (ready after
{restart:.2f} s), and another process fetched the blocks and decoded them.
""")
    rows = [[""] + [r["title"] for r in results],
            ["prompt"] + [f"{r['tokens']} tokens, {r['layers']} layers, {r['heads']} KV heads, head_dim {r['head_dim']}"
                          for r in results],
            ["16-bit K and V"] + [size(r["raw_bytes"]) for r in results],
            ["stored"] + [size(r["encoded_bytes"]) for r in results],
            ["compression_tiles"] + [f"{r['compression_tiles']:.2f}  (tokens in tiles / their records)"
                                     for r in results],
            ["compression_total"] + [f"{r['compression_total']:.2f}  (with headers and the 16-bit tail)"
                                     for r in results],
            ["error of K"] + [f"{100 * r['rel_error_k']:.2f} %  (|K' - K| / |K|, 4 bits)" for r in results],
            ["error of V"] + [f"{100 * r['rel_error_v']:.2f} %  (|V' - V| / |V|, 2 bits)" for r in results],
            ["attention, outputs"] + [f"{100 * r['attention_output_error']:.2f} %  off those over the 16-bit K and V"
                                      for r in results],
            ["attention, speed"] + [f"{r['attention_tiles_us']:.0f} us over the fetched tiles, "
                                    f"{r['attention_fp16_us']:.0f} over fp16: {r['attention_ratio']:.1f} times as fast"
                                    for r in results],
            ["tail"] + [f"{r['tail_tokens']} tokens, bit by bit the same" for r in results],
            ["hits after the restart"] + [", ".join(f"{n} from {t}" for t, n in r["tiers_first_get"].items())
                                          for r in results],
            ["  fetched once more"] + [", ".join(f"{n} from {t}" for t, n in r["tiers_second_get"].items())
                                       for r in results],
            ["put, durable"] + [f"{r['put_us'] / 1000:.1f} ms" for r in results],
            ["get, decoded"] + [f"{r['get_us'] / 1000:.1f} ms" for r in results]]
    table(rows)
    print(f"""
The errors of K and V are noise of single values, which attention averages over many tokens: its outputs, from the
tiles as they were fetched and nothing decoded, are off by less. The queries are random numbers, since the files hold
none ({QUERY_HEADS} query heads for each KV head, one thread). What this does to a model's answers is not measured here.""")


def run(arguments, folder, daemon):
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    cli = Cli(arguments.bin_dir, daemon.socket)
    sets = data_sets(root)

    step(f"Start kvmilld in {folder} (a unix socket, no network)")
    seconds, ready = daemon.start()
    print(f"ready after {seconds:.2f} s, process {daemon.process.pid}, boot {ready['boot_id']}")
    step("Store")
    puts = []
    for data in sets:
        puts.append(store(cli, data))
        print(f"{data.title}: {puts[-1]['blocks_stored']} blocks are durable")
    step("kill -9, and start again on the same folder")
    daemon.kill_hard()
    restart, ready_again = daemon.start()
    if ready_again["boot_id"] == ready["boot_id"]:
        raise JobError("the restarted daemon has the boot id of the killed one")
    print(f"ready after {restart:.2f} s, process {daemon.process.pid}, boot {ready_again['boot_id']}")
    step("Fetch in another process, decode, compare with the original files")
    results = []
    for data, put in zip(sets, puts):
        lookup, first, second, errors, attention = fetch(cli, data, folder)
        result = {"title": data.title, "tokens": data.tokens, "layers": data.layers, "heads": data.heads,
                  "head_dim": data.head_dim, "blocks": first["blocks"], "tail_tokens": data.tokens % BLOCK_TOKENS,
                  "raw_bytes": put["raw_bytes"], "encoded_bytes": put["encoded_bytes"],
                  "compression_tiles": put["compression_tiles"], "compression_total": put["compression_total"],
                  "rel_error_k": errors["k"].relative_error(), "rel_error_v": errors["v"].relative_error(),
                  "tiers_lookup": lookup["tiers"], "tiers_first_get": first["tiers"],
                  "tiers_second_get": second["tiers"], "put_us": put["us"], "get_us": first["us"],
                  "attention_output_error": attention["output_error"], "attention_tiles_us": attention["tiles_us"],
                  "attention_fp16_us": attention["fp16_us"], "attention_ratio": attention["ratio"]}
        check(data, result)
        results.append(result)
        print(f"{data.title}: {first['blocks']} blocks and the tail came back")
    verify = cli("verify")
    print(f"every record on disk and in memory checked: {verify['records_checked']}, damaged: {verify['failures']}")
    report(results, restart)
    if arguments.json:
        document = {"data_sets": results, "restart_s": restart, "records_checked": verify["records_checked"],
                    "checksum_failures": verify["failures"]}
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=2)
            file.write("\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin-dir", required=True)
    parser.add_argument("--keep", action="store_true", help="leave the daemon running")
    parser.add_argument("--json", metavar="FILE", help="write the numbers there")
    arguments = parser.parse_args()
    arguments.bin_dir = os.path.abspath(arguments.bin_dir)

    folder = tempfile.mkdtemp(prefix="kvmill-quickstart-")
    daemon = Daemon(arguments.bin_dir, folder)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # So that the clean-up below runs.
    kept = False
    try:
        run(arguments, folder, daemon)
        kept = arguments.keep
    except JobError as error:
        print(f"\nquickstart: {error}", file=sys.stderr)
        return 1
    finally:
        if not kept:
            daemon.stop()
            shutil.rmtree(folder, ignore_errors=True)
    if kept:
        step("The daemon is still running")
        print(f"reach it:  {arguments.bin_dir}/kvmill stat --server unix:{daemon.socket}\n"
              f"its log:   {daemon.log}\n"
              f"stop it:   kill {daemon.process.pid} && rm -r {folder}")
    else:
        print("\nThe daemon was stopped and its folder removed (--keep leaves both).")
    return 0


if __name__ == "__main__":
    sys.exit(main())
