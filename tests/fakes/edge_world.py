"""A listening edge with a FakeRouterLink behind it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp

from edge_http.edge import Edge
from edge_http.server.http_server import SHUTDOWN_SECONDS, EdgeServer
from kvloom_common.callers import Callers
from kvloom_common.config import EdgeConfig, KvloomConfig
from kvloom_common.models.model_routes import NO_ROUTES, ModelRoutes
from kvloom_common.models.served_model import ServedModel
from kvloom_common.parsers.spec import ParserSpec
from tests.fakes.fake_router_link import FakeRouterLink
from tests.fakes.tiny_tokenizer import model_tokenizer


@dataclasses.dataclass
class EdgeWorld:
    """A listening edge whose router is a FakeRouterLink."""

    edge: Edge
    server: EdgeServer
    link: FakeRouterLink
    url: str
    http: aiohttp.ClientSession

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    async def post(self, path: str, body: Any, **more: Any) -> tuple[int, Any]:
        """(status, JSON of the answer)"""
        async with self.http.post(self.url + path, json=body, **more) as response:
            return response.status, await response.json()

    async def chat(self, **fields: Any) -> tuple[int, Any]:
        return await self.post("/v1/chat/completions", chat_body(**fields))


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "the fox"}], **fields}


@contextlib.asynccontextmanager
async def edge_world(
    config: EdgeConfig | KvloomConfig | None = None,
    link: FakeRouterLink | None = None,
    port: int = 0,
    callers: Callers | None = None,
    output: ParserSpec | None = None,
    routes: ModelRoutes = NO_ROUTES,
    more_models: Sequence[ServedModel] = (),
    shutdown_seconds: float = SHUTDOWN_SECONDS,
) -> AsyncIterator[EdgeWorld]:
    whole = config if isinstance(config, KvloomConfig) else KvloomConfig(edge=config or EdgeConfig())
    link = link or FakeRouterLink()
    model = ServedModel("tiny", model_tokenizer(), 1_700_000_000, "fp_test", output)
    models = {each.name: each for each in (model, *more_models)}
    edge = Edge(whole, link, models, callers=callers, routes=routes)
    server = EdgeServer(edge, shutdown_seconds=shutdown_seconds)
    address = await server.listen("127.0.0.1", port)
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as http:
            yield EdgeWorld(edge, server, link, f"http://{address}", http)
    finally:
        await server.stop()
