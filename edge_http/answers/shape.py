"""The shape of a response: the API whose format it has, and how the model's output is taken apart. It is stored with
resumable responses, so that another edge gives the rest of a response the same shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from edge_http.answers.joined_logprobs import JoinedLogprobs
from edge_http.answers.parsed_output import CheckedOutput, CountedOutputParser
from edge_http.anthropic.formatter import MessageOptions, MessagesFormatter
from edge_http.formatting.client_tools import NO_CLIENT_TOOLS, client_tools_of
from edge_http.formatting.response_formatter import Envelope, ResponseFormatter
from edge_http.openai.prompt_report import PromptReport
from edge_http.openai.response_formatters import ChatFormatter, CompletionFormatter, OpenAiFormatter
from edge_http.openai.responses.formatter import ResponsesFormatter
from edge_http.openai.responses.steady_formatter import RUN, SteadyFormatter
from kvloom.conversation.tools import Tool
from kvloom.v1.generation_pb2 import SamplingParams, StopConditions
from kvloom_common.parsers.output_parser import make_parser
from kvloom_common.parsers.spec import ParserSpec, ToolSchema
from kvloom_common.text.tokenizer import ModelTokenizer


def _do_nothing() -> None:
    pass


REPEATS_USAGE: Final = "repeats_usage"
"""An option: see ResponseFormatter."""
_PROMPT_FIELDS: Final = {"completion": "prompt", "responses": "input"}


class ResponseShape(msgspec.Struct, frozen=True, array_like=True):
    """Everything that a response's format depends on besides its envelope."""

    api: str
    """A key of FORMATS."""
    parser: ParserSpec | None = None
    """None: all output is text."""
    tools: list[ToolSchema] = []
    """The tools that the model may call."""
    options: dict[str, Any] = {}
    """The facts that the formatter needs of the request."""


def shape_of(api: str, parser: ParserSpec | None, tools: Sequence[Tool], **options: Any) -> ResponseShape:
    return ResponseShape(api, parser, [ToolSchema(tool.name, dict(tool.parameters)) for tool in tools], options)


def prompt_field_of(shape: ResponseShape) -> str:
    """The field of the API's bodies that has the prompt."""
    return _PROMPT_FIELDS.get(shape.api, "messages")


def parsed_outputs(
    shape: ResponseShape, num_choices: int, on_nonconforming: Callable[[], None] = _do_nothing
) -> list[CountedOutputParser]:
    """One for each choice; none if all output is text. `on_nonconforming` is called for each demanded call whose
    arguments do not conform to its tool's schema."""
    spec = shape.parser
    if spec is None:
        return []
    if spec.only_calls:
        parsers = [make_parser(spec, shape.tools) for _ in range(num_choices)]
        return [CheckedOutput(parser, shape.tools, on_nonconforming) for parser in parsers]
    return [
        CountedOutputParser(make_parser(spec, shape.tools), starts_in_reasoning=spec.starts_in_reasoning)
        for _ in range(num_choices)
    ]


def joined_logprobs(
    tokenizer: ModelTokenizer, num_choices: int, sampling: SamplingParams, stop: StopConditions
) -> list[JoinedLogprobs]:
    """One for each choice of a request with stop strings whose tokens have log-probabilities; none for others."""
    if not (stop.stop and sampling.HasField("logprobs")):
        return []
    return [JoinedLogprobs(tokenizer, sampling.shown_special_token_ids) for _ in range(num_choices)]


def formatter_of(
    shape: ResponseShape, envelope: Envelope, tokenizer: ModelTokenizer, report: PromptReport | None = None
) -> ResponseFormatter:
    """`report`: what the answer repeats of its prompt."""
    formatter = FORMATS[shape.api](envelope, tokenizer, shape.options)
    if report is not None and isinstance(formatter, OpenAiFormatter):
        formatter.repeat_prompt(report)
    if REPEATS_USAGE in shape.options:
        formatter.repeats_usage = True
    return formatter


def _chat(envelope: Envelope, tokenizer: ModelTokenizer, options: Mapping[str, Any]) -> ResponseFormatter:
    return ChatFormatter(
        envelope,
        tokenizer,
        has_legacy_functions=bool(options.get("has_legacy_functions")),
        client_tools=client_tools_of(options) if "client_tools" in options else NO_CLIENT_TOOLS,
    )


def _completion(envelope: Envelope, tokenizer: ModelTokenizer, options: Mapping[str, Any]) -> ResponseFormatter:  # noqa: ARG001
    return CompletionFormatter(envelope, tokenizer)


def _messages(envelope: Envelope, tokenizer: ModelTokenizer, options: Mapping[str, Any]) -> ResponseFormatter:  # noqa: ARG001
    return MessagesFormatter(envelope, msgspec.convert(options, MessageOptions))


def _responses(envelope: Envelope, tokenizer: ModelTokenizer, options: Mapping[str, Any]) -> ResponseFormatter:
    return (SteadyFormatter if RUN in options else ResponsesFormatter)(envelope, tokenizer, options)


FORMATS: Final[Mapping[str, Callable[[Envelope, ModelTokenizer, Mapping[str, Any]], ResponseFormatter]]] = {
    "chat": _chat,
    "completion": _completion,
    "responses": _responses,
    "messages": _messages,
}
"""The formatter of each API."""
