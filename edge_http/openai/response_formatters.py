"""OpenAI's two response formats (chat and plain completion), streamed and complete.

A formatter creates the bytes of a stream's chunks from templates, so that a token costs only the encoding of its text.
It also creates the body of a response that is not streamed.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from edge_http.openai.logprobs import CompletionLogprobs, chat_logprobs
from edge_http.openai.prompt_report import PromptReport
from kvloom.text.tokenizer import ModelTokenizer
from kvloom.v1.generation_pb2 import SequenceStart, TokenLogprobs

Json = dict[str, Any]
Buffer = bytes | bytearray
encode_json: Final = msgspec.json.Encoder().encode


class Envelope(msgspec.Struct, frozen=True):
    """The fields that all objects of one response have in common."""

    id: str
    model: str
    system_fingerprint: str
    num_choices: int
    include_usage: bool = False
    created: int = msgspec.field(default_factory=lambda: int(time.time()))

    def fields(self, object_name: str) -> Json:
        return {
            "id": self.id,
            "object": object_name,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


class CollectedChoice:
    """One choice of a response that is not streamed, as the JSON that it becomes. That takes a tenth of the memory of
    the objects, and its size is known at any time."""

    __slots__ = ("finish_reason", "logprobs", "prompt_logprobs", "text")

    def __init__(self) -> None:
        self.text = bytearray()
        """The content of a JSON string."""
        self.logprobs: list[bytearray] = []
        """The content of JSON arrays; empty without logprobs."""
        self.finish_reason = ""
        self.prompt_logprobs = b""
        """A JSON array; empty unless they were asked for."""

    def add_text(self, delta: str) -> int:
        """Append the delta. Returns the number of bytes that this added."""
        encoded = encode_json(delta)
        self.text += encoded[1:-1]
        return len(encoded) - 2

    def add_logprobs(self, lists: Sequence[bytes]) -> int:
        """Append what the formatter's `logprobs` returned. Returns the number of bytes that this added."""
        if not self.logprobs:
            self.logprobs = [bytearray(more) for more in lists]
        else:
            for known, more in zip(self.logprobs, lists, strict=True):
                known += b","
                known += more
        return sum(map(len, lists)) + len(lists)


class ResponseFormatter(abc.ABC):
    """The base of both formatters. One object formats one response."""

    __slots__ = ("_envelope", "_head", "_tail", "_tokenizer", "prefixes", "report", "suffix")

    chunk_object: str
    body_object: str
    logprobs_frame: Sequence[bytes]
    """The bytes of a `logprobs` object around its arrays."""
    _around_logprobs: tuple[bytes, bytes]
    """The bytes of a chunk between a delta's text and its logprobs, and those after them."""

    def __init__(self, envelope: Envelope, tokenizer: ModelTokenizer, report: PromptReport | None = None) -> None:
        self._envelope = envelope
        self._tokenizer = tokenizer
        self.report = report
        self._head = encode_json(envelope.fields(self.chunk_object))[:-1] + b',"choices":['
        self._tail = b'],"usage":null}' if envelope.include_usage else b"]}"
        self.prefixes = [self._delta_prefix(index) for index in range(envelope.num_choices)]
        """For each choice, the bytes before a delta's text (a JSON string)."""
        self.suffix = self._delta_suffix() + self._tail
        """The bytes after a delta's text."""

    @property
    def envelope(self) -> Envelope:
        return self._envelope

    @abc.abstractmethod
    def opening(self, index: int) -> bytes | None:
        """Return the chunk that precedes a choice's text, if the format has one."""

    def echo(self, index: int, start: SequenceStart) -> tuple[str, Sequence[bytes] | None] | None:
        """Return the prompt's text, and what `logprobs` would return for its tokens, if the answer begins with them."""
        report = self.report
        if report is None or not report.echoes:
            return None
        lists = report.echoed_logprobs(index, self._tokenizer, start.prompt_logprobs)
        return report.text(index, self._tokenizer), lists

    def prompt_logprobs(self, index: int, start: SequenceStart) -> bytes:
        """Return the JSON of a choice's `prompt_logprobs`; b"" if there is none."""
        report = self.report
        if report is None or report.prompt_logprobs is None:
            return b""
        return report.listed_logprobs(index, self._tokenizer, start.prompt_logprobs)

    @abc.abstractmethod
    def logprobs(self, index: int, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> Sequence[bytes]:
        """Return the contents of the arrays in the `logprobs` of these tokens. Each token must be passed once, in
        order."""

    def skip(self, index: int, token_ids: Sequence[int]) -> None:  # noqa: ARG002
        """Account for tokens of a choice that another edge has delivered before this one continued the response."""
        return

    def delta_with_logprobs(self, index: int, text: str, logprobs: Sequence[bytes]) -> bytes:
        """Return the chunk of a delta. `logprobs` is what the method of this name returned."""
        between, end = self._around_logprobs
        pieces = [self.prefixes[index], encode_json(text), between, *self._framed(logprobs), end, self._tail]
        return b"".join(pieces)

    @abc.abstractmethod
    def finish(self, index: int, finish_reason: str, details: Json | None) -> bytes: ...

    @abc.abstractmethod
    def _around_text(self, index: int) -> tuple[bytes, bytes]:
        """Return the bytes of an element of `choices` in a body: those before the text's content, and those between the
        text and the logprobs."""

    def usage_chunk(self, usage: Json, details: Json | None) -> bytes:
        chunk = self._envelope.fields(self.chunk_object) | {"choices": [], "usage": usage}
        return encode_json(chunk | {"kvloom": details} if details else chunk)

    def body(self, choices: Sequence[CollectedChoice], usage: Json, details: Json | None) -> list[Buffer]:
        """Return the pieces of a body. The large ones are those of the choices, which are not copied."""
        pieces: list[Buffer] = [encode_json(self._envelope.fields(self.body_object))[:-1] + b',"choices":[']
        for index, choice in enumerate(choices):
            before, between = self._around_text(index)
            logprobs = self._framed(choice.logprobs) if choice.logprobs else [b"null"]
            end = b',"finish_reason":%b%b}' % (encode_json(choice.finish_reason), self._after_choice(choice))
            pieces += [b"," + before if index else before, choice.text, between, *logprobs, end]
        more = {"usage": usage, "kvloom": details} if details else {"usage": usage}
        more |= self._after_choices(choices)
        pieces.append(b"]," + encode_json(more)[1:])
        return pieces

    def _after_choice(self, choice: CollectedChoice) -> bytes:  # noqa: ARG002
        """Return further fields of a choice in a body."""
        return b""

    def _after_choices(self, choices: Sequence[CollectedChoice]) -> Json:  # noqa: ARG002
        """Return further fields of a body."""
        return {}

    def _framed(self, lists: Sequence[Buffer]) -> list[Buffer]:
        *frames, end = self.logprobs_frame
        return [piece for pair in zip(frames, lists, strict=True) for piece in pair] + [end]

    @abc.abstractmethod
    def _delta_prefix(self, index: int) -> bytes: ...

    @abc.abstractmethod
    def _delta_suffix(self) -> bytes: ...

    def _chunk(self, choice: Json, details: Json | None = None) -> bytes:
        tail = self._tail if details is None else self._tail[:-1] + b',"kvloom":' + encode_json(details) + b"}"
        return self._head + encode_json(choice) + tail


class ChatFormatter(ResponseFormatter):
    """Formats chat.completion and chat.completion.chunk."""

    __slots__ = ()

    chunk_object = "chat.completion.chunk"
    body_object = "chat.completion"
    logprobs_frame = (b'{"content":[', b'],"refusal":null}')
    _around_logprobs = (b'},"logprobs":', b',"finish_reason":null}')

    def opening(self, index: int) -> bytes | None:
        delta = b'{"index":%d,"delta":{"role":"assistant","content":"","refusal":null' % index
        return self._head + delta + self.suffix

    def logprobs(self, index: int, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> Sequence[bytes]:  # noqa: ARG002
        return (chat_logprobs(self._tokenizer, token_ids, entries),)

    def finish(self, index: int, finish_reason: str, details: Json | None) -> bytes:
        return self._chunk({"index": index, "delta": {}, "logprobs": None, "finish_reason": finish_reason}, details)

    def _around_text(self, index: int) -> tuple[bytes, bytes]:
        before = b'{"index":%d,"message":{"role":"assistant","content":"' % index
        return before, b'","refusal":null},"logprobs":'

    def _after_choices(self, choices: Sequence[CollectedChoice]) -> Json:
        """All choices have the same prompt."""
        prompt_logprobs = choices[0].prompt_logprobs
        return {"prompt_logprobs": msgspec.Raw(prompt_logprobs)} if prompt_logprobs else {}

    def _delta_prefix(self, index: int) -> bytes:
        return self._head + b'{"index":%d,"delta":{"content":' % index

    def _delta_suffix(self) -> bytes:
        return b'},"logprobs":null,"finish_reason":null}'


class CompletionFormatter(ResponseFormatter):
    """Formats text_completion, which is the object of bodies and of chunks."""

    __slots__ = ("_logprobs",)

    chunk_object = "text_completion"
    body_object = "text_completion"
    logprobs_frame = (b'{"tokens":[', b'],"token_logprobs":[', b'],"top_logprobs":[', b'],"text_offset":[', b"]}")
    _around_logprobs = (b',"logprobs":', b',"finish_reason":null}')

    def __init__(self, envelope: Envelope, tokenizer: ModelTokenizer, report: PromptReport | None = None) -> None:
        super().__init__(envelope, tokenizer, report)
        num_chars = [0] * envelope.num_choices
        if report is not None and report.echoes:
            num_chars = [len(report.text(index, tokenizer)) for index in range(envelope.num_choices)]
        self._logprobs = [CompletionLogprobs(tokenizer, count) for count in num_chars]

    def opening(self, index: int) -> bytes | None:  # noqa: ARG002
        return None

    def logprobs(self, index: int, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> Sequence[bytes]:
        return [encode_json(values)[1:-1] for values in self._logprobs[index].push(token_ids, entries).values()]

    def skip(self, index: int, token_ids: Sequence[int]) -> None:
        self._logprobs[index].skip(token_ids)

    def finish(self, index: int, finish_reason: str, details: Json | None) -> bytes:
        return self._chunk({"index": index, "text": "", "logprobs": None, "finish_reason": finish_reason}, details)

    def _around_text(self, index: int) -> tuple[bytes, bytes]:
        return b'{"index":%d,"text":"' % index, b'","logprobs":'

    def _after_choice(self, choice: CollectedChoice) -> bytes:
        return b',"prompt_logprobs":' + choice.prompt_logprobs if choice.prompt_logprobs else b""

    def _delta_prefix(self, index: int) -> bytes:
        return self._head + b'{"index":%d,"text":' % index

    def _delta_suffix(self) -> bytes:
        return b',"logprobs":null,"finish_reason":null}'
