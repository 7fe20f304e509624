"""An answer in which placeholders become again what they stand for (edge_http/endpoints/masking.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from edge_http.answers.answer import EdgeAnswer
from edge_http.formatting.response_formatter import ChoiceFinish
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import TokenLogprobs
from kvloom_common.text.restored_text import RestoredText


class RestoringAnswer(EdgeAnswer):
    """Passes everything on to the answer that the client gets. Output is restored as the model wrote it, before
    reasoning and calls are told apart in it."""

    __slots__ = ("_answer", "_texts")

    def __init__(self, answer: EdgeAnswer, originals: Mapping[str, str], prompt_sizes: Sequence[int], n: int) -> None:
        super().__init__(prompt_sizes, n)
        self._answer = answer
        self._texts = [RestoredText(originals) for _ in range(self.num_choices)]
        self.request_context = answer.request_context
        answer.ended.add_done_callback(self._on_answer_ended)

    def fail(self, error: KvloomError) -> None:
        super().fail(error)
        self._answer.fail(error)

    @property
    def _is_visible(self) -> bool:
        return self._answer._is_visible

    def _add_start(self, index: int) -> None:
        self._answer.on_start(index, self.starts[index])

    def _add_tokens(self, index: int, delta: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        self._note_first_token()
        self._answer.on_tokens(index, self._texts[index].feed(delta), token_ids, logprobs)

    def _add_finish(self, index: int, finish: ChoiceFinish) -> None:  # noqa: ARG002
        if rest := self._texts[index].finish():
            self._answer.on_tokens(index, rest, (), ())
        self._answer.on_finish(index, self.finishes[index])

    def _complete(self) -> None:
        pass

    def _on_answer_ended(self, _ended: asyncio.Future[None]) -> None:
        """By itself, if its client reads too slowly or has cancelled it."""
        if not self.ended.done():
            message = "The answer has ended."
            self.fail(self._answer.error or KvloomError(ErrorReason.ERROR_REASON_CANCELLED, message))
