"""An edge, a router and real shard servers in one process."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import msgspec

from edge_http.edge import Edge
from edge_http.server.http_server import EdgeServer
from kvloom_common.config import EdgeConfig, KvloomConfig, ShardConfig, SimConfig
from kvloom_common.models.served_model import ServedModel
from kvloom_common.text.tokenizer import ModelTokenizer
from shard_server.engines.base import Engine
from shard_server.engines.sim_engine import SimEngine
from tests.fakes.failover_world import MODEL, FailoverWorld, failover_world

VOCABULARY = 49152


class EmbeddingWorld:
    """`fabric` has the router and the shards; requests go to the edge at `url`."""

    def __init__(self, fabric: FailoverWorld, edge: Edge, url: str, http: aiohttp.ClientSession) -> None:
        self.fabric = fabric
        self.edge = edge
        self.url = url
        self.http = http

    async def post(self, path: str, headers: dict[str, str] | None = None, **body: Any) -> tuple[int, Any]:
        """(status, JSON of the answer)"""
        async with self.http.post(self.url + path, json={"model": MODEL, **body}, headers=headers) as response:
            return response.status, await response.json()

    async def embed(self, given: Any, **body: Any) -> list[Any]:
        """The vectors of the inputs, in their order."""
        status, answer = await self.post("/v1/embeddings", input=given, **body)
        assert status == 200, answer
        assert [entry["index"] for entry in answer["data"]] == list(range(len(answer["data"])))
        return [entry["embedding"] for entry in answer["data"]]


def sim_engine(*, sees_images: bool = False, **fields: Any) -> tuple[Engine, ShardConfig]:
    sim = SimConfig(step_ms=1.0, prefill_tokens_per_second=1e6, sees_images=sees_images)
    config = ShardConfig(engine="sim", sim=sim, **fields)
    return SimEngine(MODEL, config, VOCABULARY, frozenset({2})), config


@contextlib.asynccontextmanager
async def embedding_world(
    redis_url: str,
    tokenizer: ModelTokenizer,
    *shards: tuple[Engine, ShardConfig],
    screens: bool = False,
    config: EdgeConfig | None = None,
    configure: Callable[[KvloomConfig], None] = lambda _config: None,
) -> AsyncIterator[EmbeddingWorld]:
    """`screens`: whether a FakeSafety checks prompts. `configure` changes the router's configuration."""
    async with failover_world(redis_url, tokenizer) as fabric:
        configure(fabric.config)
        if screens:
            await fabric.start_safety()
        await fabric.start_router()
        for number, (engine, shard_config) in enumerate(shards):
            await fabric.add_shard(f"shard-{number}", engine, shard_config)
        await fabric.wait_for_shards(fabric.link, len(shards))
        whole = msgspec.structs.replace(fabric.config, edge=config or EdgeConfig())
        edge = Edge(whole, fabric.link, {MODEL: ServedModel(MODEL, tokenizer, 0, "fp_test")})
        server = EdgeServer(edge)
        address = await server.listen("127.0.0.1", 0)
        try:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as http:
                yield EmbeddingWorld(fabric, edge, f"http://{address}", http)
        finally:
            await server.stop()
