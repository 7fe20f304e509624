"""A plugin's rule withholds as the built-in rules do, for any text, however it is cut into pieces."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safety_svc.policy import RuleSet, load_policy
from safety_svc.screen import AnswerScreener, check_prompt
from tests.examples import num_examples
from tests.fakes.plugin_site import PluginSite

GROUP = "kvloom.safety_rules"
POLICY = """
[[rules]]
name = "card-number"
kind = "card_number"
first_digits = "45"

[[rules]]
name = "phrase"
phrases = ["launch code"]
"""
MARKED = """
import re

class Marked:
    max_length = 6
    prefixes = ("<<", "<!")

    def __init__(self, fields):
        self._passage = re.compile("<[<!][a-z]{0,2}>>")

    def find(self, text, start):
        found = self._passage.search(text, start)
        return found and found.span()
"""
CARDS = ["4111111111111111", "5500000000000004", "4222222222222", "4111111111111112", "411111", "4"]
FRAGMENTS = [*"0459 a-", *CARDS, "launch ", "code ", "<<", "<!", ">>", "<<ab>>", "<!", "ab"]
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=10).map("".join)
cuts = st.lists(st.integers(0, 80), max_size=30)


def policy_of(plugin_site: PluginSite, text: str) -> RuleSet:
    path: Path = plugin_site.folder / "policy.toml"
    path.write_text(text)
    return load_policy(path).answer


def halted_at(rules: RuleSet, text: str, at: list[int]) -> int | None:
    """How much of the answer had been cleared when it was halted; None if it was not. Checks that nothing is cleared
    twice, and that an answer that ends is clear."""
    screener, cleared = AnswerScreener(rules), 0
    for a, b in itertools.pairwise(sorted({0, len(text), *(cut % (len(text) + 1) for cut in at)})):
        screener.push(text[a:b])
        assert cleared <= screener.num_clear_chars <= b
        cleared = screener.num_clear_chars
        if screener.hit is not None:
            return cleared
    screener.close()
    if screener.hit is None:
        assert screener.num_clear_chars == len(text)
        return None
    return screener.num_clear_chars


@pytest.mark.hypothesis
@pytest.mark.parametrize("kind", ["card_number", "marked"])
def test_no_cut_shows_a_forbidden_passage(plugin_site: PluginSite, kind: str) -> None:
    """For every cut, single characters too, an answer is halted exactly if its whole text is forbidden, and nothing of
    the passage was cleared before."""
    if kind == "marked":
        plugin_site.install("marked_rules", GROUP, {"marked": "marked_rules:Marked"}, MARKED)
        rules = policy_of(plugin_site, '[[rules]]\nname = "m"\nkind = "marked"\n')
    else:
        plugin_site.install_example(GROUP)
        rules = policy_of(plugin_site, POLICY)

    @given(texts, cuts)
    @settings(max_examples=num_examples(1500), deadline=None)
    def law(text: str, at: list[int]) -> None:
        whole = check_prompt(rules, text)
        for cut in (at, list(range(len(text)))):
            cleared = halted_at(rules, text, cut)
            assert (cleared is None) is (whole is None)
            assert cleared is None or whole is None or cleared <= whole.start

    law()
