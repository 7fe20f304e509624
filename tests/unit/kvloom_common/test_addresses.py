"""Hosts and ports, joined and split, also those of IPv6, whose colons need brackets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvloom_common.addresses import join_address, split_address, url_host
from kvloom_common.config import KvloomConfig
from kvloom_common.discovery.announcer import advertised_address
from kvloom_common.discovery.router_finder import configured_routers
from kvloom_common.metrics.server import MetricsServer
from kvloom_common.metrics.targets import scraped_address
from tools.supervisor.bindings import describe_bindings
from tools.supervisor.readiness import http_url, reachable_address, router_address
from tools.supervisor.supervised_process import ProcessStatus

REPOSITORY = Path(__file__).resolve().parents[3]
SOURCES = ("kvloom", "kvloom_common", "edge_http", "router", "shard_server", "safety_svc", "control", "tools")
JOINED = re.compile(r'f".*\{[^{}]*host[^{}]*\}\]?:\{[^{}]*(?:port|bound)')


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "127.0.0.1:80"),
        ("localhost", "localhost:80"),
        ("::1", "[::1]:80"),
        ("[::1]", "[::1]:80"),
        ("::", "[::]:80"),
        ("fe80::1%eth0", "[fe80::1%eth0]:80"),
    ],
)
def test_a_host_of_ipv6_has_brackets_however_it_was_written(host: str, address: str) -> None:
    """The port would otherwise be a part of the host."""
    assert join_address(host, 80) == join_address(host, "80") == address
    assert split_address(address) == (host.strip("[]"), 80)
    assert join_address(*split_address(address)) == address
    assert url_host(host) == address[:-3]


@pytest.mark.parametrize("address", ["", "localhost", "::1", "[::1]"])
def test_what_has_no_port_is_no_address(address: str) -> None:
    """The last group of ::1 is a number as well, but where it is meant as a host it must not be used as a port."""
    if address == "::1":
        assert split_address(address) == (":", 1)  # it cannot be told from host:port: addresses have brackets
        return
    with pytest.raises(ValueError, match="invalid literal"):
        split_address(address)


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_all_that_tells_where_to_connect_has_brackets(host: str) -> None:
    """`kvloom up --host ::1` said that a port was taken, because gRPC cannot listen at ::1:8782."""
    config = KvloomConfig()
    config.edge.host = config.router.host = config.metrics.host = host
    config.edge.port, config.router.port = 8780, 8782
    assert http_url(config) == "http://[::1]:8780"
    assert router_address(config) == "[::1]:8782"
    assert configured_routers(config) == ["[::1]:8782"]
    edge = ProcessStatus("edge", "edge", 1, "ready", router_address="[::1]:8782", metrics_address="[::1]:9")
    assert "HTTP [::1]:8780, gRPC [::1]:8782" in next(describe_bindings(config, [edge], is_fleet=False))
    config.router.host = "::"
    assert router_address(config) == "[::1]:8782"


def test_wildcards_of_ipv6_are_replaced_by_what_others_reach() -> None:
    """Other machines cannot connect to [::]."""
    config = KvloomConfig()
    config.fabric.host, config.fabric.advertised_host = "::", "2001:db8::7"
    assert reachable_address("[::]:80") == "[::1]:80"
    assert advertised_address(config, "[::]:80") == "[2001:db8::7]:80"
    assert scraped_address(config, "[::]:80") == "[2001:db8::7]:80"
    assert scraped_address(config, "[::1]:80") == "[::1]:80"


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_metrics_are_served_there(host: str) -> None:
    """Resolvers take no brackets, and addresses need them."""
    config = KvloomConfig()
    config.metrics.host = host
    server = MetricsServer(config, 0)
    server.close()
    assert re.fullmatch(r"\[::1\]:\d+", server.address)


def test_addresses_are_joined_in_one_place() -> None:
    """Each place of its own would be another one without brackets."""
    found = [
        f"{path}:{number}"
        for folder in SOURCES
        for path in (REPOSITORY / folder).rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if JOINED.search(line) and path.name != "addresses.py"
    ]
    assert not found
