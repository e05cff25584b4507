#!/usr/bin/env python3
"""One cache over three nodes (deploy/cluster-demo.sh calls it after the build): prefill on one, decode on another, which has the
blocks by a ticket while they are computed, the first one killed in between; then a node killed under load.

etcd and each daemon have a network namespace of their own, joined by a bridge. Namespaces have no name and every process dies
with this one, so nothing stays.
"""
import argparse
import glob
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time

CANNOT = 77
SECONDS = 60     # For anything to answer.
LEASE = 3        # --lease-ttl: how soon a node that died is forgotten.
PROMPTS = 120    # Of the load: more than the engines use before the kill.
LOAD_BEFORE, LOAD_AFTER, LOAD_RESTARTED = 3, LEASE + 3, 4  # Seconds of load: before the kill, after it, after the restart.
ENGINE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "cluster_demo_engine.py")


class DemoError(Exception):
    """Something did not come out as it must; the text says what."""


def step(text):
    print(f"\n== {text}", flush=True)


def read_json(process, what):
    """A line of its standard output, which must be a pipe without Python's buffer."""
    text, end = b"", time.monotonic() + SECONDS
    while not text.endswith(b"\n"):
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))
        more = os.read(process.stdout.fileno(), 1) if ready else b""
        if not more:
            raise DemoError(f"{what} {'ended' if ready else 'says nothing'}")
        text += more
    return json.loads(text)


class Host:
    """A network namespace, which a sleeping process holds."""

    def __init__(self, folder, name, number):
        self.folder, self.name, self.address = os.path.join(folder, name), name, f"10.77.0.{number}"
        os.makedirs(os.path.join(self.folder, "run"), 0o750)
        self.holder = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sleep", "infinity"],
                                       stderr=subprocess.DEVNULL)
        own, end = os.readlink("/proc/self/ns/net"), time.monotonic() + SECONDS
        while os.readlink(f"/proc/{self.holder.pid}/ns/net") == own:
            if self.holder.poll() is not None or time.monotonic() > end:
                print("cluster-demo: this machine does not let me make network namespaces (root and iproute2 are needed)", file=sys.stderr)
                sys.exit(CANNOT)
            time.sleep(0.01)
        self.ip("link", "set", "lo", "up")

    def command(self, *command):
        return ["setpriv", "--pdeathsig", "KILL", "nsenter", f"--net=/proc/{self.holder.pid}/ns/net", "--", *command]

    def ip(self, *arguments):
        done = subprocess.run(self.command("ip", *arguments), capture_output=True, text=True, check=False)
        if done.returncode:
            raise DemoError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")

    def plug_into(self, bridge):
        """A cable to the host whose namespace has the bridge."""
        self.ip("link", "add", "eth0", "type", "veth", "peer", "name", f"to-{self.name}", "netns", str(bridge.holder.pid))
        self.ip("addr", "add", f"{self.address}/24", "dev", "eth0")
        self.ip("link", "set", "eth0", "up")
        bridge.ip("link", "set", f"to-{self.name}", "master", "bridge", "up")

    def start(self, *command, **options):
        with open(os.path.join(self.folder, "log"), "ab") as log:
            return subprocess.Popen(self.command(*command), stderr=log, bufsize=0, **options)

    def log_tail(self):
        with open(os.path.join(self.folder, "log"), encoding="utf-8", errors="replace") as log:
            return "".join(log.readlines()[-15:])


class Node(Host):
    """A host with a daemon."""

    daemon = ready = None

    def start_daemon(self, bin_dir, etcd):
        """To be waited for with wait_ready."""
        socket = os.path.join(self.folder, "run", "kvmill.sock")
        self.server = "unix:" + socket
        self.kvmill = os.path.join(bin_dir, "kvmill")
        self.daemon = self.start(os.path.join(bin_dir, "kvmilld"), "--socket", socket, "--data-dir", os.path.join(self.folder, "data"),
                                 "--host-bytes", "256MiB", "--huge-pages", "off", "--disk-bytes", "1GiB",
                                 "--listen", self.address + ":7600", "--ucx", self.address, "--insecure", "--node-id", self.name, "--cluster", f"etcd://{etcd}", "--lease-ttl",
                                 f"{LEASE}s", stdout=subprocess.PIPE)

    def wait_ready(self):
        self.ready = read_json(self.daemon, f"kvmilld on {self.name}")

    def kill_daemon(self):
        self.daemon.kill()
        self.daemon.wait()

    def members(self):
        done = subprocess.run(self.command(self.kvmill, "cluster", "members", "--json", "--server", self.server), capture_output=True,
                              text=True, timeout=SECONDS, check=False)
        if done.returncode:
            raise DemoError(f"kvmill cluster members on {self.name}: {done.stderr}{self.log_tail()}")
        return {member["id"]: member["incarnation"] for member in json.loads(done.stdout)["members"]}

    def engine(self, *arguments):
        return self.start(sys.executable, ENGINE, arguments[0], self.server, *arguments[1:], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE)


def wait_members(nodes):
    """Until each of them knows just these."""
    want, end = {node.name: node.ready["boot_id"] for node in nodes}, time.monotonic() + SECONDS
    while not all(node.members() == want for node in nodes):
        if time.monotonic() > end:
            raise DemoError(f"the nodes do not agree on their members within {SECONDS} s")
        time.sleep(0.1)


def prompt_prefix():
    extra = os.environ.get("KVMILL_EXTRA_DATA")
    for folder in (os.path.join(extra, "kv"), extra) if extra else ():
        found = sorted(glob.glob(os.path.join(folder, "*L00_k.npy")))
        if found:
            return found[0][:-len("L00_k.npy")]
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return os.path.join(root, "tests/data/tiny-lm-kv/retrieval_")


def hand_over(a, b, kv):
    """Prefill on a, decode on b meanwhile, a killed after the pull."""
    step("Prefill on node a, decode on node b: a ticket promises the prompt's blocks, which come layer by layer while they are computed")
    decode = b.engine("decode", kv)
    read_json(decode, f"the decode process ({b.log_tail()})")
    prefill = a.engine("prefill", kv)
    promise = read_json(prefill, "the prefill process")
    decode.stdin.write(promise["ticket"].encode() + b"\n")
    put = read_json(prefill, "the prefill process")
    got = read_json(decode, f"the decode process ({b.log_tail()})")
    first, last, layers = got["came"][0], got["came"][-1], len(got["came"])
    layer_ms = 1e3 * (put["computed"][-1] - put["computed"][0]) / (layers - 1)
    times = {"before_end_ms": put["computed"][-1] - first, "stored_ms": put["stored"] - put["computed"][-1],
             "after_stored_ms": last - put["stored"], "sealed_ms": got["sealed"] - put["stored"]}
    times = {name: 1e3 * seconds for name, seconds in times.items()}
    print(f"{os.path.basename(kv)}*: {promise['blocks']} blocks of {layers} layers; node b has all of them, "
          f"{got['bytes'] / 2**20:.2f} MiB, every page verified\n"
          f"layer 1 was on node b {times['before_end_ms']:.0f} ms before the last one was computed (each takes {layer_ms:.0f} ms)\n"
          f"layer {layers} was stored on node a {times['stored_ms']:.1f} ms after it was computed, and on node b "
          f"{times['after_stored_ms']:.1f} ms after that (sealed {times['sealed_ms']:.1f} ms)")
    if got["blocks"] != promise["blocks"]:
        raise DemoError(f"node b has {got['blocks']} blocks, node a promised {promise['blocks']}")
    if times["before_end_ms"] <= 0:
        raise DemoError("no layer came while others were computed")
    step("kill -9 of node a, and of the engine there")
    a.kill_daemon()
    prefill.kill()
    prefill.wait()
    decode.stdin.write(b"\n")
    attended = read_json(decode, "the decode process")
    decode.wait()
    print(f"node b attends to {attended['tokens']} tokens of {attended['layers']} layers in its own daemon's memory: "
          f"{100 * attended['output_error']:.2f} % off the outputs over the 16-bit K and V (k4v2 tiles; the queries are random)")
    if not 0 < attended["output_error"] < 0.5:
        raise DemoError("that makes no sense")
    return {"blocks": promise["blocks"], "pulled_bytes": got["bytes"], "layer_ms": layer_ms, **times, "tokens": attended["tokens"],
            "output_error": attended["output_error"]}


def load_and_kill(nodes, start_daemon, kv):
    """Engines on a and b use prompts that c stored, and c is killed meanwhile."""
    a, b, c = nodes
    filled = c.engine("fill", kv, str(PROMPTS))
    blocks = read_json(filled, "the process that fills node c")["blocks"]
    filled.wait()
    step(f"Load: {PROMPTS} prompts, {blocks} blocks stored on node c; an engine on a and one on b use them, and store what is missing")
    loads = {node.name: node.engine("load", kv, str(PROMPTS), str(seed)) for seed, node in enumerate((a, b), 1)}
    lines, events = [], {}
    print("   s  engine  prompts  blocks hit  missed  wrong bytes  errors  slowest answer")

    def watch(seconds):
        """So long after each engine has said something."""
        silent, end = set(loads), time.monotonic() + SECONDS
        while time.monotonic() < end:
            ready, _, _ = select.select([load.stdout for load in loads.values()], [], [], max(0.0, end - time.monotonic()))
            for name, load in loads.items():
                if load.stdout not in ready:
                    continue
                said = read_json(load, f"the load on {name}")
                if silent and not silent.difference({name}):
                    end = time.monotonic() + seconds
                silent.discard(name)
                lines.append({**said, "engine": name, "time": said["time"] - start})
                print(f"{said['time'] - start:4.0f}  {name:6}  {said['prompts']:7}  {said['hits']:10}  {said['misses']:6}  "
                      f"{said['wrong']:11}  {said['errors']:6}  {said['slowest_ms']:.0f} ms  {said['error']}", flush=True)
    start = time.monotonic()
    watch(LOAD_BEFORE)
    c.kill_daemon()
    events["killed"] = time.monotonic() - start
    print(f"{events['killed']:4.0f}  kill -9 of node c")
    watch(LOAD_AFTER)
    wait_members((a, b))
    start_daemon(c)
    events["restarted"] = time.monotonic() - start
    print(f"{events['restarted']:4.0f}  node c is started again, on its disk")
    watch(LOAD_RESTARTED)
    c.wait_ready()
    wait_members(nodes)
    for load in loads.values():
        load.stdin.close()
        load.wait()
    total = {name: sum(line[name] for line in lines) for name in ("prompts", "hits", "misses", "wrong", "errors")}
    lost = sum(line["misses"] for line in lines if line["time"] > events["killed"])
    slowest = max(line["slowest_ms"] for line in lines)
    step("What was lost")
    print(f"{lost} blocks were misses after the kill and computed again; wrong bytes: {total['wrong']}, failed requests: "
          f"{total['errors']}; the slowest answer took {slowest:.0f} ms")
    if total["wrong"] or total["errors"] or not total["hits"]:
        raise DemoError(f"not only misses: {total}")
    return {"lost_blocks": lost, "slowest_ms": slowest, **total, **events}


def run(arguments, folder, hosts):
    kv = prompt_prefix()
    step(f"etcd and three daemons, each in a network namespace of its own ({folder})")
    etcd = Host(folder, "etcd", 1)
    hosts.append(etcd)
    etcd.ip("link", "add", "bridge", "type", "bridge")
    etcd.ip("addr", "add", etcd.address + "/24", "dev", "bridge")
    etcd.ip("link", "set", "bridge", "up")
    client, peer = f"http://{etcd.address}:2379", f"http://{etcd.address}:2380"
    etcd.process = etcd.start(arguments.etcd, "--data-dir", os.path.join(etcd.folder, "data"), "--listen-client-urls", client,
                              "--advertise-client-urls", client, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                              "--initial-cluster", f"default={peer}", stdout=subprocess.DEVNULL)
    nodes = []
    for number, name in enumerate("abc", 2):
        nodes.append(Node(folder, name, number))
        hosts.append(nodes[-1])
        nodes[-1].plug_into(etcd)

    def start_daemon(node):
        node.start_daemon(arguments.bin_dir, etcd.address + ":2379")
    for node in nodes:
        start_daemon(node)
    for node in nodes:
        node.wait_ready()
    wait_members(nodes)
    print("members: " + ", ".join(f"{node.name} at {node.ready['listen']}" for node in nodes))
    report = {"hand_over": hand_over(nodes[0], nodes[1], kv)}
    start_daemon(nodes[0])
    nodes[0].wait_ready()
    wait_members(nodes)
    report["load"] = load_and_kill(nodes, start_daemon, kv)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=2)
            file.write("\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin-dir", required=True)
    parser.add_argument("--etcd", default="etcd", help="the program")
    parser.add_argument("--json", metavar="FILE", help="write the numbers there")
    arguments = parser.parse_args()
    arguments.bin_dir = os.path.abspath(arguments.bin_dir)
    if os.geteuid() != 0:
        print("cluster-demo: needs root: each node gets a network namespace of its own", file=sys.stderr)
        return CANNOT
    folder, hosts = tempfile.mkdtemp(prefix="kvmill-cluster-"), []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # So that the clean-up below runs.
    try:
        run(arguments, folder, hosts)
        return 0
    except DemoError as error:
        print(f"\ncluster-demo: {error}", file=sys.stderr)
        for host in hosts:
            if os.path.exists(os.path.join(host.folder, "log")):
                print(f"log of {host.name}:\n{host.log_tail()}", file=sys.stderr)
        return 1
    finally:
        for host in hosts:
            for process in (getattr(host, "daemon", None), getattr(host, "process", None), host.holder):
                if process is not None:
                    process.kill()
                    process.wait()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
