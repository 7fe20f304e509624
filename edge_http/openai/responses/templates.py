"""Prompts that a response names: the text of a stored template, with the values of its variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from edge_http.openai.responses.requests import PromptName
from kvloom.errors import invalid_argument
from kvloom_common.text.restored_text import VARIABLE

_FIELD: Final = "prompt.variables"


class RenderedPrompt(msgspec.Struct):
    """The part of the conversation that a template makes."""

    instructions: str | None
    items: list[msgspec.Raw]
    """Messages before all others."""
    echo: dict[str, Any]
    """The name, as the response repeats it, with the version that it has got."""


class PromptTemplate(msgspec.Struct):
    """One version of a prompt, as it is stored."""

    version: str
    instructions: str | None
    input: list[dict[str, Any]]
    variables: list[str]


def rendered(raw: bytes, named: PromptName) -> RenderedPrompt:
    """`raw`: the template as JSON. Values are put in as they are: what looks like a variable in them is none. Raises
    KvloomError (INVALID_ARGUMENT)."""
    template = msgspec.json.decode(raw, type=PromptTemplate)
    given = named.variables or {}
    values = {name: value if isinstance(value, str) else value.text for name, value in given.items()}
    _check(template, values)

    def filled(text: str) -> str:
        return VARIABLE.sub(lambda found: values[found[1]], text)

    items = [{**item, "content": _content(item.get("content"), filled)} for item in template.input]
    return RenderedPrompt(
        None if template.instructions is None else filled(template.instructions),
        [msgspec.Raw(msgspec.json.encode(item)) for item in items],
        {**msgspec.to_builtins(named), "version": template.version},
    )


def _check(template: PromptTemplate, values: Mapping[str, str]) -> None:
    missing = [name for name in template.variables if name not in values]
    if missing:
        raise invalid_argument(f"{_FIELD}: {', '.join(missing[:8])} must have a value.", _FIELD)
    for name in values:
        if name not in template.variables:
            raise invalid_argument(f"{_FIELD}: the prompt has no variable {name[:64]!r}.", _FIELD)


def _content(content: Any, filled: Any) -> Any:
    if isinstance(content, str):
        return filled(content)
    return [
        {**part, "text": filled(part["text"])} if isinstance(part.get("text"), str) else part for part in content or ()
    ]
