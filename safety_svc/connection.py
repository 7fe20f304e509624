"""One router's screening stream: a frame in, at most one frame out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import grpc

from kvloom.errors import KvloomError
from kvloom.grpc_errors import abort
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.safety_service_pb2 import (
    DECISION_ALLOW,
    DECISION_BLOCK,
    Finding,
    Halt,
    PolicyState,
    PromptCheck,
    PromptVerdict,
    ScreenRequest,
    ScreenResponse,
)
from safety_svc.policy import Policy, Rule
from safety_svc.policy_file import PolicyFile
from safety_svc.screen import AnswerScreener, Hit, check_prompt

MAX_OPEN_ANSWERS: Final = 65_536
MAX_INLINE_CHARS: Final = 32_768
"""A prompt up to this length is checked on the event loop (well under a millisecond); a longer one in a thread."""

OnBlock = Callable[[str, Rule], None]
"""Hears ("prompt" or "answer", rule) of everything that is blocked."""

Context = grpc.aio.ServicerContext[ScreenRequest, ScreenResponse]


class ScreenConnection:
    """Answers keep the policy that was in force when they began."""

    def __init__(self, policy_file: PolicyFile, context: Context, on_block: OnBlock) -> None:
        self._policy_file = policy_file
        self._context = context
        self._on_block = on_block
        self._answers: dict[int, AnswerScreener | None] = {}
        """By slot. None: halted, what still comes is dropped until the slot is closed."""
        self._write_lock = asyncio.Lock()
        self._changed = asyncio.Event()

    async def serve(self) -> None:
        """Until the router hangs up."""
        self._policy_file.listen(self._changed.set)
        announcer = asyncio.create_task(self._announce_changes(), name="policy announcer")
        try:
            await self._write(ScreenResponse(policy=policy_state(self._policy_file.current)))
            while True:
                frame = await self._context.read()
                if not isinstance(frame, ScreenRequest):  # the end of the stream
                    return
                await self._on_frame(frame)
        except KvloomError as error:
            await abort(self._context, error)
        finally:
            self._policy_file.unlisten(self._changed.set)
            announcer.cancel()
            await asyncio.gather(announcer, return_exceptions=True)

    async def _on_frame(self, frame: ScreenRequest) -> None:
        prompts = [await self._check(check) for check in frame.prompts] if frame.prompts else ()
        slots: list[int] = []
        num_clear_chars: list[int] = []
        halts: list[Halt] = []
        if len(frame.slots) != len(frame.deltas):
            raise KvloomError(ErrorReason.ERROR_REASON_PROTOCOL_VIOLATION, "slots and deltas differ in length.")
        for slot, delta in zip(frame.slots, frame.deltas, strict=True):
            screener = self._screener(slot)
            if screener is None:
                continue
            screener.push(delta)
            if screener.hit is not None:
                halts.append(self._halt(slot, screener, screener.hit))
            else:
                slots.append(slot)
                num_clear_chars.append(screener.num_clear_chars)
        for slot in frame.close_slots:
            screener = self._answers.pop(slot, None)
            if screener is not None:
                screener.close()
                if screener.hit is not None:
                    halts.append(self._halt(slot, screener, screener.hit))
                    del self._answers[slot]
        if prompts or slots or halts or frame.close_slots:
            response = ScreenResponse(
                prompts=prompts,
                slots=slots,
                num_clear_chars=num_clear_chars,
                halts=halts,
                closed_slots=frame.close_slots[:],
            )
            await self._write(response)

    def _screener(self, slot: int) -> AnswerScreener | None:
        if slot in self._answers:
            return self._answers[slot]
        if len(self._answers) >= MAX_OPEN_ANSWERS:
            raise KvloomError(ErrorReason.ERROR_REASON_PROTOCOL_VIOLATION, "Too many answers are open.")
        screener = self._answers[slot] = AnswerScreener(self._policy_file.current.answer)
        return screener

    def _halt(self, slot: int, screener: AnswerScreener, hit: Hit) -> Halt:
        self._answers[slot] = None
        self._on_block("answer", hit.rule)
        return Halt(slot=slot, num_clear_chars=screener.num_clear_chars, finding=finding(hit.rule))

    async def _check(self, check: PromptCheck) -> PromptVerdict:
        hit = await find_in_prompt(self._policy_file.current, check.text)
        if hit is None:
            return PromptVerdict(check_id=check.check_id, decision=DECISION_ALLOW)
        self._on_block("prompt", hit.rule)
        return PromptVerdict(check_id=check.check_id, decision=DECISION_BLOCK, finding=finding(hit.rule))

    async def _announce_changes(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._write(ScreenResponse(policy=policy_state(self._policy_file.current)))

    async def _write(self, response: ScreenResponse) -> None:
        async with self._write_lock:  # a stream takes one write at a time
            await self._context.write(response)


async def find_in_prompt(policy: Policy, text: str) -> Hit | None:
    """The first forbidden thing in a prompt; long ones are searched off the event loop."""
    if len(text) <= MAX_INLINE_CHARS:
        return check_prompt(policy.prompt, text)
    return await asyncio.to_thread(check_prompt, policy.prompt, text)


def finding(rule: Rule) -> Finding:
    return Finding(rule=rule.name, message=rule.message)


def policy_state(policy: Policy) -> PolicyState:
    return PolicyState(
        revision=policy.revision, screens_prompts=bool(policy.prompt), screens_answers=bool(policy.answer)
    )
