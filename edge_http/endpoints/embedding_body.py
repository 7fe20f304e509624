"""A tokenized request for embeddings, and the whole body of its response."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Final

from aiohttp import web

from edge_http.answers.embedded_inputs import EmbeddedInputs
from edge_http.edge import Edge, ServedModel
from edge_http.endpoints.objectives import TimedJob, has_objectives, seconds_left, with_objectives
from edge_http.endpoints.priority_class import ServedClass, served_class
from edge_http.formatting.json_bytes import Buffer
from edge_http.openai.prompt import Prompt
from edge_http.resume.kept_answers import WholeBody
from edge_http.submission import Submission, run_submission
from edge_http.wire.fair_yield import LONG_BODY_BYTES
from edge_http.wire.headers import (
    RECEIPT,
    cache_use,
    explanation,
    refuses_result_cache,
    request_id,
    traceparent,
    wants_explanation,
    wants_receipt,
)
from edge_http.wire.request_record import begin_answer
from kvloom.router_link.link import LinkRequest
from kvloom.v1.generation_pb2 import Pooling, SamplingParams, StopConditions
from kvloom_common.limits.byte_budget import ByteLease

OPERATION: Final = "embeddings"
"""The operation's OpenTelemetry name."""


class EmbeddingJob(TimedJob, frozen=True):
    """A validated and tokenized request, whatever the API that it came by."""

    model: ServedModel
    prompts: Sequence[Prompt]
    pooling: Pooling
    pieces: Callable[[EmbeddedInputs, str], AsyncIterator[Buffer]]
    """Makes the JSON of the response from the vectors and the response's id."""
    headers: Mapping[str, str] = {}
    """Further headers of the response."""

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)


async def embedding_body(
    edge: Edge, request: web.BaseRequest, job: EmbeddingJob, response_id: str, lease: ByteLease
) -> WholeBody:
    """Raises KvloomError."""
    inputs = EmbeddedInputs([len(prompt.token_ids) for prompt in job.prompts], lease)
    if has_objectives(request.headers):
        job = with_objectives(edge, request, job)
    begin_answer(response_id, job.model.name, inputs)
    served = served_class(edge, request)
    await run_submission(edge, _submission(edge, request, job, response_id, served), inputs)
    pieces: list[Buffer] = []
    num_bytes = 0
    async for piece in job.pieces(inputs, response_id):
        lease.take(len(piece))
        num_bytes += len(piece)
        pieces.append(piece)
        await edge.fair_yield.take(max(len(piece), LONG_BODY_BYTES))
    more = explanation(inputs.first_start) if wants_explanation(request) else {}
    if edge.has_result_cache:
        more |= cache_use(inputs.cache_uses)
    if served is not None:
        more |= served.headers
    return WholeBody(pieces, num_bytes, {**job.headers, **more})


def _submission(
    edge: Edge, request: web.BaseRequest, job: EmbeddingJob, response_id: str, served: ServedClass | None
) -> Submission:
    timeout_seconds = seconds_left(edge, job)
    return Submission(
        operation=OPERATION,
        model=job.model.name,
        num_prompt_tokens=job.num_prompt_tokens,
        n=1,
        requests=[
            _link_request(edge, request, job, number, response_id, timeout_seconds, served)
            for number in range(len(job.prompts))
        ],
        guide_field="",
        timeout_seconds=timeout_seconds,
        prompt_field=job.prompts[0].field.partition("[")[0],
    )


def _link_request(
    edge: Edge,
    request: web.BaseRequest,
    job: EmbeddingJob,
    number: int,
    response_id: str,
    timeout_seconds: float,
    served: ServedClass | None,
) -> LinkRequest:
    prompt = job.prompts[number]
    return LinkRequest(
        request_id=response_id if len(job.prompts) == 1 else f"{response_id}.{number}",
        model=job.model.name,
        prompt_token_ids=prompt.token_ids,
        prompt_text=prompt.text,
        sampling=SamplingParams(),
        stop=StopConditions(),
        timeout_seconds=timeout_seconds,
        tenant=edge.callers.caller_of(request),
        key_id=edge.callers.key_id_of(request),
        traceparent=traceparent(request),
        client_request_id=request_id(request),
        pooling=job.pooling,
        objectives=job.objectives,
        receipt=RECEIPT in request.headers and wants_receipt(request, can_have=edge.receipt_keys is not None),
        no_result_cache=edge.has_result_cache and refuses_result_cache(request),
        priority_class="" if served is None else served.name,
        fairness_id="" if served is None else served.fairness_id,
    )
