"""An answer that is held until it has ended, so that it can be judged before its client gets any of it: a candidate of
a cascade. It is then delivered to the answer that the client gets, or dropped."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from typing import Final

from edge_http.answers.answer import Answer
from edge_http.answers.parsed_output import ParsedOutput
from edge_http.formatting.response_formatter import Finish
from kvloom.errors import KvloomError
from kvloom.limits.byte_budget import ByteLease
from kvloom.models.cascade import CandidateChoice
from kvloom.parsers.events import Event, TextDelta, ToolCallArguments, ToolCallStart
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import TokenLogprobs

LEASE_BYTES: Final = 64 * 2**10
"""How much is taken from the budget of all answers at a time."""
UPDATE_BYTES: Final = 250
"""The size of an update without its text and tokens."""


class _HeldChoice:
    """What has arrived of one choice."""

    __slots__ = ("calls", "candidate", "deltas", "logprobs", "texts", "token_ids")

    def __init__(self) -> None:
        self.candidate = CandidateChoice()
        self.deltas: list[str] = []
        self.token_ids: array[int] = array("I")
        self.logprobs: list[TokenLogprobs] = []
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


class HeldAnswer(Answer):
    """What it costs is counted while it grows."""

    __slots__ = ("_choices", "_lease", "_max_bytes", "_num_bytes", "_shows_logprobs")

    def __init__(
        self,
        prompt_sizes: Sequence[int],
        n: int,
        max_bytes: int,
        lease: ByteLease,
        parsed: Sequence[ParsedOutput] = (),
        *,
        shows_logprobs: bool,
    ) -> None:
        """`lease` is the answer's part of the memory of all answers. `shows_logprobs`: the client asked for the
        log-probabilities; otherwise they are only used to judge the answer."""
        super().__init__(prompt_sizes, n, parsed)
        self._max_bytes = max_bytes
        self._lease = lease
        self._shows_logprobs = shows_logprobs
        self._num_bytes = 0
        self._choices = [_HeldChoice() for _ in range(self.num_choices)]

    def candidates(self) -> Sequence[CandidateChoice]:
        """What there is to judge, once the answer has ended without an error."""
        for held in self._choices:
            held.candidate.text = "".join(held.texts)
            held.candidate.calls = [(name, "".join(pieces)) for name, pieces in held.calls]
        return [held.candidate for held in self._choices]

    async def deliver(self, answer: Answer) -> None:
        """Pass everything on, each choice in one piece: a token at a time, a long answer could fill the buffer of a
        client that reads as fast as any."""
        for index, held in enumerate(self._choices):
            if index in self.starts:
                answer.on_start(index, self.starts[index])
            answer.on_tokens(index, "".join(held.deltas), held.token_ids, held.logprobs)
            answer.on_finish(index, self.finishes[index])
            await asyncio.sleep(0)

    @property
    def _is_visible(self) -> bool:
        return False

    def _add_start(self, index: int) -> None:
        start = self.starts[index]
        self._count(UPDATE_BYTES + (start.ByteSize() if start.prompt_logprobs else 0))

    def _add_tokens(self, index: int, delta: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        self._note_first_token()
        held = self._choices[index]
        held.candidate.sum_logprobs += sum(each.logprob for each in logprobs)
        held.candidate.num_logprobs += len(logprobs)
        held.read(self._parsed[index].feed(delta, len(token_ids)) if self._parsed else [TextDelta(delta)])
        held.deltas.append(delta)
        held.token_ids.extend(token_ids)
        num_bytes = UPDATE_BYTES + 4 * len(delta)
        if self._shows_logprobs:
            copies = [_copied(each) for each in logprobs]
            held.logprobs += copies
            num_bytes += sum(each.ByteSize() + UPDATE_BYTES for each in copies)
        self._count(num_bytes)

    def _add_finish(self, index: int, finish: Finish) -> None:
        held = self._choices[index]
        if self._parsed:
            held.read(self._parsed[index].finish())
            finish = self._parsed[index].completed(finish)
        held.candidate.finish_reason = finish.reason

    def _complete(self) -> None:
        pass

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._num_bytes > self._max_bytes:
            message = f"A candidate's answer had more than {self._max_bytes} bytes (edge.max_answer_bytes)."
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
