"""A streamed chat completion that is stored before its last event is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from edge_http.answers.collected_answer import CollectedAnswer
from edge_http.answers.kept_answer import KeptAnswer
from edge_http.formatting.response_formatter import Envelope, ResponseFormatter
from kvloom.v1.generation_pb2 import SequenceFinish, SequenceStart, TokenLogprobs


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
