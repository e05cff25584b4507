#!/usr/bin/env python3
"""The Python package and a daemon that wants TLS (ctest `python_tls_test`): certificates, tokens, what is said without,
and what a request is known by in the daemon's log.
python_tls_test.py --bin-dir DIR --source-dir DIR, with PYTHONPATH=build/release/python."""
import asyncio
import hashlib
import json
import os
import shutil
import sys
import tempfile
import unittest

import kvmill
from python_support import cli_support, gaussian, spec

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
from certificates import Authority  # noqa: E402  # pylint: disable=wrong-import-position

TOKEN = "a-token-of-tests"


class Certificates(Authority):
    """An authority, a node of 127.0.0.1 and a client."""

    def __init__(self):
        super().__init__(tempfile.mkdtemp(prefix="kvmill-tls-test-"))
        self.issue("node", "IP:127.0.0.1")
        self.issue("client", "DNS:client.example")


class TlsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.files = Certificates()
        cls.addClassCleanup(shutil.rmtree, cls.files.folder)
        with open(cls.files.path("tenants.yaml"), "w", encoding="utf-8") as file:
            file.write("tenants:\n  a:\n    certificates: [client.example]\n  b:\n    tokens: [\"sha256:"
                       f"{hashlib.sha256(TOKEN.encode()).hexdigest()}\"]\n")
        cls.daemon = cli_support.Daemon(
            "--listen", "127.0.0.1:0", "--tls-ca", cls.files.ca, "--tls-cert", cls.files.path("node.pem"), "--tls-key",
            cls.files.path("node.key"), "--tenants", cls.files.path("tenants.yaml"), "--log-format", "json")
        cls.addClassCleanup(cls.daemon.remove)
        cls.addClassCleanup(cls.daemon.stop)
        cls.address = cls.daemon.ready["listen"]

    def test_a_certificate_and_a_token_are_two_tenants(self):
        tls = kvmill.Tls(self.files.ca, self.files.path("client.pem"), self.files.path("client.key"))
        with kvmill.Client(self.address, tls=tls) as by_certificate, \
                kvmill.Client(self.address, tls=kvmill.Tls(self.files.ca), token=TOKEN) as by_token:
            namespaces = [client.open_namespace("shared", spec()) for client in (by_certificate, by_token)]
            by_certificate.store(namespaces[0], [kvmill.Block(b"key", layers=gaussian(1))])
            self.assertEqual(by_certificate.lookup(namespaces[0], [b"key"]).hit_blocks, 1)
            self.assertEqual(by_token.lookup(namespaces[1], [b"key"]).hit_blocks, 0)

    def test_who_shows_nothing_or_too_little_is_told(self):
        with kvmill.Client(self.address, tls=kvmill.Tls(self.files.ca)) as nobody, \
                self.assertRaisesRegex(kvmill.UnauthenticatedError, "show a certificate, or a token"):
            nobody.stat()
        with kvmill.Client(self.address, tls=kvmill.Tls(self.files.ca), token="guess") as guesser, \
                self.assertRaisesRegex(kvmill.UnauthenticatedError, "the token is not one"):
            guesser.stat()
        with kvmill.Client(self.address) as plain, self.assertRaisesRegex(kvmill.UnavailableError, "wants TLS, most likely: give tls-ca"):
            plain.stat()
        with self.assertRaisesRegex(kvmill.FailedPreconditionError, "needs TLS"):
            kvmill.Client(self.address, token=TOKEN)
        with self.assertRaisesRegex(kvmill.InvalidArgumentError, "cannot be read"):
            kvmill.Client(self.address, tls=kvmill.Tls(self.files.path("none")))
        with self.assertRaisesRegex(kvmill.InvalidArgumentError, "zero character"):
            kvmill.Client(self.address, tls=kvmill.Tls("a\0b"))

    def line_of(self, request_id):
        """Of the daemon's log, the one that has this id; None when there is none."""
        with open(os.path.join(self.daemon.folder, "log"), encoding="utf-8") as log:
            lines = [json.loads(line) for line in log if line.startswith("{")]
        return next((line for line in lines if line.get("request_id") == request_id), None)

    def test_requests_are_known_in_the_daemons_log(self):
        trace_id, span_id = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
        traceparent = f"00-{trace_id}-{span_id}-01"
        tls = kvmill.Tls(self.files.ca)
        with kvmill.Client(self.address, tls=tls, token="guess") as guesser:
            with kvmill.request("p-1", traceparent=traceparent, tracestate="rojo=1"):
                with self.assertRaisesRegex(kvmill.UnauthenticatedError, r"\(request p-1\)"):
                    guesser.stat()
                with kvmill.request("p-2"), self.assertRaisesRegex(kvmill.UnauthenticatedError, r"\(request p-2\)"):
                    guesser.find_namespace("n")
            line = self.line_of("p-1")
            self.assertEqual((line["trace_id"], line["span_id"]), (trace_id, span_id))
            self.assertNotIn("trace_id", self.line_of("p-2"))
            # What is wrong is left out, and outside there is none: the daemon makes an id.
            for wrong in ("two words", "x" * 65, "a\0b", "\udcff"):
                with kvmill.request(wrong, traceparent="00-1"), \
                        self.assertRaisesRegex(kvmill.UnauthenticatedError, r"\(request [0-9a-f]{15}\)"):
                    guesser.stat()
            with self.assertRaisesRegex(kvmill.UnauthenticatedError, r"\(request [0-9a-f]{15}\)"):
                guesser.stat()
            with self.assertRaises(TypeError), kvmill.request(17):
                pass

        async def ask(client, name):
            with kvmill.request(name, traceparent=traceparent):
                await asyncio.sleep(0.01)  # Others' are set meanwhile.
                with self.assertRaisesRegex(kvmill.UnauthenticatedError, rf"\(request {name}\)"):
                    await client.stat()

        async def ask_all():
            async with kvmill.AsyncClient(self.address, tls=tls, token="guess") as client:
                await asyncio.gather(*(ask(client, f"task-{i}") for i in range(4)))

        asyncio.run(ask_all())
        for i in range(4):
            self.assertEqual(self.line_of(f"task-{i}")["trace_id"], trace_id)


if __name__ == "__main__":
    cli_support.main()
