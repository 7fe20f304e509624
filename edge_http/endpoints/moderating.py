"""Moderation in line: a request may ask what the safety policy says of its texts and of its answer, and that the policy
blocks them. The policy's own rules hold besides."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from aiohttp import web

from edge_http.answers.answer import EdgeAnswer
from edge_http.answers.cascade_candidate import CascadeCandidate, Update
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
from kvloom.v1.generation_pb2 import FINISH_REASON_CONTENT_FILTER, SequenceFinish, SequenceStart, TokenLogprobs
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


class ModeratedAnswer(CascadeCandidate):
    """Passes on what the model writes, or holds that, too, if the answer may be blocked. What is judged is all text as
    the model wrote it: with its reasoning and its calls."""

    __slots__ = ("_answer", "_is_held")

    def __init__(
        self,
        answer: EdgeAnswer,
        prompt_sizes: Sequence[int],
        n: int,
        max_bytes: int,
        lease: ByteLease,
        *,
        is_held: bool,
    ) -> None:
        """`answer` is what the client gets. `lease` is the answer's part of the memory of all answers."""
        super().__init__(prompt_sizes, n, max_bytes, lease, response_id="", shows_logprobs=True)
        self._answer = answer
        self._is_held = is_held
        self.request_context = answer.request_context
        answer.ended.add_done_callback(self._on_answer_ended)

    @property
    def texts(self) -> list[str]:
        """By choice, once the answer has ended without an error."""
        return [candidate.text for candidate in self.candidates()]

    def block(self, messages: Mapping[int, str]) -> None:
        """Leave out the output of these choices, which the policy has ended, and for which it says this."""
        kept: list[tuple[int, Update]] = []
        for index, update in self._updates:
            if index in messages and isinstance(update, SequenceFinish):
                ended = SequenceFinish()
                ended.CopyFrom(update)
                ended.reason, ended.stop_string = FINISH_REASON_CONTENT_FILTER, ""
                ended.error.reason, ended.error.message = ErrorReason.ERROR_REASON_CONTENT_FILTERED, messages[index]
                kept.append((index, ended))
            elif index not in messages or isinstance(update, SequenceStart):
                kept.append((index, update))
        self._updates = kept

    @property
    def _is_visible(self) -> bool:
        return self._answer._is_visible

    def _add_start(self, index: int) -> None:
        if self._is_held:
            super()._add_start(index)
        else:
            self._answer.on_start(index, self.starts[index])

    def _add_tokens(self, index: int, delta: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        if self._is_held:
            super()._add_tokens(index, delta, token_ids, logprobs)
            return
        self._note_first_token()
        self._keep_text(index, delta)
        self._answer.on_tokens(index, delta, token_ids, logprobs)

    def _on_answer_ended(self, _ended: asyncio.Future[None]) -> None:
        """By itself, if its client reads too slowly or has cancelled it."""
        if self._answer.error is not None:
            self.fail(self._answer.error)
        elif not self.ended.done():
            self.fail(KvloomError(ErrorReason.ERROR_REASON_CANCELLED, "The answer has ended."))
