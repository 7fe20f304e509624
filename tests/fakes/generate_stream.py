"""A client of one resumable answer, which a test can disconnect at any time."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from kvloom.errors import KvloomError
from kvloom.transport.grpc_errors import from_rpc_error
from kvloom.v1.generation_pb2 import StopConditions
from kvloom.v1.router_service_pb2 import GenerateRequest, GenerateResponse, ResumeRequest, TokenIds
from kvloom_common.replay.stream_retention import ResumeSettings
from tests.fakes.fake_shard import FakeShard, expected_text, expected_tokens
from tests.fakes.router_world import MODEL, TIMEOUT_SECONDS, RouterWorld

TOKEN = "a-secret-of-my-own"
PROMPT = [3, 4]


async def start(world: RouterWorld, shard_options: dict[str, Any] | None = None, **resume: Any) -> FakeShard:
    world.config.resume = ResumeSettings(**{"grace_seconds": 10.0, **resume})
    shard = await world.start_shard("shard-0", **(shard_options or {"step_seconds": 0.002}))
    await world.start_router()
    await world.wait_for_shards(await world.connect(), 1)
    return shard


def wanted(max_tokens: int = 30, **fields: Any) -> GenerateRequest:
    defaults = {"model": MODEL, "token_ids": TokenIds(ids=PROMPT), "request_id": "mine", "resumable": True}
    return GenerateRequest(**{**defaults, "stop": StopConditions(max_tokens=max_tokens), **fields})


class Stream:
    """A client of one answer, which a test can disconnect at any time."""

    def __init__(self, world: RouterWorld, **fields: Any) -> None:
        self._world = world
        self.request = wanted(**{"resume_token": TOKEN, **fields})
        self.metadata: tuple[tuple[str, str], ...] = ()
        self.responses: list[GenerateResponse] = []
        self.call: Any = None

    async def begin(self) -> None:
        self.call = (await self._world.stub()).Generate(self.request, metadata=self.metadata)

    async def resume(self, after: int | None = None, token: str = "") -> None:
        after = len(self.responses) if after is None else after
        del self.responses[after:]
        asked = ResumeRequest(
            request_id=self.request.request_id,
            resume_token=token or self.request.resume_token,
            starting_after=after,
        )
        self.call = (await self._world.stub()).Resume(asked, metadata=self.metadata)

    async def read(self, count: int) -> None:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            for _ in range(count):
                message = await self.call.read()
                assert message is not grpc.aio.EOF
                self.responses.append(getattr(message, "response", message))

    async def read_to_end(self) -> None:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while (message := await self.call.read()) is not grpc.aio.EOF:
                self.responses.append(getattr(message, "response", message))

    async def error(self) -> KvloomError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.read_to_end()
        return from_rpc_error(caught.value)

    def drop(self) -> None:
        self.call.cancel()

    @property
    def token_ids(self) -> list[int]:
        return [i for response in self.responses for delta in response.deltas for i in delta.token_ids]

    @property
    def text(self) -> str:
        return "".join(delta.text for response in self.responses for delta in response.deltas)

    def check_whole(self, max_tokens: int = 30) -> None:
        assert self.token_ids == expected_tokens(PROMPT, 0, max_tokens)
        assert self.text == expected_text(PROMPT, 0, max_tokens)
        assert [response.event_number for response in self.responses] == list(range(1, len(self.responses) + 1))
        assert {response.request_id for response in self.responses} == {"mine"}
        assert self.responses[-1].deltas[0].finish.num_output_tokens == max_tokens


def metered(world: RouterWorld) -> tuple[float, float]:
    """Returns (number of ended requests, number of output tokens)."""
    tokens = world.metric("kvloom_router_tokens_total", model=MODEL, token_type="output")
    outcomes = ("length", "cancelled", "error")
    ended = sum(
        sample.value
        for metric in world.metrics.collect()
        for sample in metric.samples
        if sample.name == "kvloom_router_requests_total" and sample.labels["outcome"] in outcomes
    )
    return ended, tokens
