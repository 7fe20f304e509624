"""Reports what the users noticed of an attack, and what it left in the processes' memory. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from lab.chaos.checking.memory import MemorySamples
from lab.chaos.checking.record import Record
from lab.chaos.checking.report import ttft_percentiles
from lab.chaos.checking.verdicts import NEVER_ALLOWED
from lab.chaos.fabric.faults import Disturbance

MAX_TTFT_GROWTH: Final = 0.2
"""The users' TTFT p99 may grow by this share during the attack: the goal, which the verdict reports."""
_CODES: Final = frozenset({"429", "500", "502", "503", "504"})


def attack_figures(
    records: Sequence[Record],
    attack: Disturbance,
    answers: Mapping[str, int],
    memory: MemorySamples,
    begin: float,
    calm_tenants: Collection[str] = ("",),
) -> dict[str, Any]:
    """`attack` is over. `begin` is the start of the load on the monotonic clock. `calm_tenants`: those that reach no
    limit of their own; of their users is the time to the first token."""
    ended_at = attack.ended_at if attack.ended_at is not None else max(r.transcript.ended_at for r in records)
    phases: dict[str, list[Record]] = {"before": [], "during": [], "after": []}
    for record in records:
        if record.transcript.ended_at < attack.began_at:
            phases["before"].append(record)
        elif record.transcript.sent_at > ended_at:
            phases["after"].append(record)
        else:
            phases["during"].append(record)
    rows = {name: _phase(found, calm_tenants) for name, found in phases.items()}
    growth = _growth(rows["before"]["ttft"]["p99"], rows["during"]["ttft"]["p99"])
    num_wrong = sum(row["wrong"] for row in rows.values())
    return {
        "seconds": round(ended_at - attack.began_at, 1),
        "phases": rows,
        "ttft_p99_growth": growth,
        "memory": memory.around(attack.began_at - begin, ended_at - begin),
        "answers_to_attackers": dict(answers),
        "verdict": _verdict(num_wrong, growth),
    }


def _phase(records: Sequence[Record], calm_tenants: Collection[str]) -> dict[str, Any]:
    rejected = [r for r in records if r.transcript.num_refusals or r.transcript.code in _CODES]
    return {
        "requests": len(records),
        "wrong": sum(r.finding.verdict in NEVER_ALLOWED for r in records),
        "rejections": sum(r.transcript.num_refusals for r in records),
        "requests_rejected": len(rejected),
        "failed": sum(r.finding.verdict.value in ("refused", "failed", "broken") for r in records),
        "ttft": ttft_percentiles([one for one in records if one.tenant in calm_tenants]),
    }


def _growth(before: float | None, during: float | None) -> float | None:
    return None if not before or during is None else round(during / before - 1.0, 3)


def _verdict(num_wrong: int, growth: float | None) -> str:
    answers = f"{num_wrong} answers wrong, lost or doubled" if num_wrong else "no answer wrong, lost or doubled"
    if growth is None:
        return f"{answers}; too few answers to compare the time to the first token"
    is_within = growth <= MAX_TTFT_GROWTH
    return (
        f"{'FAILED' if num_wrong else 'passed'}: {answers}; time to first token p99 {100 * growth:+.0f}% during the "
        f"attack ({'within' if is_within else 'beyond'} the goal of {100 * MAX_TTFT_GROWTH:.0f}%)"
    )
