"""What all endpoints that embed share: from a validated request to the whole body of its response."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final

import msgspec
from aiohttp import web

from edge_http.answers.embedded_inputs import EmbeddedInputs
from edge_http.edge import Edge, ServedModel
from edge_http.endpoints.answering import deliver_whole, read_prompt_body
from edge_http.formatting.json_bytes import Buffer
from edge_http.openai.prompt import Prompt
from edge_http.resume.kept_answers import WholeBody
from edge_http.resume.response_name import ResponseName, new_response_id
from edge_http.submission import Submission, run_submission
from edge_http.wire.fair_yield import LONG_BODY_BYTES
from edge_http.wire.headers import (
    IDEMPOTENCY_KEY,
    cache_use,
    explanation,
    idempotency_key,
    refuses_result_cache,
    request_id,
    traceparent,
    wants_explanation,
)
from edge_http.wire.request_callers import credential_digest
from edge_http.wire.request_record import begin_answer
from kvloom.limits.byte_budget import ByteLease
from kvloom.router_link.link import LinkRequest
from kvloom.v1.generation_pb2 import Pooling, SamplingParams, StopConditions

OPERATION: Final = "embeddings"
"""The operation's OpenTelemetry name."""


class EmbeddingJob(msgspec.Struct, frozen=True):
    """A validated and tokenized request, whatever the API that it came by."""

    api: str
    """Part of what an idempotency key stands for."""
    id_prefix: str
    model: ServedModel
    prompts: Sequence[Prompt]
    pooling: Pooling
    body_digest: str
    pieces: Callable[[EmbeddedInputs, str], AsyncIterator[Buffer]]
    """Makes the JSON of the response from the vectors and the response's id."""

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)


ReadJob = Callable[[Edge, web.BaseRequest, bytes], Awaitable[EmbeddingJob]]
"""Validates and tokenizes a body. Raises KvloomError."""


async def serve_embedding(edge: Edge, request: web.BaseRequest, read_job: ReadJob) -> web.StreamResponse:
    """Serve a POST that embeds. Raises KvloomError while nothing has been sent."""
    caller = edge.callers.caller_of(request)
    with edge.admit(caller) as permit:
        with edge.bodies.lease(caller) as lease:
            job = await read_job(edge, request, await read_prompt_body(edge, request, lease))
        response_id = new_response_id(job.id_prefix, edge.tag)
        key = idempotency_key(request) if IDEMPOTENCY_KEY in request.headers else ""
        name = None
        if key:
            name = ResponseName(response_id, credential_digest(request), caller, key, job.api + job.body_digest)
        make = functools.partial(_body, edge, request, job, response_id)
        return await deliver_whole(edge, request, permit, name, make)


async def _body(
    edge: Edge, request: web.BaseRequest, job: EmbeddingJob, response_id: str, lease: ByteLease
) -> WholeBody:
    """Raises KvloomError."""
    inputs = EmbeddedInputs([len(prompt.token_ids) for prompt in job.prompts], lease)
    begin_answer(response_id, job.model.name, inputs)
    await run_submission(edge, _submission(edge, request, job, response_id), inputs)
    pieces: list[Buffer] = []
    num_bytes = 0
    async for piece in job.pieces(inputs, response_id):
        lease.take(len(piece))
        num_bytes += len(piece)
        pieces.append(piece)
        await edge.fair_yield.take(max(len(piece), LONG_BODY_BYTES))
    headers = explanation(inputs.first_start) if wants_explanation(request) else {}
    if edge.has_result_cache:
        headers |= cache_use(inputs.cache_uses)
    return WholeBody(pieces, num_bytes, headers)


def _submission(edge: Edge, request: web.BaseRequest, job: EmbeddingJob, response_id: str) -> Submission:
    return Submission(
        operation=OPERATION,
        model=job.model.name,
        num_prompt_tokens=job.num_prompt_tokens,
        n=1,
        requests=[_link_request(edge, request, job, number, response_id) for number in range(len(job.prompts))],
        guide_field="",
        timeout_seconds=edge.config.request_timeout_seconds,
        prompt_field=job.prompts[0].field.partition("[")[0],
    )


def _link_request(
    edge: Edge, request: web.BaseRequest, job: EmbeddingJob, number: int, response_id: str
) -> LinkRequest:
    prompt = job.prompts[number]
    return LinkRequest(
        request_id=response_id if len(job.prompts) == 1 else f"{response_id}.{number}",
        model=job.model.name,
        prompt_token_ids=prompt.token_ids,
        prompt_text=prompt.text,
        sampling=SamplingParams(),
        stop=StopConditions(),
        timeout_seconds=edge.config.request_timeout_seconds,
        tenant=edge.callers.caller_of(request),
        traceparent=traceparent(request),
        client_request_id=request_id(request),
        pooling=job.pooling,
        no_result_cache=edge.has_result_cache and refuses_result_cache(request),
    )
