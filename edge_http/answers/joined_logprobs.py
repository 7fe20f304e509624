"""The log-probabilities of an answer that has stop strings: its tokens' texts add up to the answer's text.

Text that may be the beginning of a stop string is held back, but its tokens arrive. Their entries wait here until their
text has come, and those behind the cut are dropped.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence

from kvloom.v1.generation_pb2 import TokenLogprobs
from kvloom_common.text.detokenizer import IncrementalDetokenizer
from kvloom_common.text.tokenizer import ModelTokenizer


class JoinedLogprobs:
    """The entries of one choice that wait for their text."""

    __slots__ = ("_detokenizer", "_entries", "_num_released_chars", "_num_text_chars", "_texts", "_token_ids")

    def __init__(self, tokenizer: ModelTokenizer, shown_special_token_ids: Collection[int] = ()) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, shown_special_token_ids=shown_special_token_ids)
        self._token_ids = array("I")
        self._entries: list[TokenLogprobs] = []
        self._texts: list[str] = []
        """The text that each of these tokens adds; "" for one that does not complete a character."""
        self._num_text_chars = 0
        self._num_released_chars = 0

    def push(
        self, delta: str, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]
    ) -> tuple[Sequence[int], Sequence[TokenLogprobs]]:
        """Add an update of the choice. Returns the tokens, and their entries, whose text has come."""
        self._num_text_chars += len(delta)
        for token_id, entry in zip(token_ids, entries, strict=True):
            self._token_ids.append(token_id)
            self._texts.append(self._detokenizer.push((token_id,)))
            self._entries.append(entry)
        num_whole, num_chars = 0, self._num_released_chars
        for number, text in enumerate(self._texts, 1):
            num_chars += len(text)
            if num_chars > self._num_text_chars:
                break
            if text:
                num_whole, self._num_released_chars = number, num_chars
        return self._take(num_whole)

    def finish(self, *, is_cut: bool) -> tuple[Sequence[int], Sequence[TokenLogprobs], int]:
        """Returns the rest at the choice's end, and how many bytes of the last of these tokens are behind the cut.
        `is_cut`: a stop string ended the choice."""
        if not is_cut:
            return *self._take(len(self._entries)), 0
        num_left = self._num_text_chars - self._num_released_chars
        if num_left <= 0:
            return (), (), 0
        at = next(at for at, text in enumerate(self._texts) if text)
        num_cut_bytes = len(self._texts[at][num_left:].encode())
        return *self._take(at + 1), num_cut_bytes

    def _take(self, count: int) -> tuple[Sequence[int], Sequence[TokenLogprobs]]:
        taken = self._token_ids[:count], self._entries[:count]
        del self._token_ids[:count], self._entries[:count], self._texts[:count]
        return taken
