"""The families of parsers by name: those of this package, and plugins. A family's module is loaded when it is used.

A plugin is an entry point of the group `kvloom.parsers`. Its name is that of a tool family, or `reasoning.` and that of
a reasoning family; its object is the family: a class, or anything else that is called with the tools (or with
`starts_in_reasoning`) and returns an `OutputParser`. It may have `markers`, as the families of this package do. A
plugin cannot replace a family of this package.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from kvloom_common.parsers.core.text_input import Markers
from kvloom_common.parsers.spec import OutputParser, ParserSpec, ToolSchema
from kvloom_common.plugins import PluginError, PluginGroup

_REASONING_PREFIX: Final = "reasoning."
_TOOLS: Final = {
    "deepseek_r1": "deepseek:DeepseekV3Parser",
    "deepseek_v3": "deepseek:DeepseekV3Parser",
    "deepseek_v31": "deepseek:DeepseekV31Parser",
    "glm45": "glm45:Glm45Parser",
    "granite": "json_calls:GraniteParser",
    "harmony": "harmony:HarmonyParser",
    "hermes": "json_calls:HermesParser",
    "json": "json_calls:PlainJsonParser",
    "kimi_k2": "kimi_k2:KimiK2Parser",
    "llama3_json": "json_calls:Llama3JsonParser",
    "llama4_pythonic": "pythonic:Llama4PythonicParser",
    "mistral": "json_calls:MistralParser",
    "phi4": "json_calls:Phi4Parser",
    "pythonic": "pythonic:PythonicParser",
    "qwen3_coder": "qwen3_coder:Qwen3CoderParser",
}
_OPENERS: Final = {
    **dict.fromkeys(_TOOLS, "<"),
    "json": "{[",
    "llama3_json": "{<",
    "llama4_pythonic": "<[",
    "mistral": "[",
    "phi4": "f<",
    "pythonic": "[",
}
"""By family, the characters with one of which the first call begins, if it is not at the beginning of the output."""
_REASONING: Final = {
    "deepseek_r1": "marked:DeepseekR1ReasoningParser",
    "granite": "marked:GraniteReasoningParser",
    "harmony": "",  # the tool family's parser does both
    "kimi": "marked:KimiReasoningParser",
    "mistral": "marked:MistralReasoningParser",
    "qwen3": "marked:ThinkParser",
}

PARSERS: Final = PluginGroup(
    "kvloom.parsers", "parser", (*_TOOLS, *(_REASONING_PREFIX + family for family in _REASONING))
)


class ToolFamily(Protocol):
    markers: tuple[str, ...]

    def __call__(self, tools: Sequence[ToolSchema]) -> OutputParser: ...


class ReasoningFamily(Protocol):
    markers: tuple[str, ...]

    def __call__(self, starts_in_reasoning: bool) -> OutputParser: ...


@functools.cache
def tool_family(name: str) -> ToolFamily:
    """Raises ValueError, which names the families that exist. Every request asks for its family, and to look for a
    plugin takes milliseconds."""
    if name in _TOOLS:
        return _load("tools", _TOOLS[name])
    if name not in tool_families():
        raise PluginError(_unknown("tool-call", name, tool_families()))
    return PARSERS.load(name)


@functools.cache
def reasoning_family(name: str) -> ReasoningFamily:
    """Raises ValueError, which names the families that exist."""
    if name == "harmony":
        return _load("tools", _TOOLS[name])
    if name in _REASONING:
        return _load("reasoning", _REASONING[name])
    if name not in reasoning_families():
        raise PluginError(_unknown("reasoning", name, reasoning_families()))
    return PARSERS.load(_REASONING_PREFIX + name)


def harmony_parser(tools: Sequence[ToolSchema], *, with_calls: bool) -> OutputParser:
    """Harmony's channels hold both calls and reasoning: one parser reads both."""
    family: Any = _load("tools", _TOOLS["harmony"])
    return family(tools, with_calls=with_calls)


def tool_families() -> list[str]:
    """The names that exist, plugins among them."""
    return [name for name in PARSERS.names() if not name.startswith(_REASONING_PREFIX)]


def reasoning_families() -> list[str]:
    """The names that exist, plugins among them."""
    names = PARSERS.names()
    return [name.removeprefix(_REASONING_PREFIX) for name in names if name.startswith(_REASONING_PREFIX)]


def markers(spec: ParserSpec) -> tuple[str, ...]:
    """The strings that a parser of these families must see in the text even where they are special tokens."""
    found: tuple[str, ...] = ()
    if spec.reasoning:
        found += tuple(getattr(reasoning_family(spec.reasoning), "markers", ()))
    if spec.tools:
        found += tuple(getattr(tool_family(spec.tools), "markers", ()))
    return tuple(dict.fromkeys(found))


def openers(family: str) -> str:
    """The characters with one of which the first call behind some text begins; "": any."""
    return _OPENERS.get(family, "")


def reasoning_span(name: str) -> tuple[Sequence[str], Sequence[str], bool]:
    """Returns the markers that begin the reasoning of a family at the beginning of an answer, those that end it, and
    True when every answer begins inside it. They are empty for families of plugins that do not say it."""
    family = reasoning_family(name)
    pairs: Mapping[str, Markers] = getattr(family, "pairs", {})
    return (
        list(pairs),
        list(dict.fromkeys(end for ends in pairs.values() for end in ends.strings)),
        bool(getattr(family, "begins_inside", False)),
    )


def _load(folder: str, place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(f"kvloom_common.parsers.{folder}.{module}"), name)


def _unknown(kind: str, name: str, families: Sequence[str]) -> str:
    return f"There is no family of {kind} parsers named {name!r}. There are: {', '.join(families)}."
