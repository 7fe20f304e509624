"""The server of control, from its start to its drain."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import grpc
import structlog

from control.database.migrate import FOLDER
from control.replication.versions import Versions
from control.service.control_servicer import ControlServicer
from control.service.directory_servicer import DirectoryServicer
from control.usage.servicer import UsageServicer
from control.usage.work import UsageWork
from kvloom.v1 import (
    control_service_pb2,
    control_service_pb2_grpc,
    directory_service_pb2,
    directory_service_pb2_grpc,
    usage_service_pb2,
    usage_service_pb2_grpc,
)
from kvloom_common.access.exposure import is_loopback
from kvloom_common.backend import serve_announced
from kvloom_common.config import KvloomConfig
from kvloom_common.database.database import Database, database_url
from kvloom_common.database.opening import opened
from kvloom_common.discovery.announcer import fabric_host
from kvloom_common.metrics.exporter import MetricsExporter, NoMetrics
from kvloom_common.process.service import (
    SERVER_OPTIONS,
    StartError,
    bind,
    set_serving,
    sharing_port,
    stop_event,
)
from kvloom_common.transport.checked_server import CheckedServer
from kvloom_common.transport.standard_services import add_health_and_reflection
from kvloom_common.trust.fabric_trust import FabricTrust

log = structlog.get_logger()

FILE_NAME: Final = "control.db"
SERVICE_NAMES: Final = [
    control_service_pb2.DESCRIPTOR.services_by_name["ControlService"].full_name,
    directory_service_pb2.DESCRIPTOR.services_by_name["DirectoryService"].full_name,
    usage_service_pb2.DESCRIPTOR.services_by_name["UsageService"].full_name,
]
STOP_GRACE_SECONDS: Final = 2.0
"""For calls that run when the process is to stop; the streams of followers end at once."""
MAX_CONCURRENT_RPCS: Final = 8192


async def serve(
    config: KvloomConfig,
    port: int,
    metrics: MetricsExporter | NoMetrics,
    trust: FabricTrust,
    *,
    shares_port: bool = False,
    name: str = "control",
) -> None:
    """Serve until SIGTERM. With `shares_port`, the supervisor holds the port, too. Raises StartError, ConfigError."""
    host = fabric_host(config, config.control.host)
    if not trust.has_secret and not is_loopback(host):
        raise StartError(f"control trusts all who reach it at {host}: give the fabric a secret (fabric.secret_file)")
    stopping = stop_event()
    url = database_url(config.control.database_url, "control.database_url", Path(config.data_dir) / FILE_NAME)
    # A task that fails ends the process, which is started again.
    async with opened(url, FOLDER) as database, asyncio.TaskGroup() as tasks:
        versions = Versions(database)
        owned = [
            tasks.create_task(versions.run(), name="versions"),
            tasks.create_task(UsageWork(config, database, trust.sealer, name).run(), name="usage"),
        ]
        try:
            options = sharing_port(SERVER_OPTIONS) if shares_port else SERVER_OPTIONS
            server = grpc.aio.server(options=options, maximum_concurrent_rpcs=MAX_CONCURRENT_RPCS)
            await _serve(
                config,
                server,
                bind(server, host, port, trust.add_port),
                metrics,
                trust,
                name,
                database,
                versions,
                stopping,
            )
        finally:
            for task in owned:
                task.cancel()


async def _serve(
    config: KvloomConfig,
    server: grpc.aio.Server,
    address: str,
    metrics: MetricsExporter | NoMetrics,
    trust: FabricTrust,
    name: str,
    database: Database,
    versions: Versions,
    stopping: asyncio.Event,
) -> None:
    checked = CheckedServer(server, trust.may_call)
    control_service_pb2_grpc.add_ControlServiceServicer_to_server(ControlServicer(database, versions), checked)
    directory_service_pb2_grpc.add_DirectoryServiceServicer_to_server(DirectoryServicer(database, versions), checked)
    usage_service_pb2_grpc.add_UsageServiceServicer_to_server(UsageServicer(database), checked)
    health = add_health_and_reflection(server, SERVICE_NAMES, with_reflection=True)
    await server.start()
    await set_serving(health, SERVICE_NAMES, serving=True)
    log.info("control_started", address=address, database=database.engine.dialect.name)
    try:
        await serve_announced(config, "control", name, address, metrics, trust, stopping)
    except StartError:
        await server.stop(None)
        raise
    await set_serving(health, SERVICE_NAMES, serving=False)
    versions.close()
    await server.stop(STOP_GRACE_SECONDS)
