"""The checker of `kvloom chaos`, with faults planted: an answer that lost, doubled or changed a token must not pass."""

from __future__ import annotations

import dataclasses

import pytest

from tools.chaos.checker import Verdict, judge
from tools.chaos.clients.oracle import cut_at_stop
from tools.chaos.clients.transcript import End, Expected, SeenChoice, Transcript

WORDS = ["the", " river", " runs", " past", " the", " old", " mill", " and", " on"]
TOKENS = list(range(100, 100 + len(WORDS)))
EXPECTED = Expected((cut_at_stop(TOKENS, WORDS, ()),), num_prompt_tokens=5)


def seen_text(text: str, end: End = End.COMPLETE, **settings: object) -> Transcript:
    """As a client sees it that is told everything but the token ids."""
    seen = Transcript([SeenChoice(text, finish_reason="length" if end is End.COMPLETE else None)], sent_at=0.0, end=end)
    seen.num_prompt_tokens, seen.num_output_tokens = (5, len(TOKENS)) if end is End.COMPLETE else (None, None)
    return dataclasses.replace(seen, **settings)


def seen_tokens(token_ids: list[int], words: list[str]) -> Transcript:
    choice = SeenChoice("".join(words), token_ids=token_ids, finish_reason="length")
    return Transcript([choice], 0.0, End.COMPLETE, num_prompt_tokens=5, num_output_tokens=len(TOKENS))


def test_the_right_answer_passes():
    """Else every other test here would prove nothing."""
    assert judge(EXPECTED, seen_text("".join(WORDS))).verdict is Verdict.OK
    assert judge(EXPECTED, seen_tokens(TOKENS, WORDS)).verdict is Verdict.OK


@pytest.mark.parametrize("position", range(len(WORDS)))
def test_a_lost_token_is_found_wherever_it_was(position: int):
    """By text and by ids, the first and the last token included."""
    words, tokens = WORDS[:position] + WORDS[position + 1 :], TOKENS[:position] + TOKENS[position + 1 :]
    assert judge(EXPECTED, seen_text("".join(words))).verdict in (Verdict.LOST, Verdict.WRONG)
    assert judge(EXPECTED, seen_tokens(tokens, words)).verdict is Verdict.LOST


@pytest.mark.parametrize("position", range(len(WORDS)))
def test_a_doubled_token_is_found_wherever_it_was(position: int):
    """As when an attempt begins one token too early; also behind the answer's end."""
    words, tokens = WORDS[: position + 1] + WORDS[position:], TOKENS[: position + 1] + TOKENS[position:]
    assert judge(EXPECTED, seen_text("".join(words))).verdict in (Verdict.DOUBLED, Verdict.WRONG)
    assert judge(EXPECTED, seen_tokens(tokens, words)).verdict is Verdict.DOUBLED


@pytest.mark.parametrize("position", range(len(WORDS)))
def test_a_changed_token_is_found_wherever_it_was(position: int):
    """As when an attempt goes on with another seed."""
    words, tokens = list(WORDS), list(TOKENS)
    words[position], tokens[position] = " blue", 999
    assert judge(EXPECTED, seen_text("".join(words))).verdict is Verdict.WRONG
    assert judge(EXPECTED, seen_tokens(tokens, words)).verdict is Verdict.WRONG


def test_what_came_before_a_break_must_be_right_too():
    """A broken stream is no excuse for wrong words in it."""
    assert judge(EXPECTED, seen_text("the river runs", End.BROKEN)).verdict is Verdict.BROKEN
    assert judge(EXPECTED, seen_text("the river river", End.BROKEN)).verdict is Verdict.DOUBLED
    assert judge(EXPECTED, seen_text("the river past the", End.ERROR)).verdict is Verdict.LOST
    assert judge(EXPECTED, seen_text("the red", End.LEFT)).verdict is Verdict.WRONG


def test_an_answer_without_an_end_is_lost():
    """The client waited until its patience was over and was told nothing."""
    assert judge(EXPECTED, seen_text("the river", End.SILENT)).verdict is Verdict.LOST
    cut = seen_text("".join(WORDS))
    cut.choices[0].finish_reason = None
    assert judge(EXPECTED, cut).verdict is Verdict.LOST


def test_events_that_come_again_or_not_at_all_are_found():
    """A replay that begins one event too early or too late, though the text may still look right."""
    text = "".join(WORDS)
    assert judge(EXPECTED, seen_text(text, event_fault="event 7 came again")).verdict is Verdict.DOUBLED
    assert judge(EXPECTED, seen_text(text, event_fault="events 7 to 8 lost")).verdict is Verdict.LOST


@pytest.mark.parametrize("counts", [(5, len(TOKENS) + 1), (5, len(TOKENS) - 1), (6, len(TOKENS)), (None, None)])
def test_usage_that_does_not_fit_the_answer_is_found(counts: tuple[int | None, int | None]):
    """Tokens of an earlier attempt that are counted twice, or not at all."""
    seen = seen_text("".join(WORDS))
    seen.num_prompt_tokens, seen.num_output_tokens = counts
    assert judge(EXPECTED, seen).verdict is Verdict.MISCOUNTED


def test_each_choice_is_compared_with_its_own_answer():
    """With n > 1, choices that were mixed up are wrong, even if each of them is somebody's."""
    other = cut_at_stop([1, 2], ["a", " b"], ())
    expected = Expected((EXPECTED.choices[0], other), num_prompt_tokens=5)
    right = [SeenChoice("".join(WORDS), finish_reason="length"), SeenChoice("a b", finish_reason="length")]
    seen = Transcript(right, 0.0, End.COMPLETE, num_prompt_tokens=5, num_output_tokens=len(TOKENS) + 2)
    assert judge(expected, seen).verdict is Verdict.OK
    seen.choices.reverse()
    assert judge(expected, seen).verdict is Verdict.WRONG


def test_a_stop_string_ends_the_text_before_it_and_the_count_behind_it():
    """The reference must cut as the fabric does, also where a stop string lies across two tokens."""
    cut = cut_at_stop(TOKENS, WORDS, ("st the",))
    assert (cut.text, cut.token_ids, cut.finish_reason) == ("the river runs pa", tuple(TOKENS[:5]), "stop")
    assert cut.text_lengths == (3, 9, 14, 17, 17)
    assert cut_at_stop(TOKENS, WORDS, ("moon",)).finish_reason == "length"


def test_tokens_are_counted_by_the_text_that_was_seen():
    """What a client saw of an answer must have been delivered, so it must be billed."""
    seen = Transcript([SeenChoice("the river r")], 0.0)
    assert seen.num_seen_tokens(EXPECTED) == 3
    assert Transcript([SeenChoice("")], 0.0).num_seen_tokens(EXPECTED) == 0
