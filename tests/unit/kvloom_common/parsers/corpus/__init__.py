"""Outputs of models, written by hand after the public chat templates, with the events that they must become.

A file per family: {"spec": {...}, "cases": [{"name", "text", "events"}, ...]}. Events are short lists: ["text", "..."],
["reasoning", "..."], ["call", NAME, ARGUMENTS] for a call that begins and ends, with all of its arguments.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvloom_common.parsers.events import Event, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallEnd, ToolCallStart
from kvloom_common.parsers.spec import ParserSpec, ToolSchema

FOLDER = Path(__file__).parent
TOOLS = (
    ToolSchema(
        "get_weather",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "metric": {"type": "boolean"},
                "limit": {"type": ["number", "null"]},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "tags": {"type": "array", "items": {"type": "string"}},
                "options": {"type": "object"},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
        },
    ),
    ToolSchema("get_time"),
    ToolSchema("write-file_2", {"type": "object", "properties": {"content": {"type": "string"}}}),
)


@dataclass(frozen=True)
class Case:
    family: str
    name: str
    spec: ParserSpec
    text: str
    events: list[Event]


@functools.cache
def cases() -> list[Case]:
    found: list[Case] = []
    for path in sorted(FOLDER.glob("*.json")):
        content = json.loads(path.read_text("utf-8"))
        spec = ParserSpec(**content["spec"])
        found += [
            Case(path.stem, case["name"], spec, case["text"], _events(case["events"])) for case in content["cases"]
        ]
    return found


@functools.cache
def texts(spec: ParserSpec) -> list[str]:
    """What this parser is tried on: the outputs of its families, and a few of all others."""
    own = [case.text for case in cases() if case.spec.tools == spec.tools or case.spec.reasoning == spec.reasoning]
    return own + [case.text for case in cases()[::9]] or [""]


def _events(described: list[list[Any]]) -> list[Event]:
    events: list[Event] = []
    num_calls = 0
    for kind, *values in described:
        if kind == "text":
            events.append(TextDelta(values[0]))
        elif kind == "reasoning":
            events.append(ReasoningDelta(values[0]))
        else:
            name, arguments = values
            events += [ToolCallStart(num_calls, name), ToolCallArguments(num_calls, arguments), ToolCallEnd(num_calls)]
            num_calls += 1
    return events
