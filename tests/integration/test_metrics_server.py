"""/metrics of routers, shards and the safety service, over real sockets: what scrapers need, and what strangers get."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path

import aiohttp
import pytest

from kvloom_common.access.api_keys import ApiKey, digest_of, write_api_keys
from kvloom_common.config import KvloomConfig
from kvloom_common.metrics.server import MAX_SCRAPES, MetricsServer
from kvloom_common.process.service import StartError
from kvloom_common.process.watched_files import following
from tests.fakes.certificates import Authority
from tests.waiting import eventually

KEY = "kvl-test"


async def status(url: str, key: str = "", context: ssl.SSLContext | None = None) -> int:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with (
        aiohttp.ClientSession() as http,
        http.get(url, headers=headers, ssl=True if context is None else context) as response,
    ):
        return response.status


def config_with_keys(folder: Path) -> KvloomConfig:
    config = KvloomConfig()
    write_api_keys(folder / "keys", [ApiKey("prometheus", digest_of(KEY))])
    config.callers.api_keys_file = str(folder / "keys")
    return config


async def test_without_keys_everyone_on_this_machine_may_scrape() -> None:
    """The default stays as simple as it was, and reaches no further than this machine."""
    server = MetricsServer(KvloomConfig(), 0)
    try:
        assert server.address.startswith("127.0.0.1:")
        assert await status(f"http://{server.address}/metrics") == 200
    finally:
        server.close()


async def test_scrapers_need_a_key_where_clients_do(tmp_path: Path) -> None:
    """Metrics tell which models are used and how much, and a removed key must stop opening them."""
    server = MetricsServer(config_with_keys(tmp_path), 0)
    url = f"http://{server.address}/metrics"
    try:
        async with following(server):
            assert await status(url) == 401
            assert await status(url, "wrong") == 401
            assert await status(url, KEY) == 200
            write_api_keys(tmp_path / "keys", [])

            async def is_refused() -> bool:
                return await status(url, KEY) == 401

            await eventually(is_refused, "the removed key is refused")
    finally:
        server.close()


async def test_scrapers_need_tls_where_clients_do(tmp_path: Path) -> None:
    """A key must not travel in plain text."""
    authority = Authority("ca")
    certificate, key = authority.issue_to(tmp_path, "server")
    config = config_with_keys(tmp_path)
    config.tls.certificate_file, config.tls.key_file = str(certificate), str(key)
    server = MetricsServer(config, 0)
    try:
        trusting = ssl.create_default_context(cadata=authority.pem.decode())
        assert await status(f"https://{server.address}/metrics", KEY, trusting) == 200
        assert await status(f"https://{server.address}/metrics", "", trusting) == 401
        with pytest.raises(aiohttp.ClientError):
            await status(f"http://{server.address}/metrics", KEY)
        assert await status(f"https://{server.address}/metrics", KEY, trusting) == 200
    finally:
        server.close()


def test_an_open_port_needs_keys_and_tls_or_a_word(tmp_path: Path) -> None:
    """The rule of the other ports: what other machines can reach is protected, or the operator accepts the risk."""
    config = config_with_keys(tmp_path)
    config.metrics.host = "0.0.0.0"
    with pytest.raises(StartError, match=r"metrics\.host.*--tls-certificate"):
        MetricsServer(config, 0)
    config.callers.allow_insecure = True
    MetricsServer(config, 0).close()


async def test_a_successor_shares_the_port_and_gets_it_alone() -> None:
    """A scraper must find the same port after a restart, and never the two processes by turns."""
    first = MetricsServer(KvloomConfig(), 0, shares_port=True)
    port = int(first.address.rpartition(":")[2])
    with pytest.raises(StartError, match=f"127.0.0.1:{port}"):
        MetricsServer(KvloomConfig(), port)
    second = MetricsServer(KvloomConfig(), port, shares_port=True)
    first.close()
    try:
        for _ in range(20):
            assert await status(f"http://{second.address}/metrics") == 200
    finally:
        second.close()


@pytest.mark.parametrize(("num_idle", "served"), [(MAX_SCRAPES - 1, True), (MAX_SCRAPES, False)])
async def test_idle_connections_neither_block_scrapes_nor_pile_up(num_idle: int, served: bool) -> None:
    """Each connection costs a thread."""
    server = MetricsServer(KvloomConfig(), 0)
    host, _, port = server.address.rpartition(":")
    idle = [socket.create_connection((host, int(port))) for _ in range(num_idle)]
    try:
        async with asyncio.timeout(5):
            if served:
                assert await status(f"http://{server.address}/metrics") == 200
            else:
                with pytest.raises(aiohttp.ClientError):
                    await status(f"http://{server.address}/metrics")
    finally:
        for connection in idle:
            connection.close()
        server.close()
