"""Answers that are stored, with the tokens of their output, before their clients are told that they have ended."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from edge_http.answers.collected_answer import CollectedAnswer
from edge_http.answers.streamed_answer import StreamedAnswer
from edge_http.formatting.response_formatter import Envelope, ResponseFormatter
from kvloom.errors import KvloomError
from kvloom.v1.generation_pb2 import SequenceFinish, SequenceStart, TokenLogprobs


class _LastEvent(msgspec.Struct):
    response: msgspec.Raw


def response_in(event: bytes) -> bytes:
    """The JSON of the response that a last event has."""
    return bytes(msgspec.json.decode(event.partition(b"\ndata: ")[2], type=_LastEvent).response)


class KeptWhole(CollectedAnswer):
    """One that is not streamed."""

    __slots__ = ("token_ids",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.token_ids: array[int] = array("I")

    def on_tokens(self, index: int, delta: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        self.token_ids.extend(token_ids)
        super().on_tokens(index, delta, token_ids, logprobs)


class KeptAnswer(StreamedAnswer):
    """A streamed one. It holds its last event back until `release`: whoever has that event can find the response."""

    __slots__ = ("_held", "token_ids")

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._held: Sequence[bytes] = ()
        self.token_ids: array[int] = array("I")

    def on_tokens(self, index: int, delta: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        self.token_ids.extend(token_ids)
        super().on_tokens(index, delta, token_ids, logprobs)

    def on_fast_path_tokens(self, index: int, token_ids: Sequence[int], num_chars: int) -> None:
        self.token_ids.extend(token_ids)
        super().on_fast_path_tokens(index, token_ids, num_chars)

    def response_json(self) -> bytes:
        """The response as the event has it that was held back."""
        return response_in(self._held[-1])

    def release(self, error: KvloomError | None = None) -> None:
        """Send the last event, or that of the error that kept the response from being stored."""
        if error is None:
            self._send_all(self._held)
        else:
            self._formatter.restore(self.num_events)  # the events that were held back have numbers, too
            self._send_all((self._formatter.error(error),))
        self._held = ()
        self._events.end()

    def _complete(self) -> None:
        self._held = self._formatter.ending(self.usage, self._final_details())


class KeptChat(KeptAnswer):
    """Its events do not have the whole answer, so that a twin collects it."""

    __slots__ = ("_twin",)

    def __init__(
        self,
        make_twin: Callable[[Envelope], CollectedAnswer],
        prompt_sizes: Sequence[int],
        n: int,
        formatter: ResponseFormatter,
        *more: Any,
        **options: Any,
    ) -> None:
        super().__init__(prompt_sizes, n, formatter, *more, **options)
        self._twin = make_twin(formatter.envelope)

    def on_start(self, index: int, start: SequenceStart) -> None:
        self._twin.on_start(index, start)
        super().on_start(index, start)

    def on_tokens(self, index: int, delta: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        self._twin.on_tokens(index, delta, token_ids, logprobs)
        super().on_tokens(index, delta, token_ids, logprobs)

    def on_finish(self, index: int, finish: SequenceFinish) -> None:
        self._twin.on_finish(index, finish)
        super().on_finish(index, finish)

    def fast_writer(self, index: int) -> None:
        """There is none: the twin needs all that comes."""

    def response_json(self) -> bytes:
        if self._twin.error is not None:
            raise self._twin.error
        return b"".join(self._twin.body(with_details=False))
