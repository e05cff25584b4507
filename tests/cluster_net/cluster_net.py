"""A cluster of real processes for tests: etcd, daemons and clients, each host a network namespace of its own.

`Net` is the network (net_wire.cc): hosts numbered from 1, and links between them that can be cut, delayed and made lossy. Namespaces
have no name and every process is a child that dies with its parent, so whatever becomes of a test, nothing of it stays but
a temporary folder. `Etcd`, `Node` and `Load` are the processes; `run` is the main program of a test.
"""
import concurrent.futures
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback

SKIPPED = 77
READY_SECONDS = 60
COMMAND_SECONDS = 60
MUST = 40  # Seconds within which what must happen has, also on a busy machine.
LONG = os.environ.get("KVMILL_LONG") == "1"
# A third of it is the time between two renewals: long enough that a busy machine does not end leases.
LEASE = 3
GRACE = 6
# What a client may wait for an answer of a daemon that lives, whatever its peers do, and the machine that stood still. Far
# above what it should be (a block is asked for at two nodes, for 2 s each), since the machine may be busy, and far below what
# a call that hangs would take: three quarters of cluster_client's 20 s.
PATIENCE_MS = 8000
WHOLE_BLOCKS = 4  # Of a sequence of cluster_client; tails are found where they were stored.


class Failed(Exception):
    """Something did not come out as it must; the text says what."""


class Skipped(Exception):
    """The machine cannot do it; the text says what is missing."""


def check(condition, *what):
    if not condition:
        raise Failed(" ".join(str(w) for w in what))


class StandStill:
    """How long the machine stood still, or had no time for this program, which is then not the fault of what is tested."""

    STEP = 0.02
    NOTICED = 0.1

    def __init__(self):
        self.ends = []  # Pairs of time and seconds.
        threading.Thread(target=self.watch, daemon=True).start()

    def watch(self):
        last = time.monotonic()
        while True:
            time.sleep(self.STEP)
            now = time.monotonic()
            if now - last - self.STEP > self.NOTICED:
                self.ends.append((now, now - last - self.STEP))
            last = now

    def since(self, begin):
        """Seconds of it since then."""
        return sum(seconds for end, seconds in list(self.ends) if end > begin)


STAND_STILL = StandStill()


def until(seconds, condition, what, every=0.1):
    """Waits for a condition; seconds that it took."""
    begin = time.monotonic()
    while True:
        value = condition()
        took = time.monotonic() - begin
        if value:
            return took
        if took > seconds + STAND_STILL.since(begin):
            raise Failed(f"not within {seconds} s: {what() if callable(what) else what}")
        time.sleep(every)


def read_line(process, seconds, what):
    """A line of its standard output, which must be a pipe without Python's buffer."""
    text, end = b"", time.monotonic() + seconds
    while not text.endswith(b"\n"):
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            raise Failed(f"{what}: no answer within {seconds} s")
        more = os.read(process.stdout.fileno(), 1)
        if not more:
            return None
        text += more
    return text.decode()


def host_port(address, port):
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


class Programs:
    """Where they are."""

    def __init__(self, bin_dir, probe_dir, etcd="etcd", etcdctl="etcdctl"):
        self.kvmilld, self.kvmill = os.path.join(bin_dir, "kvmilld"), os.path.join(bin_dir, "kvmill")
        self.net_wire, self.client = os.path.join(probe_dir, "net_wire"), os.path.join(probe_dir, "cluster_client")
        self.etcd, self.etcdctl = etcd, etcdctl


class Net:
    """Hosts 1 to `count`."""

    def __init__(self, programs, count, seed=1):
        self.count = count
        self.process = subprocess.Popen([programs.net_wire, str(count), str(seed)], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)
        line = read_line(self.process, READY_SECONDS, "net_wire")
        if line is None:
            text = self.process.stderr.read().decode().strip()
            if self.process.wait() == SKIPPED:
                raise Skipped(f"network namespaces and TAP devices need root: {text}")
            raise Failed(text)
        self.namespaces = json.loads(line)["namespaces"]

    def close(self):
        self.process.kill()
        self.process.wait()

    @staticmethod
    def ipv4(host):
        return f"10.88.0.{host}"

    @staticmethod
    def ipv6(host):
        return f"fd88::{host:x}"

    def command(self, host, *command):
        """`command` on that host; dies with this program."""
        return ["setpriv", "--pdeathsig", "KILL", "nsenter", f"--net={self.namespaces[host - 1]}", "--", *command]

    def one_way(self, source, target, up=True, delay_ms=0.0, loss=0.0):
        self.process.stdin.write(f"link {source} {target} {'up' if up else 'down'} {int(delay_ms * 1000)} "
                                 f"{int(loss * 1e6)}\n".encode())
        check(read_line(self.process, 10, "net_wire") == "ok\n", "net_wire refused a link")

    def link(self, one, other, **what):
        self.one_way(one, other, **what)
        self.one_way(other, one, **what)

    def links_of(self, host, **what):
        for other in range(1, self.count + 1):
            if other != host:
                self.link(host, other, **what)

    def all_links(self, **what):
        for host in range(1, self.count + 1):
            for other in range(1, host):
                self.link(host, other, **what)


class Process:
    """One that can be killed, stopped and started again, with its log in a file."""

    def __init__(self, log):
        self.process, self.log_path = None, log

    def spawn(self, command, **options):
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(command, stderr=log, bufsize=0, **options)

    def alive(self):
        return self.process is not None and self.process.poll() is None

    def signal(self, number):
        self.process.send_signal(number)

    def stop(self):
        """SIGSTOP: it keeps its connections and says nothing."""
        self.signal(signal.SIGSTOP)

    def resume(self):
        self.signal(signal.SIGCONT)

    def kill(self):
        if self.process is None:
            return
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self.process = None

    def log(self):
        with open(self.log_path, encoding="utf-8", errors="replace") as file:
            return file.read()


class Etcd(Process):
    """One server, alone or of several."""

    def __init__(self, programs, net, host, folder, name="one", peers=None, address=None):
        os.makedirs(folder, exist_ok=True)
        super().__init__(os.path.join(folder, f"etcd-{name}.log"))
        self.programs, self.net, self.host, self.folder, self.name = programs, net, host, folder, name
        self.token, self.generation = "first", 0
        self.client, self.peer = host_port(address or net.ipv4(host), 2379), host_port(address or net.ipv4(host), 2380)
        self.peers = peers or {name: self.peer}

    def data(self):
        return os.path.join(self.folder, f"etcd-{self.name}-{self.generation}")

    def start(self, wait=True):
        self.spawn(self.net.command(
            self.host, self.programs.etcd, "--name", self.name, "--data-dir", self.data(), "--listen-client-urls",
            f"http://{self.client}", "--advertise-client-urls", f"http://{self.client}", "--listen-peer-urls", f"http://{self.peer}",
            "--initial-advertise-peer-urls", f"http://{self.peer}", "--initial-cluster",
            ",".join(f"{name}=http://{peer}" for name, peer in self.peers.items()), "--initial-cluster-token", self.token,
            # Leases of seconds are not made longer, and servers that are alone lead at once. Of several one that gets no
            # processor for a moment stays the leader.
            "--heartbeat-interval", "50", "--election-timeout", "250" if len(self.peers) == 1 else "1000"), stdout=subprocess.DEVNULL)
        if wait:
            self.wait()

    def wait(self):
        until(READY_SECONDS, self.healthy, lambda: f"etcd answers: {self.log()[-2000:]}", every=0.1)

    def healthy(self):
        check(self.alive(), "etcd ended:", self.log()[-2000:])
        return self.control("endpoint", "health", "--command-timeout", "1s", must=False) is not None

    def start_empty(self, same_id=False):
        """A cluster that has nothing in it; its id differs, unless `same_id`."""
        self.kill()
        self.generation += 1
        self.token += "" if same_id else "+"
        self.start()

    def control(self, *arguments, must=True):
        done = subprocess.run(self.net.command(self.host, self.programs.etcdctl, "--endpoints", f"http://{self.client}", *arguments),
                              capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
        if done.returncode != 0:
            check(not must, f"etcdctl {arguments}: {done.stderr}{done.stdout}")
            return None
        return done.stdout

    def revision(self):
        return json.loads(self.control("get", "/", "--limit", "1", "--write-out", "json"))["header"]["revision"]

    def leads(self):
        """Of several, whether it is the leader."""
        said = self.control("endpoint", "status", "--write-out", "json", must=False)
        status = json.loads(said)[0]["Status"] if said else None
        return status is not None and status["leader"] == status["header"]["member_id"]


class Node(Process):
    """A daemon on a host of its own. The folder holds its socket and its disk tier, and stays when it dies. With an `authority`
    (tests/certificates.py) it has a certificate: all nodes have one name."""

    def __init__(self, programs, net, host, folder, name, cluster, flags=(), address=None, port=7600, authority=None):
        self.folder = os.path.join(folder, name)
        os.makedirs(os.path.join(self.folder, "run"), 0o750)
        super().__init__(os.path.join(self.folder, "log"))
        self.programs, self.net, self.host, self.name = programs, net, host, name
        self.cluster, self.flags, self.ready = cluster, list(flags), None
        self.address = address or net.ipv4(host)
        self.listen = host_port(self.address, port)
        self.socket = os.path.join(self.folder, "run", "kvmill.sock")
        self.server = "unix:" + self.socket
        self.restarts, self.authority, self.tls = 0, authority, ["--insecure"]
        if authority is not None:
            self.renew()
            self.tls = ["--tls-ca", authority.ca, "--tls-cert", authority.path(f"{name}.pem"), "--tls-key", authority.path(f"{name}.key"),
                        "--tls-server-name", "node.example"]

    def renew(self):
        """Another certificate and key, in the files that it reads."""
        self.authority.issue(self.name, "DNS:node.example")

    def start(self, wait=True):
        ucx = [] if self.address == "::1" else ["--ucx", self.address]
        self.spawn(self.net.command(
            self.host, self.programs.kvmilld, "--socket", self.socket, "--data-dir", os.path.join(self.folder, "data"),
            "--host-bytes", "64MiB", "--huge-pages", "off", "--disk-bytes", "1GiB", "--listen", self.listen, *ucx, *self.tls,
            "--node-id", self.name, "--cluster", self.cluster, "--lease-ttl", f"{LEASE}s", "--member-grace", f"{GRACE}s", "--drain-timeout", "5s",
            *self.flags), stdout=subprocess.PIPE)
        if wait:
            self.wait()

    def wait(self):
        line = read_line(self.process, READY_SECONDS, f"kvmilld {self.name}")
        check(line is not None, f"kvmilld {self.name} did not start:", self.log()[-2000:])
        self.ready = json.loads(line)

    def restart(self):
        """After kill -9: at once, on the same folder, as another incarnation."""
        self.kill()
        self.restarts += 1
        self.start()

    def terminate(self):
        """SIGTERM; the seconds until it had ended well."""
        begin = time.monotonic()
        self.signal(signal.SIGTERM)
        code = self.process.wait(COMMAND_SECONDS)
        check(code == 0, f"kvmilld {self.name} ended with {code}:", self.log()[-2000:])
        self.kill()
        return time.monotonic() - begin

    def kvmill(self, *arguments, server=None):
        """One command of the command line on this host, against this daemon or another address: its JSON."""
        done = subprocess.run(self.net.command(self.host, self.programs.kvmill, *arguments, "--json", "--timeout", "20s", "--server",
                                               server or self.server),
                              capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
        check(done.returncode in (0, 3), f"kvmill {arguments} on {self.name}: exit code {done.returncode}: {done.stderr}", self.tail())
        return json.loads(done.stdout)

    def status(self):
        return self.kvmill("cluster", "status")

    def members(self):
        """{id: incarnation} as it knows them."""
        return {member["id"]: member["incarnation"] for member in self.status()["members"]}

    def once(self, mode, sets, first, count, server=None):
        """cluster_client fill or check: what it counted. Wrong bytes fail."""
        done = subprocess.run(self.net.command(self.host, self.programs.client, server or self.server, mode, sets, str(first),
                                               str(count)),
                              capture_output=True, text=True, timeout=2 * COMMAND_SECONDS, check=False)
        check(done.returncode == 0, f"cluster_client {mode} on {self.name}: {done.returncode}: {done.stdout}{done.stderr}", self.tail())
        return json.loads(done.stdout)

    def tail(self):
        return "\nlog of " + self.name + ":\n" + self.log()[-3000:] if os.path.exists(self.log_path) else ""


class Load(Process):
    """cluster_client load or read on a node's host."""

    def __init__(self, node, mode, sets, first, count, threads=1, pause_ms=5, seed=1):
        super().__init__(os.path.join(node.folder, f"load-{mode}-{seed}.log"))
        self.node, self.reported = node, time.monotonic()
        self.spawn(node.net.command(node.host, node.programs.client, node.server, mode, sets,
                                    *map(str, (first, count, threads, pause_ms, seed))),
                   stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.report()

    def report(self, sequences=0, hits=0):
        """What happened since the last one, at least so much, and for how long the machine stood still meanwhile."""
        begin = self.reported
        try:
            self.process.stdin.write(f"{sequences} {hits}\n".encode())
            line = read_line(self.process, 2 * READY_SECONDS, f"load on {self.node.name}")
        except BrokenPipeError:
            line = None
        if line is None or not line.startswith("{"):
            raise Failed(f"load on {self.node.name} ended with {self.process.wait()}: {line}{self.log()}")
        self.reported = time.monotonic()
        return {**json.loads(line), "stood_still_ms": 1e3 * STAND_STILL.since(begin)}

    def expect_well(self, what, hits=True, sequences=10, away=False):
        """Since the last report: it went on, nothing failed, and nobody waited for long; and unless its daemon may be `away`, that
        answered every call."""
        report = self.report(sequences, 1 if hits else 0)
        check(report["sequences"] >= sequences, what, f"load on {self.node.name} did nothing: {report}", self.node.tail())
        check(not report["errors"], what, f"load on {self.node.name}: {report['errors']} {report['first_error']}", self.node.tail())
        check(away or (not report["away"] and not report["dropped"]), what, f"load on {self.node.name}: no daemon: {report}",
              self.node.tail())
        for call in ("lookup_ms", "fetch_ms", "store_ms"):
            check(report[call]["max"] <= PATIENCE_MS + report["stood_still_ms"], what,
                  f"load on {self.node.name}: {call} {report[call]}", self.node.tail())
        check(not hits or report["hits"] > 0, what, f"load on {self.node.name} found nothing: {report}")
        return report


class Cluster:
    """etcd on the first hosts, then a daemon on each host. `ipv6`: they know no other addresses of each other."""

    def __init__(self, programs, folder, names="abc", flags=(), etcds=1, ipv6=False, seed=1, authority=None):
        self.programs, self.folder, self.loads, self.nodes, self.authority = programs, folder, {}, {}, authority
        self.net = Net(programs, etcds + len(names), seed)
        self.address = self.net.ipv6 if ipv6 else self.net.ipv4
        peers = {f"e{host}": host_port(self.address(host), 2380) for host in range(1, etcds + 1)}
        self.etcds = [Etcd(programs, self.net, host, folder, f"e{host}", peers, self.address(host)) for host in range(1, etcds + 1)]
        self.etcd = self.etcds[0]
        try:
            for etcd in self.etcds:
                etcd.start(wait=False)
            for etcd in self.etcds:
                etcd.wait()
            for number, name in enumerate(names):
                self.add(name, etcds + 1 + number, flags)
            for node in self.nodes.values():
                node.start(wait=False)
            for node in self.nodes.values():
                node.wait()
            self.expect_members(names, MUST)
        except BaseException:
            self.close()
            raise

    def __getitem__(self, name):
        return self.nodes[name]

    def add(self, name, host, flags=()):
        servers = ",".join(etcd.client for etcd in self.etcds)
        self.nodes[name] = Node(self.programs, self.net, host, self.folder, name, f"etcd://{servers}", flags, self.address(host),
                                authority=self.authority)
        return self.nodes[name]

    def expect_members(self, names, seconds, at=None, stale=False):
        """All of `at` (everybody) know these, with the incarnations that run, and are registered; the seconds until it was so."""
        want = {name: self.nodes[name].ready["boot_id"] for name in names}
        seen = {}

        def agree():
            for name in at or names:
                status = seen[name] = self.nodes[name].status()
                members = {member["id"]: member["incarnation"] for member in status["members"]}
                if members != want or status["stale"] != stale or (not stale and status["registration"] != "registered"):
                    return False
            return True
        return until(seconds, agree, lambda: f"members {want}, stale {stale}: {json.dumps(seen)}" +
                     "".join(self.nodes[name].tail() for name in at or names))

    def expect_unchanged(self, what, meanwhile):
        """`meanwhile` changes no members. Tried up to three times: a machine that stands still ends leases, too."""
        first = next(iter(self.nodes.values()))
        for _ in range(3):
            # Who registers anew is there at once, and changes once more when it has its new lease.
            version = [-1]

            def settled():
                before, version[0] = version[0], first.status()["version"]  # pylint: disable=cell-var-from-loop
                time.sleep(LEASE / 2)
                return version[0] == before  # pylint: disable=cell-var-from-loop
            until(MUST, settled, "members that stay as they are")
            meanwhile()
            self.expect_members(self.nodes, MUST)
            if first.status()["version"] == version[0]:
                return
        check(False, f"{what} changed the members")

    def start_loads(self, mode="load", count=30, **options):
        """On each host an engine with sequences of its own."""
        for name in self.nodes:
            self.start_load(name, mode, count, **options)

    def start_load(self, name, mode="load", count=30, sets=None, **options):
        self.loads[name] = Load(self.nodes[name], mode, sets or name, 0, count, **options)

    def expect_loads_well(self, names, what, hits=True):
        for name in names:
            self.loads[name].expect_well(what, hits)

    def forget_loads(self, names):
        """What happened until now does not count."""
        for name in names:
            self.loads[name].report()

    def expect_found(self, names, sets, count):
        """Until all of `names` have all whole blocks of the first `count` sequences of each set; the seconds."""
        want = WHOLE_BLOCKS * count * len(sets.split(","))
        seen = {}

        def all_found():
            for name in names:
                seen[name] = self.nodes[name].once("check", sets, 0, count)
                check(not seen[name]["errors"], f"{name}: {seen[name]}")
            return all(report["hits"] >= want for report in seen.values())
        return until(MUST, all_found, lambda: f"{want} hits: {seen}")

    def expect_no_crash(self):
        check(self.net.process.poll() is None, "net_wire ended")
        for node in self.nodes.values():
            check(node.process is None or node.alive(), f"kvmilld {node.name} ended:", node.tail())

    def close(self):
        for process in [*self.loads.values(), *self.nodes.values(), *self.etcds]:
            process.kill()
        self.net.close()


def run(title, scenarios, at_once=2):
    """Main program: TEST BIN_DIR PROBE_DIR ETCD ETCDCTL [NAME...]; runs the scenarios, or those named, some at once: they mostly wait."""
    bin_dir, probe_dir, etcd, etcdctl, *names = sys.argv[1:]
    programs = Programs(bin_dir, probe_dir, etcd, etcdctl)
    folder = tempfile.mkdtemp(prefix="kvmill-net-")

    def give_up(*_):
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)  # Children die with their parent.
    signal.signal(signal.SIGTERM, give_up)
    signal.signal(signal.SIGINT, give_up)

    def play(scenario):
        own = os.path.join(folder, scenario.__name__)
        os.mkdir(own)
        start = time.monotonic()
        try:
            said = scenario(programs, own)
        except Skipped as skipped:
            print(f"skipped: {skipped}")
            return SKIPPED
        except Exception as failed:  # pylint: disable=broad-except
            print(f"{title}: {scenario.__name__}: {failed if isinstance(failed, Failed) else traceback.format_exc()}", flush=True)
            return 1
        print(f"{time.monotonic() - start:6.1f} s  {scenario.__name__}{': ' + said if said else ''}", flush=True)
        return 0
    begin = time.monotonic()
    try:
        with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
            codes = list(pool.map(play, [s for s in scenarios if not names or s.__name__ in names]))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    check(codes, f"no such scenario: {names}")
    print(f"{title}: {time.monotonic() - begin:.0f} s")
    return 1 if 1 in codes else max(codes)
