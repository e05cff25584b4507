"""Calls as pairs: what starts one on a queue, and what makes its result. The blocking and the asyncio client share
them, and differ only in how they wait."""
from __future__ import annotations

import math
import numbers
import weakref
from typing import Any, Callable, Generic, Iterable, Optional, Sequence, Tuple, TypeVar, Union

from kvmill import _native
from kvmill._engine import DeviceHandle, EngineGeometry, EnginePlace, PageBlock, region_fields
from kvmill._errors import Error, error_of
from kvmill._mapped import Mapped, native_of
from kvmill._tickets import Progress, PromisedBlock, RedeemResult, RedeemUpdate, redeem_result
from kvmill._types import (Block, DataPath, FetchedBlock, FetchResult, Frame, KV, LookupResult, MapMemory, Namespace, NamespaceSpec, Outcome, Paged, SessionEvent, SessionEventKind, Stat, StoredBlock, StoreResult,
                           Tail, Tier, TierUsage, Tls)

T = TypeVar("T")

VALUES16, RECORDS, PAGES = 0, 1, 2


class Call(Generic[T]):
    """`start(queue)` returns the tag of the event that will come; `convert` makes the result of its value. `progress` takes
    the values of events that come before it; `abandon` ends the call when nobody waits for it any more."""

    def __init__(self, start: Callable[[_native.Queue], int], convert: Callable[[Any], T],
                 progress: Optional[Progress] = None, abandon: Optional[Callable[[], None]] = None) -> None:
        self.start = start
        self.convert = convert
        self.progress = progress
        self.abandon = abandon


Event = Tuple[int, int, str, int, Any, bool]


def finish(event: Event, convert: Callable[[Any], T]) -> T:
    """The result of a call, or its error as an exception."""
    _, code, message, retry_after_ms, value, _ = event
    if code != 0:
        raise error_of(code, message, retry_after_ms)
    return convert(value)


def milliseconds(timeout: Optional[float], what: str = "timeout") -> int:
    """0 stands for the default."""
    if timeout is None:
        return 0
    if not isinstance(timeout, numbers.Real):
        raise TypeError(f"{what}: a {type(timeout).__name__}, want a number of seconds, or None")
    if not 0 < timeout < 2 ** 40:
        raise ValueError(f"{what} {timeout}, want more than 0 and less than {2 ** 40} seconds, or None")
    return math.ceil(timeout * 1000)


def data_path(path: Union[DataPath, str]) -> DataPath:
    """One of DataPath, or its name in lower case."""
    if not isinstance(path, str):
        return path
    names = {member.name.lower(): member for member in DataPath}
    if path not in names:
        raise ValueError(f"path {path!r}, want a DataPath, or one of " + ", ".join(map(repr, names)))
    return names[path]


def identity(tls: Optional[Tls], token: str) -> Tuple[str, ...]:
    """As the native client takes it."""
    files = Tls("") if tls is None else tls
    return (files.ca, files.certificate, files.key, files.server_name, token)


def session_event(event: Event) -> SessionEvent:
    what, leases = finish(event, tuple)
    return SessionEvent(SessionEventKind(what), leases)


def _error(code: int, message: str, retry_after_ms: int) -> Optional[Error]:
    return error_of(code, message, retry_after_ms) if code else None


def _of(ns: Namespace) -> _native.Namespace:
    if not isinstance(ns, Namespace):
        raise TypeError(f"a {type(ns).__name__} is not a Namespace")
    return ns._native  # pylint: disable=protected-access  # This package's.


def _kv(kv: KV) -> Any:
    return (kv.cache, kv.pages) if isinstance(kv, Paged) else kv


def _layer(layer: Any) -> Any:
    return (_kv(layer[0]), _kv(layer[1])) if isinstance(layer, (tuple, list)) and len(layer) == 2 else layer


def _store_result(value: Any) -> StoreResult:
    blocks, *sums = value
    return StoreResult(tuple(StoredBlock(Outcome(outcome), _error(code, message, retry))
                             for code, message, retry, outcome, _, _ in blocks), *sums)


def _fetch_result(value: Any) -> FetchResult:
    blocks, page_bytes, lengths, away = value
    return FetchResult(tuple(FetchedBlock(_error(code, message, retry), Tier(tier), tokens, tuple(pages))
                             for (code, message, retry, _, tier, tokens), pages in zip(blocks, lengths)), page_bytes, away)


def _stat_result(value: Any) -> Stat:
    fields = list(value)
    fields[4] = tuple(TierUsage(Tier(tier), *rest) for tier, *rest in fields[4])
    return Stat(*fields)


def _lookup_result(value: Any) -> LookupResult:
    hit_blocks, hit_tokens, tiers, tail_tokens, tail_key, away = value
    return LookupResult(hit_blocks, hit_tokens, tuple(map(Tier, tiers)), tail_tokens, tail_key, away)


def open_namespace(client: _native.Client, name: str, spec: NamespaceSpec, fallback: bool,
                   timeout: Optional[float]) -> Call[Namespace]:
    groups = [(list(group.layers), group.kv_heads, group.head_dim, int(group.attention), group.window_tokens)
              for group in spec.groups]
    fields = (groups, spec.model, spec.revision, spec.adapter_digest, spec.salt, spec.hash_scheme, int(spec.source_dtype),
              spec.block_tokens, spec.key_bits, spec.value_bits, int(spec.frame), spec.sink_blocks)
    return Call(lambda queue: client.open_namespace(queue, name, fields, fallback, milliseconds(timeout)), Namespace)


def find_namespace(client: _native.Client, name: str, timeout: Optional[float]) -> Call[Namespace]:
    return Call(lambda queue: client.find_namespace(queue, name, milliseconds(timeout)), Namespace)


def lookup(client: _native.Client, ns: Namespace, keys: Sequence[bytes], tails: Iterable[Tail],
           timeout: Optional[float]) -> Call[LookupResult]:
    rows = [(tail.key, tail.token_count, tail.block_index) for tail in tails]
    return Call(lambda queue: client.lookup(queue, _of(ns), keys, rows, milliseconds(timeout)), _lookup_result)


def store(client: _native.Client, ns: Namespace, blocks: Iterable[Block], wait_durable: bool, head_begin: int,
          head_count: int, timeout: Optional[float]) -> Call[StoreResult]:
    _of(ns)
    rows = [(block.key, block.parent, ns.spec.block_tokens if block.token_count is None else block.token_count,
             block.block_index, [_layer(layer) for layer in block.layers]) for block in blocks]
    return Call(
        lambda queue: client.store(queue, _of(ns), rows, wait_durable, head_begin, head_count, milliseconds(timeout)),
        _store_result)


def fetch(client: _native.Client, ns: Namespace, keys: Sequence[bytes], out: Sequence[Sequence[Any]], form: int,
          frame: Frame, head_begin: int, head_count: int, timeout: Optional[float]) -> Call[FetchResult]:
    rows = [[_layer(layer) for layer in block] for block in out]
    return Call(
        lambda queue: client.fetch(queue, _of(ns), keys, rows, form, int(frame), head_begin, head_count,
                                   milliseconds(timeout)), _fetch_result)


def remove(client: _native.Client, ns: Namespace, keys: Sequence[bytes], timeout: Optional[float]) -> Call[int]:
    return Call(lambda queue: client.remove(queue, _of(ns), keys, milliseconds(timeout)), int)


def touch(client: _native.Client, ns: Namespace, keys: Sequence[bytes], timeout: Optional[float]) -> Call[int]:
    return Call(lambda queue: client.touch(queue, _of(ns), keys, milliseconds(timeout)), int)


def map_blocks(owner: Any, client: _native.Client, ns: Namespace, keys: Sequence[bytes], lease: float, memory: MapMemory,
               timeout: Optional[float]) -> Call[Mapped]:
    # What waits for the result must not keep the client; the result does, since its leases end with it.
    client_of_result = weakref.ref(owner)
    is_cuda = owner.device not in (None, "host")
    return Call(
        lambda queue: client.map(queue, _of(ns), keys, milliseconds(lease, "lease"), int(memory), milliseconds(timeout)),
        lambda native: Mapped(native, ns, client_of_result(), is_cuda))


def renew(client: _native.Client, mapped: Mapped, lease: float, timeout: Optional[float]) -> Call[None]:
    return Call(lambda queue: client.renew(queue, native_of(mapped), milliseconds(lease, "lease"), milliseconds(timeout)),
                lambda _: None)


def _places(places: Sequence[EnginePlace]) -> Any:
    return [(place.region, place.offset_bytes) for place in places]


def register_memory(client: _native.Client, ns: Namespace, geometry: EngineGeometry,
                    timeout: Optional[float]) -> Call[int]:
    layers = [(_places(l.keys), _places(l.values), l.page_count, l.page_bytes, l.page_stride_bytes, l.token_stride_bytes,
               l.head_stride_bytes, l.group, l.layer_begin, int(l.element), l.block_tokens, l.head_dim, l.head_begin,
               l.head_count, l.page_tokens) for l in geometry.layers]
    fields = ([region_fields(region) for region in geometry.regions], layers, geometry.assembling_boot_id)
    return Call(lambda queue: client.register_memory(queue, _of(ns), fields, milliseconds(timeout)), int)


def unregister_memory(client: _native.Client, registration: int, timeout: Optional[float]) -> Call[None]:
    return Call(lambda queue: client.unregister_memory(queue, registration, milliseconds(timeout)), lambda _: None)


def export_memory(client: _native.Client, address: int, nbytes: int) -> DeviceHandle:
    handle, allocation_bytes, offset, device = client.export_memory(address, nbytes)
    return DeviceHandle(handle, allocation_bytes, offset, device)


def store_pages(client: _native.Client, ns: Namespace, registration: int, blocks: Iterable[PageBlock], request: int,
                ready_layers: Optional[int], wait_durable: bool, timeout: Optional[float]) -> Call[StoreResult]:
    _of(ns)
    rows = [(block.key, block.parent, ns.spec.block_tokens if block.token_count is None else block.token_count,
             block.block_index, block.pages) for block in blocks]
    return Call(
        lambda queue: client.store_pages(queue, _of(ns), registration, rows, request, ready_layers, wait_durable,
                                         milliseconds(timeout)), _store_result)


def flush_pages(client: _native.Client, request: int, timeout: Optional[float]) -> Call[None]:
    return Call(lambda queue: client.flush_pages(queue, request, milliseconds(timeout)), lambda _: None)


def flush_blocks(client: _native.Client, keys: Sequence[bytes], timeout: Optional[float]) -> Call[None]:
    return Call(lambda queue: client.flush_blocks(queue, keys, milliseconds(timeout)), lambda _: None)


def cancel_pages(client: _native.Client, request: int, timeout: Optional[float]) -> Call[None]:
    return Call(lambda queue: client.cancel_pages(queue, request, milliseconds(timeout)), lambda _: None)


def create_ticket(client: _native.Client, ns: Namespace, blocks: Iterable[PromisedBlock], consumer: str, ttl: float,
                  life: float, timeout: Optional[float]) -> Call[bytes]:
    _of(ns)
    rows = [(block.key, block.parent, ns.spec.block_tokens if block.token_count is None else block.token_count,
             block.block_index) for block in blocks]
    return Call(
        lambda queue: client.create_ticket(queue, _of(ns), rows, consumer, milliseconds(ttl, "ttl"),
                                           milliseconds(life, "life"), milliseconds(timeout)), bytes)


def revoke_ticket(client: _native.Client, ticket: bytes, timeout: Optional[float]) -> Call[None]:
    return Call(lambda queue: client.revoke_ticket(queue, ticket, milliseconds(timeout)), lambda _: None)


def redeem_ticket(client: _native.Client, ns: Namespace, ticket: bytes, update: Optional[RedeemUpdate],
                  timeout: Optional[float]) -> Call[RedeemResult]:
    return Call(
        lambda queue: client.redeem_ticket(queue, _of(ns), ticket, update is not None, milliseconds(timeout)),
        redeem_result, None if update is None else Progress(ticket, update), lambda: client.cancel_redeem(ticket))


def clear(client: _native.Client, ns: Namespace, timeout: Optional[float]) -> Call[int]:
    return Call(lambda queue: client.clear(queue, _of(ns), milliseconds(timeout)), int)


def flush(client: _native.Client, timeout: Optional[float]) -> Call[int]:
    return Call(lambda queue: client.flush(queue, milliseconds(timeout)), int)


def stat(client: _native.Client, timeout: Optional[float]) -> Call[Stat]:
    return Call(lambda queue: client.stat(queue, milliseconds(timeout)), _stat_result)
