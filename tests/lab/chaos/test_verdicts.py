"""`kvloom-lab chaos` must not pass an answer that lost, doubled or changed a token. Such errors are planted here."""

from __future__ import annotations

import dataclasses

import pytest

from lab.chaos.checking.verdicts import AnswerVerdict, judge
from lab.chaos.clients.oracle import cut_at_stop
from lab.chaos.clients.transcript import AnswerEnd, Expected, ReceivedChoice, Transcript

WORDS = ["the", " river", " runs", " past", " the", " old", " mill", " and", " on"]
TOKENS = list(range(100, 100 + len(WORDS)))
EXPECTED = Expected((cut_at_stop(TOKENS, WORDS, ()),), num_prompt_tokens=5)


def received_text(text: str, end: AnswerEnd = AnswerEnd.COMPLETE, **settings: object) -> Transcript:
    """A transcript of an endpoint that does not return token ids."""
    transcript = Transcript(
        [ReceivedChoice(text, finish_reason="length" if end is AnswerEnd.COMPLETE else None)], sent_at=0.0, end=end
    )
    transcript.num_prompt_tokens, transcript.num_output_tokens = (
        (5, len(TOKENS)) if end is AnswerEnd.COMPLETE else (None, None)
    )
    return dataclasses.replace(transcript, **settings)


def received_tokens(token_ids: list[int], words: list[str]) -> Transcript:
    choice = ReceivedChoice("".join(words), token_ids=token_ids, finish_reason="length")
    return Transcript([choice], 0.0, AnswerEnd.COMPLETE, num_prompt_tokens=5, num_output_tokens=len(TOKENS))


def test_the_right_answer_passes():
    """Otherwise the other tests here would prove nothing."""
    assert judge(EXPECTED, received_text("".join(WORDS))).verdict is AnswerVerdict.OK
    assert judge(EXPECTED, received_tokens(TOKENS, WORDS)).verdict is AnswerVerdict.OK


@pytest.mark.parametrize("position", range(len(WORDS)))
def test_a_lost_token_is_found_wherever_it_was(position: int):
    """It is found by text and by ids, including the first and the last token."""
    words, tokens = WORDS[:position] + WORDS[position + 1 :], TOKENS[:position] + TOKENS[position + 1 :]
    assert judge(EXPECTED, received_text("".join(words))).verdict in (AnswerVerdict.LOST, AnswerVerdict.WRONG)
    assert judge(EXPECTED, received_tokens(tokens, words)).verdict is AnswerVerdict.LOST


@pytest.mark.parametrize("position", range(len(WORDS)))
def test_a_doubled_token_is_found_wherever_it_was(position: int):
    """This happens when an attempt begins one token too early, also at the end of the answer."""
    words, tokens = WORDS[: position + 1] + WORDS[position:], TOKENS[: position + 1] + TOKENS[position:]
    assert judge(EXPECTED, received_text("".join(words))).verdict in (AnswerVerdict.DOUBLED, AnswerVerdict.WRONG)
    assert judge(EXPECTED, received_tokens(tokens, words)).verdict is AnswerVerdict.DOUBLED


@pytest.mark.parametrize("position", range(len(WORDS)))
def test_a_changed_token_is_found_wherever_it_was(position: int):
    """This happens when an attempt continues with another seed."""
    words, tokens = list(WORDS), list(TOKENS)
    words[position], tokens[position] = " blue", 999
    assert judge(EXPECTED, received_text("".join(words))).verdict is AnswerVerdict.WRONG
    assert judge(EXPECTED, received_tokens(tokens, words)).verdict is AnswerVerdict.WRONG


def test_what_came_before_a_break_must_be_right_too():
    """Wrong words are wrong even in a broken stream."""
    assert judge(EXPECTED, received_text("the river runs", AnswerEnd.BROKEN)).verdict is AnswerVerdict.BROKEN
    assert judge(EXPECTED, received_text("the river river", AnswerEnd.BROKEN)).verdict is AnswerVerdict.DOUBLED
    assert judge(EXPECTED, received_text("the river past the", AnswerEnd.ERROR)).verdict is AnswerVerdict.LOST
    assert judge(EXPECTED, received_text("the red", AnswerEnd.LEFT)).verdict is AnswerVerdict.WRONG


def test_an_answer_without_an_end_is_lost():
    """The client gave up waiting without having received an end."""
    assert judge(EXPECTED, received_text("the river", AnswerEnd.SILENT)).verdict is AnswerVerdict.LOST
    cut = received_text("".join(WORDS))
    cut.choices[0].finish_reason = None
    assert judge(EXPECTED, cut).verdict is AnswerVerdict.LOST


def test_repeated_and_missing_events_are_found():
    """A replay may begin one event too early or too late, although the text still looks right."""
    text = "".join(WORDS)
    assert judge(EXPECTED, received_text(text, event_fault="event 7 came again")).verdict is AnswerVerdict.DOUBLED
    assert judge(EXPECTED, received_text(text, event_fault="events 7 to 8 lost")).verdict is AnswerVerdict.LOST


@pytest.mark.parametrize("counts", [(5, len(TOKENS) + 1), (5, len(TOKENS) - 1), (6, len(TOKENS)), (None, None)])
def test_usage_that_does_not_fit_the_answer_is_found(counts: tuple[int | None, int | None]):
    """Tokens of an earlier attempt that are counted twice, or not at all."""
    transcript = received_text("".join(WORDS))
    transcript.num_prompt_tokens, transcript.num_output_tokens = counts
    assert judge(EXPECTED, transcript).verdict is AnswerVerdict.MISCOUNTED


def test_each_choice_is_compared_with_its_own_answer():
    """With n > 1, swapped choices are wrong even if each of them is right by itself."""
    other = cut_at_stop([1, 2], ["a", " b"], ())
    expected = Expected((EXPECTED.choices[0], other), num_prompt_tokens=5)
    right = [ReceivedChoice("".join(WORDS), finish_reason="length"), ReceivedChoice("a b", finish_reason="length")]
    transcript = Transcript(right, 0.0, AnswerEnd.COMPLETE, num_prompt_tokens=5, num_output_tokens=len(TOKENS) + 2)
    assert judge(expected, transcript).verdict is AnswerVerdict.OK
    transcript.choices.reverse()
    assert judge(expected, transcript).verdict is AnswerVerdict.WRONG


def test_a_stop_string_ends_the_text_before_it_and_the_count_after_it():
    """The expected answer must be cut as the fabric cuts it, also when a stop string spans two tokens."""
    cut = cut_at_stop(TOKENS, WORDS, ("st the",))
    assert (cut.text, cut.token_ids, cut.finish_reason) == ("the river runs pa", tuple(TOKENS[:5]), "stop")
    assert cut.text_lengths == (3, 9, 14, 17, 17)
    assert cut_at_stop(TOKENS, WORDS, ("moon",)).finish_reason == "length"


def test_tokens_are_counted_by_the_text_that_was_seen():
    """Text that a client received must have been delivered, so that its tokens must be metered."""
    transcript = Transcript([ReceivedChoice("the river r")], 0.0)
    assert transcript.num_received_tokens(EXPECTED) == 3
    assert Transcript([ReceivedChoice("")], 0.0).num_received_tokens(EXPECTED) == 0
