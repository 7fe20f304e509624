"""Chooses how an answer comes to its end that is not delivered as it is: one that is judged, or has hidden texts."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from aiohttp import web

from edge_http.answers.answer import EdgeAnswer
from edge_http.answers.cascade_candidate import CascadeCandidate
from edge_http.edge import Edge
from edge_http.endpoints.masking import RestoredRun
from edge_http.endpoints.moderating import ModeratedRun, WantedModeration
from edge_http.formatting.response_formatter import ResponseFormatter
from edge_http.submission import OnSubmitted, RunAnyAnswer, Submission, run_submission
from edge_http.wire.request_headers import RequestHeaders


class WrappedJob(Protocol):
    """The part of a GenerationJob that matters here."""

    asked: RequestHeaders
    stream: bool
    deadline: float | None
    prompt_sizes: Sequence[int]
    moderation: WantedModeration | None
    originals: Mapping[str, str]

    @property
    def n(self) -> int: ...


@dataclasses.dataclass(frozen=True, slots=True)
class HeldRun:
    """Delivers an answer that is there already (RunAnyAnswer)."""

    held: CascadeCandidate
    drain: Callable[[], Awaitable[None]]
    deadline: float | None

    async def __call__(
        self,
        edge: Edge,  # noqa: ARG002
        submission: Submission,  # noqa: ARG002
        answer: EdgeAnswer,
        on_submitted: OnSubmitted = lambda *_: None,  # noqa: ARG002
    ) -> None:
        await self.held.deliver(answer, self.drain, self.deadline)


def wrapped_run(
    edge: Edge, request: web.BaseRequest, job: WrappedJob, form: ResponseFormatter, held: CascadeCandidate | None
) -> RunAnyAnswer:
    """Make the run of an answer that is judged before it ends, or has hidden texts put back, or both."""
    is_here = job.stream and not edge.resume.is_wanted(job.asked.resume) and not job.asked.idempotency_key
    drain = request.writer.drain if is_here else lambda: asyncio.sleep(0)
    run: RunAnyAnswer = run_submission if held is None else HeldRun(held, drain, job.deadline)
    if job.moderation is not None:
        run = ModeratedRun(request, job.moderation, form, job.prompt_sizes, job.n, drain, run, job.deadline)
    return RestoredRun(run, job.originals, job.prompt_sizes, job.n) if job.originals else run
