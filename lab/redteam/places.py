"""Where a text stands: a place of a request that the model reads, or a part of the answer that the model writes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

from lab.redteam.echo_engine import MODEL, told_to_write

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
RESPONSES: Final = "/v1/responses"
MESSAGES: Final = "/v1/messages"
EMBEDDINGS: Final = "/v1/embeddings"
RERANK: Final = "/v1/rerank"
GRPC: Final = "gRPC Generate"
STREAMING: Final = frozenset({CHAT, COMPLETIONS, RESPONSES, MESSAGES})
_MAX_TOKENS: Final = 3000

Body = dict[str, Any]
Writing = Literal["text", "json", "json value"]
"""How a text stands there: as it is, as a part of JSON that the client writes, or as a value of which kvloom makes
JSON, so that an escape in it is one more text."""


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """One place."""

    api: str
    where: str
    make: Callable[[str], Body]
    """The body with a text in this place; for an answer, with what the model is told to write."""
    writing: Writing = "text"
    frame: str = ""
    """For an answer: what the model writes, with %s for the text. "": the text stands in the request."""
    is_read: bool = True
    """False where no model reads it, so that it is not screened."""

    @property
    def is_answer(self) -> bool:
        return bool(self.frame)

    def written(self, text: str, *, is_escaped: bool) -> str:
        """The text as it stands in this place. `is_escaped`: it has the escapes of JSON already."""
        return json.dumps(text, ensure_ascii=False)[1:-1] if self.writing == "json" and not is_escaped else text


def _user(text: str) -> Body:
    return {"role": "user", "content": text}


def _chat(*messages: Body, **more: Any) -> Body:
    return {"model": MODEL, "messages": list(messages), "max_tokens": _MAX_TOKENS, **more}


def _after_call(text: str, result: str = "done") -> Sequence[Body]:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": f'{{"q": "{text}"}}'}}
    return (
        _user("hi"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": result},
    )


def _schema(text: str = "q") -> Body:
    return {"type": "object", "properties": {"q": {"type": "string", "description": text}}}


def _tool(text: str = "f", schema: Body | None = None) -> Body:
    return {"type": "function", "function": {"name": "f", "description": text, "parameters": schema or _schema()}}


def _responses(items: Any, **more: Any) -> Body:
    return {"model": MODEL, "input": items, "max_output_tokens": _MAX_TOKENS, **more}


_RESPONSES_TOOL: Final[Body] = {"type": "function", "name": "f", "parameters": _schema()}


def _response_call(text: str, result: str = "done") -> Sequence[Body]:
    return (
        _user("hi"),
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": f'{{"q": "{text}"}}'},
        {"type": "function_call_output", "call_id": "c1", "output": result},
    )


def _messages(*messages: Body, **more: Any) -> Body:
    return {"model": MODEL, "messages": list(messages), "max_tokens": _MAX_TOKENS, **more}


_MESSAGES_TOOL: Final[Body] = {"name": "f", "input_schema": _schema()}


def _message_call(text: str, result: str = "done") -> Sequence[Body]:
    return (
        _user("hi"),
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": {"q": text}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": result}]},
    )


def _grpc(*messages: Body, **more: Any) -> Body:
    return {
        "model": MODEL,
        "conversation": {"messages": list(messages)},
        "stop": {"max_tokens": _MAX_TOKENS},
        **more,
    }


def _document(text: str) -> Body:
    return {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": text}}


_IN_PROMPTS: Final = (
    Place(CHAT, "system", lambda text: _chat({"role": "system", "content": text}, _user("hi"))),
    Place(CHAT, "developer", lambda text: _chat({"role": "developer", "content": text}, _user("hi"))),
    Place(CHAT, "user", lambda text: _chat(_user(text))),
    Place(CHAT, "part of the content", lambda text: _chat({**_user(""), "content": [{"type": "text", "text": text}]})),
    Place(
        CHAT,
        "answer of the history",
        lambda text: _chat(_user("hi"), {"role": "assistant", "content": text}, _user("go on")),
    ),
    Place(CHAT, "arguments of the history", lambda text: _chat(*_after_call(text)), "json"),
    Place(CHAT, "result of a tool", lambda text: _chat(*_after_call("x", text))),
    Place(CHAT, "description of a tool", lambda text: _chat(_user("hi"), tools=[_tool(text)]), "json value"),
    Place(CHAT, "schema of a tool", lambda text: _chat(_user("hi"), tools=[_tool("f", _schema(text))]), "json value"),
    Place(CHAT, "stop string", lambda text: _chat(_user("hi"), stop=[text[:60]]), is_read=False),
    Place(COMPLETIONS, "prompt", lambda text: {"model": MODEL, "prompt": text, "max_tokens": _MAX_TOKENS}),
    Place(RESPONSES, "input", _responses),
    Place(RESPONSES, "instructions", lambda text: _responses("hi", instructions=text)),
    Place(
        RESPONSES,
        "part of the content",
        lambda text: _responses([{**_user(""), "content": [{"type": "input_text", "text": text}]}]),
    ),
    Place(RESPONSES, "arguments of the history", lambda text: _responses([*_response_call(text)]), "json"),
    Place(RESPONSES, "result of a tool", lambda text: _responses([*_response_call("x", text)])),
    Place(
        RESPONSES,
        "description of a tool",
        lambda text: _responses("hi", tools=[{**_RESPONSES_TOOL, "description": text}]),
        "json value",
    ),
    Place(MESSAGES, "system", lambda text: _messages(_user("hi"), system=text)),
    Place(MESSAGES, "user", lambda text: _messages(_user(text))),
    Place(MESSAGES, "document", lambda text: _messages({**_user(""), "content": [_document(text)]})),
    Place(MESSAGES, "input of the history", lambda text: _messages(*_message_call(text)), "json value"),
    Place(MESSAGES, "result of a tool", lambda text: _messages(*_message_call("x", text))),
    Place(
        MESSAGES,
        "description of a tool",
        lambda text: _messages(_user("hi"), tools=[{**_MESSAGES_TOOL, "description": text}]),
        "json value",
    ),
    Place(EMBEDDINGS, "input", lambda text: {"model": MODEL, "input": text}),
    Place(RERANK, "query", lambda text: {"model": MODEL, "query": text, "documents": ["hi"]}),
    Place(RERANK, "document", lambda text: {"model": MODEL, "query": "hi", "documents": ["hi", text]}),
    Place(GRPC, "text", lambda text: {"model": MODEL, "text": text, "stop": {"max_tokens": _MAX_TOKENS}}),
    Place(GRPC, "user", lambda text: _grpc(_user(text))),
    Place(GRPC, "reasoning of the history", lambda text: _grpc({"role": "assistant", "reasoning": text}, _user("hi"))),
    Place(
        GRPC,
        "description of a tool",
        lambda text: _grpc(
            _user("hi"), tools=[{"name": "f", "description": text, "parameters": json.dumps(_schema())}]
        ),
        "json value",
    ),
)
_FRAMES: Final[Mapping[str, tuple[str, Writing]]] = {
    "text": ("%s", "text"),
    "reasoning": ("<think>%s</think>ok", "text"),
    "arguments": ('<tool_call>\n{"name": "f", "arguments": {"q": "%s"}}\n</tool_call>', "json"),
}
_ASKED: Final[Mapping[str, Callable[[str], Body]]] = {
    CHAT: lambda told: _chat(_user(told), tools=[_tool()]),
    COMPLETIONS: lambda told: {"model": MODEL, "prompt": told, "max_tokens": _MAX_TOKENS},
    RESPONSES: lambda told: _responses(told, tools=[_RESPONSES_TOOL]),
    MESSAGES: lambda told: _messages(_user(told), tools=[_MESSAGES_TOOL]),
    GRPC: lambda told: _grpc(_user(told)),
}


def _in_answers() -> Sequence[Place]:
    places: list[Place] = []
    for api, make in _ASKED.items():
        for where, (frame, writing) in _FRAMES.items():
            if where == "text" or api not in (COMPLETIONS, GRPC):
                places.append(Place(api, f"{where} of the answer", make, writing, frame))
    return places


PLACES: Final = (*_IN_PROMPTS, *_in_answers())


def body_at(place: Place, written: str, max_part_chars: int, *, is_stream: bool) -> Body:
    """The request with a text in this place. An answer comes in parts of 1 to `max_part_chars` characters, or at once
    for 0."""
    if place.is_answer:
        body = place.make(told_to_write(place.frame.replace("%s", written), max_part_chars))
    else:
        body = place.make(written)
    return {**body, "stream": True} if is_stream and place.api in STREAMING else body
