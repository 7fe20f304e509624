"""Follows what the caller of a request expects of its speed (docs/how-to/deadlines.md), and what has become of that."""

from __future__ import annotations

import enum
import math

import msgspec

from kvloom.v1.generation_pb2 import FINISH_REASON_CANCELLED, FINISH_REASON_ERROR, FinishReason


class Objectives(msgspec.Struct, frozen=True):
    """See Objectives in router_service.proto. None: there is no such objective."""

    deadline_seconds: float | None = None
    """From arrival to the last token. Only this one ever ends an admitted request."""
    ttft_seconds: float | None = None
    """From arrival to the first token."""
    tpot_seconds: float | None = None
    """The mean time between the tokens after the first."""
    elapsed_seconds: float = 0.0
    """How long ago it had arrived elsewhere when it arrived here."""
    is_admitted: bool = False
    """True when a router has admitted it before, so that it is not refused as impossible here."""

    @property
    def seconds_left(self) -> float:
        """From its arrival here to its deadline."""
        return math.inf if self.deadline_seconds is None else self.deadline_seconds - self.elapsed_seconds


class Cause(enum.StrEnum):
    """Why a request was refused as impossible."""

    LOAD = "load"
    """An idle fleet would meet its objectives."""
    SPEED = "speed"
    """Even an idle shard would be too slow."""


class ObjectivesOutcome(msgspec.Struct, frozen=True):
    """For each objective whether it was met; None: there is none, or it was not decided (a request that was cancelled
    in time, or an answer of one token)."""

    wanted: Objectives
    priority_class: str
    predicted_ttft_seconds: float | None
    """From arrival to the first token, as predicted on arrival; None: that was not known."""
    refused: Cause | None
    """Not None: it was refused as impossible, so that nothing else was decided."""
    deadline_met: bool | None = None
    ttft_met: bool | None = None
    tpot_met: bool | None = None


class LiveObjectives:
    """The objectives of a live request, as times of the core's clock."""

    __slots__ = (
        "arrived_at",
        "deadline",
        "is_refusable",
        "predicted_ttft_seconds",
        "refused",
        "tpot_seconds",
        "ttft_due",
        "wanted",
    )

    def __init__(self, wanted: Objectives, now: float, *, is_continued: bool) -> None:
        """`is_continued`: its client has tokens already, so that the TTFT is decided."""
        self.wanted = wanted
        self.arrived_at = now - wanted.elapsed_seconds
        """When it first arrived."""
        self.deadline = math.inf if wanted.deadline_seconds is None else self.arrived_at + wanted.deadline_seconds
        """When the last token is due."""
        has_ttft = wanted.ttft_seconds is not None and not is_continued
        self.ttft_due = self.arrived_at + wanted.ttft_seconds if has_ttft and wanted.ttft_seconds else math.inf
        """When the first token is due."""
        self.tpot_seconds = math.inf if wanted.tpot_seconds is None else wanted.tpot_seconds
        self.is_refusable = not (wanted.is_admitted or is_continued)
        """True when it may be refused as impossible."""
        self.predicted_ttft_seconds: float | None = None
        self.refused: Cause | None = None

    def num_missed(self, first_token_at: float, step_seconds: float) -> int:
        """How many of the objectives for tokens a shard would miss that gives the first one then, and the others at
        that pace."""
        return (first_token_at > self.ttft_due) + (step_seconds > self.tpot_seconds)

    def outcome(
        self,
        priority_class: str,
        reason: FinishReason.ValueType,
        first_sent_at: float | None,
        tokens_per_choice: float,
        now: float,
    ) -> ObjectivesOutcome:
        """Returns what has become of them, at the end of the request."""
        wanted, predicted = self.wanted, self.predicted_ttft_seconds
        if self.refused is not None:
            return ObjectivesOutcome(wanted, priority_class, predicted, self.refused)
        is_open = reason == FINISH_REASON_CANCELLED
        return ObjectivesOutcome(
            wanted,
            priority_class,
            predicted,
            None,
            _met(
                self.deadline, None if reason in (FINISH_REASON_ERROR, FINISH_REASON_CANCELLED) else now, now, is_open
            ),
            _met(self.ttft_due, first_sent_at, now, is_open),
            self._tpot_met(first_sent_at, tokens_per_choice, now),
        )

    def _tpot_met(self, first_sent_at: float | None, tokens_per_choice: float, now: float) -> bool | None:
        tpot_seconds = self.wanted.tpot_seconds
        if tpot_seconds is None or first_sent_at is None or tokens_per_choice < 2:
            return None
        return (now - first_sent_at) / (tokens_per_choice - 1) <= tpot_seconds


def _met(due: float, done_at: float | None, now: float, is_open: bool) -> bool | None:
    """`done_at`: None if it never was. `is_open`: it might still have been."""
    if due == math.inf:
        return None
    if done_at is not None:
        return done_at <= due
    return None if is_open and now <= due else False
