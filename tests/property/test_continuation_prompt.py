"""An answer that another model continues, with a tokenizer of its own: what its client gets adds up."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import normalizers

from edge_http.answers.continuation_prompt import NOTHING, CarriedText, progress_in_tokens, remaining_stop
from kvloom.v1.generation_pb2 import StopConditions
from kvloom_common.text.detokenizer import IncrementalDetokenizer
from kvloom_common.text.tokenizer import ModelTokenizer
from tests.fakes.tiny_tokenizer import byte_fallback_tokenizer, model_tokenizer

BYTE_LEVEL = model_tokenizer()
BYTE_FALLBACK = ModelTokenizer(byte_fallback_tokenizer())


def spaced_tokenizer() -> ModelTokenizer:
    """Puts a space before every text, as Llama 2's does."""
    tokenizer = byte_fallback_tokenizer()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return ModelTokenizer(tokenizer)


SPACED = spaced_tokenizer()
TOKENIZERS = [BYTE_LEVEL, BYTE_FALLBACK, SPACED]
texts = st.text(st.sampled_from("ab the日é🙂."), max_size=12)
stop_strings = st.lists(st.text(st.sampled_from("ab t日"), min_size=1, max_size=4), max_size=3, unique=True)


def ids_of(tokenizer: ModelTokenizer, text: str) -> list[int]:
    return tokenizer.encode_now(text)


def shown(tokenizer: ModelTokenizer, stops: Sequence[str], token_ids: Sequence[int]) -> tuple[str, str | None]:
    """What an uninterrupted answer of these tokens shows, and the stop string that ends it."""
    detokenizer = IncrementalDetokenizer(tokenizer, stops)
    text = detokenizer.push(token_ids)
    return text + detokenizer.flush(), detokenizer.stop_string


@given(st.lists(st.tuples(st.sampled_from(TOKENIZERS), texts, st.integers(0, 12)), max_size=4), stop_strings)
def test_no_character_is_lost_or_repeated_at_a_seam(
    parts: list[tuple[ModelTokenizer, str, int]], stops: list[str]
) -> None:
    """Whatever was held back as the possible beginning of a stop string or of a character when a model was lost. The
    stop string that is found is the one that the whole text has, also if it begins before a seam."""
    carried, client, stop_string = NOTHING, "", None
    for tokenizer, text, num_tokens in parts:
        carried_ids = ids_of(tokenizer, carried.text)
        progress = progress_in_tokens(carried, carried_ids, tokenizer, StopConditions(stop=stops))
        if progress is None:  # with its space before the text, there is a stop string that nobody has written
            assert tokenizer is SPACED
            assert any(stop.startswith(" ") for stop in stops)
            continue
        # The shard of the next model, which is lost after some tokens, perhaps within a character.
        detokenizer = IncrementalDetokenizer(tokenizer, stops, progress.token_ids, progress.num_chars)
        new_ids = ids_of(BYTE_FALLBACK if tokenizer is SPACED else tokenizer, text)[:num_tokens]
        delivered = detokenizer.push(new_ids)
        client += delivered
        carried = carried.extended(tokenizer, carried_ids, new_ids, len(delivered))
        stop_string = detokenizer.stop_string
        if stop_string is not None:
            break
        assert carried.text[: carried.num_delivered] == client
    held = carried.text[carried.num_delivered :] if stop_string is None else ""
    assert (client + held, stop_string) == shown(BYTE_LEVEL, stops, ids_of(BYTE_LEVEL, carried.text))


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@given(text=texts, num_held=st.integers(0, 3))
def test_every_tokenizer_can_continue_plain_text(tokenizer: ModelTokenizer, text: str, num_held: int) -> None:
    """A fallback that works for some texts only would be found out in an outage."""
    carried = CarriedText(text, max(0, len(text) - num_held), 5)
    progress = progress_in_tokens(carried, ids_of(tokenizer, text), tokenizer, StopConditions())
    assert progress is not None
    detokenizer = IncrementalDetokenizer(tokenizer, (), progress.token_ids, progress.num_chars)
    assert detokenizer.flush() == text[carried.num_delivered :]


@pytest.mark.parametrize(
    ("text", "token_text", "stops"),
    [
        ("a b", "a  b", []),  # other tokens
        ("<|im_end|>", "<|im_end|>", []),  # would become a special token, which has no text
        ("ab", "ab", ["ab"]),  # these stop strings have not ended the text: it was exempt from them
    ],
)
def test_what_would_not_add_up_is_not_continued(text: str, token_text: str, stops: list[str]) -> None:
    """The answer then fails, as it would without a route, instead of going on with other text."""
    carried = CarriedText(text, len(text), 5)
    ids = ids_of(BYTE_LEVEL, token_text)
    assert progress_in_tokens(carried, ids, BYTE_LEVEL, StopConditions(stop=stops)) is None


def test_stop_strings_are_not_looked_for_before_min_tokens() -> None:
    """What the first model was not to look at, the next one must not find."""
    carried = CarriedText("ab", 2, 5)
    stop = StopConditions(stop=["ab"], min_tokens=6)
    assert progress_in_tokens(carried, ids_of(BYTE_LEVEL, "ab"), BYTE_LEVEL, stop) is not None


@given(
    max_tokens=st.one_of(st.none(), st.integers(1, 60)),
    min_tokens=st.integers(0, 60),
    num_done=st.integers(0, 60),
    num_ids=st.integers(0, 60),
    room=st.integers(0, 100),
)
def test_limits_are_those_that_are_left(
    max_tokens: int | None, min_tokens: int, num_done: int, num_ids: int, room: int
) -> None:
    """All models together generate at most max_tokens, and never more than the window of the last one has room for."""
    assume(max_tokens is None or (num_done < max_tokens and min_tokens <= max_tokens))
    stop = StopConditions(max_tokens=max_tokens, min_tokens=min_tokens, stop=["x"], stop_token_ids=[3])
    left = remaining_stop(stop, CarriedText("", 0, num_done), num_ids, room)
    if room and num_ids >= room:
        assert left is None
        return
    assert left is not None
    assert (list(left.stop), list(left.stop_token_ids)) == (["x"], [3])
    if max_tokens is None:
        assert not left.HasField("max_tokens")
    else:
        wanted = max_tokens - num_done
        assert left.max_tokens - num_ids == (min(wanted, room - num_ids) if room else wanted)
        assert left.min_tokens <= left.max_tokens
    if num_done >= min_tokens:
        assert left.min_tokens == 0
    elif not room and max_tokens is None:
        assert left.min_tokens - num_ids == min_tokens - num_done
