"""`kvloom scaler`: serves KEDA, and Prometheus, the number of shards that each model should have."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import click
import grpc.aio
import structlog
from prometheus_client import REGISTRY
from rich.console import Console
from rich.table import Table

from kvloom.transport.channel_options import CHANNEL_OPTIONS
from kvloom.v1 import external_scaler_pb2
from kvloom.v1.external_scaler_pb2_grpc import add_ExternalScalerServicer_to_server
from kvloom_common.access.listener_tls import listener_tls
from kvloom_common.metrics.exporter import open_metrics
from kvloom_common.process import service
from kvloom_common.process.log_lines import configure_logging
from kvloom_common.process.watched_files import following
from kvloom_common.transport.checked_server import CheckedServer
from kvloom_common.transport.standard_services import add_health_and_reflection
from tools.failures import CommandError
from tools.fleet.members import FleetAccess
from tools.options import FabricFlags, Seconds, check_listener, fabric_options, listener_options, option
from tools.scaler.policy import ScalingTargets
from tools.scaler.servicer import ExternalScaler
from tools.scaler.watch import FleetWatch

NAME: Final = "scaler"
SERVICE_NAMES: Final = [external_scaler_pb2.DESCRIPTOR.services_by_name["ExternalScaler"].full_name]
MAX_CONCURRENT_RPCS: Final = 1024
_DAY_SECONDS: Final = 86_400.0

log = structlog.get_logger()


@click.command()
@listener_options("scaler", "KEDA", port=8090)
@option(
    "--ttft",
    "ttft_seconds",
    scope="scaler",
    type=Seconds(_DAY_SECONDS),
    default="2s",
    show_default=True,
    metavar="TIME",
    help="The objective for the first tokens of nine in ten requests.",
)
@option(
    "--tpot",
    "tpot_seconds",
    scope="scaler",
    type=Seconds(_DAY_SECONDS),
    default="100ms",
    show_default=True,
    metavar="TIME",
    help="The objective for the time per later token.",
)
@option(
    "--scale-in-after",
    "scale_in_seconds",
    scope="scaler",
    type=Seconds(_DAY_SECONDS),
    default="5m",
    show_default=True,
    metavar="TIME",
    help="How long fewer shards must have been enough; longer than a shard takes to start.",
)
@option("--once", scope="scaler", is_flag=True, help="Print what each model needs, and end.")
@fabric_options
def scaler(
    host: str,
    port: int,
    metrics_port: int | None,
    insecure: bool,
    once: bool,
    fabric: FabricFlags,
    **objectives: float,
) -> None:
    """Tell KEDA how many shards each model should have, as an external scaler (gRPC), and Prometheus as a metric.

    It asks the routers of the fabric that runs with this data directory, or of the fleet whose Redis is in the
    configuration file.
    """
    access = FleetAccess.open(fabric)
    targets = ScalingTargets(**objectives)
    if once:
        Console(highlight=False).print(asyncio.run(_once(access, targets)))
        return
    risk = "who reaches it reads how many shards there should be"
    check_listener(host, access.config, risk, insecure=insecure)
    service.run_service(_serve(access, targets, host, port, metrics_port))


def _watch(access: FleetAccess, targets: ScalingTargets) -> FleetWatch:
    async def find_routers() -> Sequence[str]:
        return sorted((await access.records()).routers)

    def open_channel(address: str) -> grpc.aio.Channel:
        return access.trust.open_channel(address, "router", options=CHANNEL_OPTIONS)

    return FleetWatch(find_routers, open_channel, targets, REGISTRY)


async def _serve(access: FleetAccess, targets: ScalingTargets, host: str, port: int, metrics_port: int | None) -> None:
    """Raises StartError and ConfigError."""
    config = access.config
    configure_logging(config.log, NAME)
    stop = service.stop_event()
    tls = listener_tls(config.tls)
    metrics = open_metrics(config, access.trust, NAME, NAME, metrics_port, shares_port=False)
    watch = _watch(access, targets)
    server = grpc.aio.server(options=service.SERVER_OPTIONS, maximum_concurrent_rpcs=MAX_CONCURRENT_RPCS)
    add_ExternalScalerServicer_to_server(ExternalScaler(watch, REGISTRY), CheckedServer(server))
    health = add_health_and_reflection(server, SERVICE_NAMES, with_reflection=False)
    address = service.bind(server, host, port, tls.add_port if tls is not None else service.NO_SECRET.add_port)
    await watch.read()
    await server.start()
    await service.set_serving(health, SERVICE_NAMES, serving=True)
    async with following(*filter(None, (tls, access.trust, metrics.until(stop)))):
        reading = asyncio.create_task(watch.run(), name="readings")
        log.info("scaler_started", address=address, metrics_address=metrics.address)
        stopped = asyncio.create_task(stop.wait(), name="stop")
        try:
            await asyncio.wait({reading, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()
        finally:
            await server.stop(1.0)
            for task in (reading, stopped):
                task.cancel()
            await asyncio.gather(reading, stopped, return_exceptions=True)


async def _once(access: FleetAccess, targets: ScalingTargets) -> Table:
    """Raises CommandError if no router answers."""
    watch = _watch(access, targets)
    reading = asyncio.create_task(watch.run(), name="readings")
    try:
        await watch.until_read_after(1)
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    if not watch.num_readings:
        raise CommandError("no router answers")
    table = Table("model", "ready", "should be", "because", box=None, pad_edge=False)
    for model, one in sorted(watch.recommendations.items()):
        terms = sorted(one.terms.items(), key=lambda term: -term[1])
        shown = ", ".join(f"{name} {value:.2f}" for name, value in terms if value >= 0.005) or "idle"
        table.add_row(model, str(watch.num_ready(model)), str(one.num_shards), shown)
    return table
