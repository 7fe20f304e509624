"""An answer that is not streamed: its text is collected until all choices have finished."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edge_http.answers.answer import Answer
from edge_http.openai.response_formatters import CollectedChoice, ResponseFormatter
from kvloom.v1.generation_pb2 import TokenLogprobs


class CollectedAnswer(Answer):
    """Its size is bounded by the model's maximum length times the number of choices."""

    __slots__ = ("_finish_reasons", "_formatter", "_logprobs", "_texts")

    def __init__(self, prompt_sizes: Sequence[int], n: int, formatter: ResponseFormatter) -> None:
        super().__init__(prompt_sizes, n)
        self._formatter = formatter
        self._texts: list[list[str]] = [[] for _ in range(self.num_choices)]
        self._logprobs: list[list[Any]] = [[] for _ in range(self.num_choices)]
        self._finish_reasons = [""] * self.num_choices

    def body(self, *, with_details: bool) -> bytes:
        """Returns the JSON body, once the answer has ended without an error."""
        choices = [
            CollectedChoice("".join(texts), finish_reason, self._formatter.join_logprobs(pieces) if pieces else None)
            for texts, finish_reason, pieces in zip(self._texts, self._finish_reasons, self._logprobs, strict=True)
        ]
        return self._formatter.body(choices, self.usage(), self.details() if with_details else None)

    @property
    def _is_visible(self) -> bool:
        return False

    def _add_start(self, index: int) -> None:  # noqa: ARG002
        self._note_first_token()

    def _add_tokens(self, index: int, delta: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        self._note_first_token()
        self._texts[index].append(delta)
        if logprobs:
            self._logprobs[index].append(self._formatter.logprobs(index, token_ids, logprobs))

    def _add_finish(self, index: int, finish_reason: str) -> None:
        self._finish_reasons[index] = finish_reason

    def _complete(self) -> None:
        pass
