"""Checks from outside, like a client, whether the fabric is ready."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc
import grpc.aio

from kvloom.config import KvloomConfig
from kvloom.trust.fabric_trust import FabricTrust
from kvloom.v1 import router_service_pb2, router_service_pb2_grpc
from tools.supervisor.supervised_process import ProcessState, ProcessStatus

_TIMEOUT_SECONDS = 2.0
_EVERY_INTERFACE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def reachable_host(host: str) -> str:
    """The host at which a client on this machine reaches a server that listens on `host`."""
    reachable = _EVERY_INTERFACE.get(host, host)
    return f"[{reachable}]" if ":" in reachable else reachable


def http_url(config: KvloomConfig) -> str:
    scheme = "https" if config.tls.certificate_file else "http"
    return f"{scheme}://{reachable_host(config.edge.host)}:{config.edge.port}"


def router_address(config: KvloomConfig) -> str:
    return f"{reachable_host(config.router.host)}:{config.router.port}"


def reachable_address(address: str) -> str:
    """Like `reachable_host` for host:port."""
    host, _, port = address.rpartition(":")
    return f"{reachable_host(host.strip('[]'))}:{port}"


async def is_complete(statuses: Iterable[ProcessStatus], num_shards: int, trust: FabricTrust) -> bool:
    """Whether every running router knows all shards, and every edge accepts requests."""
    running = [status for status in statuses if status.state == ProcessState.READY]
    routers = [status.internal_address or status.router_address for status in running if status.router_address]
    edges = [status for status in running if status.role == "edge"]
    answers = await asyncio.gather(
        *(fleet_is_complete(address, num_shards, trust) for address in routers),
        *(is_edge_ready(status, trust) for status in edges),
    )
    return all(answers)


async def is_edge_ready(status: ProcessStatus, trust: FabricTrust) -> bool:
    """Whether the edge answers /ready with 200. With a secret it is asked where it serves its fabric, because clients
    may need a certificate."""
    host, _, port = reachable_address(status.peer_address or status.metrics_address).rpartition(":")
    tls: dict[str, Any] = {}
    try:
        if status.peer_address:
            tls = {"ssl": trust.client_tls(), "server_hostname": trust.server_hostname("edge")}
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), **tls)
            try:
                writer.write(f"GET /ready HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
                status_line = await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False
    return status_line.split(b" ")[1:2] == [b"200"]


async def fleet_is_complete(address: str, num_shards: int, trust: FabricTrust) -> bool:
    """Whether the router that serves its fabric at this address sees at least `num_shards` ready shards."""
    async with trust.open_channel(reachable_address(address), "router") as channel:
        stub = router_service_pb2_grpc.RouterServiceStub(channel)
        try:
            answer = await stub.ListModels(router_service_pb2.ListModelsRequest(), timeout=_TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError:
            return False
    return sum(model.num_ready_shards for model in answer.models) >= num_shards
