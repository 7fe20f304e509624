"""Log-probabilities in OpenAI's two formats: chat (an object per token) and plain completions (parallel lists)."""

from __future__ import annotations

import codecs
import functools
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from kvloom.v1.generation_pb2 import TokenLogprobs
from kvloom_common.text.tokenizer import ModelTokenizer

LOWEST_LOGPROB: Final = -9999.0
"""OpenAI reports this for a token that could not be sampled, because JSON has no infinity."""

MAX_CACHED_TOKENS: Final = 16_384

Json = dict[str, Any]
encode_json: Final = msgspec.json.Encoder().encode


def chat_logprobs(tokenizer: ModelTokenizer, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> bytes:
    """Return the content of the array `logprobs.content`, one entry per token. Special tokens, such as the one that
    ends the answer, have none: the tokens of the entries are those of the text, which clients align with it.

    A token may have 20 alternatives, and a frame the tokens of many choices: an entry is put together from bytes that
    are encoded once per token of the vocabulary, and only the numbers are encoded each time.
    """
    shown: list[bytes] = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        if not tokenizer.shown_bytes(token_id):
            continue
        numbers = encode_json([max(number, LOWEST_LOGPROB) for number in (entry.logprob, *entry.top_logprobs)])
        first, *others = numbers[1:-1].split(b",")
        before, after = _around_logprob(tokenizer, token_id)
        shown.append(b',%b%b%b,"top_logprobs":[' % (before, first, after))
        top = [
            b"%b%b%b}" % (before, number, after)
            for (before, after), number in zip(
                [_around_logprob(tokenizer, top_id) for top_id in entry.top_token_ids], others, strict=True
            )
        ]
        shown.append(b",".join(top) + b"]}")
    return b"".join(shown)[1:]


@functools.lru_cache(maxsize=MAX_CACHED_TOKENS)
def _around_logprob(tokenizer: ModelTokenizer, token_id: int) -> tuple[bytes, bytes]:
    """Return the bytes of a token's entry before and after its logprob."""
    exact = tokenizer.token_bytes(token_id)
    return b'{"token":%b,"logprob":' % encode_json(_shown(exact)), b',"bytes":%b' % encode_json(list(exact))


def cut_chat_logprobs(content: bytes, num_bytes: int) -> bytes:
    """Return what `chat_logprobs` returned, without the last `num_bytes` of the text of the last token."""
    *others, last = msgspec.json.decode(b"[%b]" % content)
    exact = bytes(last["bytes"])[:-num_bytes]
    return encode_json([*others, last | {"token": _shown(exact), "bytes": list(exact)}])[1:-1]


def cut_token_list(tokens: bytes, num_bytes: int) -> bytes:
    """Return the content of the array `tokens` of a plain completion, without the last `num_bytes` of the last one."""
    *others, last = msgspec.json.decode(b"[%b]" % tokens, type=list[str])
    return encode_json([*others, _shown(last.encode()[:-num_bytes])])[1:-1]


class CompletionLogprobs:
    """Creates the four lists of a plain completion's `logprobs`. It keeps the text offset between calls."""

    __slots__ = ("_decoder", "_num_chars", "_tokenizer")

    def __init__(self, tokenizer: ModelTokenizer, num_chars: int = 0) -> None:
        """`num_chars` is the length of the text that precedes the first token."""
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_chars = num_chars

    def push(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> Json:
        """Return the lists for these tokens. `text_offset` counts characters from the beginning of the text."""
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


def shown_token(tokenizer: ModelTokenizer, token_id: int) -> str:
    """The text of one token by itself; the name of a special one."""
    return _shown(tokenizer.token_bytes(token_id))


def _shown(exact: bytes) -> str:
    return exact.decode("utf-8", errors="replace")
