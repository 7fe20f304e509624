"""Computes the figures of a run from its records. Pure functions."""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

from lab.chaos.checking.explanations import FleetSize, is_explained
from lab.chaos.checking.metering import LoggedUsage, MeteringResult, compare_metering
from lab.chaos.checking.record import Record
from lab.chaos.checking.verdicts import NEVER_ALLOWED, AnswerVerdict
from lab.chaos.clients.questions import Behaviour
from lab.chaos.clients.transcript import Transcript
from lab.chaos.fabric.faults import Disturbance, FaultKind

MAX_LISTED: Final = 20
_TTFT_CODES: Final = frozenset({AnswerVerdict.OK, AnswerVerdict.LEFT})


def make_report(
    records: Sequence[Record],
    disturbances: Sequence[Disturbance],
    usage_records: Iterable[LoggedUsage],
    fleet: FleetSize,
    begin: float,
) -> dict[str, Any]:
    """`begin` is the start of the load on the monotonic clock. `problems` in the report lists what must not have
    happened; the run passes if it is empty."""
    verdicts = Counter(record.finding.verdict for record in records)
    unexplained = [
        record
        for record in records
        if record.finding.verdict not in NEVER_ALLOWED
        and not is_explained(record.call, record.transcript, record.finding, disturbances, fleet)
    ]
    metering = compare_metering(
        (record.delivery(may_miss_usage_record=may_miss_usage_record(record, disturbances)) for record in records),
        usage_records,
    )
    never = [record for record in records if record.finding.verdict in NEVER_ALLOWED]
    failed = [record for record in records if _has_failed(record)]
    explained = [
        record for record in failed if record not in unexplained and record not in never and not _is_over_limit(record)
    ]
    explained.sort(key=lambda record: record.finding.verdict is AnswerVerdict.BROKEN)  # the most common last
    return {
        "requests": len(records),
        "verdicts": {verdict.value: verdicts[verdict] for verdict in AnswerVerdict},
        "unexplained": len(unexplained),
        "overmetered": len(metering.over),
        "undermetered": len(metering.under),
        "failures": dict(Counter(map(_failure_name, failed)).most_common()),
        "explained": [_problem("explained ", r, disturbances, begin) for r in explained[:MAX_LISTED]],
        "behaviours": dict(Counter(f"{record.call.behaviour}" for record in records).most_common()),
        "endpoints": dict(Counter(f"{record.call.endpoint}" for record in records).most_common()),
        "answers_with_two_choices": sum(record.call.question.n > 1 for record in records),
        "retried_rejections": sum(record.transcript.num_refusals for record in records),
        "connections_broken": sum(record.transcript.num_breaks for record in records),
        "resumes": sum(record.transcript.num_resumes for record in records),
        "metering": _metering_figures(metering),
        "faults": _faults(records, disturbances),
        "latency": _latency(records, disturbances),
        "problems": [_problem("", r, disturbances, begin) for r in never[:MAX_LISTED]]
        + [_problem("unexplained ", r, disturbances, begin) for r in unexplained[:MAX_LISTED]]
        + [f"overmetered: {line}" for line in metering.over[:MAX_LISTED]]
        + [f"undermetered: {line}" for line in metering.under[:MAX_LISTED]],
    }


def _problem(prefix: str, record: Record, disturbances: Sequence[Disturbance], begin: float) -> str:
    """Describes a failure and what to look for in the logs: the request id, its time, and the faults in effect."""
    transcript, call = record.transcript, record.call
    felt = [
        f"{one.kind} {one.target} at {one.began_at - begin:.1f} s"
        for one in disturbances
        if one.is_felt(transcript.sent_at, transcript.ended_at)
    ]
    log = "; ".join(f"{at - begin:.2f} {what}" for at, what in transcript.connection_log)
    return (
        f"{prefix}{record.finding.verdict}: {call.behaviour} {call.endpoint} "
        f"{' '.join(transcript.request_ids[-1:])} at {transcript.sent_at - begin:.1f} to "
        f"{transcript.ended_at - begin:.1f} s: {record.finding.detail} {transcript.message} "
        f"[{'; '.join(felt) or 'no fault'}]" + (f" ({log})" if log else "")
    )


def _has_failed(record: Record) -> bool:
    return record.finding.verdict not in (AnswerVerdict.OK, AnswerVerdict.LEFT)


def _is_over_limit(record: Record) -> bool:
    """Its tenant's limits explain it, and there may be many."""
    return record.transcript.code in record.transcript.refusal_codes


def _failure_name(record: Record) -> str:
    verdict, code = record.finding.verdict, record.transcript.code
    return f"{verdict} ({code})" if code and verdict in (AnswerVerdict.FAILED, AnswerVerdict.REFUSED) else verdict.value


USAGE_RECORD_SECONDS: Final = 0.1
"""A usage record is written up to 20 ms after its answer has ended (kvloom_common/process/log_lines.py), and later on a
busy machine."""


LOSES_RECORDS: Final = frozenset({FaultKind.KILL_ROUTER, FaultKind.DISK_FULL})
"""A router that is killed has not logged its last usage records; on a full disk its log is not kept."""


def may_miss_usage_record(record: Record, disturbances: Sequence[Disturbance]) -> bool:
    """True when its usage record, or the end of it, may have been lost."""
    return any(
        one.kind in LOSES_RECORDS
        and one.is_felt(record.transcript.sent_at, record.transcript.ended_at + USAGE_RECORD_SECONDS)
        for one in disturbances
    )


def _metering_figures(metering: MeteringResult) -> dict[str, int]:
    return {
        "billed_requests": metering.num_metered_requests,
        "billed_tokens": metering.num_metered_tokens,
        "credited_tokens": metering.num_credited_tokens,
        "seen_tokens": metering.num_received_tokens,
        "exact": metering.num_exact,
        "lost_with_their_router": metering.num_lost_records,
    }


def _faults(records: Sequence[Record], disturbances: Sequence[Disturbance]) -> list[dict[str, Any]]:
    """One row for each kind of fault."""
    firsts = _FirstAnswers(records)
    rows: list[dict[str, Any]] = []
    for kind in sorted({one.kind for one in disturbances}):
        struck = [one for one in disturbances if one.kind is kind]
        felt = [[r for r in records if one.is_felt(r.transcript.sent_at, r.transcript.ended_at)] for one in struck]
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
                    [max((r.transcript.longest_pause_seconds for r in group), default=0.0) for group in felt]
                ),
            }
        )
    return rows


class _FirstAnswers:
    """When the first answer among those requested after a given moment began to arrive."""

    def __init__(self, records: Sequence[Record]) -> None:
        answered = sorted(
            (r.transcript.sent_at, r.transcript.first_at) for r in records if r.transcript.first_at is not None
        )
        self._sent = [sent for sent, _ in answered]
        self._first: list[float] = [first for _, first in answered]
        for i in range(len(self._first) - 2, -1, -1):
            self._first[i] = min(self._first[i], self._first[i + 1])

    def after(self, moment: float) -> float:
        """Returns seconds, infinite if there was none."""
        position = bisect.bisect_left(self._sent, moment)
        return self._first[position] - moment if position < len(self._first) else math.inf


def _latency(records: Sequence[Record], disturbances: Sequence[Disturbance]) -> dict[str, Any]:
    """Returns the latencies of answers that came, in seconds: those that no fault could touch, and the others."""
    calm: list[Record] = []
    disturbed: list[Record] = []
    for record in records:
        if record.transcript.first_at is None or record.finding.verdict not in _TTFT_CODES:
            continue
        is_felt = any(one.is_felt(record.transcript.sent_at, record.transcript.ended_at) for one in disturbances)
        (disturbed if is_felt else calm).append(record)
    return {"calm": _latency_of(calm), "disturbed": _latency_of(disturbed)}


def _latency_of(records: Sequence[Record]) -> dict[str, Any]:
    return {
        "requests": len(records),
        "ttft": ttft_percentiles(records),
        "longest_pause": _percentiles([one.longest_pause_seconds for one in _streamed(records)]),
    }


def ttft_percentiles(records: Sequence[Record]) -> dict[str, float | None]:
    """p50 and p99 of the seconds until the first token, of streamed answers."""
    return _percentiles([one.first_at - one.sent_at for one in _streamed(records) if one.first_at is not None])


def _streamed(records: Sequence[Record]) -> list[Transcript]:
    return [record.transcript for record in records if record.call.behaviour is not Behaviour.WHOLE]


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
