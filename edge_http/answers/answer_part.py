"""The part of a streamed answer that one model writes, if another model may continue it."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence

from edge_http.answers.answer import EdgeAnswer
from edge_http.answers.continuation_prompt import CarriedText
from edge_http.answers.streamed_answer import StreamedAnswer
from edge_http.formatting.response_formatter import ChoiceFinish
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import SequenceFinish, SequenceStart, TokenLogprobs
from kvloom_common.models.model_routes import FALLBACK_REASONS
from kvloom_common.text.detokenizer import TokenText


class AnswerPart(EdgeAnswer):
    """Passes everything on to the answer that the client gets, which has one choice, but the loss of its model. It
    counts what its own model has done."""

    __slots__ = ("_answer", "_carried_ids", "_is_first", "_num_chars", "_num_events_before", "_on_begun", "_token_ids")

    def __init__(
        self,
        answer: StreamedAnswer,
        num_prompt_tokens: int,
        carried_ids: Sequence[int] = (),
        on_begun: Callable[[], None] | None = None,
    ) -> None:
        """`carried_ids`: the text of earlier parts, in tokens of this part's model. `on_begun` is called when it adds
        its first token to them. None: it is the first part."""
        super().__init__([num_prompt_tokens], 1)
        self._answer = answer
        self._carried_ids = carried_ids
        self._is_first = on_begun is None
        self._on_begun = on_begun
        self._num_events_before = answer.num_events
        self._token_ids: array[int] = array("I")
        self._num_chars = 0
        """How many characters of text it has given to the client."""
        self.request_context = answer.request_context
        answer.ended.add_done_callback(self._on_answer_ended)

    @property
    def is_lost(self) -> bool:
        """It has ended with an error after which another model may go on, and which the client has not got."""
        return self.error is not None and self.error.reason in FALLBACK_REASONS

    def carried(self, before: CarriedText, tokenizer: TokenText) -> CarriedText:
        """The text of all parts up to this one; `before` is that of the earlier ones, `tokenizer` its model's."""
        return before.extended(tokenizer, self._carried_ids, self._token_ids, self._num_chars)

    @property
    def num_events(self) -> int:
        return self._answer.num_events - self._num_events_before

    @property
    def _is_visible(self) -> bool:
        return self._answer.has_begun

    def fail(self, error: KvloomError) -> None:
        super().fail(error)
        if not self.is_lost:
            self._answer.fail(error)

    def fast_writer(self, index: int) -> Callable[[str], None] | None:
        """See FastPathSink (kvloom/router_link/fast_path.py)."""
        return self._answer.fast_writer(index)

    def on_fast_path_tokens(self, index: int, token_ids: Sequence[int], num_chars: int) -> None:
        self.num_output_tokens += len(token_ids)
        self._token_ids.extend(token_ids)
        self._num_chars += num_chars
        self._answer.on_fast_path_tokens(index, token_ids, num_chars)

    def _add_start(self, index: int) -> None:
        self._begin()
        if self._is_first:
            self._answer.on_start(index, self.starts[index])

    def _add_tokens(self, index: int, delta: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        self._begin()
        self._token_ids.extend(token_ids)
        self._num_chars += len(delta)
        self._answer.on_tokens(index, delta, token_ids, logprobs)

    def _begin(self) -> None:
        self._note_first_token()
        on_begun, self._on_begun = self._on_begun, None
        if on_begun is not None:
            on_begun()

    def _add_finish(self, index: int, finish: ChoiceFinish) -> None:  # noqa: ARG002
        whole = self.finishes[index]
        if not self._is_first:
            self.note_cost(whole.num_cached_tokens, whole.num_output_tokens - len(self._carried_ids), has_answer=True)
            whole = SequenceFinish()
            whole.CopyFrom(self.finishes[index])
            whole.num_output_tokens = self._answer.num_output_tokens
            whole.num_cached_tokens = self._answer.starts.get(index, SequenceStart()).num_cached_tokens
        self._answer.on_finish(index, whole)

    def note_cost(self, num_cached: int, num_output: int, *, has_answer: bool) -> None:
        """It has ended, and other models have written or will write the other parts."""
        if self._answer.bill is not None:
            self._answer.bill.add_part(self.num_prompt_tokens, num_cached, num_output, has_answer=has_answer)

    def note_loss_cost(self) -> None:
        """Notes the cost as `note_cost` does, for a part whose model was lost. A part that fails before its first token
        is free."""
        start = self.first_start
        num_cached = 0 if start is None else start.num_cached_tokens
        self.note_cost(num_cached, self.num_output_tokens, has_answer=self.num_output_tokens > 0)

    def _complete(self) -> None:
        pass

    def _on_answer_ended(self, _ended: asyncio.Future[None]) -> None:
        """By itself, if its client reads too slowly or has cancelled it."""
        message = "The answer has ended."
        self.fail(self._answer.error or KvloomError(ErrorReason.ERROR_REASON_CANCELLED, message))
