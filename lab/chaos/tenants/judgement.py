"""Compares what was metered, charged and served with what may have been. Pure functions."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from kvloom.v1.usage_service_pb2 import BudgetState, MeteredAnswer
from kvloom_common.tenancy.usage_record import MAX_LOST_TOKENS
from lab.chaos.checking.metering import LoggedUsage, compare_metering
from lab.chaos.checking.record import Record
from lab.chaos.checking.report import LOSES_RECORDS, MAX_LISTED, may_miss_usage_record
from lab.chaos.checking.verdicts import AnswerVerdict
from lab.chaos.fabric.faults import Disturbance
from lab.chaos.tenants.hostile import Claimed
from lab.chaos.tenants.population import OUTPUT_NANOS, PROMPT_NANOS, ChaosTenant
from lab.chaos.tenants.trespass import Trespass
from tools.usage.reconcile import Reconciliation

REVOCATION_SECONDS: Final = 1.0
"""Within which a revoked key is refused everywhere (docs/operate/security.md)."""
RECONNECTED_SECONDS: Final = 2.0
"""The same, after an edge, a router or the control service is back."""
_DELAYS_REVOCATION: Final = frozenset(
    {"control", "edge", "router", "clients", "disk-full", "emfile", "hostile-neighbour"}
)
"""The parts whose faults may keep an edge or a router from hearing of a revocation."""


@dataclasses.dataclass(frozen=True, slots=True)
class Books:
    """The records of the control service at the end."""

    answers: Sequence[MeteredAnswer]
    budgets: Mapping[str, BudgetState]
    """The monthly budget of each tenant."""
    reconciliation: Reconciliation
    """With what the edges have counted."""


def judge_tenants(
    tenants: Sequence[ChaosTenant],
    records: Sequence[Record],
    disturbances: Sequence[Disturbance],
    trespasses: Sequence[Trespass],
    books: Books,
    end: float,
) -> dict[str, Any]:
    """Figures, with `problems`. `end`: when all faults were over, on the monotonic clock."""
    ids = {tenant.id for tenant in tenants}
    answers = [one for one in books.answers if one.tenant in ids]  # attackers use the users' names
    usage = [LoggedUsage(_name_of(one), one.num_output_tokens) for one in answers]
    deliveries = [
        record.delivery(may_miss_usage_record=may_miss_usage_record(record, disturbances)) for record in records
    ]
    metering = compare_metering(deliveries, usage)
    found = books.reconciliation
    rows = [_row(tenant, records, books) for tenant in tenants]
    over_served = [
        *(problem for row in rows for problem in row.pop("problems")),
        *_served_trespasses(trespasses, disturbances, end),
    ]
    mis_metered = [
        *(f"control has metered too much: {line}" for line in metering.over[:MAX_LISTED]),
        *(f"control has metered too little: {line}" for line in metering.under[:MAX_LISTED]),
        *([] if found.is_exact else (f"usage reconcile: {line}" for line in found.differences)),
        *_charged_refusals(records, answers),
    ]
    problems = [
        *mis_metered,
        *over_served,
        *(f"{one.kind}: {one.what} was answered 500" for one in trespasses if one.status == 500),
    ]
    served = Counter(f"{one.kind}: {one.status or 'no answer'}" for one in trespasses)
    return {
        "tenants": rows,
        "reconciliation": {
            "exact": found.num_exact,
            "metered_tokens": found.num_metered_tokens,
            "delivered_tokens": found.num_witnessed_tokens,
            "in_flight_tokens": found.num_in_flight_tokens,
            "without_witness": found.num_without_witness,
            "difference": found.num_metered_tokens - found.num_witnessed_tokens - found.num_in_flight_tokens,
        },
        "exact_for_clients": metering.num_exact,
        "lost_with_their_router": metering.num_lost_records,
        "trespasses": dict(sorted(served.items())),
        "mis_metered": len(mis_metered),
        "over_served": len(over_served),
        "problems": problems,
    }


def _name_of(answer: MeteredAnswer) -> str:
    """Returns the answer's name as its client knows it: names over gRPC are those of a tenant."""
    return answer.request_id.removesuffix(f"@{answer.tenant}")


def judge_hostile(
    tenant: ChaosTenant, made: Sequence[Claimed], disturbances: Sequence[Disturbance], books: Books
) -> dict[str, Any]:
    """Judges a tenant that claims what suits it: everything that was computed for it is metered, and its claims have
    moved no limit. Returns figures, with `problems`."""
    lost = [one for one in disturbances if one.kind in LOSES_RECORDS]
    by_name: dict[str, list[Claimed]] = {}
    for one in made:
        by_name.setdefault(one.request_id, []).append(one)
    metered: dict[str, list[MeteredAnswer]] = {}
    for answer in books.answers:
        if answer.tenant == tenant.id:
            metered.setdefault(_name_of(answer), []).append(answer)
    mis_metered, num_unknown = [], 0
    for name, requests in by_name.items():
        if any(fault.is_felt(one.sent_at, one.ended_at + 1.0) for one in requests for fault in lost):
            num_unknown += 1  # what a killed router delivered in its last second may not be recorded
        elif problem := _unmetered(name, requests, metered.get(name, ())):
            mis_metered.append(problem)
    most_prompt = tenant.limits["max_prompt_tokens"]
    over_served = [
        f"{tenant.id}: a prompt of {one.num_prompt}, with {one.num_claimed} claimed tokens, was answered; at most "
        f"{most_prompt} are allowed"
        for one in made
        if one.num_received and not one.has_ticket and one.num_prompt + one.num_claimed > most_prompt
    ]
    received = sum(OUTPUT_NANOS * one.num_received for one in made)
    cost = sum(one.cost_nanos for answers in metered.values() for one in answers)
    over_served += _budget_problems(tenant, received, cost, books.budgets[tenant.id])
    return {
        "requests": len(made),
        "with_claims": sum(one.num_claimed > 0 for one in made),
        "with_tickets": sum(one.has_ticket for one in made),
        "answered": sum(one.num_received > 0 for one in made),
        "codes": dict(Counter(one.code or "left" for one in made).most_common()),
        "received_tokens": sum(one.num_received for one in made),
        "metered_tokens": sum(one.num_output_tokens for answers in metered.values() for one in answers),
        "names_that_a_fault_felt": num_unknown,
        "spent_nanos": books.budgets[tenant.id].spent,
        "budget_nanos": tenant.largest_budget_nanos,
        "mis_metered": len(mis_metered),
        "over_served": len(over_served),
        "problems": [*mis_metered[:MAX_LISTED], *over_served[:MAX_LISTED]],
    }


def _unmetered(name: str, requests: Sequence[Claimed], answers: Sequence[MeteredAnswer]) -> str:
    """Says what is wrong with all requests of one name; "": nothing. A claim of one that has a ticket counts as output
    or as prompt."""
    num_output = sum(one.num_output_tokens for one in answers)
    num_prompt = sum(one.num_prompt_tokens for one in answers)
    num_received = sum(one.num_received for one in requests)
    num_lost = MAX_LOST_TOKENS * len(answers)
    if num_output < num_received - num_lost:
        return f"{name[:40]} was sent {num_received} tokens, {num_output} are metered"
    answered = [one for one in requests if one.num_received]
    least = sum(one.num_received for one in answered)
    least += sum(one.num_prompt + one.num_claimed for one in answered if not one.has_ticket)
    if num_output + num_prompt < least - num_lost:
        return f"{name[:40]} had {least} tokens computed, {num_output + num_prompt} are metered"
    return ""


def _budget_problems(tenant: ChaosTenant, received: int, metered: int, budget: BudgetState) -> list[str]:
    problems = []
    most = tenant.largest_budget_nanos
    if max(received, budget.spent) > most:
        problems.append(f"{tenant.id} has used {max(received, budget.spent)} nanos of a budget of {most}")
    if budget.spent != metered:
        problems.append(f"{tenant.id} is charged {budget.spent} nanos, its answers cost {metered}")
    if budget.leased:
        problems.append(f"{tenant.id}: {budget.leased} nanos of its budget are still leased")
    return problems


def _row(tenant: ChaosTenant, records: Sequence[Record], books: Books) -> dict[str, Any]:
    """Returns what the tenant has used of its budget: as its clients saw it, as its answers were metered, and as
    control counts it. Nothing but metered answers may be charged, and nothing may stay leased."""
    own = [record for record in records if record.tenant == tenant.id]
    received = sum(
        PROMPT_NANOS * record.num_prompt_tokens + OUTPUT_NANOS * record.num_received_tokens
        for record in own
        if record.num_received_tokens
    )
    metered = sum(one.cost_nanos for one in books.answers if one.tenant == tenant.id)
    budget = books.budgets[tenant.id]
    return {
        "tenant": tenant.id,
        "requests": len(own),
        "complete": sum(record.finding.verdict is AnswerVerdict.OK for record in own),
        "cut_short": sum(bool(record.transcript.limited_by) for record in own),
        "refused": sum(record.transcript.code in record.transcript.refusal_codes for record in own),
        "budget_nanos": tenant.largest_budget_nanos,
        "spent_nanos": budget.spent,
        "received_nanos": received,
        "problems": _budget_problems(tenant, received, metered, budget),
    }


def _charged_refusals(records: Iterable[Record], answers: Iterable[MeteredAnswer]) -> list[str]:
    """Requests of which nothing was delivered, since they were refused, and which cost something all the same."""
    costs = {_name_of(one): one.cost_nanos for one in answers}
    return [
        f"{request_id} was refused ({record.transcript.code}) and costs {costs[request_id]} nanos"
        for record in records
        if record.finding.verdict is AnswerVerdict.REFUSED and record.transcript.first_at is None
        for request_id in record.transcript.request_ids[-1:]
        if costs.get(request_id)
    ]


def _served_trespasses(trespasses: Iterable[Trespass], disturbances: Sequence[Disturbance], end: float) -> list[str]:
    return [
        f"{one.kind}: {one.what} was answered {one.status}, {one.sent_at - one.since:.1f} s after it was forbidden"
        for one in trespasses
        if one.status == 200 and not _is_allowed(one, disturbances, end)
    ]


def _is_allowed(one: Trespass, disturbances: Sequence[Disturbance], end: float) -> bool:
    """True when a revoked key may still have been accepted then."""
    if not one.kind.startswith("revoked key"):
        return False
    if one.sent_at <= one.since + REVOCATION_SECONDS:
        return True
    return one.sent_at < end and any(
        fault.kind.part in _DELAYS_REVOCATION
        and fault.began_at <= one.sent_at
        and (fault.ended_at is None or one.sent_at <= fault.ended_at + RECONNECTED_SECONDS)
        for fault in disturbances
    )
