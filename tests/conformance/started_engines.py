"""Engines that have started, for the tests of the suite of engine_suite.py."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from shard_server.engines.base import Engine
from tests.conformance.engine_driver import EngineDriver

BLOCK_SIZE = 16

StartEngine = Callable[..., Awaitable[EngineDriver]]


class StartedEngines:
    """A subclass defines `make_engine`, which returns an engine that has not started, with a `block_size` of 16, a
    `max_batch` of 16 and the given ShardConfig fields."""

    model_name = "model"
    """The name of the model that `make_engine` serves."""

    def make_engine(self, request: pytest.FixtureRequest, **shard_fields: int) -> Engine:
        raise NotImplementedError

    @pytest.fixture
    async def start(self, request: pytest.FixtureRequest) -> AsyncIterator[StartEngine]:
        """Starts engines and closes them in the end."""
        async with contextlib.AsyncExitStack() as stack:

            async def start(**shard_fields: int) -> EngineDriver:
                engine = self.make_engine(request, **shard_fields)
                stack.push_async_callback(engine.close)
                await engine.start()
                return EngineDriver(engine)

            yield start
