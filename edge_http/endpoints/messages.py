"""POST /v1/messages and POST /v1/messages/count_tokens: Anthropic's requests for answers, and for the size of a
prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec
from aiohttp import web

from edge_http.answers.shape import shape_of
from edge_http.anthropic.formatter import MessageOptions
from edge_http.anthropic.messages import chat_messages, is_continued
from edge_http.anthropic.requests import MessagesBody, PromptBody, check_version, decode_count_tokens, decode_messages
from edge_http.anthropic.settings import (
    max_tokens_of,
    omits_thinking,
    output_guide,
    sampling_of,
    stop_conditions,
    template_options,
    thinks,
)
from edge_http.anthropic.tools import MessageTools, tools_of
from edge_http.edge import Edge
from edge_http.endpoints.answering import read_prompt_body
from edge_http.endpoints.file_inputs import read_documents
from edge_http.endpoints.generation_job import GenerationJob
from edge_http.endpoints.image_inputs import see_blocks
from edge_http.endpoints.masking import NOTHING_HIDDEN, masked
from edge_http.endpoints.model_choice import has_images, last_user_text
from edge_http.endpoints.ownership import owner_of
from edge_http.endpoints.routed import GenerationApi, serve_generation
from edge_http.formatting.body_guide import BodyGuide, with_calls
from edge_http.formatting.client_tools import left_out_headers
from edge_http.openai.prompt import PromptInput, chat_prompt
from edge_http.side_call import side_call
from edge_http.wire.body import digest_of
from edge_http.wire.headers import ANTHROPIC_REQUEST_ID, ANTHROPIC_VERSION, request_id, session_key
from edge_http.wire.json_response import json_response
from edge_http.wire.request_headers import headers_of
from kvloom.errors import KvloomError, invalid_argument
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import SamplingParams
from kvloom.v1.router_service_pb2 import TIER_INTERACTIVE, GenerateRequest
from kvloom_common.conversation.call_guide import ToolPlace
from kvloom_common.conversation.model_output import prompted
from kvloom_common.conversation.tool_plan import ToolPlan, plan_tools
from kvloom_common.models.model_routes import Feature
from kvloom_common.models.served_model import ServedModel
from kvloom_common.parsers.sniff import starts_in_reasoning
from kvloom_common.parsers.spec import ParserSpec
from kvloom_common.text.prompt_images import NO_MARKS


class _Prepared(NamedTuple):
    """The results of the part of a body that determines the prompt."""

    model: ServedModel
    prompt: PromptInput
    tools: MessageTools
    plan: ToolPlan
    parser: ParserSpec | None
    guide: BodyGuide | None
    originals: Mapping[str, str]


async def messages(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    """Serve POST /v1/messages."""
    check_version(request.headers.get(ANTHROPIC_VERSION))
    return await serve_generation(edge, request, _API)


async def count_tokens(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    """Serve POST /v1/messages/count_tokens."""
    check_version(request.headers.get(ANTHROPIC_VERSION))
    caller = edge.callers.caller_of(request)
    with edge.admission.admit(caller), edge.admission.bodies.lease(caller) as lease:
        raw = await read_prompt_body(edge, request, lease)
        body = decode_count_tokens(raw, edge.config.max_messages, edge.fields, request.headers)
        model = edge.models.find_usable(request, body.model)
        async with side_call(edge, request, len(raw)) as call:
            prepared = await _prepared(edge, request, body, model)
            call.num_tokens = len(prepared.prompt.token_ids)
        response = json_response({"input_tokens": len(prepared.prompt.token_ids)})
        response.headers[ANTHROPIC_REQUEST_ID] = request_id(request)
        return response


async def _job(
    edge: Edge, request: web.BaseRequest, raw: bytes, body: MessagesBody, model: ServedModel
) -> GenerationJob:
    """Validate and tokenize a body. Raises KvloomError."""
    max_tokens = max_tokens_of(body)
    stop_conditions(body, max_tokens)  # refuses before anything is tokenized
    prepared = await _prepared(edge, request, body, model, guardrails=body.guardrails)
    num_prompt_tokens = len(prepared.prompt.token_ids)
    room = _room(edge.models.window(prepared.model.name), num_prompt_tokens)
    options = MessageOptions(
        is_text=prepared.parser is None,
        is_single_call=prepared.tools.is_single_call,
        omits_thinking=omits_thinking(body),
        is_cut_to_window=room is not None and room < max_tokens,
    )
    return GenerationJob(
        operation="chat",
        id_prefix="msg_",
        model=prepared.model,
        prompts=[prepared.prompt],
        prompt_sizes=[num_prompt_tokens],
        asked=headers_of(request),
        wanted=GenerateRequest(
            sampling=sampling_of(body, None if prepared.guide is None else prepared.guide.guide),
            stop=stop_conditions(body, max_tokens if room is None else min(room, max_tokens)),
            n=1,
            session_key=session_key(request, None),
            tier=TIER_INTERACTIVE,
            guardrails=body.guardrails,
            safety_identifier=None if body.metadata is None else body.metadata.user_id,
        ),
        max_tokens_field="max_tokens",
        stream=bool(body.stream),
        include_usage=False,
        body_digest=digest_of(raw),
        headers={ANTHROPIC_REQUEST_ID: request_id(request), **left_out_headers(prepared.tools.left_out)},
        shape=shape_of("messages", prepared.parser, prepared.plan.tools, **msgspec.structs.asdict(options)),
        guide_field="" if prepared.guide is None else prepared.guide.field,
        originals=prepared.originals,
    )


async def _prepared(
    edge: Edge,
    request: web.BaseRequest,
    body: PromptBody,
    model: ServedModel,
    guardrails: Sequence[str] | None = None,
) -> _Prepared:
    """Raises KvloomError."""
    if edge.orchestrator is not None:
        await read_documents(edge.orchestrator, owner_of(edge, request), body.messages, edge.fetcher)
    seen = await see_blocks(edge, request, body.messages, model)
    tools = tools_of(body)
    plan = plan_tools(
        tools.tools,
        tools.choice,
        model=model.output,
        place=ToolPlace(at="", schema="input_schema", numbers=tools.numbers),
    )
    form = output_guide(body)
    guide = with_calls(form, plan, "tools")
    chat, continues = chat_messages(body, NO_MARKS if seen is None else seen.marks), is_continued(body)
    if continues and (guide is not None or thinks(body)):
        message = "messages: an answer that begins with text cannot be one with a schema, a demanded call or thinking."
        raise invalid_argument(message, "messages")
    originals, scope = NOTHING_HIDDEN, edge.callers.cache_scope_of(request)
    if edge.config.masks_prompts:
        named = session_key(request, None)
        chat, originals = await masked(edge, request, chat, guardrails, named, SamplingParams())
    prompt, rendered = await chat_prompt(
        chat,
        plan.tools,
        template_options(body),
        model.tokenizer,
        edge.models.generation_window(model.name),
        scope=scope,
        is_continued=continues,
        images=None if seen is None else seen.images,
    )
    parser = None if form is not None and guide is form else prompted(plan.parser, rendered)
    if continues and parser is not None:
        starts = starts_in_reasoning(parser, rendered)
        parser = dataclasses.replace(parser, starts_in_reasoning=starts)
    return _Prepared(model, prompt, tools, plan, parser, guide, originals)


def _room(window: int, num_prompt_tokens: int) -> int | None:
    """How many tokens an answer may have; None if the window is not known. Raises CONTEXT_LENGTH_EXCEEDED."""
    if not window:
        return None
    if num_prompt_tokens >= window:
        message = f"prompt is too long: {num_prompt_tokens} tokens > {window - 1} maximum"  # clients look for this
        raise KvloomError(ErrorReason.ERROR_REASON_CONTEXT_LENGTH_EXCEEDED, message)
    return window - num_prompt_tokens


def _features(body: MessagesBody) -> frozenset[Feature]:
    found: set[Feature] = set()
    if body.tools:
        found.add("tools")
    if output_guide(body) is not None:
        found.add("schema")
    if has_images(body.messages):
        found.add("vision")
    return frozenset(found)


_API: Final[GenerationApi[MessagesBody]] = GenerationApi(
    decode=lambda edge, request, raw: decode_messages(raw, edge.config.max_messages, edge.fields, request.headers),
    make_job=_job,
    features=_features,
    max_answer_tokens=lambda body: body.max_tokens,
    user_text=lambda body: last_user_text(body.messages),
    is_batch=lambda _: False,
)
