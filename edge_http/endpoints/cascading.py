"""A candidate of a cascade: its answer is held until it has ended, and judged (kvloom_common/models/cascade.py)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Awaitable, Callable
from typing import Final

import structlog
from aiohttp import web

from edge_http.answers.answer import EdgeAnswer
from edge_http.answers.cascade_candidate import CascadeCandidate
from edge_http.answers.shape import parsed_outputs
from edge_http.edge import Edge
from edge_http.endpoints.answering import check_job_window, submission_of
from edge_http.endpoints.generation_job import GenerationJob
from edge_http.resume.response_name import new_response_id
from edge_http.submission import OnSubmitted, Submission, on_submitted, run_submission
from edge_http.wire.request_record import begin_answer
from kvloom.errors import KvloomError
from kvloom.sampling import with_chosen_logprobs
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.config import CascadeConfig
from kvloom_common.limits.byte_budget import ByteLease
from kvloom_common.models.cascade import ANY_JSON, AnswerForm, Objection, objection
from kvloom_common.models.model_routes import Cascade

log = structlog.get_logger()

_CALL_FIELDS: Final = ("tools", "functions")
"""The fields of a guide that is about calls: their arguments are judged by the tools' own schemas."""


@dataclasses.dataclass(frozen=True, slots=True)
class HeldRun:
    """Delivers an answer that is there already (RunAnswer)."""

    held: CascadeCandidate
    drain: Callable[[], Awaitable[None]]
    deadline: float | None

    async def __call__(
        self,
        edge: Edge,  # noqa: ARG002
        submission: Submission,  # noqa: ARG002
        answer: EdgeAnswer,
        on_submitted: OnSubmitted = on_submitted,  # noqa: ARG002
    ) -> None:
        await self.held.deliver(answer, self.drain, self.deadline)


async def hold_candidate(
    edge: Edge, request: web.BaseRequest, job: GenerationJob, cascade: Cascade, lease: ByteLease
) -> tuple[CascadeCandidate, Objection | None]:
    """The answer of the job's model, and what is wrong with it; None: it may be delivered. What no client gets is
    counted. Raises KvloomError if there is no answer."""
    tests = cascade.tests
    check_job_window(edge.models, job)
    name = new_response_id(job.id_prefix, edge.tag)
    shows_logprobs = job.sampling.HasField("logprobs")
    parsed = parsed_outputs(job.shape, job.num_choices)
    limit = edge.config.max_answer_bytes
    held = CascadeCandidate(
        job.prompt_sizes, job.n, limit, lease, parsed, response_id=name, shows_logprobs=shows_logprobs
    )
    if "logprob" in tests.escalate_on and not shows_logprobs:
        job.sampling.CopyFrom(with_chosen_logprobs(job.sampling))
    begin_answer(name, job.model.name, held)
    found: Objection | None = None
    is_judged = False
    submission = submission_of(edge, request, job, name)
    try:
        found = await _objection(edge, submission, held, tests, answer_form(job))
        is_judged = True
    finally:
        if found is not None or not is_judged:
            edge.link.discard([each.wanted.request_id for each in submission.requests if each is not None])
            _note_discarded(edge, cascade, job.model.name, found or "failed", held)
    return held, found


def _note_discarded(edge: Edge, cascade: Cascade, model: str, reason: str, held: CascadeCandidate) -> None:
    edge.metrics.on_discarded(cascade.route, model, reason, held.num_output_tokens)
    names = held.request_context.log_fields() if held.request_context else {}
    log.info(
        "answer_discarded",
        **names,
        route=cascade.route,
        model=model,
        reason=reason,
        num_output_tokens=held.num_output_tokens,
    )


async def _objection(
    edge: Edge, submission: Submission, held: CascadeCandidate, tests: CascadeConfig, form: AnswerForm
) -> Objection | None:
    """Raises KvloomError if there is no answer."""
    try:
        await run_submission(edge, submission, held)
    except KvloomError as error:
        if error.reason == ErrorReason.ERROR_REASON_ANSWER_TOO_LARGE:
            return "too_large"
        if error.reason == ErrorReason.ERROR_REASON_CONTENT_FILTERED and "refusal" in tests.escalate_on:
            return "refusal"
        raise
    return objection(held.candidates(), tests, form)


def answer_form(job: GenerationJob) -> AnswerForm:
    """Returns what the request demands of the form of its answers."""
    tools = {tool.name: tool.parameters for tool in job.shape.tools}
    if not job.sampling.HasField("guide"):
        return AnswerForm(tools=tools)
    guide = job.sampling.guide
    kind = guide.WhichOneof("form")
    if job.guide_field.startswith(_CALL_FIELDS):
        return AnswerForm(is_guided=True, tools=tools)
    if kind == "json_schema":
        return AnswerForm(schema=json.loads(guide.json_schema), is_guided=True, tools=tools)
    if kind == "json_object":
        return AnswerForm(schema=ANY_JSON, is_guided=True, tools=tools)
    return AnswerForm(choices=list(guide.choice.texts), is_guided=True, tools=tools)
