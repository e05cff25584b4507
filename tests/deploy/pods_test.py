"""The daemon and engines as pods run them (ctest `pods_test`, root only).

Runs kvmilld with what the chart renders, in namespaces of its own for processes, network, mounts and IPC, as process 1,
as the chart's user and without capabilities, on folders that the init container's script prepared; and engines (`kvmill`)
in other namespaces, with the socket's folder mounted as deploy/kubernetes/engine.yaml mounts it.

pods_test.py --render PROGRAM --bin FOLDER [unittest arguments]
"""
import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest

import k8s_types
from chart_faults import daemon, kind, kvmilld

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
OPTIONS = None
SERVER = ["--server", "unix:/run/kvmill/kvmill.sock"]
VALUES = """
hostBytes: 128MiB
disk: {bytes: 1GiB}
drain: {timeout: 10s}
config: {encode_threads: 2}
"""
# As a container runtime sets up a container: its namespaces, its mounts, then the command in place of the shell.
CONTAINER = ["unshare", "--mount", "--pid", "--ipc", "--uts", "--net", "--fork", "--kill-child", "--propagation", "private",
             "/bin/sh", "-euc"]
ISOLATED = "mount -t proc none /proc && ip link set lo up && mount -t tmpfs none /run && mkdir /run/kvmill && "


def as_user(uid, gid, groups=()):
    """In front of a command: another user, no capability, and none to be had."""
    return ["setpriv", f"--reuid={uid}", f"--regid={gid}", f"--groups={','.join(map(str, groups))}" if groups else "--clear-groups",
            "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs",
            "--pdeathsig=KILL"]  # Another user forgets what --kill-child asked for.


class Pods:
    """A node: its folders, the programs, and what the chart says about the daemon's pod."""

    def __init__(self):
        self.folder = tempfile.mkdtemp()
        os.chmod(self.folder, 0o755)  # The daemon is another user.
        self.run, self.data, self.etc, self.bin = (self.path(name) for name in ("run", "data", "etc", "bin"))
        for path in (self.run, self.data, self.etc, self.bin):
            os.mkdir(path, 0o755)
        for program in ("kvmilld", "kvmill"):
            shutil.copy(os.path.join(OPTIONS.bin, program), self.bin)
        values = self.path("values.yaml")
        with open(values, "w", encoding="utf-8") as file:
            file.write(VALUES)
        said = subprocess.run([OPTIONS.render, os.path.join(ROOT, "deploy/helm/kvmill"), values], capture_output=True, text=True,
                              check=True)
        self.objects = k8s_types.load_all(said.stdout)
        self.config = kind(self.objects, "ConfigMap")["data"]["kvmill.yaml"]
        with open(os.path.join(self.etc, "kvmill.yaml"), "w", encoding="utf-8") as file:
            file.write(self.config)
        self.security = daemon(self.objects)["spec"]["securityContext"]
        self.process = None

    def path(self, name):
        return os.path.join(self.folder, name)

    def prepare(self):
        """The init container."""
        (init,) = daemon(self.objects)["spec"]["initContainers"]
        places = {"/run/kvmill": self.run, "/var/lib/kvmill": self.data}
        subprocess.run([places.get(word, word) for word in init["command"]], check=True)

    def start(self):
        """The daemon; returns when its pod would be ready."""
        args = [arg.replace("/etc/kvmill/config", self.etc).replace("$(KVMILL_NODE_NAME)", "node-7")
                for arg in kvmilld(self.objects)["args"]]
        mounts = (ISOLATED + f"mount --bind {self.run} /run/kvmill && mount -t tmpfs none /var/lib && mkdir /var/lib/kvmill && "
                  f"mount --bind {self.data} /var/lib/kvmill && ")
        command = [*as_user(self.security["runAsUser"], self.security["runAsGroup"]), os.path.join(self.bin, "kvmilld"), *args]
        with open(self.path("log"), "a", encoding="utf-8") as log:
            self.process = subprocess.Popen([*CONTAINER, mounts + 'exec "$@"', "sh", *command], stdout=subprocess.PIPE,
                                            stderr=log, text=True)
        line = self.process.stdout.readline()
        assert line, f"no ready line; exit code {self.process.wait(60)}:\n{self.logged()}"
        return json.loads(line)

    def logged(self):
        with open(self.path("log"), encoding="utf-8") as file:
            return file.read()[-4000:]

    def pid(self):
        """Of the daemon, as the node sees it."""
        with open(f"/proc/{self.process.pid}/task/{self.process.pid}/children", encoding="utf-8") as file:
            return int(file.read().split()[0])

    def probe(self, name):
        """HTTP status of a probe, asked in the network of the pod."""
        get = kvmilld(self.objects)[name]["httpGet"]
        ports = {p["name"]: p["containerPort"] for p in kvmilld(self.objects)["ports"]}
        code = ("import urllib.request,urllib.error,sys\ntry: print(urllib.request.urlopen(sys.argv[1], timeout=30).status)\n"
                "except urllib.error.HTTPError as error: print(error.code)")
        said = subprocess.run(["nsenter", "--net", "--target", str(self.pid()), sys.executable, "-c", code,
                               f"http://127.0.0.1:{ports[get['port']]}{get['path']}"], capture_output=True, text=True, check=True)
        return int(said.stdout)

    def engine(self, words, user=()):
        """Runs `kvmill` in a pod of its own."""
        mounts = ISOLATED + f"mount --bind {self.run} /run/kvmill && mount -o remount,ro,bind /run/kvmill && "
        return subprocess.run([*CONTAINER, mounts + 'exec "$@"', "sh", *user, os.path.join(self.bin, "kvmill"), *words],
                              capture_output=True, text=True, check=False, timeout=240)

    def stop(self):
        """What the kubelet does: SIGTERM, and no longer than the grace period."""
        os.kill(self.pid(), signal.SIGTERM)
        self.process.communicate(timeout=daemon(self.objects)["spec"]["terminationGracePeriodSeconds"])
        return self.process.returncode

    def close(self):
        if self.process is not None:
            self.process.kill()  # And with it the daemon, as its parent.
            self.process.communicate()
        shutil.rmtree(self.folder, ignore_errors=True)


class PodsTest(unittest.TestCase):
    def setUp(self):
        if os.geteuid() != 0:
            self.skipTest("makes namespaces: needs root")
        self.pods = Pods()
        self.addCleanup(self.pods.close)

    def ask(self, *words, user=()):
        said = self.pods.engine([*words, "--json", *SERVER], user)
        self.assertEqual(said.returncode, 0, said.stderr + self.pods.logged())
        return json.loads(said.stdout)

    def test_a_node_with_engines(self):
        pods = self.pods
        pods.prepare()
        ready = pods.start()
        self.assertEqual((ready["socket"], ready["data_dir"]), ("/run/kvmill/kvmill.sock", "/var/lib/kvmill"))
        self.assertEqual([pods.probe(name) for name in ("startupProbe", "livenessProbe", "readinessProbe")], [200] * 3)
        with open(f"/proc/{pods.pid()}/status", encoding="utf-8") as file:
            status = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
        self.assertEqual((status["Uid"].split()[1], int(status["CapEff"], 16), status["NSpid"].split()[-1]), ("10001", 0, "1"))

        # An engine that is root stores, another one finds and maps, in their own pods.
        prompt = ["--namespace", "demo", "--sequence", "s1"]
        put = self.ask("put", *prompt, "--format", "k4v2_g128", "--kv", os.path.join(ROOT, "tests/data/tiny-lm-kv/retrieval_"))
        self.assertGreater(put["blocks_stored"], 0)
        found = self.ask("lookup", *prompt)
        self.assertEqual(found["hit_blocks"], put["blocks_stored"])
        got = self.ask("get", *prompt, "--out", pods.path("out_"))
        self.assertEqual((got["blocks"], got["misses"]), (put["blocks_stored"], 0))
        mapped = self.ask("bench", "fetch", "--path", "map", "--bytes", "64KiB", "--count", "64")
        self.assertEqual(mapped["transport"], "shm")

        # Another user needs the group of the socket, and is a tenant of its own.
        group = pods.security["runAsGroup"]
        member = as_user(2000, 2000, [group])
        self.assertEqual(self.ask("ls", user=member), [])
        self.assertEqual(self.ask("bench", "fetch", "--path", "map", "--bytes", "64KiB", "--count", "64", user=member)["transport"], "shm")
        said = pods.engine(["stat", "--json", *SERVER, "--timeout", "20s"], as_user(2000, 2000))
        self.assertEqual(said.returncode, 1, said.stdout)
        # The daemon's own user shares blocks with root.
        same = self.ask("lookup", *prompt, user=as_user(pods.security["runAsUser"], group))
        self.assertEqual(same["hit_blocks"], put["blocks_stored"])

        # A pod that is replaced: ends by itself, and the next one on the node has the blocks.
        self.assertEqual(pods.stop(), 0, pods.logged())
        pods.prepare()
        again = pods.start()
        self.assertNotEqual(again["boot_id"], ready["boot_id"])
        self.assertEqual(self.ask("lookup", *prompt)["hit_blocks"], put["blocks_stored"])
        self.assertEqual(pods.stop(), 0, pods.logged())

    def test_folders_that_nobody_prepared_are_refused_in_one_line(self):
        pods = self.pods
        with self.assertRaisesRegex(AssertionError, "exit code 1:\n.*(kvmill.sock|/run/kvmill).*Permission denied"):
            pods.start()


def main():
    global OPTIONS
    parser = argparse.ArgumentParser()
    parser.add_argument("--render", required=True)
    parser.add_argument("--bin", required=True)
    OPTIONS, rest = parser.parse_known_args()
    unittest.main(argv=sys.argv[:1] + rest)


if __name__ == "__main__":
    main()
