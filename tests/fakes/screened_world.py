"""A whole fabric in this process: a real edge, router, safety service and shard, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import grpc
from prometheus_client import CollectorRegistry

from edge_http.edge import Edge
from edge_http.server.http_server import EdgeServer
from edge_http.tracing import EdgeTracing
from kvloom.v1.safety_service_pb2_grpc import add_SafetyServiceServicer_to_server
from kvloom_common.config import EdgeConfig, KvloomConfig, ModelConfig, ShardConfig, TracingConfig
from kvloom_common.discovery.records import ShardRecord
from kvloom_common.models.served_model import ServedModel
from kvloom_common.parsers.spec import ParserSpec
from kvloom_common.process.watched_files import following
from kvloom_common.text.chat_template import ChatTemplate
from kvloom_common.text.tokenizer import ModelTokenizer
from kvloom_common.tracing.tracer import Tracer, open_tracer
from kvloom_common.trust.fabric_trust import NO_SECRET, FabricTrust
from safety_svc.audit import Audit
from safety_svc.policy_file import PolicyFile
from safety_svc.server import SafetyServicer
from shard_server.engines.base import (
    EngineRequest,
    SequenceEnd,
    SequenceFinishReason,
    SequenceStart,
    StepOutput,
    TokenLogprobs,
)
from shard_server.server import ShardServer
from tests.fakes.router_world import MODEL, RouterWorld, router_world
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.tiny_tokenizer import byte_level_tokenizer
from tests.waiting import eventually

NO_TRACING = TracingConfig()
SHOWING = (
    "{{ shown if shown else '' }}"
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + ' ' + (m.name or '') + ' ' + (m.tool_call_id or '') + '\n' }}"
    "{{ m.reasoning_content or '' }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.id }} {{ call.function | tojson }}{% endfor %}"
    "{{ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""A chat template that shows the model everything that templates can show."""


class WritingEngine(ScriptedEngine):
    """An engine that answers every prompt with the same tokens, one in a step."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        super().__init__(tokenizer.vocab_size)
        eos = tokenizer.eos_token_ids
        self.info = dataclasses.replace(self.info, model=MODEL, max_model_len=8192, embedding_size=4, eos_token_ids=eos)
        self.answer: Sequence[int] = (ord("x"),)

    def submit(self, request: EngineRequest) -> None:
        super().submit(request)
        if request.pooling is not None:
            embedding = array("f", [1.0, 0.0, 0.0, 0.0]).tobytes()
            self.put(StepOutput(ends=[SequenceEnd(request.request_id, SequenceFinishReason.STOP, embedding=embedding)]))
            return
        for number, token_id in enumerate(self.answer):
            output = StepOutput([request.request_id], [[token_id]])
            if not number:
                output.starts.append(SequenceStart(request.request_id, 0, 0.0))
            if request.sampling.num_logprobs is not None:
                output.logprobs[request.request_id] = [TokenLogprobs(-0.5, [(token_id, -0.5)])]
            self.put(output)
        self.put(StepOutput(ends=[SequenceEnd(request.request_id, SequenceFinishReason.STOP)]))


class ScreenedWorld:
    """What a test touches of the fabric."""

    def __init__(
        self,
        world: RouterWorld,
        tokenizer: ModelTokenizer,
        url: str,
        http: aiohttp.ClientSession,
        edge_config: EdgeConfig,
        policy_file: PolicyFile,
        stop_shard: Callable[[], Awaitable[None]],
    ) -> None:
        self.stop_shard = stop_shard
        self.edge_config = edge_config
        self._policy_file = policy_file
        self.router = world
        self.tokenizer = tokenizer
        self.url = url
        self._http = http

    async def change_policy(self) -> None:
        """The policy's file has changed: returns when the router has the new one."""
        await self._policy_file.reload_if_changed()
        revision = self._policy_file.current.revision
        await eventually(lambda: policy_revision(self.router) == revision, "the new policy")

    async def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> tuple[int, str]:
        """(status, body of the response)"""
        async with self._http.post(self.url + path, json=body, headers=headers) as response:
            return response.status, await response.text()


@contextlib.asynccontextmanager
async def screened_world(
    redis_url: str,
    policy: Path,
    engine: WritingEngine,
    output: ParserSpec | None = None,
    tracing: TracingConfig = NO_TRACING,
    *,
    is_known_to_router: bool = False,
) -> AsyncIterator[ScreenedWorld]:
    """A fabric whose chat template is `SHOWING`. `output`: how its model writes calls and reasoning, which only edges
    know, unless it `is_known_to_router`."""
    async with contextlib.AsyncExitStack() as stack:
        shard_tracer, safety_tracer, edge_tracer = (
            open_tracer(tracing, role, f"{role}-0") for role in ("shard", "safety", "edge")
        )
        await stack.enter_async_context(following(*filter(None, (shard_tracer, safety_tracer, edge_tracer))))
        world = await stack.enter_async_context(router_world(redis_url))
        tokenizer = showing_tokenizer()
        world.tokenizer = tokenizer
        world.config.safety.on_unavailable = "refuse"
        policy_file = PolicyFile(str(policy))
        world.config.safety.port = await serve_safety(stack, policy_file, Audit(tracer=safety_tracer))
        world.config.tracing = tracing
        if output is not None and is_known_to_router:
            world.config.model.tool_parser, world.config.model.reasoning_parser = output.tools, output.reasoning
        stop_shard = await _shard(stack, world, engine, shard_tracer)
        await world.start_router()
        link = await world.connect()
        await world.wait_for_shards(link, 1)
        model = ServedModel(MODEL, tokenizer, 1_700_000_000, "fp_test", output)
        edge = Edge(KvloomConfig(), link, {MODEL: model})
        edge.tracing = None if edge_tracer is None else EdgeTracing(edge_tracer)
        server = EdgeServer(edge, shutdown_seconds=1.0)
        address = await server.listen("127.0.0.1", 0)
        stack.push_async_callback(server.stop)
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)))
        await eventually(lambda: policy_revision(world) is not None, "the policy")
        yield ScreenedWorld(world, tokenizer, f"http://{address}", http, edge.config, policy_file, stop_shard)


def policy_revision(world: RouterWorld) -> str | None:
    """The policy that the router knows."""
    link = world.server._parts.safety_link
    assert link is not None
    return link.policy_revision


def showing_tokenizer() -> ModelTokenizer:
    tokenizer = byte_level_tokenizer()
    eos = tokenizer.token_to_id("<|im_end|>")
    assert eos is not None
    return ModelTokenizer(tokenizer, template=ChatTemplate(SHOWING, {}), eos_token_ids=frozenset({eos}))


async def serve_safety(
    stack: contextlib.AsyncExitStack, policy_file: PolicyFile, audit: Audit, trust: FabricTrust = NO_SECRET
) -> int:
    """Returns its port."""
    server = grpc.aio.server()
    servicer = SafetyServicer(policy_file, audit=audit)
    stack.callback(servicer.close)
    add_SafetyServiceServicer_to_server(servicer, server)
    port = trust.add_port(server, "127.0.0.1:0")
    await server.start()
    stack.push_async_callback(server.stop, 0)
    return port


async def _shard(
    stack: contextlib.AsyncExitStack, world: RouterWorld, engine: WritingEngine, tracer: Tracer | None
) -> Callable[[], Awaitable[None]]:
    """Returns what stops it."""
    config = KvloomConfig(model=ModelConfig(name=MODEL), shard=ShardConfig(engine="sim"))
    server = ShardServer(
        config,
        engine,
        world.tokenizer,
        "shard-0",
        metrics_registry=CollectorRegistry(),
        free_memory=lambda: None,
        tracer=tracer,
    )
    address = await server.start()
    stop = asyncio.Event()
    serving = asyncio.create_task(server.serve(stop))

    async def end() -> None:
        stop.set()
        await asyncio.gather(serving, return_exceptions=True)

    stack.push_async_callback(end)
    await world.registry.announce(ShardRecord("shard-0", address, MODEL, server.incarnation_id))
    return end
