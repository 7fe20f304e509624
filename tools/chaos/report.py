"""From the records of a run to its figures. Pure."""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

from tools.chaos.checker import NEVER_ALLOWED, Verdict
from tools.chaos.injection.excuses import Disturbance, Fleet, is_excused
from tools.chaos.injection.faults import FaultKind
from tools.chaos.ledger import Settlement, UsageRecord, settle
from tools.chaos.record import Record

MAX_LISTED: Final = 20
_TTFT_CODES: Final = frozenset({Verdict.OK, Verdict.LEFT})


def make_report(
    records: Sequence[Record],
    disturbances: Sequence[Disturbance],
    bills: Iterable[UsageRecord],
    fleet: Fleet,
    begin: float,
) -> dict[str, Any]:
    """`begin`: of the load, on the monotonic clock. `problems` lists what must not have happened; the run is good when
    there are none."""
    verdicts = Counter(record.finding.verdict for record in records)
    unexcused = [
        record for record in records if not is_excused(record.errand, record.seen, record.finding, disturbances, fleet)
    ]
    settlement = settle(
        (record.delivery(may_miss_usage_record=_router_died(record, disturbances)) for record in records), bills
    )
    unexplained = [record for record in unexcused if record.finding.verdict not in NEVER_ALLOWED]
    never = [record for record in unexcused if record.finding.verdict in NEVER_ALLOWED]
    failed = [record for record in records if _has_failed(record)]
    excused = [record for record in failed if record not in unexcused]
    excused.sort(key=lambda record: record.finding.verdict is Verdict.BROKEN)  # the most common last
    return {
        "requests": len(records),
        "verdicts": {verdict.value: verdicts[verdict] for verdict in Verdict},
        "unexplained": len(unexplained),
        "double_billed": len(settlement.over),
        "not_billed": len(settlement.under),
        "failures": dict(Counter(map(_failure_name, failed)).most_common()),
        "excused": [_problem("excused ", r, disturbances, begin) for r in excused[:MAX_LISTED]],
        "manners": dict(Counter(f"{record.errand.manner}" for record in records).most_common()),
        "doors": dict(Counter(f"{record.errand.door}" for record in records).most_common()),
        "answers_with_two_choices": sum(record.errand.question.n > 1 for record in records),
        "refusals_tried_again": sum(record.seen.num_refusals for record in records),
        "connections_broken": sum(record.seen.num_breaks for record in records),
        "resumes": sum(record.seen.num_resumes for record in records),
        "ledger": _ledger(settlement),
        "faults": _faults(records, disturbances),
        "latency": _latency(records, disturbances),
        "problems": [_problem("", r, disturbances, begin) for r in never[:MAX_LISTED]]
        + [_problem("unexplained ", r, disturbances, begin) for r in unexplained[:MAX_LISTED]]
        + [f"double-billed: {line}" for line in settlement.over[:MAX_LISTED]]
        + [f"not billed: {line}" for line in settlement.under[:MAX_LISTED]],
    }


def _problem(prefix: str, record: Record, disturbances: Sequence[Disturbance], begin: float) -> str:
    """With what to look for in the logs: the request's last name, its time, and the faults that it felt."""
    seen, errand = record.seen, record.errand
    felt = [
        f"{one.kind} {one.target} at {one.began_at - begin:.1f} s"
        for one in disturbances
        if one.is_felt(seen.sent_at, seen.ended_at)
    ]
    story = "; ".join(f"{at - begin:.2f} {what}" for at, what in seen.story)
    return (
        f"{prefix}{record.finding.verdict}: {errand.manner} {errand.door} {' '.join(seen.request_ids[-1:])} at "
        f"{seen.sent_at - begin:.1f} to {seen.ended_at - begin:.1f} s: {record.finding.detail} {seen.message} "
        f"[{'; '.join(felt) or 'no fault'}]" + (f" ({story})" if story else "")
    )


def _has_failed(record: Record) -> bool:
    return record.finding.verdict not in (Verdict.OK, Verdict.LEFT)


def _failure_name(record: Record) -> str:
    verdict, code = record.finding.verdict, record.seen.code
    return f"{verdict} ({code})" if code and verdict in (Verdict.FAILED, Verdict.REFUSED) else verdict.value


USAGE_RECORD_SECONDS: Final = 0.1
"""A bill is written up to 20 ms after its answer has ended (kvloom/process/log_lines.py), and a busy machine may be
late."""


def _router_died(record: Record, disturbances: Sequence[Disturbance]) -> bool:
    return any(
        one.kind is FaultKind.KILL_ROUTER
        and one.is_felt(record.seen.sent_at, record.seen.ended_at + USAGE_RECORD_SECONDS)
        for one in disturbances
    )


def _ledger(settlement: Settlement) -> dict[str, int]:
    return {
        "billed_requests": settlement.num_billed_requests,
        "billed_tokens": settlement.num_metered_tokens,
        "credited_tokens": settlement.num_credited_tokens,
        "seen_tokens": settlement.num_seen_tokens,
        "exact": settlement.num_exact,
        "lost_with_their_router": settlement.num_lost_bills,
    }


def _faults(records: Sequence[Record], disturbances: Sequence[Disturbance]) -> list[dict[str, Any]]:
    """A row for each kind."""
    firsts = _FirstAnswers(records)
    rows: list[dict[str, Any]] = []
    for kind in sorted({one.kind for one in disturbances}):
        struck = [one for one in disturbances if one.kind is kind]
        felt = [[r for r in records if one.is_felt(r.seen.sent_at, r.seen.ended_at)] for one in struck]
        ends = [one.ended_at - one.began_at for one in struck if one.ended_at is not None]
        rows.append(
            {
                "kind": kind.value,
                "count": len(struck),
                "requests": sum(map(len, felt)),
                "failed": sum(_has_failed(r) for group in felt for r in group),
                "restored_seconds": _spread(ends),
                "first_answer_seconds": _spread([firsts.after(one.began_at) for one in struck]),
                "longest_pause_seconds": _spread(
                    [max((r.seen.longest_pause_seconds for r in group), default=0.0) for group in felt]
                ),
            }
        )
    return rows


class _FirstAnswers:
    """When the first of the answers asked for after a moment began to come."""

    def __init__(self, records: Sequence[Record]) -> None:
        answered = sorted((r.seen.sent_at, r.seen.first_at) for r in records if r.seen.first_at is not None)
        self._sent = [sent for sent, _ in answered]
        self._first: list[float] = [first for _, first in answered]
        for i in range(len(self._first) - 2, -1, -1):
            self._first[i] = min(self._first[i], self._first[i + 1])

    def after(self, moment: float) -> float:
        """Seconds; infinite when none came."""
        position = bisect.bisect_left(self._sent, moment)
        return self._first[position] - moment if position < len(self._first) else math.inf


def _latency(records: Sequence[Record], disturbances: Sequence[Disturbance]) -> dict[str, Any]:
    """Of answers that came, in seconds: those that no fault could touch, and the others."""
    calm: list[Record] = []
    disturbed: list[Record] = []
    for record in records:
        if record.seen.first_at is None or record.finding.verdict not in _TTFT_CODES:
            continue
        is_felt = any(one.is_felt(record.seen.sent_at, record.seen.ended_at) for one in disturbances)
        (disturbed if is_felt else calm).append(record)
    return {"calm": _latency_of(calm), "disturbed": _latency_of(disturbed)}


def _latency_of(records: Sequence[Record]) -> dict[str, Any]:
    streamed = [r for r in records if r.errand.manner != "whole"]
    return {
        "requests": len(records),
        "ttft": _percentiles([r.seen.first_at - r.seen.sent_at for r in streamed if r.seen.first_at is not None]),
        "longest_pause": _percentiles([r.seen.longest_pause_seconds for r in streamed]),
    }


def _percentiles(values: Iterable[float]) -> dict[str, float | None]:
    ordered = sorted(values)

    def at(share: float) -> float | None:
        return round(ordered[max(0, math.ceil(share * len(ordered)) - 1)], 3) if ordered else None

    return {"p50": at(0.50), "p99": at(0.99)}


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    ordered = sorted(value for value in values if math.isfinite(value))
    if not ordered:
        return {"p50": None, "max": None}
    return {"p50": round(ordered[(len(ordered) - 1) // 2], 2), "max": round(ordered[-1], 2)}
