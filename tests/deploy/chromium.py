"""A headless Chromium, driven over a pipe by its DevTools protocol. In a folder of its own; ends by its process id."""
import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time

WAIT_SECONDS = 120


class Chromium:
    def __init__(self, program):
        self.folder = tempfile.mkdtemp(prefix="kvmill-chromium-")
        self.events, self.last_id, self.buffer = [], 0, b""
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        # It reads from 3 and writes to 4. (Descriptors of two digits are bash's.)
        command = ["bash", "-c", f'exec "$@" 90<&{theirs_in} 91>&{theirs_out} 3<&90 4>&91', "bash", program, "--headless", "--no-sandbox",
                   "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking",
                   "--disable-component-update", "--disable-sync", "--disable-extensions", f"--user-data-dir={self.folder}/profile",
                   "--remote-debugging-pipe", "about:blank"]
        with open(os.path.join(self.folder, "log"), "wb") as log:
            self.process = subprocess.Popen(command, pass_fds=(theirs_in, theirs_out), stdout=log, stderr=log,
                                            env={**os.environ, "HOME": self.folder})
        os.close(theirs_in)
        os.close(theirs_out)
        self.to, self.from_ = ours_out, ours_in
        self.session = None
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")

    def message(self, deadline):
        while b"\0" not in self.buffer:
            if not select.select([self.from_], [], [], max(0, deadline - time.monotonic()))[0]:
                raise AssertionError("Chromium does not answer:\n" + self.log())
            more = os.read(self.from_, 1 << 16)
            if not more:
                raise AssertionError("Chromium ended:\n" + self.log())
            self.buffer += more
        text, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(text)

    def log(self):
        with open(os.path.join(self.folder, "log"), encoding="utf-8", errors="replace") as log:
            return log.read()[-4000:]

    def ask(self, method, **parameters):
        self.last_id += 1
        request = {"id": self.last_id, "method": method, "params": parameters}
        if self.session:
            request["sessionId"] = self.session
        os.write(self.to, json.dumps(request).encode() + b"\0")
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            said = self.message(deadline)
            if said.get("id") == self.last_id:
                assert "error" not in said, (method, parameters, said["error"])
                return said["result"]
            self.events.append(said)

    def run(self, expression):
        """The value of a JavaScript expression in the page."""
        said = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in said, said["exceptionDetails"]
        return said["result"].get("value")

    def wait(self, expression):
        deadline = time.monotonic() + WAIT_SECONDS
        while not self.run(expression):
            assert time.monotonic() < deadline, f"{expression} does not become true: {self.run('document.body.innerText')}"
            time.sleep(0.1)

    def open(self, url, width, height, mobile=False):
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        self.ask("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def press(self, key):
        code = {"Tab": 9, "Enter": 13, "ArrowDown": 40}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        self.ask("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", key=key, code=key, windowsVirtualKeyCode=code, **text)
        self.ask("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=code)

    def type(self, text):
        self.ask("Input.insertText", text=text)

    def screenshot(self, path):
        with open(path, "wb") as file:
            file.write(base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"]))

    def requested(self):
        """Addresses of all requests so far."""
        return [request["url"] for request in self.requests()]

    def requests(self):
        return [event["params"]["request"] for event in self.events if event.get("method") == "Network.requestWillBeSent"]

    def complaints(self):
        """What went to the console, and exceptions."""
        return [event["params"] for event in self.events
                if event.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")]

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.to)
        os.close(self.from_)
        shutil.rmtree(self.folder, ignore_errors=True)
