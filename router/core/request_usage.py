"""Counts what a usage record needs of a request beyond what metrics need: kept only where usage is metered for
tenants."""

from __future__ import annotations

import msgspec

from kvloom.adapters import Adapter
from kvloom_common.tenancy.usage_record import Charge
from router.core.events import Request, TierRank


class RequestUsage(msgspec.Struct, frozen=True):
    """A part of RequestEnded."""

    tier: TierRank
    adapter: Adapter | None
    key_id: str
    answer_id: str
    num_resumed_tokens: int
    """Output tokens of all choices that the answer already had when it arrived here, to be continued."""
    block_seconds: float
    """KV blocks times the seconds for which shards held them: an estimate, by what the attempts reserved for the prompt
    and half of the blocks of the output, since these were taken one after another."""
    num_reasoning_tokens: int = 0
    """The reasoning tokens among the output tokens that its record has, from choices that have ended."""
    charges: tuple[Charge, ...] = ()
    """The amounts of hard budgets that it has used."""
    limits: str = ""
    """The limits that applied, for explanations."""


class UsageMeter:
    """Counts the usage of one live request."""

    __slots__ = ("_block_seconds", "_block_size", "_held_since", "_num_blocks", "num_reasoning_tokens")

    def __init__(self) -> None:
        self.num_reasoning_tokens = 0
        """The reasoning tokens of the choices that have ended, as far as the record of this request counts them."""
        self._block_seconds = 0.0
        """The block seconds of earlier attempts."""
        self._num_blocks = 0
        """The blocks that the attempt has reserved; 0 while there is none."""
        self._block_size = 1
        self._held_since = 0.0

    def hold(self, num_blocks: int, block_size: int, now: float) -> None:
        """An attempt begins, which has reserved so many blocks."""
        self.release(now)
        self._num_blocks, self._block_size, self._held_since = num_blocks, block_size, now

    def release(self, now: float) -> None:
        """The attempt has ended, or the first sequence of several."""
        self._block_seconds += self._num_blocks * (now - self._held_since)
        self._num_blocks = 0

    def usage(
        self,
        request: Request,
        num_output_tokens: int,
        num_reasoning_tokens: int,
        now: float,
        charges: tuple[Charge, ...] = (),
        limits: str = "",
    ) -> RequestUsage:
        """`num_output_tokens` without those that it had already."""
        block_seconds = self._block_seconds
        if self._num_blocks:
            num_blocks = self._num_blocks + num_output_tokens / (2 * self._block_size)
            block_seconds += num_blocks * (now - self._held_since)
        return RequestUsage(
            request.tier,
            request.adapter,
            request.key_id,
            request.answer_id,
            request.num_earlier_tokens,
            block_seconds,
            num_reasoning_tokens,
            charges,
            limits,
        )
