"""What is said of a recorded answer holds for a slow service, too."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safety_svc.policy import SafetyPolicy, load_policy
from safety_svc.whatif import AnswerOutcome, LoggedRequest, outcome_of
from tests.examples import num_examples

POLICY = """
[[rules]]
name = "words"
phrases = ["ab", "b c d", "a b c e"]
whole_words = false

[[rules]]
name = "pattern"
patterns = ['k[0-9]{2}']
prefixes = ["k"]
max_length = 3
"""
parts_of = st.lists(st.text("ab cdek12\\n", min_size=1, max_size=4), max_size=8)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> SafetyPolicy:
    path = tmp_path_factory.mktemp("policy") / "policy.toml"
    path.write_text(POLICY)
    return load_policy(path)


def outcome(policy: SafetyPolicy, parts: list[str]) -> AnswerOutcome:
    return outcome_of(policy, LoggedRequest(answers=(tuple(parts),))).answers[0]


@settings(max_examples=num_examples(100), deadline=None)
@given(parts_of, st.lists(st.booleans(), min_size=8, max_size=8))
def test_parts_that_come_together_are_cut_within_the_bounds(
    policy: SafetyPolicy, parts: list[str], joined: list[bool]
) -> None:
    """A service that is late sees several parts at once. It cuts the same answers, and shows no fewer and no more
    characters than was said of the recorded parts."""
    at_once: list[str] = []
    for is_joined, part in zip(joined, parts, strict=False):
        if at_once and is_joined:
            at_once[-1] += part
        else:
            at_once.append(part)
    said, late = outcome(policy, parts), outcome(policy, at_once)
    assert said.agrees_with(late.cut_at)
    assert late.agrees_with(said.cut_at)
    assert (said.least_cut_at, said.most_cut_at) == (late.least_cut_at, late.most_cut_at)
