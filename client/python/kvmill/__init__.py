"""kvmill: keep the attention KV cache of LLM inference in a kvmilld, quantized.

    with kvmill.Client("unix:/run/kvmill/kvmill.sock") as client:
        ns = client.open_namespace("demo", kvmill.NamespaceSpec(
            [kvmill.LayerGroup(layers=range(32), kv_heads=8, head_dim=128)], model="m", revision="1", hash_scheme="h"))
        client.store(ns, [kvmill.Block(key, layers=[(k, v), ...])])
        out = ns.empty(1)
        if client.fetch(ns, [key], out).blocks[0].hit: ...

K and V are arrays [tokens, heads, head_dim] of float16 or bfloat16: numpy arrays, torch tensors on the CPU, anything
with the buffer protocol or DLPack; they are read and written in place. AsyncClient has the same calls for asyncio.
Client.map gives blocks in the daemon's
memory, to be read and attended to in place; Client.store_pages stores from the engine's own pages, in a SharedMemory, without a
copy. Client.create_ticket and redeem_ticket bring a prompt's blocks from the node that prefills to the one that decodes.
`watch` tells a router which blocks come and go; within `request` calls carry a request's id and trace.
docs/client.md explains namespaces, keys, tails and misses.
"""
from typing import Any, Optional, Tuple

from kvmill import _native
from kvmill._async_client import AsyncClient
from kvmill._client import Client
from kvmill._engine import (DeviceHandle, EngineGeometry, EngineLayers, EnginePlace, EngineRegion, PageBlock, SharedMemory)
from kvmill._errors import (AbortedError, CallCancelledError, Code, DataLossError, DeadlineExceededError, Error,
                            FailedPreconditionError, InvalidArgumentError, NotFoundError, PermissionDeniedError,
                            ResourceExhaustedError, UnauthenticatedError, UnavailableError)
from kvmill._mapped import DeviceArray, HeadKind, Mapped, MappedBlock, MappedHead
from kvmill._request import request
from kvmill._tickets import PromisedBlock, RedeemedBlock, RedeemResult, RedeemUpdate, TicketFate, TicketMiss
from kvmill._types import (Attention, Block, DataPath, DType, EncodeIn, EngineElement, FetchedBlock, FetchResult, Frame,
                           LayerGroup, LookupResult, MapMemory, Namespace, NamespaceSpec, Outcome, Paged, SessionEvent, SessionEventKind, Stat, StoredBlock, StoreResult,
                           Tail, Tier, TierUsage, Tls, WhenAway)
from kvmill._watch import BlockEvent, EventBatch, EventKind, EventPosition, Watch, WatchedNamespace, watch

__all__ = [
    "AbortedError", "AsyncClient", "Attention", "Block", "BlockEvent", "CallCancelledError", "Client", "Code", "DLPack", "DType",
    "DataLossError", "DataPath", "DeadlineExceededError", "DeviceArray", "DeviceHandle", "EncodeIn", "EngineElement", "EngineGeometry", "EngineLayers",
    "EnginePlace", "EngineRegion", "Error", "EventBatch", "EventKind", "EventPosition", "FailedPreconditionError", "FetchResult", "FetchedBlock", "Frame", "HeadKind",
    "InvalidArgumentError", "LayerGroup", "LookupResult", "MapMemory", "Mapped", "MappedBlock", "MappedHead", "Namespace",
    "NamespaceSpec", "NotFoundError", "Outcome", "PageBlock", "Paged", "PermissionDeniedError", "PromisedBlock", "RedeemResult", "RedeemUpdate",
    "RedeemedBlock", "ResourceExhaustedError", "SessionEvent", "SessionEventKind", "SharedMemory", "Stat", "StoreResult",
    "StoredBlock", "Tail", "TicketFate", "TicketMiss", "Tier", "TierUsage", "Tls", "UnauthenticatedError", "UnavailableError", "Watch",
    "WatchedNamespace", "WhenAway", "request", "tail_key", "watch"]

__version__ = _native.version()


def tail_key(parent: bytes, token_count: int, key: bytes) -> bytes:
    """What an unfinished last block of `token_count` tokens is stored under.

    Args:
        parent: Key of the block before it; b"" for none.
        key: The engine's hash of its tokens and all before them, as given when it was stored.
    """
    return _native.tail_key(parent, token_count, key)


class DLPack:
    """An array for DLPack consumers, in place: `torch.from_dlpack(kvmill.DLPack(array, kvmill.DType.BFLOAT16))`.

    For bfloat16, whose bits numpy keeps as uint16 and would export as such; and for the memory of mapped blocks, which is
    read-only: DLPack cannot say so, numpy therefore refuses, and whoever gets it with `read_only` must not write (it
    would end the process).

    Args:
        array: Of 16-bit values; with dtype None of bytes.
    """

    def __init__(self, array: Any, dtype: Optional[DType], *, read_only: bool = False) -> None:
        self._array = array
        self._code = 1 if dtype is None else 4 if dtype == DType.BFLOAT16 else 2
        self._read_only = read_only

    def __dlpack__(self, stream: Any = None) -> Any:
        return _native.to_dlpack(self._array, self._code, self._read_only)

    def __dlpack_device__(self) -> Tuple[int, int]:
        return 1, 0
