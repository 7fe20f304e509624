"""A fabric in this process: an edge, a router, a safety service and a shard with the echoing engine, over sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import aiohttp
import grpc
from google.protobuf import json_format
from prometheus_client import CollectorRegistry

from edge_http.edge import Edge
from edge_http.server.http_server import EdgeServer
from kvloom.v1.router_service_pb2 import GenerateRequest
from kvloom.v1.router_service_pb2_grpc import RouterServiceStub
from kvloom.v1.safety_service_pb2_grpc import add_SafetyServiceServicer_to_server
from kvloom_common.config import KvloomConfig
from kvloom_common.models.catalogue import Catalogue
from kvloom_common.models.served_model import ServedModel
from kvloom_common.parsers.spec import ParserSpec
from kvloom_common.text.tokenizer import ModelTokenizer
from lab.redteam.clients import open_link
from lab.redteam.echo_engine import MODEL, EchoEngine, byte_tokenizer
from router.core.core import RouterCore
from router.core_settings import core_config
from router.server import RouterServer
from safety_svc.policy_file import PolicyFile
from safety_svc.server import SafetyServicer
from shard_server.server import ShardServer

_START_SECONDS: Final = 20.0
_REQUEST_SECONDS: Final = 30.0
_PATIENCE_SECONDS: Final = 600.0
"""Longer than anything takes here, on any machine."""


class RedTeamFabric:
    """The fabric, as the campaign asks it."""

    def __init__(
        self,
        url: str,
        http: aiohttp.ClientSession,
        stub: RouterServiceStub,
        router_address: str,
        engine: EchoEngine,
    ) -> None:
        self.router_address = router_address
        self.engine = engine
        self._url = url
        self._http = http
        self._stub = stub

    async def post(self, path: str, body: Any) -> tuple[int, str]:
        """Returns the status and the body of the response."""
        async with self._http.post(self._url + path, json=body) as response:
            return response.status, await response.text()

    async def generate(self, body: Any) -> tuple[bool, str, str]:
        """Returns whether the request was served, the text or the error's message, and why the answer ended."""
        text, end = "", ""
        try:
            async for response in self._stub.Generate(json_format.ParseDict(body, GenerateRequest())):
                for delta in response.deltas:
                    text += delta.text
                    end = str(delta.finish) if delta.HasField("finish") else end
        except grpc.aio.AioRpcError as error:
            return False, error.details() or "", ""
        return True, text, end


@contextlib.asynccontextmanager
async def echo_fabric(
    redis_url: str, policy: Path, safety_port: int = 0, step_seconds: float = 0.0
) -> AsyncIterator[RedTeamFabric]:
    """Start all parts at free ports, with this safety policy; the registry is in this Redis server. `safety_port`: that
    of a safety service that runs; 0: one is started. `step_seconds`: the engine's pause."""
    config = KvloomConfig()
    config.model.name, config.shard.engine = MODEL, "sim"
    config.redis.url, config.redis.key_prefix = redis_url, f"redteam-{policy.parent.name}"
    config.safety.on_unavailable, config.safety.patience_seconds = "refuse", _PATIENCE_SECONDS
    config.router.max_queue_seconds = _PATIENCE_SECONDS
    config.router.placement.policy = "round_robin"  # there is one shard, and it takes all requests at once
    tokenizer = byte_tokenizer()
    model = ServedModel(MODEL, tokenizer, 1_700_000_000, "fp_redteam", ParserSpec("hermes", "qwen3"))
    async with contextlib.AsyncExitStack() as stack:
        config.safety.port = safety_port or await _safety(stack, policy)
        engine = EchoEngine(tokenizer, step_seconds)
        await _shard(stack, config, engine, tokenizer)
        address = await _router(stack, config, model)
        link = await stack.enter_async_context(open_link(address))
        server = EdgeServer(Edge(KvloomConfig(), link, {MODEL: model}), shutdown_seconds=1.0)
        edge_address = await server.listen("127.0.0.1", 0)
        stack.push_async_callback(server.stop)
        timeout = aiohttp.ClientTimeout(total=_REQUEST_SECONDS)
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
        yield RedTeamFabric(f"http://{edge_address}", http, RouterServiceStub(channel), address, engine)


async def _safety(stack: contextlib.AsyncExitStack, policy: Path) -> int:
    server = grpc.aio.server()
    servicer = SafetyServicer(PolicyFile(str(policy)))
    stack.callback(servicer.close)
    add_SafetyServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    stack.push_async_callback(server.stop, 0)
    return port


async def _shard(
    stack: contextlib.AsyncExitStack, config: KvloomConfig, engine: EchoEngine, tokenizer: ModelTokenizer
) -> None:
    metrics = CollectorRegistry()
    server = ShardServer(config, engine, tokenizer, "shard-0", metrics_registry=metrics, free_memory=lambda: None)
    await server.start()
    await _serving(stack, server.serve)


async def _router(stack: contextlib.AsyncExitStack, config: KvloomConfig, model: ServedModel) -> str:
    core = RouterCore(core_config(config))
    server = RouterServer(config, core, Catalogue([model]), "router-0", CollectorRegistry())
    address = await server.start("127.0.0.1", 0)
    is_open = asyncio.Event()
    await _serving(stack, lambda stop: server.serve(stop, is_open.set))
    async with asyncio.timeout(_START_SECONDS):
        await is_open.wait()
    return address


async def _serving(stack: contextlib.AsyncExitStack, serve: Any) -> None:
    """Serve until the stack is closed."""
    stop = asyncio.Event()
    task = asyncio.create_task(serve(stop))

    async def end() -> None:
        stop.set()
        await asyncio.gather(task, return_exceptions=True)

    stack.push_async_callback(end)
