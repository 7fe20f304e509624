"""The screening stream of one router: every frame that arrives is answered by at most one frame."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import grpc
from google.protobuf.message import DecodeError

from kvloom.errors import KvloomError, protocol_violation
from kvloom.transport.grpc_errors import abort
from kvloom.v1.safety_service_pb2 import (
    DECISION_ALLOW,
    DECISION_BLOCK,
    AnswerScope,
    ClearedText,
    Finding,
    Halt,
    JudgeAnswer,
    JudgeQuestion,
    PromptCheck,
    PromptVerdict,
    ScreenRequest,
    ScreenResponse,
)
from kvloom_common.process.request_context import request_fields
from kvloom_common.transport.checked_server import malformed_message
from safety_svc.guardrails import Guardrails, JudgeError
from safety_svc.metrics import ANSWERS, PROMPTS
from safety_svc.policy import Hit, SafetyPolicy
from safety_svc.policy_file import PolicyFile
from safety_svc.rule_fields import Target
from safety_svc.rule_modes import IN_PROMPTS, Judge, Mode, UnknownGuardrailError
from safety_svc.screen import AnswerScreener, check_long_prompt, check_prompt, is_long
from safety_svc.watched_answers import WatchedAnswers

MAX_OPEN_ANSWERS: Final = 65_536
MAX_WAITING_LONG_PROMPTS: Final = 64
"""When more long prompts wait, no further frames are read. The router then applies its own limits."""

MAX_OUTSIDE: Final = 256
"""So many prompts of one router are with guardrails and models at a time. Others wait."""
MAX_WAITING_OUTSIDE: Final = 8192
"""When more wait, further ones cannot be judged. Frames are read on, because the answers of models are among them."""
_ERRORS_OF_TEXT: Final = ("CONTEXT_LENGTH_EXCEEDED", "REQUEST_TOO_LARGE", "INVALID_ARGUMENT")
"""The reasons for which a router asks no model, that lie in the text."""
EXCERPT_CHARS: Final = 80
"""How much of a prompt the audit log has before a passage, and from its beginning on."""


class Found(NamedTuple):
    """A forbidden text that was found."""

    target: Target
    rule: str
    is_blocked: bool
    policy: str
    """The revision of the policy."""
    names: Mapping[str, str]
    """Those of the request and of its tenant, for log lines."""
    safety_identifier: str = ""
    excerpt: str = ""
    position: int | None = None
    """Where the forbidden passage begins; None: that is not known."""
    needs_review: bool = False
    """A person is to decide about it."""


OnFound = Callable[[Found], None]

Context = grpc.aio.ServicerContext[ScreenRequest, ScreenResponse]


class ScreenConnection:
    """One screening stream. Each answer is screened to its end with the policy that was current when it began."""

    def __init__(self, policy_file: PolicyFile, context: Context, on_found: OnFound, guardrails: Guardrails) -> None:
        self._policy_file = policy_file
        self._context = context
        self._on_found = on_found
        self._guardrails = guardrails
        self._outside: set[asyncio.Task[None]] = set()
        """Prompts that guardrails judge."""
        self._room_outside = asyncio.Semaphore(MAX_OUTSIDE)
        self._watched = WatchedAnswers(guardrails, self.ask_model)
        self._questions: dict[int, asyncio.Future[JudgeAnswer]] = {}
        """To models, by their ids, until they are answered."""
        self._question_ids = itertools.count(1)
        self._answers: dict[int, AnswerScreener | None] = {}
        """By slot. None marks a halted answer: its further text is dropped until the router closes the slot."""
        self._scopes: dict[int, AnswerScope] = {}
        """By slot, whose answers they are, where that matters."""
        self._long_prompts: asyncio.Queue[PromptCheck] = asyncio.Queue(MAX_WAITING_LONG_PROMPTS)
        self._write_lock = asyncio.Lock()
        self._changed = asyncio.Event()
        self._draining = False

    async def drain(self) -> None:
        """Ask the router to open another stream for new texts. This stream is served until the router closes it."""
        if not self._draining:
            self._draining = True
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the router is closing it
                await self._write(ScreenResponse(draining=True))

    async def serve(self) -> None:
        """Screen until the router closes the stream."""
        on_change = self._changed.set
        self._policy_file.listen(on_change)
        tasks: list[asyncio.Task[None]] = []
        try:
            async with asyncio.TaskGroup() as group:  # a task that fails ends the stream
                tasks.append(group.create_task(self._announce_changes(), name="policy announcer"))
                tasks.append(group.create_task(self._check_long_prompts(), name="long prompts"))
                await self._write(ScreenResponse(policy=self._policy_file.state))
                violation = await self._read_frames()
                for task in tasks:
                    task.cancel()
        finally:
            for task in self._outside:
                task.cancel()
            await asyncio.gather(*self._outside, return_exceptions=True)
            await self._watched.close()
            self._policy_file.unlisten(on_change)
        if violation is not None:
            await abort(self._context, violation)

    async def _read_frames(self) -> KvloomError | None:
        """Read until the end of the stream. Returns the error of the first frame that violates the protocol, if any."""
        try:
            while isinstance(frame := await self._context.read(), ScreenRequest):
                await self._on_frame(frame)
        except KvloomError as error:
            return error
        except DecodeError:
            return malformed_message()
        return None

    async def _on_frame(self, frame: ScreenRequest) -> None:
        if len(frame.slots) != len(frame.deltas):
            raise protocol_violation("slots and deltas differ in length.")
        response = ScreenResponse()
        if frame.prompts:
            PROMPTS.inc(len(frame.prompts))
        for answer in frame.judge_answers:
            asked = self._questions.get(answer.question_id)
            if asked is not None and not asked.done():
                asked.set_result(answer)
        for check in frame.prompts:
            if self._policy_file.current.guardrails:
                self._begin_outside(check)
            elif is_long(check.text):
                await self._long_prompts.put(check)
            else:
                policy = self._policy_file.current
                judge = prompt_judge(policy, check.tenant, check.guardrails)
                hit = check_prompt(policy.prompt, check.text, judge)
                response.prompts.append(self._verdict(policy, check, hit, judge))
        for scope in frame.scopes:
            self._scopes[scope.slot] = scope
        for cleared in frame.cleared_texts:
            self._skip(cleared)
        for slot, delta in zip(frame.slots, frame.deltas, strict=True):
            screener = self._screener(slot)
            if screener is None:
                continue
            screener.push(delta)
            self._watched.push(slot, delta)
            self._note_flagged(slot, screener, response)
            if screener.hit is not None:
                response.halts.append(self._halt(slot, screener, screener.hit))
            else:
                response.slots.append(slot)
                response.num_clear_chars.append(screener.num_clear_chars)
        for slot in frame.close_slots:
            screener = self._answers.pop(slot, None)
            if screener is not None:
                screener.close()
                self._note_flagged(slot, screener, response)
                if screener.hit is not None:
                    response.halts.append(self._halt(slot, screener, screener.hit))
                    del self._answers[slot]
            owner = self._scopes.pop(slot, None)
            if screener is not None and screener.hit is None:
                self._watched.end(slot, functools.partial(self._flagged_in_answer, owner))
            response.closed_slots.append(slot)
        if response.ByteSize():
            await self._write(response)

    async def _check_long_prompts(self) -> None:
        """Check long prompts one at a time and concurrently with answers, so that they do not delay any tokens."""
        while True:
            check = await self._long_prompts.get()
            policy = self._policy_file.current
            judge = prompt_judge(policy, check.tenant, check.guardrails)
            hit = await check_long_prompt(policy.prompt, check.text, judge)
            await self._write(ScreenResponse(prompts=[self._verdict(policy, check, hit, judge)]))

    async def ask_model(self, question: JudgeQuestion) -> JudgeAnswer:
        """Have the router ask a model, and return its answer. Raises JudgeError."""
        question.question_id = number = next(self._question_ids) % 2**32
        asked = self._questions[number] = asyncio.get_running_loop().create_future()
        try:
            await self._write(ScreenResponse(judge_questions=[question]))
            answer = await asked
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise JudgeError("the router is gone") from error
        finally:
            del self._questions[number]
        if answer.error:
            raise JudgeError(answer.error.lower(), is_due_to_text=answer.error in _ERRORS_OF_TEXT)
        return answer

    def _begin_outside(self, check: PromptCheck) -> None:
        task = asyncio.create_task(self._check_outside(check), name="guardrails")
        self._outside.add(task)
        task.add_done_callback(self._outside.discard)

    async def _check_outside(self, check: PromptCheck) -> None:
        """Check a prompt by the rules, and then outside. A stream that breaks meanwhile takes no verdict."""
        policy = self._policy_file.current
        judge = prompt_judge(policy, check.tenant, check.guardrails)
        hit = await check_long_prompt(policy.prompt, check.text, judge)
        if hit is None and len(self._outside) > MAX_WAITING_OUTSIDE:
            hit = self._guardrails.unasked(policy, judge)
        elif hit is None:
            async with self._room_outside:
                names = {"tenant": check.tenant, "request_id": check.request_id}
                hit = await self._guardrails.judge(policy, check.text, judge, names, self.ask_model)
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._write(ScreenResponse(prompts=[self._verdict(policy, check, hit, judge)]))

    def _skip(self, cleared: ClearedText) -> None:
        screener = self._screener(cleared.slot)
        if screener is None:
            return
        if not screener.is_clear or not cleared.num_chars or len(cleared.last_char) != 1:
            raise protocol_violation("Cleared text may only follow text that is clear.")
        screener.skip(cleared.num_chars, cleared.last_char)
        self._watched.drop(cleared.slot)

    def _screener(self, slot: int) -> AnswerScreener | None:
        if slot in self._answers:
            return self._answers[slot]
        if len(self._answers) >= MAX_OPEN_ANSWERS:
            raise protocol_violation("Too many answers are open on this stream.")
        ANSWERS.inc()
        policy, owner = self._policy_file.current, self._scopes.get(slot) or AnswerScope()
        scope = policy.scopes.of(owner.tenant, owner.guardrails)
        screener = self._answers[slot] = AnswerScreener(policy.answer, policy.watched_answer, scope)
        if policy.answer_guardrails:
            self._watched.begin(slot, policy, scope, owner.tenant)
        return screener

    def _note_flagged(self, slot: int, screener: AnswerScreener, response: ScreenResponse) -> None:
        new = screener.new_flags()
        if new:
            response.flagged_slots.append(slot)
        for name, mode in new:
            self._flagged_in_answer(self._scopes.get(slot), name, mode)

    def _flagged_in_answer(self, owner: AnswerScope | None, rule: str, mode: Mode) -> None:
        self._on_found(self._in_answer(owner, rule, is_blocked=False)._replace(needs_review=mode == "review"))

    def _in_answer(self, owner: AnswerScope | None, rule: str, *, is_blocked: bool) -> Found:
        owner = owner or AnswerScope()
        names = request_fields(owner.request_id, tenant=owner.tenant)
        return Found("answer", rule, is_blocked, self._policy_file.current.revision, names, owner.safety_identifier)

    def _halt(self, slot: int, screener: AnswerScreener, hit: Hit) -> Halt:
        self._answers[slot] = None
        self._watched.drop(slot)
        if not hit.is_failure:
            found = self._in_answer(self._scopes.get(slot), hit.rule.name, is_blocked=True)
            self._on_found(found._replace(position=hit.start))
        # Rules in mode async let more of it be shown than they allow.
        num_clear_chars = min(screener.num_clear_chars, hit.start)
        return Halt(slot=slot, num_clear_chars=num_clear_chars, finding=finding(hit))

    def _verdict(self, policy: SafetyPolicy, check: PromptCheck, hit: Hit | None, judge: Judge) -> PromptVerdict:
        verdict = PromptVerdict(check_id=check.check_id, decision=DECISION_ALLOW if hit is None else DECISION_BLOCK)
        if check.guardrails:
            try:
                policy.scopes.check(check.tenant, check.guardrails)
            except UnknownGuardrailError as error:
                verdict.decision, verdict.unknown_guardrail = DECISION_BLOCK, str(error)
                return verdict
        if check.guardrails or check.tells_rules:
            names_held = policy.scopes.of(check.tenant, check.guardrails).names
            verdict.rules.extend(name for name in names_held if name not in judge.unapplied)
        names = request_fields(check.request_id, check.client_request_id, check.traceparent, check.tenant)
        subject = policy.revision, names, check.safety_identifier
        for name, mode in judge.flagged.items():
            self._on_found(Found("prompt", name, False, *subject, needs_review=mode == "review"))
        if hit is not None:
            verdict.finding.CopyFrom(finding(hit))
            if not hit.is_failure:
                excerpt = excerpt_of(check.text, hit)
                self._on_found(Found("prompt", hit.rule.name, True, *subject, excerpt, hit.start))
        return verdict

    async def _announce_changes(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._write(ScreenResponse(policy=self._policy_file.state))

    async def _write(self, response: ScreenResponse) -> None:
        async with self._write_lock:  # a stream takes one write at a time
            await self._context.write(response)


def finding(hit: Hit) -> Finding:
    message = "" if hit.is_failure else hit.rule.message
    fails_closed = hit.is_failure and hit.rule.on_failure == "refuse"
    return Finding(rule=hit.rule.name, message=message, rule_failed=hit.is_failure, fails_closed=fails_closed)


def excerpt_of(text: str, hit: Hit) -> str:
    """The passage that was found in a prompt, with the text around it."""
    return text[max(0, hit.start - EXCERPT_CHARS) : hit.start + EXCERPT_CHARS]


def prompt_judge(policy: SafetyPolicy, tenant: str, guardrails: Sequence[str]) -> Judge:
    """Make the judge of a prompt."""
    return Judge(policy.scopes.of(tenant, guardrails), IN_PROMPTS, {})
