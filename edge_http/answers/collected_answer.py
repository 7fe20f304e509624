"""An answer that is not streamed: it is collected until all choices have finished."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from edge_http.answers.answer import EdgeAnswer
from edge_http.answers.joined_logprobs import JoinedLogprobs
from edge_http.answers.parsed_output import CountedOutputParser
from edge_http.formatting.collected_choice import CollectedChoice, PartKind
from edge_http.formatting.json_bytes import Buffer
from edge_http.formatting.response_formatter import ChoiceFinish, ResponseFormatter
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import TokenLogprobs
from kvloom_common.limits.byte_budget import ByteLease
from kvloom_common.parsers.events import Event, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart

LEASE_BYTES: Final = 64 * 2**10
"""How much is taken from the budget of all answers at a time."""


class CollectedAnswer(EdgeAnswer):
    """Its size is counted while it grows: an answer that becomes too large fails at once, not when it is complete."""

    __slots__ = ("_choices", "_formatter", "_lease", "_max_bytes", "_num_checked_bytes", "num_bytes")

    def __init__(
        self,
        prompt_sizes: Sequence[int],
        n: int,
        formatter: ResponseFormatter,
        max_bytes: int,
        lease: ByteLease,
        parsed: Sequence[CountedOutputParser] = (),
        joined: Sequence[JoinedLogprobs] = (),
    ) -> None:
        """`lease` is the answer's part of the memory of all answers. `parsed`, `joined`: see Answer."""
        super().__init__(prompt_sizes, n, parsed, joined)
        self._formatter = formatter
        self._max_bytes = max_bytes
        self._lease = lease
        self.num_bytes = 0
        self._num_checked_bytes = 0
        """Up to this size no limit is met."""
        self._choices = [CollectedChoice() for _ in range(self.num_choices)]

    def fail(self, error: KvloomError) -> None:
        """Ends the answer. The collected output goes at once. The error and this answer refer to each other, so that it
        would otherwise stay until the next full garbage collection, and answers have megabytes."""
        if not self.ended.done() or self.ended.cancelled():  # by the handler's end, when the client has left
            self._choices = []
        super().fail(error)

    def body(self, *, with_details: bool) -> list[Buffer]:
        """Returns the pieces of the JSON body, once the answer has ended without an error."""
        return self._formatter.body(self._choices, self.usage(), self.details(wanted=with_details))

    @property
    def _is_visible(self) -> bool:
        return False

    def _add_start(self, index: int) -> None:
        self._note_first_token()
        if self._formatter.report is not None:
            self._report_prompt(index)

    def _report_prompt(self, index: int) -> None:
        choice, start = self._choices[index], self.starts[index]
        if (echo := self._formatter.echo(index, start)) is not None:
            text, logprobs = echo
            self.num_bytes += choice.add(PartKind.TEXT, text)
            if logprobs is not None:
                self.num_bytes += choice.add_logprobs(logprobs)
        choice.prompt_logprobs = self._formatter.prompt_logprobs(index, start)
        self.num_bytes += len(choice.prompt_logprobs)
        start.ClearField("prompt_logprobs")
        self._check_size()

    def _add_tokens(self, index: int, delta: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        self._note_first_token()
        if self._formatter.drops_output:
            return
        choice = self._choices[index]
        if self._parsed:
            self._add_output(index, self._parsed[index].feed(delta, len(token_ids)))
        elif delta:
            self.num_bytes += choice.add(PartKind.TEXT, delta)
        if logprobs:
            self.num_bytes += choice.add_logprobs(self._formatter.logprobs(index, token_ids, logprobs))
        if self.num_bytes > self._num_checked_bytes:
            self._check_size()

    def _add_cut_logprobs(
        self, index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], num_cut_bytes: int
    ) -> None:
        entries = self._formatter.logprobs(index, token_ids, logprobs)
        self.num_bytes += self._choices[index].add_logprobs(self._formatter.cut_logprobs(entries, num_cut_bytes))
        self._check_size()

    def _check_size(self) -> None:
        if self.num_bytes > self._max_bytes:
            self.fail(_too_large(self._max_bytes))
            return
        try:
            while self.num_bytes > self._lease.num_bytes:
                self._lease.take(LEASE_BYTES)
            self._num_checked_bytes = min(self._lease.num_bytes, self._max_bytes)
        except KvloomError as error:
            self.fail(error)

    def _add_output(self, index: int, events: Sequence[Event]) -> None:
        choice = self._choices[index]
        for event in events:
            match event:
                case TextDelta():
                    self.num_bytes += choice.add(PartKind.TEXT, event.text)
                case ReasoningDelta():
                    self.num_bytes += choice.add(PartKind.REASONING, event.text)
                case ToolCallStart():
                    call_id = self._formatter.call_id(index, event.index)
                    self.num_bytes += choice.begin_call(event.name, call_id)
                case ToolCallArguments():
                    self.num_bytes += choice.extend(event.text)
                case _:
                    pass

    def _add_finish(self, index: int, finish: ChoiceFinish) -> None:
        if self._parsed:
            self._add_output(index, self._parsed[index].finish())
            finish = self._parsed[index].completed(finish)
        choice = self._choices[index]
        choice.finish_reason, choice.stop_string = finish.reason, finish.stop_string
        choice.refusal = finish.refusal

    def _complete(self) -> None:
        pass


def _too_large(max_bytes: int) -> KvloomError:
    return KvloomError(
        ErrorReason.ERROR_REASON_ANSWER_TOO_LARGE,
        f"The answer is larger than {max_bytes} bytes. Stream it, or ask for fewer choices, tokens or logprobs.",
    )
