"""Where the time of a request went, from its arrival at a router to its end, and what made it slow: from the outcome
that the decision log has. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from kvloom.v1.router_service_pb2 import ExplainResponse, RequestOutcome

WHY: Final[Mapping[str, str]] = {
    "queue": "It waited in the router's queue: no shard had room, or its limits or its prompt's verdict were awaited.",
    "engine_queue": "It waited at its shard for its turn or for KV memory.",
    "prefill": "Its prompt took this long to compute.",
    "waiting_and_prefill": "It waited at its shards and had its prompt computed; the two cannot be told apart, as it "
    "was moved or its prompt was computed in parts.",
    "withheld": "Its first token was kept back until the safety service had cleared it.",
    "moved": "Its sequences had to leave a shard (preempted, drained or failed) and waited for another one.",
    "decoding": "Its answer took this long to generate after the first token.",
    "network": "The edge had it longer than the router: the way between the two, or a busy edge.",
}
"""The meaning of each part when it is a large one."""
LARGE_SHARE: Final = 0.25
_NOTICED_SECONDS: Final = 0.0005
"""Shorter parts are not worth naming."""


class TimePart(msgspec.Struct, frozen=True):
    name: str
    """A key of WHY."""
    seconds: float


class WhereTimeWent(msgspec.Struct, frozen=True):
    parts: Sequence[TimePart]
    """In the order of time; their sum is the whole time. Those of no time are left out."""
    placement_seconds: float
    """How much sooner another shard was predicted to give the first token when this one was picked."""
    late_seconds: float | None
    """By how much the first token came later than predicted. None: it is not known."""
    why: str
    """A text for people: what the largest parts mean, and what else was noticed."""


def where_time_went(explanation: ExplainResponse, edge_seconds: float | None = None) -> WhereTimeWent | None:
    """`edge_seconds`: how long the edge had it at its router; None: another edge had it. Returns None for a request
    that still runs."""
    if not explanation.HasField("outcome"):
        return None
    outcome = explanation.outcome
    parts = [part for part in _parts(outcome, edge_seconds) if part.seconds >= _NOTICED_SECONDS]
    first = next((one.plan for one in explanation.decisions if one.plan.HasField("regret")), None)
    placement = 0.0 if first is None else first.regret.ttft_seconds
    late = outcome.ttft_error_seconds if outcome.HasField("ttft_error_seconds") else None
    return WhereTimeWent(parts, placement, late, _why(parts, placement, late, outcome))


def _parts(outcome: RequestOutcome, edge_seconds: float | None) -> list[TimePart]:
    total, queue, moved = outcome.e2e_latency_seconds, outcome.queue_time_seconds, outcome.moved_seconds
    parts = [TimePart("queue", queue)]
    end_of_start = total
    if outcome.HasField("ttft_seconds"):
        end_of_start = outcome.ttft_seconds
    withheld = outcome.withheld_seconds
    start = max(0.0, end_of_start - withheld - queue)
    prefill = next(
        (one.actual_seconds for one in outcome.predictions if one.term == "prefill" and one.HasField("actual_seconds")),
        None,
    )
    moved_before = 0.0
    if prefill is None:  # it was moved before its first token, or had none, or its parts are not known
        moved_before = min(moved, start)
        parts.append(TimePart("waiting_and_prefill", start - moved_before))
    else:
        prefill = min(prefill, start)
        parts += [TimePart("engine_queue", start - prefill), TimePart("prefill", prefill)]
    rest = max(0.0, total - end_of_start)
    moved_after = min(moved - moved_before, rest)
    parts += [
        TimePart("withheld", withheld),
        TimePart("moved", moved_before + moved_after),
        TimePart("decoding", rest - moved_after),
    ]
    if edge_seconds is not None:
        parts.append(TimePart("network", max(0.0, edge_seconds - total)))
    return parts


def _why(parts: Sequence[TimePart], placement: float, late: float | None, outcome: RequestOutcome) -> str:
    if not parts:
        return "It took no time worth telling."
    total = sum(part.seconds for part in parts)
    sentences: list[str] = []
    for part in sorted(parts, key=lambda part: -part.seconds):
        if part.seconds < LARGE_SHARE * total and sentences:
            break
        sentences.append(f"{part.seconds / total:.0%}: {WHY[part.name]}")
        if part.name in ("prefill", "waiting_and_prefill") and outcome.num_prompt_tokens:
            cached = f"{outcome.num_cached_tokens} of its {outcome.num_prompt_tokens}"
            sentences.append(f"{cached} prompt tokens were cached.")
        if part.name == "decoding" and outcome.num_output_tokens > 1:
            each = 1e3 * part.seconds / (outcome.num_output_tokens - 1)
            sentences.append(f"It has {outcome.num_output_tokens} tokens, {each:.1f} ms each.")
    if placement >= _NOTICED_SECONDS:
        sentences.append(
            f"Another shard was predicted to be {1e3 * placement:.0f} ms sooner; this one was cheaper for the fleet."
        )
    if late is not None and late > max(0.05, 0.2 * outcome.ttft_seconds):
        sentences.append(f"The first token came {1e3 * late:.0f} ms later than predicted.")
    moves = {
        "preempted": outcome.num_preemptions,
        "migrated": outcome.num_migrations,
        "failed over": outcome.num_failovers,
    }
    happened = [f"{name} {count}x" for name, count in moves.items() if count]
    if happened:
        sentences.append(f"It was {', '.join(happened)}.")
    return " ".join(sentences)
