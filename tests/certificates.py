"""Certificates for tests in Python, made with openssl."""
import os
import subprocess

NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def openssl(*arguments):
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60)


class Authority:
    """One, in a folder that exists; `ca` is the path of its certificate."""

    def __init__(self, folder):
        self.folder, self.ca = folder, os.path.join(folder, "ca.pem")
        openssl("req", "-x509", *NEW_KEY, "-subj", "/CN=authority", "-days", "2", "-keyout", self.path("ca.key"), "-out", self.ca)

    def path(self, name):
        return os.path.join(self.folder, name)

    def issue(self, name, alternative):
        """NAME.pem and NAME.key in the folder, for both ends of a connection, in place of those that may be there: each is
        another file in one step, as who reads them meanwhile must have it. `alternative` as openssl's subjectAltName."""
        openssl("req", *NEW_KEY, "-subj", f"/CN={name}", "-keyout", self.path(f"{name}.key.new"), "-out", self.path(f"{name}.csr"))
        with open(self.path(f"{name}.extensions"), "w", encoding="utf-8") as file:
            file.write(f"subjectAltName={alternative}\n")
        openssl("x509", "-req", "-in", self.path(f"{name}.csr"), "-CA", self.ca, "-CAkey", self.path("ca.key"), "-CAcreateserial",
                "-days", "2", "-extfile", self.path(f"{name}.extensions"), "-out", self.path(f"{name}.pem.new"))
        for kind in ("key", "pem"):
            os.replace(self.path(f"{name}.{kind}.new"), self.path(f"{name}.{kind}"))
