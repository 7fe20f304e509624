"""Plans what a request with tools means for the model: the tools in its prompt, the guide of its output, and the parser
that finds the calls in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvloom.conversation.tools import AUTO, Tool, ToolChoice
from kvloom.v1.generation_pb2 import Guide
from kvloom_common.conversation.call_guide import IN_FUNCTIONS, ToolPlace, call_guide
from kvloom_common.conversation.call_tags import form_or_calls, strict_guide
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
