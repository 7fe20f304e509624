"""An edge with a FakeRouterLink, and an orchestrator with a real database behind a real gRPC server."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest

from edge_http.orchestrator_link import OrchestratorLink
from edge_http.tracing import EdgeTracing
from kvloom.v1 import orchestrator_service_pb2_grpc
from kvloom_common.config import EdgeConfig, KvloomConfig, OrchestratorConfig, RedisConfig, TracingConfig
from kvloom_common.database.database import Database
from kvloom_common.models.served_model import ServedModel
from kvloom_common.parsers.spec import ParserSpec
from kvloom_common.process.watched_files import following
from kvloom_common.text.prompt_images import words_of
from kvloom_common.tracing.tracer import open_tracer
from kvloom_common.transport.checked_server import CheckedServer
from kvloom_common.trust.fabric_trust import NO_SECRET
from kvloom_common.trust.state_seal import StateSealer
from orchestrator.background.log import ResponseLogs
from orchestrator.database.schema import MIGRATIONS
from orchestrator.files.contents import FileContents
from orchestrator.files.sealed import TenantContents
from orchestrator.jobs.edges import Edges
from orchestrator.jobs.runner import JobRunner
from orchestrator.seal import NO_SEAL, BodySeal, use_seal
from orchestrator.search.embedding import FabricEncoder
from orchestrator.search.reranking import FabricReranker
from orchestrator.search.searcher import Searcher
from orchestrator.service.job_kinds import job_kinds
from orchestrator.service.servicer import OrchestratorServicer
from orchestrator.store.hot_items import HotItems
from orchestrator.tracing import OrchestratorTracing
from tests.fakes.edge_world import EdgeWorld, edge_world
from tests.fakes.fake_control import OTHER_KEY, SEARCH_KEY, key_of, two_organisations
from tests.fakes.fake_router_link import FakeRouterLink
from tests.fakes.migrated_database import migrated_database
from tests.fakes.postgres_server import make_postgres_database
from tests.fakes.tenants import callers_of

SEALER = StateSealer(b"k" * 32)
ADMIN_KEY = "kvl-search-admin"
"""That of an administrator of the first tenant."""


@dataclasses.dataclass
class StateWorld:
    """`now` is the orchestrator's time. `client` and `other` belong to two tenants."""

    edge: EdgeWorld
    database: Database
    contents: FileContents
    server: grpc.aio.Server
    client: openai.AsyncOpenAI
    other: openai.AsyncOpenAI
    settings: OrchestratorConfig
    fabric_address: str
    """Where the edge serves its fabric."""
    logs: ResponseLogs
    """The events of the background responses at which the orchestrator works that clients ask."""
    seal: BodySeal = NO_SEAL
    audit_dir: str = ""
    tracing: OrchestratorTracing | None = None
    hot_items: HotItems | None = None
    searcher: Searcher | None = None
    now: float = 1_800_000_000.0

    @contextlib.asynccontextmanager
    async def jobs(self, name: str = "orchestrator") -> AsyncIterator[None]:
        """An orchestrator of this name works at jobs within the context. Clients ask the one called orchestrator."""
        edges = Edges(KvloomConfig(), name, NO_SECRET, self.fabric_address, self.tracing)
        logs = self.logs if name == "orchestrator" else ResponseLogs()
        held = self.settings, self.database, TenantContents(self.contents, self.seal)
        kinds = job_kinds(*held, edges, logs, SEALER, name, self.audit_dir, lambda: self.now, self.hot_items)
        runner = JobRunner(self.database, kinds, name, lambda: self.now, pause_seconds=0.01)
        async with following(edges):
            running = asyncio.create_task(runner.run())
            try:
                yield
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

    def prompt(self, number: int = -1) -> str:
        """The prompt of a request to the router, without its images."""
        model = self.edge.edge.models.by_name["tiny"]
        request = self.edge.link.requests[number].request
        words = words_of(request.prompt_token_ids, request.submit.request.images, is_trusted=False)
        return model.tokenizer.decode(words, skip_special_tokens=False)


@contextlib.asynccontextmanager
async def state_world(
    database_url: str,
    folder: Path,
    more_models: Sequence[ServedModel] = (),
    seal: BodySeal = NO_SEAL,
    link: FakeRouterLink | None = None,
    output: ParserSpec | None = None,
    traced: TracingConfig | None = None,
    edge_config: EdgeConfig | None = None,
    redis_url: str = "",
    **settings: Any,
) -> AsyncIterator[StateWorld]:
    """`more_models`: those that the edge has besides "tiny". `traced`: where edge and orchestrator send their spans.
    `redis_url`: the Redis that has copies of conversations; "": there are none. `settings`: those of the
    orchestrator."""
    whole = KvloomConfig(tracing=traced or TracingConfig())
    tracers = [open_tracer(whole.tracing, role, role) for role in ("edge", "orchestrator")]
    tracing = None if tracers[1] is None else OrchestratorTracing(tracers[1])
    async with contextlib.AsyncExitStack() as stack:
        database = await stack.enter_async_context(migrated_database(database_url, MIGRATIONS))
        use_seal(database, seal)
        callers = callers_of(
            folder, [*two_organisations(), key_of(ADMIN_KEY, "acme/search", scopes=("inference", "admin"))]
        )
        edge = await stack.enter_async_context(
            edge_world(edge_config, link=link, callers=callers, output=output, more_models=more_models)
        )
        await stack.enter_async_context(following(*filter(None, tracers)))
        edge.edge.tracing = None if tracers[0] is None else EdgeTracing(tracers[0])
        address = await edge.server.listen_to_fabric("127.0.0.1", None, NO_SECRET)
        server = grpc.aio.server()
        port = server.add_insecure_port("127.0.0.1:0")
        config = OrchestratorConfig(enabled=True, port=port, **settings)
        contents = FileContents(config, folder)
        logs = ResponseLogs()
        edges = Edges(KvloomConfig(), "searches", NO_SECRET, address)
        await stack.enter_async_context(following(edges))
        reranker = FabricReranker(edges, config.rerank_model, config.rerank_seconds) if config.rerank_model else None
        searcher = Searcher(database, FabricEncoder(edges), reranker)
        hot_items = HotItems(RedisConfig(url=redis_url), config.hot_conversation_seconds) if redis_url else None
        if hot_items is not None:
            stack.push_async_callback(hot_items.close)
        held = database, config, TenantContents(contents, seal), searcher, logs
        servicer = OrchestratorServicer(*held, lambda: None, SEALER, lambda: world.now, tracing, hot_items)
        orchestrator_service_pb2_grpc.add_OrchestratorServiceServicer_to_server(servicer, CheckedServer(server))
        await server.start()
        stack.push_async_callback(server.stop, None)
        whole.orchestrator, whole.redis = config, RedisConfig()
        stored = OrchestratorLink(whole, "edge-0", NO_SECRET)
        edge.edge.orchestrator, edge.edge.state_sealer = stored, SEALER
        await stack.enter_async_context(following(stored))
        clients = [
            await stack.enter_async_context(
                openai.AsyncOpenAI(base_url=f"{edge.url}/v1", api_key=key, max_retries=0, timeout=20.0)
            )
            for key in (SEARCH_KEY, OTHER_KEY)
        ]
        world = StateWorld(
            *(edge, database, contents, server, *clients),
            settings=config,
            fabric_address=address,
            logs=logs,
            seal=seal,
            tracing=tracing,
            hot_items=hot_items,
            searcher=searcher,
        )
        yield world


@contextlib.asynccontextmanager
async def state_world_on(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, **settings: Any
) -> AsyncIterator[StateWorld]:
    """The world of a module's fixture with the parameters sqlite and postgresql, on a database of its own. `settings`:
    see state_world."""
    folder = tmp_path_factory.mktemp("state")
    url = f"sqlite:///{folder}/state.db"
    if request.param == "postgresql":
        sockets = request.getfixturevalue("postgres_sockets")
        url = await asyncio.to_thread(make_postgres_database, sockets, f"test-{uuid.uuid4().hex}")
    async with state_world(url, folder, **settings) as started:
        yield started
