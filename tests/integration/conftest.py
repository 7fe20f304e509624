"""What integration tests of more than one component need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.redis_server import redis_server


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A real Redis-protocol server on loopback; tests keep apart by key prefix."""
    with redis_server() as server:
        yield server.connection_url
