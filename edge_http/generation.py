"""One request from submission to its end, for chat and plain completions, streamed or not."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Final

import structlog
from aiohttp import web

from edge_http.answer import Answer, PromptSink
from edge_http.caller import caller_of
from edge_http.collect import CollectedAnswer
from edge_http.edge import Edge, Place, ServedModel
from edge_http.headers import (
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
from edge_http.prompt import Prompt
from edge_http.requests import GenerationBody
from edge_http.resumable import ResponseName, ResumableStream
from edge_http.resume import begun_before, deliver
from edge_http.resume_journal import new_response_id
from edge_http.sampling import check_window
from edge_http.shapes import Envelope, Shape
from edge_http.sse import EventSink, EventStream
from edge_http.stream import StreamedAnswer
from kvloom.errors import KvloomError
from kvloom.guide import GUIDE_FIELD
from kvloom.router_link import LinkRequest
from kvloom.v1 import router_service_pb2
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import SamplingParams, StopConditions

log = structlog.get_logger()

ROUTER_GRACE_SECONDS: Final = 5.0
"""The router ends a request at its deadline; this much later the edge stops to believe that it will."""


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
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


def envelope_for(edge: Edge, job: Job, id_prefix: str) -> Envelope:
    """`id_prefix`: "chatcmpl-" or "cmpl-". The id also names the request inside the fabric."""
    return Envelope(
        id=new_response_id(id_prefix, edge.tag),
        model=job.model.name,
        system_fingerprint=job.model.system_fingerprint,
        num_choices=len(job.prompts) * job.n,
        include_usage=job.include_usage,
    )


async def generate(
    edge: Edge, request: web.BaseRequest, place: Place, job: Job, shape: Shape, name: str
) -> web.StreamResponse:
    """Submit the job under `name` and deliver its answer. Raises KvloomError as long as nothing was sent."""
    info = edge.model_info(job.model.name)
    if info is not None and info.max_model_len:
        max_tokens = job.stop.max_tokens if job.stop.HasField("max_tokens") else None
        for prompt in job.prompts:
            check_window(len(prompt.token_ids), max_tokens, info.max_model_len, prompt.field, job.max_tokens_field)
    if not job.stream:
        return await _collect(edge, request, job, shape, name)
    if edge.resume.is_wanted(wants_resume(request)):
        return await _stream_resumable(edge, request, place, job, shape, name)
    events = EventStream(request, edge.config.max_buffered_bytes)
    streamed = _streamed_answer(request, job, shape, events, {RESPONSE_ID: name})
    try:
        await _follow(edge, request, job, streamed, name, events)
    except KvloomError:
        if not events.begun:
            raise
    return events.response()


async def _collect(edge: Edge, request: web.BaseRequest, job: Job, shape: Shape, name: str) -> web.StreamResponse:
    collected = CollectedAnswer(job.prompt_sizes, job.n, shape)
    await _follow(edge, request, job, collected, name)
    processing_ms = round((time.monotonic() - collected.started_at) * 1e3)
    more = explanation(collected.first_start) if wants_explanation(request) else {}
    return web.Response(
        body=collected.body(with_details=wants_details(request)),
        content_type="application/json",
        headers={"openai-processing-ms": str(processing_ms), **more},
    )


async def _stream_resumable(
    edge: Edge, request: web.BaseRequest, place: Place, job: Job, shape: Shape, name: str
) -> web.StreamResponse:
    """The answer is made by a task of its own, which the loss of this connection does not end."""
    response = ResponseName(name, caller_of(request), idempotency_key(request), job.operation + job.body_digest)
    after = last_event_id(request)
    known = begun_before(edge, response, after)
    if known is not None:
        return await deliver(edge, request, known, after or 0)
    stream = edge.resume.open(response)
    headers = {RESPONSE_ID: name, RESUME: f"{edge.resume.grace_seconds:g}"}
    streamed = _streamed_answer(request, job, shape, stream, headers)
    place.handed_over = True
    edge.resume.start(stream, _make(edge, request, place, job, streamed, stream), streamed.fail)
    return await deliver(edge, request, stream, 0)


async def _make(
    edge: Edge, request: web.BaseRequest, place: Place, job: Job, answer: StreamedAnswer, stream: ResumableStream
) -> None:
    """Never raises."""
    try:
        await _follow(edge, request, job, answer, stream.name.id, stream)
    except KvloomError:
        pass  # it is the answer's error, too
    except Exception:
        log.exception("request broke", request_id=stream.name.id)
        answer.fail(KvloomError(ErrorReason.ERROR_REASON_INTERNAL, "Something went wrong on our side."))
    finally:
        if not stream.ended:
            stream.refuse(answer.error or KvloomError(ErrorReason.ERROR_REASON_CANCELLED, "The request was cancelled."))
        place.give_up()


def _streamed_answer(
    request: web.BaseRequest, job: Job, shape: Shape, events: EventSink, headers: Mapping[str, str]
) -> StreamedAnswer:
    return StreamedAnswer(
        job.prompt_sizes,
        job.n,
        shape,
        events,
        {REQUEST_ID: request_id(request), **headers},
        include_usage=job.include_usage,
        with_details=wants_details(request),
        with_explanation=wants_explanation(request),
    )


async def _follow(
    edge: Edge, request: web.BaseRequest, job: Job, answer: Answer, name: str, events: EventSink | None = None
) -> None:
    """Submit and wait for the end. Raises the error that ended it. Whatever happens, nothing goes on in the fabric
    once this returns: the handler is cancelled when the client goes away, and cancels what is still open."""
    handles: list[int] = []
    deadline = asyncio.get_running_loop().call_later(
        edge.config.request_timeout_seconds + ROUTER_GRACE_SECONDS, _time_out, answer
    )
    try:
        for number, prompt in enumerate(job.prompts):
            sink = answer if len(job.prompts) == 1 else PromptSink(answer, number * job.n)
            handles.append(edge.link.submit(_link_request(edge, request, job, number, prompt, name), sink))
        await answer.ended
    except asyncio.CancelledError:
        answer.fail(KvloomError(ErrorReason.ERROR_REASON_CANCELLED, "The client went away."))
        edge.metrics.on_disconnect()
        raise
    except KvloomError as error:  # from submit
        answer.fail(error)
    finally:
        deadline.cancel()
        if answer.num_open:
            for handle in handles:
                edge.link.cancel(handle)
        num_events = events.num_events if events else 0
        edge.metrics.on_answer(job.operation, job.model.name, answer, job.num_prompt_tokens, num_events)
    if answer.error is not None:
        if answer.error.field == GUIDE_FIELD:  # only the engine's compiler can tell
            answer.error.field = job.guide_field
        raise answer.error


def _link_request(
    edge: Edge, request: web.BaseRequest, job: Job, number: int, prompt: Prompt, name: str
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


def _time_out(answer: Answer) -> None:
    answer.fail(KvloomError(ErrorReason.ERROR_REASON_DEADLINE_EXCEEDED, "The request took too long."))
