"""A pool of fake engines with the picker in front of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import msgspec
from prometheus_client import CollectorRegistry

from kvloom.v1.external_processor_pb2_grpc import add_ExternalProcessorServicer_to_server
from kvloom_common.transport.checked_server import CheckedServer
from kvloom_common.transport.standard_services import add_health_and_reflection
from tests.fakes.fake_vllm import FakeVllm
from tests.waiting import eventually
from tools.gateway.picker_service import Gateway
from tools.gateway.pool import Pool, PoolEndpoint
from tools.gateway.prompts import PromptReader

SCRAPE_SECONDS = 0.02


class GatewayWorld:
    def __init__(
        self, engines: list[FakeVllm], reader: PromptReader, kv_events: tuple[str, str], scrape_seconds: float
    ) -> None:
        """`kv_events`: where the first engine publishes, and replays, its KV events."""
        self.engines = engines
        self.registry = CollectorRegistry()
        self.server = grpc.aio.server()
        self.address = ""
        self.pool = Pool(
            endpoints=[
                PoolEndpoint(
                    address=engine.address,
                    kv_events="" if number else kv_events[0],
                    kv_replay="" if number else kv_events[1],
                )
                for number, engine in enumerate(engines)
            ],
            objectives={"batch": -1},
        )
        health = add_health_and_reflection(self.server, [], with_reflection=False)
        self.gateway = Gateway(self.pool, reader, health, self.registry, scrape_seconds)
        add_ExternalProcessorServicer_to_server(self.gateway, CheckedServer(self.server))

    async def start(self) -> None:
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        await self.server.start()
        await self.gateway.start()
        await self.until_ready(len(self.engines))

    async def until_ready(self, num_engines: int) -> None:
        await eventually(lambda: self.gateway.picker.num_ready == num_engines, f"{num_engines} engines are ready")

    async def close(self) -> None:
        await self.server.stop(None)
        await self.gateway.close()
        for engine in self.engines:
            await engine.stop()

    def num(self, outcome: str) -> float:
        return self.registry.get_sample_value("kvloom_epp_requests_total", {"outcome": outcome}) or 0.0

    def change_pool(self, **changes: object) -> None:
        self.gateway.use_pool(msgspec.structs.replace(self.pool, **changes))


@asynccontextmanager
async def gateway_world(
    num_engines: int = 2,
    reader: PromptReader | None = None,
    kv_events: tuple[str, str] = ("", ""),
    scrape_seconds: float = SCRAPE_SECONDS,
) -> AsyncIterator[GatewayWorld]:
    engines = [FakeVllm(f"engine-{number}") for number in range(num_engines)]
    for engine in engines:
        await engine.start()
    world = GatewayWorld(engines, reader or PromptReader(), kv_events, scrape_seconds)
    try:
        await world.start()
        yield world
    finally:
        await world.close()
