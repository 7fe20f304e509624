"""POST /v1/chat/completions and POST /v1/completions: OpenAI's requests for answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from aiohttp import web

from edge_http.answers.shape import REPEATS_USAGE, shape_of
from edge_http.edge import Edge
from edge_http.endpoints.file_inputs import read_chat_files
from edge_http.endpoints.generation_job import GenerationJob
from edge_http.endpoints.image_inputs import see_chat_images
from edge_http.endpoints.masking import NOTHING_HIDDEN, masked
from edge_http.endpoints.model_choice import has_images, last_user_text
from edge_http.endpoints.moderating import moderation_of
from edge_http.endpoints.ownership import owner_of
from edge_http.endpoints.routed import GenerationApi, serve_generation
from edge_http.endpoints.stored import generate_stored, keeping_chat
from edge_http.formatting.body_guide import with_calls
from edge_http.formatting.client_tools import left_out_headers, options_of
from edge_http.openai.guide import guide_of
from edge_http.openai.messages import chat_messages
from edge_http.openai.prompt import chat_prompt, completion_prompts, predicted_tokens, truncated
from edge_http.openai.prompt_report import prompt_report
from edge_http.openai.requests import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    StreamOptions,
    decode_chat,
    decode_completion,
)
from edge_http.openai.sampling import (
    DEFAULT_COMPLETION_MAX_TOKENS,
    chat_max_tokens,
    chat_sampling,
    completion_max_tokens,
    completion_sampling,
    num_choices,
    show_special_tokens,
    stop_conditions,
    tier_of,
)
from edge_http.openai.tools import place_of, tools_of
from edge_http.wire.body import digest_of
from edge_http.wire.headers import session_key
from edge_http.wire.request_headers import headers_of
from kvloom.conversation.json_depth import check_depth
from kvloom.errors import invalid_argument, unsupported
from kvloom.v1.router_service_pb2 import TIER_BATCH, GenerateRequest
from kvloom_common.conversation.call_guide import IN_FUNCTIONS
from kvloom_common.conversation.model_output import prompted
from kvloom_common.conversation.tool_plan import plan_tools
from kvloom_common.models.model_routes import Feature
from kvloom_common.models.served_model import ServedModel
from kvloom_common.text.prompt_images import NO_MARKS

MAX_OPTIONS_DEPTH: Final = 32


async def chat_completions(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    """Serve POST /v1/chat/completions."""
    return await serve_generation(edge, request, _CHAT if edge.orchestrator is None else _STORED_CHAT)


async def completions(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    """Serve POST /v1/completions."""
    return await serve_generation(edge, request, _COMPLETION)


async def _chat_job(
    edge: Edge, request: web.BaseRequest, raw: bytes, body: ChatBody, model: ServedModel
) -> GenerationJob:
    """Validate and tokenize a body. Raises KvloomError."""
    n = num_choices(body)
    given = tools_of(body)
    place = place_of(given) if given.tools else IN_FUNCTIONS
    plan = plan_tools(given.tools, given.choice, is_parallel=given.is_parallel, model=model.output, place=place)
    guide = with_calls(guide_of(body), plan, place.tools)
    max_tokens, max_tokens_field = chat_max_tokens(body)
    sampling, stop = chat_sampling(body, guide), stop_conditions(body, max_tokens)
    seen = await see_chat_images(edge, request, body.messages, model)
    messages, originals = chat_messages(body.messages, NO_MARKS if seen is None else seen.marks), NOTHING_HIDDEN
    if edge.config.masks_prompts:
        conversation = session_key(request, body.prompt_cache_key)
        messages, originals = await masked(edge, request, messages, body.guardrails, conversation, sampling)
    window = edge.models.generation_window(model.name)
    scope, options = edge.callers.cache_scope_of(request), template_options(body)
    prompt, rendered = await chat_prompt(
        messages,
        plan.tools,
        options,
        model.tokenizer,
        window,
        scope=scope,
        is_continued=is_continued(body),
        images=None if seen is None else seen.images,
    )
    if seen is not None and body.prompt_logprobs is not None:
        raise unsupported("prompt_logprobs: the tokens of images have no log-probabilities.", "prompt_logprobs")
    if body.truncate_prompt_tokens is not None:
        prompt = truncated(prompt, body.truncate_prompt_tokens, window, max_tokens)
    if body.skip_special_tokens is False:
        show_special_tokens(sampling, model.tokenizer)
    if body.prediction is not None:
        predicted = await predicted_tokens(body.prediction, model.tokenizer, window, scope=scope)
        sampling.predicted_token_ids.extend(predicted)
    parser = prompted(plan.parser, rendered)
    report = prompt_report(body, sampling, [prompt], n)
    # Python calls with more than 15 keywords are slow.
    return GenerationJob(
        "chat",
        "chatcmpl-",
        [prompt],
        [len(prompt.token_ids)],
        asked=headers_of(request),
        wanted=GenerateRequest(
            sampling=sampling,
            stop=stop,
            n=n,
            session_key=session_key(request, body.prompt_cache_key),
            tier=tier_of(body),
            guardrails=body.guardrails,
            safety_identifier=body.safety_identifier,
        ),
        model=model,
        max_tokens_field=max_tokens_field,
        stream=bool(body.stream),
        include_usage=_includes_usage(body),
        service_tier=body.service_tier or "",
        body_digest=digest_of(raw),
        shape=shape_of(
            "chat",
            parser,
            plan.tools,
            has_legacy_functions=given.has_legacy_functions,
            **(options_of(given.client_tools) if given.client_tools else {}),
            **(_usage_options(body.stream_options) if body.stream_options is not None else {}),
        ),
        headers=left_out_headers(given.left_out) if given.left_out else {},
        guide_field="" if guide is None else guide.field,
        prompt_report=report,
        moderation=None if body.moderation is None else moderation_of(body.moderation, messages),
        originals=originals,
    )


async def _stored_chat_job(
    edge: Edge, request: web.BaseRequest, raw: bytes, body: ChatBody, model: ServedModel
) -> GenerationJob:
    """Does what `_chat_job` does, for a completion that may be stored, and whose messages may have files."""
    assert edge.orchestrator is not None
    await read_chat_files(edge.orchestrator, owner_of(edge, request), body.messages, edge.fetcher)
    job = await _chat_job(edge, request, raw, body, model)
    if body.store:
        job.keep = keeping_chat(edge.orchestrator, owner_of(edge, request), raw, body.metadata, body.safety_identifier)
    return job


async def _completion_job(
    edge: Edge, request: web.BaseRequest, raw: bytes, body: CompletionBody, model: ServedModel
) -> GenerationJob:
    """Validate and tokenize a body. Raises KvloomError."""
    n = num_choices(body)
    guide = guide_of(body)
    sampling, stop = completion_sampling(body, guide), stop_conditions(body, completion_max_tokens(body))
    window, scope = edge.models.generation_window(model.name), edge.callers.cache_scope_of(request)
    prompts = await completion_prompts(body, n, model.tokenizer, window, scope=scope)
    if body.truncate_prompt_tokens is not None:
        prompts = [truncated(prompt, body.truncate_prompt_tokens, window, stop.max_tokens) for prompt in prompts]
    if body.skip_special_tokens is False:
        show_special_tokens(sampling, model.tokenizer)
    report = prompt_report(body, sampling, prompts, n)
    return GenerationJob(
        operation="text_completion",
        id_prefix="cmpl-",
        model=model,
        prompts=prompts,
        prompt_sizes=[len(prompt.token_ids) for prompt in prompts],
        asked=headers_of(request),
        wanted=GenerateRequest(
            sampling=sampling,
            stop=stop,
            n=n,
            session_key=session_key(request, body.prompt_cache_key),
            tier=tier_of(body),
            guardrails=body.guardrails,
            safety_identifier=body.safety_identifier,
        ),
        max_tokens_field="max_tokens",
        stream=bool(body.stream),
        include_usage=_includes_usage(body),
        service_tier=body.service_tier or "",
        body_digest=digest_of(raw),
        shape=shape_of(
            "completion", None, (), **(_usage_options(body.stream_options) if body.stream_options is not None else {})
        ),
        guide_field="" if guide is None else guide.field,
        prompt_report=report,
    )


def _includes_usage(body: GenerationBody) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def _usage_options(options: StreamOptions) -> Mapping[str, Any]:
    return {REPEATS_USAGE: True} if options.include_usage and options.continuous_usage_stats else {}


def template_options(body: ChatBody) -> Mapping[str, Any]:
    """The variables that the request gives to the chat template."""
    options = dict(body.chat_template_kwargs or {})
    if options:
        check_depth(options, "chat_template_kwargs", MAX_OPTIONS_DEPTH)
    effort = body.reasoning_effort
    if body.reasoning is not None:
        effort = effort or body.reasoning.effort
        if body.reasoning.enabled is not None:
            options.setdefault("enable_thinking", body.reasoning.enabled)
    if body.enable_thinking is not None:
        options.setdefault("enable_thinking", body.enable_thinking)
    if body.thinking is not None and body.thinking.type is not None:
        options.setdefault("enable_thinking", body.thinking.type != "disabled")
    if effort is not None:
        options.setdefault("reasoning_effort", effort)
        options.setdefault("enable_thinking", effort != "none")
    return options


def is_continued(body: ChatBody) -> bool:
    """Returns True when the last message is the beginning of the answer. Raises KvloomError (INVALID_ARGUMENT,
    UNSUPPORTED_PARAMETER)."""
    if body.continue_final_message and body.add_generation_prompt:
        raise invalid_argument("Give either add_generation_prompt or continue_final_message.", "continue_final_message")
    if body.add_generation_prompt is False and not body.continue_final_message:
        raise unsupported(
            "add_generation_prompt: without continue_final_message, a prompt ends where an answer begins.",
            "add_generation_prompt",
        )
    return bool(body.continue_final_message)


def _features(body: GenerationBody) -> frozenset[Feature]:
    found: set[Feature] = set()
    if isinstance(body, ChatBody) and (body.tools or body.functions):
        found.add("tools")
    if isinstance(body, ChatBody) and has_images(body.messages):
        found.add("vision")
    if body.structured_outputs is not None or (
        body.response_format is not None and body.response_format.type != "text"
    ):
        found.add("schema")
    wanted = body.logprobs if isinstance(body, ChatBody | CompletionBody) else None
    if wanted is not None and wanted is not False:
        found.add("logprobs")
    return frozenset(found)


def _is_batch(body: GenerationBody) -> bool:
    return tier_of(body) == TIER_BATCH


_CHAT: Final[GenerationApi[ChatBody]] = GenerationApi(
    decode=lambda edge, request, raw: decode_chat(raw, edge.config.max_messages, edge.fields, request.headers),
    make_job=_chat_job,
    features=_features,
    is_batch=_is_batch,
    max_answer_tokens=lambda body: body.max_completion_tokens or body.max_tokens or 0,
    user_text=lambda body: last_user_text(body.messages),
)
_STORED_CHAT: Final = dataclasses.replace(_CHAT, make_job=_stored_chat_job, generate=generate_stored)
_COMPLETION: Final[GenerationApi[CompletionBody]] = GenerationApi(
    decode=lambda edge, request, raw: decode_completion(raw, edge.fields, request.headers),
    make_job=_completion_job,
    features=_features,
    is_batch=_is_batch,
    max_answer_tokens=lambda body: body.max_tokens or DEFAULT_COMPLETION_MAX_TOKENS,
    user_text=lambda body: body.prompt if isinstance(body.prompt, str) else "",
)
