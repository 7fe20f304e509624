"""Moderation in line: a request may ask what the safety policy says of its texts and of its answer, and that the policy
blocks them. The policy's own rules hold besides."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from aiohttp import web

from edge_http.answers.answer import EdgeAnswer
from edge_http.answers.moderated_answer import ModeratedAnswer
from edge_http.edge import Edge
from edge_http.endpoints.masking import RestoredRun
from edge_http.formatting.json_bytes import Json
from edge_http.formatting.moderation import model_of, result_objects
from edge_http.formatting.response_formatter import InlineResults, ResponseFormatter
from edge_http.openai.requests import InlineModeration
from edge_http.submission import OnSubmitted, RunAnswer, Submission, on_submitted
from edge_http.wire.request_headers import RequestHeaders
from kvloom.errors import KvloomError
from kvloom.text.chat_message import ChatMessage
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.router_service_pb2 import ModerateRequest
from kvloom_common.limits.byte_budget import ByteLease


@dataclasses.dataclass(frozen=True, slots=True)
class WantedModeration:
    """A request's wish for moderation in line."""

    text: str
    """All texts of its messages."""
    blocks_input: bool
    blocks_output: bool


def moderation_of(asked: InlineModeration, messages: Sequence[ChatMessage]) -> WantedModeration:
    """Read the wish of a body with this conversation."""
    modes = asked.policy
    return WantedModeration(
        "\n".join(message.content for message in messages),
        blocks_input=modes is not None and modes.input is not None and modes.input.mode == "block",
        blocks_output=modes is not None and modes.output is not None and modes.output.mode == "block",
    )


class _Verdict(NamedTuple):
    """The results for some texts, or the reason why there are none."""

    shown: Json
    flagged: Mapping[int, str]
    """By text: its categories."""
    error: KvloomError | None = None

    def check(self) -> None:
        """Raises KvloomError if the texts were not judged."""
        if self.error is not None:
            raise self.error


@dataclasses.dataclass(slots=True)
class ModeratedRun:
    """Brings an answer to its end as `run_submission` does (RunAnswer), and judges it before it ends. What is not
    judged is not delivered where it might have been blocked."""

    request: web.BaseRequest
    wanted: WantedModeration
    formatter: ResponseFormatter
    prompt_sizes: Sequence[int]
    n: int
    drain: Callable[[], Awaitable[None]]
    """Returns when the client has room for more."""
    run: RunAnswer
    """How the answer comes to its end."""
    deadline: float | None = None

    async def __call__(
        self, edge: Edge, submission: Submission, answer: EdgeAnswer, on_submitted: OnSubmitted = on_submitted
    ) -> None:
        for each in submission.requests:
            if each is not None:
                edge.resume.keep_here(each.wanted.request_id)  # another edge would not judge it
        judging = asyncio.create_task(_judge(edge, [self.wanted.text]), name="moderation of input")
        try:
            if self.wanted.blocks_input:
                _check_input(await judging)
            with edge.admission.collected.lease(edge.callers.caller_of(self.request)) as lease:
                part = await self._run(edge, submission, answer, on_submitted, lease)
                output = await _judge(edge, part.texts)
                if self.wanted.blocks_output:
                    output.check()
                    part.block({index: _message("answer", named) for index, named in output.flagged.items()})
                self.formatter.moderation = InlineResults((await judging).shown, output.shown)
                await part.deliver(answer, self.drain, self.deadline)
        except KvloomError as error:
            answer.fail(error)
            raise
        finally:
            judging.cancel()

    async def _run(
        self, edge: Edge, submission: Submission, answer: EdgeAnswer, on_submitted: OnSubmitted, lease: ByteLease
    ) -> ModeratedAnswer:
        """Raises KvloomError."""
        limit, is_held = edge.config.max_answer_bytes, self.wanted.blocks_output
        part = ModeratedAnswer(answer, self.prompt_sizes, self.n, limit, lease, is_held=is_held)
        await self.run(edge, submission, part, on_submitted)
        return part


async def _judge(edge: Edge, texts: Sequence[str]) -> _Verdict:
    try:
        answer = await edge.link.moderate(ModerateRequest(texts=texts))
    except KvloomError as error:
        code = error.kind.openai_code or error.kind.openai_type
        return _Verdict({"type": "error", "code": code, "message": error.message}, {}, error)
    model = model_of(answer)
    results = [{"type": "moderation_result", "model": model, **result} for result in result_objects(answer)]
    flagged = {i: ", ".join(result.categories) for i, result in enumerate(answer.results) if result.categories}
    return _Verdict({"type": "moderation_results", "model": model, "results": results}, flagged)


def _check_input(verdict: _Verdict) -> None:
    """Raises KvloomError."""
    verdict.check()
    if verdict.flagged:
        message = _message("request", verdict.flagged[0])
        raise KvloomError(ErrorReason.ERROR_REASON_CONTENT_FILTERED, message, field="moderation.policy.input")


def _message(what: str, categories: str) -> str:
    return f"The safety policy flags this {what}: {categories}."


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


def wrapped_run(
    edge: Edge, request: web.BaseRequest, job: WrappedJob, form: ResponseFormatter, run: RunAnswer
) -> RunAnswer:
    """Returns the run of an answer that is judged before it ends, or has hidden texts put back, or both, and that `run`
    would bring to its end otherwise."""
    is_here = job.stream and not edge.resume.is_wanted(job.asked.resume) and not job.asked.idempotency_key
    drain = request.writer.drain if is_here else lambda: asyncio.sleep(0)
    if job.moderation is not None:
        run = ModeratedRun(request, job.moderation, form, job.prompt_sizes, job.n, drain, run, job.deadline)
    return RestoredRun(run, job.originals, job.prompt_sizes, job.n) if job.originals else run
