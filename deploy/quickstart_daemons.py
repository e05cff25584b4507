"""What deploy/quickstart_job.py stands on: daemons and an etcd of its own, one-line commands, tables."""
import json
import os
import shutil
import signal
import socket
import subprocess
import time

READY_SECONDS = 60
COMMAND_SECONDS = 300  # Of a busy machine.


class JobError(Exception):
    """Something did not come out as it must; the text says what."""


def step(text):
    print(f"\n== {text}", flush=True)


def size(count):
    return f"{count / 2**20:.2f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


def table(rows):
    widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
    for row in rows:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


class Daemon:
    """A kvmilld that this program started; stopped by its process id, nothing else is touched."""

    def __init__(self, bin_dir, folder, *flags):
        self.program = os.path.join(bin_dir, "kvmilld")
        self.folder, self.flags = folder, flags
        self.socket = os.path.join(folder, "run", "kvmill.sock")
        self.log = os.path.join(folder, "kvmilld.log")
        self.process = None
        os.makedirs(os.path.join(folder, "run"), 0o750)

    def start(self):
        """Seconds until it was ready, and its ready line."""
        if not os.path.exists(self.program):
            raise JobError(f"there is no {self.program}; deploy/quickstart.sh builds it")
        begin = time.monotonic()
        command = [self.program, "--socket", self.socket, "--data-dir", os.path.join(self.folder, "data"),
                   "--host-bytes", "256MiB", "--disk-bytes", "1GiB", *self.flags]
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
    def __init__(self, bin_dir, path):
        self.program = os.path.join(bin_dir, "kvmill")
        self.server = "unix:" + path

    def __call__(self, *arguments):
        """Runs one command in a process of its own and returns its JSON."""
        command = [self.program, *arguments, "--json", "--server", self.server]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise JobError(f"{' '.join(command)}\ndid not end within {COMMAND_SECONDS} s") from None
        if result.returncode != 0:
            raise JobError(f"{' '.join(command)}\nended with {result.returncode}: {result.stderr.strip()}")
        return json.loads(result.stdout)


def free_ports(count):
    """Of the loopback, that nobody had a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class Etcd:
    """For the nodes of --cluster to find each other."""

    def __init__(self, program, folder):
        if shutil.which(program) is None:
            raise JobError(f"--cluster needs etcd, and there is no '{program}' (Debian: apt-get install etcd-server)")
        self.address, peer = (f"127.0.0.1:{port}" for port in free_ports(2))
        self.log = os.path.join(folder, "etcd.log")
        client, peer = "http://" + self.address, "http://" + peer
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [program, "--data-dir", os.path.join(folder, "etcd"), "--listen-client-urls", client,
                 "--advertise-client-urls", client, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                 "--initial-cluster", f"default={peer}"], stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

    def wait(self):
        host, port = self.address.split(":")
        end = time.monotonic() + READY_SECONDS
        while True:
            try:
                socket.create_connection((host, int(port)), timeout=1).close()
                return
            except OSError:
                if self.process.poll() is not None or time.monotonic() > end:
                    raise JobError(f"etcd does not answer; its log is {self.log}") from None
                time.sleep(0.05)

    def stop(self):
        self.process.kill()
        self.process.wait()
