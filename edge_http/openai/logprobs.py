"""Log-probabilities in OpenAI's two formats: chat (an object per token) and plain completions (parallel lists)."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, Final

from kvloom.text.tokenizer import ModelTokenizer
from kvloom.v1.generation_pb2 import TokenLogprobs

LOWEST_LOGPROB: Final = -9999.0
"""OpenAI reports this for a token that could not be sampled, because JSON has no infinity."""

Json = dict[str, Any]


def chat_logprobs(tokenizer: ModelTokenizer, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> list[Json]:
    """Return the entries of `logprobs.content`, one per token."""
    return [
        {
            **_chat_entry(tokenizer, token_id, entry.logprob),
            "top_logprobs": [
                _chat_entry(tokenizer, top_id, logprob)
                for top_id, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True)
            ],
        }
        for token_id, entry in zip(token_ids, entries, strict=True)
    ]


def _chat_entry(tokenizer: ModelTokenizer, token_id: int, logprob: float) -> Json:
    exact = tokenizer.token_bytes(token_id)
    return {"token": _shown(exact), "logprob": max(logprob, LOWEST_LOGPROB), "bytes": list(exact)}


class CompletionLogprobs:
    """Creates the four lists of a plain completion's `logprobs`. It keeps the text offset between calls."""

    __slots__ = ("_decoder", "_num_chars", "_tokenizer")

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_chars = 0

    def push(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> Json:
        """Return the lists for these tokens. `text_offset` counts characters from the beginning of the answer."""
        tokenizer = self._tokenizer
        lists = empty_completion_logprobs()
        for token_id, entry in zip(token_ids, entries, strict=True):
            lists["tokens"].append(_shown(tokenizer.token_bytes(token_id)))
            lists["token_logprobs"].append(max(entry.logprob, LOWEST_LOGPROB))
            lists["top_logprobs"].append(
                {
                    _shown(tokenizer.token_bytes(top_id)): max(logprob, LOWEST_LOGPROB)
                    for top_id, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True)
                }
            )
            lists["text_offset"].append(self._num_chars)
            self.skip((token_id,))
        return lists

    def skip(self, token_ids: Sequence[int]) -> None:
        """Count the characters of these tokens, without making lists."""
        for token_id in token_ids:
            self._num_chars += len(self._decoder.decode(self._tokenizer.shown_bytes(token_id)))


def empty_completion_logprobs() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _shown(exact: bytes) -> str:
    return exact.decode("utf-8", errors="replace")
