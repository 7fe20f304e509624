"""A policy's effect on recorded texts is said before it is in force, by rule and to the character."""

from __future__ import annotations

import pytest

from safety_svc.policy import SafetyPolicy, load_policy
from safety_svc.whatif import LoggedRequest, outcome_of, unjudged_rules

POLICY = """
[[rules]]
name = "codes"
phrases = ["launch code"]
tenants = {watched = "monitor", quick = "async", free = "off"}

[[rules]]
name = "card"
kind = "pii"
finds = "card"
mode = "mask"

[[rules]]
name = "names"
phrases = ["bob"]
on_request = ["spies"]

[[rules]]
name = "vendor"
kind = "guardrail"
url = "http://127.0.0.1:9"
applies_to = ["prompt"]
"""
CARD = "4111 1111 1111 1111"


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> SafetyPolicy:
    path = tmp_path_factory.mktemp("policy") / "policy.toml"
    path.write_text(POLICY)
    return load_policy(path)


def test_a_prompt_is_refused_by_the_rule_that_finds_something(policy: SafetyPolicy) -> None:
    """The answers of a refused prompt would never have begun, so nothing is said of them."""
    outcome = outcome_of(policy, LoggedRequest(prompt="The LAUNCH code?", answers=("It is the launch code",)))
    assert (outcome.prompt.refused_by, outcome.prompt.found_at) == ("codes", 4)
    assert outcome.answers == ()


@pytest.mark.parametrize(
    ("tenant", "cut_at", "flagged"), [("", 7, ()), ("quick", 19, ()), ("watched", None, ("codes",)), ("free", None, ())]
)
def test_an_answer_is_cut_as_the_tenants_mode_says(
    policy: SafetyPolicy, tenant: str, cut_at: int | None, flagged: tuple[str, ...]
) -> None:
    """In mode async the whole part has been shown in which the passage ends."""
    [answer] = outcome_of(policy, LoggedRequest(tenant=tenant, answers=(("It is: la", "unch code.", " Bye"),))).answers
    assert (answer.cut_at, answer.flagged) == (cut_at, flagged)


def test_a_prompt_is_masked_or_refused_as_edges_mask_prompts_or_not(policy: SafetyPolicy) -> None:
    """What is not masked is refused, as in the fabric."""
    request = LoggedRequest(prompt=f"Charge {CARD} today")
    assert outcome_of(policy, request).prompt.refused_by == "card"
    masked = outcome_of(policy, request, masks_prompts=True).prompt
    assert not masked.is_refused
    assert masked.masked == ((7, 7 + len(CARD), "card"),)


def test_a_guardrail_that_the_tenant_may_not_name_refuses_the_request(policy: SafetyPolicy) -> None:
    """The fabric answers 400, and no rule has judged anything."""
    named = LoggedRequest(prompt="bob", guardrails=("names",))
    assert outcome_of(policy, named).prompt.unknown_guardrail == "names"
    spies = LoggedRequest(prompt="bob", guardrails=("names",), tenant="spies")
    assert outcome_of(policy, spies).prompt.refused_by == "names"


def test_rules_that_ask_others_are_named(policy: SafetyPolicy) -> None:
    """A log cannot say what a service of others would have answered."""
    assert unjudged_rules(policy) == ["vendor"]
