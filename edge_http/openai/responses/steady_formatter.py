"""The format of background responses, which may be generated more than once: the same output has the same events,
however it was split. Text is cut at words, and log-probabilities come with the end of a text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from edge_http.formatting.response_formatter import Envelope
from edge_http.openai.responses.formatter import ResponsesFormatter
from edge_http.openai.responses.output_items import OutputItem
from kvloom_common.text.tokenizer import ModelTokenizer

MAX_CHARS: Final = 32
"""The most of a delta. Where the text has no white space, it is cut so."""
_WORD_END: Final = re.compile(r"\S(?=\s)")
RUN: Final = "run"
"""The option with the id and the time of the response, which are not those of the envelope."""


class RunName(msgspec.Struct):
    """The name of a background response, and its seed, however often it is generated."""

    id: str
    created_at: int
    seed: int


class TextCutter:
    """Cuts a text into pieces that follow from the text alone."""

    def __init__(self) -> None:
        self._rest = ""

    def feed(self, text: str) -> list[str]:
        """The pieces that are whole now."""
        rest = self._rest + text
        pieces: list[str] = []
        start = 0
        while (end := _end_of(rest, start)) is not None:
            pieces.append(rest[start:end])
            start = end
        self._rest = rest[start:]
        return pieces

    def finish(self) -> str:
        """The rest; "" if there is none."""
        rest, self._rest = self._rest, ""
        return rest


def _end_of(text: str, start: int) -> int | None:
    """Where the piece ends that begins at `start`; None: more must come first. Whether it ends at a place follows from
    what is before it and from one character behind it."""
    found = _WORD_END.search(text, start, min(len(text), start + MAX_CHARS + 1))
    if found is not None and found.start() + 1 - start <= MAX_CHARS:
        return found.start() + 1
    return start + MAX_CHARS if len(text) >= start + MAX_CHARS else None


class SteadyFormatter(ResponsesFormatter):
    """Formats a background response."""

    __slots__ = ("_cutter",)

    def __init__(self, envelope: Envelope, tokenizer: ModelTokenizer, options: Mapping[str, Any]) -> None:
        run = msgspec.convert(options[RUN], RunName)
        super().__init__(msgspec.structs.replace(envelope, id=run.id, created=run.created_at), tokenizer, options)
        self._cutter = TextCutter()

    def _add_delta(self, chunks: list[bytes], item: OutputItem, text: str, logprobs: bytes = b"") -> None:
        if logprobs:
            item.logprobs += b"," + logprobs if item.logprobs else logprobs
        chunks += [self._delta(item, piece) for piece in self._cutter.feed(text)]

    def _close(self, finish_reason: str, chunks: list[bytes]) -> None:
        if rest := self._cutter.finish():
            chunks.append(self._delta(self._items[-1], rest))
        super()._close(finish_reason, chunks)
