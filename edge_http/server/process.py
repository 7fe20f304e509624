"""The lifecycle of an edge, whatever kind of link connects it to a router."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Final

from edge_http import metric_table as table
from edge_http.cells.known_cells import no_residency
from edge_http.cells.other_cells import OtherCells
from edge_http.edge import Edge
from edge_http.orchestrator_link import OrchestratorLink
from edge_http.recovery.edge_membership import EdgeMembership, join_edges
from edge_http.server.http_server import EdgeServer
from edge_http.tenant_usage import TenantUsage
from edge_http.tracing import EdgeTracing
from kvloom.router_link.group import RouterGroup
from kvloom.router_link.link import RouterLink
from kvloom_common.access.exposure import exposure_risk
from kvloom_common.access.listener_tls import ListenerTls, listener_tls
from kvloom_common.callers import Callers, configured_callers
from kvloom_common.config import KvloomConfig
from kvloom_common.delivery_log import FOLDER as WITNESS_FOLDER
from kvloom_common.delivery_log import DeliveryLog
from kvloom_common.discovery.announcer import advertised_address, announced_process, fabric_host, process_record
from kvloom_common.discovery.records import NameTakenError
from kvloom_common.limits.memory_watch import MemoryWatch
from kvloom_common.metrics.targets import TargetAnnouncement, TargetList, metrics_registry
from kvloom_common.models.catalogue import Catalogue, CatalogueFollower
from kvloom_common.models.model_routes import ModelRoutes
from kvloom_common.models.rollout_follower import RolloutFollower
from kvloom_common.models.succession import SuccessionFollower
from kvloom_common.process.access_log import AccessLog
from kvloom_common.process.service import StartError, announce_leaving, wait_to_open
from kvloom_common.process.watched_files import following
from kvloom_common.tracing.tracer import open_tracer
from kvloom_common.trust.fabric_trust import NO_SECRET, FabricTrust
from kvloom_common.trust.state_seal import StateSealer

_LOOK_AGAIN_SECONDS: Final = 0.1


@dataclasses.dataclass(frozen=True, slots=True)
class EdgeListenOptions:
    """The listeners of an edge."""

    port: int
    """The port on `edge.host`; 0 picks a free one."""
    listen_fd: int | None = None
    """A bound socket, which may be listening already, to use instead of `port`. The process that passed it keeps it and
    may pass it to a successor, so that connections waiting in it are not lost."""
    peer_port: int | None = None
    """A port of this edge alone, for other edges and /metrics; 0 picks a free one; None if `port` is not shared."""
    shares_peer_port: bool = False
    """True when a successor may listen on `peer_port` too."""

    @staticmethod
    def add_flags(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--listen-fd", type=int, help="a socket that is bound already, instead of edge.port")
        help_text = "a port of its own for other edges and /metrics, when edges share edge.port; 0 picks one"
        parser.add_argument("--peer-port", type=int, help=help_text)
        parser.add_argument("--share-peer-port", action="store_true", help="let a successor listen on that port too")

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace, config: KvloomConfig) -> EdgeListenOptions:
        port = config.edge.port if arguments.port is None else arguments.port
        return cls(port, arguments.listen_fd, arguments.peer_port, arguments.share_peer_port)


async def serve_edge(
    config: KvloomConfig,
    link: RouterLink,
    catalogue: Catalogue,
    listen_options: EdgeListenOptions,
    stop: asyncio.Event,
    on_ready: Callable[[str, str, str], None],
    trust: FabricTrust = NO_SECRET,
    name: str = "edge-0",
    callers: Callers | None = None,
) -> None:
    """Serve until `stop` is set, then let running requests end. `catalogue` has the models whose files this machine
    has; the cards of the others come from routers. `on_ready` is called with the address, that of /metrics, and that
    for the processes of the fabric ("" without a secret). `callers`: those of a router in this process, which follows
    them; None: there is none. Raises StartError, ConfigError."""
    if risk := exposure_risk(config, config.edge.host):
        raise StartError(risk)
    group = link if isinstance(link, RouterGroup) else None
    followed = None
    if callers is None:
        callers = configured_callers(config, trust, name)
        followed = callers.watched
    routes = ModelRoutes(config.routes)
    edge = Edge(config, link, catalogue.by_name, group, callers, AccessLog(config.log), routes)
    if callers.identities is not None:
        table.TENANT_TABLE.observe(callers.identities.tenants, edge.metrics.registry)
    if group is not None:
        edge.metrics.watch_routers(group)
    if callers.identities is not None:
        edge.add_usage(TenantUsage(callers.identities))
        if config.control.witness:
            edge.witness = DeliveryLog(Path(config.data_dir) / WITNESS_FOLDER / f"{name}.jsonl")
    edge.state_sealer = StateSealer(trust.state_key)
    if config.orchestrator.enabled:
        edge.orchestrator = OrchestratorLink(config, name, trust)
    tracer = open_tracer(config.tracing, "edge", name)
    if tracer is not None:
        edge.tracing = EdgeTracing(tracer)
    cells = None
    if config.edge.cells and group is not None:
        residency = no_residency if callers.identities is None else callers.identities.tenants.residency
        cells = OtherCells(config, group, edge.metrics, residency, trust.sealer)
        group.use_cells(cells, {})
    rollouts = RolloutFollower(config, trust.sealer, routes)
    catalogue_follower = None if group is None else CatalogueFollower(catalogue, group)
    succession = SuccessionFollower(catalogue, routes, link)
    watchers = (
        catalogue_follower,
        followed,
        rollouts,
        succession,
        edge.usage,
        edge.witness,
        edge.orchestrator,
        tracer,
        cells,
    )
    async with following(*filter(None, watchers)):
        await _serve(edge, callers, config, listen_options, stop, on_ready, trust, name)


async def _serve(
    edge: Edge,
    callers: Callers,
    config: KvloomConfig,
    listen_options: EdgeListenOptions,
    stop: asyncio.Event,
    on_ready: Callable[[str, str, str], None],
    trust: FabricTrust,
    name: str,
) -> None:
    tls = listener_tls(config.tls)
    edge.callers.revoked = None if tls is None else tls.revoked
    server = EdgeServer(edge)
    peers: EdgeMembership | None = None
    targets: TargetList | None = None
    try:
        # Clients may be waiting to connect already. They would be rejected until a shard can be reached. On a shared
        # port, responses of other edges would appear not to exist until those edges are known.
        if listen_options.peer_port is None:
            await wait_to_open(_until_ready(edge, callers), stop)
            address = own_address = await _open(server, config.edge.host, listen_options, tls)
            peer_address = await _open_to_peers(edge, server, config, address, trust)
            peers = join_edges(edge, config.redis, _for_peers(config, peer_address), trust)
        else:
            if listen_options.shares_peer_port and not trust.has_secret:
                raise StartError(
                    "--share-peer-port needs the fabric's secret: without it, other edges use that port too"
                )
            shares_port = listen_options.shares_peer_port
            own_address = await server.listen(
                config.edge.host, listen_options.peer_port, _context(tls), shares_port=shares_port
            )
            peer_address = await _open_to_peers(edge, server, config, own_address, trust)
            peers = join_edges(edge, config.redis, _for_peers(config, peer_address), trust, shares_port=True)
            await wait_to_open(_until_ready(edge, callers), stop)
            address = await _open(server, config.edge.host, listen_options, tls)
        announcement = TargetAnnouncement(config, trust, role="edge", name=name, address=own_address)
        targets = TargetList(metrics_registry(config, trust), announcement.target)
        edge.list_targets = targets.read
        memory = MemoryWatch(
            table.MEMORY,
            config.fabric.max_memory_bytes,
            edge.on_memory_level,
            edge.metrics.registry,
            edge.admission.is_idle,
        )
        url = f"{'http' if tls is None else 'https'}://{advertised_address(config, address)}"
        record = process_record(config, name, peer_address, url)
        async with announced_process(config, "edge", record, trust.sealer):
            on_ready(address, own_address, peer_address if trust.has_secret else "")
            async with following(memory, announcement, *filter(None, (tls,))):
                await stop.wait()
        await server.drain(announce_leaving)
        if peers is not None:
            await peers.stop_publishing()
        await server.stop()
    except NameTakenError as error:
        raise StartError(str(error)) from error
    finally:
        if peers is not None:
            await peers.close()
        if targets is not None:
            await targets.close()


async def _until_ready(edge: Edge, callers: Callers) -> None:
    """Looks again after a short time, too: a model's card may arrive without a change of the fleet."""
    if callers.identities is not None:
        await callers.identities.tried.wait()
    while edge.not_ready_reason():
        try:
            async with asyncio.timeout(_LOOK_AGAIN_SECONDS):
                await edge.link.wait_fleet_change()
        except TimeoutError:
            pass


async def _open_to_peers(
    edge: Edge, server: EdgeServer, config: KvloomConfig, own_address: str, trust: FabricTrust
) -> str:
    """Where other edges reach this one: with a secret, at a port of their own, which asks for a certificate."""
    tls = trust.server_tls()
    if tls is None:
        return own_address
    edge.may_connect = peers_at(tls, trust)
    host = fabric_host(config, own_address.rpartition(":")[0])
    return await server.listen_to_fabric(host, tls, trust)


def peers_at(tls: ssl.SSLContext, trust: FabricTrust) -> Callable[[asyncio.BaseTransport], bool]:
    """For Edge.may_connect, of a listener with this TLS: a shard's certificate, say, is of the fabric as well."""

    def may_connect(transport: asyncio.BaseTransport) -> bool:
        is_here = transport.get_extra_info("sslcontext") is tls
        return not is_here or trust.may_connect("edge/HTTP", transport.get_extra_info("peercert"))

    return may_connect


def _for_peers(config: KvloomConfig, address: str) -> str:
    """Returns the address that is announced to other edges. A wildcard is left as it is where no host is advertised."""
    return advertised_address(config, address) if config.fabric.advertised_host else address


def _context(tls: ListenerTls | None) -> ssl.SSLContext | None:
    return None if tls is None else tls.http_context()


async def _open(server: EdgeServer, host: str, listen_options: EdgeListenOptions, tls: ListenerTls | None) -> str:
    if listen_options.listen_fd is None:
        return await server.listen(host, listen_options.port, _context(tls))
    try:
        listener = socket.socket(fileno=listen_options.listen_fd)
    except OSError as error:
        raise StartError(f"--listen-fd {listen_options.listen_fd} is no socket: {error.strerror}") from error
    return await server.take_over(listener, _context(tls))
