"""Blocks in the daemon's own memory: read and attended to in place."""
from __future__ import annotations

import dataclasses
import enum
import numbers
from typing import Any, Dict, Optional, Sequence, Tuple, Type

from kvmill import _native
from kvmill._errors import Error, error_of
from kvmill._types import DType, Namespace, Tier


class HeadKind(enum.IntEnum):
    """What a KV head of a block is. TILE: one record; RAW: 16-bit K, then V."""

    ABSENT = 0
    TILE = 1
    RAW = 2


@dataclasses.dataclass(frozen=True)
class MappedBlock:
    """`error` is None for a hit; every error is a miss to an engine."""

    error: Optional[Error]
    tier: Tier
    token_count: int

    @property
    def hit(self) -> bool:
        return self.error is None


class DeviceArray:
    """Bytes of a block on the daemon's GPU, in place, to be read by kernels on the client's device.

    For whoever takes the CUDA array interface (`torch.as_tensor(array, device="cuda")`, cupy.asarray): read-only bytes. What a
    kernel read counts when its stream was synchronized and `Mapped.check()` raised nothing afterwards. Keeps the memory
    mapped.
    """

    def __init__(self, memory: _native.DeviceMemory, is_cuda: bool) -> None:
        self._memory = memory
        self._is_cuda = is_cuda

    @property
    def address(self) -> int:
        """In the device's memory."""
        return self._memory.address

    @property
    def nbytes(self) -> int:
        return self._memory.bytes

    @property
    def __cuda_array_interface__(self) -> Dict[str, Any]:
        if not self._is_cuda:
            raise AttributeError("the client's device is host memory that stands in for a GPU")
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, True), "strides": None, "version": 3}

    def __repr__(self) -> str:
        return f"<kvmill.DeviceArray {self.nbytes} bytes at {self.address:#x}>"


@dataclasses.dataclass(frozen=True)
class MappedHead:
    """One KV head of one block, in place: read-only numpy arrays, or a DeviceArray.

    Attributes:
        data: Its bytes: a record, or K and V in 16 bits; None when absent.
        tokens: block_tokens, or less in a tail.
        k, v: Of a RAW head [tokens, head_dim] of float16, or of uint16 with the bits of bfloat16; else None, as of a head
            on the GPU, where K comes first in `data`.
    """

    kind: HeadKind
    data: Any
    tokens: int
    k: Any = None
    v: Any = None


class Mapped:
    """Blocks under lease, as memory of this process; `Client.map` makes them. Any thread may use one.

        with client.map(ns, keys) as mapped:
            output, log_sum_exp = mapped.attend(layer, query)

    A lease has an end, and a process may be stopped for longer. What was read counts only when `check()` raised nothing
    afterwards: it looks at the time and at the generation of every page that was read, which changes when its memory
    becomes another block's. AbortedError (a lease is over, the memory is another block's, the session ended, the client was closed) is
    final: throw away what was computed, map again or compute K and V. `attend` checks by itself.

    After `release()`, and after an expiry, every method raises AbortedError. Arrays that were handed out keep the memory
    mapped, so reading one is never a fault; but it may be another block's by then, which is what `check()` is for. In a
    child of fork() the memory is not there at all: methods raise FailedPreconditionError, and reading an array of the
    parent's ends the process. Not picklable: another process maps for itself.
    """

    def __init__(self, native: _native.Mapped, ns: Namespace, client: Any, is_cuda: bool = False) -> None:
        self._native = native
        self._is_cuda = is_cuda
        self._ns = ns
        self._client = client
        self._blocks = tuple(MappedBlock(error_of(code, message, retry) if code else None, Tier(tier), tokens)
                             for code, message, retry, tier, tokens in native.blocks())

    @property
    def blocks(self) -> Tuple[MappedBlock, ...]:
        """One for each key."""
        return self._blocks

    @property
    def namespace(self) -> Namespace:
        return self._ns

    @property
    def seconds_left(self) -> float:
        """Until `check()` can no longer succeed; 0 when that is past."""
        return self._native.left_ms / 1000

    def memory(self, block: int, layer: int) -> Tier:
        """Where the pages of a layer of a block are: Tier.HOST, or Tier.GPU. Raises the block's error when it is not
        there."""
        return Tier(self._native.memory(block, layer))

    def page(self, block: int, layer: int) -> Any:
        """The page of a layer, as docs/formats.md has it: a read-only numpy array of uint8, in place; of a page on the GPU a
        DeviceArray. Raises the block's error when it is not there."""
        return self._show(self._native.page(block, layer))

    def heads(self, block: int, layer: int) -> Sequence[MappedHead]:
        """The KV heads of a layer of a block, in place."""
        import numpy  # pylint: disable=import-outside-toplevel  # The rest of the package does without.

        heads = []
        for kind, memory, tokens in self._native.heads(self._ns._native, block, layer):  # pylint: disable=protected-access
            data = None if memory is None else self._show(memory)
            k = v = None
            if kind == HeadKind.RAW and not isinstance(data, DeviceArray):
                dtype = numpy.float16 if self._ns.spec.source_dtype == DType.FLOAT16 else numpy.uint16
                k, v = data.view(dtype).reshape(2, tokens, -1)
            heads.append(MappedHead(HeadKind(kind), data, tokens, k, v))
        return heads

    def _show(self, memory: Any) -> Any:
        return DeviceArray(memory, self._is_cuda) if isinstance(memory, _native.DeviceMemory) else _array(memory)

    def check(self, first: int = 0, count: Optional[int] = None) -> None:
        """Raises AbortedError unless everything that was read so far of these blocks (all of them) was right; after
        reading. Some nanoseconds a page."""
        self._native.check(first, max(len(self._blocks) - first, 0) if count is None else count)

    def verify(self) -> None:
        """Reads everything and compares all checksums: nobody but the daemon can write there, so that is for those who
        want it. DataLossError names the first that is wrong."""
        self._native.verify()

    def renew(self, lease: float = 10.0, *, timeout: Optional[float] = None) -> Any:
        """As Client.renew; of an AsyncClient's blocks to be awaited."""
        return self._client.renew(self, lease, timeout=timeout)

    def release(self) -> None:
        """Gives the leases back, without waiting for the daemon. May be called again."""
        self._native.release()

    def attend(self, layer: int, query: Any, *, first_block: int = 0, block_count: int = 0, query_offset: int = 0,
               head_begin: int = 0, head_count: int = 0, window_tokens: int = 0, scale: float = 0.0,
               soft_cap: float = 0.0) -> Tuple[Any, Any]:
        """Decode attention over the blocks, which are consecutive ones of a sequence; only the last may be a tail.

        Of blocks in host memory: FailedPreconditionError names one that is on the GPU.

        Runs on the calling thread with the GIL released (`asyncio.to_thread` in an event loop), and checks the blocks
        before it returns: what it returns is right.

        Args:
            layer: Counted in the order of the namespace's groups.
            query: [query heads, head_dim], or [queries, query heads, head_dim]: float32, float16, or uint16 with the bits
                of bfloat16. Query head i reads KV head i // (query heads // KV heads). In the namespace's frame.
            first_block, block_count: The blocks; 0, 0: all.
            query_offset: Position of the first query from the end of the blocks: 0 is the token right behind them, -1
                their last token. Query i is at query_offset + i, and sees no token behind itself.
            head_begin, head_count: KV heads that the queries belong to, a tensor-parallel rank's. 0, 0: all.
            window_tokens: A query sees that many tokens, its own included. 0: what the layer group says.
            scale: Multiplies q * k; 0: 1 / sqrt(head_dim).
            soft_cap: c > 0: logits become c * tanh(logit / c).

        Returns:
            (output, log_sum_exp), float32 arrays of the query's shape and of that without head_dim. With the natural
            logarithm of the sums of exponentials, outputs over other tokens of the sequence are merged exactly. Where a
            query sees no token: 0 and minus infinity.
        """
        import numpy  # pylint: disable=import-outside-toplevel

        for name, number in (("layer", layer), ("first_block", first_block), ("block_count", block_count),
                             ("query_offset", query_offset), ("head_begin", head_begin), ("head_count", head_count),
                             ("window_tokens", window_tokens)):
            if not hasattr(number, "__index__"):
                raise TypeError(f"{name}: a {type(number).__name__}, want a whole number")
        for name, real in (("scale", scale), ("soft_cap", soft_cap)):
            if not isinstance(real, numbers.Real):
                raise TypeError(f"{name}: a {type(real).__name__}, want a number")
        given, query = query, numpy.ascontiguousarray(query)
        if query.dtype.kind in "OUSMm":
            raise TypeError(f"query: a {type(given).__name__}, want an array of numbers")
        if query.ndim not in (2, 3):
            raise ValueError(f"a query of {query.ndim} dimensions, want [query heads, head_dim] or one more in front")
        output = numpy.empty(query.shape, numpy.float32)
        log_sum_exp = numpy.empty(query.shape[:-1], numpy.float32)
        whole = query.ndim == 3
        self._native.attend(self._ns._native, layer, query if whole else query[None],  # pylint: disable=protected-access
                            output, log_sum_exp, (first_block, block_count, query_offset, head_begin, head_count,
                                                  window_tokens, scale, soft_cap))
        return output, log_sum_exp

    def __enter__(self) -> "Mapped":
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Any) -> None:
        self.release()

    def __len__(self) -> int:
        return len(self._blocks)

    def __repr__(self) -> str:
        return f"<kvmill.Mapped {len(self)} blocks of {self._ns.name!r}, {self.seconds_left:.3f} s left>"

    def __reduce__(self) -> Any:
        raise TypeError("a Mapped belongs to its process: map the blocks in the other one")


def native_of(mapped: Mapped) -> _native.Mapped:
    """What the calls pass on."""
    if not isinstance(mapped, Mapped):
        raise TypeError(f"a {type(mapped).__name__} is not a Mapped")
    return mapped._native  # pylint: disable=protected-access  # This package's.


def _array(memory: _native.Memory) -> Any:
    """Without a copy; the array keeps the memory mapped."""
    import numpy  # pylint: disable=import-outside-toplevel

    return numpy.frombuffer(memory, numpy.uint8)
