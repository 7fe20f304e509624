"""A safety service with one rule, over real gRPC: prompts that contain `FORBIDDEN` are blocked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import grpc

from kvloom.v1 import safety_service_pb2, safety_service_pb2_grpc

FORBIDDEN = "forbidden"
SERVICE = safety_service_pb2.DESCRIPTOR.services_by_name["SafetyService"].full_name
CATEGORIES = ("forbidden-things", "other")


def classify(texts: Iterable[str]) -> list[safety_service_pb2.Classification]:
    return [safety_service_pb2.Classification(categories=CATEGORIES[:1] if FORBIDDEN in text else ()) for text in texts]


def _as_bytes(response: Any) -> bytes:
    return response if isinstance(response, bytes) else response.SerializeToString()


class FakeSafety(safety_service_pb2_grpc.SafetyServiceServicer):
    def __init__(
        self, *, screens_answers: bool = False, beginnings: Sequence[str] = (), shares_port: bool = False
    ) -> None:
        """`beginnings`, if there are any, are announced as a prefilter. With `shares_port` a successor can listen on
        the same port (see `drain`)."""
        self.policy = safety_service_pb2.PolicyState(
            revision="1", screens_prompts=True, screens_answers=screens_answers
        )
        if beginnings:
            self.policy.answer_prefilter.beginnings.extend(beginnings)
        self.sent: list[tuple[str, str]] = []
        """The answers' texts as they arrived, each preceded by the last of the characters that were skipped before
        it."""
        self.prompts: list[str] = []
        self.garble: Callable[[safety_service_pb2.ScreenResponse], object] = lambda response: response
        """Makes what is sent instead of a response: another one, or bytes."""
        self.address = ""
        self.num_streams = 0
        self._may_answer = asyncio.Event()
        self._may_answer.set()
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", int(shares_port))])
        self._contexts: list[grpc.aio.ServicerContext] = []
        self._writing = asyncio.Lock()
        self._stopping: asyncio.Task[None] | None = None

    async def start(self, port: int = 0) -> int:
        handlers = {
            "Screen": grpc.stream_stream_rpc_method_handler(
                self.Screen, safety_service_pb2.ScreenRequest.FromString, _as_bytes
            ),
            "Classify": grpc.unary_unary_rpc_method_handler(
                self.Classify, safety_service_pb2.ClassifyRequest.FromString, _as_bytes
            ),
        }
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])
        bound = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self._server.start()
        return bound

    async def stop(self) -> None:
        await self._server.stop(0)
        if self._stopping is not None:
            await self._stopping

    async def drain(self) -> None:
        """Accepts no new streams and announces the drain on the open ones, as the real service does."""
        self._stopping = asyncio.create_task(self._server.stop(30))
        await asyncio.sleep(0)  # The task now begins to refuse new streams.
        for context in self._contexts:
            async with self._writing:
                await context.write(safety_service_pb2.ScreenResponse(draining=True))

    def pause(self) -> None:
        self._may_answer.clear()

    def resume(self) -> None:
        self._may_answer.set()

    async def Classify(self, request, context) -> safety_service_pb2.ClassifyResponse:
        return safety_service_pb2.ClassifyResponse(
            results=classify(request.texts), categories=CATEGORIES, policy_revision="1"
        )

    async def Screen(self, request_iterator, context) -> None:
        await context.write(safety_service_pb2.ScreenResponse(policy=self.policy))
        self.num_streams += 1
        self._contexts.append(context)
        texts: dict[int, str] = {}
        try:
            while isinstance(frame := await context.read(), safety_service_pb2.ScreenRequest):
                await self._may_answer.wait()
                async with self._writing:
                    await context.write(self.garble(self._screened(frame, texts)))
        finally:
            self._contexts.remove(context)
            self.num_streams -= 1

    def _screened(
        self, frame: safety_service_pb2.ScreenRequest, texts: dict[int, str]
    ) -> safety_service_pb2.ScreenResponse:
        response = safety_service_pb2.ScreenResponse()
        finding = safety_service_pb2.Finding(rule="word", message="That word is not allowed.")
        for check in frame.prompts:
            self.prompts.append(check.text)
            blocked = FORBIDDEN in check.text
            response.prompts.add(
                check_id=check.check_id,
                decision=safety_service_pb2.DECISION_BLOCK if blocked else safety_service_pb2.DECISION_ALLOW,
                finding=finding if blocked else None,
            )
        for cleared in frame.cleared_texts:
            texts[cleared.slot] = texts.get(cleared.slot, "") + cleared.last_char * cleared.num_chars
        last_chars = {cleared.slot: cleared.last_char for cleared in frame.cleared_texts}
        for slot, delta in zip(frame.slots, frame.deltas, strict=True):
            self.sent.append((last_chars.get(slot, ""), delta))
            texts[slot] = texts.get(slot, "") + delta
            response.slots.append(slot)
            response.num_clear_chars.append(len(texts[slot]))
        for slot in frame.close_slots:
            texts.pop(slot, None)
            response.closed_slots.append(slot)
        return response
