"""Keeps what a placement predicts for its request, and judges it by what happened.

Only the first placement of a request predicts (router/core/placement/predict.py). Times count from the arrival of the
request at the router where a name says "after". The numbers are kept, and judged only for those who ask.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import msgspec

from router.core.load.load_view import MAX_PREFILL_SHARE


class PredictedTerm(enum.StrEnum):
    WAITING = "waiting"
    """From the placement until the shard begins the prefill: in the router and in the engine, for its turn and for KV
    memory."""
    PREFILL = "prefill"
    """From there to the first token."""
    TTFT = "ttft"
    """From the placement to the first token: the two together."""
    DECODING = "decoding"
    """From the first token to the end."""
    END = "end"
    """From the placement to the end."""


class JudgedTerm(NamedTuple):
    term: PredictedTerm
    predicted_seconds: float
    actual_seconds: float | None
    """None: it cannot be told, because the request did not come that far, was moved to another shard, or had its prompt
    computed in parts."""

    @property
    def error_seconds(self) -> float | None:
        """By how much it took longer than predicted."""
        return None if self.actual_seconds is None else self.actual_seconds - self.predicted_seconds


class PlacementPrediction(msgspec.Struct, gc=False):
    """The first placement's prediction of one request, with what is needed to judge it."""

    placed_after_seconds: float
    waiting_seconds: float
    prefill_seconds: float
    num_expected_tokens: int
    """The expected length of each of its answers."""
    step_seconds: float
    """The duration of a decode step with it; 0: not known."""
    prefill_share: float
    """Share of the shard's time that prefill takes."""
    started_after_seconds: float | None = None
    """When its first shard gave its first token. None: it has not, or another one did."""
    engine_queue_seconds: float | None = None
    """How long it waited in that engine's queue. None: not known, or its prompt was computed in parts."""

    @property
    def ttft_seconds(self) -> float:
        """From the request's arrival to its first token, as predicted when it was first placed."""
        return self.placed_after_seconds + self.waiting_seconds + self.prefill_seconds

    @property
    def decoding_seconds(self) -> float:
        share = min(self.prefill_share, MAX_PREFILL_SHARE)
        return max(0, self.num_expected_tokens - 1) * self.step_seconds / (1 - share)

    def judge(self, dispatched_after_seconds: float, ended_after_seconds: float, *, is_whole: bool) -> list[JudgedTerm]:
        """`is_whole`: its answer is complete, and all of it is the first shard's."""
        term = PredictedTerm
        ttft = self.waiting_seconds + self.prefill_seconds
        decoding = self.decoding_seconds
        started = self.started_after_seconds
        waiting_after = prefill_after = ttft_after = decoding_after = end_after = None
        if started is not None:
            ttft_after = started - self.placed_after_seconds
            if self.engine_queue_seconds is not None:
                prefill_after = max(0.0, started - dispatched_after_seconds - self.engine_queue_seconds)
                waiting_after = ttft_after - prefill_after
            if is_whole:
                decoding_after = ended_after_seconds - started
                end_after = ttft_after + decoding_after
        judged = [
            JudgedTerm(term.WAITING, self.waiting_seconds, waiting_after),
            JudgedTerm(term.PREFILL, self.prefill_seconds, prefill_after),
            JudgedTerm(term.TTFT, ttft, ttft_after),
        ]
        if self.step_seconds:
            judged.append(JudgedTerm(term.DECODING, decoding, decoding_after))
            judged.append(JudgedTerm(term.END, ttft + decoding, end_after))
        return judged
