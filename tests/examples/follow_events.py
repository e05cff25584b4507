"""Follows the events that kvmilld publishes (--events, --events-replay), as a router does: docs/events.md.

    follow_events.py tcp://HOST:PORT tcp://HOST:PORT

prints how many blocks are where, whenever that changes. Wants python3-zmq and python3-msgpack.
"""
import struct
import sys

import msgpack
import zmq

END = b"\xff" * 8  # -1.


def replay(context, address, first, bare):
    """(sequence, payload) of the messages from `first` on, or of what is here now when that one is not kept."""
    socket = context.socket(zmq.DEALER)  # One request has many answers, which REQ does not take.
    socket.connect(address)
    try:
        socket.send_multipart([b"", struct.pack(">Q", first)])
        while True:
            if not socket.poll(60_000):
                raise TimeoutError(f"no answer from {address}")
            sequence, payload = socket.recv_multipart()[1 if bare else 2:]  # Behind an empty frame, and the topic.
            if sequence == END:
                return
            yield struct.unpack(">Q", sequence)[0], payload
    finally:
        socket.close(linger=0)


def apply(payload, index):
    """`index` is a set of (hash, medium). The same block may be in several media."""
    _, events, _ = msgpack.unpackb(payload)
    for event in events:
        if event[0] == "BlockStored":
            index.update((one, event[6]) for one in event[1])
        elif event[0] == "BlockRemoved":
            index.difference_update((one, event[2]) for one in event[1])
        else:  # AllBlocksCleared
            index.clear()


def follow(live, replays, bare=False, until=lambda index: False, changed=lambda index: None):
    """Returns the index when `until` says so."""
    context = zmq.Context.instance()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(live)
    index, last, newest = set(), None, None
    try:
        while True:
            if socket.poll(1000):
                _, sequence, payload = socket.recv_multipart()
                sequence = struct.unpack(">Q", sequence)[0]
                if newest is not None and sequence < newest:
                    last = None  # The daemon was restarted: its first message says that all is void.
                newest = sequence
                if sequence == (0 if last is None else last + 1):
                    apply(payload, index)
                    last = sequence
            if newest is None or last is None or last < newest:  # Something was missed.
                for sequence, payload in replay(context, replays, 0 if last is None else last + 1, bare):
                    apply(payload, index)  # A gap begins with AllBlocksCleared, and what is here follows.
                    last = sequence
            changed(index)
            if until(index):
                return index
    finally:
        socket.close(linger=0)


def main():
    said = {}

    def changed(index):
        counts = {medium: sum(1 for _, where in index if where == medium) for medium in ("GPU", "CPU", "DISK")}
        if counts != said:
            said.update(counts)
            print(counts, flush=True)

    follow(*sys.argv[1:3], changed=changed)


if __name__ == "__main__":
    main()
