"""A router without a fleet, which answers with the prompt's own tokens, one per frame, as fast as a test lets it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable

import grpc

from kvloom.errors import KvloomError
from kvloom.transport.grpc_errors import to_grpc_status
from kvloom.v1 import generation_pb2, router_service_pb2, router_service_pb2_grpc
from kvloom.v1.error_reason_pb2 import ErrorReason

TIMEOUT_SECONDS = 10.0


def text_of(token_id: int) -> str:
    return f"<{token_id}>"


@dataclasses.dataclass
class Connection:
    """One client's stream."""

    hello: router_service_pb2.ClientHello
    submits: list[router_service_pb2.Submit] = dataclasses.field(default_factory=list)
    cancelled_slots: list[int] = dataclasses.field(default_factory=list)
    frames: asyncio.Queue[router_service_pb2.RouterServiceConnectResponse | None] = dataclasses.field(
        default_factory=asyncio.Queue
    )
    """The frames to send; None ends the stream."""

    @property
    def client_id(self) -> str:
        return self.hello.client_id


class FakeRouter(router_service_pb2_grpc.RouterServiceServicer):
    """While `answers` is True, a request is answered at once with its prompt's tokens (at most max_tokens). While it is
    False, the test sends the frames, and a cancel is answered by a finish."""

    def __init__(self) -> None:
        self.answers = True
        self.fail_with: KvloomError | None = None
        """If set, every choice (or Generate RPC) ends with this error."""
        self.refuses: bool | KvloomError = False
        """If set, new streams end at once, with this error or as if no process listened."""
        self.address = ""
        self.own_address = ""
        """The address that it sends as the one where only this router listens."""
        self.incarnation_id = ""
        self.connections: list[Connection] = []
        self.generate_requests: list[router_service_pb2.GenerateRequest] = []
        self.cancelled_rpcs = 0
        self.cancels: list[router_service_pb2.CancelRequest] = []
        self.fleet = router_service_pb2.FleetState(models=[router_service_pb2.ModelInfo(name="m", num_ready_shards=1)])
        self._changed = asyncio.Condition()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(TIMEOUT_SECONDS), self._changed:
            await self._changed.wait_for(condition)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def Connect(self, request_iterator, context):
        connection: Connection | None = None
        hello = await context.read()
        if isinstance(self.refuses, KvloomError):
            await context.abort_with_status(to_grpc_status(self.refuses))
        if self.refuses:
            return
        connection = Connection(hello.hello)
        self.connections.append(connection)
        first = router_service_pb2.RouterServiceConnectResponse(
            fleet=self.fleet, router_address=self.own_address, incarnation_id=self.incarnation_id
        )
        connection.frames.put_nowait(first)
        await self._notify()
        reader = asyncio.create_task(self._read(connection, context))
        try:
            while True:
                frame = await connection.frames.get()
                if frame is None:
                    return
                await context.write(frame)
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self, connection: Connection, context) -> None:
        while (frame := await context.read()) is not grpc.aio.EOF:
            connection.submits.extend(frame.submits)
            connection.cancelled_slots.extend(frame.cancel_slots)
            for submit in frame.submits:
                if self.fail_with is not None:
                    for choice in submit.choices:
                        self.finish(connection, choice.slot, error=self.fail_with)
                elif self.answers:
                    self.answer(connection, submit)
            if not self.answers:
                for slot in frame.cancel_slots:
                    self.finish(connection, slot, generation_pb2.FINISH_REASON_CANCELLED)
            await self._notify()

    def answer(self, connection: Connection, submit: router_service_pb2.Submit) -> None:
        ids = list(submit.prompt_token_ids)
        if submit.request.stop.HasField("max_tokens"):
            ids = ids[: submit.request.stop.max_tokens]
        slots = [choice.slot for choice in submit.choices]
        for i, token_id in enumerate(ids):
            step = generation_pb2.StepFrame(slots=slots, token_ids=[token_id] * len(slots))
            step.deltas.extend([text_of(token_id)] * len(slots))
            if submit.request.sampling.HasField("logprobs"):
                step.logprobs.extend(generation_pb2.TokenLogprobs(slot=slot, logprob=-i) for slot in slots)
            if i == 0:
                step.starts.extend(generation_pb2.SequenceStart(slot=slot, shard_id="shard-0") for slot in slots)
            connection.frames.put_nowait(router_service_pb2.RouterServiceConnectResponse(step=step))
        for slot in slots:
            self.finish(connection, slot, num_output_tokens=len(ids))

    def tokens(self, connection: Connection, *entries: tuple[int, list[int]]) -> None:
        """Sends one frame with (slot, new tokens) for each sequence."""
        step = generation_pb2.StepFrame(
            slots=[slot for slot, _ in entries], num_tokens=[len(ids) for _, ids in entries]
        )
        for _, ids in entries:
            step.token_ids.extend(ids)
            step.deltas.append("".join(map(text_of, ids)))
        connection.frames.put_nowait(router_service_pb2.RouterServiceConnectResponse(step=step))

    def finish(
        self,
        connection: Connection,
        slot: int,
        reason: generation_pb2.FinishReason.ValueType | None = None,
        *,
        error: KvloomError | None = None,
        num_output_tokens: int = 0,
    ) -> None:
        """The default reason is ERROR with an error and STOP without one."""
        if reason is None:
            reason = generation_pb2.FINISH_REASON_STOP if error is None else generation_pb2.FINISH_REASON_ERROR
        finish = generation_pb2.SequenceFinish(slot=slot, reason=reason, num_output_tokens=num_output_tokens)
        if error is not None:
            finish.error.CopyFrom(error.to_proto())
        step = generation_pb2.StepFrame(finishes=[finish])
        connection.frames.put_nowait(router_service_pb2.RouterServiceConnectResponse(step=step))

    async def Generate(self, request, context):
        self.generate_requests.append(request)
        await self._notify()
        if self.fail_with is not None:
            await context.abort_with_status(to_grpc_status(self.fail_with))
        words = (request.text or " ".join(m.content for m in request.conversation.messages)).split()
        try:
            for word in words:
                yield self._generated(request, text=word)
            if not self.answers:
                await asyncio.Event().wait()
            finish = generation_pb2.SequenceFinish(reason=generation_pb2.FINISH_REASON_STOP)
            yield self._generated(request, finish=finish)
        except asyncio.CancelledError:
            self.cancelled_rpcs += 1
            await self._notify()
            raise

    @staticmethod
    def _generated(request, **fields) -> router_service_pb2.GenerateResponse:
        deltas = [router_service_pb2.ChoiceDelta(index=i, **fields) for i in range(max(1, request.n))]
        return router_service_pb2.GenerateResponse(request_id=request.request_id, deltas=deltas)

    async def Plan(self, request, context):
        if request.request.model != "m":
            error = KvloomError(ErrorReason.ERROR_REASON_MODEL_NOT_FOUND, "No such model.", field="model")
            await context.abort_with_status(to_grpc_status(error))
        return router_service_pb2.PlanResponse(picked_shard_id="shard-0", num_prompt_tokens=3)

    async def Cancel(self, request, context):
        self.cancels.append(request)
        return router_service_pb2.CancelResponse(found=request.request_id == "known")

    async def ListModels(self, request, context):
        return router_service_pb2.ListModelsResponse(models=self.fleet.models)


@contextlib.asynccontextmanager
async def serve_fake_router(port: int = 0) -> AsyncIterator[tuple[FakeRouter, str]]:
    """Yields a FakeRouter on a loopback socket, and its address."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    router = FakeRouter()
    router_service_pb2_grpc.add_RouterServiceServicer_to_server(router, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield router, f"127.0.0.1:{bound}"
    finally:
        await server.stop(None)
