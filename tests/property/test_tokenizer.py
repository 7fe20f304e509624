"""Laws of tokenizing and detokenizing, for any text and any split into tokens."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.errors import KvloomError
from kvloom.v1.generation_pb2 import StopConditions
from kvloom_common.text.detokenizer import IncrementalDetokenizer, LateStopDetokenizer, stopping_detokenizer
from kvloom_common.text.special_tokens import AliasedEncoder, SpecialStrings
from kvloom_common.text.tokenizer import ChatMessage
from tests.examples import num_examples
from tests.fakes.tiny_tokenizer import SPECIAL, byte_level_tokenizer, model_tokenizer

TOKENIZER = model_tokenizer()
STRINGS = SpecialStrings(SPECIAL)
ALIASED = AliasedEncoder(byte_level_tokenizer(), STRINGS)

texts = st.text(st.sampled_from("ab <|im_end>start\n日é🙂\ue000"), max_size=60) | st.text(max_size=30)
injections = st.lists(st.sampled_from([*SPECIAL, "<|im_", "end|>", "<think>", "a", "<", " "]), max_size=8).map("".join)
token_ids = st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=40)


@given(texts)
@settings(max_examples=num_examples(150))
def test_the_aliased_encoding_equals_the_plain_one(text: str) -> None:
    """For a conversation without special strings, the guarded encoding has the same ids as the plain one."""
    if any(special in text for special in SPECIAL):
        return
    prompt = f"<|im_start|>user\n{text}<|im_end|>\n<think>"
    assert ALIASED.encode(prompt, "\uf8ff") == TOKENIZER.encode_now(prompt)


@given(st.lists(injections | texts, min_size=1, max_size=4))
@settings(max_examples=num_examples(150))
def test_contents_never_yield_control_tokens(contents: list[str]) -> None:
    """The prompt's control tokens are the template's for all contents; its text is the conversation's."""
    messages = [ChatMessage("user", content) for content in contents]
    ids, text = asyncio.run(TOKENIZER.encode_chat(messages))
    assert text == TOKENIZER.render_chat(messages)
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
    assert sum(not TOKENIZER.shown_bytes(i) for i in ids) == 2 * len(contents) + 1


def feed(detokenizer: IncrementalDetokenizer, ids: list[int], cuts: list[int]) -> str:
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    pieces = [detokenizer.push(ids[a:b]) for a, b in itertools.pairwise(edges)]
    return "".join(pieces) + detokenizer.flush()


cuts = st.lists(st.integers(0, 100), max_size=40)


@given(token_ids, cuts)
@settings(max_examples=num_examples(200))
def test_any_cut_of_the_tokens_gives_the_whole_text(ids: list[int], at: list[int]) -> None:
    """Text does not depend on how tokens are grouped into steps; random ids make broken UTF-8 too."""
    text = feed(IncrementalDetokenizer(TOKENIZER), ids, at)
    assert text == TOKENIZER.decode(ids) == byte_level_tokenizer().decode(ids)


stops = st.lists(st.text(st.sampled_from("ab é日<"), min_size=1, max_size=5), min_size=1, max_size=4)
stop_text_ids = (st.text(st.sampled_from("aab é日<"), max_size=40)).map(TOKENIZER.encode_now) | token_ids


def cut_before_first_complete(text: str, stop_strings: list[str]) -> tuple[str, str | None]:
    """The definition of the text, written plainly."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stop_strings, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


@given(stop_text_ids, stops, cuts)
@settings(max_examples=num_examples(300))
def test_stop_strings_cut_the_same_for_any_cut_of_the_tokens(ids: list[int], strings: list[str], at: list[int]) -> None:
    """The answer ends before the stop string that is complete first, across token borders, and none of it is shown."""
    detokenizer = IncrementalDetokenizer(TOKENIZER, strings)
    text = feed(detokenizer, ids, at)
    assert (text, detokenizer.stop_string) == cut_before_first_complete(TOKENIZER.decode(ids), strings)


@given(stop_text_ids, stops)
@settings(max_examples=num_examples(150))
def test_no_more_is_held_back_than_a_stop_string_needs(ids: list[int], strings: list[str]) -> None:
    """The text held back is exactly the longest suffix that a stop string may begin with; users see the rest at
    once."""
    detokenizer = IncrementalDetokenizer(TOKENIZER, strings)
    shown = "".join(detokenizer.push([token_id]) for token_id in ids)
    rest = detokenizer.flush()
    if detokenizer.stop_string is not None or rest.endswith("\ufffd"):
        return
    text = shown + rest
    prefixes = {string[:length] for string in strings for length in range(1, len(string))}
    assert rest == max((prefix for prefix in prefixes if text.endswith(prefix)), key=len, default="")


@given(stop_text_ids, stops | st.just([]), st.integers(0, 40), st.integers(0, 60))
@settings(max_examples=num_examples(300))
def test_a_resumed_sequence_continues_where_delivery_ended(
    ids: list[int], strings: list[str], num_resumed: int, num_delivered: int
) -> None:
    """After a failover the client gets exactly the rest: no text is repeated or skipped."""
    whole_detokenizer = IncrementalDetokenizer(TOKENIZER, strings)
    safe = whole_detokenizer.push(ids[:num_resumed])
    whole = safe + whole_detokenizer.push(ids[num_resumed:]) + whole_detokenizer.flush()
    if num_delivered > len(safe):
        with pytest.raises(KvloomError):
            IncrementalDetokenizer(TOKENIZER, strings, ids[:num_resumed], num_delivered)
        return
    resumed = IncrementalDetokenizer(TOKENIZER, strings, ids[:num_resumed], num_delivered)
    rest = resumed.push(ids[num_resumed:]) + resumed.flush()
    assert safe[:num_delivered] + rest == whole
    assert resumed.stop_string == whole_detokenizer.stop_string


SPECIAL_IDS = [token_id for token_id in range(TOKENIZER.vocab_size) if not TOKENIZER.shown_bytes(token_id)]
marked_ids = st.lists(st.sampled_from([*SPECIAL_IDS, 5, 40, 70, 71]), max_size=30) | token_ids


@given(marked_ids, st.sets(st.sampled_from(SPECIAL_IDS)), cuts, st.integers(0, 40), st.integers(0, 60))
@settings(max_examples=num_examples(200))
def test_exactly_the_listed_special_tokens_are_shown(
    ids: list[int], shown: set[int], at: list[int], num_resumed: int, num_delivered: int
) -> None:
    """Parsers of tool calls need their markers, and no reader the others; also after a failover."""
    exact = (TOKENIZER.token_bytes(i) if i in shown else TOKENIZER.shown_bytes(i) for i in ids)
    expected = b"".join(exact).decode(errors="replace")
    assert feed(IncrementalDetokenizer(TOKENIZER, shown_special_token_ids=shown), ids, at) == expected
    safe = IncrementalDetokenizer(TOKENIZER, shown_special_token_ids=shown).push(ids[:num_resumed])
    num_delivered = min(num_delivered, len(safe))
    resumed = IncrementalDetokenizer(TOKENIZER, (), ids[:num_resumed], num_delivered, shown)
    assert safe[:num_delivered] + feed(resumed, ids[num_resumed:], at) == expected


@given(stop_text_ids, stops, st.integers(0, 30), cuts)
@settings(max_examples=num_examples(200))
def test_stop_strings_are_looked_for_after_the_exempt_tokens_only(
    ids: list[int], strings: list[str], num_exempt: int, at: list[int]
) -> None:
    """min_tokens: whatever the cut, the first tokens' text is shown whole, and the rest ends before a stop string."""
    late = LateStopDetokenizer(TOKENIZER, strings, num_exempt_tokens=num_exempt)
    first = IncrementalDetokenizer(TOKENIZER).push(ids[:num_exempt])
    rest = TOKENIZER.decode(ids)[len(first) :]
    text = feed(late, ids, at)
    if len(ids) <= num_exempt:
        assert text.startswith(first)
    else:
        shown, stop = cut_before_first_complete(rest, strings)
        assert (text, late.stop_string) == (first + shown, stop)


THINK = ("<think>",), ("</think>",)


@given(
    st.sampled_from(["", " ", "<th", "<think>", "\n<think>", "x<think>"]),
    st.lists(st.sampled_from(["a", "b", "ab", "<", "</think", "</think>", ">", " "]), max_size=12).map("".join),
    stops,
    st.booleans(),
    cuts,
)
@settings(max_examples=num_examples(300))
def test_stop_strings_are_looked_for_behind_the_reasoning_only(
    opening: str, text: str, strings: list[str], begins_inside: bool, at: list[int]
) -> None:
    """Thoughts quote the question, and a stop string in them would leave the client without an answer. However the text
    is cut, nothing is lost, and an answer that does not think ends as ever."""
    whole = opening + text
    conditions = StopConditions(stop=strings)
    conditions.reasoning.openings[:], conditions.reasoning.closings[:] = THINK
    conditions.reasoning.begins_inside = begins_inside
    ids = TOKENIZER.encode_now(whole)
    marks = TOKENIZER.special_token_ids(SPECIAL)
    assert whole == IncrementalDetokenizer(TOKENIZER, shown_special_token_ids=marks).push(ids)
    detokenizer = stopping_detokenizer(TOKENIZER, conditions, shown_special_token_ids=marks)
    shown = feed(detokenizer, ids, at)
    if begins_inside or whole.lstrip().startswith("<think>"):
        thoughts, closing, rest = whole.partition("</think>")
        thoughts += closing
    else:
        thoughts, rest = "", whole
    expected, stop = cut_before_first_complete(rest, strings)
    assert (shown, detokenizer.stop_string) == (thoughts + expected, stop)
