"""An orchestrator in a process of its own that can be killed at any moment, and started again on the same database."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import grpc.aio

from kvloom.v1 import orchestrator_service_pb2_grpc
from kvloom_common.config import KvloomConfig, OrchestratorConfig
from kvloom_common.process.watched_files import following
from kvloom_common.transport.checked_server import CheckedServer
from kvloom_common.trust.fabric_trust import NO_SECRET
from kvloom_common.trust.state_seal import StateSealer
from orchestrator.background.log import ResponseLogs
from orchestrator.database.schema import MIGRATIONS
from orchestrator.files.contents import FileContents
from orchestrator.files.sealed import TenantContents
from orchestrator.jobs.edges import Edges
from orchestrator.jobs.runner import JobRunner
from orchestrator.search.searcher import Searcher
from orchestrator.service.job_kinds import job_kinds
from orchestrator.service.servicer import OrchestratorServicer
from tests.fakes.migrated_database import migrated_database

NAME = "orchestrator"


class KilledOrchestrator:
    """`settings` have the port at which it listens whenever it runs."""

    def __init__(self, folder: Path, settings: OrchestratorConfig, edge_address: str) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        self._told = folder, settings, edge_address
        self._process: Any = None

    async def start(self) -> None:
        """Returns once it serves."""
        ready, tells = self._context.Pipe(duplex=False)
        self._process = self._context.Process(target=_run, args=(*self._told, tells), daemon=True)
        self._process.start()
        tells.close()
        with ready:
            await asyncio.to_thread(ready.recv)

    async def kill(self) -> None:
        os.kill(self._process.pid, signal.SIGKILL)
        await asyncio.to_thread(self._process.join)


def _run(folder: Path, settings: OrchestratorConfig, edge_address: str, ready: Any) -> None:
    asyncio.run(_serve(folder, settings, edge_address, ready))


async def _serve(folder: Path, settings: OrchestratorConfig, edge_address: str, ready: Any) -> None:
    contents, logs, sealer = TenantContents(FileContents(settings, folder)), ResponseLogs(), StateSealer(b"k" * 32)
    edges = Edges(KvloomConfig(), NAME, NO_SECRET, edge_address)
    async with migrated_database(f"sqlite:///{folder}/state.db", MIGRATIONS) as database, following(edges):
        kinds = job_kinds(settings, database, contents, edges, logs, sealer, NAME, "")
        runner = JobRunner(database, kinds, NAME)
        servicer = OrchestratorServicer(
            database, settings, contents, Searcher(database, None), logs, runner.wake, sealer
        )
        server = grpc.aio.server()
        orchestrator_service_pb2_grpc.add_OrchestratorServiceServicer_to_server(servicer, CheckedServer(server))
        server.add_insecure_port(f"127.0.0.1:{settings.port}")
        await server.start()
        ready.send(True)
        await runner.run()
