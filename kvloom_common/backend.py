"""The command and the end of the gRPC services that stand behind edges and routers: control, safety, the
orchestrator."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from kvloom_common.config import KvloomConfig, load_config
from kvloom_common.discovery.announcer import announced_process, process_record
from kvloom_common.discovery.records import NameTakenError
from kvloom_common.metrics.exporter import MetricsExporter, NoMetrics, add_metrics_flags, open_metrics
from kvloom_common.process.log_lines import configure_logging
from kvloom_common.process.ready_line import ReadyLine
from kvloom_common.process.service import StartError, announce_ready, run_service
from kvloom_common.process.watched_files import Watcher, following
from kvloom_common.trust.fabric_trust import FabricTrust, load_trust

Role = Literal["control", "safety", "orchestrator"]
_PORTS: Final[dict[Role, Callable[[KvloomConfig], int]]] = {
    "control": lambda config: config.control.port,
    "safety": lambda config: config.safety.port,
    "orchestrator": lambda config: config.orchestrator.port,
}


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
        port = _PORTS[role](config) if args.port is None else args.port
        trust = load_trust(config, (role,), args.name)
        metrics = open_metrics(config, trust, role, args.name, args.metrics_port, shares_port=args.share_metrics_port)
        async with following(trust):
            await serve(config, port, metrics, trust, shares_port=args.share_port, name=args.name)

    run_service(run())


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
