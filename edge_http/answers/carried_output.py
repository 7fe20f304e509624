"""An answer whose beginning another request has generated: a response that forks from an earlier one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from edge_http.answers.answer import EdgeAnswer
from edge_http.answers.continuation_prompt import CarriedText, progress_in_tokens
from kvloom.router_link.link import ChoiceProgress
from kvloom.v1.generation_pb2 import SequenceFinish, SequenceStart, StopConditions, TokenLogprobs
from kvloom_common.text.detokenizer import IncrementalDetokenizer, TokenText


class CarriedOutput(NamedTuple):
    """The beginning of an answer's only choice."""

    token_ids: Sequence[int]
    text: str
    """Without an incomplete character at its end."""

    @classmethod
    def of(cls, token_ids: Sequence[int], tokenizer: TokenText) -> CarriedOutput:
        """Decode the text of the tokens."""
        return cls(token_ids, IncrementalDetokenizer(tokenizer).push(token_ids))

    def progress(self, tokenizer: TokenText, stop: StopConditions) -> ChoiceProgress | None:
        """The progress from which a router continues. None: it would not show the text as it is."""
        carried = CarriedText(self.text, len(self.text), len(self.token_ids))
        return progress_in_tokens(carried, self.token_ids, tokenizer, stop)


class CarriedSink:
    """Gives an answer its beginning when it starts, and then all that comes (Sink)."""

    __slots__ = ("_answer", "_carried")

    def __init__(self, answer: EdgeAnswer, carried: CarriedOutput) -> None:
        self._answer = answer
        self._carried: CarriedOutput | None = carried

    def on_start(self, index: int, start: SequenceStart) -> None:
        self._answer.on_start(index, start)
        carried, self._carried = self._carried, None
        if carried is not None:
            self._answer.on_tokens(index, carried.text, carried.token_ids, ())

    def on_tokens(self, index: int, delta: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        self._answer.on_tokens(index, delta, token_ids, logprobs)

    def on_finish(self, index: int, finish: SequenceFinish) -> None:
        self._answer.on_finish(index, finish)
