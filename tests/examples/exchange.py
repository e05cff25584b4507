"""Two nodes and real K and V: exchange.py all NODE_A NODE_B SOCKET_A KV [plaintext]

Three processes. One stores the K and V of a prompt (KV and L00_k.npy and so on, [tokens, heads, head_dim]) in the daemon of
node A; one takes the records from there and puts them into the daemon of node B, both over UCX; one on node A maps A's
blocks, compares them with what B has, byte by byte, and attends to them where A's daemon keeps them. Each is also a
command of its own, to be run on a node of its own:

    exchange.py store NODE_A KV      exchange.py relay NODE_A NODE_B      exchange.py attend SOCKET_A NODE_B

NODE is host:port of a kvmilld with --listen and --ucx, SOCKET_A is unix:/run/kvmill/kvmill.sock.
"""
import glob
import hashlib
import subprocess
import sys

import numpy as np

import kvmill

NAME, BLOCK_TOKENS, QUERIES_PER_HEAD = "example-exchange", 128, 4


def connect(node, plaintext):
    """Not over gRPC, even if that would do."""
    return kvmill.Client(node, timeout=60, path=kvmill.DataPath.UCX, plaintext=plaintext)


def key(block):
    return hashlib.sha256(f"the prompt of {NAME} up to block {block}".encode()).digest()


def hit_keys(client, ns):
    """Of the blocks that are there."""
    keys = [key(block) for block in range(1000)]
    return keys[:client.lookup(ns, keys).hit_blocks]


def records_of(client, ns, keys):
    """[block][layer], as they are stored."""
    groups = [group for group in ns.spec.groups for _ in group.layers]
    records = [[bytearray(group.kv_heads * ns.record_bytes(layer)) for layer, group in enumerate(groups)]
               for _ in keys]
    for block in client.fetch_records(ns, keys, records).blocks:
        if block.error:
            raise block.error
    return records


def store(node, prefix, plaintext=False):
    layers = [tuple(np.load(path[:-len("k.npy")] + half + ".npy") for half in "kv")
              for path in sorted(glob.glob(glob.escape(prefix) + "L*_k.npy"))]
    if not layers:
        sys.exit(f"exchange: there is no K of a first layer: no file {prefix}L00_k.npy")
    tokens, heads, head_dim = layers[0][0].shape
    dtype = kvmill.DType.FLOAT16 if layers[0][0].dtype == np.float16 else kvmill.DType.BFLOAT16
    with connect(node, plaintext) as client:
        ns = client.open_namespace(NAME, kvmill.NamespaceSpec(
            [kvmill.LayerGroup(range(len(layers)), heads, head_dim)], model="example-model", revision="1",
            hash_scheme="example", source_dtype=dtype, block_tokens=BLOCK_TOKENS))
        blocks = []
        for index in range(tokens // BLOCK_TOKENS):
            part = slice(index * BLOCK_TOKENS, (index + 1) * BLOCK_TOKENS)
            blocks.append(kvmill.Block(key(index), [(k[part], v[part]) for k, v in layers], block_index=index,
                                       parent=key(index - 1) if index else b""))
        for block in client.store(ns, blocks).blocks:
            if block.error:
                raise block.error
        print(f"stored {len(blocks)} blocks of {len(layers)} layers over {client.ucx_transport}")


def relay(source, target, plaintext=False):
    with connect(source, plaintext) as a, connect(target, plaintext) as b:
        ns = a.find_namespace(NAME)
        keys = hit_keys(a, ns)
        records = records_of(a, ns, keys)
        copy = b.open_namespace(NAME, ns.spec)
        blocks = [kvmill.Block(key(i), layers, block_index=i, parent=key(i - 1) if i else b"")
                  for i, layers in enumerate(records)]
        for block in b.store(copy, blocks).blocks:
            if block.error:
                raise block.error
        print(f"moved {len(blocks)} blocks, {sum(len(r) for layers in records for r in layers)} bytes of records")


def decode(ns, record, head_dim):
    """K and V [tokens, head_dim] of a record, as docs/formats.md says."""
    at = 0

    def take(count, bits=16):
        nonlocal at
        part = np.frombuffer(record, np.uint8, count * bits // 8, at)
        at += part.size
        if bits == 16:
            return part.view(np.float16).astype(np.float32)
        return (part[:, None] >> np.arange(0, 8, bits) & (1 << bits) - 1).astype(np.float32)

    def take_rows(rows, columns, bits):
        if bits != 3:
            return take(rows * columns, bits).reshape(rows, columns)
        # Of each row the low two bits of all codes, then the high ones.
        parts = [np.concatenate([take(columns, 2).ravel(), 4 * take(columns, 1).ravel()]) for _ in range(rows)]
        return np.stack([part[:columns] + part[columns:] for part in parts])

    tokens = ns.spec.block_tokens
    codes = take_rows(head_dim, tokens, ns.spec.key_bits)
    scale, zero, factor = take(head_dim), take(head_dim), take(tokens)
    k = ((codes * scale[:, None] + zero[:, None]) * factor).T
    codes = take_rows(tokens, head_dim, ns.spec.value_bits)
    factor, scale, zero = take(head_dim), take(tokens), take(tokens)
    v = (codes * scale[:, None] + zero[:, None]) * factor
    hadamard = np.ones((1, 1))
    while len(hadamard) < head_dim:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    hadamard /= np.sqrt(head_dim)
    return k @ hadamard, v @ hadamard


def attention(query, k, v):
    """[queries, head_dim] over [tokens, head_dim], in double."""
    weights = query.astype(float) @ k.T / np.sqrt(k.shape[1])
    weights = np.exp(weights - weights.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True) @ v


def is_shared_read_only(array):
    """Whether this process can only read what is there, and shares it with another."""
    with open("/proc/self/maps", encoding="ascii") as maps:
        for line in maps:
            span, access = line.split()[:2]
            begin, end = (int(number, 16) for number in span.split("-"))
            if begin <= array.ctypes.data < end:
                return access == "r--s"
    return False


def attend(socket, other, plaintext=False):
    with kvmill.Client(socket) as client, connect(other, plaintext) as b:
        ns = client.find_namespace(NAME)
        keys = hit_keys(client, ns)
        there = records_of(b, b.find_namespace(NAME), keys)
        group, = ns.spec.groups
        worst = 0
        with client.map(ns, keys) as mapped:
            for layer in range(ns.layer_count):
                blocks = [mapped.heads(block, layer) for block in range(len(mapped))]
                for block, heads in enumerate(blocks):
                    assert b"".join(head.data.tobytes() for head in heads) == there[block][layer], "the nodes differ"
                    assert all(is_shared_read_only(head.data) for head in heads), "a copy"
                query = np.random.default_rng(layer).standard_normal(
                    (group.kv_heads * QUERIES_PER_HEAD, group.head_dim)).astype(np.float32)
                output, _ = mapped.attend(layer, query)
                mapped.check()  # What was compared was A's. (attend() checks what it reads itself.)
                for head in range(group.kv_heads):
                    k, v = map(np.concatenate, zip(*(decode(ns, heads[head].data, group.head_dim) for heads in blocks)))
                    mine = slice(head * QUERIES_PER_HEAD, (head + 1) * QUERIES_PER_HEAD)
                    want = attention(query[mine], k, v)
                    worst = max(worst, np.linalg.norm(output[mine] - want) / np.linalg.norm(want))
                mapped.check()
        assert worst < 1e-3, worst
    print(f"attended to {len(keys) * ns.spec.block_tokens} tokens of {ns.layer_count} layers in place; "
          f"the same bytes on both nodes, off by {worst:.1e} at most")


def everything(node_a, node_b, socket_a, kv, *plaintext):
    for command in (("store", node_a, kv), ("relay", node_a, node_b), ("attend", socket_a, node_b)):
        subprocess.run([sys.executable, __file__, *command, *plaintext], check=True)


COMMANDS = {"all": (everything, 4), "store": (store, 2), "relay": (relay, 2), "attend": (attend, 2)}

if __name__ == "__main__":
    command, *arguments = sys.argv[1:] or [""]
    run, count = COMMANDS.get(command, (None, 0))
    if run is None or len(arguments) - (arguments[-1:] == ["plaintext"]) != count:
        print(f"usage: {__doc__}", file=sys.stderr)
        sys.exit(2)
    if command != "all" and arguments[-1] == "plaintext":
        arguments[-1] = True
    try:
        run(*arguments)
    except kvmill.Error as error:
        sys.exit(f"exchange: {error}")
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
