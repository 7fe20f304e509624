"""A client outside the fabric that speaks gRPC itself, and may say what it likes."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from kvloom.errors import KvloomError
from kvloom.transport.grpc_errors import from_rpc_error
from kvloom.v1 import router_service_pb2 as pb
from kvloom.v1.generation_pb2 import SamplingParams, StopConditions
from kvloom.v1.router_service_pb2_grpc import RouterServiceStub

PROMPT = list(range(100, 110))


def generate_request(
    model: str, max_tokens: int = 20, temperature: float = 0.0, seed: int | None = None, **fields: Any
) -> pb.GenerateRequest:
    """One with a prompt of ten tokens, that is not ended by its model."""
    return pb.GenerateRequest(
        **{
            "model": model,
            "token_ids": pb.TokenIds(ids=PROMPT),
            "request_id": "r",
            "stop": StopConditions(max_tokens=max_tokens, ignore_eos=True),
            "sampling": SamplingParams(temperature=temperature, seed=seed),
            **fields,
        }
    )


@dataclasses.dataclass
class Received:
    choices: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    ticket: bytes = b""

    @property
    def token_ids(self) -> list[int]:
        return [token for _, tokens in sorted(self.choices.items()) for token in tokens]


class OutsideClient:
    def __init__(self, channel: grpc.aio.Channel, key: str) -> None:
        self.stub = RouterServiceStub(channel)
        self._metadata = (("authorization", f"Bearer {key}"),)

    async def read(
        self,
        request: pb.GenerateRequest,
        leave_after: int | None = None,
        on_response: Callable[[pb.GenerateResponse], None] = lambda _: None,
    ) -> Received:
        """What arrives, until the end or until there are so many tokens. Raises KvloomError."""
        found = Received()
        call = self.stub.Generate(request, metadata=self._metadata, timeout=20)
        try:
            async for response in call:
                on_response(response)
                for delta in response.deltas:
                    found.ticket = delta.start.continuation_ticket or found.ticket
                    found.choices.setdefault(delta.index, []).extend(delta.token_ids)
                if leave_after is not None and len(found.token_ids) >= leave_after:
                    call.cancel()
                    break
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        return found

    async def connect(self, submit: pb.Submit, leave_after: int | None = None) -> Received:
        """The same over a stream of many requests."""
        found = Received()

        async def frames() -> AsyncIterator[pb.RouterServiceConnectRequest]:
            yield pb.RouterServiceConnectRequest(hello=pb.ClientHello(client_id="c"))
            yield pb.RouterServiceConnectRequest(submits=[submit])

        call = self.stub.Connect(frames(), metadata=self._metadata, timeout=20)
        async for frame in call:
            for start in frame.step.starts:
                found.ticket = start.continuation_ticket or found.ticket
            found.choices.setdefault(0, []).extend(frame.step.token_ids)
            if leave_after is not None and len(found.token_ids) >= leave_after:
                call.cancel()
                break
        return found

    async def reason(self, request: pb.GenerateRequest) -> str:
        """Why it is refused; "" if it is not."""
        try:
            await self.read(request)
        except KvloomError as error:
            return error.reason_name
        return ""
