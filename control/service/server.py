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
from kvloom_common.backend import Servicer, host_of_state, serve_state
from kvloom_common.config import KvloomConfig
from kvloom_common.database.database import database_url
from kvloom_common.database.opening import opened
from kvloom_common.metrics.exporter import MetricsExporter, NoMetrics
from kvloom_common.process.service import SERVER_OPTIONS, bind, sharing_port, stop_event
from kvloom_common.trust.fabric_trust import FabricTrust

log = structlog.get_logger()

FILE_NAME: Final = "control.db"
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
    host = host_of_state(config, "control", trust)
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
            address = bind(server, host, port, trust.add_port)
            log.info("control_started", address=address, database=database.engine.dialect.name)
            servicers = (
                Servicer(
                    control_service_pb2.DESCRIPTOR.services_by_name["ControlService"],
                    control_service_pb2_grpc.add_ControlServiceServicer_to_server,
                    ControlServicer(database, versions),
                ),
                Servicer(
                    directory_service_pb2.DESCRIPTOR.services_by_name["DirectoryService"],
                    directory_service_pb2_grpc.add_DirectoryServiceServicer_to_server,
                    DirectoryServicer(database, versions),
                ),
                Servicer(
                    usage_service_pb2.DESCRIPTOR.services_by_name["UsageService"],
                    usage_service_pb2_grpc.add_UsageServiceServicer_to_server,
                    UsageServicer(database),
                ),
            )
            await serve_state(
                config,
                "control",
                server,
                address,
                metrics,
                trust,
                servicers,
                stopping,
                name=name,
                on_stop=versions.close,
            )
        finally:
            for task in owned:
                task.cancel()
