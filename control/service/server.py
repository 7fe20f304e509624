"""The server of control, from its start to its drain."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

import grpc
import structlog

from control.database.database import Database, DatabaseInUseError, open_database
from control.database.failures import DATABASE_ERRORS
from control.database.migrate import MigrationError, migrate
from control.database.url import database_url
from control.directory.quotas import configured
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
from kvloom_common.config import KvloomConfig
from kvloom_common.discovery.announcer import announced_process, fabric_host, process_record
from kvloom_common.discovery.records import NameTakenError
from kvloom_common.metrics.exporter import MetricsExporter, NoMetrics
from kvloom_common.process.service import (
    SERVER_OPTIONS,
    ReadyLine,
    StartError,
    announce_ready,
    bind,
    set_serving,
    sharing_port,
    stop_event,
)
from kvloom_common.process.watched_files import following
from kvloom_common.transport.checked_server import CheckedServer
from kvloom_common.transport.standard_services import add_health_and_reflection
from kvloom_common.trust.fabric_trust import FabricTrust

log = structlog.get_logger()

SERVICE_NAMES: Final = [
    control_service_pb2.DESCRIPTOR.services_by_name["ControlService"].full_name,
    directory_service_pb2.DESCRIPTOR.services_by_name["DirectoryService"].full_name,
    usage_service_pb2.DESCRIPTOR.services_by_name["UsageService"].full_name,
]
STOP_GRACE_SECONDS: Final = 2.0
"""For calls that run when the process is to stop; the streams of followers end at once."""
DATABASE_RETRY_SECONDS: Final = 1.0
DATABASE_PATIENCE_SECONDS: Final = 30.0
"""How long a start waits for a PostgreSQL server that does not answer."""
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
    # A task that fails ends the process, which is started again.
    async with _opened(config) as database, asyncio.TaskGroup() as tasks:
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
    directory_service_pb2_grpc.add_DirectoryServiceServicer_to_server(
        DirectoryServicer(database, versions, quotas=configured(config.control)), checked
    )
    usage_service_pb2_grpc.add_UsageServiceServicer_to_server(UsageServicer(database), checked)
    health = add_health_and_reflection(server, SERVICE_NAMES, with_reflection=True)
    await server.start()
    await set_serving(health, SERVICE_NAMES, serving=True)
    log.info("control_started", address=address, database=database.engine.dialect.name)
    try:
        async with (
            announced_process(config, "control", process_record(config, name, address), trust.sealer),
            following(metrics.until(stopping)),
        ):
            announce_ready(ReadyLine(address, metrics.address))
            await stopping.wait()
    except NameTakenError as error:
        await server.stop(None)
        raise StartError(str(error)) from error
    await set_serving(health, SERVICE_NAMES, serving=False)
    versions.close()
    await server.stop(STOP_GRACE_SECONDS)


@contextlib.asynccontextmanager
async def _opened(config: KvloomConfig) -> AsyncIterator[Database]:
    """The database, with the tables of this version. Raises StartError and ConfigError."""
    url = database_url(config)
    shown = url.render_as_string(hide_password=True)
    async with contextlib.AsyncExitStack() as stack:
        try:
            database = await stack.enter_async_context(open_database(url))
            await _migrate(database, shown)
        except (DatabaseInUseError, MigrationError) as error:
            raise StartError(str(error)) from error
        except OSError as error:
            raise StartError(f"the database {shown} cannot be opened: {error.strerror or error}") from error
        yield database


async def _migrate(database: Database, shown: str) -> None:
    """Raises StartError and MigrationError. A PostgreSQL server that is only just starting is waited for."""
    deadline = asyncio.get_running_loop().time() + DATABASE_PATIENCE_SECONDS
    while True:
        try:
            return await migrate(database)
        except DATABASE_ERRORS as error:
            cause = str(getattr(error, "orig", None) or error).partition("\n")[0]
            # A file that is locked may be waited for, and nothing else that is wrong with one.
            is_lasting = database.is_sqlite and "locked" not in cause
            if is_lasting or asyncio.get_running_loop().time() >= deadline:
                raise StartError(f"the database {shown} cannot be used: {cause}") from error
            log.warning("database_awaited", database=shown, cause=cause)
            await asyncio.sleep(DATABASE_RETRY_SECONDS)
