"""A tokenized request for embeddings, and the whole body of its response."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Final

from aiohttp import web

from edge_http.answers.embedded_inputs import EmbeddedInputs
from edge_http.edge import Edge
from edge_http.endpoints.link_requests import link_requests
from edge_http.endpoints.objectives import TimedJob, seconds_left, set_objectives
from edge_http.endpoints.priority_class import served_class
from edge_http.formatting.json_bytes import Buffer
from edge_http.openai.prompt import PromptInput
from edge_http.resume.idempotent_answers import WholeBody
from edge_http.submission import Submission, run_submission
from edge_http.wire.fair_yield import LONG_BODY_BYTES
from edge_http.wire.headers import (
    explanation,
)
from edge_http.wire.request_record import begin_answer
from kvloom_common.limits.byte_budget import ByteLease

OPERATION: Final = "embeddings"
"""The operation's OpenTelemetry name."""


class EmbeddingJob(TimedJob):
    """A validated and tokenized request, whatever the API that it came by."""

    prompts: Sequence[PromptInput]
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
    set_objectives(edge, request, job)
    begin_answer(response_id, job.model.name, inputs)
    served = served_class(edge, request)
    if served is not None:
        job.wanted.priority_class, job.wanted.fairness_id = served.name, served.fairness_id
    await run_submission(edge, _submission(edge, request, job, response_id), inputs)
    pieces: list[Buffer] = []
    num_bytes = 0
    async for piece in job.pieces(inputs, response_id):
        lease.take(len(piece))
        num_bytes += len(piece)
        pieces.append(piece)
        await edge.admission.fair_yield.take(max(len(piece), LONG_BODY_BYTES))
    more = explanation(inputs.first_start) if job.asked.wants_explanation else {}
    for feature in edge.features:
        more |= feature.headers(inputs, has_ended=True)
    if served is not None:
        more |= served.headers
    return WholeBody(pieces, num_bytes, {**job.headers, **more})


def _submission(edge: Edge, request: web.BaseRequest, job: EmbeddingJob, response_id: str) -> Submission:
    timeout_seconds = seconds_left(edge, job)
    return Submission(
        operation=OPERATION,
        model=job.model.name,
        num_prompt_tokens=job.num_prompt_tokens,
        n=1,
        requests=link_requests(edge, request, job, job.prompts, response_id, timeout_seconds),
        guide_field="",
        timeout_seconds=timeout_seconds,
        prompt_field=job.prompts[0].field.partition("[")[0],
    )
