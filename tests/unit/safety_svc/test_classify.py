"""Classification names the categories of all rules that a text breaks, wherever they are in it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safety_svc.classify import broken_categories
from safety_svc.policy import SafetyPolicy, load_policy
from safety_svc.screen import CHARS_PER_SLICE, check_prompt

POLICY = """
[[rules]]
name = "codes"
category = "weapons"
phrases = ["launch code"]

[[rules]]
name = "bombs"
applies_to = ["answer"]
category = "weapons"
phrases = ["bomb"]
spaced = true

[[rules]]
name = "key"
applies_to = ["answer"]
patterns = ["AKIA[0-9A-Z]{4}"]
"""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> SafetyPolicy:
    path = Path(tmp_path_factory.mktemp("policy") / "policy.toml")
    path.write_text(POLICY)
    return load_policy(path)


@pytest.mark.parametrize(
    ("text", "categories"),
    [
        ("", set()),
        ("a launch coder", set()),
        ("the \uff2cAUNCH   code", {"weapons"}),
        ("bomb", {"weapons"}),
        ("b.o m - b", {"weapons"}),
        ("launch code and AKIA12AB", {"weapons", "key"}),
    ],
)
async def test_all_rules_count(policy: SafetyPolicy, text: str, categories: set[str]) -> None:
    """A text is judged by the rules for prompts and for answers, of which several may have one category."""
    assert await broken_categories(policy, text) == categories
    assert policy.categories == ("weapons", "key")


@pytest.mark.parametrize("at", [0, CHARS_PER_SLICE - 5, CHARS_PER_SLICE, 3 * CHARS_PER_SLICE - 11])
async def test_phrases_across_slices(policy: SafetyPolicy, at: int) -> None:
    """Long texts are searched in slices; what lies across two of them is found all the same."""
    text = "x" * (at - 1) + " " * (at > 0) + "launch code" + " y" * CHARS_PER_SLICE
    assert await broken_categories(policy, text) == {"weapons"}
    spaced = "x" * (at - 1) + " " * (at > 0) + "b-o..m b" + " y" * CHARS_PER_SLICE
    assert await broken_categories(policy, spaced) == {"weapons"}


@given(st.text("launchcode bmAKI1Z.\u0301\u200b", max_size=80))
async def test_agrees_with_screening(policy: SafetyPolicy, text: str) -> None:
    """What a screen would block is never classified as harmless, and the reverse."""
    assert bool(await broken_categories(policy, text)) == (check_prompt(policy.any_text, text) is not None)
