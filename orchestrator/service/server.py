"""The server of the orchestrator, from its start to its drain."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Final

import grpc
import structlog

from kvloom.v1 import orchestrator_service_pb2, orchestrator_service_pb2_grpc
from kvloom_common.backend import Servicer, host_of_state, serve_state
from kvloom_common.config import KvloomConfig
from kvloom_common.database.database import database_url
from kvloom_common.database.opening import opened
from kvloom_common.metrics.exporter import MetricsExporter, NoMetrics
from kvloom_common.process.service import SERVER_OPTIONS, StartError, bind, sharing_port, stop_event
from kvloom_common.process.watched_files import following
from kvloom_common.tracing.tracer import open_tracer
from kvloom_common.trust.fabric_trust import FabricTrust
from kvloom_common.trust.state_seal import StateSealer
from orchestrator.background.log import ResponseLogs
from orchestrator.database.schema import MIGRATIONS
from orchestrator.files.contents import FileContents
from orchestrator.files.sealed import TenantContents
from orchestrator.jobs.edges import Edges
from orchestrator.jobs.runner import JobRunner
from orchestrator.seal import BodySeal, use_seal
from orchestrator.search.embedding import FabricEncoder
from orchestrator.search.reranking import FabricReranker
from orchestrator.search.searcher import Searcher
from orchestrator.service.job_kinds import job_kinds
from orchestrator.service.servicer import OrchestratorServicer
from orchestrator.store.expiry import keep_deleting
from orchestrator.tracing import OrchestratorTracing

if TYPE_CHECKING:
    from orchestrator.store.hot_items import HotItems

log = structlog.get_logger()

FILE_NAME: Final = "orchestrator.db"
MAX_CONCURRENT_RPCS: Final = 1024


async def serve(
    config: KvloomConfig,
    port: int,
    metrics: MetricsExporter | NoMetrics,
    trust: FabricTrust,
    *,
    shares_port: bool = False,
    name: str = "orchestrator",
) -> None:
    """Serve until SIGTERM. With `shares_port`, the supervisor holds the port, too. Raises StartError, ConfigError."""
    host = host_of_state(config, "orchestrator", trust)
    if config.edge.masks_prompts and not trust.has_secret:
        raise StartError(
            "edge.masks_prompts: what is stored is then encrypted with the fabric's secret (fabric.secret_file), and "
            "there is none"
        )
    stopping = stop_event()
    url = database_url(config.orchestrator.database_url, "orchestrator.database_url", Path(config.data_dir) / FILE_NAME)
    # A task that fails ends the process, which is started again.
    async with opened(url, MIGRATIONS) as database, asyncio.TaskGroup() as tasks:
        sealer = StateSealer(trust.state_key)
        seal = BodySeal(sealer, seals=config.edge.masks_prompts)
        use_seal(database, seal)
        store = FileContents(config.orchestrator, Path(config.data_dir))
        contents = TenantContents(store, seal)
        owned = [tasks.create_task(keep_deleting(database, store, config.orchestrator.retention_days), name="expiry")]
        tracer = open_tracer(config.tracing, "orchestrator", name)
        tracing = None if tracer is None else OrchestratorTracing(tracer)
        edges, logs = Edges(config, name, trust, tracing=tracing), ResponseLogs()
        hot_items = _hot_items(config) if trust.has_secret else None
        held = config.orchestrator, database, contents, edges, logs, sealer, name, config.safety.audit_dir
        kinds = job_kinds(*held, hot_items=hot_items)
        runner = JobRunner(database, kinds, name)
        if trust.has_secret:  # without it, an edge does not know an orchestrator
            owned.append(tasks.create_task(edges.watch(), name="edges"))
            owned.append(tasks.create_task(runner.run(), name="jobs"))
        rerank_model, rerank_seconds = config.orchestrator.rerank_model, config.orchestrator.rerank_seconds
        searcher = Searcher(
            database,
            FabricEncoder(edges) if trust.has_secret else None,
            FabricReranker(edges, rerank_model, rerank_seconds) if trust.has_secret and rerank_model else None,
        )
        served = database, config.orchestrator, contents, searcher, logs, runner.wake, sealer
        servicer = Servicer(
            orchestrator_service_pb2.DESCRIPTOR.services_by_name["OrchestratorService"],
            orchestrator_service_pb2_grpc.add_OrchestratorServiceServicer_to_server,
            OrchestratorServicer(*served, tracing=tracing, hot_items=hot_items),
        )
        try:
            options = sharing_port(SERVER_OPTIONS) if shares_port else SERVER_OPTIONS
            server = grpc.aio.server(options=options, maximum_concurrent_rpcs=MAX_CONCURRENT_RPCS)
            address = bind(server, host, port, trust.add_port)
            async with following(*filter(None, (tracer,))):
                log.info("orchestrator_started", address=address, database=database.engine.dialect.name)
                await serve_state(
                    config, "orchestrator", server, address, metrics, trust, [servicer], stopping, name=name
                )
        finally:
            for task in owned:
                task.cancel()
            if hot_items is not None:
                await hot_items.close()


def _hot_items(config: KvloomConfig) -> HotItems | None:
    """None where conversations are not copied."""
    if not config.redis.url or not config.orchestrator.hot_conversation_seconds:
        return None
    from orchestrator.store.hot_items import HotItems  # only here, since it needs cryptography

    return HotItems(config.redis, config.orchestrator.hot_conversation_seconds)
