"""Fixtures for integration tests of several components."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvloom_common.text.tokenizer import ModelTokenizer
from tests.fakes.redis_server import redis_server


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A real Redis-protocol server on loopback; tests use different key prefixes."""
    with redis_server() as server:
        yield server.connection_url


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Iterator[ModelTokenizer]:
    """The built-in model's."""
    loaded = ModelTokenizer.load(model_dir)
    yield loaded
    loaded.close()
