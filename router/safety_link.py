"""The router's end of the safety service's data plane: `SafetyService.Screen`, kept up as long as the router runs."""

from __future__ import annotations

import asyncio
from typing import Final

import grpc
import structlog

from kvloom.errors import KvloomError
from kvloom.local_stream import LocalStream, connect_local
from kvloom.v1 import safety_service_pb2, safety_service_pb2_grpc
from router import convert
from router.core.actions import CheckPrompt, ScreenAnswers
from router.core.events import SafetyDown, SafetyUp
from router.dispatcher import Dispatcher
from router.prefilter import Outgoing, Prefilter, PrefilteredAnswers
from router.reconnect import CONNECT_TIMEOUT_SECONDS, LINK_OPTIONS, Backoff, LinkError, cause_of, raise_if_cancelled

log = structlog.get_logger()

MAX_WAITING_CHARS: Final = 64 * 2**20
MAX_CHARS_PER_FRAME: Final = 8 * 2**20
"""At most 4 bytes a character: half of what a gRPC message may have, and a prompt may be longer than the rest."""

ScreenCall = (
    LocalStream[safety_service_pb2.ScreenResponse, safety_service_pb2.ScreenRequest]
    | grpc.aio.StreamStreamCall[safety_service_pb2.ScreenRequest, safety_service_pb2.ScreenResponse]
)


class SafetyLink:
    """`run` is its only task. What waits leaves as one frame, each answer's text joined."""

    def __init__(self, address: str, dispatcher: Dispatcher) -> None:
        self._address = address
        self._dispatcher = dispatcher
        self._prompts: list[CheckPrompt] = []
        self._answers = PrefilteredAnswers()
        self._outgoing = Outgoing()
        self._num_waiting_chars = 0
        self._policy: safety_service_pb2.PolicyState | None = None
        self._wake = asyncio.Event()

    @property
    def screens_prompts(self) -> bool:
        """Whether a prompt's text will be read; while the policy is not known it may be."""
        return self._policy is None or self._policy.screens_prompts

    async def run(self) -> None:
        """Until cancelled."""
        backoff = Backoff()
        while True:
            started = self._dispatcher.now()
            try:
                await self._serve_one_connection()
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError, LinkError, KvloomError, TimeoutError) as error:
                log.warning("safety link broke", cause=cause_of(error))
            except Exception:
                log.exception("safety link failed")
            raise_if_cancelled()
            await asyncio.sleep(backoff.next_seconds(self._dispatcher.now() - started))

    # -- SafetyPeer ---------------------------------------------------------------------------------------------------

    def check_prompt(self, check: CheckPrompt) -> None:
        self._prompts.append(check)
        self._num_waiting_chars += len(check.text)
        self._wake.set()

    def screen_answers(self, answers: ScreenAnswers) -> None:
        known = self._answers.take(answers.slots, answers.deltas, answers.close_slots, self._outgoing, answers.skips)
        if self._outgoing:
            self._num_waiting_chars += sum(map(len, answers.deltas))
            self._wake.set()
        if known is not None:
            self._dispatcher.dispatch(known)  # behind the event at hand

    # -- one connection -----------------------------------------------------------------------------------------------

    async def _serve_one_connection(self) -> None:
        async with grpc.aio.insecure_channel(self._address, options=LINK_OPTIONS) as channel:
            local = await connect_local(self._address, safety_service_pb2.ScreenResponse)
            call: ScreenCall = local or safety_service_pb2_grpc.SafetyServiceStub(channel).Screen()
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_SECONDS):
                    first = await call.read()
                if not isinstance(first, safety_service_pb2.ScreenResponse) or not first.HasField("policy"):
                    raise LinkError("the safety service did not tell its policy")
                await self._serve_frames(call, first)
            finally:
                call.cancel()

    async def _serve_frames(self, call: ScreenCall, first: safety_service_pb2.ScreenResponse) -> None:
        self._forget_waiting()
        self._dispatcher.set_safety(self)
        writer = asyncio.create_task(self._write_frames(call), name="safety writer")
        try:
            self._on_frame(first)
            log.info("safety service up", address=self._address, policy_revision=first.policy.revision)
            while True:
                frame = await call.read()
                if not isinstance(frame, safety_service_pb2.ScreenResponse):
                    raise LinkError("the safety service ended the stream")
                self._on_frame(frame)
        finally:
            self._policy = None
            writer.cancel()
            self._dispatcher.set_safety(None)
            self._dispatcher.dispatch(SafetyDown())
            await asyncio.gather(writer, return_exceptions=True)

    def _on_frame(self, frame: safety_service_pb2.ScreenResponse) -> None:
        if frame.HasField("policy"):
            self._policy = frame.policy
            prefilter = self._answers.prefilter = Prefilter.from_policy(frame.policy)
            self._dispatcher.dispatch(SafetyUp(frame.policy.screens_prompts, frame.policy.screens_answers, prefilter))
        for verdict in frame.prompts:
            self._dispatcher.dispatch(convert.verdict_from_proto(verdict))
        if frame.slots or frame.halts or frame.closed_slots:
            self._answers.note(frame)
            self._dispatcher.dispatch(convert.screened_from_proto(frame))

    async def _write_frames(self, call: ScreenCall) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                if self._num_waiting_chars > MAX_WAITING_CHARS:
                    log.error("the safety service does not keep up", num_waiting_chars=self._num_waiting_chars)
                    break
                while self._prompts or self._outgoing:
                    await call.write(self._take_frame())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the reader sees the same break
        except Exception:
            log.exception("writing to the safety service failed")
        call.cancel()  # whatever it was: the reader ends the connection

    def _take_frame(self) -> safety_service_pb2.ScreenRequest:
        """All answers' text and as many prompts as fit."""
        outgoing, self._outgoing = self._outgoing, Outgoing()
        num_chars = num_prompts = 0
        for check in self._prompts:
            num_chars += len(check.text)
            num_prompts += 1
            if num_chars >= MAX_CHARS_PER_FRAME:
                break
        prompts, self._prompts = self._prompts[:num_prompts], self._prompts[num_prompts:]
        self._num_waiting_chars = sum(len(check.text) for check in self._prompts)
        return safety_service_pb2.ScreenRequest(
            prompts=[
                safety_service_pb2.PromptCheck(check_id=check.check_id, text=check.text, tenant=check.tenant)
                for check in prompts
            ],
            slots=list(outgoing.deltas),
            deltas=list(outgoing.deltas.values()),
            close_slots=outgoing.close_slots,
            skips=[
                safety_service_pb2.Skip(slot=slot, num_chars=num_chars, last_char=last_char)
                for slot, (num_chars, last_char) in outgoing.skips.items()
            ],
        )

    def _forget_waiting(self) -> None:
        """What was meant for an earlier connection."""
        self._prompts.clear()
        self._answers.forget_all()
        self._outgoing = Outgoing()
        self._num_waiting_chars = 0
        self._wake.clear()
