"""Describes what a machine's processes listen on, and who gets in: the lines that `kvloom up` shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvloom_common.access.exposure import authenticates, is_loopback
from kvloom_common.addresses import join_address
from kvloom_common.config import KvloomConfig
from tools.supervisor.supervised_process import ProcessStatus

_MAX_PORTS = 12


def describe_bindings(config: KvloomConfig, statuses: Sequence[ProcessStatus], *, is_fleet: bool) -> Iterator[str]:
    """One line for each kind of port, and a warning if clients need no key."""
    roles = {status.role for status in statuses}
    has_router = any(status.router_address for status in statuses)
    guards = f"{_tls(config)}, {_keys(config)}"
    for_clients = [
        address
        for address, is_there in (
            (f"HTTP {join_address(config.edge.host, config.edge.port)}", "edge" in roles),
            (f"gRPC {join_address(config.router.host, config.router.port)}", has_router),
        )
        if is_there
    ]
    if for_clients:
        yield f"clients    {', '.join(for_clients)}: {guards}"
        if config.control.enabled:
            yield "keys       kvloom keys create --project ORG/PROJECT --create (docs/operate/tenancy.md)"
    internal = [address for status in statuses for address in _internal(status)]
    if internal:
        who = "its fleet" if is_fleet else "this fabric"
        yield f"inside     {_shown(internal)}: only for {who}, by TLS with certificates on both sides"
    metrics = [a for s in statuses if s.role != "edge" for a in (s.metrics_address, s.router_metrics_address) if a]
    if metrics:
        yield f"metrics    {_shown(metrics)}: {_tls(config)}, {_scrapers(config)}"
    if for_clients and not authenticates(config):
        hosts = [
            host for host, there in ((config.edge.host, "edge" in roles), (config.router.host, has_router)) if there
        ]
        who = "any user of this machine" if all(map(is_loopback, hosts)) else "ANYONE WHO CAN CONNECT"
        yield f"warning    no API key is needed: {who} can use the models (--api-keys FILE; `kvloom keys add`)"


def _internal(status: ProcessStatus) -> list[str]:
    if status.role in ("shard", "safety", "control", "orchestrator"):
        return [status.address] if status.address else []
    return [address for address in (status.internal_address, status.peer_address) if address]


def _shown(addresses: Sequence[str]) -> str:
    """Grouped by host, because most ports of a machine are at one."""
    ports: dict[str, list[str]] = {}
    for address in addresses:
        host, _, port = address.rpartition(":")
        ports.setdefault(host, []).append(port)
    return ", ".join(f"{host} {_some(sorted(found, key=int))}" for host, found in ports.items())


def _some(ports: Sequence[str]) -> str:
    more = len(ports) - _MAX_PORTS
    return f"({', '.join(ports[:_MAX_PORTS])}{f' and {more} more' if more > 0 else ''})"


def _tls(config: KvloomConfig) -> str:
    if not config.tls.certificate_file:
        return "no TLS"
    return "TLS with clients' certificates" if config.tls.client_ca_file else "TLS"


def _keys(config: KvloomConfig) -> str:
    return "keys of tenants" if config.control.enabled else _scrapers(config)


def _scrapers(config: KvloomConfig) -> str:
    """Says what those must show who scrape other processes than edges, which know no tenants."""
    if config.callers.provider:
        return f"the auth provider {config.callers.provider}"
    return "API keys" if config.callers.api_keys_file else "no API keys"
