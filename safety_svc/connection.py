"""The screening stream of one router: every frame that arrives is answered by at most one frame."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Final

import grpc
from google.protobuf.message import DecodeError

from kvloom.errors import KvloomError, protocol_violation
from kvloom.transport.grpc_errors import abort
from kvloom.v1.safety_service_pb2 import (
    DECISION_ALLOW,
    DECISION_BLOCK,
    ClearedText,
    Finding,
    Halt,
    PolicyState,
    PromptCheck,
    PromptVerdict,
    ScreenRequest,
    ScreenResponse,
)
from kvloom_common.process.request_context import request_fields
from kvloom_common.transport.checked_server import malformed_message
from safety_svc.metrics import ANSWERS, PROMPTS
from safety_svc.policy import Hit, Rule, SafetyPolicy
from safety_svc.policy_file import PolicyFile
from safety_svc.prefilter import answer_prefilter, prompt_prefilter
from safety_svc.screen import AnswerScreener, check_long_prompt, check_prompt, is_long

MAX_OPEN_ANSWERS: Final = 65_536
MAX_WAITING_LONG_PROMPTS: Final = 64
"""When more long prompts wait, no further frames are read. The router then applies its own limits."""

OnBlock = Callable[[str, Rule, Mapping[str, str]], None]
"""Called with ("prompt" or "answer", rule, names of the request) for every text that is blocked. The names of an
answer's request are not known here: they are in the router's line "request ended", with the outcome content_filter."""

Context = grpc.aio.ServicerContext[ScreenRequest, ScreenResponse]


class ScreenConnection:
    """One screening stream. Each answer is screened to its end with the policy that was current when it began."""

    def __init__(self, policy_file: PolicyFile, context: Context, on_block: OnBlock) -> None:
        self._policy_file = policy_file
        self._context = context
        self._on_block = on_block
        self._answers: dict[int, AnswerScreener | None] = {}
        """By slot. None marks a halted answer: its further text is dropped until the router closes the slot."""
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
                await self._write(ScreenResponse(policy=policy_state(self._policy_file.current)))
                violation = await self._read_frames()
                for task in tasks:
                    task.cancel()
        finally:
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
        for check in frame.prompts:
            if is_long(check.text):
                await self._long_prompts.put(check)
            else:
                hit = check_prompt(self._policy_file.current.prompt, check.text)
                response.prompts.append(self._verdict(check, hit))
        for cleared in frame.cleared_texts:
            self._skip(cleared)
        for slot, delta in zip(frame.slots, frame.deltas, strict=True):
            screener = self._screener(slot)
            if screener is None:
                continue
            screener.push(delta)
            if screener.hit is not None:
                response.halts.append(self._halt(slot, screener, screener.hit))
            else:
                response.slots.append(slot)
                response.num_clear_chars.append(screener.num_clear_chars)
        for slot in frame.close_slots:
            screener = self._answers.pop(slot, None)
            if screener is not None:
                screener.close()
                if screener.hit is not None:
                    response.halts.append(self._halt(slot, screener, screener.hit))
                    del self._answers[slot]
            response.closed_slots.append(slot)
        if response.ByteSize():
            await self._write(response)

    async def _check_long_prompts(self) -> None:
        """Check long prompts one at a time and concurrently with answers, so that they do not delay any tokens."""
        while True:
            check = await self._long_prompts.get()
            hit = await check_long_prompt(self._policy_file.current.prompt, check.text)
            await self._write(ScreenResponse(prompts=[self._verdict(check, hit)]))

    def _skip(self, cleared: ClearedText) -> None:
        screener = self._screener(cleared.slot)
        if screener is None:
            return
        if not screener.is_clear or not cleared.num_chars or len(cleared.last_char) != 1:
            raise protocol_violation("Cleared text may only follow text that is clear.")
        screener.skip(cleared.num_chars, cleared.last_char)

    def _screener(self, slot: int) -> AnswerScreener | None:
        if slot in self._answers:
            return self._answers[slot]
        if len(self._answers) >= MAX_OPEN_ANSWERS:
            raise protocol_violation("Too many answers are open on this stream.")
        ANSWERS.inc()
        screener = self._answers[slot] = AnswerScreener(self._policy_file.current.answer)
        return screener

    def _halt(self, slot: int, screener: AnswerScreener, hit: Hit) -> Halt:
        self._answers[slot] = None
        if not hit.is_failure:
            self._on_block("answer", hit.rule, {})
        return Halt(slot=slot, num_clear_chars=screener.num_clear_chars, finding=finding(hit))

    def _verdict(self, check: PromptCheck, hit: Hit | None) -> PromptVerdict:
        if hit is None:
            return PromptVerdict(check_id=check.check_id, decision=DECISION_ALLOW)
        if hit.is_failure:
            return PromptVerdict(check_id=check.check_id, decision=DECISION_BLOCK, finding=finding(hit))
        names = request_fields(check.request_id, check.client_request_id, check.traceparent, check.tenant)
        self._on_block("prompt", hit.rule, names)
        return PromptVerdict(check_id=check.check_id, decision=DECISION_BLOCK, finding=finding(hit))

    async def _announce_changes(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._write(ScreenResponse(policy=policy_state(self._policy_file.current)))

    async def _write(self, response: ScreenResponse) -> None:
        async with self._write_lock:  # a stream takes one write at a time
            await self._context.write(response)


def finding(hit: Hit) -> Finding:
    message = "" if hit.is_failure else hit.rule.message
    return Finding(rule=hit.rule.name, message=message, rule_failed=hit.is_failure)


def policy_state(policy: SafetyPolicy) -> PolicyState:
    return PolicyState(
        revision=policy.revision,
        screens_prompts=bool(policy.prompt),
        screens_answers=bool(policy.answer),
        answer_prefilter=answer_prefilter(policy.answer),
        prompt_prefilter=prompt_prefilter(policy.prompt),
    )
