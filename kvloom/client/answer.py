"""`Answer`, a whole answer of the SDK, put together from its deltas."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence

from kvloom.client.generation import Delta, ToolCallDelta
from kvloom.enums import FinishReason
from kvloom.text.chat_message import ChatMessage, ToolCall
from kvloom.v1.generation_pb2 import RESULT_CACHE_USE_HIT, TokenLogprobs


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerChoice:
    """One of the `n` answers to a request."""

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs]
    """One entry per token, if the request asked for them."""
    finish_reason: FinishReason
    stop_string: str
    """The stop string that ended it; "" if none did."""
    num_output_tokens: int
    reasoning: str = ""
    """The model's thoughts before it answered."""
    tool_calls: Sequence[ToolCall] = ()
    """The calls that the caller is asked to run."""

    @property
    def message(self) -> ChatMessage:
        """The choice as a message, to continue the conversation with."""
        return ChatMessage("assistant", self.text, tool_calls=self.tool_calls, reasoning=self.reasoning)


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """The result of `Client.complete`."""

    request_id: str
    seed: int
    """The seed that the request gave or that was drawn: with it, the same request gives the same answer."""
    choices: Sequence[AnswerChoice]
    num_prompt_tokens: int
    num_cached_tokens: int
    """How many of the prompt's tokens were in the cache."""
    num_output_tokens: int
    """The number of output tokens of all choices together."""
    is_result_cache_hit: bool = False
    """True when the answer came from the router's result cache."""
    receipt: bytes = b""
    """The signed receipt as JSON, if the request asked for one and its router could give one."""
    brownout: str = ""
    """How the answer was degraded because its model is overloaded, e.g. "2; max_tokens=256"; "": it was not."""
    priority_class: str = ""
    """The class with which it was served; "": that of its tier, of which nothing was said."""

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text

    @property
    def reasoning(self) -> str:
        """The reasoning of the first choice."""
        return self.choices[0].reasoning

    @property
    def tool_calls(self) -> Sequence[ToolCall]:
        """The tool calls of the first choice."""
        return self.choices[0].tool_calls

    @property
    def message(self) -> ChatMessage:
        """The first choice as a message, to continue the conversation with."""
        return self.choices[0].message

    @property
    def finish_reason(self) -> FinishReason:
        """The finish reason of the first choice."""
        return self.choices[0].finish_reason


class AnswerBuilder:
    """Puts an answer together from its deltas."""

    def __init__(self, num_choices: int) -> None:
        self._parts: list[list[Delta]] = [[] for _ in range(num_choices)]

    def add(self, delta: Delta) -> None:
        self._parts[delta.index].append(delta)

    def build(self, request_id: str, seed: int) -> Answer:
        """Returns the answer, once all choices have finished."""
        finishes = [deltas[-1].finish for deltas in self._parts]
        first = finishes[0]
        return Answer(
            request_id=request_id,
            seed=seed,
            choices=[_choice(index, deltas) for index, deltas in enumerate(self._parts)],
            num_prompt_tokens=first.num_prompt_tokens if first else 0,
            num_cached_tokens=first.num_cached_tokens if first else 0,
            num_output_tokens=sum(finish.num_output_tokens for finish in finishes if finish),
            is_result_cache_hit=any(finish.result_cache == RESULT_CACHE_USE_HIT for finish in finishes if finish),
            brownout=next((delta.start.brownout for delta in self._parts[0] if delta.start), ""),
            priority_class=next((delta.start.priority_class for delta in self._parts[0] if delta.start), ""),
            receipt=next((finish.receipt for finish in finishes if finish and finish.receipt), b""),
        )


def _choice(index: int, deltas: list[Delta]) -> AnswerChoice:
    token_ids = array("I")
    logprobs: list[TokenLogprobs] = []
    for delta in deltas:
        token_ids.extend(delta.token_ids)
        logprobs.extend(delta.logprobs)
    finish = deltas[-1].finish
    return AnswerChoice(
        index=index,
        text="".join(delta.text for delta in deltas),
        token_ids=token_ids.tolist(),
        logprobs=logprobs,
        finish_reason=FinishReason(finish.reason) if finish else FinishReason.UNSPECIFIED,
        stop_string=finish.stop_string if finish else "",
        num_output_tokens=finish.num_output_tokens if finish else 0,
        reasoning="".join(delta.reasoning for delta in deltas),
        tool_calls=_tool_calls(deltas),
    )


def _tool_calls(deltas: list[Delta]) -> list[ToolCall]:
    starts: dict[int, ToolCallDelta] = {}
    arguments: dict[int, list[str]] = {}
    for delta in deltas:
        for piece in delta.tool_calls:
            starts.setdefault(piece.index, piece)
            arguments.setdefault(piece.index, []).append(piece.arguments)
    return [ToolCall(start.id, start.name, "".join(arguments[index])) for index, start in starts.items()]
