"""Streamed answers that the next model of a route continues when their model is lost (`on_loss = "continue"`).

The next model gets the prompt, by its own template, and the text so far as tokens of its own that count as generated:
to the router and the shards it is an answer that continues at another router. So stop strings that begin before the
seam are found, penalties and min_tokens go on counting, and no token is metered twice.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncIterator

import msgspec
import structlog
from aiohttp import web

from edge_http.answers.answer import EdgeAnswer
from edge_http.answers.answer_part import AnswerPart
from edge_http.answers.continuation_prompt import NOTHING, CarriedText, progress_in_tokens, remaining_stop
from edge_http.answers.streamed_answer import StreamedAnswer
from edge_http.edge import Edge
from edge_http.endpoints.answering import submission_of
from edge_http.endpoints.generation_job import GenerationJob
from edge_http.submission import OnSubmitted, Submission, on_submitted, run_submission
from kvloom.errors import KvloomError
from kvloom.router_link.request import ChoiceProgress
from kvloom.v1.error_reason_pb2 import ErrorReason

log = structlog.get_logger()


def may_be_continued(job: GenerationJob) -> bool:
    """True when the answer is one stream of plain text. An answer that was parsed, guided or measured for one model
    cannot be continued by another one, and a prompt of token ids means something else to it."""
    sampling = job.sampling
    has_logprobs = sampling.HasField("logprobs") or sampling.HasField("prompt_logprobs")
    is_plain = job.shape.parser is None and not job.shape.tools and not sampling.HasField("guide")
    return (
        job.stream
        and job.num_choices == 1
        and is_plain
        and not has_logprobs
        and job.prompt_report is None
        and job.moderation is None
        and not job.originals
        and bool(job.prompts[0].text)
    )


class _Next(msgspec.Struct, frozen=True):
    """A part of the request that is submitted to the next model."""

    job: GenerationJob
    submission: Submission
    progress: ChoiceProgress


@dataclasses.dataclass(slots=True)
class ContinuedRun:
    """Runs the submission of a job that `may_be_continued` as `run_submission` does (RunAnswer)."""

    request: web.BaseRequest
    route: str
    """The name of the route that says what becomes of a lost answer."""
    job: GenerationJob
    successors: AsyncIterator[GenerationJob]
    """The same request for the models that may continue it, best first, each once. They can be continued, too."""

    async def __call__(
        self, edge: Edge, submission: Submission, answer: EdgeAnswer, on_submitted: OnSubmitted = on_submitted
    ) -> None:
        assert isinstance(answer, StreamedAnswer)
        job, carried, loss = self.job, NOTHING, None
        name = _request_id(submission)
        number = 0
        part = AnswerPart(answer, submission.num_prompt_tokens)
        while True:
            try:
                await run_submission(edge, submission, part, on_submitted)
            except KvloomError as error:
                if not (part.is_lost and answer.has_begun):
                    answer.fail(error)
                    raise
                loss = loss or error
            else:
                return
            carried = part.carried(carried, job.model.tokenizer)
            number += 1
            found = await self._next(edge, carried, f"{name}.continued{number}")
            if answer.ended.done():
                raise answer.error or KvloomError(ErrorReason.ERROR_REASON_CANCELLED, "The request was cancelled.")
            if found is None:
                answer.fail(loss)
                raise loss
            edge.resume.keep_here(name)
            if answer.bill is not None:
                part.note_loss_cost()
                answer.bill.continue_with(found.job.model.name, time.time())
            part = self._part(edge, answer, found, carried)
            job, submission, on_submitted = found.job, found.submission, lambda *_: None

    async def _next(self, edge: Edge, carried: CarriedText, name: str) -> _Next | None:
        """The submission to the next model that can continue the text; None: there is none."""
        await edge.admission.fair_yield.take(len(carried.text))
        async for job in self.successors:
            try:
                token_ids = await job.model.tokenizer.encode(
                    carried.text, scope=edge.callers.cache_scope_of(self.request)
                )
            except KvloomError:  # too much is being tokenized
                continue
            progress = progress_in_tokens(carried, token_ids, job.model.tokenizer, job.stop)
            window, num_prompt_tokens = edge.models.window(job.model.name), job.prompt_sizes[0]
            if progress is None or 0 < window <= num_prompt_tokens:
                continue
            room = window - num_prompt_tokens if window else 0
            stop = remaining_stop(job.stop, carried, len(token_ids), room)
            if stop is None:
                continue
            job.stop.CopyFrom(stop)
            submission = submission_of(edge, self.request, job, name)
            [request] = submission.requests
            assert request is not None
            request.partial_choices, request.is_new = [progress], True
            request.submit.num_foreign_tokens = len(token_ids)
            return _Next(job, submission, progress)
        return None

    def _part(self, edge: Edge, answer: StreamedAnswer, found: _Next, carried: CarriedText) -> AnswerPart:
        lost, model = answer.continued_by or self.job.model.name, found.job.model.name

        def on_begun() -> None:
            answer.continued_by = model
            edge.metrics.on_continued(self.route, lost, model)
            names = answer.request_context.log_fields() if answer.request_context else {}
            log.info(
                "answer_continued",
                **names,
                route=self.route,
                model=lost,
                continued_by=model,
                num_output_tokens=carried.num_tokens,
            )

        token_ids = found.progress.token_ids[:]  # the link adds to the other ones
        return AnswerPart(answer, found.submission.num_prompt_tokens, token_ids, on_begun)


def _request_id(submission: Submission) -> str:
    [request] = submission.requests
    assert request is not None
    return request.wanted.request_id
