"""How many shards a load needs. Pure: time is an argument.

Each term says how many shards would bring one measure to its target, and the largest counts:

    kv       sequences hold `kv_usage` of the KV blocks
    batch    sequences fill `batch_share` of the batches
    prefill  computing prompts takes `prefill_share` of the time
    queue    the work that waits is done within `catch_up_seconds`, if it takes longer than `queue_seconds`
    ttft     the first tokens of nine in ten requests come in time
    tpot     so do the later ones, with something to spare

All but `ttft` also say when shards are too many; a short time to first token does not, since it is short until a fleet
is full. More shards are wanted at once; fewer only when nothing has needed more for `scale_in_seconds`, which are
longer than a shard needs to start. A policy that has just begun has seen nothing: it wants no fewer than there are.

Every model keeps a shard: routers refuse requests for a model without one at once, so that none would wait to wake it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Annotated, Final

import msgspec

from tools.scaler.load import ModelLoad

MAX_GROWTH: Final = 4.0
"""A late first token asks for at most so many times the shards: it says that there are too few, not how few."""
_ROUNDING: Final = 0.05
"""A twentieth of a shard is not worth another one."""

Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Positive = Annotated[float, msgspec.Meta(gt=0)]


class ScalingTargets(msgspec.Struct, frozen=True, kw_only=True):
    ttft_seconds: Positive = 2.0
    """The objective for nine in ten requests."""
    tpot_seconds: Positive = 0.1
    tpot_share: Share = 0.85
    """Nine in ten requests are kept within this share of `tpot_seconds`, and so nearly all within the whole."""
    kv_usage: Share = 0.8
    batch_share: Share = 0.9
    prefill_share: Share = 0.6
    queue_share: Share = 0.5
    """Work of this share of `ttft_seconds` may wait."""
    catch_up_seconds: Positive = 30.0
    scale_in_seconds: Positive = 300.0

    @property
    def queue_seconds(self) -> float:
        return self.queue_share * self.ttft_seconds


class Recommendation(msgspec.Struct, frozen=True):
    num_shards: int
    """The model should have so many; 0: nobody has used it for long."""
    num_needed: int
    """The present load alone asks for so many."""
    terms: Mapping[str, float]
    """Shards by term; terms that are not known now are left out."""


class ScalingPolicy:
    """The policy of one model. It remembers what was needed before, and how fast a shard was."""

    def __init__(self, targets: ScalingTargets) -> None:
        self._targets = targets
        self._needed: deque[tuple[float, int]] = deque()
        """(time, shards), of which each is larger than all that follow: the first one counts."""
        self._prefill_speed = 0.0
        """That of one shard, the last that was known."""

    def recommend(self, load: ModelLoad, now: float) -> Recommendation:
        """`now` never goes back."""
        if load.num_shards and load.prefill_tokens_per_second:
            self._prefill_speed = load.prefill_tokens_per_second / load.num_shards
        terms = shards_by_term(load, self._targets, self._prefill_speed)
        needed = max(0 if load.is_idle else 1, math.ceil(max(terms.values(), default=0.0) - _ROUNDING))
        present = 0 if self._needed else load.num_shards
        horizon = now - self._targets.scale_in_seconds
        while self._needed and self._needed[0][0] <= horizon:
            self._needed.popleft()
        while self._needed and self._needed[-1][1] <= needed:
            self._needed.pop()
        self._needed.append((now, max(needed, present)))
        return Recommendation(self._needed[0][1], needed, terms)


def shards_by_term(load: ModelLoad, targets: ScalingTargets, prefill_speed: float) -> dict[str, float]:
    """`prefill_speed`: tokens per second of one shard; 0 if it has never been known."""
    count = load.num_shards
    terms: dict[str, float] = {}
    if count:
        terms["kv"] = count * load.kv_usage / targets.kv_usage
        terms["batch"] = count * load.batch_share / targets.batch_share
        if load.tpot_seconds is not None:
            terms["tpot"] = count * min(load.tpot_seconds / (targets.tpot_share * targets.tpot_seconds), MAX_GROWTH)
        if load.ttft_seconds is not None and load.ttft_seconds > targets.ttft_seconds:
            terms["ttft"] = count * min(load.ttft_seconds / targets.ttft_seconds, MAX_GROWTH)
    if prefill_speed:
        terms["prefill"] = load.computed_tokens_per_second / (prefill_speed * targets.prefill_share)
        shard_seconds = load.num_queued_prefill_tokens / prefill_speed
        if shard_seconds > targets.queue_seconds * count:
            terms["queue"] = count + shard_seconds / targets.catch_up_seconds
    elif load.num_queued_requests:
        terms["queue"] = count + 1.0
    return terms
