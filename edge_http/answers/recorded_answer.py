"""A streamed answer that records its progress, so that another edge can continue it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from edge_http.answers.answer import finish_of
from edge_http.answers.streamed_answer import StreamedAnswer
from kvloom.router_link.link import ChoiceProgress
from kvloom.v1.generation_pb2 import SequenceFinish, SequenceStart, TokenLogprobs
from kvloom_common.parsers.events import Event, TextDelta


class RecordedAnswer(StreamedAnswer):
    """Keeps the tokens of each choice, and can continue behind those that another edge has delivered."""

    __slots__ = ("_is_continued", "choices")

    def __init__(self, *args: Any, **more: Any) -> None:
        """Takes the arguments of StreamedAnswer."""
        super().__init__(*args, **more)
        self.choices = [ChoiceProgress(index) for index in range(self.num_choices)]
        self._is_continued = False

    def restore(
        self,
        choices: Sequence[ChoiceProgress],
        starts: Mapping[int, SequenceStart],
        finishes: Mapping[int, SequenceFinish],
        num_events: int,
        delivered_text: Callable[[ChoiceProgress], Iterator[str]],
    ) -> None:
        """Continue behind what another edge has delivered in `num_events` events. `delivered_text` yields the text of a
        choice, token by token; formats and parsers that keep state have to see it again."""
        self._is_continued = True
        self.choices = list(choices)
        self.starts |= starts
        self.finishes |= finishes
        self.num_open -= len(finishes)
        for choice in choices:
            self.num_output_tokens += len(choice.token_ids)
            if self._counts:
                self._counts[choice.index] = len(choice.token_ids)
                self._formatter.repeat_usage(len(choice.token_ids))
            self._formatter.skip(choice.index, choice.token_ids)
            if choice.index in starts or choice.token_ids or choice.is_done:
                self._begin(choice.index)
                if self._parsed or not self._formatter.prefixes:
                    self._repeat(choice, delivered_text(choice))
        self._formatter.restore(num_events)

    def _repeat(self, choice: ChoiceProgress, text: Iterator[str]) -> None:
        """Bring parser and formatter to where the other edge's were; what they return has been sent."""
        index, formatter = choice.index, self._formatter
        formatter.opening(index, choice.num_cached_tokens or 0)
        for piece in text:
            events: list[Event] = [TextDelta(piece)] if piece else []
            if self._parsed:
                events = self._parsed[index].feed(piece, 1)
            formatter.output(index, events)
        if choice.is_done:
            finish = self.finishes[index]
            ending = finish_of(finish)
            if self._parsed:
                formatter.output(index, self._parsed[index].finish())
                ending = self._parsed[index].completed(ending)
            formatter.finish(index, ending, None)

    def on_start(self, index: int, start: SequenceStart) -> None:
        if not (self._is_continued and index in self.starts):
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
        """There is no shorter path: tokens and events have to be recorded together."""
        return

    def on_finish(self, index: int, finish: SequenceFinish) -> None:
        if self._is_continued:
            finish = self._with_total_counts(index, finish)
        super().on_finish(index, finish)

    def _with_total_counts(self, index: int, finish: SequenceFinish) -> SequenceFinish:
        """Returns the finish with the token counts of all edges together."""
        whole = SequenceFinish()
        whole.CopyFrom(finish)
        start = self.starts.get(index)
        whole.num_cached_tokens = start.num_cached_tokens if start is not None else 0
        whole.num_output_tokens = len(self.choices[index].token_ids)
        return whole
