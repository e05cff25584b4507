"""The engine's memory: shared with the daemon, described to it, and stored from without a copy."""
from __future__ import annotations

import dataclasses
from typing import Any, Optional, Sequence, Tuple

from kvmill import _native
from kvmill._types import EngineElement


class SharedMemory:
    """Memory that a daemon on this node can read: KV pages live in it, are registered (EngineRegion) and stored from without
    a copy (Client.store_pages).

        memory = kvmill.SharedMemory(bytes)
        cache = memory.array((pages, 16, heads, head_dim), numpy.float16)

    Zeros at first, in whole pages of the system. It lives as long as this or an array of it does. Not there in a child of
    fork(): touching it ends the child. Not picklable.
    """

    def __init__(self, bytes: int) -> None:  # pylint: disable=redefined-builtin
        self._native = _native.SharedMemory(bytes)

    @property
    def address(self) -> int:
        return self._native.address

    @property
    def bytes(self) -> int:
        return self._native.bytes

    @property
    def fd(self) -> int:
        """The memory's own descriptor."""
        return self._native.fd

    def array(self, shape: Sequence[int], dtype: Any, offset: int = 0) -> Any:
        """A writable numpy array in it, in C order, from byte `offset` on. ValueError when it does not fit."""
        import numpy  # pylint: disable=import-outside-toplevel  # The rest of the package does without.

        return numpy.ndarray(tuple(shape), dtype, self._native, offset)

    def __reduce__(self) -> Any:
        raise TypeError("a SharedMemory belongs to its process")

    def __repr__(self) -> str:
        return f"<kvmill.SharedMemory {self.bytes} bytes at {self.address:#x}>"


def native_of(memory: Optional[SharedMemory]) -> Optional[_native.SharedMemory]:
    """What the calls pass on."""
    if memory is not None and not isinstance(memory, SharedMemory):
        raise TypeError(f"a {type(memory).__name__} is not a SharedMemory")
    return None if memory is None else memory._native  # pylint: disable=protected-access  # This package's.


@dataclasses.dataclass(frozen=True)
class DeviceHandle:
    """Names memory of a GPU that a daemon on this node uses as well; `Client.export_memory` makes one.

    Attributes:
        handle: 64 bytes: what cudaIpcGetMemHandle says of the allocation.
        allocation_bytes: Of the allocation, or at least up to the region's end.
        offset: Of the region in it.
        device: UUID of the GPU, 16 bytes; empty: unsaid.
    """

    handle: bytes
    allocation_bytes: int
    offset: int = 0
    device: bytes = b""


@dataclasses.dataclass(frozen=True)
class EngineRegion:
    """Consecutive bytes; `base` is an address in this process, or one of a GPU.

    Attributes:
        memory: That holds the region from byte `offset` on; None: memory of this process alone, or a GPU's.
        device: Of memory of a GPU.
    """

    base: int
    bytes: int
    memory: Optional[SharedMemory] = None
    offset: int = 0
    device: Optional[DeviceHandle] = None

    @classmethod
    def of(cls, memory: SharedMemory, offset: int = 0, bytes: Optional[int] = None) -> "EngineRegion":  # pylint: disable=redefined-builtin
        """All of shared memory, or `bytes` from `offset` on."""
        return cls(memory.address + offset, memory.bytes - offset if bytes is None else bytes, memory, offset)


@dataclasses.dataclass(frozen=True)
class EnginePlace:
    """Where page 0 of a layer's K (or V, or records) lies; `region` counts in EngineGeometry.regions."""

    region: int
    offset_bytes: int


@dataclasses.dataclass(frozen=True)
class EngineLayers:
    """The layers of one layer group that this rank holds; client/kvmill_engine.h has the formula.

    Attributes:
        keys: One for each layer, from layer_begin of the group on; for records these too.
        values: As many; none for records.
        page_bytes: With contents, padding inside included.
        page_stride_bytes: From one page to the next, padding behind included.
        head_begin, head_count: Of the model's heads: a tensor-parallel rank's range.
    """

    keys: Sequence[EnginePlace]
    values: Sequence[EnginePlace]
    page_count: int
    page_bytes: int
    page_stride_bytes: int
    token_stride_bytes: int
    head_stride_bytes: int
    block_tokens: int
    page_tokens: int
    head_dim: int
    head_count: int
    head_begin: int = 0
    group: int = 0
    layer_begin: int = 0
    element: EngineElement = EngineElement.FLOAT16


@dataclasses.dataclass(frozen=True)
class EngineGeometry:
    """An engine's own KV memory. `assembling_boot_id`: of the daemon that assembles the blocks of all ranks; empty: the
    one that is asked."""

    regions: Sequence[EngineRegion]
    layers: Sequence[EngineLayers]
    assembling_boot_id: str = ""


@dataclasses.dataclass(frozen=True)
class PageBlock:
    """A block in pages of registered memory.

    Attributes:
        key: 1 to 64 bytes: the engine's hash of its tokens and all before them, also of a tail.
        pages: For each layer group of the namespace the numbers of the pages with the block's tokens, in their order; none
            for a group of which the registration has no layers.
        parent: Key of the block before it; empty for the first.
        token_count: Less than block_tokens for a tail; None: block_tokens.
        block_index: Position in its sequence.
    """

    key: bytes
    pages: Sequence[Sequence[int]]
    parent: bytes = b""
    token_count: Optional[int] = None
    block_index: int = 0


def region_fields(region: EngineRegion) -> Tuple[Any, ...]:
    """As the native client takes it."""
    if region.memory is not None and region.device is not None:
        raise ValueError("a region in shared memory and on a GPU: it is in one of them")
    device = region.device
    if device is None:
        return region.base, region.bytes, native_of(region.memory), region.offset, None
    return region.base, region.bytes, None, device.offset, (device.handle, device.allocation_bytes, device.device)
