"""The client for asyncio."""
from __future__ import annotations

import asyncio
import collections
import os
import time
from typing import Any, AsyncIterator, Callable, Deque, Dict, Iterable, Optional, Sequence, Tuple, Type, TypeVar, Union

from kvmill import _calls, _native
from kvmill._base import Base
from kvmill._calls import Call
from kvmill._engine import EngineGeometry, PageBlock
from kvmill._errors import Code, FailedPreconditionError
from kvmill._mapped import Mapped
from kvmill._tickets import Progress, PromisedBlock, RedeemResult, RedeemUpdate
from kvmill._types import (Block, DataPath, EncodeIn, FetchResult, Frame, LookupResult, MapMemory, Namespace, NamespaceSpec,
                           SessionEvent, Stat, StoreResult, Tail, Tls, WhenAway)

T = TypeVar("T")


class AsyncClient(Base):
    """The same calls for asyncio: each is awaited, any number may be in flight, and no thread is needed for one.

    A client belongs to the event loop that its first call runs in. A task that is cancelled stops waiting; the call goes
    on in the daemon, and the memory that it uses is kept alive until it has ended.

        async with kvmill.AsyncClient(address) as client:
            ns = await client.open_namespace("demo", spec)
            results = await asyncio.gather(*(client.fetch(ns, [key], out) for key, out in wanted))
    """

    def __init__(self, address: str, timeout: float = 10.0, *, path: Union[DataPath, str] = DataPath.AUTO, plaintext: bool = False,
                 encode_in: EncodeIn = EncodeIn.AUTO, encode_threads: int = 0, device: Optional[str] = None,
                 tls: Optional[Tls] = None, token: str = "", when_away: WhenAway = WhenAway.FAIL) -> None:
        super().__init__(address, timeout, path, plaintext, encode_in, encode_threads, device, tls, token, when_away)
        self._queue = _native.Queue()
        self._told: Deque[SessionEvent] = collections.deque()
        self._telling = asyncio.Event()  # Made again for each loop.
        self._loop: Optional[asyncio.AbstractEventLoop] = None
        # Nothing in here keeps the native client, which ends the calls when it is dropped.
        self._waiting: Dict[int, Tuple[asyncio.Future, Callable[[Any], Any], Optional[Progress]]] = {}
        self._redeems: Dict[bytes, int] = collections.Counter()  # Who waits for a ticket.

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
        self._waiting[tag] = (future, call.convert, call.progress)
        return await future

    def _on_events(self) -> None:
        while (event := self._queue.take(0)) is not None:
            future, convert, progress = self._waiting[event[0]] if event[5] else self._waiting.pop(event[0])
            if future.done() or future.get_loop().is_closed():  # Cancelled, or its loop is gone.
                continue
            try:
                if event[5]:
                    progress(event[4])
                else:
                    future.set_result(_calls.finish(event, convert))
            except Exception as error:  # pylint: disable=broad-except  # Whatever it is, the caller gets it.
                future.set_exception(error)
                if event[5]:
                    self._give_up(progress.ticket)

    def _give_up(self, ticket: bytes) -> None:
        if self._redeems[ticket] == 1 and not self.closed and self._pid == os.getpid():  # Nobody else waits for it.
            self._native.cancel_redeem(ticket)

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
        self._closed()

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Any) -> None:
        await self.close()

    async def open_namespace(self, name: str, spec: NamespaceSpec, *, fallback: bool = False,
                             timeout: Optional[float] = None) -> Namespace:
        """As Client.open_namespace."""
        return await self._run(_calls.open_namespace(self._native, name, spec, fallback, timeout))

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

    async def create_ticket(self, ns: Namespace, blocks: Sequence[PromisedBlock], *, consumer: str = "", ttl: float = 30.0,
                            life: float = 300.0, timeout: Optional[float] = None) -> bytes:
        """As Client.create_ticket."""
        return await self._run(_calls.create_ticket(self._native, ns, blocks, consumer, ttl, life, timeout))

    async def revoke_ticket(self, ticket: bytes, *, timeout: Optional[float] = None) -> None:
        """As Client.revoke_ticket."""
        return await self._run(_calls.revoke_ticket(self._native, ticket, timeout))

    async def redeem_ticket(self, ns: Namespace, ticket: bytes, *, update: Optional[RedeemUpdate] = None,
                            timeout: Optional[float] = None) -> RedeemResult:
        """As Client.redeem_ticket; `update` is called by the event loop. When the last task of this client that waits for
        the ticket is cancelled, so is the redeem."""
        call = _calls.redeem_ticket(self._native, ns, ticket, update, timeout)
        self._redeems[ticket] += 1
        try:
            return await self._run(call)
        except asyncio.CancelledError:
            self._give_up(ticket)
            raise
        finally:
            self._redeems[ticket] -= 1
            if not self._redeems[ticket]:
                del self._redeems[ticket]

    def cancel_redeem(self, ticket: bytes) -> None:
        """As Client.cancel_redeem. Waits for nobody."""
        self._native.cancel_redeem(ticket)

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
