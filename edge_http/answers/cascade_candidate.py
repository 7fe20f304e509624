"""An answer that is held until it has ended, so that it can be judged before its client gets any of it: a candidate of
a cascade. It is then delivered to the answer that the client gets, or dropped."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from edge_http.answers.answer import EdgeAnswer
from edge_http.answers.parsed_output import CountedOutputParser
from edge_http.formatting.response_formatter import ChoiceFinish
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import SequenceFinish, SequenceStart, TokenLogprobs
from kvloom_common.limits.byte_budget import ByteLease
from kvloom_common.models.cascade import CandidateChoice
from kvloom_common.parsers.events import Event, TextDelta, ToolCallArguments, ToolCallStart

LEASE_BYTES: Final = 64 * 2**10
"""How much is taken from the budget of all answers at a time."""
UPDATE_BYTES: Final = 250
"""The size of an update without its text and tokens."""
UPDATES_IN_A_ROW: Final = 64
"""How many are passed on before other streams have their turn."""


class _HeldTokens:
    """An update of a choice. It is passed on as it arrived: what is counted as reasoning depends on it."""

    __slots__ = ("delta", "logprobs", "token_ids")

    def __init__(self, delta: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        self.delta = delta
        self.token_ids = array("I", token_ids)
        self.logprobs = logprobs


Update = SequenceStart | _HeldTokens | SequenceFinish


class _HeldChoice:
    """Collects what there is to judge of one choice."""

    __slots__ = ("calls", "candidate", "texts")

    def __init__(self) -> None:
        self.candidate = CandidateChoice()
        self.texts: list[str] = []
        """The text without reasoning and calls."""
        self.calls: list[tuple[str, list[str]]] = []
        """The name of each call, and the pieces of its arguments."""

    def read(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case TextDelta():
                    self.texts.append(event.text)
                case ToolCallStart():
                    self.calls.append((event.name, []))
                case ToolCallArguments():
                    self.calls[-1][1].append(event.text)
                case _:
                    pass


class CascadeCandidate(EdgeAnswer):
    """Collects an answer that may not be delivered. Its cost is counted while it grows."""

    __slots__ = ("_choices", "_lease", "_max_bytes", "_num_bytes", "_shows_logprobs", "_updates", "response_id")

    def __init__(
        self,
        prompt_sizes: Sequence[int],
        n: int,
        max_bytes: int,
        lease: ByteLease,
        parsed: Sequence[CountedOutputParser] = (),
        *,
        response_id: str,
        shows_logprobs: bool,
    ) -> None:
        """`lease` is the answer's part of the memory of all answers. `response_id`: the response's, if it is delivered.
        `shows_logprobs`: the client asked for the log-probabilities; otherwise they are only used to judge the
        answer."""
        super().__init__(prompt_sizes, n, parsed)
        self.response_id = response_id
        self._max_bytes = max_bytes
        self._lease = lease
        self._shows_logprobs = shows_logprobs
        self._num_bytes = 0
        self._choices = [_HeldChoice() for _ in range(self.num_choices)]
        self._updates: list[tuple[int, Update]] = []

    def candidates(self) -> Sequence[CandidateChoice]:
        """Returns what there is to judge, once the answer has ended without an error."""
        for held in self._choices:
            held.candidate.text = "".join(held.texts)
            held.candidate.calls = [(name, "".join(pieces)) for name, pieces in held.calls]
        return [held.candidate for held in self._choices]

    async def deliver(self, answer: EdgeAnswer, drain: Callable[[], Awaitable[None]], deadline: float | None) -> None:
        """Pass the updates on, as fast as the client reads: `drain` returns when there is room for more. `deadline` is
        one of the event loop's clock. Raises the error that ended the other answer."""
        try:
            async with asyncio.timeout_at(deadline):
                await self._pass_on(answer, drain)
        except TimeoutError:
            answer.fail(KvloomError(ErrorReason.ERROR_REASON_DEADLINE_EXCEEDED, "The request took too long."))
        if answer.error is not None:
            raise answer.error

    async def _pass_on(self, answer: EdgeAnswer, drain: Callable[[], Awaitable[None]]) -> None:
        for number, (index, update) in enumerate(self._updates, 1):
            match update:
                case _HeldTokens():
                    answer.on_tokens(index, update.delta, update.token_ids, update.logprobs)
                case SequenceStart():
                    answer.on_start(index, update)
                case SequenceFinish():
                    answer.on_finish(index, update)
            if answer.error is not None:
                return
            if number % UPDATES_IN_A_ROW == 0:
                await asyncio.sleep(0)
                await drain()

    @property
    def _is_visible(self) -> bool:
        return False

    def _add_start(self, index: int) -> None:
        start = self.starts[index]
        self._hold(index, start, start.ByteSize() if start.prompt_logprobs else 0)

    def _add_tokens(self, index: int, delta: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        self._note_first_token()
        held = self._choices[index]
        held.candidate.sum_logprobs += sum(each.logprob for each in logprobs)
        held.candidate.num_logprobs += len(logprobs)
        held.read(self._parsed[index].feed(delta, len(token_ids)) if self._parsed else [TextDelta(delta)])
        shown = [_copied(each) for each in logprobs] if self._shows_logprobs else []
        num_bytes = 4 * len(delta) + sum(each.ByteSize() + UPDATE_BYTES for each in shown)
        self._hold(index, _HeldTokens(delta, token_ids, shown), num_bytes)

    def _add_finish(self, index: int, finish: ChoiceFinish) -> None:
        held = self._choices[index]
        if self._parsed:
            held.read(self._parsed[index].finish())
            finish = self._parsed[index].completed(finish)
        held.candidate.finish_reason = finish.reason
        self._hold(index, self.finishes[index], 0)

    def _complete(self) -> None:
        pass

    def _keep_text(self, index: int, delta: str) -> None:
        """Collect text that is not held."""
        self._choices[index].texts.append(delta)
        self._count(4 * len(delta))

    def _hold(self, index: int, update: Update, num_bytes: int) -> None:
        self._updates.append((index, update))
        self._count(UPDATE_BYTES + num_bytes)

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._num_bytes > self._max_bytes:
            message = f"An answer that is judged first had more than {self._max_bytes} bytes."
            self.fail(KvloomError(ErrorReason.ERROR_REASON_ANSWER_TOO_LARGE, message))
            return
        try:
            while self._num_bytes > self._lease.num_bytes:
                self._lease.take(LEASE_BYTES)
        except KvloomError as error:
            self.fail(error)


def _copied(logprobs: TokenLogprobs) -> TokenLogprobs:
    """The original would keep its whole frame in memory."""
    copy = TokenLogprobs()
    copy.CopyFrom(logprobs)
    return copy
