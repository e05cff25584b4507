"""What happens to the blocks of a daemon, for who keeps an index of them: routers."""
from __future__ import annotations

import asyncio
import atexit
import dataclasses
import enum
import weakref
from typing import Any, Optional, Tuple

from kvmill import _calls, _native
from kvmill._errors import Code, FailedPreconditionError, error_of
from kvmill._types import Tier, Tls

_open: "weakref.WeakSet[Watch]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # Threads of the library that outlive the interpreter would report into nothing.
    for one in list(_open):
        one.close()


class EventKind(enum.IntEnum):
    """What happened to a block.

    STORED: it is here, in `tier`. MOVED: it was in `from_tier` and is in `tier`. REMOVED: it was in `tier` and is gone.
    CLEARED: of the namespace nothing is here any more.
    """

    STORED = 0
    MOVED = 1
    REMOVED = 2
    CLEARED = 3


@dataclasses.dataclass(frozen=True)
class WatchedNamespace:
    """What an event is about. `fingerprint`: lower-case hex."""

    name: str
    fingerprint: str
    model: str
    adapter_digest: str
    hash_scheme: str
    block_tokens: int


@dataclasses.dataclass(frozen=True)
class BlockEvent:
    """A change of one block.

    Attributes:
        key: Empty of CLEARED.
        parent: Of STORED: key of the block before it; empty when there is none or it is not known.
        token_count: Of STORED; less than the namespace's block_tokens: a tail.
    """

    kind: EventKind
    namespace: WatchedNamespace
    key: bytes
    parent: bytes
    tier: Tier
    from_tier: Tier
    token_count: int


@dataclasses.dataclass(frozen=True)
class EventPosition:
    """Where a reader is: `epoch` (lower-case hex) is the daemon's boot id, `sequence` the last event it was told."""

    epoch: str
    sequence: int


@dataclasses.dataclass(frozen=True)
class EventBatch:
    """Some events, in order; the first batch may have none, and says where the stream begins.

    Attributes:
        snapshot_begin: Before the events: what was known is void, and blocks that are here follow until snapshot_end.
        snapshot_end: After the events: those were all.
        position: Behind this batch, to begin with next time. None within a snapshot.
    """

    events: Tuple[BlockEvent, ...]
    snapshot_begin: bool
    snapshot_end: bool
    position: Optional[EventPosition]


def _batch(value: Any) -> EventBatch:
    begin, end, epoch, sequence, namespaces, events = value
    spaces = [WatchedNamespace(*fields) for fields in namespaces]
    return EventBatch(
        tuple(BlockEvent(EventKind(kind), spaces[space], key, parent, Tier(tier), Tier(from_tier), tokens)
              for kind, space, key, parent, tier, from_tier, tokens in events), begin, end,
        None if epoch is None else EventPosition(epoch, sequence))


class Watch:
    """A reader of events: an iterator, also an asynchronous one. Made by `kvmill.watch`.

    It belongs to one thread, or one event loop, save `close`. Batches wait in the daemon until they are asked for; who is
    too slow for what is kept there is given a snapshot.
    """

    def __init__(self, address: str, namespace: str, after: Optional[EventPosition], snapshot: bool, tls: Optional[Tls],
                 token: str) -> None:
        self._queue = _native.Queue()
        self._address = address
        self._end: Optional[Exception] = None
        self._native = _native.Watch(address, _calls.identity(tls, token), namespace, "" if after is None else after.epoch,
                                     0 if after is None else after.sequence, snapshot, self._queue)
        _open.add(self)

    def next(self, timeout: Optional[float] = None) -> Optional[EventBatch]:
        """The next batch; None when none came within `timeout` seconds (None: waits for ever). What cannot be mended is
        raised, by every later call as well: NotFoundError for a namespace that is unknown before anything was told,
        PermissionDeniedError, UnauthenticatedError, InvalidArgumentError; FailedPreconditionError once it is closed."""
        if self._end is not None:
            raise self._end
        if self.closed:
            raise FailedPreconditionError(Code.FAILED_PRECONDITION, "the watch is closed")
        return self._taken(self._queue.take(-1 if timeout is None else _calls.milliseconds(timeout) if timeout else 0))

    def _taken(self, event: Any) -> Optional[EventBatch]:
        if event is None:
            return None
        _, code, message, retry_after_ms, value, more = event
        if more:
            return _batch(value)
        self._end = error_of(code, message, retry_after_ms)
        if code == Code.CANCELLED:
            self._end = FailedPreconditionError(Code.FAILED_PRECONDITION, "the watch is closed")
        raise self._end

    @property
    def trouble(self) -> str:
        """While it waits to connect again: why; empty otherwise."""
        return self._native.trouble

    @property
    def closed(self) -> bool:
        return self._native.closed

    def close(self) -> None:
        """Ends it; who waits for a batch learns it. May be called again, and from any thread."""
        self._native.close()
        _open.discard(self)

    def __iter__(self) -> "Watch":
        return self

    def __next__(self) -> EventBatch:
        try:
            batch = self.next()
        except FailedPreconditionError:
            if self.closed:
                raise StopIteration from None
            raise
        assert batch is not None
        return batch

    def __aiter__(self) -> "Watch":
        return self

    async def __anext__(self) -> EventBatch:
        loop = asyncio.get_running_loop()
        while True:
            try:
                batch = self.next(0)
            except FailedPreconditionError:
                if self.closed:
                    raise StopAsyncIteration from None
                raise
            if batch is not None:
                return batch
            ready = loop.create_future()
            loop.add_reader(self._queue.fd, _wake, ready)
            try:
                await ready
            finally:
                loop.remove_reader(self._queue.fd)

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    async def __aenter__(self) -> "Watch":
        return self

    async def __aexit__(self, *error: Any) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.close)

    def __repr__(self) -> str:
        return f"<kvmill.Watch {self._address!r}{' closed' if self.closed else ''}>"

    def __reduce__(self) -> Any:
        raise TypeError("a Watch belongs to its process: pass the address and make one in each")


def _wake(ready: "asyncio.Future[None]") -> None:
    if not ready.done():
        ready.set_result(None)


def watch(address: str, namespace: str = "", *, after: Optional[EventPosition] = None, snapshot: bool = True,
          tls: Optional[Tls] = None, token: str = "") -> Watch:
    """Tells what happens to the blocks of a daemon, from what is there now on.

        index = {}
        with kvmill.watch("unix:/run/kvmill/kvmill.sock") as batches:
            for batch in batches:
                if batch.snapshot_begin:
                    index.clear()
                for event in batch.events: ...

    With asyncio `async with` and `async for`. Connections that break, and daemons that restart, are its business: it
    connects again and goes on where it was; when the daemon has not kept what follows there is a snapshot, whose first
    batch says that what was known is void. docs/events.md has the guarantees.

    Args:
        namespace: Only this one; empty: all that this caller may see.
        after: The last batch's position: goes on behind it, as far as that is known.
        snapshot: Without `after`: begins with what is there. Not: with what happens from now on.
        tls, token: Who this is, as for a Client.
    """
    return Watch(address, namespace, after, snapshot, tls, token)
