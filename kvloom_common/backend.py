"""The command, the serving and the end of the gRPC services that stand behind edges and routers: control, safety, the
orchestrator."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Protocol

import grpc
from google.protobuf.descriptor import ServiceDescriptor

from kvloom_common.access.exposure import is_loopback
from kvloom_common.config import ControlConfig, KvloomConfig, OrchestratorConfig, SafetyConfig, load_config
from kvloom_common.discovery.announcer import announced_process, fabric_host, process_record
from kvloom_common.discovery.records import NameTakenError
from kvloom_common.metrics.exporter import MetricsExporter, NoMetrics, add_metrics_flags, open_metrics
from kvloom_common.process.log_lines import configure_logging
from kvloom_common.process.ready_line import ReadyLine
from kvloom_common.process.service import StartError, announce_ready, run_service, set_serving
from kvloom_common.process.watched_files import Watcher, following
from kvloom_common.transport.checked_server import CheckedServer
from kvloom_common.transport.standard_services import add_health_and_reflection
from kvloom_common.trust.fabric_trust import FabricTrust, load_trust

Role = Literal["control", "safety", "orchestrator"]
_SECTIONS: Final[dict[Role, Callable[[KvloomConfig], ControlConfig | SafetyConfig | OrchestratorConfig]]] = {
    "control": lambda config: config.control,
    "safety": lambda config: config.safety,
    "orchestrator": lambda config: config.orchestrator,
}
STOP_GRACE_SECONDS: Final = 2.0
"""For calls that run when a process with a database is to stop."""


class Servicer(NamedTuple):
    """Serves one service of a process."""

    service: ServiceDescriptor
    add: Callable[[Any, Any], None]
    """The generated function that adds it to a server."""
    servicer: object


class Serve(Protocol):
    """Serves until SIGTERM. Raises StartError, ConfigError."""

    def __call__(
        self,
        config: KvloomConfig,
        port: int,
        metrics: MetricsExporter | NoMetrics,
        trust: FabricTrust,
        *,
        shares_port: bool,
        name: str,
    ) -> Coroutine[Any, Any, None]: ...


def run_backend(module: str, role: Role, description: str, serve: Serve) -> None:
    """Reads the flags of `python -m MODULE` and serves until SIGTERM."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("--config", type=Path, help="kvloom.toml or its JSON form")
    parser.add_argument("--name", default=role, help="the name of this process in logs")
    parser.add_argument("--port", type=int, help=f"overrides {role}.port; 0 picks one")
    add_metrics_flags(parser)
    parser.add_argument("--share-port", action="store_true", help="listen on a port that other processes hold, too")
    args = parser.parse_args()

    async def run() -> None:
        config = load_config(args.config)
        configure_logging(config.log, args.name)
        port = _SECTIONS[role](config).port if args.port is None else args.port
        trust = load_trust(config, (role,), args.name)
        metrics = open_metrics(config, trust, role, args.name, args.metrics_port, shares_port=args.share_metrics_port)
        async with following(trust):
            await serve(config, port, metrics, trust, shares_port=args.share_port, name=args.name)

    run_service(run())


def host_of_state(config: KvloomConfig, role: Role, trust: FabricTrust) -> str:
    """Where a process listens that has all tenants' state. Raises StartError if it would trust strangers."""
    host = fabric_host(config, _SECTIONS[role](config).host)
    if not trust.has_secret and not is_loopback(host):
        raise StartError(f"{role} trusts all who reach it at {host}: give the fabric a secret (fabric.secret_file)")
    return host


async def serve_state(
    config: KvloomConfig,
    role: Role,
    server: grpc.aio.Server,
    address: str,
    metrics: MetricsExporter | NoMetrics,
    trust: FabricTrust,
    servicers: Sequence[Servicer],
    stopping: asyncio.Event,
    *,
    name: str,
    on_stop: Callable[[], None] = lambda: None,
) -> None:
    """Serve what is in a database from now until `stopping` is set and running calls have had their grace.
    `on_stop` is called before that, to end streams. Raises StartError if another process has its name."""
    checked = CheckedServer(server, trust.may_call)
    for one in servicers:
        one.add(one.servicer, checked)
    names = [one.service.full_name for one in servicers]
    health = add_health_and_reflection(server, names, with_reflection=True)
    await server.start()
    await set_serving(health, names, serving=True)
    try:
        await serve_announced(config, role, name, address, metrics, trust, stopping)
    except StartError:
        await server.stop(None)
        raise
    await set_serving(health, names, serving=False)
    on_stop()
    await server.stop(STOP_GRACE_SECONDS)


async def serve_announced(
    config: KvloomConfig,
    role: Role,
    name: str,
    address: str,
    metrics: MetricsExporter | NoMetrics,
    trust: FabricTrust,
    stopping: asyncio.Event,
    *watchers: Watcher,
) -> None:
    """Keeps a service that listens announced until `stopping` is set, and runs its watchers. Raises StartError if
    another process has its name."""
    try:
        async with (
            announced_process(config, role, process_record(config, name, address), trust.sealer),
            following(*watchers, metrics.until(stopping)),
        ):
            announce_ready(ReadyLine(address, metrics.address))
            await stopping.wait()
    except NameTakenError as error:
        raise StartError(str(error)) from error
