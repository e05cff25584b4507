"""A program on a terminal of its own: what it shows there, and in which state it leaves it.

Screen understands what ncurses says to TERM=xterm, no more; anything else fails the test.
"""
import errno
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time

SEQUENCE = re.compile(rb"\x1b(?:\[([?>]?)([\d;]*)([A-Za-z@`])|\(B|[=>78M])|[\x00-\x1f]")
INCOMPLETE = re.compile(rb"\x1b(?:[\[(][?>\d;]*)?$")
IGNORED_MODES = {"1", "7", "12", "25", "34", "1034"}  # Keys, wrapping, the cursor's looks.


class Screen:
    """Rows of characters, as a terminal of this size would show them."""

    def __init__(self, columns, rows):
        self.on_frame = lambda: None  # The cursor goes back to the first row: what it wrote before is whole.
        self.alternate = False
        self.pending = b""
        self.raw = b""
        self.resize(columns, rows)

    def resize(self, columns, rows):
        self.columns, self.rows = columns, rows
        self.row = self.column = self.top = 0
        self.bottom = rows - 1  # Of the region that scrolls, as `top` is.
        self.cells = [[" "] * columns for _ in range(rows)]

    def lines(self):
        return ["".join(row).rstrip() for row in self.cells]

    def text(self):
        return "\n".join(self.lines())

    def feed(self, data):
        self.raw += data
        data = self.pending + data
        cut = INCOMPLETE.search(data)
        self.pending = data[cut.start():] if cut else b""
        data = data[:len(data) - len(self.pending)]
        at = 0
        for match in SEQUENCE.finditer(data):
            self.put(data[at:match.start()].decode("ascii"))
            if self.row > 0 and self.goes_to_first_row(match):
                self.on_frame()
            self.control(match)
            at = match.end()
        self.put(data[at:].decode("ascii"))

    def goes_to_first_row(self, match):
        if match.group(3) is None:
            return match.group(0) == b"\x1bM" and self.row == 1
        final, count = match.group(3), int(match.group(2).split(b";")[0] or 1)
        return final in b"Hd" and count == 1 or final == b"A" and count >= self.row

    def put(self, text):
        assert "\x1b" not in text, repr(text)
        for character in text:
            if self.row < self.rows and self.column < self.columns:
                self.cells[self.row][self.column] = character
            self.last = character
            self.column += 1

    def insert_lines(self, row, count):
        for _ in range(count):
            self.cells.insert(row, [" "] * self.columns)
            del self.cells[self.bottom + 1]

    def delete_lines(self, row, count):
        for _ in range(count):
            self.cells.insert(self.bottom + 1, [" "] * self.columns)
            del self.cells[row]

    def control(self, match):
        if match.group(3) is None:
            byte = match.group(0)
            if byte == b"\r":
                self.column = 0
            elif byte == b"\n":
                if self.row == self.bottom:
                    self.delete_lines(self.top, 1)
                self.row += self.row not in (self.bottom, self.rows - 1)
            elif byte == b"\b":
                self.column = max(self.column - 1, 0)
            elif byte == b"\x1bM":
                if self.row == self.top:
                    self.insert_lines(self.top, 1)
                self.row -= self.row not in (self.top, 0)
            else:
                assert byte in (b"\x1b(B", b"\x1b=", b"\x1b>", b"\x1b7", b"\x1b8"), byte
            return
        private, arguments, final = (group.decode() for group in match.groups())
        numbers = [int(n) if n else 0 for n in arguments.split(";")]
        count = numbers[0] or 1
        row = self.cells[self.row] if self.row < self.rows else []
        if private:
            assert final in "hl", match.group(0)
            for mode in arguments.split(";"):
                if mode == "1049":
                    self.alternate = final == "h"
                else:
                    assert mode in IGNORED_MODES, match.group(0)
        elif final == "H":
            self.row, self.column = count - 1, (numbers[1] if len(numbers) > 1 else 1) - 1
        elif final == "d":
            self.row = count - 1
        elif final in "G`":
            self.column = count - 1
        elif final in "ABCD":
            down, right = {"A": (-1, 0), "B": (1, 0), "C": (0, 1), "D": (0, -1)}[final]
            self.row, self.column = self.row + down * count, self.column + right * count
        elif final == "J":
            first = 0 if numbers[0] == 2 else self.row + 1
            if numbers[0] != 2:
                row[self.column:] = [" "] * len(row[self.column:])
            for r in range(first, self.rows):
                self.cells[r] = [" "] * self.columns
        elif final == "K":
            if numbers[0] == 1:
                row[:self.column + 1] = [" "] * (self.column + 1)
            else:
                row[self.column:] = [" "] * len(row[self.column:])
        elif final == "X":
            row[self.column:self.column + count] = [" "] * len(row[self.column:self.column + count])
        elif final == "b":
            self.put(self.last * count)
        elif final == "P":
            row[self.column:] = row[self.column + count:] + [" "] * min(count, len(row[self.column:]))
        elif final == "@":
            row[self.column:] = ([" "] * count + row[self.column:])[:len(row[self.column:])]
        elif final == "L":
            self.insert_lines(self.row, count)
        elif final == "M":
            self.delete_lines(self.row, count)
        elif final == "r":
            self.top, self.bottom = count - 1, (numbers[1] if len(numbers) > 1 else self.rows) - 1
            self.row = self.column = 0
        else:
            assert final in "mlht", match.group(0)


class OnTerminal:
    """A command with a terminal of `columns` x `rows` that is its own."""

    def __init__(self, command, columns=100, rows=30, **environment):
        self.master, self.slave = pty.openpty()
        self.screen = Screen(columns, rows)
        self.resize(columns, rows)
        self.before = termios.tcgetattr(self.slave)
        environment = {**os.environ, "TERM": "xterm", "LC_ALL": "C", **environment}
        for name in ("NO_COLOR", "COLUMNS", "LINES"):
            if name not in environment or name in os.environ:
                environment.pop(name, None)

        def own_terminal():
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(command, stdin=self.slave, stdout=self.slave, stderr=self.slave,
                                        env=environment, start_new_session=True, preexec_fn=own_terminal)

    def resize(self, columns, rows):
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.screen.resize(columns, rows)

    def type(self, keys):
        os.write(self.master, keys)

    def read(self, seconds):
        """What comes within the time, to the screen; False when nothing came."""
        if not select.select([self.master], [], [], seconds)[0]:
            return False
        try:
            self.screen.feed(os.read(self.master, 65536))
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return False
        return True

    def wait_for(self, what, seconds=30):
        """Until `what` (text, or a function of the screen) was to be seen, be it for one frame of many that come at once."""
        seen = (lambda screen: what in screen.text()) if isinstance(what, str) else what
        deadline = time.monotonic() + seconds
        found = seen(self.screen)

        def look():
            nonlocal found
            found = found or seen(self.screen)

        self.screen.on_frame = look
        while not found:
            if time.monotonic() > deadline or (not self.read(0.2) and self.process.poll() is not None):
                raise AssertionError(f"not seen: {what}; exit {self.process.poll()}; the screen:\n{self.screen.text()}")
            look()
        self.screen.on_frame = lambda: None
        return self.screen

    def wait_exit(self, seconds=30):
        """The exit code, after everything was read."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            self.read(0.05)
        code = self.process.wait(timeout=1)
        while self.read(0):
            pass
        return code

    def restored(self):
        return termios.tcgetattr(self.slave) == self.before and not self.screen.alternate

    def close(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        os.close(self.master)
        os.close(self.slave)
