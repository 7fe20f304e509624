"""An answer that is not streamed: gathered until all choices have finished."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edge_http.answers.answer import Answer
from edge_http.openai.response_formatters import CollectedChoice, ResponseFormatter
from kvloom.v1.generation_pb2 import TokenLogprobs


class CollectedAnswer(Answer):
    """Bounded by the model's window times the number of choices."""

    __slots__ = ("_finish_reasons", "_logprobs", "_shape", "_texts")

    def __init__(self, prompt_sizes: Sequence[int], n: int, shape: ResponseFormatter) -> None:
        super().__init__(prompt_sizes, n)
        self._shape = shape
        self._texts: list[list[str]] = [[] for _ in range(self.num_choices)]
        self._logprobs: list[list[Any]] = [[] for _ in range(self.num_choices)]
        self._finish_reasons = [""] * self.num_choices

    def body(self, *, with_details: bool) -> bytes:
        """The JSON body, once the answer has ended well."""
        choices = [
            CollectedChoice("".join(texts), finish_reason, self._shape.join_logprobs(pieces) if pieces else None)
            for texts, finish_reason, pieces in zip(self._texts, self._finish_reasons, self._logprobs, strict=True)
        ]
        return self._shape.body(choices, self.usage(), self.details() if with_details else None)

    @property
    def _is_visible(self) -> bool:
        return False

    def _take_start(self, index: int) -> None:  # noqa: ARG002
        self._note_first_token()

    def _take_tokens(self, index: int, delta: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        self._note_first_token()
        self._texts[index].append(delta)
        if logprobs:
            self._logprobs[index].append(self._shape.logprobs(index, token_ids, logprobs))

    def _take_finish(self, index: int, finish_reason: str) -> None:
        self._finish_reasons[index] = finish_reason

    def _complete(self) -> None:
        pass
