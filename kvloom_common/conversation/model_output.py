"""How a model writes tool calls and reasoning, and the ids of its calls."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from kvloom.conversation.tools import Tool
from kvloom.v1.generation_pb2 import SamplingParams, StopConditions
from kvloom.v1.router_service_pb2 import OutputForm
from kvloom_common.config import ConfigError, ModelConfig
from kvloom_common.parsers import registry
from kvloom_common.parsers.output_parser import make_parser
from kvloom_common.parsers.sniff import sniff, starts_in_reasoning
from kvloom_common.parsers.spec import OutputParser, ParserSpec, ToolSchema
from kvloom_common.text.chat_template import read_json
from kvloom_common.text.tokenizer import ModelTokenizer

PLAIN_TEMPLATE_TOOLS: Final = "hermes"
"""The family of calls that kvloom describes to models whose template knows no tools (plain_messages.py)."""


def model_output(config: ModelConfig, folder: Path | None, tokenizer: ModelTokenizer) -> ParserSpec:
    """The families of a model: those that its configuration names, and otherwise those that its chat template shows.
    `folder` has its config.json. Raises ConfigError."""
    template = tokenizer.template
    found = ParserSpec()
    if template is not None:
        model_type = read_json(folder / "config.json").get("model_type") if folder is not None else None
        found = sniff(template.source, tokenizer.special_tokens, model_type if isinstance(model_type, str) else "")
        if not template.knows_tools:
            found = dataclasses.replace(found, tools=PLAIN_TEMPLATE_TOOLS)
    tools, reasoning = config.tool_parser, config.reasoning_parser
    found = ParserSpec(
        tools=found.tools if tools == "auto" else _named(tools),
        reasoning=found.reasoning if reasoning == "auto" else _named(reasoning),
        starts_in_reasoning=found.starts_in_reasoning and reasoning == "auto",
    )
    try:
        registry.markers(found)  # loads the families
    except ValueError as error:
        raise ConfigError(f"model: {error}") from error
    return found


def output_form(spec: ParserSpec | None, tools: Iterable[Tool | ToolSchema]) -> OutputForm | None:
    """The message by which calls of these tools are found; None if none are."""
    if spec is None or not spec.tools:
        return None
    return OutputForm(
        tools=spec.tools,
        reasoning=spec.reasoning,
        starts_in_reasoning=spec.starts_in_reasoning,
        only_calls=spec.only_calls,
        tool_names=[tool.name for tool in tools],
    )


def parser_of(form: OutputForm) -> OutputParser:
    """A parser that finds these calls. Raises ValueError for a family that does not exist."""
    spec = ParserSpec(form.tools, form.reasoning, form.starts_in_reasoning, form.only_calls)
    return make_parser(spec, [ToolSchema(name) for name in form.tool_names])


def prompted(spec: ParserSpec | None, prompt: str) -> ParserSpec | None:
    """The families for the answer to this rendered prompt, which may end inside the reasoning."""
    if spec is None or not spec.reasoning or spec.starts_in_reasoning or not starts_in_reasoning(spec, prompt):
        return spec
    return dataclasses.replace(spec, starts_in_reasoning=True)


def fit_to_parser(
    sampling: SamplingParams, stop: StopConditions, spec: ParserSpec | None, tokenizer: ModelTokenizer
) -> None:
    """Have the shard show the special tokens by which a parser of these families finds its way, and look for stop
    strings behind the reasoning only."""
    if spec is not None and spec.reasoning and stop.stop:
        openings, closings, begins_inside = registry.reasoning_span(spec.reasoning)
        if closings:
            stop.reasoning.begins_inside = begins_inside or spec.starts_in_reasoning
            stop.reasoning.openings[:] = openings
            stop.reasoning.closings[:] = closings
    if spec is not None:
        shown = sampling.shown_special_token_ids
        shown.extend([each for each in tokenizer.special_token_ids(registry.markers(spec)) if each not in shown])


def _named(family: str) -> str | None:
    return None if family == "none" else family


CALL_ID_PREFIX: Final = "call_"
_NUM_DIGITS: Final = 24


def tool_call_id(answer_id: str, choice: int, number: int, prefix: str = CALL_ID_PREFIX) -> str:
    """The id of a choice's n-th call. It follows from the id of the response or request, so that a process which
    continues an answer uses the same one."""
    digest = hashlib.blake2b(f"{answer_id}/{choice}/{number}".encode(), digest_size=_NUM_DIGITS // 2)
    return prefix + digest.hexdigest()
