"""The client that blocks."""
from __future__ import annotations

import collections
import contextlib
import os
import threading
import time
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple, Type, TypeVar, Union

from kvmill import _calls, _native
from kvmill._base import Base
from kvmill._calls import Call
from kvmill._engine import EngineGeometry, PageBlock
from kvmill._errors import Code, Error, FailedPreconditionError
from kvmill._mapped import Mapped
from kvmill._tickets import PromisedBlock, RedeemResult, RedeemUpdate
from kvmill._types import (Block, DataPath, EncodeIn, FetchResult, Frame, LookupResult, MapMemory, Namespace, NamespaceSpec,
                           SessionEvent, Stat, StoreResult, Tail, Tls, WhenAway)

T = TypeVar("T")

_SLICE_SECONDS = 0.1  # How often a thread that waits for session events looks whether the client is closed.


class Client(Base):
    """Calls that block, with the GIL released while they wait. Any number of threads may use one client.

    Args:
        address: "unix:/run/kvmill/kvmill.sock" or "host:port". The connection is made when first needed.
        timeout: Seconds, of calls that say nothing.
        path: How the bytes of stores and fetches travel.
        plaintext: UCX without encryption; must be what the daemon was started with.
        encode_in: Where 16-bit values become tiles.
        encode_threads: That encode, and that verify what UCX brought. 0: one a core, up to 4.
        device: The GPU that reads blocks which `map` leaves on the daemon's: "cuda", "cuda:N", or "host", which stands in
            for one in tests. UnavailableError says what is missing.
        tls: Of a connection over TCP. Without it the daemon must have been started with --insecure.
        token: Shows who this is in place of a certificate; over TCP it needs `tls`.
        when_away: What calls come to while no daemon answers.

    Memory that is passed in is used in place and must not change until the call returns. In a child of fork() the
    parent's client raises FailedPreconditionError, and so does making one: start processes by spawn. Errors are subclasses
    of Error.
    """

    def __init__(self, address: str, timeout: float = 10.0, *, path: Union[DataPath, str] = DataPath.AUTO, plaintext: bool = False,
                 encode_in: EncodeIn = EncodeIn.AUTO, encode_threads: int = 0, device: Optional[str] = None,
                 tls: Optional[Tls] = None, token: str = "", when_away: WhenAway = WhenAway.FAIL) -> None:
        super().__init__(address, timeout, path, plaintext, encode_in, encode_threads, device, tls, token, when_away)
        self._idle: List[_native.Queue] = []
        self._abandoned: List[_native.Queue] = []  # Of calls that a signal interrupted, and that may still run.
        self._redeems: Dict[bytes, int] = collections.Counter()  # Who waits for a ticket.
        self._redeems_lock = threading.Lock()

    def _run(self, call: Call[T]) -> T:
        self._forget_ended()
        try:
            queue = self._idle.pop() if self._pid == os.getpid() else _native.Queue()
        except IndexError:
            queue = _native.Queue()
        try:
            call.start(queue)
            event = queue.take(-1)
            while event is not None and event[5]:
                call.progress(event[4])
                event = queue.take(-1)
        except BaseException:
            # What the call borrowed stays pinned by the queue until it ends. Not used again: its event is still to come.
            if queue.running:
                self._abandoned.append(queue)
                if call.abandon is not None:
                    with contextlib.suppress(Error):  # Another thread may have closed the client.
                        call.abandon()
            raise
        self._idle.append(queue)
        return _calls.finish(event, call.convert)

    def _forget_ended(self) -> None:
        for queue in list(self._abandoned):  # Mostly none.
            if not queue.running and queue in self._abandoned:
                self._abandoned.remove(queue)

    def close(self) -> None:
        """Ends what runs (CallCancelledError) and closes the connection. May be called again, and from any thread."""
        self._native.close()
        self._forget_ended()
        self._closed()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Any) -> None:
        self.close()

    def open_namespace(self, name: str, spec: NamespaceSpec, *, fallback: bool = False,
                       timeout: Optional[float] = None) -> Namespace:
        """Registers `spec` under `name`. FailedPreconditionError names the first difference when the name is bound to
        another one.

        Args:
            fallback: Where the daemon refuses stores into it because its tiles lose too much of K or V, and names what to
                use instead, that is opened: the result has its name and spec. After a block that was not stored with
                FailedPreconditionError call this again, and use what it returns for everything.
        """
        return self._run(_calls.open_namespace(self._native, name, spec, fallback, timeout))

    def find_namespace(self, name: str, *, timeout: Optional[float] = None) -> Namespace:
        """One that was registered before. NotFoundError."""
        return self._run(_calls.find_namespace(self._native, name, timeout))

    def lookup(self, ns: Namespace, keys: Sequence[bytes], *, tails: Iterable[Tail] = (),
               timeout: Optional[float] = None) -> LookupResult:
        """How many of the first keys are there, and which of `tails` is there behind them."""
        return self._run(_calls.lookup(self._native, ns, keys, tails, timeout))

    def store(self, ns: Namespace, blocks: Sequence[Block], *, wait_durable: bool = False, head_begin: int = 0,
              head_count: int = 0, timeout: Optional[float] = None) -> StoreResult:
        """Stores blocks; each has a result of its own.

        Args:
            wait_durable: Return when the blocks survive a crash.
            head_begin, head_count: The heads that the arrays hold, a tensor-parallel rank's. 0, 0: all.
        """
        return self._run(_calls.store(self._native, ns, blocks, wait_durable, head_begin, head_count, timeout))

    def fetch(self, ns: Namespace, keys: Sequence[bytes], out: Sequence[Sequence[Tuple[Any, Any]]], *,
              frame: Frame = Frame.MODEL, head_begin: int = 0, head_count: int = 0,
              timeout: Optional[float] = None) -> FetchResult:
        """Fetches blocks and decodes them into `out`: per key, per layer (k, v), arrays [tokens, heads, head_dim] or
        Paged, which must be writable. `ns.empty(len(keys))` makes new ones. Of a tail as many tokens are written as it
        has. Each block has a result of its own."""
        return self._run(_calls.fetch(self._native, ns, keys, out, _calls.VALUES16, frame, head_begin, head_count, timeout))

    def fetch_records(self, ns: Namespace, keys: Sequence[bytes], out: Sequence[Sequence[Any]], *, head_begin: int = 0,
                      head_count: int = 0, timeout: Optional[float] = None) -> FetchResult:
        """Fetches records without decoding them: per key, per layer writable bytes [heads][record_bytes]. A block with
        heads in 16 bits (a tail, a sink block) has none: FailedPreconditionError."""
        return self._run(
            _calls.fetch(self._native, ns, keys, out, _calls.RECORDS, Frame.MODEL, head_begin, head_count, timeout))

    def fetch_pages(self, ns: Namespace, keys: Sequence[bytes], out: Sequence[Sequence[Any]], *,
                    timeout: Optional[float] = None) -> FetchResult:
        """Fetches whole pages, as docs/formats.md has them: per key, per layer writable bytes, at most
        `ns.page_bytes_max(layer)`."""
        return self._run(_calls.fetch(self._native, ns, keys, out, _calls.PAGES, Frame.MODEL, 0, 0, timeout))

    def remove(self, ns: Namespace, keys: Sequence[bytes], *, timeout: Optional[float] = None) -> int:
        """Returns the number of (block, layer group)s that were there."""
        return self._run(_calls.remove(self._native, ns, keys, timeout))

    def touch(self, ns: Namespace, keys: Sequence[bytes], *, timeout: Optional[float] = None) -> int:
        """Tells eviction that the blocks were used; returns how many (block, layer group)s of them are in memory."""
        return self._run(_calls.touch(self._native, ns, keys, timeout))

    def map(self, ns: Namespace, keys: Sequence[bytes], *, lease: float = 10.0, memory: MapMemory = MapMemory.HOST,
            timeout: Optional[float] = None) -> Mapped:
        """Leases on blocks, and their pages as memory of this process; only on the daemon's socket. Blocks that are only on
        disk are loaded first; each has an error of its own.

        Args:
            lease: Seconds from now. The daemon has a limit (60).
            memory: Other than HOST with the client's `device` only: FailedPreconditionError without, and of blocks that
                this device cannot have.
        """
        return self._run(_calls.map_blocks(self, self._native, ns, keys, lease, memory, timeout))

    def renew(self, mapped: Mapped, lease: float = 10.0, *, timeout: Optional[float] = None) -> None:
        """Makes the leases of blocks that this client mapped last `lease` seconds from now. AbortedError when one had ended
        before."""
        return self._run(_calls.renew(self._native, mapped, lease, timeout))

    def register_memory(self, ns: Namespace, geometry: EngineGeometry, *, timeout: Optional[float] = None) -> int:
        """Describes the engine's memory to the daemon, until the session ends. Returns a number to unregister it by. Errors
        name the field that makes no sense or does not fit the namespace."""
        return self._run(_calls.register_memory(self._native, ns, geometry, timeout))

    def unregister_memory(self, registration: int, *, timeout: Optional[float] = None) -> None:
        """Nobody reads its pages any more when this returns. NotFoundError when the session has no such registration."""
        return self._run(_calls.unregister_memory(self._native, registration, timeout))

    def store_pages(self, ns: Namespace, registration: int, blocks: Sequence[PageBlock], *, request: int = 0,
                    ready_layers: Optional[int] = None, wait_durable: bool = False,
                    timeout: Optional[float] = None) -> StoreResult:
        """Stores blocks from registered pages, which the daemon, on this node, reads in place; only on its socket.

        Args:
            registration: What register_memory returned, of a geometry whose regions have a `memory` or a `device`.
            request: The engine's name for what the blocks belong to, for ready_pages, flush_pages and cancel_pages.
            ready_layers: Layers of the model below this number have their values in the pages; the others are read when
                `ready_pages` (of another thread) said so. None: all have. The call lasts until the last one is stored.

        Pages are free, that is, nobody reads them and nobody will, when this returns, or raises anything but
        DeadlineExceededError; and when flush_pages, flush_blocks, cancel_pages or unregister_memory return. Until then
        values that are ready must stay. Results as those of `store`; blocks that were given up by one of these have
        CallCancelledError, with wait_durable also those that cancel_pages found stored and not durable yet; AbortedError:
        the session ended in the middle, register the memory again.
        """
        return self._run(
            _calls.store_pages(self._native, ns, registration, blocks, request, ready_layers, wait_durable, timeout))

    def flush_pages(self, request: int, *, timeout: Optional[float] = None) -> None:
        """Returns when the pages of all running store_pages of the request are free. Blocks whose values are all ready are
        stored first, the others are given up. After DeadlineExceededError the daemon may still read: ask again."""
        return self._run(_calls.flush_pages(self._native, request, timeout))

    def flush_blocks(self, keys: Sequence[bytes], *, timeout: Optional[float] = None) -> None:
        """The same of these blocks, whosever."""
        return self._run(_calls.flush_blocks(self._native, keys, timeout))

    def cancel_pages(self, request: int, *, timeout: Optional[float] = None) -> None:
        """Gives up what is not stored yet of all running store_pages of the request, and returns when their pages are
        free. After DeadlineExceededError the daemon may still read: ask again."""
        return self._run(_calls.cancel_pages(self._native, request, timeout))

    def create_ticket(self, ns: Namespace, blocks: Sequence[PromisedBlock], *, consumer: str = "", ttl: float = 30.0,
                      life: float = 300.0, timeout: Optional[float] = None) -> bytes:
        """Promises blocks to another node of the cluster, before they are stored: the ticket is for the engine there, which
        calls `redeem_ticket` at its own daemon. The daemon holds the blocks from now on, what is there of them and what
        comes, until the ticket ends.

        Args:
            consumer: Node id of who may redeem it; empty: whoever has it.
            ttl: Seconds without progress after which the ticket ends. At most 600.
            life: Seconds with it. At most 3600.

        InvalidArgumentError names what is wrong with a block, or the nodes that there are; ResourceExhaustedError which
        limit is reached; FailedPreconditionError: the daemon is in no cluster.
        """
        return self._run(_calls.create_ticket(self._native, ns, blocks, consumer, ttl, life, timeout))

    def revoke_ticket(self, ticket: bytes, *, timeout: Optional[float] = None) -> None:
        """The engine gave the prompt up. NotFoundError: the ticket has ended. FailedPreconditionError: another daemon made
        it."""
        return self._run(_calls.revoke_ticket(self._native, ticket, timeout))

    def redeem_ticket(self, ns: Namespace, ticket: bytes, *, update: Optional[RedeemUpdate] = None,
                      timeout: Optional[float] = None) -> RedeemResult:
        """Brings a ticket's blocks to this client's daemon, while they are stored elsewhere, and returns when each is there
        or will not come. What became of the ticket is the result's `error`, and not raised; to an engine what is not `here`
        is a miss.

        Args:
            update: Called in this thread with all blocks and the places of those that changed, whenever some did.
                What it raises cancels the redeem.
            timeout: How long to wait, prefill included.

        Any daemon of the cluster will do; at the one that made the ticket the blocks are there, and it only tells.
        """
        call = _calls.redeem_ticket(self._native, ns, ticket, update, timeout)
        cancel, call.abandon = call.abandon, lambda: self._give_up(ticket, cancel)
        with self._redeems_lock:
            self._redeems[ticket] += 1
        try:
            return self._run(call)
        finally:
            with self._redeems_lock:
                self._redeems[ticket] -= 1
                if not self._redeems[ticket]:
                    del self._redeems[ticket]

    def _give_up(self, ticket: bytes, cancel: Callable[[], None]) -> None:
        with self._redeems_lock:
            alone = self._redeems[ticket] == 1
        if alone:  # Other threads may want it still.
            cancel()

    def cancel_redeem(self, ticket: bytes) -> None:
        """Redeems of it that this client started end with CallCancelledError, soon. When nobody else redeems it at that
        daemon, what is not sealed is discarded and the producer lets go."""
        self._native.cancel_redeem(ticket)

    def session_event(self, *, timeout: Optional[float] = None) -> Optional[SessionEvent]:
        """Waits for what the daemon says without being asked; None when nothing came within `timeout` seconds (None: for
        ever). Of each kind one is kept until it is taken; leases add up. FailedPreconditionError once the client is
        closed."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = _SLICE_SECONDS if end is None else min(_SLICE_SECONDS, end - time.monotonic())
            event = self._events.take(max(int(left * 1000), 0))
            if event is not None:
                return _calls.session_event(event)
            if self.closed:
                raise FailedPreconditionError(Code.FAILED_PRECONDITION, "the client is closed")
            if end is not None and time.monotonic() >= end:
                return None

    def clear(self, ns: Namespace, *, timeout: Optional[float] = None) -> int:
        """Removes everything in the namespace; returns the number of (block, layer group)s."""
        return self._run(_calls.clear(self._native, ns, timeout))

    def flush(self, *, timeout: Optional[float] = None) -> int:
        """Returns when every sealed block of the daemon is durable."""
        return self._run(_calls.flush(self._native, timeout))

    def stat(self, *, timeout: Optional[float] = None) -> Stat:
        """The daemon's state."""
        return self._run(_calls.stat(self._native, timeout))
