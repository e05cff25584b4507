"""Tickets: a prompt's blocks from the node that prefills to the node that decodes, while they are computed."""
from __future__ import annotations

import dataclasses
import enum
from typing import Any, List, Optional, Protocol, Sequence, Tuple

from kvmill._errors import Error, error_of


@dataclasses.dataclass(frozen=True)
class PromisedBlock:
    """A block that will be stored, as Block names it.

    Attributes:
        key: 1 to 64 bytes: the engine's hash of its tokens and all before them, also of a tail.
        parent: Key of the block before it; empty for the first.
        token_count: Less than block_tokens for a tail; None: block_tokens.
        block_index: Position in its sequence.
    """

    key: bytes
    parent: bytes = b""
    token_count: Optional[int] = None
    block_index: int = 0


class TicketFate(enum.IntEnum):
    """What became of a promised block at the node that redeems.

    OPEN: on its way; in updates only. SEALED: in the store, as the producer sealed it. EXISTS: in the store, somebody else
    stored it. MISSED: it will not come.
    """

    OPEN = 0
    SEALED = 1
    EXISTS = 2
    MISSED = 3


class TicketMiss(enum.IntEnum):
    """Why a block was missed. For logs and counters: to an engine they are the same.

    GIVEN_UP: by its writers, or the producer could not hold it. DAMAGED: what came was not what the producer sealed, again
    and again. NO_ROOM: for a copy, at the node that redeems. PRODUCER_GONE: it does not answer, or left the cluster.
    REVOKED: the ticket was, or the session of who made it ended. DEADLINE: the ticket's time was over. ENDED: the ticket
    had ended, which way nobody knows any more. REFUSED: the store of the node that redeems did not take it. CALL_ENDED: the
    redeem did before, its error says why.
    """

    NONE = 0
    GIVEN_UP = 1
    DAMAGED = 2
    NO_ROOM = 3
    PRODUCER_GONE = 4
    REVOKED = 5
    DEADLINE = 6
    ENDED = 7
    REFUSED = 8
    CALL_ENDED = 9


@dataclasses.dataclass(frozen=True)
class RedeemedBlock:
    """One layer group of a promised block, at the node where the ticket is redeemed.

    Attributes:
        key: What it is stored under: for fetch, map and touch. Of a tail not the engine's.
        layer_count: Of the group.
        layers_here: Of them, that came and are right.
        layer_bits: Which: bit i stands for layer i of the group.
    """

    key: bytes
    group: int
    block_index: int
    token_count: int
    layer_count: int
    fate: TicketFate
    miss: TicketMiss
    layers_here: int
    layer_bits: int

    @property
    def here(self) -> bool:
        """Whether it is in the store of the node: fetch and map see it."""
        return self.fate in (TicketFate.SEALED, TicketFate.EXISTS)

    def has_layer(self, layer: int) -> bool:
        """Whether this layer of the group came, though the block may not be sealed yet."""
        return bool(self.layer_bits >> layer & 1)


@dataclasses.dataclass(frozen=True)
class RedeemResult:
    """What a redeem came to, whichever way it ended.

    Attributes:
        error: None: the ticket was redeemed, which says nothing of its blocks. NotFoundError: there is no such ticket (any
            more); also of one of another tenant, or of a namespace that this daemon does not know. AbortedError: it was
            revoked, or its time was over. FailedPreconditionError: it is of another namespace, another process redeemed
            it, or the daemon is in no cluster. Error with PERMISSION_DENIED: it is for another node, or nodes do not
            share blocks of this tenant. ResourceExhaustedError: the daemon redeems as many as it may. UnavailableError: the producer does not
            answer or left the cluster; or the daemon. CallCancelledError: cancel_redeem, or the client was closed.
            DeadlineExceededError: the call's time was over. InvalidArgumentError: these bytes are no ticket.
        blocks: Each has its fate, whatever the error; what is `here` stays. Empty when it was never told which there are.
    """

    error: Optional[Error]
    blocks: Tuple[RedeemedBlock, ...]

    @property
    def missed(self) -> int:
        """Number of blocks that did not come."""
        return sum(block.fate == TicketFate.MISSED for block in self.blocks)


class RedeemUpdate(Protocol):
    """What is called with all blocks of the ticket (layer groups of a block next to each other), and the places of those
    that changed since the last update: at first all of them."""

    def __call__(self, blocks: Sequence[RedeemedBlock], changed: Sequence[int], /) -> None: ...


def _block(row: Tuple[Any, ...]) -> RedeemedBlock:
    key, group, block_index, token_count, layer_count, fate, miss, layers_here, words = row
    bits = sum(word << 64 * i for i, word in enumerate(words))
    # A newer library may know more reasons.
    why = TicketMiss(miss) if miss in set(TicketMiss) else TicketMiss.REFUSED
    return RedeemedBlock(key, group, block_index, token_count, layer_count, TicketFate(fate), why, layers_here, bits)


def redeem_result(value: Any) -> RedeemResult:
    code, message, retry_after_ms, rows = value
    return RedeemResult(error_of(code, message, retry_after_ms) if code else None, tuple(map(_block, rows)))


class Progress:
    """Of a redeem that runs: keeps its blocks, and tells what changed."""

    def __init__(self, ticket: bytes, update: RedeemUpdate) -> None:
        self.ticket = ticket
        self._update = update
        self._blocks: List[Any] = []

    def __call__(self, value: Any) -> None:
        count, changed = value
        if not self._blocks:
            self._blocks = [None] * count
        for index, row in changed:
            self._blocks[index] = _block(row)
        self._update(tuple(self._blocks), tuple(index for index, _ in changed))
