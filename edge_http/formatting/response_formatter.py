"""The base of all response formats.

A formatter creates the bytes of a stream's events, from templates where events are alike, so that a token costs only
the encoding of its text. It also creates the body of a response that is not streamed. An event is what stands between
the blank lines of a stream: an optional line `event: ...`, and one line `data: ...`.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from edge_http.formatting.collected_choice import CollectedChoice
from edge_http.formatting.json_bytes import Buffer, Json, encode_json
from edge_http.formatting.usage import Usage
from kvloom.errors import KvloomError
from kvloom.v1.generation_pb2 import SequenceStart, TokenLogprobs
from kvloom_common.conversation.model_output import tool_call_id
from kvloom_common.parsers.events import Event, TextDelta

DATA: Final = b"data: "


class Envelope(msgspec.Struct, frozen=True):
    """The fields that all objects of one response have in common."""

    id: str
    model: str
    system_fingerprint: str
    num_choices: int
    include_usage: bool = False
    """True when a stream reports its usage in an event of its own."""
    num_prompt_tokens: int = 0
    created: int = msgspec.field(default_factory=lambda: int(time.time()))

    def fields(self, object_name: str) -> Json:
        """Returns the fields with OpenAI's names."""
        return {
            "id": self.id,
            "object": object_name,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


class InlineResults(msgspec.Struct, frozen=True):
    """The results of moderation in line, or errors, for the request and for the answer."""

    input: Json
    output: Json


class ChoiceFinish(msgspec.Struct, frozen=True):
    """How a choice ended."""

    reason: str
    """In OpenAI's words: "stop", "length", "content_filter", "tool_calls" or "steered"."""
    stop_string: str = ""
    """The stop string that ended it; "" if something else did."""
    refusal: str = ""
    """The safety policy's message to the user, if it has ended the choice."""


class ResponseFormatter(abc.ABC):
    """One object formats one response. Methods are called in the order of the response's events; a format may keep
    state between calls. Choices are numbered across all prompts."""

    __slots__ = ("_envelope", "drops_output", "moderation", "prefixes", "repeats_usage", "report", "suffix")

    call_id_prefix = "call_"
    keep_alive = b": keep-alive\n"
    """A stream sends this that has no event for a while. A comment is a line, and needs no empty one behind it: clients
    that have got an event's id would take that for an event."""

    def __init__(self, envelope: Envelope) -> None:
        self._envelope = envelope
        self.prefixes: list[bytes] = []
        """For each choice, the bytes of a text event before its text (a JSON string). Empty: the text events of this
        format have no constant frame, and `output` makes them."""
        self.suffix = b""
        """The bytes after the text."""
        self.drops_output = False
        """The answer has nothing but what it repeats of its prompt."""
        self.repeats_usage = False
        """All events tell how many tokens there are so far: `repeat_usage` is called whenever there are more."""
        self.moderation: InlineResults | None = None
        """Set before the answer's end if the request has asked for it."""
        self.report: object | None = None
        """Set if the answer repeats something of its prompt; see `echo` and `prompt_logprobs`."""

    @property
    def envelope(self) -> Envelope:
        return self._envelope

    @property
    def may_end(self) -> bool:
        """False while the output has begun something of which a part is of no use."""
        return True

    def call_id(self, index: int, number: int) -> str:
        """The id of a choice's tool call."""
        return tool_call_id(self._envelope.id, index, number, self.call_id_prefix)

    @abc.abstractmethod
    def opening(self, index: int, num_cached_tokens: int) -> Sequence[bytes]:
        """Return the events that precede a choice's output."""

    @abc.abstractmethod
    def output(self, index: int, events: Sequence[Event]) -> Sequence[bytes]:
        """Return the events for some output of a choice."""

    def output_with_logprobs(self, index: int, events: Sequence[Event], logprobs: Sequence[bytes]) -> Sequence[bytes]:
        """Return the events for some output of a choice whose tokens have logprobs: what `logprobs` returned."""
        text = "".join(event.text for event in events if isinstance(event, TextDelta))
        others = [event for event in events if not isinstance(event, TextDelta)]
        return self.delta_with_logprobs(index, text, logprobs), *self.output(index, others)

    def delta_with_logprobs(self, index: int, text: str, logprobs: Sequence[bytes]) -> bytes:
        """Return the event of a text with its logprobs, which is what the method of this name returned."""
        raise NotImplementedError

    def logprobs(self, index: int, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> Sequence[bytes]:
        """Return the contents of the arrays in the `logprobs` of these tokens. Each token must be passed once, in
        order."""
        raise NotImplementedError

    def cut_logprobs(self, logprobs: Sequence[bytes], num_bytes: int) -> Sequence[bytes]:
        """Return what the method `logprobs` returned, without the last `num_bytes` of the text of the last token."""
        raise NotImplementedError

    def repeat_usage(self, num_output_tokens: int) -> None:
        """From now on events tell of so many tokens."""
        raise NotImplementedError

    def echo(self, index: int, start: SequenceStart) -> tuple[str, Sequence[bytes] | None] | None:  # noqa: ARG002
        """Return the prompt's text, and what `logprobs` would return for its tokens, if the answer begins with them."""
        return None

    def prompt_logprobs(self, index: int, start: SequenceStart) -> bytes:  # noqa: ARG002
        """Return the JSON of a choice's `prompt_logprobs`; b"" if there is none."""
        return b""

    def skip(self, index: int, token_ids: Sequence[int]) -> None:  # noqa: ARG002
        """Account for tokens of a choice that another edge has delivered before this one continued the response."""
        return

    def restore(self, num_events: int) -> None:  # noqa: ARG002
        """Only so many events were sent, be it by another edge, whose output was passed to `opening`, `output` and
        `finish`."""
        return

    @abc.abstractmethod
    def finish(self, index: int, finish: ChoiceFinish, details: Json | None) -> Sequence[bytes]:
        """Return the events that end a choice."""

    @abc.abstractmethod
    def ending(self, usage: Callable[[], Usage], details: Json | None) -> Sequence[bytes]:
        """Return the events that end the stream, after all choices have ended. `usage` returns the token counts."""

    @abc.abstractmethod
    def error(self, error: KvloomError) -> bytes:
        """Return the event that ends the stream because of an error."""

    @abc.abstractmethod
    def body(self, choices: Sequence[CollectedChoice], usage: Usage, details: Json | None) -> list[Buffer]:
        """Return the pieces of a body. The large ones are those of the choices, which are not copied."""


def data_event(payload: Json) -> bytes:
    """An event without a name."""
    return DATA + encode_json(payload)


def named_event(name: str, payload: Json) -> bytes:
    """An event whose name precedes its data."""
    return b"event: %b\ndata: %b" % (name.encode(), encode_json(payload))
