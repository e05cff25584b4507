"""What tiles lose of real K and V: a part of deploy/quickstart_job.py. The comparison is its own and does not trust kvmill's
numbers."""
import glob
import os
import re
import struct

from quickstart_daemons import JobError, size, table

NAMESPACE = "quickstart"
FORMAT = "k4v2_g128"
QUERY_HEADS = 8  # Of the attention line, for each KV head.
BLOCK_TOKENS = 128
# Of KVarN k4v2 tiles with blocks of 128, by head_dim (docs/formats.md).
COMPRESSION = {64: 4.49, 128: 4.74, 256: 4.88}


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
    """Until it survives a crash."""
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


def compare(cli, data, put, folder):
    """The numbers of a data set that was stored; JobError when they make no sense."""
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
    return result


def report(results):
    rows = [[""] + [r["title"] for r in results],
            ["prompt"] + [f"{r['tokens']} tokens, {r['layers']} layers, {r['heads']} KV heads, head_dim {r['head_dim']}"
                          for r in results],
            ["stored"] + [f"{size(r['encoded_bytes'])} of {size(r['raw_bytes'])}: {r['compression_total']:.2f} times less, tiles alone "
                          f"{r['compression_tiles']:.2f}" for r in results],
            ["error of K"] + [f"{100 * r['rel_error_k']:.2f} %  (|K' - K| / |K|, 4 bits)" for r in results],
            ["error of V"] + [f"{100 * r['rel_error_v']:.2f} %  (|V' - V| / |V|, 2 bits)" for r in results],
            ["attention, outputs"] + [f"{100 * r['attention_output_error']:.2f} %  off those over the 16-bit K and V"
                                      for r in results],
            ["attention, speed"] + [f"{r['attention_tiles_us']:.0f} us over the fetched tiles, "
                                    f"{r['attention_fp16_us']:.0f} over fp16: {r['attention_ratio']:.1f} times as fast"
                                    for r in results],
            ["tail"] + [f"{r['tail_tokens']} tokens, bit by bit the same" for r in results],
            ["put, durable; get"] + [f"{r['put_us'] / 1000:.1f} ms; {r['get_us'] / 1000:.1f} ms, decoded" for r in results]]
    table(rows)
    print(f"""
The errors of K and V are noise of single values, which attention averages over many tokens. The queries are random numbers
here, since the files hold none ({QUERY_HEADS} query heads for each KV head, one thread).""")
