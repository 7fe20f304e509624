"""Every place of every request in which a client can write text, found in the types of the requests.

A test writes a forbidden phrase into each (tests/integration/test_text_positions.py). The table of
docs/operate/safety.md derives from them: `python -m tests.text_positions`.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from google.protobuf.descriptor import FieldDescriptor

from edge_http.anthropic import tools as anthropic_tools
from edge_http.formatting.client_tools import CustomToolBody
from edge_http.openai.responses import input_items
from edge_http.openai.responses import tools as response_tools
from edge_http.openai.responses.file_search import FileSearchTool
from edge_http.server.routes import ROUTES
from edge_http.state.routes import STATE_ROUTES
from kvloom.v1.router_service_pb2 import GenerateRequest
from tests.answer_positions import GENERATE, answer_table

PAGE: Final = Path(__file__).parents[1] / "docs" / "operate" / "safety.md"

Make = Callable[[Any], Any]
"""The body with a value in one place."""


@dataclasses.dataclass(frozen=True, slots=True)
class Position:
    """A place in which text may stand."""

    path: str
    make: Make
    pair: Callable[[Any, Any], Any] | None = None
    """Makes the body with two texts in neighbouring places of this kind."""
    is_json: bool = False
    """Any JSON may stand there."""


INSIDE: Final[Mapping[tuple[str, str], Sequence[type]]] = {
    ("ToolBody", "custom"): (CustomToolBody,),
    ("StoredResponsesBody", "input"): (
        input_items.MessageItem,
        input_items.CallItem,
        input_items.CallOutputItem,
        input_items.ReasoningItem,
    ),
    ("CompactBody", "input"): (input_items.MessageItem,),
    ("StoredResponsesBody", "tools"): (
        response_tools.FunctionTool,
        response_tools._Namespace,
        CustomToolBody,
        FileSearchTool,
    ),
    ("_Namespace", "tools"): (response_tools.FunctionTool,),
    ("MessagesBody", "tools"): (anthropic_tools._ToolBody,),
    ("PromptBody", "tools"): (anthropic_tools._ToolBody,),
}
"""What is decoded later where a body has any JSON."""

KINDS: Final[Mapping[str, Sequence[Mapping[str, Any]]]] = {
    "CompactBody": ({"input": "hi"},),
    "StoredResponsesBody": ({"input": "hi"},),
    "ToolBody": ({"type": "function"}, {"type": "custom"}),
    "ToolChoiceBody": ({"type": "function"}, {"type": "allowed_tools"}),
    "MessageItem": ({"type": "message", "role": "user"}, {"type": "message", "role": "assistant"}),
    "CallItem": tuple(
        {"type": f"{kind}_call", "call_id": "c1", "name": "f"}
        for kind in ("function", "custom_tool", "mcp", "code_interpreter", "local_shell", "apply_patch")
    ),
    "CallOutputItem": ({"type": "function_call_output", "call_id": "c1"},),
    "ReasoningItem": ({"type": "reasoning"},),
    "FunctionTool": ({"type": "function"},),
    "FileSearchTool": ({"type": "file_search", "vector_store_ids": ["vs_1"]},),
    "_Namespace": ({"type": "namespace", "tools": [{"type": "function", "name": "g"}]},),
    "DocumentBlock": ({"source": {"type": "text", "data": "hi"}},),
    "ResponseFormat": ({"type": "json_schema"},),
    "Prediction": ({"type": "content"},),
    "TextFormat": ({"type": "json_schema", "schema": {"type": "object"}},),
    "OutputFormat": ({"type": "json_schema"},),
    "CustomToolBody": ({"type": "custom"}, {}),
    "InputContentPart": ({"type": "input_text"}, {"type": "output_text"}, {"type": "refusal"}),
    "ContentPart": ({"type": "text"}, {"type": "refusal"}),
    "DocumentSource": ({"type": "text"}, {"type": "content"}),
    "ModerationPart": ({"type": "text"},),
    "Message": tuple({"role": role, "content": "hi"} for role in ("user", "assistant", "system", "developer", "tool")),
    "MessagesTurn": tuple({"role": role, "content": "hi"} for role in ("user", "assistant", "system")),
}
"""Values of other fields of a struct with which it means different things."""

UNSHOWN_ROUTES: Final[Mapping[str, str]] = {
    "/v1/messages/count_tokens": "counts tokens",
    "/v1/responses/input_tokens": "counts tokens",
    "/tokenize": "counts tokens",
    "/detokenize": "turns tokens into text",
    "/v1/moderations": "classifies, and blocks nothing",
    "/beta/litellm_basic_guardrail_api": "classifies, and blocks nothing",
    **dict.fromkeys(
        (route.path for route in STATE_ROUTES if route.method == "POST"),
        "stores what is screened in the prompts that have it",
    ),
}
"""Routes whose texts no model reads."""

_OF_GUIDE: Final = "guides the answer, which is screened"
_OF_CALLER: Final = "tells requests and callers apart"
_KIND: Final = "says what its neighbours are"
UNSHOWN: Final[Mapping[str, str]] = {
    r"models?(\[\])?|moderation\.model": "names models",
    r"stop(\.stop)?(\[\])?|stop_sequences\[\]": "ends the answer, whose text is screened together with it",
    r"logit_bias\.KEY": "a token's number",
    r"(response_format|structured_outputs|text\.format|output_config|output_format)\..*": _OF_GUIDE,
    r"guided_.*|sampling\.guide\..*": _OF_GUIDE,
    r"(.*\.)?tool_choice(\..*)?|function_call(\.name)?": "names a tool that is screened itself",
    r"prediction\..*|predicted_text": "an answer is only compared with it, and screened",
    r"guardrails\[\]": "names rules of the safety policy",
    r"user|safety_identifier|metadata\..*|client_metadata|prompt_cache_\w+|cache_salt": _OF_CALLER,
    r"request_id|session_key|fairness_id|resume_token|continuation_ticket": _OF_CALLER,
    r"priority_class|adapter_checksum": "must be known here",
    r"previous_response_id|at|conversation(\.id)?|prompt\..*": "names what is screened in the prompt",
    r"(.*\.)?(cache_control|signature|early_stopping|diagnostics|betas\[\]|output_schema)": "not used",
    r"messages\[\]\.content\[\]\.data|tools\[\]\.Namespace\.description": "not used",
    r"(.*\.)?allowed_callers\[\]": "not used",
    r"stop\.reasoning\..*": "tells reasoning and text of the answer apart",
    r"reasoning\.\w+|thinking\.type": "options of which models are told by their templates' own words",
    r"messages\[\]\.reasoning(\[\]|\.KEY|\.\*)": "only reasoning that is text is used",
    r"messages\[\]\.content\[\](\.content\[\])?\.(source\.(media_type|file_id|url)|file\..*)": (
        "names a file, whose text is screened in the prompt"
    ),
    r"messages\[\]\.content\[\](\.content\[\])?\.(image_url(\..*)?|source)|images\[\]\..*": (
        "an image, or names one: it is not screened"
    ),
    r"tools\[\]\.FileSearchTool\..*": "says what is searched; what is found is screened in the prompt",
    r"(.*\.)?(type|role)": _KIND,
    r"include\[\]|context_management\..*": "says what is answered",
    r"chat_template_kwargs\.KEY": "names a variable of the template",
}
"""Why text in these positions is not what a model reads."""


def why_unshown(path: str) -> str:
    """The reason why a model does not read the text of this position; "" if it does."""
    return next((why for pattern, why in UNSHOWN.items() if re.fullmatch(pattern, path)), "")


FILLED: Final[Mapping[str, Any]] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hi"}],
    "input": "hi",
    "prompt": "hi",
    "max_tokens": 4,
    "name": "f",
    "query": "hi",
    "documents": ["hi"],
    "text_1": "hi",
    "text_2": "hi",
    "type": "text",
    "schema": {"type": "object"},
    "input_schema": {"type": "object"},
    "mode": "auto",
}
"""Values for required fields."""


def http_positions() -> Iterator[tuple[str, Position]]:
    """The path of each route with a body, and a position in it."""
    for route in ROUTES:
        if route.body is not None and route.scope == "inference":
            for position in _of_struct(msgspec.inspect.type_info(route.body), ""):
                yield route.path, position


def grpc_positions() -> Iterator[Position]:
    """Those of a `Generate`; bodies are in protobuf's JSON."""
    yield from _of_message(GenerateRequest.DESCRIPTOR, "")


def _of_struct(info: Any, path: str, within: Sequence[type] = ()) -> Iterator[Position]:
    """`within`: the structs in which it stands. One that stands in itself has no other positions there."""
    if info.cls in within:
        return
    within = (*within, info.cls)
    name = info.cls.__name__
    for kind, field in itertools.product(KINDS.get(name, ({},)), info.fields):
        others = {other.encode_name: _filled(other) for other in info.fields if other.required} | dict(kind)
        if info.tag is not None:
            others[info.tag_field] = info.tag
        for inner in _of_type(field.type, (name, field.name), within):
            yield dataclasses.replace(
                inner,
                path=f"{path}{field.encode_name}{inner.path}",
                **_around(inner, lambda value, f=field.encode_name, o=others: {**o, f: value}),
            )


def _of_type(info: Any, place: tuple[str, str], within: Sequence[type]) -> Iterator[Position]:
    match info:
        case msgspec.inspect.StrType():
            yield Position("", lambda value: value)
        case msgspec.inspect.UnionType():
            for each in info.types:
                yield from _of_type(each, place, within)
        case msgspec.inspect.ListType():
            for inner in _of_type(info.item_type, place, within):
                yield dataclasses.replace(
                    inner,
                    path=f"[]{inner.path}",
                    make=lambda value, i=inner: [i.make(value)],
                    pair=(lambda a, b, both=inner.pair: [both(a, b)])
                    if inner.pair
                    else (lambda a, b, i=inner: [i.make(a), i.make(b)]),
                )
        case msgspec.inspect.DictType():
            yield Position(".KEY", lambda value: {value: "x"})
            for inner in _of_type(info.value_type, place, within):
                yield dataclasses.replace(
                    inner, path=f".*{inner.path}", **_around(inner, lambda value: {"shown": value})
                )
        case msgspec.inspect.StructType():
            yield from (dataclasses.replace(each, path=f".{each.path}") for each in _of_struct(info, "", within))
        case msgspec.inspect.AnyType() | msgspec.inspect.RawType():
            inside = INSIDE.get(place)
            if inside is None:
                yield Position("", lambda value: value, is_json=True)
            for struct in inside or ():
                yield from (
                    dataclasses.replace(each, path=f".{struct.__name__.strip('_')}.{each.path}")
                    for each in _of_struct(msgspec.inspect.type_info(struct), "")
                )
        case _:
            return


def _around(inner: Position, make: Make) -> dict[str, Any]:
    pair = inner.pair
    return {
        "make": lambda value: make(inner.make(value)),
        "pair": None if pair is None else lambda a, b: make(pair(a, b)),
    }


def _filled(field: Any) -> Any:
    if field.name in FILLED:
        return FILLED[field.name]
    if isinstance(field.type, msgspec.inspect.LiteralType):
        return field.type.values[0]
    return {msgspec.inspect.StrType: "x", msgspec.inspect.ListType: []}.get(type(field.type), 1)


def _of_message(message: Any, path: str) -> Iterator[Position]:
    for field in message.fields:
        others = _MESSAGES.get(message.name, ({},))
        if message is GenerateRequest.DESCRIPTOR and field.containing_oneof is None:
            others = [{**other, "conversation": {"messages": [{"role": "user", "content": "hi"}]}} for other in others]
        inner: Iterator[Position]
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            inner = _of_message(field.message_type, f"{path}{field.name}.")
        elif field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            inner = iter([Position(f"{path}{field.name}", lambda value: value)])
        else:
            continue
        for each, other in itertools.product(inner, others):
            made = each
            if field.is_repeated:
                made = dataclasses.replace(
                    each,
                    path=f"{path}{field.name}[]{each.path.removeprefix(path + field.name)}",
                    make=lambda value, e=each: [e.make(value)],
                    pair=(lambda a, b, both=each.pair: [both(a, b)])
                    if each.pair
                    else (lambda a, b, e=each: [e.make(a), e.make(b)]),
                )
            yield dataclasses.replace(made, **_around(made, lambda value, f=field.name, o=other: {**o, f: value}))


_MESSAGES: Final[Mapping[str, Sequence[Mapping[str, Any]]]] = {
    "Message": tuple({"role": role} for role in ("user", "assistant", "system", "tool")),
    "Tool": ({"name": "f"},),
    "GenerateRequest": ({"model": "tiny", "stop": {"max_tokens": 4}},),
    "ToolCall": ({"id": "c", "name": "f", "arguments": "{}"},),
}


# -- the table --------------------------------------------------------------------------------------------------------


def page_with_table(page: str) -> str:
    for name, table in (("positions", _table()), ("answer positions", answer_table())):
        begin, end = f"<!-- derived: {name} -->\n", "<!-- end -->"
        head, found, rest = page.partition(begin)
        assert found, f"docs/operate/safety.md has no {begin}"
        page = f"{head}{begin}\n{table}\n\n{end}{rest.partition(end)[2]}"
    return page


def _table() -> str:
    by_route: dict[str, dict[str, None]] = {}
    for route, position in http_positions():
        by_route.setdefault(f"`POST {route}`", {})[position.path] = None
    by_route[GENERATE] = {position.path: None for position in grpc_positions()}
    rows = ["| request | screened | no model reads it |", "|---|---|---|"]
    for route, paths in by_route.items():
        why = UNSHOWN_ROUTES.get(route.strip("`").removeprefix("POST "))
        if why is not None:
            rows.append(f"| {route} | | all: the call {why} |")
            continue
        reasons: dict[str, list[str]] = {}
        for path in paths:
            reasons.setdefault(why_unshown(path), []).append(path)
        screened = _named(reasons.pop("", []))
        unshown = "; ".join(f"{_named(named)} ({reason})" for reason, named in reasons.items())
        rows.append(f"| {route} | {screened} | {unshown} |")
    return "\n".join(rows)


def _named(paths: Sequence[str]) -> str:
    return ", ".join(f"`{path}`" for path in paths)


if __name__ == "__main__":
    PAGE.write_text(page_with_table(PAGE.read_text()))
