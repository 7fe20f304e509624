"""Texts are cut so that nothing is lost and no chunk is larger than it may be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.search.chunking import (
    ChunkSize,
    chars_per_token,
    chunk_size,
    chunks_of,
    estimated_tokens,
    halves_of,
)
from orchestrator.search.words import Vocabulary, words_of

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=3000)


def test_a_strategy_is_bounded_by_the_encoder() -> None:
    """OpenAI's default of 800 tokens is more than most encoders read; what they do not read would not be found."""
    assert chunk_size(None, 0) == ChunkSize(800, 400)
    assert chunk_size({"type": "auto"}, 512) == ChunkSize(512, 256)
    static = {"type": "static", "static": {"max_chunk_size_tokens": 300, "chunk_overlap_tokens": 10}}
    assert chunk_size(static, 512) == ChunkSize(300, 10)
    assert chunk_size(static, 100) == ChunkSize(100, 10)
    assert ChunkSize(300, 10).shown() == static


@given(TEXTS, st.sampled_from([True, False]))
def test_every_word_is_in_a_chunk_of_at_most_the_size(text: str, is_markdown: bool) -> None:
    """A chunk that is too large is not read to its end, and a word in no chunk is never found."""
    size = ChunkSize(100, 20)
    chunks = chunks_of(text, size, is_markdown=is_markdown)
    most = size.max_tokens * chars_per_token(text)
    assert all(len(chunk) <= most for chunk in chunks)
    longest = max((len(word) for word in text.split()), default=0)
    if longest <= most / 2:
        there = set(" ".join(chunks).split())
        assert set(text.split()) <= there or len(text.split()) == 0


@given(st.text(min_size=2, max_size=500))
def test_halves_are_smaller(text: str) -> None:
    """Otherwise a chunk for which the encoder has no room would be tried for ever."""
    assert all(len(part) <= (len(text) + 1) // 2 for part in halves_of(text))


def test_tokens_are_estimated_by_script() -> None:
    assert estimated_tokens("the quick brown fox") == 4
    assert estimated_tokens("internationalisation") == 4
    assert estimated_tokens("日本語, да!") == 7
    assert chars_per_token("日本語" * 1000) == 1.0
    assert 4 < chars_per_token("The quick brown fox jumps over the lazy dog. " * 5000) < 6


def test_words_are_compared_without_case_and_scripts_without_spaces_by_character() -> None:
    """A query finds what its reader would call the same word."""
    assert words_of("Straße, ﬁne_day 日本") == ["strasse", "fine", "day", "日", "本"]
    vocabulary = Vocabulary()
    assert vocabulary.add(["a", "b", "a"]) == [0, 1, 0]
    assert vocabulary.known(["b", "c", "b", "a"]) == [1, 0]
