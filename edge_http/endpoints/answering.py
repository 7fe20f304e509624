"""What all endpoints that generate share: from a validated request to the end of its answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from edge_http.answers.collected_answer import CollectedAnswer
from edge_http.answers.recorded_answer import RecordedAnswer
from edge_http.answers.shape import ResponseShape, formatter_of, parsed_outputs
from edge_http.answers.streamed_answer import StreamedAnswer
from edge_http.edge import AdmissionPermit, Edge, ServedModel
from edge_http.endpoints.resume import deliver, deliver_found, find_idempotent
from edge_http.formatting.response_formatter import Envelope, ResponseFormatter
from edge_http.openai.prompt import Prompt
from edge_http.openai.sampling import check_window
from edge_http.recovery.takeover import register_for_recovery
from edge_http.resume.records import ResponseRecord
from edge_http.resume.response_name import ResponseName, new_response_id
from edge_http.submission import Submission, run_resumable, run_submission
from edge_http.wire.headers import (
    REQUEST_ID,
    RESPONSE_ID,
    RESUME,
    explanation,
    idempotency_key,
    last_event_id,
    request_id,
    traceparent,
    wants_details,
    wants_explanation,
    wants_resume,
)
from edge_http.wire.large_body import PIECE_BYTES, write_large_body
from edge_http.wire.request_callers import credential_digest
from edge_http.wire.request_record import begin_answer
from edge_http.wire.sse import EventStream
from kvloom.errors import KvloomError
from kvloom.router_link.link import LinkRequest
from kvloom.v1 import router_service_pb2
from kvloom.v1.generation_pb2 import SamplingParams, StopConditions


class GenerationJob(msgspec.Struct, frozen=True):
    """A validated and tokenized request, whatever the API that it came by."""

    operation: str
    """The operation's OpenTelemetry name: "chat" or "text_completion"."""
    id_prefix: str
    """What the response's id begins with, e.g. "chatcmpl-"."""
    model: ServedModel
    prompts: Sequence[Prompt]
    prompt_sizes: Sequence[int]
    """The tokens of each prompt."""
    n: int
    sampling: SamplingParams
    stop: StopConditions
    max_tokens_field: str
    stream: bool
    include_usage: bool
    session_key: str
    tier: router_service_pb2.Tier
    body_digest: str
    shape: ResponseShape
    guide_field: str = ""
    """The field of the body that requested guided decoding; "" when none did."""

    @property
    def num_choices(self) -> int:
        """Of all prompts together."""
        return len(self.prompts) * self.n


async def generate(
    edge: Edge, request: web.BaseRequest, permit: AdmissionPermit, job: GenerationJob
) -> web.StreamResponse:
    """Submit the job and deliver its answer. Raises KvloomError while nothing has been sent."""
    window = edge.window(job.model.name)
    if window:
        max_tokens = job.stop.max_tokens if job.stop.HasField("max_tokens") else None
        for prompt in job.prompts:
            check_window(len(prompt.token_ids), max_tokens, window, prompt.field, job.max_tokens_field)
    envelope = _envelope(edge, job)
    formatter = formatter_of(job.shape, envelope, job.model.tokenizer)
    name = envelope.id
    if not job.stream:
        return await _collect(edge, request, job, formatter, name)
    if edge.resume.is_wanted(wants_resume(request)):
        return await _stream_resumable(edge, request, permit, job, formatter, name)
    events = EventStream(request, edge.config.max_buffered_bytes, edge.write_coalescer)
    streamed = StreamedAnswer(
        job.prompt_sizes, job.n, formatter, events, _headers(request, name), **_stream_options(request, job)
    )
    begin_answer(name, job.model.name, streamed)
    try:
        await run_submission(edge, _submission(edge, request, job, name), streamed)
    except KvloomError:
        if not events.has_begun:
            raise
    return events.response()


def _envelope(edge: Edge, job: GenerationJob) -> Envelope:
    """Create the envelope. Its id also names the request inside the fabric."""
    return Envelope(
        id=new_response_id(job.id_prefix, edge.tag),
        model=job.model.name,
        system_fingerprint=job.model.system_fingerprint,
        num_choices=job.num_choices,
        include_usage=job.include_usage,
        num_prompt_tokens=sum(job.prompt_sizes),
    )


async def _collect(
    edge: Edge, request: web.BaseRequest, job: GenerationJob, formatter: ResponseFormatter, name: str
) -> web.StreamResponse:
    with edge.collected.lease(edge.callers.caller_of(request)) as lease:
        collected = CollectedAnswer(
            job.prompt_sizes,
            job.n,
            formatter,
            edge.config.max_answer_bytes,
            lease,
            parsed_outputs(job.shape, job.num_choices),
        )
        begin_answer(name, job.model.name, collected)
        await run_submission(edge, _submission(edge, request, job, name), collected)
        headers = explanation(collected.first_start) if wants_explanation(request) else {}
        pieces = collected.body(with_details=wants_details(request))
        if collected.num_bytes <= PIECE_BYTES:
            return web.Response(body=b"".join(pieces), content_type="application/json", headers=headers)
        response = web.StreamResponse(headers=headers)
        response.content_type = "application/json"
        await write_large_body(request, response, pieces, edge.fair_yield)
        return response


async def _stream_resumable(
    edge: Edge,
    request: web.BaseRequest,
    permit: AdmissionPermit,
    job: GenerationJob,
    formatter: ResponseFormatter,
    name: str,
) -> web.StreamResponse:
    """Deliver an answer that is made by a task of its own, which survives the loss of this connection."""
    response = ResponseName(
        name,
        credential_digest(request),
        edge.callers.caller_of(request),
        idempotency_key(request),
        job.operation + job.body_digest,
    )
    after = last_event_id(request)
    known = find_idempotent(edge, response, after)
    if known is not None:
        return await deliver(edge, request, known, after or 0)
    if response.idempotency_key:
        known_remotely = await edge.remote_responses.find_by_key(request, response, after or 0)
        if known_remotely is not None:
            return await deliver_found(edge, request, known_remotely, after or 0)
    stream = edge.resume.open(response)
    headers = {**_headers(request, name), RESUME: f"{edge.resume.grace_seconds:g}"}
    submission = _submission(edge, request, job, name)
    permit.handed_over = True
    if edge.resume.is_published:
        answer = RecordedAnswer(job.prompt_sizes, job.n, formatter, stream, headers, **_stream_options(request, job))
        record = _response_record(request, job, formatter.envelope, response, headers)
        on_submitted = register_for_recovery(edge, stream, record, answer, formatter, submission)
        run = run_resumable(edge, submission, answer, stream, on_submitted)
    else:
        answer = StreamedAnswer(job.prompt_sizes, job.n, formatter, stream, headers, **_stream_options(request, job))
        run = run_resumable(edge, submission, answer, stream)
    begin_answer(name, job.model.name, answer)
    edge.resume.start(stream, run, answer.fail, permit.release)
    return await deliver(edge, request, stream, 0)


def _headers(request: web.BaseRequest, name: str) -> dict[str, str]:
    return {REQUEST_ID: request_id(request), RESPONSE_ID: name}


def _stream_options(request: web.BaseRequest, job: GenerationJob) -> dict[str, Any]:
    """Return the options for what a streamed answer contains besides its text."""
    return {
        "parsed": parsed_outputs(job.shape, job.num_choices),
        "with_details": wants_details(request),
        "with_explanation": wants_explanation(request),
    }


def _submission(edge: Edge, request: web.BaseRequest, job: GenerationJob, name: str) -> Submission:
    return Submission(
        operation=job.operation,
        model=job.model.name,
        num_prompt_tokens=sum(job.prompt_sizes),
        n=job.n,
        requests=[_link_request(edge, request, job, number, prompt, name) for number, prompt in enumerate(job.prompts)],
        guide_field=job.guide_field,
        timeout_seconds=edge.config.request_timeout_seconds,
    )


def _response_record(
    request: web.BaseRequest, job: GenerationJob, envelope: Envelope, name: ResponseName, headers: dict[str, str]
) -> ResponseRecord:
    return ResponseRecord(
        number=0,
        operation=job.operation,
        id=name.id,
        created=envelope.created,
        model=envelope.model,
        system_fingerprint=envelope.system_fingerprint,
        headers=headers,
        n=job.n,
        prompt_sizes=list(job.prompt_sizes),
        caller=name.caller,
        tenant=name.tenant,
        idempotency_key=name.idempotency_key,
        body_digest=name.body_digest,
        guide_field=job.guide_field,
        shape=msgspec.msgpack.encode(job.shape),
        include_usage=job.include_usage,
        with_details=wants_details(request),
        with_explanation=wants_explanation(request),
    )


def _link_request(
    edge: Edge, request: web.BaseRequest, job: GenerationJob, number: int, prompt: Prompt, name: str
) -> LinkRequest:
    return LinkRequest(
        request_id=name if len(job.prompts) == 1 else f"{name}.{number}",
        model=job.model.name,
        prompt_token_ids=prompt.token_ids,
        prompt_text=prompt.text,
        sampling=job.sampling,
        stop=job.stop,
        n=job.n,
        timeout_seconds=edge.config.request_timeout_seconds,
        tenant=edge.callers.caller_of(request),
        traceparent=traceparent(request),
        client_request_id=request_id(request),
        session_key=job.session_key,
        tier=job.tier,
    )
