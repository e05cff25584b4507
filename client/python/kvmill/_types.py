"""What calls take and return."""
from __future__ import annotations

import dataclasses
import enum
from typing import Any, List, Optional, Sequence, Tuple, Union

from kvmill import _native
from kvmill._errors import Error


class DType(enum.IntEnum):
    """Of the engine's K and V."""

    FLOAT16 = 0
    BFLOAT16 = 1


class Frame(enum.IntEnum):
    """MODEL: as the model computed it. ROTATED: already multiplied by the Hadamard matrix."""

    MODEL = 0
    ROTATED = 1


class Attention(enum.IntEnum):
    """FULL: every token before. WINDOW: the last window_tokens."""

    FULL = 0
    WINDOW = 1


class Tier(enum.IntEnum):
    """Where a block is."""

    GPU = 0
    HOST = 1
    DISK = 2
    PEER = 3


class DataPath(enum.IntEnum):
    """How the bytes of stores and fetches travel.

    AUTO: over UCX to a daemon that is not local and offers it, else with the gRPC messages. UCX: so, or the calls fail.
    """

    AUTO = 0
    INLINE = 1
    UCX = 2


class MapMemory(enum.IntEnum):
    """Which memory blocks are mapped in. IN_PLACE: where they are, in host memory or on the daemon's GPU. GPU: there; they
    are brought to it first."""

    HOST = 0
    IN_PLACE = 1
    GPU = 2


class EncodeIn(enum.IntEnum):
    """Where 16-bit values become tiles. AUTO: here for a daemon that is not local, so that only tiles travel."""

    AUTO = 0
    CLIENT = 1
    DAEMON = 2


class WhenAway(enum.IntEnum):
    """What calls come to while no daemon answers: it is being restarted, or died, or drains.

    FAIL: they raise. MISS: lookup, fetch and map find nothing, store and store_pages drop their blocks (Outcome.DROPPED),
    touch is 0, and `away` of the result says why; registrations of memory stay, and are made again when the daemon is back.
    The other calls raise as ever, so do stores with wait_durable, and a store_pages with DeadlineExceededError, whose
    pages may be read still.
    """

    FAIL = 0
    MISS = 1


@dataclasses.dataclass(frozen=True)
class Tls:
    """TLS of a connection over TCP: PEM files, read again when they change.

    Attributes:
        ca: The authorities of the daemon's certificate.
        certificate: The client's own, and its key; both or none.
        server_name: In the daemon's certificate, where it is not the host of the address.
    """

    ca: str
    certificate: str = ""
    key: str = ""
    server_name: str = ""


class SessionEventKind(enum.IntEnum):
    """What the daemon says without being asked.

    DRAINING: it takes no more stores and will end. LEASES_EXPIRED: before they were given back or renewed. ENDED: nothing
    of the session is held any more, map and register again.
    """

    DRAINING = 0
    LEASES_EXPIRED = 1
    ENDED = 2


@dataclasses.dataclass(frozen=True)
class SessionEvent:
    """`leases`: how many expired."""

    kind: SessionEventKind
    leases: int


class Outcome(enum.IntEnum):
    """What storing a block came to.

    STORED: complete, and completed by this call. EXISTING: it was there, the first bytes stay. PARTIAL: this call's
    heads are in place, other writers still owe some. DROPPED: no daemon was there to take it (WhenAway.MISS).
    """

    FAILED = 0
    STORED = 1
    EXISTING = 2
    PARTIAL = 3
    DROPPED = 4


@dataclasses.dataclass(frozen=True)
class LayerGroup:
    """Layers that share geometry and attention rule.

    Attributes:
        layers: Layer numbers of the model, ascending, disjoint between groups.
        kv_heads: Of the whole model, not of one tensor-parallel rank.
        head_dim: 64, 128 or 256.
        window_tokens: With Attention.WINDOW only.
    """

    layers: Sequence[int]
    kv_heads: int
    head_dim: int
    attention: Attention = Attention.FULL
    window_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class NamespaceSpec:
    """Everything that must be equal before bytes may be reused; docs/client.md explains each field."""

    groups: Sequence[LayerGroup]
    model: str = ""
    revision: str = ""
    adapter_digest: str = ""
    salt: str = ""
    hash_scheme: str = ""
    source_dtype: DType = DType.FLOAT16
    block_tokens: int = 128
    key_bits: int = 4
    value_bits: int = 2
    frame: Frame = Frame.MODEL
    sink_blocks: int = 0


class Namespace:
    """A namespace as the daemon knows it. A value: it outlives the client that opened it. Not picklable: another
    process opens it by its name."""

    def __init__(self, native: _native.Namespace) -> None:
        self._native = native
        groups, model, revision, adapter, salt, scheme, dtype, block_tokens, key_bits, value_bits, frame, sink = native.spec()
        self._spec = NamespaceSpec(
            tuple(LayerGroup(tuple(layers), heads, dim, Attention(attention), window)
                  for layers, heads, dim, attention, window in groups),
            model, revision, adapter, salt, scheme, DType(dtype), block_tokens, key_bits, value_bits, Frame(frame), sink)

    @property
    def name(self) -> str:
        return self._native.name

    @property
    def fingerprint(self) -> str:
        """Lower-case hex."""
        return self._native.fingerprint

    @property
    def spec(self) -> NamespaceSpec:
        """What it was registered with, defaults filled in."""
        return self._spec

    @property
    def layer_count(self) -> int:
        """Layers of all groups. Layers are counted in the order of the groups and of the layers in them."""
        return self._native.layer_count

    def record_bytes(self, layer: int) -> int:
        """Bytes of one head's record of a layer; 0 for a layer that does not exist."""
        return self._native.record_bytes(layer)

    def page_bytes_max(self, layer: int) -> int:
        """The most bytes that a page of all heads of a layer can have."""
        return self._native.page_bytes_max(layer)

    def empty(self, block_count: int, head_count: int = 0) -> List[List[Tuple[Any, Any]]]:
        """New numpy arrays for `fetch`: per block, per layer (k, v) of shape [block_tokens, heads, head_dim].

        float16, or uint16 (the bits of bfloat16, for which numpy has no type).
        """
        import numpy  # pylint: disable=import-outside-toplevel  # The rest of the package does without.

        dtype = numpy.float16 if self._spec.source_dtype == DType.FLOAT16 else numpy.uint16
        shapes = [(self._spec.block_tokens, head_count or group.kv_heads, group.head_dim)
                  for group in self._spec.groups for _ in group.layers]
        return [[(numpy.empty(shape, dtype), numpy.empty(shape, dtype)) for shape in shapes]
                for _ in range(block_count)]

    def __repr__(self) -> str:
        return f"<kvmill.Namespace {self.name!r} {self.fingerprint}>"

    def __reduce__(self) -> Any:
        raise TypeError("a Namespace belongs to its process: open it by its name in the other one")


@dataclasses.dataclass(frozen=True)
class Paged:
    """K or V of a block in an engine's paged cache.

    Attributes:
        cache: An array [pages, page_tokens, heads, head_dim]; a transposed view will do, too.
        pages: Numbers of the block's pages, in the order of its tokens.
    """

    cache: Any
    pages: Sequence[int]


# An array [tokens, heads, head_dim] of float16, bfloat16 or its bits (uint16), or pages of a cache. Arrays are objects
# with the buffer protocol or __dlpack__ (numpy, torch on the CPU, ...); they are used in place.
KV = Any
LayerInput = Union[Tuple[KV, KV], Any]  # (k, v), or the layer's records as bytes-like [heads][record_bytes].


@dataclasses.dataclass(frozen=True)
class Block:
    """A block to be stored.

    Attributes:
        key: 1 to 64 bytes: the engine's hash of its tokens and all before them, also of a tail.
        layers: One per layer of the namespace: (k, v), or records.
        parent: Key of the block before it; empty for the first.
        token_count: Less than block_tokens for a tail; None: block_tokens.
        block_index: Position in its sequence.
    """

    key: bytes
    layers: Sequence[LayerInput]
    parent: bytes = b""
    token_count: Optional[int] = None
    block_index: int = 0


class EngineElement(enum.IntEnum):
    """What an engine's pages hold. RECORDS: records of the namespace's tile format, one a head."""

    FLOAT16 = 0
    BFLOAT16 = 1
    RECORDS = 2


@dataclasses.dataclass(frozen=True)
class Tail:
    """An unfinished last block that would be of use if it were stored.

    Attributes:
        key: The engine's hash of its tokens and all before them.
        token_count: Less than block_tokens.
        block_index: Position in its sequence: so many whole blocks are before it. Counts when all of them are there,
            and the next is not.
    """

    key: bytes
    token_count: int
    block_index: int


@dataclasses.dataclass(frozen=True)
class LookupResult:
    """Attributes:
        hit_blocks: Length of the longest available prefix of the keys.
        hit_tokens: Of those blocks, the tail not counted.
        tiers: Per hit block the slowest over its layer groups.
        tail_tokens: Of the longest tail asked for that is there; 0: none.
        tail_key: What it is stored under: for fetch and remove.
        away: Why no daemon answered (WhenAway.MISS); empty: one did.
    """

    hit_blocks: int
    hit_tokens: int
    tiers: Tuple[Tier, ...]
    tail_tokens: int
    tail_key: bytes
    away: str = ""


@dataclasses.dataclass(frozen=True)
class StoredBlock:
    """`error` is None when the block is in place, or was dropped."""

    outcome: Outcome
    error: Optional[Error]


@dataclasses.dataclass(frozen=True)
class StoreResult:
    """One StoredBlock per block; the sums are of the blocks that this call stored. `away`: why no daemon took the dropped
    ones (WhenAway.MISS); empty: there are none."""

    blocks: Tuple[StoredBlock, ...]
    blocks_stored: int
    blocks_existing: int
    blocks_failed: int
    raw_bytes: int
    stored_bytes: int
    tile_bytes: int
    tile_raw_bytes: int
    raw_heads: int
    blocks_dropped: int = 0
    away: str = ""


@dataclasses.dataclass(frozen=True)
class FetchedBlock:
    """`error` is None for a hit. Every error is a miss to an engine: compute K and V again; what is in the block's
    memory is of no use then.

    Attributes:
        page_bytes: With `fetch_pages` the length of each layer's page, else empty.
    """

    error: Optional[Error]
    tier: Tier
    token_count: int
    page_bytes: Tuple[int, ...] = ()

    @property
    def hit(self) -> bool:
        return self.error is None


@dataclasses.dataclass(frozen=True)
class FetchResult:
    """One FetchedBlock per key. `page_bytes` arrived and were verified. `away`: why no daemon answered (WhenAway.MISS);
    empty: one did."""

    blocks: Tuple[FetchedBlock, ...]
    page_bytes: int
    away: str = ""


@dataclasses.dataclass(frozen=True)
class TierUsage:
    tier: Tier
    used_bytes: int
    capacity_bytes: int
    blocks: int


@dataclasses.dataclass(frozen=True)
class Stat:
    """The daemon's state, for people and monitors."""

    blocks: int
    pages: int
    sessions: int
    leases: int
    tiers: Tuple[TierUsage, ...]
    raw_bytes_ingested: int
    encoded_bytes_stored: int
    lookup_blocks: int
    hit_blocks: int
    checksum_failures: int
    unwritten_blocks: int
    metadata_bytes: int
    boot_id: str
    uptime_s: float
