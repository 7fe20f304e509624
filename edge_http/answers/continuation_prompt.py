"""Makes what the model that continues a lost answer gets of it: the text so far in tokens of its own, and what is left
of the request's limits. Pure; see edge_http/endpoints/continuing.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from kvloom.errors import KvloomError
from kvloom.router_link.link import ChoiceProgress
from kvloom.v1.generation_pb2 import StopConditions
from kvloom_common.text.detokenizer import IncrementalDetokenizer, TokenText, stopping_detokenizer


class CarriedText(NamedTuple):
    """The text of an answer when its model was lost."""

    text: str
    """All that was generated, without an incomplete character at its end."""
    num_delivered: int
    """How many of its characters the client has. The others may be the beginning of a stop string."""
    num_tokens: int
    """How many tokens it took, each of the model that generated it."""

    def extended(
        self, tokenizer: TokenText, carried_ids: Sequence[int], token_ids: Sequence[int], num_delivered: int
    ) -> CarriedText:
        """With the tokens that a model has added, of whose text `num_delivered` characters were new to the client. It
        had continued this text, in its tokens `carried_ids`."""
        num_carried_chars = len(_text_of(tokenizer, carried_ids))
        text = _text_of(tokenizer, [*carried_ids, *token_ids])[num_carried_chars:]
        return CarriedText(self.text + text, self.num_delivered + num_delivered, self.num_tokens + len(token_ids))


NOTHING: Final = CarriedText("", 0, 0)


def progress_in_tokens(
    carried: CarriedText, token_ids: Sequence[int], tokenizer: TokenText, stop: StopConditions
) -> ChoiceProgress | None:
    """The text as the progress of a choice: `token_ids` are its tokens in the tokenizer of the model that continues it.
    None: these tokens do not have exactly this text, or its end would be taken for another one by the stop strings, so
    that a character could be lost or repeated."""
    text = _text_of(tokenizer, token_ids)
    before = len(text) - len(carried.text)
    # Some tokenizers put a space before every text. The client has seen the text without it.
    if not text.endswith(carried.text) or text[:before].strip(" "):
        return None
    num_chars = before + carried.num_delivered
    conditions = StopConditions()
    if carried.num_tokens >= stop.min_tokens:
        conditions.CopyFrom(stop)
        conditions.min_tokens = 0
    try:
        detokenizer = stopping_detokenizer(tokenizer, conditions, token_ids, num_chars)
    except KvloomError:  # more was shown than these stop strings allow
        return None
    if detokenizer.stop_string is not None:
        return None
    progress = ChoiceProgress(0)
    progress.token_ids.extend(token_ids)
    progress.num_chars = num_chars
    return progress


def remaining_stop(stop: StopConditions, carried: CarriedText, num_token_ids: int, room: int) -> StopConditions | None:
    """The conditions for an answer that begins with `num_token_ids` tokens, which count like generated ones. `room` is
    how many tokens its model has for the answer; 0: not known. An answer may be cut to it. None: there is no room."""
    if room and num_token_ids >= room:
        return None
    remaining = StopConditions()
    remaining.CopyFrom(stop)
    if stop.HasField("max_tokens"):
        limit = num_token_ids + max(stop.max_tokens - carried.num_tokens, 0)
        remaining.max_tokens = max(min(limit, room) if room else limit, 1)
    missing = stop.min_tokens - carried.num_tokens
    remaining.min_tokens = num_token_ids + missing if missing > 0 else 0
    if remaining.HasField("max_tokens"):
        remaining.min_tokens = min(remaining.min_tokens, remaining.max_tokens)
    return remaining


def _text_of(tokenizer: TokenText, token_ids: Sequence[int]) -> str:
    """Without an incomplete character at the end."""
    return IncrementalDetokenizer(tokenizer).push(token_ids)
