#!/usr/bin/env python3
"""`kvmill top` on a terminal, in a pipe, and while its daemon comes and goes (ctest `top_test`)."""
import os
import re
import signal
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import cli_support as support  # noqa: E402
from cli_support import Case, Daemon, gaussian  # noqa: E402
from terminal import OnTerminal  # noqa: E402


class Top(Case):
    def setUp(self):
        super().setUp()
        self.daemon = Daemon()
        self.addCleanup(self.daemon.remove)
        self.addCleanup(self.daemon.stop)
        self.server = self.daemon.server

    def command(self, *flags):
        return [os.path.join(support.BIN_DIR, "kvmill"), "top", "--interval", "200ms", "--server", self.server, *flags]

    def top(self, *flags, command=None, **how):
        on = OnTerminal(command or self.command(*flags), **how)
        self.addCleanup(on.close)
        return on

    def put(self, name):
        for kind in "kv":
            self.write(f"pL00_{kind}.npy", gaussian(512, 1, 64, 1))
        self.kvmill("put", "--namespace", name, "--sequence", "s", "--format", "k4v2_g128", "--kv", self.path("p"))
        self.kvmill("lookup", "--namespace", name, "--sequence", "s")

    def test_shows_what_happens_follows_the_size_and_leaves_by_q(self):
        on = self.top()
        # A frame may arrive in parts.
        texts = ("kvmill top", self.server, "boot " + self.daemon.ready["boot_id"][:8], "host [", "disk [", "0 % ",
                 "of 256.0 MiB", "hit rate", "sessions", "compression  -")
        screen = on.wait_for(lambda s: all(text in s.text() for text in texts))
        self.assertTrue(screen.alternate)
        on.wait_for(lambda s: re.search(r"^stored +0 blocks/s", s.text(), re.MULTILINE))
        self.put("shown")
        seen = set()

        def everything(screen):
            text = screen.text()
            seen.update(name for name, pattern in {
                "stored": r"^stored +[1-9][\d.]* blocks/s", "in": r"^inline grpc +in [1-9]",
                "hit rate": r"^hit rate +\d+\.\d % +\d+\.\d % since start", "blocks": r"4 blocks",
                "compression": r"^compression +4\.\d\d"}.items() if re.search(pattern, text, re.MULTILINE))
            return len(seen) == 5

        try:
            on.wait_for(everything)
        except AssertionError as error:
            raise AssertionError(f"seen only {seen}") from error

        for columns, rows in ((40, 12), (132, 50), (80, 24)):
            on.resize(columns, rows)
            on.wait_for(lambda s: s.lines()[0].startswith("kvmill top")
                        and any(line.startswith("disk [") for line in s.lines())
                        and (rows < 24 or "unwritten" in s.text()))
        self.assertFalse(on.restored())
        on.type(b"xq")
        self.assertEqual(on.wait_exit(), 0)
        self.assertTrue(on.restored())

    def test_a_daemon_that_goes_and_comes_back_is_shown_as_such(self):
        before = self.daemon.ready["boot_id"][:8]
        on = self.top()
        on.wait_for("boot " + before)
        on.wait_for("blocks/s")
        self.daemon.kill_hard()
        on.wait_for("no answer for")
        on.wait_for("trying again")
        on.wait_for("lookups      -")
        self.assertIn(b"\x1b[31m", on.screen.raw, "an alarm is red")
        self.daemon.start()
        on.wait_for("boot " + self.daemon.ready["boot_id"][:8])
        on.wait_for(f"was restarted; its boot before was {before}")
        on.wait_for(lambda s: "no answer" not in s.text() and re.search(r"lookups +0/s", s.text()))
        # One that hangs does not hang the keys.
        self.daemon.process.send_signal(signal.SIGSTOP)
        self.addCleanup(self.daemon.process.send_signal, signal.SIGCONT)
        on.wait_for("waiting")
        on.type(b"\x03")
        self.assertEqual(on.wait_exit(seconds=10), 0)
        self.assertTrue(on.restored())
        self.daemon.process.send_signal(signal.SIGCONT)

    def test_without_a_daemon_it_waits_for_one_and_no_color_is_heard(self):
        self.daemon.stop()
        on = self.top(NO_COLOR="1")
        on.wait_for("trying again")
        self.assertNotIn("hit rate", on.screen.text())
        self.assertNotIn(b"\x1b[31m", on.screen.raw)
        self.daemon.start()
        on.wait_for("hit rate")
        self.assertNotIn("restarted", on.screen.text())
        on.process.terminate()
        self.assertEqual(on.wait_exit(), 0)
        self.assertTrue(on.restored())

    def test_stops_and_goes_on_like_any_program(self):
        # The shell has job control, so that the program is one of its jobs.
        on = self.top(command=["sh", "-m", "-c", '"$@"; fg; echo "code $?"', "sh", *self.command()])
        on.wait_for("hit rate")
        on.type(b"\x1a")
        on.wait_for(lambda s: re.search(rb"\?1049l.*\?1049h.*hit rate", s.raw, re.DOTALL) and s.alternate)
        on.type(b"q")
        on.wait_for("code 0")
        on.wait_exit()
        self.assertTrue(on.restored())

    def test_a_terminal_that_closes_ends_it(self):
        on = self.top()
        on.wait_for("hit rate")
        os.killpg(on.process.pid, signal.SIGHUP)
        self.assertEqual(on.wait_exit(), 0)

    def test_once_prints_one_frame_for_scripts(self):
        self.put("once")
        output = self.kvmill("top", "--once", "--interval", "200ms").output
        self.assertEqual(output.count("kvmill top"), 1)
        self.assertRegex(output, r"(?m)^stored +0 blocks/s")
        self.assertRegex(output, r"(?m)^hit rate +- +[1-9]\d*\.\d % since start")
        self.assertTrue(all(line.isascii() and line.isprintable() and len(line) <= 80 for line in output.splitlines()))
        # On a terminal as well.
        on = self.top("--once")
        self.assertEqual(on.wait_exit(), 0)
        self.assertNotIn(b"\x1b", on.screen.raw)
        self.daemon.stop()
        gone = self.kvmill("top", "--once", "--timeout", "2s", code=1)
        self.assertEqual((gone.output, gone.error.count("\n")), ("", 1))

    def test_in_a_pipe_frames_follow_one_another(self):
        with subprocess.Popen(self.command(), stdout=subprocess.PIPE, text=True) as process:
            lines = []
            # The first frames may come before the daemon's first answer.
            while (sum(line.startswith("kvmill top") for line in lines) < 3
                   or not any(line.startswith("hit rate") for line in lines)):
                lines.append(process.stdout.readline())
                self.assertNotEqual(lines[-1], "")
                self.assertLess(len(lines), 10000)
            self.assertTrue(all(line.rstrip("\n").isprintable() for line in lines))
            process.terminate()
            process.stdout.read()
            self.assertEqual(process.wait(timeout=30), 0)
        # Whoever has seen enough closes the pipe.
        with subprocess.Popen(self.command(), stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            process.stdout.close()
            self.assertIn(process.wait(timeout=30), (0, -signal.SIGPIPE))
        # A terminal that cannot move its cursor is no better.
        on = self.top(TERM="dumb")
        on.wait_for("hit rate")
        on.process.terminate()
        self.assertEqual(on.wait_exit(), 0)
        self.assertNotIn(b"\x1b", on.screen.raw)


if __name__ == "__main__":
    support.main()
