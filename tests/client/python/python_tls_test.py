#!/usr/bin/env python3
"""The Python package and a daemon that wants TLS (ctest `python_tls_test`): certificates, tokens, and what is said without.
python_tls_test.py --bin-dir DIR --source-dir DIR, with PYTHONPATH=build/release/python."""
import hashlib
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
            cls.files.path("node.key"), "--tenants", cls.files.path("tenants.yaml"))
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


if __name__ == "__main__":
    cli_support.main()
