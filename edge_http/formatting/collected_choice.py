"""The output of one choice of a response that is not streamed."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from edge_http.formatting.json_bytes import Buffer, encode_json, string_of


class PartKind(enum.Enum):
    """Names the kinds of parts of an answer."""

    TEXT = "text"
    REASONING = "reasoning"
    TOOL_CALL = "tool_call"


class Part:
    """A stretch of an answer that is of one kind."""

    __slots__ = ("call_id", "content", "kind", "logprobs_start", "name")

    def __init__(self, kind: PartKind, name: str = "", call_id: str = "", logprobs_start: int = 0) -> None:
        self.kind = kind
        self.content = bytearray()
        """The content of a JSON string: of the text, or of a call's arguments, which are JSON themselves."""
        self.name = name
        """The name of the tool that is called."""
        self.call_id = call_id
        self.logprobs_start = logprobs_start
        """Where the logprobs of its tokens begin among the choice's."""

    @property
    def text(self) -> str:
        return string_of(self.content)


class CollectedChoice:
    """The parts of a choice in the order of the model's output, as the JSON that they become. That takes a tenth of the
    memory of the objects, and its size is known at any time."""

    __slots__ = ("finish_reason", "logprobs", "parts", "prompt_logprobs", "refusal", "stop_string")

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.logprobs: list[bytearray] = []
        """The content of JSON arrays; empty without logprobs."""
        self.finish_reason = ""
        self.prompt_logprobs = b""
        """A JSON array; empty unless they were asked for."""
        self.refusal = ""
        """The safety policy's message to the user, if it has ended the choice."""
        self.stop_string = ""
        """The stop string that ended it; "" if something else did."""

    def add(self, kind: PartKind, text: str) -> int:
        """Append text to the last part, or to a new one if that is of another kind. Returns the number of bytes that
        this added."""
        if not self.parts or self.parts[-1].kind is not kind:
            self.parts.append(Part(kind, logprobs_start=self._num_logprobs_bytes))
        return self.extend(text)

    def extend(self, text: str) -> int:
        """Append text to the last part, which exists. Returns the number of bytes that this added."""
        encoded = encode_json(text)
        self.parts[-1].content += encoded[1:-1]
        return len(encoded) - 2

    def begin_call(self, name: str, call_id: str) -> int:
        """Begin the part of a call, whose arguments are appended by `extend`. Returns the number of bytes that this
        added."""
        self.parts.append(Part(PartKind.TOOL_CALL, name, call_id, self._num_logprobs_bytes))
        return len(name) + len(call_id)

    def joined(self, kind: PartKind) -> Buffer:
        """The contents of all parts of this kind. A single one, as nearly always, is not copied."""
        contents = [part.content for part in self.parts if part.kind is kind]
        return contents[0] if len(contents) == 1 else b"".join(contents)

    def of_kind(self, kind: PartKind) -> list[Part]:
        return [part for part in self.parts if part.kind is kind]

    @property
    def _num_logprobs_bytes(self) -> int:
        """Tokens before the first part belong to it."""
        return len(self.logprobs[0]) if self.logprobs and self.parts else 0

    def logprobs_of(self, number: int) -> bytes:
        """The content of the JSON array of the logprobs of a part's tokens, if there is one array for each choice."""
        end = self.parts[number + 1].logprobs_start if number + 1 < len(self.parts) else None
        return bytes(self.logprobs[0][self.parts[number].logprobs_start : end]).strip(b",")

    def add_logprobs(self, lists: Sequence[bytes]) -> int:
        """Append what the formatter's `logprobs` returned. Returns the number of bytes that this added."""
        if not self.logprobs:
            self.logprobs = [bytearray(more) for more in lists]
        else:
            for known, more in zip(self.logprobs, lists, strict=True):
                known += b"," if known and more else b""
                known += more
        return sum(map(len, lists)) + len(lists)
