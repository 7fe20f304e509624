"""Checks from outside, like a client, whether the fabric is ready, and says why if it is not."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from typing import Any
from urllib.parse import quote

import grpc
import grpc.aio
import msgspec

from kvloom.v1 import router_service_pb2, router_service_pb2_grpc, shard_service_pb2, shard_service_pb2_grpc
from kvloom.v1.router_service_pb2 import ModelInfo
from kvloom_common.addresses import bare_host, join_address, split_address, url_host
from kvloom_common.config import KvloomConfig
from kvloom_common.trust.fabric_trust import FabricTrust
from tools.supervisor.fleet_records import FleetRecords
from tools.supervisor.supervised_process import ProcessState, ProcessStatus

_TIMEOUT_SECONDS = 2.0
_MAX_BODY_BYTES = 4096
_EVERY_INTERFACE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
_SERVING_ROLES = ("edge", "router", "shard", "safety")


def reachable_host(host: str) -> str:
    """The host at which a client on this machine reaches a server that listens on `host`."""
    bare = bare_host(host)
    return url_host(_EVERY_INTERFACE.get(bare, bare))


def http_url(config: KvloomConfig) -> str:
    scheme = "https" if config.tls.certificate_file else "http"
    return f"{scheme}://{join_address(reachable_host(config.edge.host), config.edge.port)}"


def router_address(config: KvloomConfig) -> str:
    return join_address(reachable_host(config.router.host), config.router.port)


def reachable_address(address: str) -> str:
    """Like `reachable_host` for host:port."""
    host, _, port = address.rpartition(":")
    return join_address(reachable_host(host), port)


# -- one machine ------------------------------------------------------------------------------------------------------


async def is_complete(statuses: Iterable[ProcessStatus], num_shards: int, trust: FabricTrust) -> bool:
    """True when every running router knows all shards, and every edge accepts requests."""
    return not await not_ready_reasons(list(statuses), num_shards, trust)


async def not_ready_reasons(statuses: Sequence[ProcessStatus], num_shards: int, trust: FabricTrust) -> list[str]:
    """Returns what keeps the running processes from serving: the answers of each edge's /ready, and of each router,
    which must know at least `num_shards` ready shards."""
    running = [status for status in statuses if status.state == ProcessState.READY]
    reasons = await asyncio.gather(
        *(_router_reason(status, num_shards, trust) for status in running if status.router_address),
        *(edge_reason(status, trust) for status in running if status.role == "edge"),
    )
    return [*roles_away(statuses), *filter(None, reasons)]


def roles_away(statuses: Sequence[ProcessStatus]) -> list[str]:
    """The roles of which this machine has processes, but none that runs."""
    reasons: list[str] = []
    for role in _SERVING_ROLES:
        states = {status.name: status.state for status in statuses if status.role == role}
        if states and ProcessState.READY not in states.values():
            reasons.append(", ".join(f"{name} is {state}" for name, state in states.items()))
    return reasons


async def _router_reason(status: ProcessStatus, num_shards: int, trust: FabricTrust) -> str:
    num_ready = await num_ready_shards(status.internal_address or status.router_address, trust)
    if num_ready is None:
        return f"{status.name}: the router does not answer"
    return "" if num_ready >= num_shards else f"{status.name} knows {num_ready} of {num_shards} shards"


async def edge_reason(status: ProcessStatus, trust: FabricTrust, model: str = "") -> str:
    """Why the edge's /ready does not answer 200 (for this model); "" if it does. With a secret it is asked where it
    serves its fabric, because clients may need a certificate."""
    host, port = split_address(reachable_address(status.peer_address or status.metrics_address))
    path = f"/ready?model={quote(model)}" if model else "/ready"
    tls: dict[str, Any] = {}
    try:
        if status.peer_address:
            tls = {"ssl": trust.client_tls(), "server_hostname": trust.server_hostname("edge")}
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            reader, writer = await asyncio.open_connection(host, port, **tls)
            try:
                writer.write(f"GET {path} HTTP/1.1\r\nHost: {url_host(host)}\r\nConnection: close\r\n\r\n".encode())
                answer = await reader.read(_MAX_BODY_BYTES)
                while b"\r\n\r\n" not in answer and (more := await reader.read(_MAX_BODY_BYTES)):
                    answer += more
                if b"\r\n\r\n" in answer and not answer.partition(b"\r\n\r\n")[2]:
                    answer += await reader.read(_MAX_BODY_BYTES)
            finally:
                writer.close()
    except OSError:
        return f"{status.name} does not answer"
    if answer.split(b" ")[1:2] == [b"200"]:
        return ""
    _, _, body = answer.partition(b"\r\n\r\n")
    return f"{status.name}: {_reason_in(body)}"


def _reason_in(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["reason"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return "/ready does not answer 200"


async def edges_without(statuses: Sequence[ProcessStatus], model: str, trust: FabricTrust) -> list[str]:
    """Why running edges cannot serve requests for this model."""
    running = [status for status in statuses if status.role == "edge" and status.state == ProcessState.READY]
    return [*filter(None, await asyncio.gather(*(edge_reason(status, trust, model) for status in running)))]


async def num_ready_shards(address: str, trust: FabricTrust) -> int | None:
    """None if the router does not answer."""
    models = await models_of(address, trust)
    return None if models is None else sum(model.num_ready_shards for model in models)


async def brownouts(statuses: Sequence[ProcessStatus], trust: FabricTrust) -> list[str]:
    """The models that running routers have on a step of the brownout ladder, one sentence each."""
    running = [status for status in statuses if status.router_address and status.state == ProcessState.READY]
    found = await asyncio.gather(
        *(models_of(status.internal_address or status.router_address, trust) for status in running)
    )
    return [
        f"{status.name} degrades answers of {model.name}: it is overloaded (brownout step {model.brownout_step})"
        for status, models in zip(running, found, strict=True)
        for model in models or ()
        if model.brownout_step
    ]


async def models_of(address: str, trust: FabricTrust) -> Sequence[ModelInfo] | None:
    """The models that a router knows; None if it does not answer."""
    async with trust.open_channel(reachable_address(address), "router") as channel:
        stub = router_service_pb2_grpc.RouterServiceStub(channel)
        try:
            answer = await stub.ListModels(router_service_pb2.ListModelsRequest(), timeout=_TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError:
            return None
    return answer.models


# -- a machine of a fleet ---------------------------------------------------------------------------------------------


def roles_missing(roles: Collection[str], records: FleetRecords, *, needs_safety: bool) -> list[str]:
    """The roles that requests need, that this machine does not have, and that no other machine has announced."""
    needed = ("router", "shard", "safety") if needs_safety else ("router", "shard")
    return [role for role in needed if role not in roles and not records.num_of(role)]


def shards_to_register(statuses: Iterable[ProcessStatus], records: FleetRecords) -> list[str]:
    """This machine's shards that the registry does not have yet."""
    local = [status for status in statuses if status.role == "shard"]
    addresses = {record.address.rpartition(":")[2] for record in records.shards.values()}
    return [
        status.name
        for status in local
        # A process of several simulated shards has another name than they.
        if status.name not in records.shards and status.address.rpartition(":")[2] not in addresses
    ]


async def shards_without_router(statuses: Iterable[ProcessStatus], trust: FabricTrust) -> list[str]:
    """The running shards of this machine to which no router is connected."""
    running = [s for s in statuses if s.role == "shard" and s.state == ProcessState.READY]
    infos = await asyncio.gather(*(shard_info(status.address, trust) for status in running))
    return [
        status.name
        for status, info in zip(running, infos, strict=True)
        if isinstance(info, grpc.aio.AioRpcError) or not info.router_ids
    ]


async def shard_info(
    address: str, trust: FabricTrust, name: str = ""
) -> shard_service_pb2.GetInfoResponse | grpc.aio.AioRpcError:
    """Returns what the shard says about itself, or why it does not answer."""
    async with trust.open_channel(reachable_address(address), "shard", name) as channel:
        stub = shard_service_pb2_grpc.ShardServiceStub(channel)
        try:
            return await stub.GetInfo(shard_service_pb2.GetInfoRequest(), timeout=_TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError as error:
            return error
