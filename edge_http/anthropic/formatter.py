"""Anthropic's format of messages, streamed and complete."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from edge_http.formatting.collected_choice import CollectedChoice, Part, PartKind
from edge_http.formatting.error_formats import ANTHROPIC_ERRORS
from edge_http.formatting.json_bytes import Buffer, Json, encode_json, string_of
from edge_http.formatting.response_formatter import ChoiceFinish, Envelope, ResponseFormatter, named_event
from edge_http.formatting.usage import Usage
from kvloom.errors import KvloomError
from kvloom_common.parsers.events import Event, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallEnd, ToolCallStart

SIGNATURE: Final = "unsigned"
"""The signature of all thinking blocks: clients expect one that is not empty, and return it with the block."""
_STOP_REASONS: Final = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}
_EMPTY_BLOCKS: Final[Mapping[PartKind, Json]] = {
    PartKind.TEXT: {"type": "text", "text": ""},
    PartKind.REASONING: {"type": "thinking", "thinking": "", "signature": ""},
}
_PING: Final = named_event("ping", {"type": "ping"})
_JSON_OBJECT: Final = msgspec.json.Decoder(dict[str, Any])


class MessageOptions(msgspec.Struct, frozen=True):
    """The facts that the format needs of the request."""

    is_text: bool = False
    """The output is text only: one block, whose events have a constant frame."""
    is_single_call: bool = False
    """Calls after the first one are left out."""
    omits_thinking: bool = False
    """Thinking blocks are empty."""
    is_cut_to_window: bool = False
    """max_tokens was more than the model's window has room for."""


class MessagesFormatter(ResponseFormatter):
    """Formats a message, which has one block for each stretch of text, of thinking, and for each call."""

    __slots__ = ("_finish", "_has_pinged", "_num_blocks", "_open", "_options")

    call_id_prefix = "toolu_"

    def __init__(self, envelope: Envelope, options: MessageOptions) -> None:
        super().__init__(envelope)
        self._options = options
        self._open: PartKind | None = None
        """The kind of the block that has begun and not ended."""
        self._num_blocks = 0
        self._has_pinged = False
        self._finish = ChoiceFinish("stop")
        if options.is_text:
            self.prefixes = [_delta_prefix(0, "text_delta", "text")]
        self.suffix = b"}}"

    keep_alive = b'event: ping\ndata: {"type":"ping"}\n\n'

    def opening(self, index: int, num_cached_tokens: int) -> Sequence[bytes]:  # noqa: ARG002
        usage = usage_object(Usage(self._envelope.num_prompt_tokens, 0, num_cached_tokens))
        message = self._head() | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        events = [named_event("message_start", {"type": "message_start", "message": message})]
        if self._options.is_text:
            self._begin(PartKind.TEXT, _EMPTY_BLOCKS[PartKind.TEXT], events)
        return events

    def output(self, index: int, events: Sequence[Event]) -> Sequence[bytes]:
        sent: list[bytes] = []
        for event in events:
            match event:
                case TextDelta():
                    self._add(PartKind.TEXT, "text_delta", "text", event.text, sent)
                case ReasoningDelta():
                    self._add(PartKind.REASONING, "thinking_delta", "thinking", event.text, sent)
                case ToolCallStart(number, name):
                    if not self._leaves_out(number):
                        block = {"type": "tool_use", "id": self.call_id(index, number), "name": name, "input": {}}
                        self._begin(PartKind.TOOL_CALL, block, sent)
                case ToolCallArguments(number, text):
                    if not self._leaves_out(number):
                        self._add(PartKind.TOOL_CALL, "input_json_delta", "partial_json", text, sent)
                case ToolCallEnd(number):
                    if not self._leaves_out(number):
                        self._end(sent)
        return sent

    def finish(self, index: int, finish: ChoiceFinish, details: Json | None) -> Sequence[bytes]:  # noqa: ARG002
        sent: list[bytes] = []
        if self._options.is_text:  # its block began with the message, perhaps at another edge
            self._open, self._num_blocks = PartKind.TEXT, 1
        elif not self._num_blocks:
            self._begin(PartKind.TEXT, _EMPTY_BLOCKS[PartKind.TEXT], sent)
        self._end(sent)
        self._finish = finish
        return sent

    def ending(self, usage: Callable[[], Usage], details: Json | None) -> Sequence[bytes]:
        stop = self._stop(self._finish)
        event: Json = {"type": "message_delta", "delta": stop, "usage": usage_object(usage())}
        if details:
            event["kvloom"] = details
        return named_event("message_delta", event), named_event("message_stop", {"type": "message_stop"})

    def error(self, error: KvloomError) -> bytes:
        return ANTHROPIC_ERRORS.event(error)

    def body(self, choices: Sequence[CollectedChoice], usage: Usage, details: Json | None) -> list[Buffer]:
        [choice] = choices
        blocks: list[list[Buffer]] = []
        num_calls = num_good_calls = 0
        kind_before: PartKind | None = None
        for part in choice.parts:
            if part.kind is not PartKind.TOOL_CALL:
                block = self._content_block(part)
                if part.kind is kind_before:  # a call between them was left out: a stream continues the block
                    blocks[-1][-1:-1] = block[1:-1]
                else:
                    blocks.append(block)
                kind_before = part.kind
                continue
            num_calls += 1
            if not self._leaves_out(num_calls - 1):
                call = _call_block(part)
                num_good_calls += call is not None
                blocks.append(call or _bad_call_block(part))
                kind_before = None
        if not blocks:
            blocks.append([encode_json(_EMPTY_BLOCKS[PartKind.TEXT])])
        is_bare = choice.finish_reason == "tool_calls" and not num_good_calls
        reason = "stop" if is_bare else choice.finish_reason
        more = self._stop(ChoiceFinish(reason, choice.stop_string, choice.refusal))
        more["usage"] = usage_object(usage)
        if details:
            more["kvloom"] = details
        pieces: list[Buffer] = [encode_json(self._head())[:-1] + b',"content":[']
        for number, block in enumerate(blocks):
            pieces += [b",", *block] if number else block
        return [*pieces, b"]," + encode_json(more)[1:]]

    def _head(self) -> Json:
        return {"id": self._envelope.id, "type": "message", "role": "assistant", "model": self._envelope.model}

    def _leaves_out(self, call: int) -> bool:
        return call > 0 and self._options.is_single_call

    def _add(self, kind: PartKind, delta: str, field: str, text: str, sent: list[bytes]) -> None:
        """Append text to the open block, or to a new one if that is of another kind."""
        if self._open is not kind:
            self._begin(kind, _EMPTY_BLOCKS[kind], sent)
        if kind is PartKind.REASONING and self._options.omits_thinking:
            return
        sent.append(_delta_prefix(self._num_blocks - 1, delta, field) + encode_json(text) + self.suffix)

    def _begin(self, kind: PartKind, block: Json, sent: list[bytes]) -> None:
        self._end(sent)
        self._open = kind
        event = {"type": "content_block_start", "index": self._num_blocks, "content_block": block}
        self._num_blocks += 1
        sent.append(named_event("content_block_start", event))
        if not self._has_pinged:
            self._has_pinged = True
            sent.append(_PING)

    def _end(self, sent: list[bytes]) -> None:
        if self._open is None:
            return
        index = self._num_blocks - 1
        if self._open is PartKind.REASONING:
            sent.append(_delta_prefix(index, "signature_delta", "signature") + encode_json(SIGNATURE) + self.suffix)
        sent.append(named_event("content_block_stop", {"type": "content_block_stop", "index": index}))
        self._open = None

    def _stop(self, finish: ChoiceFinish) -> Json:
        reason = finish.reason
        if reason == "stop" and finish.stop_string:
            return {"stop_reason": "stop_sequence", "stop_sequence": finish.stop_string}
        shown = _STOP_REASONS[reason]
        if reason == "length" and self._options.is_cut_to_window:
            shown = "model_context_window_exceeded"
        stop: Json = {"stop_reason": shown, "stop_sequence": None}
        if reason == "content_filter":
            # Anthropic's categories are of its own policy: none of them is meant by a rule of this one.
            stop["stop_details"] = {"type": "refusal", "category": None, "explanation": finish.refusal or None}
        return stop

    def _content_block(self, part: Part) -> list[Buffer]:
        if part.kind is PartKind.TEXT:
            return _text_block(part.content)
        content = b"" if self._options.omits_thinking else part.content
        return [b'{"type":"thinking","thinking":"', content, b'","signature":%b}' % encode_json(SIGNATURE)]


def usage_object(usage: Usage) -> Json:
    """Anthropic counts the tokens that were read from the cache apart from the other input tokens."""
    shown: Json = {
        "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached_tokens,
        "output_tokens": usage.num_output_tokens,
    }
    if usage.num_reasoning_tokens is not None:
        shown["output_tokens_details"] = {"thinking_tokens": usage.num_reasoning_tokens}
    return shown


def _delta_prefix(index: int, delta: str, field: str) -> bytes:
    """The bytes of a delta's event before its text."""
    head = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,' % index
    return head + b'"delta":{"type":"%b","%b":' % (delta.encode(), field.encode())


def _text_block(content: Buffer) -> list[Buffer]:
    return [b'{"type":"text","text":"', content, b'"}']


def _call_block(part: Part) -> list[Buffer] | None:
    """None if the arguments are not a JSON object, as those of a call that max_tokens has cut off."""
    arguments = string_of(part.content) or "{}"
    try:
        _JSON_OBJECT.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return None
    head = b'{"type":"tool_use","id":%b,"name":%b,"input":' % (encode_json(part.call_id), encode_json(part.name))
    return [head, arguments.encode(), b"}"]


def _bad_call_block(part: Part) -> list[Buffer]:
    """Returns as text what the model wrote of a call that its client could not run."""
    return _text_block(b"%b(%b" % (encode_json(part.name)[1:-1], part.content))
