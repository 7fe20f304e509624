"""POST /v1/responses: OpenAI's Responses API. Responses are stored where there is an orchestrator."""

from __future__ import annotations

import functools
import sys
from typing import Any, Final

import msgspec
from aiohttp import web

from edge_http.answers.shape import shape_of
from edge_http.edge import Edge
from edge_http.endpoints.answering import GenerationJob, check_job_window, read_prompt_body
from edge_http.endpoints.background import begin_background, run_of
from edge_http.endpoints.file_search import search_headers, searched
from edge_http.endpoints.masking import NOTHING_HIDDEN, masked
from edge_http.endpoints.model_choice import has_images, last_user_text
from edge_http.endpoints.moderating import moderation_of
from edge_http.endpoints.ownership import owner_of
from edge_http.endpoints.routed import GenerationApi, serve_generation
from edge_http.endpoints.stored import (
    StoredInput,
    generate_stored,
    input_items,
    keeping,
    state_echo,
    stored_of,
)
from edge_http.formatting.body_guide import with_calls
from edge_http.formatting.client_tools import left_out_headers, options_of
from edge_http.openai.prompt import chat_prompt
from edge_http.openai.responses.file_search import OPTION as FILE_SEARCH
from edge_http.openai.responses.file_search import FileSearch, with_passages
from edge_http.openai.responses.input_items import conversation
from edge_http.openai.responses.parameters import as_chat, echo_of, max_tokens_of, template_options, text_guide
from edge_http.openai.responses.requests import (
    LOGPROBS,
    ResponsesBody,
    StoredResponsesBody,
    decode_responses,
    decode_stored,
)
from edge_http.openai.responses.steady_formatter import RUN, RunName
from edge_http.openai.responses.tools import tools_of
from edge_http.openai.sampling import chat_sampling, stop_conditions, tier_of
from edge_http.wire.body import digest_of
from edge_http.wire.headers import session_key
from edge_http.wire.json_response import json_response
from edge_http.wire.request_headers import headers_of
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.router_service_pb2 import TIER_BATCH, GenerateRequest
from kvloom_common.conversation.call_guide import ToolPlace
from kvloom_common.conversation.model_output import prompted
from kvloom_common.conversation.tool_plan import plan_tools
from kvloom_common.models.model_routes import Feature
from kvloom_common.models.served_model import ServedModel


async def responses(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    """Serve POST /v1/responses."""
    api: GenerationApi[Any] = _API if edge.orchestrator is None else _STORED_API
    return await serve_generation(edge, request, api)


async def count_input_tokens(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    """Serve POST /v1/responses/input_tokens: the size of the prompt that a response would have."""
    caller = edge.callers.caller_of(request)
    with edge.admit(caller), edge.bodies.lease(caller) as lease:
        raw = await read_prompt_body(edge, request, lease)
        decode, make_job = (decode_responses, _job) if edge.orchestrator is None else (decode_stored, _stored_job)
        body: Any = decode(raw, edge.config.max_messages, edge.fields, request.headers)
        job = await make_job(edge, request, raw, body, edge.usable_model(request, body.model))
        return json_response({"object": "response.input_tokens", "input_tokens": job.prompt_sizes[0]})


async def _stored_job(
    edge: Edge, request: web.BaseRequest, raw: bytes, body: StoredResponsesBody, model: ServedModel
) -> GenerationJob:
    link, owner, run = edge.orchestrator, owner_of(edge, request), run_of(request)
    assert link is not None
    if run is not None:  # all that it needs is in its body, and the orchestrator stores what comes of it
        whole = StoredInput([], body.input, state_echo(body))
        search = await searched(edge, request, body, model, is_run=True)
        return await _job(edge, request, raw, body, model, whole, run, search)
    stored = await stored_of(link, owner, body)
    search = await searched(edge, request, body, model)
    try:
        job = await _job(edge, request, raw, body, model, stored, search=search)
        if search is not None:
            check_job_window(edge, job)
    except KvloomError as error:
        if search is None or not search.passages or error.reason != ErrorReason.ERROR_REASON_CONTEXT_LENGTH_EXCEEDED:
            raise
        search = FileSearch(search.query, "incomplete", shows_results=search.shows_results, warning="no_room")
        job = await _job(edge, request, raw, body, model, stored, search=search)
    if body.background:
        items = stored.earlier, input_items(stored)
        job.begin = functools.partial(begin_background, edge, request, raw, body, items, job, search)
    else:
        job.keep = keeping(link, owner, body, stored)
    return job


def _decode_stored(edge: Edge, request: web.BaseRequest, raw: bytes) -> StoredResponsesBody:
    """Decode a body. The input of a background response has all that comes before it, when it is generated."""
    most = edge.config.max_messages if run_of(request) is None else sys.maxsize
    return decode_stored(raw, most, edge.fields, request.headers)


async def _job(
    edge: Edge,
    request: web.BaseRequest,
    raw: bytes,
    body: ResponsesBody,
    model: ServedModel,
    stored: StoredInput | None = None,
    run: RunName | None = None,
    search: FileSearch | None = None,
) -> GenerationJob:
    """Validate and tokenize a body. `stored`: what it has to do with stored objects. `run`: the background response
    that it is. `search`: what was found in files. Raises KvloomError."""
    given = tools_of(body, searches_files=stored is not None)
    is_parallel = bool(body.parallel_tool_calls)
    place = ToolPlace(at="", numbers=given.numbers)
    plan = plan_tools(given.tools, given.choice, is_parallel=is_parallel, model=model.output, place=place)
    guide = with_calls(text_guide(body), plan, "tools")
    shared = as_chat(body)
    sampling, stop = chat_sampling(shared, guide), stop_conditions(shared, max_tokens_of(body))
    earlier, given_input = ((), body.input) if stored is None else (stored.earlier, stored.input)
    messages, originals = conversation(given_input, body.instructions, earlier), NOTHING_HIDDEN
    if search is not None:
        messages = with_passages(messages, search.passages)
    if edge.config.masks_prompts:
        named = session_key(request, body.prompt_cache_key)
        messages, originals = await masked(edge, request, messages, body.guardrails, named, sampling)
    for_template, window = template_options(body), edge.generation_window(model.name)
    scope = edge.callers.cache_scope_of(request)
    prompt, rendered = await chat_prompt(
        messages, plan.tools, for_template, model.tokenizer, window, "input", scope=scope
    )
    parser = prompted(plan.parser, rendered)
    echo = echo_of(body, given, model.default_sampling, None if stored is None else stored.echo)
    options = options_of(given.client_tools)
    if search is not None:
        options[FILE_SEARCH] = msgspec.to_builtins(search)
    if run is not None:
        options[RUN] = msgspec.to_builtins(run)
        if model.default_sampling is None or not model.default_sampling.HasField("seed"):
            sampling.seed = run.seed
    return GenerationJob(
        operation="chat",
        id_prefix="resp_",
        model=model,
        prompts=[prompt],
        prompt_sizes=[len(prompt.token_ids)],
        asked=headers_of(request),
        wanted=GenerateRequest(
            sampling=sampling,
            stop=stop,
            n=1,
            seed_is_drawn=run is not None,
            session_key=session_key(request, body.prompt_cache_key),
            tier=tier_of(shared),
            guardrails=body.guardrails,
            safety_identifier=body.safety_identifier,
        ),
        max_tokens_field="max_output_tokens",
        stream=bool(body.stream),
        include_usage=False,
        service_tier=body.service_tier or "",
        body_digest=digest_of(raw),
        shape=shape_of("responses", parser, plan.tools, echo=echo, **options),
        headers={**left_out_headers(given.left_out), **search_headers(search)},
        guide_field="" if guide is None else guide.field,
        moderation=None if body.moderation is None else moderation_of(body.moderation, messages),
        originals=originals,
    )


def _features(body: ResponsesBody) -> frozenset[Feature]:
    found: set[Feature] = set()
    if body.tools:
        found.add("tools")
    if body.text is not None and body.text.format is not None and body.text.format.type != "text":
        found.add("schema")
    if LOGPROBS in (body.include or ()):
        found.add("logprobs")
    if not isinstance(body.input, str) and has_images(body.input):
        found.add("vision")
    return frozenset(found)


_STORED_API: Final[GenerationApi[StoredResponsesBody]] = GenerationApi(
    decode=_decode_stored,
    make_job=_stored_job,
    features=_features,
    max_answer_tokens=lambda body: body.max_output_tokens or 0,
    user_text=lambda body: body.input if isinstance(body.input, str) else last_user_text(body.input),
    is_batch=lambda body: tier_of(as_chat(body)) == TIER_BATCH,
    generate=generate_stored,
)
_API: Final[GenerationApi[ResponsesBody]] = GenerationApi(
    decode=lambda edge, request, raw: decode_responses(raw, edge.config.max_messages, edge.fields, request.headers),
    make_job=_job,
    features=_features,
    max_answer_tokens=lambda body: body.max_output_tokens or 0,
    user_text=lambda body: body.input if isinstance(body.input, str) else last_user_text(body.input),
    is_batch=lambda body: tier_of(as_chat(body)) == TIER_BATCH,
)
