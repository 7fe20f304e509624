"""A router with tenants that meters, in front of the shards of two models, and edges that know its tenants."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import msgspec

from edge_http.edge import Edge
from edge_http.server.http_server import EdgeServer
from edge_http.tenant_usage import TenantUsage
from kvloom.router_link.group import RouterGroup
from kvloom.v1.control_service_pb2 import FollowResponse
from kvloom_common.config import (
    CascadeConfig,
    ControlConfig,
    KvloomConfig,
    RedisConfig,
    RouteConfig,
)
from kvloom_common.models.model_routes import ModelRoutes
from kvloom_common.parsers.spec import ParserSpec
from kvloom_common.tenancy.prices import Price
from kvloom_common.tenancy.usage_record import UsageRecord, counting
from kvloom_common.trust.shared_secret import SharedSecret
from lab.dst.tenancy.sim_limits import price_to_proto
from tests.fakes.edge_world import EdgeWorld
from tests.fakes.fake_control import SEARCH_KEY, FakeControl, two_organisations
from tests.fakes.fake_router_link import FakeRouterLink
from tests.fakes.router_world import num_ready_shards
from tests.fakes.trusted_router import SECRET
from tests.fakes.two_models_world import FIRST, ROUTE, SECOND, TwoModelsWorld, two_models_world
from tests.waiting import eventually

TENANT = "acme/search"
PRICES = [
    Price("p1", FIRST, prompt_nanos=10, cached_nanos=1, output_nanos=100, request_nanos=3),
    Price("p2", SECOND, prompt_nanos=1000, output_nanos=5000),
]
CASCADE = CascadeConfig(escalate_on=["refusal"])
ROUTES = [ROUTE, RouteConfig(name="cheap", targets=[FIRST], fallback=[SECOND], cascade=CASCADE)]
PROMPT = "the fox"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 60},
    "/v1/messages": {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 60},
    "/v1/responses": {"input": PROMPT, "max_output_tokens": 60},
}


@dataclasses.dataclass
class MeteredWorld:
    models: TwoModelsWorld
    http: aiohttp.ClientSession
    control: FakeControl
    channel: grpc.aio.Channel
    """To the router, for clients outside the fabric."""
    url: str = ""

    @contextlib.asynccontextmanager
    async def edge(self, name: str, redis: RedisConfig | None = None) -> AsyncIterator[EdgeWorld]:
        """An edge that knows the router's tenants."""
        server = self.models.server
        group = RouterGroup(name, [self.models.address])
        await group.start()
        await eventually(lambda: num_ready_shards(group) == 2, "both fleets")
        models = self.models.served_models
        edge = Edge(KvloomConfig(), group, models, routes=ModelRoutes(ROUTES), callers=server.callers)
        assert server.callers.identities is not None
        usage = TenantUsage(server.callers.identities)
        edge.add_usage(usage)
        served = EdgeServer(edge)
        address = await served.listen("127.0.0.1", 0)
        world = EdgeWorld(edge, served, FakeRouterLink(), f"http://{address}", self.http)
        try:
            yield world
        finally:
            await served.stop()
            await group.close()
            for question in usage._questions:
                question.cancel()

    async def ask(self, path: str = "/v1/chat/completions", url: str = "", **fields: Any) -> tuple[Any, dict[str, str]]:
        """(the body, or the list of a stream's events; the headers)"""
        headers = {"authorization": f"Bearer {SEARCH_KEY}", **fields.pop("headers", {})}
        body = {"model": FIRST, **BODIES[path], **fields}
        async with self.http.post((url or self.url) + path, json=body, headers=headers) as response:
            text = await response.text()
            assert response.status == 200, text
        if not body.get("stream"):
            return json.loads(text), dict(response.headers)
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        return events, dict(response.headers)

    async def records(self) -> list[UsageRecord]:
        """All that the router has written."""
        metering = self.models.server._records.metering
        assert metering is not None
        await metering._writer.flush()
        # A record may be written twice, if this comes in between; numbers tell.
        found = dict(metering._spool.records())
        return [msgspec.json.decode(payload, type=UsageRecord) for _, payload in sorted(found.items())]

    async def until_recorded(self, count: int) -> None:
        """What edges and shadows do afterwards has no event."""

        async def are_recorded() -> bool:
            return len(await self.records()) >= count

        await eventually(are_recorded, f"{count} records")

    async def counted(self) -> list[UsageRecord]:
        """The records that control would count."""
        answers: dict[tuple[str, str], list[UsageRecord]] = {}
        for record in await self.records():
            answers.setdefault(record.answer, []).append(record)
        return [one for records in answers.values() for one in counting(records)]


@contextlib.asynccontextmanager
async def metered(
    redis_url: str, folder: Path, text: str, output: ParserSpec | None = None, **router: Any
) -> AsyncIterator[MeteredWorld]:
    control = FakeControl(trust=SharedSecret(SECRET, ("control",), "control"))
    control.put(*two_organisations())
    port = await control.start()

    def prepare(world: TwoModelsWorld) -> None:
        world.share_secret(SECRET)
        world.config.data_dir = str(folder)
        world.config.control = ControlConfig(enabled=True, host="127.0.0.1", port=port)
        world.config.shadows = router.get("shadows", [])
        world.config.safety.port = router.get("safety_port", 0)
        world.served_models[FIRST] = dataclasses.replace(world.served_models[FIRST], output=output)
        if router.get("shadows"):
            world.served_models[SECOND] = dataclasses.replace(world.served_models[FIRST], name=SECOND)
            world.tokenizers[SECOND] = world.tokenizers[FIRST]

    try:
        async with two_models_world(redis_url, text, prepare) as models:
            identities = models.server.callers.identities
            assert identities is not None
            await eventually(lambda: identities.tenants.connected, "the table")
            control._publish(FollowResponse(prices=[price_to_proto(price) for price in PRICES], has_prices=True))
            await eventually(lambda: identities.tenants.table.version == control.version, "the prices")
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as http,
                grpc.aio.insecure_channel(models.address) as channel,
            ):
                world = MeteredWorld(models, http, control, channel)
                async with world.edge("edge-a") as edge:
                    world.url = edge.url
                    yield world
    finally:
        await control.stop()
