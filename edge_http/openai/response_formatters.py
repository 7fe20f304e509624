"""OpenAI's two response formats (chat and plain completion), streamed and complete.

A formatter creates the bytes of a stream's chunks from templates, so that a token costs only the encoding of its text.
It also creates the body of a response that is not streamed.
"""

from __future__ import annotations

import abc
import dataclasses
import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from edge_http.openai.logprobs import CompletionLogprobs, chat_logprobs, empty_completion_logprobs
from kvloom.text.tokenizer import ModelTokenizer
from kvloom.v1.generation_pb2 import TokenLogprobs

Json = dict[str, Any]
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


@dataclasses.dataclass(slots=True)
class CollectedChoice:
    """One choice of a response that is not streamed."""

    text: str
    finish_reason: str
    logprobs: Any


class ResponseFormatter(abc.ABC):
    """The base of both formatters. One object formats one response."""

    __slots__ = ("_envelope", "_head", "_tail", "prefixes", "suffix")

    chunk_object: str
    body_object: str

    def __init__(self, envelope: Envelope) -> None:
        self._envelope = envelope
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

    @abc.abstractmethod
    def logprobs(self, index: int, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> Any:
        """Return the `logprobs` of these tokens as a JSON value. Each token must be passed once, in order."""

    def skip(self, index: int, token_ids: Sequence[int]) -> None:  # noqa: ARG002
        """Account for tokens of a choice that another edge has delivered before this one continued the response."""
        return

    @abc.abstractmethod
    def delta_with_logprobs(self, index: int, text: str, logprobs: Any) -> bytes: ...

    @abc.abstractmethod
    def finish(self, index: int, finish_reason: str, details: Json | None) -> bytes: ...

    @abc.abstractmethod
    def collected(self, index: int, choice: CollectedChoice) -> Json:
        """Return an element of `choices` in a body."""

    @abc.abstractmethod
    def join_logprobs(self, pieces: Sequence[Any]) -> Any:
        """Join the values that `logprobs` returned for the parts of an answer."""

    def usage_chunk(self, usage: Json, details: Json | None) -> bytes:
        chunk = self._envelope.fields(self.chunk_object) | {"choices": [], "usage": usage}
        return encode_json(chunk | {"kvloom": details} if details else chunk)

    def body(self, choices: Sequence[CollectedChoice], usage: Json, details: Json | None) -> bytes:
        body = self._envelope.fields(self.body_object)
        body["choices"] = [self.collected(index, choice) for index, choice in enumerate(choices)]
        body["usage"] = usage
        return encode_json(body | {"kvloom": details} if details else body)

    @abc.abstractmethod
    def _delta_prefix(self, index: int) -> bytes: ...

    @abc.abstractmethod
    def _delta_suffix(self) -> bytes: ...

    def _chunk(self, choice: Json, details: Json | None = None) -> bytes:
        tail = self._tail if details is None else self._tail[:-1] + b',"kvloom":' + encode_json(details) + b"}"
        return self._head + encode_json(choice) + tail


class ChatFormatter(ResponseFormatter):
    """Formats chat.completion and chat.completion.chunk."""

    __slots__ = ("_tokenizer",)

    chunk_object = "chat.completion.chunk"
    body_object = "chat.completion"

    def __init__(self, envelope: Envelope, tokenizer: ModelTokenizer) -> None:
        super().__init__(envelope)
        self._tokenizer = tokenizer

    def opening(self, index: int) -> bytes | None:
        delta = b'{"index":%d,"delta":{"role":"assistant","content":"","refusal":null' % index
        return self._head + delta + self.suffix

    def logprobs(self, index: int, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> Any:  # noqa: ARG002
        return {"content": chat_logprobs(self._tokenizer, token_ids, entries), "refusal": None}

    def delta_with_logprobs(self, index: int, text: str, logprobs: Any) -> bytes:
        return self._chunk({"index": index, "delta": {"content": text}, "logprobs": logprobs, "finish_reason": None})

    def finish(self, index: int, finish_reason: str, details: Json | None) -> bytes:
        return self._chunk({"index": index, "delta": {}, "logprobs": None, "finish_reason": finish_reason}, details)

    def collected(self, index: int, choice: CollectedChoice) -> Json:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        reason = choice.finish_reason
        return {"index": index, "message": message, "logprobs": choice.logprobs, "finish_reason": reason}

    def join_logprobs(self, pieces: Sequence[Any]) -> Any:
        return {"content": [entry for piece in pieces for entry in piece["content"]], "refusal": None}

    def _delta_prefix(self, index: int) -> bytes:
        return self._head + b'{"index":%d,"delta":{"content":' % index

    def _delta_suffix(self) -> bytes:
        return b'},"logprobs":null,"finish_reason":null}'


class CompletionFormatter(ResponseFormatter):
    """Formats text_completion, which is the object of bodies and of chunks."""

    __slots__ = ("_logprobs",)

    chunk_object = "text_completion"
    body_object = "text_completion"

    def __init__(self, envelope: Envelope, tokenizer: ModelTokenizer) -> None:
        super().__init__(envelope)
        self._logprobs = [CompletionLogprobs(tokenizer) for _ in range(envelope.num_choices)]

    def opening(self, index: int) -> bytes | None:  # noqa: ARG002
        return None

    def logprobs(self, index: int, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> Any:
        return self._logprobs[index].push(token_ids, entries)

    def skip(self, index: int, token_ids: Sequence[int]) -> None:
        self._logprobs[index].skip(token_ids)

    def delta_with_logprobs(self, index: int, text: str, logprobs: Any) -> bytes:
        return self._chunk({"index": index, "text": text, "logprobs": logprobs, "finish_reason": None})

    def finish(self, index: int, finish_reason: str, details: Json | None) -> bytes:
        return self._chunk({"index": index, "text": "", "logprobs": None, "finish_reason": finish_reason}, details)

    def collected(self, index: int, choice: CollectedChoice) -> Json:
        reason = choice.finish_reason
        return {"index": index, "text": choice.text, "logprobs": choice.logprobs, "finish_reason": reason}

    def join_logprobs(self, pieces: Sequence[Any]) -> Any:
        joined = empty_completion_logprobs()
        for piece in pieces:
            for name, values in piece.items():
                joined[name].extend(values)
        return joined

    def _delta_prefix(self, index: int) -> bytes:
        return self._head + b'{"index":%d,"text":' % index

    def _delta_suffix(self) -> bytes:
        return b',"logprobs":null,"finish_reason":null}'
