"""Rules hold for tenants and requests in different modes, and whatever only looks on changes nothing of an answer."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safety_svc.policy import PolicyError, SafetyPolicy, load_policy
from safety_svc.rule_modes import IN_PROMPTS, Judge, UnknownGuardrailError
from safety_svc.screen import AnswerScreener, check_prompt
from tests.examples import num_examples

POLICY = """
[[rules]]
name = "codes"
phrases = ["launch code"]
tenants = {watched = "monitor", quick = "async", free = "off", masked = "mask"}

[[rules]]
name = "key"
patterns = ['k[0-9]{2}']
prefixes = ["k"]
max_length = 3
mode = "monitor"
tenants = {strict = "gate"}

[[rules]]
name = "names"
phrases = ["bob"]
on_request = true

[[rules]]
name = "secret-names"
phrases = ["eve"]
on_request = ["spies"]
"""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> SafetyPolicy:
    path = tmp_path_factory.mktemp("policy") / "policy.toml"
    path.write_text(POLICY)
    return load_policy(path)


def screener(policy: SafetyPolicy, tenant: str = "", *guardrails: str) -> AnswerScreener:
    return AnswerScreener(policy.answer, policy.watched_answer, policy.scopes.of(tenant, guardrails))


def blocked(policy: SafetyPolicy, text: str, tenant: str = "", *guardrails: str) -> tuple[str, list[str]]:
    """The rule that refuses a prompt, and those that note something."""
    judge = Judge(policy.scopes.of(tenant, guardrails), IN_PROMPTS, {})
    hit = check_prompt(policy.prompt, text, judge)
    return "" if hit is None else hit.rule.name, list(judge.flagged)


@pytest.mark.parametrize(
    ("tenant", "refusing", "noting"),
    [
        ("", "codes", ["key"]),
        ("watched", "", ["codes", "key"]),
        ("quick", "codes", ["key"]),
        ("free", "", ["key"]),
        ("masked", "codes", ["key"]),
        ("strict", "codes", []),
    ],
)
def test_a_prompt_is_judged_by_its_tenants_modes(
    policy: SafetyPolicy, tenant: str, refusing: str, noting: list[str]
) -> None:
    """A rule that masks refuses what no edge has masked."""
    rule, flagged = blocked(policy, "launch code, k12", tenant)
    assert (rule, sorted(flagged)) == (refusing, noting)


def test_requests_add_rules_and_take_none_away(policy: SafetyPolicy) -> None:
    """A request names what its tenant may have; what holds anyway holds with it."""
    assert blocked(policy, "bob") == ("", [])
    assert blocked(policy, "bob", "", "names") == ("names", [])
    assert blocked(policy, "launch code", "", "names") == ("codes", [])
    assert blocked(policy, "eve", "spies", "secret-names") == ("secret-names", [])
    policy.scopes.check("spies", ["secret-names", "names", "codes"])
    for tenant, name in (("acme", "secret-names"), ("", "nothing"), ("free", "codes")):
        with pytest.raises(UnknownGuardrailError, match=name):
            policy.scopes.check(tenant, [name])


texts = st.lists(
    st.sampled_from(["launch ", "launch code", "code", "k1", "k12", "2", " ", "bob", "x"]), max_size=8
).map("".join)


@given(text=texts, at=st.lists(st.integers(0, 60), max_size=12))
@settings(max_examples=num_examples(300), deadline=None)
def test_who_looks_on_withholds_nothing(policy: SafetyPolicy, text: str, at: list[int]) -> None:
    """However the text is cut: modes monitor and off never halt an answer, whose text is clear once the service has
    seen it as far as no rule in mode gate waits; async halts it exactly if gate would."""
    cuts = sorted({0, len(text), *(each % (len(text) + 1) for each in at)})
    gated, watched, quick = screener(policy), screener(policy, "watched"), screener(policy, "quick")
    for a, b in itertools.pairwise(cuts):
        for each in (gated, watched, quick):
            if each.hit is None:
                each.push(text[a:b])
        assert watched.hit is None
    for each in (gated, watched, quick):
        if each.hit is None:
            each.close()
    assert watched.hit is None
    assert watched.num_clear_chars == len(text)
    assert (quick.hit is None) == (gated.hit is None)
    assert ("codes" in watched.flagged) == (gated.hit is not None)


def test_flags_are_told_once(policy: SafetyPolicy) -> None:
    """A rule that finds something in every step is counted once an answer."""
    watched = screener(policy, "watched")
    watched.push("launch code launch code ")
    assert watched.new_flags() == [("codes", "monitor")]
    watched.push("launch code k12 ")
    assert watched.new_flags() == [("key", "monitor")]
    assert watched.new_flags() == ()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("mode = 'loud'", "mode"),
        ("tenants = {acme = 'loud'}", "tenants"),
        ("on_request = 3", "on_request"),
        ("on_failure = 'ignore'", "on_failure"),
    ],
)
def test_bad_terms_name_the_rule_and_the_field(tmp_path: Path, more: str, says: str) -> None:
    """The author of a policy finds the mistake."""
    path = tmp_path / "policy.toml"
    path.write_text(f"[[rules]]\nname = 'r'\nphrases = ['a']\n{more}\n")
    with pytest.raises(PolicyError, match=rf"rule 'r': .*{says}"):
        load_policy(path)
