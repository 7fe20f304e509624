"""`kvloom-lab chaos --tenants` must not pass a run in which a tenant was overcharged, overspent, or read by another
one. Such errors are planted here."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvloom.v1.usage_service_pb2 import BudgetState, MeteredAnswer
from lab.chaos.checking.explanations import FleetSize, is_explained
from lab.chaos.checking.record import Record
from lab.chaos.checking.verdicts import AnswerVerdict, Finding, judge
from lab.chaos.clients.oracle import cut_at_stop
from lab.chaos.clients.questions import Behaviour, Endpoint, Question, UserCall
from lab.chaos.clients.transcript import AnswerEnd, Expected, ReceivedChoice, Transcript, cut_short
from lab.chaos.fabric.faults import Disturbance, FaultKind
from lab.chaos.tenants.hostile import Claimed, hostile_tenant
from lab.chaos.tenants.judgement import Books, judge_hostile, judge_tenants
from lab.chaos.tenants.population import OUTPUT_NANOS, PROMPT_NANOS, make_tenants
from lab.chaos.tenants.trespass import Trespass
from tools.usage.reconcile import Reconciliation

WORDS = [" one", " two", " three", " four"]
EXPECTED = Expected((cut_at_stop([1, 2, 3, 4], WORDS, ()),), num_prompt_tokens=5)
CALL = UserCall(Question("Tell me about tea.", True, 4, 1.0, seed=1), Endpoint.SDK_TEXT, Behaviour.PLAIN)
COST = 5 * PROMPT_NANOS + 4 * OUTPUT_NANOS
END = 100.0


def complete(tenant: str, request_id: str = "u0") -> Record:
    transcript = Transcript([ReceivedChoice("".join(WORDS), [1, 2, 3, 4], "length")], 1.0, AnswerEnd.COMPLETE)
    transcript.num_prompt_tokens, transcript.num_output_tokens, transcript.first_at = 5, 4, 1.5
    transcript.request_ids.append(request_id)
    return Record.of(CALL, EXPECTED, transcript, Finding(AnswerVerdict.OK), tenant)


def metered(tenant: str, request_id: str = "u0", num_tokens: int = 4, cost: int = COST) -> MeteredAnswer:
    return MeteredAnswer(
        request_id=f"{request_id}@{tenant}", tenant=tenant, num_output_tokens=num_tokens, cost_nanos=cost
    )


def problems(
    records: list[Record] | None = None,
    answers: list[MeteredAnswer] | None = None,
    state: BudgetState | None = None,
    trespasses: list[Trespass] | None = None,
    struck: list[Disturbance] | None = None,
    **tenant_fields: Any,
) -> list[str]:
    """Of a run with one tenant, which had one answer, unless it is told otherwise."""
    (tenant,) = make_tenants(1)
    tenant = dataclasses.replace(tenant, **tenant_fields)
    records = [complete(tenant.id)] if records is None else records
    answers = [metered(tenant.id)] if answers is None else answers
    spent = state or BudgetState(spent=sum(one.cost_nanos for one in answers))
    books = Books(answers, {tenant.id: spent}, Reconciliation())
    return judge_tenants([tenant], records, struck or [], trespasses or [], books, END)["problems"]


def test_a_run_in_which_all_is_well_passes():
    """Otherwise the other tests here would prove nothing."""
    assert problems() == []


def test_usage_that_is_not_what_clients_received_is_a_problem():
    """By one token, in either direction."""
    assert "too little" in problems(answers=[metered("chaos-0/app", num_tokens=3)])[0]
    assert "too much" in problems(answers=[metered("chaos-0/app", num_tokens=5)])[0]


def test_a_budget_that_is_overspent_by_one_is_a_problem():
    """By what control has counted, and by what clients have received, whatever control says."""
    assert "of a budget of" in problems(largest_budget_nanos=COST - 1)[0]
    assert problems(largest_budget_nanos=COST) == []
    free = [metered("chaos-0/app", cost=0)]
    assert "of a budget of" in problems(answers=free, largest_budget_nanos=COST - 1)[0]


def test_what_is_charged_beside_answers_or_stays_leased_is_a_problem():
    """A refused request burns nothing, and what a router has leased and not used comes back."""
    assert "its answers cost" in problems(state=BudgetState(spent=COST + 1))[0]
    assert "still leased" in problems(state=BudgetState(spent=COST, leased=1))[0]


def test_a_refused_request_that_costs_something_is_a_problem():
    """Its client has nothing of it."""
    transcript = Transcript([ReceivedChoice(token_ids=[])], 1.0, AnswerEnd.REFUSED, code="insufficient_quota")
    transcript.request_ids.append("u1")
    refused = Record.of(CALL, EXPECTED, transcript, Finding(AnswerVerdict.REFUSED), "chaos-0/app")
    found = problems([refused], [metered("chaos-0/app", "u1", num_tokens=0, cost=5)])
    assert found == ["u1 was refused (insufficient_quota) and costs 5 nanos"]


def test_a_revoked_key_may_be_served_for_a_second_only():
    """Unless a fault keeps edges from hearing of it; after all faults, never."""
    late = Trespass("revoked key", "k1", since=10.0, sent_at=12.0, status=200)
    away = [Disturbance(FaultKind.KILL_CONTROL, "control", 10.5, 11.0)]
    elsewhere = [Disturbance(FaultKind.KILL_SHARD, "shard-0", 10.5, 11.0)]
    assert "k1 was answered 200, 2.0 s after" in problems(trespasses=[late])[0]
    assert problems(trespasses=[late], struck=elsewhere)
    assert problems(trespasses=[late], struck=away) == []
    assert problems(trespasses=[dataclasses.replace(late, sent_at=10.9)]) == []
    assert problems(trespasses=[dataclasses.replace(late, status=401)]) == []
    assert problems(trespasses=[dataclasses.replace(late, sent_at=END + 1.0)], struck=away)
    assert problems(trespasses=[dataclasses.replace(late, sent_at=13.1)], struck=away)


def test_another_tenant_s_answer_may_never_be_read():
    """No fault explains it, nor a 500: what is away for a while is a 503."""
    struck = [Disturbance(FaultKind.KILL_CONTROL, "control", 0.0, 50.0)]
    read = Trespass("other tenant", "b reads a's", since=0.0, sent_at=12.0, status=200)
    assert problems(trespasses=[read], struck=struck)
    assert problems(trespasses=[dataclasses.replace(read, status=404)]) == []
    assert problems(trespasses=[dataclasses.replace(read, status=503)]) == []
    assert problems(trespasses=[dataclasses.replace(read, status=500)], struck=struck)


def claimed(request_id: str = "h1", **fields: Any) -> Claimed:
    """A request with a prompt of 10 tokens, of which 20 tokens arrived."""
    return Claimed(request_id, 10, **{"num_claimed": 0, "has_ticket": False, "sent_at": 1.0, "ended_at": 2.0,
                                      "num_received": 20, "code": "OK", **fields})  # fmt: skip


def hostile_problems(
    made: list[Claimed], tokens: dict[str, tuple[int, int]], struck: list[Disturbance] | None = None, **state: int
) -> list[str]:
    """`tokens`: by the names of answers, what is metered of prompt and output."""
    tenant = hostile_tenant()
    answers = [
        MeteredAnswer(
            request_id=f"{name}@{tenant.id}",
            tenant=tenant.id,
            num_prompt_tokens=prompt,
            num_output_tokens=output,
            cost_nanos=PROMPT_NANOS * prompt + OUTPUT_NANOS * output,
        )
        for name, (prompt, output) in tokens.items()
    ]
    budget = BudgetState(**{"spent": sum(one.cost_nanos for one in answers), **state})
    return judge_hostile(tenant, made, struck or [], Books(answers, {tenant.id: budget}, Reconciliation()))["problems"]


def test_a_hostile_tenant_that_pays_for_everything_passes():
    """A continuation, and two answers under one name."""
    assert hostile_problems([claimed()], {"h1": (10, 20)}) == []
    again = claimed(has_ticket=True, num_claimed=20)
    assert hostile_problems([claimed(), again], {"h1": (10, 40)}) == []
    assert hostile_problems([claimed(num_claimed=5)], {"h1": (15, 20)}) == []


def test_computed_tokens_that_are_not_metered_are_a_problem():
    """What was sent, what was prefilled for nothing, and a repetition; but not what a killed router could not record,
    or the few tokens that may have been on their way."""
    assert "sent 20 tokens, 3 are metered" in hostile_problems([claimed()], {"h1": (10, 3)})[0]
    assert "had 75 tokens computed" in hostile_problems([claimed(num_claimed=45)], {"h1": (10, 20)})[0]
    again = claimed(has_ticket=True, num_claimed=1)
    assert "sent 40 tokens, 20" in hostile_problems([claimed(), again], {"h1": (10, 20)})[0]
    killed = [Disturbance(FaultKind.KILL_ROUTER, "router-0", 1.5, 1.8)]
    assert hostile_problems([claimed()], {"h1": (10, 3)}, killed) == []
    assert hostile_problems([claimed()], {"h1": (10, 5)}) == []


def test_a_claim_that_moves_a_limit_is_a_problem():
    """The limit of prompts, which a claim could pass, and the budget."""
    assert "at most 60 are allowed" in hostile_problems([claimed(num_claimed=51)], {"h1": (61, 20)})[0]
    assert hostile_problems([claimed(num_claimed=51, has_ticket=True)], {"h1": (10, 71)}) == []
    assert hostile_problems([claimed(num_claimed=51, num_received=0)], {}) == []
    most = hostile_tenant().largest_budget_nanos
    assert "of a budget of" in hostile_problems([claimed()], {"h1": (10, 20)}, spent=most + 1)[0]
    assert "still leased" in hostile_problems([claimed()], {"h1": (10, 20)}, leased=1)[0]


def test_an_answer_that_a_budget_cuts_short_is_the_beginning_of_the_right_one():
    """It counts as right, and as wrong as soon as a word differs or its usage does."""
    for text, num_tokens, verdict in (
        (" one two", 2, AnswerVerdict.OK),
        (" one two", 3, AnswerVerdict.MISCOUNTED),
        (" one three", 2, AnswerVerdict.LOST),
    ):
        transcript = Transcript([ReceivedChoice(text, None, "length")], 0.0, AnswerEnd.COMPLETE)
        transcript.num_prompt_tokens, transcript.num_output_tokens = 5, num_tokens
        assert judge(cut_short(EXPECTED, transcript), transcript).verdict is verdict
        assert judge(EXPECTED, transcript).verdict is not AnswerVerdict.OK


def test_a_choice_that_ended_before_the_limit_is_whole():
    """Its text is without the stop string, so it looks shorter than it is."""
    stopped = cut_at_stop([1, 2, 3, 4], WORDS, (" three",))
    expected = Expected((stopped, EXPECTED.choices[0]), num_prompt_tokens=5)
    choices = [ReceivedChoice(" one two", None, "stop"), ReceivedChoice(" one two three", None, "length")]
    transcript = Transcript(choices, 0.0, AnswerEnd.COMPLETE, num_prompt_tokens=5, num_output_tokens=6)
    assert cut_short(expected, transcript).num_output_tokens == 6
    assert judge(cut_short(expected, transcript), transcript).verdict is AnswerVerdict.OK


def test_limits_explain_only_the_refusals_of_their_tenant():
    """A tenant with an ample budget must never be refused for it."""
    fleet = FleetSize(num_edges=2, num_routers=2, num_shards=2, max_attempts=3)
    ample, rated, scarce = make_tenants(3)
    for tenant, code, is_right in (
        (ample, "insufficient_quota", False),
        (rated, "rate_limit_exceeded", True),
        (scarce, "rate_limit_exceeded", False),
        (scarce, "insufficient_quota", True),
    ):
        transcript = Transcript.begin(1, 1.0)
        transcript.end, transcript.code, transcript.ended_at = AnswerEnd.REFUSED, code, 2.0
        transcript.refusal_codes = tenant.refusal_codes
        assert is_explained(CALL, transcript, Finding(AnswerVerdict.REFUSED), [], fleet) == is_right
