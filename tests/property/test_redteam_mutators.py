"""However an attacker combines what rules claim to see through, they do, for any split of the answer."""

from __future__ import annotations

import itertools
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.redteam.mutators import BY_FOLDING, Mutator, homoglyphs
from lab.redteam.rules import PHRASES, Layer, policy_text
from safety_svc.policy import SafetyPolicy, load_policy
from safety_svc.screen import AnswerScreener, check_prompt
from tests.examples import num_examples

AROUND = st.sampled_from(["", "x ", "\\u0041, ", "\u200b", "(", "\n", "é "])
ORDERS = st.lists(st.sampled_from(BY_FOLDING), max_size=4)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> SafetyPolicy:
    path = tmp_path_factory.mktemp("policy") / "policy.toml"
    path.write_text(policy_text(tuple(PHRASES)), encoding="utf-8")
    return load_policy(path)


@settings(max_examples=num_examples(100), deadline=None)
@given(
    st.sampled_from([(layer, phrase) for layer, phrases in PHRASES.items() for phrase in phrases]),
    ORDERS,
    st.booleans(),
    st.booleans(),
    AROUND,
    st.sampled_from(["", ".", " and", "\u200b!", ")"]),
    st.lists(st.integers(0, 200), max_size=6),
    st.randoms(use_true_random=False),
)
def test_any_combination_is_found_where_it_begins(
    policy: SafetyPolicy,
    phrase: tuple[Layer, str],
    mutators: list[Mutator],
    looks_alike: bool,
    is_escaped: bool,
    before: str,
    after: str,
    cuts: list[int],
    rng: random.Random,
) -> None:
    """A prompt with it is refused, and an answer shows no character of it. Hypothesis shrinks what fails: fewer
    mutators, shorter texts around it, fewer parts."""
    layer, text = phrase
    if looks_alike and layer is Layer.LOOK_ALIKES:
        text = "".join(rng.choice(homoglyphs(c)) if c != " " else c for c in text)
    for mutator in mutators:
        text = mutator.mutate(text, rng)
    if is_escaped:
        text = json.dumps(text)[1:-1]
    whole = before + text + after
    assert check_prompt(policy.prompt, whole) is not None
    screener = AnswerScreener(policy.answer)
    for start, end in itertools.pairwise(sorted({0, len(whole), *(cut % len(whole) for cut in cuts)})):
        screener.push(whole[start:end])
        if screener.hit is not None:
            break
    else:
        screener.close()
    assert screener.hit is not None
    assert screener.num_clear_chars <= len(before)
