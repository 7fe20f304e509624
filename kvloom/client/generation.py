"""`Delta`, the progress update that a caller of the SDK reads, and the buffer in which deltas wait for their reader."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence

from kvloom.enums import FinishReason
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import (
    FINISH_REASON_CONTENT_FILTER,
    FINISH_REASON_ERROR,
    SequenceFinish,
    SequenceStart,
    TokenLogprobs,
)
from kvloom.v1.router_service_pb2 import ChoiceDelta, OutputPart


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call."""

    index: int
    """The number of the call in its choice, from 0 on."""
    id: str = ""
    """Set when the call begins, like the name."""
    name: str = ""
    arguments: str = ""
    """The text to append to the call's arguments."""
    is_complete: bool = False
    """True when the call has ended."""


@dataclasses.dataclass(slots=True)
class Delta:
    """A progress update for one choice of an answer."""

    index: int
    """The choice's number, 0 to n-1."""
    text: str = ""
    """The text to append. It may be "" while a character is incomplete or a stop string may have begun."""
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    """One entry per token, if the request asked for them."""
    start: SequenceStart | None = None
    """Set with the first token: the number of cached tokens, the shard and the queue time."""
    finish: SequenceFinish | None = None
    """Set with the last token: the finish reason and the token counts."""
    request_id: str = ""
    """The id of the request, for `Client.cancel` and `Client.explain`."""
    reasoning: str = ""
    """The next piece of the model's thoughts, to append. Only for `messages`."""
    tool_calls: Sequence[ToolCallDelta] = ()
    """Pieces of tool calls, in order. Only for `messages` with `tools`."""

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the choice ended; None before."""
        return None if self.finish is None else FinishReason(self.finish.reason)

    @classmethod
    def from_proto(cls, delta: ChoiceDelta) -> Delta:
        start = delta.start if delta.HasField("start") else None
        finish = delta.finish if delta.HasField("finish") else None
        found = cls(delta.index, delta.text, delta.token_ids, delta.logprobs, start, finish)
        if delta.output:
            found.reasoning = "".join(part.reasoning for part in delta.output)
            found.tool_calls = [call for part in delta.output if (call := _tool_call_delta(part)) is not None]
        return found


def _tool_call_delta(part: OutputPart) -> ToolCallDelta | None:
    match part.WhichOneof("part"):
        case "tool_call_start":
            start = part.tool_call_start
            return ToolCallDelta(start.index, start.id, start.name)
        case "tool_call_arguments":
            return ToolCallDelta(part.tool_call_arguments.index, arguments=part.tool_call_arguments.text)
        case "tool_call_end":
            return ToolCallDelta(part.tool_call_end.index, is_complete=True)
        case _:
            return None


class Finishes:
    """Keeps count of the choices of a request that have ended, and notes if one failed."""

    def __init__(self, num_choices: int) -> None:
        self._num_open = num_choices
        self._has_output = False
        self._failure: KvloomError | None = None

    @property
    def complete(self) -> bool:
        """True when all choices have ended."""
        return self._num_open == 0

    def note(self, delta: Delta) -> None:
        """Record a delta that the reader gets."""
        self._has_output = self._has_output or bool(delta.token_ids or delta.text)
        finish = delta.finish
        if finish is None:
            return
        self._num_open -= 1
        # A halted answer is an answer; a rejected prompt, of which nothing was ever shown, is a failure.
        is_filtered = finish.reason == FINISH_REASON_CONTENT_FILTER
        is_rejected = is_filtered and not self._has_output and finish.HasField("error")
        if self._failure is None and (finish.reason == FINISH_REASON_ERROR or is_rejected):
            self._failure = KvloomError.from_proto(finish.error)

    def raise_failure(self) -> None:
        """Called when the stream has ended: raises the first choice's failure, or ROUTER_LOST if the answer was cut
        off."""
        if self._failure is not None:
            raise self._failure
        if not self.complete:
            raise KvloomError(ErrorReason.ERROR_REASON_ROUTER_LOST, "The router ended the answer before its end.")


class DeltaBuffer:
    """A Sink (see kvloom/router_link/open_choices.py) that one reader empties. It never blocks the link: when more than
    `max_tokens` tokens wait, `on_overflow` is called once and the reader gets CLIENT_TOO_SLOW instead of the rest."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._deltas: list[Delta] = []
        self._num_tokens = 0
        self._starts: dict[int, SequenceStart] = {}
        self._overflowed = False
        self._wake = asyncio.Event()
        self.on_overflow: Callable[[], None] = lambda: None

    async def take(self) -> list[Delta]:
        """Wait for at least one delta and return all of them. Raises KvloomError (CLIENT_TOO_SLOW) once the buffer has
        overflowed."""
        await self._wake.wait()
        if self._overflowed:
            raise KvloomError(
                ErrorReason.ERROR_REASON_CLIENT_TOO_SLOW,
                f"More than {self._max_tokens} tokens were waiting to be read: the request was cancelled.",
            )
        self._wake.clear()
        deltas, self._deltas = self._deltas, []
        self._num_tokens = 0
        return deltas

    def on_start(self, index: int, start: SequenceStart) -> None:
        self._starts[index] = start

    def on_tokens(self, index: int, delta: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        self._num_tokens += len(token_ids)
        if self._overflowed:
            return
        if self._num_tokens > self._max_tokens:
            self._overflowed = True
            self._deltas.clear()
            self.on_overflow()
        else:
            self._deltas.append(Delta(index, delta, token_ids, logprobs, self._starts.pop(index, None)))
        self._wake.set()

    def on_finish(self, index: int, finish: SequenceFinish) -> None:
        if self._deltas and self._deltas[-1].index == index:
            self._deltas[-1].finish = finish
        elif not self._overflowed:
            self._deltas.append(Delta(index, start=self._starts.pop(index, None), finish=finish))
        self._wake.set()
