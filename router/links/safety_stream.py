"""One stream to one safety service: the frames that wait for it and the answers that it screens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

import grpc
import structlog

from kvloom.transport.local_client import connect_local
from kvloom.transport.local_stream import LocalStream
from kvloom.v1 import safety_service_pb2, safety_service_pb2_grpc
from kvloom_common.trust.fabric_trust import NO_SECRET, FabricTrust
from router.caller_scope import shown_id
from router.core.actions import CheckPrompt
from router.links.prefilter import Outgoing, Prefilter, PrefilteredAnswers
from router.links.reconnect import CONNECT_TIMEOUT_SECONDS, LINK_OPTIONS, LinkError

log = structlog.get_logger()

CLASSIFY_TIMEOUT_SECONDS: Final = 30.0
MAX_WAITING_CHARS: Final = 64 * 2**20
MAX_CHARS_PER_FRAME: Final = 8 * 2**20
"""A character takes at most 4 bytes, so this is half the limit of a gRPC message; the frame's last prompt may add the
other half."""

ScreenCall = (
    LocalStream[safety_service_pb2.ScreenResponse, safety_service_pb2.ScreenRequest]
    | grpc.aio.StreamStreamCall[safety_service_pb2.ScreenRequest, safety_service_pb2.ScreenResponse]
)


class SafetyStream:
    """Whatever waits is sent as one frame, with each answer's text joined."""

    def __init__(
        self,
        address: str,
        channel: grpc.aio.Channel,
        call: ScreenCall,
        policy: safety_service_pb2.PolicyState,
        *,
        answers_are_searched: bool = False,
    ) -> None:
        """`answers_are_searched`: see PrefilteredAnswers."""
        self.address = address
        self.answers = PrefilteredAnswers(are_searched=answers_are_searched)
        self.outgoing = Outgoing()
        self.is_replaced = False
        """Another stream has taken its place; this one still screens the answers that are not clear."""
        self.policy: safety_service_pb2.PolicyState
        self._channel = channel
        self._call = call
        self.is_closed = False
        self._prompts: list[CheckPrompt] = []
        self._judge_answers: list[safety_service_pb2.JudgeAnswer] = []
        self._open_checks: set[int] = set()
        self._closing: set[int] = set()
        self._num_waiting_chars = 0
        self._wake = asyncio.Event()
        self.take_policy(policy)

    @classmethod
    async def open(
        cls, address: str, trust: FabricTrust = NO_SECRET, *, answers_are_searched: bool = False
    ) -> SafetyStream:
        """Opens a stream, which the caller must close. Raises AioRpcError, TimeoutError, LinkError."""
        channel = trust.open_channel(address, "safety", options=LINK_OPTIONS)
        call: ScreenCall | None = None
        try:
            local = await connect_local(address, safety_service_pb2.ScreenResponse)
            call = local or safety_service_pb2_grpc.SafetyServiceStub(channel).Screen()
            async with asyncio.timeout(CONNECT_TIMEOUT_SECONDS):
                policy = _policy_in(await call.read())
                return cls(address, channel, call, policy, answers_are_searched=answers_are_searched)
        except BaseException:
            if call is not None:
                call.cancel()
            await channel.close()
            raise

    async def close(self) -> None:
        self.is_closed = True
        self._call.cancel()
        await self._channel.close()

    async def classify(self, request: safety_service_pb2.ClassifyRequest) -> safety_service_pb2.ClassifyResponse:
        """Raises AioRpcError."""
        stub = safety_service_pb2_grpc.SafetyServiceStub(self._channel)
        return await stub.Classify(request, timeout=CLASSIFY_TIMEOUT_SECONDS)

    def take_policy(self, policy: safety_service_pb2.PolicyState) -> None:
        self.policy = policy
        self.answers.prefilter = Prefilter.from_policy(policy)

    def check_prompt(self, check: CheckPrompt) -> None:
        self._prompts.append(check)
        self._open_checks.add(check.check_id)
        self._count(len(check.text))

    def answer_question(self, answer: safety_service_pb2.JudgeAnswer) -> None:
        """Send a model's answer to a question of the service."""
        self._judge_answers.append(answer)
        self._wake.set()

    def flush(self, num_chars: int, closing: Iterable[int]) -> None:
        """Schedules the sending of what was put into `outgoing`: `num_chars` of text and the slots in `closing`."""
        self._closing.update(closing)
        self._count(num_chars)

    def _count(self, num_chars: int) -> None:
        """Bounds the text that waits, also while a write is blocked."""
        was_too_much = self._num_waiting_chars > MAX_WAITING_CHARS
        self._num_waiting_chars += num_chars
        if self._num_waiting_chars > MAX_WAITING_CHARS and not was_too_much:
            log.error("safety_service_fell_behind", num_waiting_chars=self._num_waiting_chars)
            self._call.cancel()  # The reader then ends the connection.
        self._wake.set()

    def note(self, frame: safety_service_pb2.ScreenResponse) -> None:
        """Records what the service has cleared, closed and judged. Raises LinkError for what no service may say."""
        if len(frame.slots) != len(frame.num_clear_chars):
            raise LinkError("the safety service's arrays do not fit together")
        self._open_checks.difference_update(verdict.check_id for verdict in frame.prompts)
        if frame.slots or frame.closed_slots:
            self.answers.note(frame)
            self._closing.difference_update(frame.closed_slots)

    def hand_over_to(self, successor: SafetyStream) -> None:
        """Hands the answers that are clear to another stream, and hangs up once nothing is left. May be called again,
        whenever more answers may have become clear."""
        self.is_replaced = True
        self.answers.move_clear(successor.answers, self._closing)
        if self.is_done:
            self._call.cancel()

    @property
    def is_done(self) -> bool:
        """True when the stream has been replaced and no verdict is outstanding."""
        return self.is_replaced and not self._open_checks and not self.answers.num_open

    async def read(self) -> safety_service_pb2.ScreenResponse:
        """Raises LinkError at the end of the stream, and AioRpcError when it breaks."""
        frame = await self._call.read()
        if not isinstance(frame, safety_service_pb2.ScreenResponse):
            raise LinkError("the safety service ended the stream")
        return frame

    async def write_frames(self) -> None:
        """Returns when the stream breaks."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._prompts or self.outgoing or self._judge_answers:
                    await self._call.write(self._take_frame())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # The reader sees the same break.
        except Exception:
            log.exception("safety_write_failed")
        self._call.cancel()  # The reader then ends the connection, whatever the cause.

    def _take_frame(self) -> safety_service_pb2.ScreenRequest:
        """Returns a frame with all answers' text and as many prompts as fit."""
        outgoing, self.outgoing = self.outgoing, Outgoing()
        num_chars = num_prompts = 0
        for check in self._prompts:
            num_chars += len(check.text)
            num_prompts += 1
            if num_chars >= MAX_CHARS_PER_FRAME:
                break
        answers, self._judge_answers = self._judge_answers, []
        prompts, self._prompts = self._prompts[:num_prompts], self._prompts[num_prompts:]
        self._num_waiting_chars = sum(len(check.text) for check in self._prompts)
        return safety_service_pb2.ScreenRequest(
            prompts=[
                safety_service_pb2.PromptCheck(
                    check_id=check.check_id,
                    text=check.text,
                    tenant=check.tenant,
                    request_id=shown_id(check.request_id, check.tenant),
                    client_request_id=check.client_request_id,
                    traceparent=check.traceparent,
                    guardrails=check.guardrails,
                    safety_identifier=check.safety_identifier,
                    tells_rules=check.tells_rules,
                )
                for check in prompts
            ],
            slots=list(outgoing.deltas),
            deltas=list(outgoing.deltas.values()),
            close_slots=outgoing.close_slots,
            cleared_texts=[
                safety_service_pb2.ClearedText(slot=slot, num_chars=num_chars, last_char=last_char)
                for slot, (num_chars, last_char) in outgoing.skips.items()
            ],
            scopes=[
                safety_service_pb2.AnswerScope(
                    slot=scope.slot,
                    tenant=scope.tenant,
                    guardrails=scope.guardrails,
                    safety_identifier=scope.safety_identifier,
                    request_id=shown_id(scope.request_id, scope.tenant),
                )
                for scope in outgoing.scopes
            ],
            judge_answers=answers,
        )


def _policy_in(first: object) -> safety_service_pb2.PolicyState:
    if not isinstance(first, safety_service_pb2.ScreenResponse) or not first.HasField("policy"):
        raise LinkError("the safety service's first frame had no policy")
    return first.policy
