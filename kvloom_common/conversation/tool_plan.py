"""Plans what a request with tools means for the model: the tools in its prompt, the guide of its output, and the parser
that finds the calls in it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from kvloom.conversation.tools import AUTO, Tool, ToolChoice
from kvloom.errors import KvloomError, unsupported
from kvloom.guide import check_guide
from kvloom.v1.generation_pb2 import Guide, StructuralTag, StructuralTags
from kvloom_common.conversation.call_guide import IN_FUNCTIONS, ToolPlace, call_guide, followed
from kvloom_common.parsers.spec import ParserSpec


class ToolPlan(NamedTuple):
    """How a request is prompted, guided and read."""

    tools: Sequence[Tool] = ()
    """The tools that the prompt describes."""
    guide: Guide | None = None
    """Set when a call is certain, or a tool is strict."""
    demands_call: bool = False
    """The guide has no room for another form of the answer."""
    parser: ParserSpec | None = None
    """None: the output is text."""
    place: ToolPlace = IN_FUNCTIONS

    def or_form(self, schema: str) -> Guide | None:
        """The guide of an answer that may be JSON which conforms to this schema, too. None: it can be nothing else.
        Raises KvloomError (INVALID_ARGUMENT) for a strict tool."""
        if not self.tools or self.demands_call or self.parser is None:
            return None
        return form_or_calls(schema, self.tools, self.parser.tools, self.place)


_PLAIN: Final = ToolPlan()


def plan_tools(
    tools: Sequence[Tool],
    choice: ToolChoice = AUTO,
    *,
    is_parallel: bool = False,
    model: ParserSpec | None = None,
    place: ToolPlace = IN_FUNCTIONS,
) -> ToolPlan:
    """`model` says how the model writes calls and reasoning when it is free to. `is_parallel`: several calls are
    wanted, where a call is certain. The tools and the choice have been checked. `place` names a tool's fields. Raises
    KvloomError: UNSUPPORTED_PARAMETER for strict tools of a model whose calls cannot be guided, INVALID_ARGUMENT for a
    strict tool whose schema cannot be."""
    reasoning = dataclasses.replace(model, tools=None) if model is not None and model.reasoning else None
    if not tools or choice.mode == "none":
        return ToolPlan(parser=reasoning) if reasoning is not None else _PLAIN
    if choice.mode == "auto":
        guide = strict_guide(tools, model.tools if model is not None else None, place)
        return ToolPlan(tools, guide, parser=model, place=place)
    allowed = [tool for tool in tools if choice.mode == "required" or tool.name == choice.name]
    first = next((number for number, tool in enumerate(tools) if tool in allowed), 0)
    is_array = is_parallel and choice.mode == "required"
    guide = call_guide(allowed, is_parallel=is_array, place=place, first_number=first)
    return ToolPlan(tools, guide, demands_call=True, parser=ParserSpec(tools="json", only_calls=True))


class _Form(NamedTuple):
    """How a family writes a call."""

    trigger: str
    begin: Callable[[str], str]
    """Returns the text that stands before the arguments of a tool."""
    end: str


_FORMS: Final[Mapping[str, _Form]] = {
    "hermes": _Form(
        "<tool_call>", lambda name: f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": ', "}\n</tool_call>"
    ),
    "deepseek_v3": _Form(
        "<｜tool▁call▁begin｜>",
        lambda name: f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
        "\n```<｜tool▁call▁end｜>",
    ),
    "deepseek_v31": _Form(
        "<｜tool▁call▁begin｜>", lambda name: f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    ),
}
_CALL_MARKERS: Final[Mapping[str, str]] = {
    "deepseek_v3": "<｜tool▁calls▁begin｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜>",
    "glm45": "<tool_call>",
    "granite": "<|tool_call|>",
    "kimi_k2": "<|tool_calls_section_begin|>",
    "llama3_json": "<|python_tag|>",
    "llama4_pythonic": "<|python_start|>",
    "mistral": "[TOOL_CALLS]",
    "phi4": "<|tool_call|>",
    "qwen3_coder": "<tool_call>",
}
"""The calls of a family begin with this, where no JSON does."""
_SAME_FORM: Final[Mapping[str, str]] = {"deepseek_r1": "deepseek_v3"}

_ANY_ARGUMENTS: Final = '{"type": "object"}'


def strict_guide(tools: Sequence[Tool], family: str | None, place: ToolPlace = IN_FUNCTIONS) -> Guide | None:
    """The guide for these tools, of which those that are not strict may be called with any arguments; None if no tool
    is strict, or the family is None: then nothing is a call. `place` names a tool's fields. Raises KvloomError:
    UNSUPPORTED_PARAMETER for a family whose calls cannot be guided, INVALID_ARGUMENT for a schema that cannot be."""
    strict = next((number for number, tool in enumerate(tools) if tool.strict), None)
    if strict is None or not family:
        return None
    form = _FORMS.get(_SAME_FORM.get(family, family))
    if form is None:
        field = place.of(strict, "strict")
        message = f"{field}: calls in the format of {family!r} cannot be guided; with tool_choice required they are."
        raise unsupported(message, field)
    return Guide(structural_tags=StructuralTags(tags=_tags(tools, form, place), triggers=[form.trigger]))


def form_or_calls(schema: str, tools: Sequence[Tool], family: str | None, place: ToolPlace) -> Guide | None:
    """The guide of an answer that is JSON which conforms to this schema, or calls. None for a family whose calls no
    guide can tell from JSON, or whose strict tools it cannot follow, and where all together is too large."""
    family = _SAME_FORM.get(family or "", family or "")
    form = _FORMS.get(family)
    if form is not None and family not in _CALL_MARKERS:
        tags, trigger = _tags(tools, form, place), form.trigger
    elif family in _CALL_MARKERS and not any(tool.strict for tool in tools):
        trigger = _CALL_MARKERS[family]
        tags = [StructuralTag(begin=trigger)]
    else:
        return None
    found = Guide(structural_tags=StructuralTags(tags=tags, triggers=[trigger], json_schema=schema))
    try:
        check_guide(found, place.tools)
    except KvloomError:
        return None
    return found


def _tags(tools: Sequence[Tool], form: _Form, place: ToolPlace) -> list[StructuralTag]:
    return [
        StructuralTag(begin=form.begin(tool.name), json_schema=_arguments(tool, number, place), end=form.end)
        for number, tool in enumerate(tools)
    ]


def _arguments(tool: Tool, number: int, place: ToolPlace) -> str:
    if not tool.strict:
        return _ANY_ARGUMENTS
    [found] = followed([tool], place, number)
    return json.dumps(found.whole(), ensure_ascii=False)
