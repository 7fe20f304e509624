"""One request from submission to its end, for chat and plain completions, streamed or not."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
from aiohttp import web

from edge_http.answers.collected_answer import CollectedAnswer
from edge_http.answers.recorded_answer import RecordedAnswer
from edge_http.answers.streamed_answer import StreamedAnswer
from edge_http.edge import AdmissionPermit, Edge, ServedModel
from edge_http.endpoints.resume import begun_before, deliver, deliver_found
from edge_http.openai.prompt import Prompt
from edge_http.openai.requests import GenerationBody
from edge_http.openai.response_formatters import Envelope, ResponseFormatter
from edge_http.openai.sampling import check_window
from edge_http.recovery.takeover import publish
from edge_http.resume.records import ResponseRecord
from edge_http.resume.response_name import ResponseName, new_response_id
from edge_http.submission import Submission, run_resumable, run_submission
from edge_http.wire.caller import caller_of
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
from edge_http.wire.sse import EventStream
from kvloom.errors import KvloomError
from kvloom.router_link.link import LinkRequest
from kvloom.v1 import router_service_pb2
from kvloom.v1.generation_pb2 import SamplingParams, StopConditions


class GenerationJob(msgspec.Struct, frozen=True):
    """What a body asks for, checked and tokenized."""

    operation: str
    """OpenTelemetry's name: "chat" or "text_completion"."""
    model: ServedModel
    prompts: Sequence[Prompt]
    n: int
    sampling: SamplingParams
    stop: StopConditions
    max_tokens_field: str
    stream: bool
    include_usage: bool
    session_key: str
    tier: router_service_pb2.Tier
    body_digest: str
    guide_field: str = ""
    """Of the body, that asked for guided decoding."""

    @property
    def num_prompt_tokens(self) -> int:
        return sum(self.prompt_sizes)

    @property
    def prompt_sizes(self) -> list[int]:
        return [len(prompt.token_ids) for prompt in self.prompts]


def wants_usage(body: GenerationBody) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def envelope_for(edge: Edge, job: GenerationJob, id_prefix: str) -> Envelope:
    """`id_prefix`: "chatcmpl-" or "cmpl-". The id also names the request inside the fabric."""
    return Envelope(
        id=new_response_id(id_prefix, edge.tag),
        model=job.model.name,
        system_fingerprint=job.model.system_fingerprint,
        num_choices=len(job.prompts) * job.n,
        include_usage=job.include_usage,
    )


async def generate(
    edge: Edge,
    request: web.BaseRequest,
    place: AdmissionPermit,
    job: GenerationJob,
    shape: ResponseFormatter,
    name: str,
) -> web.StreamResponse:
    """Submit the job under `name` and deliver its answer. Raises KvloomError as long as nothing was sent."""
    window = edge.window(job.model.name)
    if window:
        max_tokens = job.stop.max_tokens if job.stop.HasField("max_tokens") else None
        for prompt in job.prompts:
            check_window(len(prompt.token_ids), max_tokens, window, prompt.field, job.max_tokens_field)
    if not job.stream:
        return await _collect(edge, request, job, shape, name)
    if edge.resume.is_wanted(wants_resume(request)):
        return await _stream_resumable(edge, request, place, job, shape, name)
    events = EventStream(request, edge.config.max_buffered_bytes, edge.write_coalescer)
    streamed = StreamedAnswer(job.prompt_sizes, job.n, shape, events, _headers(request, name), **_wishes(request, job))
    try:
        await run_submission(edge, _submission(edge, request, job, name), streamed)
    except KvloomError:
        if not events.begun:
            raise
    return events.response()


async def _collect(
    edge: Edge, request: web.BaseRequest, job: GenerationJob, shape: ResponseFormatter, name: str
) -> web.StreamResponse:
    collected = CollectedAnswer(job.prompt_sizes, job.n, shape)
    await run_submission(edge, _submission(edge, request, job, name), collected)
    processing_ms = round((time.monotonic() - collected.started_at) * 1e3)
    more = explanation(collected.first_start) if wants_explanation(request) else {}
    return web.Response(
        body=collected.body(with_details=wants_details(request)),
        content_type="application/json",
        headers={"openai-processing-ms": str(processing_ms), **more},
    )


async def _stream_resumable(
    edge: Edge,
    request: web.BaseRequest,
    place: AdmissionPermit,
    job: GenerationJob,
    shape: ResponseFormatter,
    name: str,
) -> web.StreamResponse:
    """The answer is made by a task of its own, which the loss of this connection does not end."""
    response = ResponseName(name, caller_of(request), idempotency_key(request), job.operation + job.body_digest)
    after = last_event_id(request)
    known = begun_before(edge, response, after)
    if known is not None:
        return await deliver(edge, request, known, after or 0)
    if response.idempotency_key:
        known_remotely = await edge.remote_responses.find_by_key(request, response, after or 0)
        if known_remotely is not None:
            return await deliver_found(edge, request, known_remotely, after or 0)
    stream = edge.resume.open(response)
    headers = {**_headers(request, name), RESUME: f"{edge.resume.grace_seconds:g}"}
    submission = _submission(edge, request, job, name)
    place.handed_over = True
    if edge.resume.is_published:
        answer = RecordedAnswer(job.prompt_sizes, job.n, shape, stream, headers, **_wishes(request, job))
        record = _response_record(request, job, shape.envelope, response, headers)
        on_submitted = publish(edge, stream, record, answer, shape, submission)
        job_of_stream = run_resumable(edge, submission, answer, stream, on_submitted)
    else:
        answer = StreamedAnswer(job.prompt_sizes, job.n, shape, stream, headers, **_wishes(request, job))
        job_of_stream = run_resumable(edge, submission, answer, stream)
    edge.resume.start(stream, job_of_stream, answer.fail, place.release)
    return await deliver(edge, request, stream, 0)


def _headers(request: web.BaseRequest, name: str) -> dict[str, str]:
    return {REQUEST_ID: request_id(request), RESPONSE_ID: name}


def _wishes(request: web.BaseRequest, job: GenerationJob) -> dict[str, bool]:
    """What a streamed answer has besides its text."""
    return {
        "include_usage": job.include_usage,
        "with_details": wants_details(request),
        "with_explanation": wants_explanation(request),
    }


def _submission(edge: Edge, request: web.BaseRequest, job: GenerationJob, name: str) -> Submission:
    return Submission(
        operation=job.operation,
        model=job.model.name,
        num_prompt_tokens=job.num_prompt_tokens,
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
        prompt_sizes=job.prompt_sizes,
        caller=name.caller,
        idempotency_key=name.idempotency_key,
        body_digest=name.body_digest,
        guide_field=job.guide_field,
        **_wishes(request, job),
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
        traceparent=traceparent(request),
        session_key=job.session_key,
        tier=job.tier,
    )
