"""POST /v1/chat/completions and POST /v1/completions: OpenAI's requests for answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiohttp import web

from edge_http.answers.shape import shape_of
from edge_http.edge import Edge
from edge_http.endpoints.answering import GenerationJob, serve_generation
from edge_http.openai.guide import guide_of, with_calls
from edge_http.openai.messages import chat_messages
from edge_http.openai.prompt import chat_prompt, completion_prompts, predicted_tokens
from edge_http.openai.prompt_report import prompt_report
from edge_http.openai.requests import ChatBody, GenerationBody, decode_chat, decode_completion
from edge_http.openai.sampling import (
    chat_max_tokens,
    chat_sampling,
    completion_max_tokens,
    completion_sampling,
    num_choices,
    stop_conditions,
    tier_of,
)
from edge_http.openai.tools import tools_of
from edge_http.wire.body import digest_of
from edge_http.wire.headers import session_key
from kvloom.conversation.model_output import prompted
from kvloom.conversation.tool_plan import plan_tools


async def chat_completions(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    """Serve POST /v1/chat/completions."""
    return await serve_generation(edge, request, _chat_job)


async def completions(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    """Serve POST /v1/completions."""
    return await serve_generation(edge, request, _completion_job)


async def _chat_job(edge: Edge, request: web.BaseRequest, raw: bytes) -> GenerationJob:
    """Validate and tokenize a body. Raises KvloomError."""
    body = decode_chat(raw, edge.config.max_messages)
    model = edge.find_model(body.model)
    n = num_choices(body)
    given = tools_of(body)
    plan = plan_tools(given.tools, given.choice, is_parallel=given.is_parallel, model=model.output)
    guide = with_calls(guide_of(body), plan, "functions" if given.has_legacy_functions else "tools")
    max_tokens, max_tokens_field = chat_max_tokens(body)
    sampling, stop = chat_sampling(body, guide), stop_conditions(body, max_tokens)
    messages = chat_messages(body.messages)
    window = edge.window(model.name)
    prompt, rendered = await chat_prompt(messages, plan.tools, template_options(body), model.tokenizer, window)
    if body.prediction is not None:
        sampling.predicted_token_ids.extend(await predicted_tokens(body.prediction, model.tokenizer, window))
    parser = prompted(plan.parser, rendered)
    return GenerationJob(
        operation="chat",
        id_prefix="chatcmpl-",
        model=model,
        prompts=[prompt],
        prompt_sizes=[len(prompt.token_ids)],
        n=n,
        sampling=sampling,
        stop=stop,
        max_tokens_field=max_tokens_field,
        stream=bool(body.stream),
        include_usage=_includes_usage(body),
        session_key=session_key(request, body.prompt_cache_key),
        tier=tier_of(body),
        body_digest=digest_of(raw),
        shape=shape_of("chat", parser, plan.tools, has_legacy_functions=given.has_legacy_functions),
        guide_field="" if guide is None else guide.field,
        prompt_report=prompt_report(body, sampling, [prompt], n),
    )


async def _completion_job(edge: Edge, request: web.BaseRequest, raw: bytes) -> GenerationJob:
    """Validate and tokenize a body. Raises KvloomError."""
    body = decode_completion(raw)
    model = edge.find_model(body.model)
    n = num_choices(body)
    guide = guide_of(body)
    sampling, stop = completion_sampling(body, guide), stop_conditions(body, completion_max_tokens(body))
    prompts = await completion_prompts(body, n, model.tokenizer, edge.window(model.name))
    return GenerationJob(
        operation="text_completion",
        id_prefix="cmpl-",
        model=model,
        prompts=prompts,
        prompt_sizes=[len(prompt.token_ids) for prompt in prompts],
        n=n,
        sampling=sampling,
        stop=stop,
        max_tokens_field="max_tokens",
        stream=bool(body.stream),
        include_usage=_includes_usage(body),
        session_key=session_key(request, body.prompt_cache_key),
        tier=tier_of(body),
        body_digest=digest_of(raw),
        shape=shape_of("completion", None, ()),
        guide_field="" if guide is None else guide.field,
        prompt_report=prompt_report(body, sampling, prompts, n),
    )


def _includes_usage(body: GenerationBody) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def template_options(body: ChatBody) -> Mapping[str, Any]:
    """The variables that the request gives to the chat template."""
    options = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        options.setdefault("reasoning_effort", body.reasoning_effort)
        options.setdefault("enable_thinking", body.reasoning_effort != "none")
    return options
