"""The safety service would allow every prompt that the router does not send to it, whatever the policy."""

from __future__ import annotations

import re2
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from kvloom.v1.safety_service_pb2 import PolicyState
from router.links.prompt_filter import MAX_CHARS, PromptFilter
from safety_svc.policy import BUILTIN_POLICY, Pattern, Phrase, RuleSet, load_policy
from safety_svc.prefilter import MAX_BEGINNINGS, prompt_prefilter
from safety_svc.screen import check_prompt
from tests.examples import num_examples
from tests.property.test_router_prefilter import RULE, rule_sets, texts, words


def filter_of(rules: RuleSet) -> PromptFilter | None:
    """Returns the filter that the router builds from the announced policy."""
    state = PolicyState(prompt_prefilter=prompt_prefilter(rules))
    return PromptFilter.from_policy(PolicyState.FromString(state.SerializeToString()))


@settings(max_examples=num_examples(300), deadline=None)
@given(rules=rule_sets(), text=texts)
@example(rules=RuleSet([Phrase(RULE, "a b", True)], []), text="x A\x1c\n B")
@example(rules=RuleSet([Phrase(RULE, "ab", False)], []), text="\uff21\uff22")
@example(rules=RuleSet([Phrase(RULE, "\uac00", False)], []), text="\u1100\u1161")
@example(rules=RuleSet([Phrase(RULE, "a b", True)], []), text="a\\nb")
@example(rules=RuleSet([Phrase(RULE, "lrn", True, is_look_alike=True)], []), text="1m")
@example(rules=RuleSet([Phrase(RULE, "abc", True, is_spaced=True)], []), text="x A-b . C")
@example(rules=RuleSet([Phrase(RULE, "rnl", True, is_look_alike=True, is_spaced=True)], []), text="M-1")
@example(rules=RuleSet([], [Pattern(RULE, re2.compile("éb"), ("é",), 6)]), text="aéb")
@example(rules=RuleSet([], [Pattern(RULE, re2.compile("a"), (), 6)]), text="a")
@example(rules=RuleSet([], [Pattern(RULE, re2.compile(".b"), ("a", "x", "-", "é"), 6)]), text="a b")
def test_what_passes_would_be_allowed(rules: RuleSet, text: str) -> None:
    """A prompt does not get past a rule because the router has cleared it."""
    prompt_filter = filter_of(rules)
    if prompt_filter is not None and not prompt_filter.is_suspicious(text):
        assert check_prompt(rules, text) is None


@settings(max_examples=num_examples(100), deadline=None)
@given(texts=st.lists(words, max_size=5), clear=st.text("xyzü \n", max_size=40))
def test_most_prompts_pass(texts: list[str], clear: str) -> None:
    """A filter that suspects everything would be exact, too. Text that has no letter of a pattern's prefix must pass,
    also outside ASCII, as long as there are no phrases."""
    prefixes = [text for text in texts if not set(text) & set(clear)]
    assume(prefixes)
    patterns = [Pattern(RULE, re2.compile(re2.escape(prefix)), (prefix,), 64) for prefix in prefixes]
    prompt_filter = filter_of(RuleSet([], patterns))
    assert prompt_filter is not None
    assert not prompt_filter.is_suspicious(clear)


def test_large_policies_and_prompts_are_bounded() -> None:
    """A deny list of many thousand phrases gets shorter beginnings, and a prompt that would occupy the router for long
    is sent to the service."""
    phrases = [
        Phrase(RULE, f"{a}{b}{c}{d}", False) for a in "abcdefgh" for b in "abcdefgh" for c in "abcd" for d in "12"
    ]
    announced = prompt_prefilter(RuleSet([*phrases, *(Phrase(RULE, f"z{n}", True) for n in range(2000))], []))
    assert announced is not None
    assert len(announced.folded_beginnings) <= MAX_BEGINNINGS
    prompt_filter = filter_of(RuleSet(phrases, []))
    assert prompt_filter is not None
    assert not prompt_filter.is_suspicious("x AB d2")
    assert prompt_filter.is_suspicious("x ABd2")
    assert not prompt_filter.is_suspicious("x" * MAX_CHARS)
    assert prompt_filter.is_suspicious("x" * (MAX_CHARS + 1))


def test_the_built_in_policy_lets_ordinary_prompts_pass() -> None:
    """Markdown tables and rules, and other alphabets, need not be sent to the service."""
    prompt_filter = filter_of(load_policy(BUILTIN_POLICY).prompt)
    assert prompt_filter is not None
    assert not prompt_filter.is_suspicious("| a | b |\n|-----|------|\n\n----------\nÜber 日本語\n")
    assert prompt_filter.is_suspicious("my key: -----BEGIN RSA PRIVATE KEY-----")
    assert prompt_filter.is_suspicious("AKIA0123456789ABCDEF")
