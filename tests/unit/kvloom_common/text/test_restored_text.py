"""Hidden texts come back whole, however an answer is split, and nothing of a placeholder is shown."""

from __future__ import annotations

import itertools
import json
import re

from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom_common.text.restored_text import RestoredText
from tests.examples import num_examples

ORIGINALS = {
    "[MAIL-aa]": "eve@example.org",
    "[MAIL-ab]": "[MAIL-aa]",
    "[CARD-aa]": "4111 1111 1111 1111",
    "[MAIL-aaa]": "longer",
}
EXPRESSION = re.compile("|".join(map(re.escape, ORIGINALS)))
texts = st.lists(st.sampled_from([*ORIGINALS, "[", "[MAIL-", "]", "a", "[MAIL", "-aa]", "x [", "[["]), max_size=12).map(
    "".join
)
cuts = st.lists(st.integers(0, 200), max_size=30)


def pieces(text: str, at: list[int]) -> list[str]:
    ends = sorted({0, len(text), *(cut % (len(text) + 1) for cut in at)})
    return [text[a:b] for a, b in itertools.pairwise(ends)]


@given(texts, cuts)
@settings(max_examples=num_examples(100))
def test_any_split_gives_the_same_text(text: str, at: list[int]) -> None:
    """What was put back is not searched again: it may look like a placeholder."""
    restored = RestoredText(ORIGINALS)
    shown = [restored.feed(piece) for piece in pieces(text, at)]
    whole = EXPRESSION.sub(lambda match: ORIGINALS[match[0]], text)
    assert "".join(shown) + restored.finish() == whole
    assert restored.finish() == ""


@given(texts, cuts)
@settings(max_examples=num_examples(100))
def test_only_the_beginning_of_a_placeholder_is_withheld(text: str, at: list[int]) -> None:
    """Everything else is shown at once, and what is withheld is shorter than the longest placeholder."""
    restored = RestoredText(ORIGINALS)
    for piece in pieces(text, at):
        restored.feed(piece)
        kept = restored._kept
        assert not kept or any(each.startswith(kept) and each != kept for each in ORIGINALS)


def test_arguments_of_calls_stay_json() -> None:
    """A placeholder within the JSON of a call becomes the text."""
    restored = RestoredText(ORIGINALS)
    written = json.dumps({"to": "[MAIL-aa]", "card": "[CARD-aa]"})
    assert json.loads("".join(map(restored.feed, written)) + restored.finish()) == {
        "to": "eve@example.org",
        "card": "4111 1111 1111 1111",
    }
