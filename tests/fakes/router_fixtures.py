"""Fixtures of the router's tests; a test module names this file in `pytest_plugins`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.fakes.redis_server import redis_server
from tests.fakes.router_world import RouterWorld, router_world


@pytest.fixture(scope="session")
def router_redis_url() -> Iterator[str]:
    """A real Redis server; tests use different key prefixes."""
    with redis_server() as server:
        yield server.connection_url


@pytest.fixture
async def world(router_redis_url: str) -> AsyncIterator[RouterWorld]:
    async with router_world(router_redis_url) as started:
        yield started
