"""The part that all endpoints which generate share: from a validated request to the end of its answer."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import msgspec
from aiohttp import web

from edge_http.admission import AdmissionPermit
from edge_http.answers.answer import EdgeAnswer
from edge_http.answers.collected_answer import CollectedAnswer
from edge_http.answers.kept_answer import KeptAnswer, KeptWhole
from edge_http.answers.recorded_answer import RecordedAnswer
from edge_http.answers.shape import formatter_of, joined_logprobs, parsed_outputs, prompt_field_of
from edge_http.answers.streamed_answer import StreamedAnswer
from edge_http.edge import Edge
from edge_http.endpoints.generation_job import GenerationJob
from edge_http.endpoints.link_requests import link_requests
from edge_http.endpoints.moderating import wrapped_run
from edge_http.endpoints.objectives import seconds_left, set_objectives
from edge_http.endpoints.priority_class import served_class
from edge_http.endpoints.resume import deliver, deliver_found, deliver_kept, find_idempotent, send_whole_body
from edge_http.formatting.response_formatter import Envelope, ResponseFormatter
from edge_http.offered_models import OfferedModels
from edge_http.openai.sampling import check_window
from edge_http.recovery.takeover import register_for_recovery
from edge_http.resume.idempotent_answers import WholeBody
from edge_http.resume.records import ResponseRecord
from edge_http.resume.response_name import ResponseName, new_response_id
from edge_http.submission import OnSubmitted, RunAnswer, Submission, on_submitted, run_resumable, run_submission
from edge_http.wire.body import read_json_body
from edge_http.wire.headers import (
    REQUEST_ID,
    RESPONSE_ID,
    RESUME,
    explanation,
    last_event_id,
    moved,
    request_id,
    start_headers,
)
from edge_http.wire.message_request import stream_for
from edge_http.wire.request_callers import credential_digest
from edge_http.wire.request_headers import NO_WISHES
from edge_http.wire.request_record import begin_answer
from kvloom.errors import KvloomError
from kvloom.v1.router_service_pb2 import TIER_BATCH
from kvloom_common.conversation.model_output import fit_to_parser, output_form
from kvloom_common.limits.byte_budget import ByteLease


async def read_prompt_body(edge: Edge, request: web.BaseRequest, lease: ByteLease) -> bytes:
    """Read the body of an admitted request whose prompt is to be tokenized next. Raises KvloomError."""
    raw = await read_json_body(request, edge.config, lease)
    await edge.admission.fair_yield.take(len(raw))
    edge.admission.check_room()
    return raw


async def generate(
    edge: Edge,
    request: web.BaseRequest,
    permit: AdmissionPermit,
    job: GenerationJob,
    run: RunAnswer = run_submission,
    streamed_by: Callable[..., StreamedAnswer] = StreamedAnswer,
) -> web.StreamResponse:
    """Submit the job and deliver its answer. `run` brings the answer to its end, and `streamed_by` makes it if it is a
    stream. Raises KvloomError while nothing has been sent."""
    asked = job.asked
    if asked is not NO_WISHES or edge.may_have_classes:
        schedule(edge, request, job)
    name, key = job.response_id, asked.idempotency_key
    if not name:
        check_job_window(edge.models, job)
        name = new_response_id(job.id_prefix, edge.tag)
    formatter = formatter_of(job.shape, envelope_of(job, name), job.model.tokenizer, job.prompt_report)
    if job.moderation is not None or job.originals:
        run = wrapped_run(edge, request, job, formatter, run)
    if not job.stream:
        response = _response_name(edge, request, job, name, key) if key else None
        make = functools.partial(_whole_body, edge, request, job, formatter, name, run)
        return await deliver_whole(edge, request, permit, response, make)
    if job.keep is not None:
        run = KeptRun(run, job.keep)
    is_resumable = edge.resume.is_wanted(asked.resume)
    if is_resumable or key:
        return await _stream_resumable(
            edge, request, permit, job, formatter, name, key, run, streamed_by, is_resumable=is_resumable
        )
    events = stream_for(request)(request, edge.config.max_buffered_bytes, edge.write_coalescer)
    streamed = streamed_by(
        job.prompt_sizes, job.n, formatter, events, _headers(request, job, name), **_stream_options(edge, job)
    )
    begin_answer(name, job.model.name, streamed)
    if edge.features:
        _begin_features(edge, request, job, streamed)
    edge.keep_alive.add(streamed)
    try:
        await run(edge, submission_of(edge, request, job, name), streamed)
    except KvloomError:
        if not events.has_begun:
            raise
    finally:
        edge.keep_alive.discard(streamed)
    return events.response()


def schedule(edge: Edge, request: web.BaseRequest, job: GenerationJob) -> None:
    """Set when the job is served. Raises KvloomError (INVALID_ARGUMENT, PERMISSION_DENIED)."""
    served = served_class(edge, request, job.wanted.tier, job.service_tier)
    if served is not None:
        job.wanted.priority_class, job.wanted.fairness_id = served.name, served.fairness_id
        job.headers = {**job.headers, **served.headers}
    set_objectives(edge, request, job)


def check_job_window(models: OfferedModels, job: GenerationJob) -> None:
    """To be called before a job's submission: it also asks for the markers that its parser needs. Raises KvloomError
    (CONTEXT_LENGTH_EXCEEDED)."""
    if job.shape.parser is not None:
        fit_to_parser(job.sampling, job.stop, job.shape.parser, job.model.tokenizer)
    window = models.window(job.model.name)
    if window:
        max_tokens = job.stop.max_tokens if job.stop.HasField("max_tokens") else None
        for prompt in job.prompts:
            check_window(len(prompt.token_ids), max_tokens, window, prompt.field, job.max_tokens_field)


def envelope_of(job: GenerationJob, response_id: str) -> Envelope:
    """Create the envelope. Its id also names the request inside the fabric."""
    return Envelope(
        id=response_id,
        model=job.model.name,
        system_fingerprint=job.model.system_fingerprint,
        num_choices=job.num_choices,
        include_usage=job.include_usage,
        num_prompt_tokens=sum(job.prompt_sizes),
    )


async def deliver_whole(
    edge: Edge,
    request: web.BaseRequest,
    permit: AdmissionPermit,
    response: ResponseName | None,
    make: Callable[[ByteLease], Coroutine[Any, Any, WholeBody]],
) -> web.StreamResponse:
    """Deliver a body that `make` makes, whose lease is of the memory of all answers. With an idempotency key, which is
    part of the `response`'s name, it is made by a task of its own, and kept. None: there is no key."""
    caller = edge.callers.caller_of(request)
    if response is None:
        with edge.admission.collected.lease(caller) as lease:
            return await send_whole_body(edge, request, await make(lease))
    known = await find_idempotent(edge, request, response)
    if known is not None:
        return await deliver_found(edge, request, known, 0, is_replay=True)
    lease = edge.admission.collected.lease(caller)
    permit.handed_over = True
    kept = edge.idempotent_answers.begin(response, lease, make(lease), permit.release)
    return await deliver_kept(edge, request, kept, is_replay=False)


async def collected_within(edge: Edge, request: web.BaseRequest, job: GenerationJob) -> bytes:
    """The body of an answer that the answer of the request needs. Raises KvloomError."""
    schedule(edge, request, job)
    check_job_window(edge.models, job)
    name = new_response_id(job.id_prefix, edge.tag)
    formatter = formatter_of(job.shape, envelope_of(job, name), job.model.tokenizer)
    run = wrapped_run(edge, request, job, formatter, run_submission) if job.originals else run_submission
    with edge.admission.collected.lease(edge.callers.caller_of(request)) as lease:
        body = await _whole_body(edge, request, job, formatter, name, run, lease)
        return b"".join(body.pieces)


async def _whole_body(
    edge: Edge,
    request: web.BaseRequest,
    job: GenerationJob,
    formatter: ResponseFormatter,
    name: str,
    run: RunAnswer,
    lease: ByteLease,
) -> WholeBody:
    """Raises KvloomError."""
    parsed = parsed_outputs(job.shape, job.num_choices, edge.metrics.on_nonconforming_call)
    joined = joined_logprobs(job.model.tokenizer, job.num_choices, job.sampling, job.stop)
    limit = edge.config.max_answer_bytes
    make = CollectedAnswer if job.keep is None else KeptWhole
    collected = make(job.prompt_sizes, job.n, formatter, limit, lease, parsed, joined)
    begin_answer(name, job.model.name, collected)
    if edge.features:
        _begin_features(edge, request, job, collected)
    await run(edge, submission_of(edge, request, job, name), collected)
    pieces = collected.body(with_details=job.asked.wants_details)
    if job.rewrite is not None:
        pieces = [job.rewrite(b"".join(pieces))]
    if job.keep is not None and isinstance(collected, KeptWhole):
        await job.keep(b"".join(pieces), collected.token_ids)
    more = explanation(collected.first_start) if job.asked.wants_explanation else {}
    for feature in collected.features:
        more |= feature.headers(collected, has_ended=True)
    if moves := collected.moves:
        more |= moved(moves, collected.failover)
    return WholeBody(pieces, collected.num_bytes, {**job.headers, **start_headers(collected.first_start), **more})


async def _stream_resumable(
    edge: Edge,
    request: web.BaseRequest,
    permit: AdmissionPermit,
    job: GenerationJob,
    formatter: ResponseFormatter,
    name: str,
    key: str,
    run: RunAnswer,
    streamed_by: Callable[..., StreamedAnswer],
    *,
    is_resumable: bool,
) -> web.StreamResponse:
    """Deliver an answer that is made by a task of its own, which survives the loss of this connection. If it is not
    `is_resumable`, its key is the reason."""
    response = _response_name(edge, request, job, name, key)
    after = last_event_id(request)
    known = await find_idempotent(edge, request, response, after)
    if known is not None:
        return await deliver_found(edge, request, known, after or 0, is_replay=True)
    stream = edge.resume.open(response)
    headers = _headers(request, job, name)
    if is_resumable:
        headers[RESUME] = f"{edge.resume.grace_seconds:g}"
    submission = submission_of(edge, request, job, name)
    permit.handed_over = True
    if job.keep is None and edge.resume.is_published(is_hidden=bool(job.originals)):  # no other edge could store it
        answer = RecordedAnswer(job.prompt_sizes, job.n, formatter, stream, headers, **_stream_options(edge, job))
        record = _response_record(job, formatter.envelope, response, headers)
        on_submitted = register_for_recovery(edge, stream, record, answer, formatter, submission)
        running = run_resumable(edge, submission, answer, stream, on_submitted, run)
    else:
        answer = streamed_by(job.prompt_sizes, job.n, formatter, stream, headers, **_stream_options(edge, job))
        running = run_resumable(edge, submission, answer, stream, run=run)
    begin_answer(name, job.model.name, answer)
    if edge.features:
        _begin_features(edge, request, job, answer)
    edge.keep_alive.add(answer)
    edge.resume.start(stream, running, answer.fail, permit.release)
    return await deliver(edge, request, stream, 0)


def _response_name(edge: Edge, request: web.BaseRequest, job: GenerationJob, name: str, key: str) -> ResponseName:
    caller = edge.callers.caller_of(request)
    return ResponseName(name, credential_digest(request), caller, key, job.shape.api + job.body_digest)


def _headers(request: web.BaseRequest, job: GenerationJob, name: str) -> dict[str, str]:
    return {REQUEST_ID: request_id(request), RESPONSE_ID: name, **job.headers}


def _stream_options(edge: Edge, job: GenerationJob) -> dict[str, Any]:
    """Return the options for what a streamed answer contains besides its text."""
    return {
        "parsed": parsed_outputs(job.shape, job.num_choices, edge.metrics.on_nonconforming_call),
        "joined": joined_logprobs(job.model.tokenizer, job.num_choices, job.sampling, job.stop)
        if job.stop.stop
        else (),
        "with_details": job.asked.wants_details,
        "with_explanation": job.asked.wants_explanation,
        "may_begin_early": not job.has_fallback_model,  # which can only take it before anything was sent
    }


def submission_of(edge: Edge, request: web.BaseRequest, job: GenerationJob, name: str) -> Submission:
    """Make the submission of a job whose response has that id."""
    timeout_seconds = seconds_left(edge, job)
    job.take_default_seed()
    requests = link_requests(edge, request, job, job.prompts, name, timeout_seconds)
    if job.shape.tools and (form := output_form(job.shape.parser, job.shape.tools)) is not None:
        for each in requests:
            each.submit.output_form.CopyFrom(form)
    if job.carried is not None and (progress := job.carried.progress(job.model.tokenizer, job.stop)) is not None:
        [only] = requests
        only.partial_choices, only.is_new = [progress], True
        only.submit.num_foreign_tokens = len(progress.token_ids)
    return Submission(
        operation=job.operation,
        model=job.model.name,
        num_prompt_tokens=sum(job.prompt_sizes),
        n=job.n,
        requests=requests,
        guide_field=job.guide_field,
        timeout_seconds=timeout_seconds,
        prompt_field=prompt_field_of(job.shape),
        carried=job.carried,
    )


def _response_record(
    job: GenerationJob,
    envelope: Envelope,
    name: ResponseName,
    headers: dict[str, str],
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
        echoes=job.prompt_report is not None and job.prompt_report.echoes,
        echo_logprobs=None if job.prompt_report is None else job.prompt_report.echo_logprobs,
        with_details=job.asked.wants_details,
        with_explanation=job.asked.wants_explanation,
    )


def _begin_features(edge: Edge, request: web.BaseRequest, job: GenerationJob, answer: EdgeAnswer) -> None:
    """Lets each feature that is on add to the answer. The headers of a stream are sent before anything is known."""
    principal, is_batch = edge.callers.principal_of(request), job.wanted.tier == TIER_BATCH
    is_told = not job.stream or job.asked.wants_details
    answer.features = edge.features
    for feature in edge.features:
        feature.begin(principal, job.model.name, answer, is_batch=is_batch, is_told=is_told)


class KeptRun:
    """Brings a stream to its end, and stores it before its last event is sent (RunAnswer)."""

    def __init__(self, run: RunAnswer, keep: Callable[[bytes, Sequence[int]], Awaitable[None]]) -> None:
        """`keep` stores the JSON of the response, and the tokens of its output. It raises KvloomError."""
        self._run = run
        self._keep = keep

    async def __call__(
        self, edge: Edge, submission: Submission, answer: EdgeAnswer, on_submitted: OnSubmitted = on_submitted
    ) -> None:
        """Raises the KvloomError that ended the answer, or because of which it could not be stored."""
        await self._run(edge, submission, answer, on_submitted)
        assert isinstance(answer, KeptAnswer)
        try:
            await self._keep(answer.response_json(), answer.token_ids)
        except KvloomError as error:
            answer.release(error)
            raise
        answer.release()
