"""What a caller of the SDK sees of an answer, and how it waits for its reader."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import (
    FINISH_REASON_CONTENT_FILTER,
    FINISH_REASON_ERROR,
    SequenceFinish,
    SequenceStart,
    TokenLogprobs,
)
from kvloom.v1.router_service_pb2 import ChoiceDelta


@dataclasses.dataclass(slots=True)
class Delta:
    """News of one choice."""

    index: int
    """0 to n-1."""
    text: str = ""
    """May be "" while a character is incomplete or a stop string may be beginning."""
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    """One per token, when they were asked for."""
    start: SequenceStart | None = None
    """With the first token: cached tokens, shard, queue time."""
    finish: SequenceFinish | None = None
    """With the last one: reason and token counts."""

    @classmethod
    def from_proto(cls, news: ChoiceDelta) -> Delta:
        start = news.start if news.HasField("start") else None
        finish = news.finish if news.HasField("finish") else None
        return cls(news.index, news.text, news.token_ids, news.logprobs, start, finish)


class Finishes:
    """Which choices of a request have ended, and whether one failed."""

    def __init__(self, num_choices: int) -> None:
        self._num_open = num_choices
        self._has_news = False
        self._failure: KvloomError | None = None

    @property
    def complete(self) -> bool:
        return self._num_open == 0

    def note(self, delta: Delta) -> None:
        self._has_news = self._has_news or bool(delta.token_ids or delta.text)
        finish = delta.finish
        if finish is None:
            return
        self._num_open -= 1
        # A halted answer is an answer; a refused prompt, of which nothing was ever shown, is a failure.
        is_refused = finish.reason == FINISH_REASON_CONTENT_FILTER and not self._has_news and finish.HasField("error")
        if self._failure is None and (finish.reason == FINISH_REASON_ERROR or is_refused):
            self._failure = KvloomError.from_proto(finish.error)

    def raise_failure(self) -> None:
        """When the stream has ended: raise the first choice's failure, or that the answer was cut off."""
        if self._failure is not None:
            raise self._failure
        if not self.complete:
            raise KvloomError(ErrorReason.ERROR_REASON_ROUTER_LOST, "The router ended the answer before its end.")


class DeltaBuffer:
    """A Sink (see kvloom/router_link/link.py) that one reader empties. It never blocks the link: when more than
    `max_tokens` tokens wait, `on_overflow` is called once and the reader gets CLIENT_TOO_SLOW instead of the rest."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._deltas: list[Delta] = []
        self._num_tokens = 0
        self._starts: dict[int, SequenceStart] = {}
        self._overflowed = False
        self._wake = asyncio.Event()
        self.on_overflow: Callable[[], None] = lambda: None

    async def take(self) -> list[Delta]:
        """All that waits, at least one. Raises KvloomError (CLIENT_TOO_SLOW) once the buffer has overflowed."""
        await self._wake.wait()
        if self._overflowed:
            raise KvloomError(
                ErrorReason.ERROR_REASON_CLIENT_TOO_SLOW,
                f"More than {self._max_tokens} tokens were waiting to be read: the request was cancelled.",
            )
        self._wake.clear()
        deltas, self._deltas = self._deltas, []
        self._num_tokens = 0
        return deltas

    def on_start(self, index: int, start: SequenceStart) -> None:
        self._starts[index] = start

    def on_tokens(self, index: int, delta: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        self._num_tokens += len(token_ids)
        if self._overflowed:
            return
        if self._num_tokens > self._max_tokens:
            self._overflowed = True
            self._deltas.clear()
            self.on_overflow()
        else:
            self._deltas.append(Delta(index, delta, token_ids, logprobs, self._starts.pop(index, None)))
        self._wake.set()

    def on_finish(self, index: int, finish: SequenceFinish) -> None:
        if self._deltas and self._deltas[-1].index == index:
            self._deltas[-1].finish = finish
        elif not self._overflowed:
            self._deltas.append(Delta(index, start=self._starts.pop(index, None), finish=finish))
        self._wake.set()
