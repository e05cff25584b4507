"""The two clients: Client blocks, AsyncClient awaits."""
from __future__ import annotations

import asyncio
import atexit
import collections
import os
import time
import weakref
from typing import Any, AsyncIterator, Callable, Deque, Dict, Iterable, List, Optional, Sequence, Tuple, Type, TypeVar

from kvmill import _calls, _native
from kvmill._calls import Call
from kvmill._engine import DeviceHandle, EngineGeometry, PageBlock
from kvmill._errors import Code, FailedPreconditionError
from kvmill._mapped import Mapped
from kvmill._types import (Block, DataPath, EncodeIn, FetchResult, Frame, LookupResult, MapMemory, Namespace, NamespaceSpec, SessionEvent, Stat, StoreResult, Tail)

T = TypeVar("T")

_SLICE_SECONDS = 0.1  # How often a thread that waits for session events looks whether the client is closed.

_open: "weakref.WeakSet[_Base]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # Threads of the library that outlive the interpreter would report into nothing.
    for client in list(_open):
        client._native.close()  # pylint: disable=protected-access


class _Base:
    def __init__(self, address: str, timeout: float, path: DataPath, plaintext: bool, encode_in: EncodeIn,
                 encode_threads: int, device: Optional[str]) -> None:
        self._events = _native.Queue()  # Of the session.
        self._native = _native.Client(address, _calls.milliseconds(timeout), path, plaintext, encode_in, encode_threads,
                                      device, self._events)
        self._device = device
        self._address = address
        self._pid = os.getpid()
        _open.add(self)

    @property
    def boot_id(self) -> str:
        """Boot id (lower-case hex) that the daemon last showed; empty before the first answer. Another one than before
        means that the daemon was restarted."""
        return self._native.boot_id

    @property
    def ucx_transport(self) -> str:
        """What UCX negotiated for the connection that is open now, as "tcp/eth0"; empty: there is none."""
        return self._native.ucx_transport

    @property
    def device(self) -> Optional[str]:
        """As it was given."""
        return self._device

    @property
    def closed(self) -> bool:
        return self._native.closed

    def export_memory(self, address: int, nbytes: int) -> DeviceHandle:
        """Names memory of the client's device that this process allocated with cudaMalloc, or a library of its did (that of
        a torch tensor: `tensor.data_ptr()`). InvalidArgumentError for other memory; FailedPreconditionError without a
        device."""
        return _calls.export_memory(self._native, address, nbytes)

    def ready_pages(self, request: int, layers: int) -> None:
        """Layers of the model below `layers` have their values in the pages, for all running `store_pages` of the request.
        Of memory of a GPU: the work that writes them has ended there. Waits for nobody."""
        self._native.ready_pages(request, layers)

    def __repr__(self) -> str:
        return f"<kvmill.{type(self).__name__} {self._address!r}{' closed' if self.closed else ''}>"

    def __reduce__(self) -> Any:
        raise TypeError(f"a {type(self).__name__} belongs to its process: pass the address and make one in each")


class Client(_Base):
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

    Memory that is passed in is used in place and must not change until the call returns. In a child of fork() the
    parent's client raises FailedPreconditionError, and so does making one: start processes by spawn. Errors are subclasses
    of Error.
    """

    def __init__(self, address: str, timeout: float = 10.0, *, path: DataPath = DataPath.AUTO, plaintext: bool = False,
                 encode_in: EncodeIn = EncodeIn.AUTO, encode_threads: int = 0, device: Optional[str] = None) -> None:
        super().__init__(address, timeout, path, plaintext, encode_in, encode_threads, device)
        self._idle: List[_native.Queue] = []
        self._abandoned: List[_native.Queue] = []  # Of calls that a signal interrupted, and that may still run.

    def _run(self, call: Call[T]) -> T:
        self._forget_ended()
        try:
            queue = self._idle.pop() if self._pid == os.getpid() else _native.Queue()
        except IndexError:
            queue = _native.Queue()
        try:
            call.start(queue)
            event = queue.take(-1)
        except BaseException:
            # What the call borrowed stays pinned by the queue until it ends. Not used again: its event is still to come.
            if queue.running:
                self._abandoned.append(queue)
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
        _open.discard(self)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Any) -> None:
        self.close()

    def open_namespace(self, name: str, spec: NamespaceSpec, *, timeout: Optional[float] = None) -> Namespace:
        """Registers `spec` under `name`. FailedPreconditionError names the first difference when the name is bound to
        another one."""
        return self._run(_calls.open_namespace(self._native, name, spec, timeout))

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


class AsyncClient(_Base):
    """The same calls for asyncio: each is awaited, any number may be in flight, and no thread is needed for one.

    A client belongs to the event loop that its first call runs in. A task that is cancelled stops waiting; the call goes
    on in the daemon, and the memory that it uses is kept alive until it has ended.

        async with kvmill.AsyncClient(address) as client:
            ns = await client.open_namespace("demo", spec)
            results = await asyncio.gather(*(client.fetch(ns, [key], out) for key, out in wanted))
    """

    def __init__(self, address: str, timeout: float = 10.0, *, path: DataPath = DataPath.AUTO, plaintext: bool = False,
                 encode_in: EncodeIn = EncodeIn.AUTO, encode_threads: int = 0, device: Optional[str] = None) -> None:
        super().__init__(address, timeout, path, plaintext, encode_in, encode_threads, device)
        self._queue = _native.Queue()
        self._told: Deque[SessionEvent] = collections.deque()
        self._telling = asyncio.Event()  # Made again for each loop.
        self._loop: Optional[asyncio.AbstractEventLoop] = None
        # Nothing in here keeps the native client, which ends the calls when it is dropped.
        self._waiting: Dict[int, Tuple[asyncio.Future, Callable[[Any], Any]]] = {}

    def _enter_loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        if self._loop is not loop and self._pid == os.getpid() and not self.closed:
            if self._waiting and self._loop is not None and not self._loop.is_closed():
                raise RuntimeError("the client has calls in flight in another event loop")
            loop.add_reader(self._queue.fd, self._on_events)
            loop.add_reader(self._events.fd, self._on_told)
            self._telling = asyncio.Event()
            self._loop = loop
        return loop

    def _on_told(self) -> None:
        while (event := self._events.take(0)) is not None:
            told = _calls.session_event(event)
            for i, earlier in enumerate(self._told):  # As the queue does it: nobody may ever listen.
                if earlier.kind == told.kind:
                    self._told[i] = SessionEvent(told.kind, earlier.leases + told.leases)
                    break
            else:
                self._told.append(told)
        self._telling.set()

    async def _run(self, call: Call[T]) -> T:
        loop = self._enter_loop()
        tag = call.start(self._queue)
        # Its event is taken by this loop only: not before the next await.
        future: asyncio.Future = loop.create_future()
        self._waiting[tag] = (future, call.convert)
        return await future

    def _on_events(self) -> None:
        while (event := self._queue.take(0)) is not None:
            future, convert = self._waiting.pop(event[0])
            if future.done() or future.get_loop().is_closed():  # Cancelled, or its loop is gone.
                continue
            try:
                future.set_result(_calls.finish(event, convert))
            except Exception as error:  # pylint: disable=broad-except  # Whatever it is, the caller gets it.
                future.set_exception(error)

    async def close(self) -> None:
        """Ends what runs (CallCancelledError) and closes the connection. May be called again."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._native.close)
        if self._pid == os.getpid():
            self._on_events()
            self._on_told()  # And who waits for an event learns that none will come.
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._queue.fd)
            self._loop.remove_reader(self._events.fd)
        self._loop = None
        _open.discard(self)

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Any) -> None:
        await self.close()

    async def open_namespace(self, name: str, spec: NamespaceSpec, *, timeout: Optional[float] = None) -> Namespace:
        """As Client.open_namespace."""
        return await self._run(_calls.open_namespace(self._native, name, spec, timeout))

    async def find_namespace(self, name: str, *, timeout: Optional[float] = None) -> Namespace:
        """As Client.find_namespace."""
        return await self._run(_calls.find_namespace(self._native, name, timeout))

    async def lookup(self, ns: Namespace, keys: Sequence[bytes], *, tails: Iterable[Tail] = (),
                     timeout: Optional[float] = None) -> LookupResult:
        """As Client.lookup."""
        return await self._run(_calls.lookup(self._native, ns, keys, tails, timeout))

    async def store(self, ns: Namespace, blocks: Sequence[Block], *, wait_durable: bool = False, head_begin: int = 0,
                    head_count: int = 0, timeout: Optional[float] = None) -> StoreResult:
        """As Client.store. The arrays must not change until it returns."""
        return await self._run(_calls.store(self._native, ns, blocks, wait_durable, head_begin, head_count, timeout))

    async def fetch(self, ns: Namespace, keys: Sequence[bytes], out: Sequence[Sequence[Tuple[Any, Any]]], *,
                    frame: Frame = Frame.MODEL, head_begin: int = 0, head_count: int = 0,
                    timeout: Optional[float] = None) -> FetchResult:
        """As Client.fetch."""
        return await self._run(
            _calls.fetch(self._native, ns, keys, out, _calls.VALUES16, frame, head_begin, head_count, timeout))

    async def fetch_records(self, ns: Namespace, keys: Sequence[bytes], out: Sequence[Sequence[Any]], *,
                            head_begin: int = 0, head_count: int = 0, timeout: Optional[float] = None) -> FetchResult:
        """As Client.fetch_records."""
        return await self._run(
            _calls.fetch(self._native, ns, keys, out, _calls.RECORDS, Frame.MODEL, head_begin, head_count, timeout))

    async def fetch_pages(self, ns: Namespace, keys: Sequence[bytes], out: Sequence[Sequence[Any]], *,
                          timeout: Optional[float] = None) -> FetchResult:
        """As Client.fetch_pages."""
        return await self._run(_calls.fetch(self._native, ns, keys, out, _calls.PAGES, Frame.MODEL, 0, 0, timeout))

    async def remove(self, ns: Namespace, keys: Sequence[bytes], *, timeout: Optional[float] = None) -> int:
        """As Client.remove."""
        return await self._run(_calls.remove(self._native, ns, keys, timeout))

    async def touch(self, ns: Namespace, keys: Sequence[bytes], *, timeout: Optional[float] = None) -> int:
        """As Client.touch."""
        return await self._run(_calls.touch(self._native, ns, keys, timeout))

    async def map(self, ns: Namespace, keys: Sequence[bytes], *, lease: float = 10.0, memory: MapMemory = MapMemory.HOST,
                  timeout: Optional[float] = None) -> Mapped:
        """As Client.map: `with await client.map(ns, keys) as mapped: ...`"""
        return await self._run(_calls.map_blocks(self, self._native, ns, keys, lease, memory, timeout))

    async def renew(self, mapped: Mapped, lease: float = 10.0, *, timeout: Optional[float] = None) -> None:
        """As Client.renew."""
        return await self._run(_calls.renew(self._native, mapped, lease, timeout))

    async def register_memory(self, ns: Namespace, geometry: EngineGeometry, *, timeout: Optional[float] = None) -> int:
        """As Client.register_memory."""
        return await self._run(_calls.register_memory(self._native, ns, geometry, timeout))

    async def unregister_memory(self, registration: int, *, timeout: Optional[float] = None) -> None:
        """As Client.unregister_memory."""
        return await self._run(_calls.unregister_memory(self._native, registration, timeout))

    async def store_pages(self, ns: Namespace, registration: int, blocks: Sequence[PageBlock], *, request: int = 0,
                          ready_layers: Optional[int] = None, wait_durable: bool = False,
                          timeout: Optional[float] = None) -> StoreResult:
        """As Client.store_pages. With `ready_layers`, `ready_pages` is called by the same loop. A task that is cancelled
        does not end the store: cancel_pages does, and says when the pages are free."""
        return await self._run(
            _calls.store_pages(self._native, ns, registration, blocks, request, ready_layers, wait_durable, timeout))

    async def flush_pages(self, request: int, *, timeout: Optional[float] = None) -> None:
        """As Client.flush_pages."""
        return await self._run(_calls.flush_pages(self._native, request, timeout))

    async def flush_blocks(self, keys: Sequence[bytes], *, timeout: Optional[float] = None) -> None:
        """As Client.flush_blocks."""
        return await self._run(_calls.flush_blocks(self._native, keys, timeout))

    async def cancel_pages(self, request: int, *, timeout: Optional[float] = None) -> None:
        """As Client.cancel_pages."""
        return await self._run(_calls.cancel_pages(self._native, request, timeout))

    async def session_event(self, *, timeout: Optional[float] = None) -> Optional[SessionEvent]:
        """As Client.session_event."""
        self._enter_loop()
        end = None if timeout is None else time.monotonic() + timeout
        while not self._told:
            if self.closed:
                raise FailedPreconditionError(Code.FAILED_PRECONDITION, "the client is closed")
            self._telling.clear()
            try:
                await asyncio.wait_for(self._telling.wait(), None if end is None else end - time.monotonic())
            except asyncio.TimeoutError:
                if not self._told:
                    return None
        return self._told.popleft()

    async def session_events(self) -> AsyncIterator[SessionEvent]:
        """All of them, until the client is closed: `async for event in client.session_events(): ...`"""
        while not self.closed:
            try:
                event = await self.session_event()
            except FailedPreconditionError:
                return
            if event is not None:
                yield event

    async def clear(self, ns: Namespace, *, timeout: Optional[float] = None) -> int:
        """As Client.clear."""
        return await self._run(_calls.clear(self._native, ns, timeout))

    async def flush(self, *, timeout: Optional[float] = None) -> int:
        """As Client.flush."""
        return await self._run(_calls.flush(self._native, timeout))

    async def stat(self, *, timeout: Optional[float] = None) -> Stat:
        """As Client.stat."""
        return await self._run(_calls.stat(self._native, timeout))
