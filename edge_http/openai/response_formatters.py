"""OpenAI's formats of chat and plain completions, streamed and complete."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from edge_http.formatting.client_tools import NO_CLIENT_TOOLS, ClientTool, custom_input
from edge_http.formatting.collected_choice import CollectedChoice, Part, PartKind
from edge_http.formatting.error_formats import OPENAI_ERRORS
from edge_http.formatting.json_bytes import Buffer, Json, encode_json
from edge_http.formatting.response_formatter import DATA, ChoiceFinish, Envelope, ResponseFormatter, data_event
from edge_http.formatting.usage import Usage
from edge_http.openai.logprobs import CompletionLogprobs, chat_logprobs, cut_chat_logprobs, cut_token_list
from edge_http.openai.prompt_report import PromptReport
from kvloom.errors import KvloomError
from kvloom.v1.generation_pb2 import SequenceStart, TokenLogprobs
from kvloom_common.parsers.events import Event, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallEnd, ToolCallStart
from kvloom_common.text.tokenizer import ModelTokenizer

DONE: Final = DATA + b"[DONE]"


class OpenAiFormatter(ResponseFormatter):
    """The base of both formats: chunks with a list of choices."""

    __slots__ = ("_head", "_tail", "_tokenizer")

    chunk_object: str
    body_object: str
    logprobs_frame: Sequence[bytes]
    """The bytes of a `logprobs` object around its arrays."""
    _around_logprobs: tuple[bytes, bytes]
    """The bytes of a chunk between a delta's text and its logprobs, and those after them."""

    def __init__(self, envelope: Envelope, tokenizer: ModelTokenizer) -> None:
        super().__init__(envelope)
        self._tokenizer = tokenizer
        self._head = DATA + encode_json(envelope.fields(self.chunk_object))[:-1] + b',"choices":['
        self._tail = b'],"usage":null}' if envelope.include_usage else b"]}"
        self.prefixes = [self._delta_prefix(index) for index in range(envelope.num_choices)]
        self.suffix = self._delta_suffix() + self._tail

    def repeat_prompt(self, report: PromptReport) -> None:
        """The answer repeats something of its prompt. Call this before anything else."""
        self.report = report
        self.drops_output = report.is_all

    def output(self, index: int, events: Sequence[Event]) -> Sequence[bytes]:
        return [self._text(index, event.text) for event in events if isinstance(event, TextDelta)]

    def echo(self, index: int, start: SequenceStart) -> tuple[str, Sequence[bytes] | None] | None:
        report = self.report
        if not isinstance(report, PromptReport) or not report.echoes:
            return None
        lists = report.echoed_logprobs(index, self._tokenizer, start.prompt_logprobs)
        return report.text(index, self._tokenizer), lists

    def prompt_logprobs(self, index: int, start: SequenceStart) -> bytes:
        report = self.report
        if not isinstance(report, PromptReport) or report.prompt_logprobs is None:
            return b""
        return report.listed_logprobs(index, self._tokenizer, start.prompt_logprobs)

    def delta_with_logprobs(self, index: int, text: str, logprobs: Sequence[bytes]) -> bytes:
        between, end = self._around_logprobs
        pieces = [self.prefixes[index], encode_json(text), between, *self._framed(logprobs), end, self._tail]
        return b"".join(pieces)

    def repeat_usage(self, num_output_tokens: int) -> None:
        """Repeats the usage so far, as vLLM does, which counts the choice's own tokens and gives no details."""
        num_prompt_tokens = self._envelope.num_prompt_tokens
        counts = num_prompt_tokens, num_output_tokens, num_prompt_tokens + num_output_tokens
        self._tail = b'],"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}' % counts
        self.suffix = self._delta_suffix() + self._tail

    def ending(self, usage: Callable[[], Usage], details: Json | None) -> Sequence[bytes]:
        before: list[bytes] = []
        if self.moderation is not None:
            results = {"choices": [], "moderation": self.moderation}
            before.append(data_event(self._envelope.fields(self.chunk_object) | results))
        if not self._envelope.include_usage:
            return *before, DONE
        chunk = self._envelope.fields(self.chunk_object) | {"choices": [], "usage": usage_object(usage())}
        return *before, data_event(chunk | {"kvloom": details} if details else chunk), DONE

    def error(self, error: KvloomError) -> bytes:
        return OPENAI_ERRORS.event(error)

    def body(self, choices: Sequence[CollectedChoice], usage: Usage, details: Json | None) -> list[Buffer]:
        pieces: list[Buffer] = [encode_json(self._envelope.fields(self.body_object))[:-1] + b',"choices":[']
        for index, choice in enumerate(choices):
            before, *content, between = self._around_text(index, choice)
            logprobs = self._framed(choice.logprobs) if choice.logprobs else [b"null"]
            end = b',"finish_reason":%b%b}' % (encode_json(choice.finish_reason), self._after_choice(choice))
            pieces += [b"," + bytes(before) if index else before, *content, between, *logprobs, end]
        more = {"usage": usage_object(usage), **self._after_choices(choices)}
        if self.moderation is not None:
            more["moderation"] = self.moderation
        pieces.append(b"]," + encode_json(more | {"kvloom": details} if details else more)[1:])
        return pieces

    def _after_choice(self, choice: CollectedChoice) -> bytes:  # noqa: ARG002
        """Return further fields of a choice in a body."""
        return b""

    def _after_choices(self, choices: Sequence[CollectedChoice]) -> Json:  # noqa: ARG002
        """Return further fields of a body."""
        return {}

    @abc.abstractmethod
    def _around_text(self, index: int, choice: CollectedChoice) -> list[Buffer]:
        """Return the pieces of an element of `choices` in a body, up to its logprobs."""

    @abc.abstractmethod
    def _delta_prefix(self, index: int) -> bytes: ...

    @abc.abstractmethod
    def _delta_suffix(self) -> bytes: ...

    def _text(self, index: int, text: str) -> bytes:
        return self.prefixes[index] + encode_json(text) + self.suffix

    def _framed(self, lists: Sequence[Buffer]) -> list[Buffer]:
        *frames, end = self.logprobs_frame
        return [piece for pair in zip(frames, lists, strict=True) for piece in pair] + [end]

    def _chunk(self, choice: Json, details: Json | None = None) -> bytes:
        tail = self._tail if details is None else self._tail[:-1] + b',"kvloom":' + encode_json(details) + b"}"
        return self._head + encode_json(choice) + tail


class ChatFormatter(OpenAiFormatter):
    """Formats chat.completion and chat.completion.chunk."""

    __slots__ = ("_client_tools", "_custom_calls", "_has_legacy_functions")

    chunk_object = "chat.completion.chunk"
    body_object = "chat.completion"
    logprobs_frame = (b'{"content":[', b'],"refusal":null}')
    _around_logprobs = (b'},"logprobs":', b',"finish_reason":null}')

    def __init__(
        self,
        envelope: Envelope,
        tokenizer: ModelTokenizer,
        *,
        has_legacy_functions: bool = False,
        client_tools: Mapping[str, ClientTool] = NO_CLIENT_TOOLS,
    ) -> None:
        """`has_legacy_functions`: the request had `functions` instead of `tools`, so a call is a `function_call`.
        `client_tools`: see GivenTools."""
        super().__init__(envelope, tokenizer)
        self._has_legacy_functions = has_legacy_functions
        self._client_tools = client_tools
        self._custom_calls: dict[tuple[int, int], bytearray] = {}
        """The arguments so far of calls of tools that take text, by choice and call: the text is sent when it is
        whole."""

    def opening(self, index: int, num_cached_tokens: int) -> Sequence[bytes]:  # noqa: ARG002
        delta = b'{"index":%d,"delta":{"role":"assistant","content":"","refusal":null' % index
        return (self._head + delta + self.suffix,)

    def output(self, index: int, events: Sequence[Event]) -> Sequence[bytes]:
        return [chunk for event in events if (chunk := self._event(index, event)) is not None]

    def logprobs(self, index: int, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> Sequence[bytes]:  # noqa: ARG002
        return (chat_logprobs(self._tokenizer, token_ids, entries),)

    def cut_logprobs(self, logprobs: Sequence[bytes], num_bytes: int) -> Sequence[bytes]:
        [content] = logprobs
        return (cut_chat_logprobs(content, num_bytes),)

    def output_with_logprobs(self, index: int, events: Sequence[Event], logprobs: Sequence[bytes]) -> Sequence[bytes]:
        if not any(logprobs):  # special tokens alone
            return self.output(index, events)
        return super().output_with_logprobs(index, events, logprobs)

    def finish(self, index: int, finish: ChoiceFinish, details: Json | None) -> Sequence[bytes]:
        reason = self._finish_reason(finish.reason)
        choice = {"index": index, "delta": {}, "logprobs": None, "finish_reason": reason}
        return (self._chunk(choice, details),)

    def body(self, choices: Sequence[CollectedChoice], usage: Usage, details: Json | None) -> list[Buffer]:
        for choice in choices:
            choice.finish_reason = self._finish_reason(choice.finish_reason)
        return super().body(choices, usage, details)

    def _finish_reason(self, reason: str) -> str:
        return "function_call" if reason == "tool_calls" and self._has_legacy_functions else reason

    def _event(self, index: int, event: Event) -> bytes | None:
        match event:
            case TextDelta():
                return self._text(index, event.text)
            case ReasoningDelta():
                return self._delta(index, {"reasoning_content": event.text})
            case ToolCallStart() if self._has_legacy_functions:
                return self._delta(index, {"function_call": {"name": event.name, "arguments": ""}})
            case ToolCallArguments() if self._has_legacy_functions:
                return self._delta(index, {"function_call": {"arguments": event.text}})
            case ToolCallStart() if event.name in self._client_tools:
                self._custom_calls[index, event.index] = bytearray()
                tool = {"name": self._client_tools[event.name].name, "input": ""}
                call = {"index": event.index, "id": self.call_id(index, event.index), "type": "custom", "custom": tool}
                return self._delta(index, {"tool_calls": [call]})
            case ToolCallArguments() if (index, event.index) in self._custom_calls:
                self._custom_calls[index, event.index] += encode_json(event.text)[1:-1]
                return None
            case ToolCallEnd() if (index, event.index) in self._custom_calls:
                text = custom_input(self._custom_calls.pop((index, event.index)))
                return self._delta(index, {"tool_calls": [{"index": event.index, "custom": {"input": text}}]})
            case ToolCallStart():
                call = {
                    "index": event.index,
                    "id": self.call_id(index, event.index),
                    "type": "function",
                    "function": {"name": event.name, "arguments": ""},
                }
                return self._delta(index, {"tool_calls": [call]})
            case ToolCallArguments():
                call = {"index": event.index, "function": {"arguments": event.text}}
                return self._delta(index, {"tool_calls": [call]})
        return None

    def _delta(self, index: int, delta: Json) -> bytes:
        return self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})

    def _around_text(self, index: int, choice: CollectedChoice) -> list[Buffer]:
        calls = choice.of_kind(PartKind.TOOL_CALL)
        text = choice.joined(PartKind.TEXT)
        has_content = bool(text) or not calls
        pieces: list[Buffer] = [b'{"index":%d,"message":{"role":"assistant","content":' % index]
        pieces += [b'"', text, b'"'] if has_content else [b"null"]
        pieces.append(b',"refusal":null')
        reasoning = choice.joined(PartKind.REASONING)
        if reasoning:
            pieces += [b',"reasoning_content":"', reasoning, b'"']
        if calls:
            pieces += self._calls(calls)
        return [*pieces, b'},"logprobs":']

    def _calls(self, calls: Sequence[Part]) -> list[Buffer]:
        if self._has_legacy_functions:
            return [b',"function_call":', *_function(calls[0])]
        pieces: list[Buffer] = [b',"tool_calls":[']
        for number, call in enumerate(calls):
            if call.name in self._client_tools:
                tool = {"name": self._client_tools[call.name].name, "input": custom_input(call.content)}
                shown: Json = {"id": call.call_id, "type": "custom", "custom": tool}
                pieces += [b"," if number else b"", encode_json(shown)]
                continue
            head = b',{"id":%b,"type":"function","function":' % encode_json(call.call_id)
            pieces += [head if number else head[1:], *_function(call), b"}"]
        return [*pieces, b"]"]

    def _after_choices(self, choices: Sequence[CollectedChoice]) -> Json:
        """All choices have the same prompt."""
        prompt_logprobs = choices[0].prompt_logprobs
        return {"prompt_logprobs": msgspec.Raw(prompt_logprobs)} if prompt_logprobs else {}

    def _delta_prefix(self, index: int) -> bytes:
        return self._head + b'{"index":%d,"delta":{"content":' % index

    def _delta_suffix(self) -> bytes:
        return b'},"logprobs":null,"finish_reason":null}'


class CompletionFormatter(OpenAiFormatter):
    """Formats text_completion, which is the object of bodies and of chunks."""

    __slots__ = ("_logprobs",)

    chunk_object = "text_completion"
    body_object = "text_completion"
    logprobs_frame = (b'{"tokens":[', b'],"token_logprobs":[', b'],"top_logprobs":[', b'],"text_offset":[', b"]}")
    _around_logprobs = (b',"logprobs":', b',"finish_reason":null}')

    def __init__(self, envelope: Envelope, tokenizer: ModelTokenizer) -> None:
        super().__init__(envelope, tokenizer)
        self._logprobs = [CompletionLogprobs(tokenizer) for _ in range(envelope.num_choices)]

    def repeat_prompt(self, report: PromptReport) -> None:
        super().repeat_prompt(report)
        if report.echoes:
            num_chars = [len(report.text(index, self._tokenizer)) for index in range(self._envelope.num_choices)]
            self._logprobs = [CompletionLogprobs(self._tokenizer, count) for count in num_chars]

    def opening(self, index: int, num_cached_tokens: int) -> Sequence[bytes]:  # noqa: ARG002
        return ()

    def logprobs(self, index: int, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> Sequence[bytes]:
        return [encode_json(values)[1:-1] for values in self._logprobs[index].push(token_ids, entries).values()]

    def cut_logprobs(self, logprobs: Sequence[bytes], num_bytes: int) -> Sequence[bytes]:
        tokens, *others = logprobs
        return cut_token_list(tokens, num_bytes), *others

    def skip(self, index: int, token_ids: Sequence[int]) -> None:
        self._logprobs[index].skip(token_ids)

    def finish(self, index: int, finish: ChoiceFinish, details: Json | None) -> Sequence[bytes]:
        return (self._chunk({"index": index, "text": "", "logprobs": None, "finish_reason": finish.reason}, details),)

    def _around_text(self, index: int, choice: CollectedChoice) -> list[Buffer]:
        return [b'{"index":%d,"text":"' % index, choice.joined(PartKind.TEXT), b'","logprobs":']

    def _after_choice(self, choice: CollectedChoice) -> bytes:
        return b',"prompt_logprobs":' + choice.prompt_logprobs if choice.prompt_logprobs else b""

    def _delta_prefix(self, index: int) -> bytes:
        return self._head + b'{"index":%d,"text":' % index

    def _delta_suffix(self) -> bytes:
        return b',"logprobs":null,"finish_reason":null}'


def usage_object(usage: Usage) -> Json:
    """OpenAI's `usage` of completions."""
    shown: Json = {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_output_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
    }
    details: Json = {}
    if usage.num_reasoning_tokens is not None:
        details["reasoning_tokens"] = usage.num_reasoning_tokens
    if usage.num_predicted_tokens:
        details["accepted_prediction_tokens"] = usage.num_accepted_tokens
        details["rejected_prediction_tokens"] = usage.num_predicted_tokens - usage.num_accepted_tokens
    if details:
        shown["completion_tokens_details"] = details
    return shown


def _function(call: Part) -> list[Buffer]:
    return [b'{"name":%b,"arguments":"' % encode_json(call.name), call.content, b'"}']
