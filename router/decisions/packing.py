"""Packs placements for keeping them in memory, because nearly none of them is ever read again.

A packed placement takes about a hundred bytes per shard and microseconds to make, and it holds no objects that the
garbage collector would have to traverse.
"""

from __future__ import annotations

from typing import Final

import msgspec

from router.core.actions import PlacementDecided
from router.core.placement.plan import ShardPlan, in_order
from router.decisions.records import AttemptRecord, ScoreRecord


class _Shard(msgspec.Struct, array_like=True, gc=False):
    shard_id: str
    num_overlap_tokens: int
    num_running: int
    num_waiting: int
    num_queued_prefill_tokens: int
    predicted_ttft_seconds: float
    terms: tuple[float, ...]


class _Attempt(msgspec.Struct, array_like=True, gc=False):
    attempt_id: int
    decided_at: float
    picked_shard_id: str
    best_shard_id: str
    term_names: tuple[str, ...]
    shards: list[_Shard]
    filtered: list[tuple[str, str]]
    """(shard id, reason)"""


_encode: Final = msgspec.msgpack.Encoder().encode
_decoder: Final = msgspec.msgpack.Decoder(_Attempt)


def pack_attempt(decision: PlacementDecided, decided_at: float) -> bytes:
    """`decided_at` is in Unix seconds."""
    pick = decision.pick
    shards = [
        (
            candidate.shard_id,
            candidate.num_overlap_tokens,
            candidate.num_running,
            candidate.num_waiting,
            candidate.num_queued_prefill_tokens,
            candidate.predicted_ttft_seconds,
            terms,
        )
        for candidate, terms in zip(pick.candidates, pick.terms, strict=True)
    ]
    filtered = [(shard.shard_id, shard.filtered_reason) for shard in pick.filtered]
    return _encode(
        (
            decision.attempt_id,
            decided_at,
            pick.picked_shard_id,
            pick.best_shard_id,
            pick.term_names,
            shards,
            filtered,
        )
    )


def unpack_attempt(packed: bytes) -> AttemptRecord:
    attempt = _decoder.decode(packed)
    plans = [
        ShardPlan(
            shard_id=shard.shard_id,
            num_overlap_tokens=shard.num_overlap_tokens,
            num_running=shard.num_running,
            num_waiting=shard.num_waiting,
            num_queued_prefill_tokens=shard.num_queued_prefill_tokens,
            predicted_ttft_seconds=shard.predicted_ttft_seconds,
            cost_seconds=sum(shard.terms),
            cost_terms=dict(zip(attempt.term_names, shard.terms, strict=True)),
        )
        for shard in attempt.shards
    ]
    plans += [ShardPlan(shard_id, filtered_reason=reason) for shard_id, reason in attempt.filtered]
    return AttemptRecord(
        attempt_id=attempt.attempt_id,
        decided_at=attempt.decided_at,
        picked_shard_id=attempt.picked_shard_id,
        shards=[_score(plan) for plan in in_order(plans, attempt.picked_shard_id, attempt.best_shard_id)],
    )


def _score(shard: ShardPlan) -> ScoreRecord:
    return ScoreRecord(
        shard_id=shard.shard_id,
        num_overlap_tokens=shard.num_overlap_tokens,
        num_running=shard.num_running,
        num_waiting=shard.num_waiting,
        num_queued_prefill_tokens=shard.num_queued_prefill_tokens,
        predicted_ttft_seconds=shard.predicted_ttft_seconds,
        cost_seconds=shard.cost_seconds,
        cost_terms=shard.cost_terms,  # pyrefly: ignore[bad-argument-type]  (Any mapping can be encoded.)
        filtered_reason=shard.filtered_reason,
    )
