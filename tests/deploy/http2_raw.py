"""gRPC by hand, as far as a test wants to say what no client says: one request over a plain TCP connection, without a library.

HTTP/2 with headers that are not compressed (RFC 7541, 6.2.2) needs nothing but a socket.
"""
import select
import socket

DATA, HEADERS, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 4, 6, 8
END_STREAM, END_HEADERS, ACK = 1, 4, 1


def frame(kind, flags, stream, payload=b""):
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def literal(name, value):
    return b"\0" + b"".join(bytes([len(part)]) + part for part in (name.encode(), value.encode()))


def varint(number):
    out = b""
    while number > 127:
        out, number = out + bytes([number & 127 | 128]), number >> 7
    return out + bytes([number])


def field_bytes(number, value):
    """Of a message of Protocol Buffers."""
    return varint(number << 3 | 2) + varint(len(value)) + value


def fields(message):
    """{number: values} of a message: numbers, and bytes."""
    found, at = {}, 0

    def number():
        nonlocal at
        value = shift = 0
        while True:
            at += 1
            value |= (message[at - 1] & 127) << shift
            shift += 7
            if message[at - 1] < 128:
                return value

    while at < len(message):
        tag = number()
        kind = tag & 7
        if kind == 0:
            value = number()
        else:
            size = {1: 8, 5: 4}.get(kind) or number()
            value, at = message[at:at + size], at + size
        found.setdefault(tag >> 3, []).append(value)
    return found


class Call:
    """A call of `method`, with a message or, while this lives, waiting for one. The server may send 64 KiB that next() has not asked for."""

    def __init__(self, address, method, message=None):
        host, port = address.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)), timeout=60)
        self.came = self.data = self.ended = b""
        self.unread = 0  # Bytes for which the server has no window again.
        headers = b"".join(literal(*pair) for pair in (
            (":method", "POST"), (":scheme", "http"), (":path", method), (":authority", "localhost"),
            ("content-type", "application/grpc"), ("te", "trailers")))
        text = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0) + frame(HEADERS, END_HEADERS, 1, headers)
        if message is not None:
            text += frame(DATA, END_STREAM, 1, b"\0" + len(message).to_bytes(4, "big") + message)
        self.socket.sendall(text)

    def read_frame(self):
        while len(self.came) < 9 or len(self.came) < 9 + int.from_bytes(self.came[:3], "big"):
            more = self.socket.recv(1 << 16)
            if not more:
                raise AssertionError("the connection ended before the call")
            self.came += more
        size, kind, flags = int.from_bytes(self.came[:3], "big"), self.came[3], self.came[4]
        payload, self.came = self.came[9:9 + size], self.came[9 + size:]
        if kind == SETTINGS and not flags & ACK:
            self.socket.sendall(frame(SETTINGS, ACK, 0))
        if kind == PING and not flags & ACK:
            self.socket.sendall(frame(PING, ACK, 0, payload))
        if kind == DATA:
            self.data += payload
            self.unread += size
        if flags & END_STREAM and kind in (DATA, HEADERS):
            self.ended = payload

    def next(self):
        """The next message of the server."""
        while len(self.data) < 5 or len(self.data) < 5 + int.from_bytes(self.data[1:5], "big"):
            if self.ended:
                raise AssertionError(f"the call ended: {self.ended!r}")
            if self.unread > 0:
                more = self.unread.to_bytes(4, "big")
                self.socket.sendall(frame(WINDOW_UPDATE, 0, 0, more) + frame(WINDOW_UPDATE, 0, 1, more))
                self.unread = 0
            self.read_frame()
        size = int.from_bytes(self.data[1:5], "big")
        message, self.data = self.data[5:5 + size], self.data[5 + size:]
        return fields(message)

    def stay(self):
        """Answers pings, and asks for nothing: of those who do not answer within 30 s the daemon takes leave."""
        while select.select([self.socket], [], [], 0)[0]:
            self.read_frame()

    def wait(self):
        """Until the end of the call: the headers it ended with, as they came."""
        while not self.ended:
            self.read_frame()
        return self.ended

    def close(self):
        self.socket.close()
