"""POST /v1/responses: OpenAI's Responses API. Responses are stored where there is an orchestrator."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Final

from aiohttp import web

from edge_http.edge import Edge
from edge_http.endpoints.answering import check_job_window, read_prompt_body
from edge_http.endpoints.background import begin_background, run_of
from edge_http.endpoints.compacting import managed_job
from edge_http.endpoints.file_search import searched
from edge_http.endpoints.forking import fork
from edge_http.endpoints.generation_job import GenerationJob
from edge_http.endpoints.image_inputs import inline_item_images
from edge_http.endpoints.model_choice import has_images, last_user_text
from edge_http.endpoints.ownership import owner_of
from edge_http.endpoints.preparing import prepare
from edge_http.endpoints.response_job import response_job
from edge_http.endpoints.routed import GenerationApi, serve_generation
from edge_http.endpoints.stored import generate_stored, keeping
from edge_http.endpoints.stored_input import StoredInput, state_echo, stored_of
from edge_http.endpoints.summarizing import begin_summary
from edge_http.openai.responses.file_search import FileSearch
from edge_http.openai.responses.parameters import as_chat
from edge_http.openai.responses.requests import (
    LOGPROBS,
    ResponsesBody,
    StoredResponsesBody,
    decode_responses,
    decode_stored,
)
from edge_http.openai.sampling import tier_of
from edge_http.wire.json_response import json_response
from edge_http.wire.message_request import MessageRequest
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.router_service_pb2 import TIER_BATCH
from kvloom_common.models.model_routes import Feature
from kvloom_common.models.served_model import ServedModel


async def responses(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    """Serve POST /v1/responses."""
    api: GenerationApi[Any] = _API if edge.orchestrator is None else _STORED_API
    if type(request) is MessageRequest and not request.generates:
        api = dataclasses.replace(api, generate=prepare)
    return await serve_generation(edge, request, api)


async def count_input_tokens(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    """Serve POST /v1/responses/input_tokens: the size of the prompt that a response would have."""
    caller = edge.callers.caller_of(request)
    with edge.admission.admit(caller), edge.admission.bodies.lease(caller) as lease:
        raw = await read_prompt_body(edge, request, lease)
        decode, make_job = (
            (decode_responses, managed_job) if edge.orchestrator is None else (decode_stored, _stored_job)
        )
        body: Any = decode(raw, edge.config.max_messages, edge.fields, request.headers)
        body.context_management = None  # what it would be compacted to is not known without doing so
        job = await make_job(edge, request, raw, body, edge.models.find_usable(request, body.model))
        return json_response({"object": "response.input_tokens", "input_tokens": job.prompt_sizes[0]})


async def _stored_job(
    edge: Edge, request: web.BaseRequest, raw: bytes, body: StoredResponsesBody, model: ServedModel
) -> GenerationJob:
    link, owner, run = edge.orchestrator, owner_of(edge, request), run_of(request)
    assert link is not None
    if run is not None:  # all that it needs is in its body, and the orchestrator stores what comes of it
        whole = StoredInput([], body.input, state_echo(body))
        search = await searched(edge, request, body, model, is_run=True)
        return await response_job(edge, request, raw, body, model, whole, run, search=search)
    stored = await stored_of(link, owner, body, edge.fetcher)
    if body.background:
        stored.earlier, stored.input = await inline_item_images(edge, request, stored.earlier, stored.input, model)
    search = await searched(edge, request, body, model)
    try:
        job = await managed_job(edge, request, raw, body, model, stored, search)
        if search is not None:
            check_job_window(edge.models, job)
    except KvloomError as error:
        if search is None or not search.passages or error.reason != ErrorReason.ERROR_REASON_CONTEXT_LENGTH_EXCEEDED:
            raise
        search = FileSearch(search.query, "incomplete", shows_results=search.shows_results, warning="no_room")
        job = await managed_job(edge, request, raw, body, model, stored, search)
    if body.background:
        job.begin = functools.partial(begin_background, edge, request, raw, body, stored, job, search)
    else:
        if stored.generation and isinstance(body.at, int):
            fork(job, stored.generation, body.at)
        stored.has_more |= search is not None or job.has_summary
        job.keep = keeping(link, owner, body, stored, job)
    return job


def _summed_up(make_job: Callable[..., Awaitable[GenerationJob]]) -> Callable[..., Awaitable[GenerationJob]]:
    """Returns what makes the same job, and has the turns summed up that this leaves out."""

    async def make(
        edge: Edge, request: web.BaseRequest, raw: bytes, body: ResponsesBody, model: ServedModel
    ) -> GenerationJob:
        job = await make_job(edge, request, raw, body, model)
        if job.unsummed is not None:
            begin_summary(edge, request, body, job.unsummed)
        return job

    return make


def _decode_stored(edge: Edge, request: web.BaseRequest, raw: bytes) -> StoredResponsesBody:
    """Decode a body. The input of a background response has all that comes before it, when it is generated."""
    most = edge.config.max_messages if run_of(request) is None else sys.maxsize
    return decode_stored(raw, most, edge.fields, request.headers)


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
    make_job=_summed_up(_stored_job),
    features=_features,
    max_answer_tokens=lambda body: body.max_output_tokens or 0,
    user_text=lambda body: body.input if isinstance(body.input, str) else last_user_text(body.input),
    is_batch=lambda body: tier_of(as_chat(body)) == TIER_BATCH,
    generate=generate_stored,
)
_API: Final[GenerationApi[ResponsesBody]] = GenerationApi(
    decode=lambda edge, request, raw: decode_responses(raw, edge.config.max_messages, edge.fields, request.headers),
    make_job=_summed_up(managed_job),
    features=_features,
    max_answer_tokens=lambda body: body.max_output_tokens or 0,
    user_text=lambda body: body.input if isinstance(body.input, str) else last_user_text(body.input),
    is_batch=lambda body: tier_of(as_chat(body)) == TIER_BATCH,
)
