"""A streamed answer of which another edge may have to know how far it has come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edge_http.answers.streamed_answer import StreamedAnswer
from kvloom.router_link.link import ChoiceProgress
from kvloom.v1.generation_pb2 import SequenceFinish, SequenceStart, TokenLogprobs


class RecordedAnswer(StreamedAnswer):
    """Keeps the tokens of each choice, and can go on behind those that another edge has delivered."""

    __slots__ = ("_goes_on", "choices")

    def __init__(self, *args: Any, **more: Any) -> None:
        """As StreamedAnswer."""
        super().__init__(*args, **more)
        self.choices = [ChoiceProgress(index) for index in range(self.num_choices)]
        self._goes_on = False

    def restore(
        self,
        choices: Sequence[ChoiceProgress],
        starts: Mapping[int, SequenceStart],
        finishes: Mapping[int, SequenceFinish],
    ) -> None:
        """What has been delivered."""
        self._goes_on = True
        self.choices = list(choices)
        self.starts |= starts
        self.finishes |= finishes
        self.num_open -= len(finishes)
        for choice in choices:
            self.num_output_tokens += len(choice.token_ids)
            if choice.index in starts or choice.token_ids or choice.is_done:
                self._prefixes[choice.index] = self._shape.prefixes[choice.index]
            self._shape.skip(choice.index, choice.token_ids)

    def on_start(self, index: int, start: SequenceStart) -> None:
        if not (self._goes_on and index in self.starts):
            super().on_start(index, start)

    def on_tokens(self, index: int, delta: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """The hot path."""
        if self.ended.done():
            return
        choice = self.choices[index]
        choice.token_ids.extend(token_ids)
        choice.num_chars += len(delta)
        StreamedAnswer.on_tokens(self, index, delta, token_ids, logprobs)

    def fast_writer(self, index: int) -> None:  # noqa: ARG002
        """Tokens and events have to be written down together."""
        return

    def on_finish(self, index: int, finish: SequenceFinish) -> None:
        if self._goes_on:
            finish = self._whole(index, finish)
        super().on_finish(index, finish)

    def _whole(self, index: int, finish: SequenceFinish) -> SequenceFinish:
        """Its counts are those of all edges together."""
        whole = SequenceFinish()
        whole.CopyFrom(finish)
        start = self.starts.get(index)
        whole.num_cached_tokens = start.num_cached_tokens if start is not None else 0
        whole.num_output_tokens = len(self.choices[index].token_ids)
        return whole
