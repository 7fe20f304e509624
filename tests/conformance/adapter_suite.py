"""What every engine with Capability.ADAPTERS must do; part of the suite of engine_suite.py."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvloom_common.text.block_hash import root_hash
from shard_server.engines.base import (
    Adapters,
    Capability,
    EngineError,
    EngineRequest,
    SequenceFinishReason,
    adapters_of,
)
from tests.conformance.engine_driver import EngineDriver, prompt_of, request_of
from tests.conformance.started_engines import StartedEngines, StartEngine

NAMES = ("a", "b")


def adapted(request_id: str, adapter: str, max_tokens: int = 12, **fields: Any) -> EngineRequest:
    """All of the same prompt: its blocks must not be shared between adapters, which have different roots."""
    root = root_hash("model", cache_salt=adapter)
    return request_of(request_id, prompt_of(7, 40), max_tokens, adapter=adapter, root_hash=root, **fields)


class AdapterSuite(StartedEngines):
    """A subclass defines `adapter_path`, as EngineSuite says. Engines without the capability skip these tests."""

    def adapter_path(self, request: pytest.FixtureRequest, number: int) -> Path:
        """A directory with an adapter that changes answers; every number gives another one."""
        raise NotImplementedError

    @pytest.fixture
    async def start_adapted(self, start: StartEngine, request: pytest.FixtureRequest) -> StartEngine:
        """Starts engines with two adapters."""

        async def start_adapted(**shard_fields: int) -> EngineDriver:
            driver = await start(**shard_fields)
            adapters = adapters_of(driver.engine)
            if adapters is None:
                pytest.skip("this engine takes no adapters")
            for number, name in enumerate(NAMES):
                await adapters.add(name, str(self.adapter_path(request, number)))
            return driver

        return start_adapted

    async def test_adapters_share_a_batch_and_nothing_else(self, start_adapted: StartEngine) -> None:
        """The same prompt with two adapters and with none: other answers, and no block of the one is used for the
        other."""
        driver = await start_adapted()
        together = await driver.run(*(adapted(f"together {name}", name) for name in ("", *NAMES)))
        assert all(driver.starts[f"together {name}"].num_cached_tokens == 0 for name in ("", *NAMES))
        assert len({tuple(tokens) for tokens in together}) == 3
        alone = [(await driver.run(adapted(f"alone {name}", name)))[0] for name in ("", *NAMES)]
        if Capability.BATCH_INVARIANT in driver.engine.info.capabilities:
            assert alone == together
        if Capability.PREFIX_CACHING in driver.engine.info.capabilities:
            assert all(driver.starts[f"alone {name}"].num_cached_tokens > 0 for name in ("", *NAMES))

    async def test_an_answer_with_an_adapter_is_resumed_exactly(self, start_adapted: StartEngine) -> None:
        """A failover continues with the adapter after the tokens that the client has."""
        driver = await start_adapted()
        if Capability.SEEDED_RESUME not in driver.engine.info.capabilities:
            pytest.skip("this engine promises no exact continuation")
        (whole,) = await driver.run(adapted("whole", "a"))
        (rest,) = await driver.run(adapted("rest", "a", output_token_ids=whole[:5]))
        assert whole[:5] + rest == whole

    async def test_an_unknown_adapter_is_refused_and_leaves_no_trace(self, start_adapted: StartEngine) -> None:
        """The model itself must never answer in its place."""
        driver = await start_adapted()
        with pytest.raises(EngineError):
            driver.engine.submit(adapted("x", "c"))
        await driver.run(adapted("x", "a"))
        assert driver.ends == {"x": SequenceFinishReason.LENGTH}

    async def test_the_state_says_what_is_loaded_and_in_use(self, start_adapted: StartEngine) -> None:
        """Routers and dashboards read it."""
        driver = await start_adapted()
        adapters = _adapters(driver)
        assert [adapter.is_loaded for adapter in adapters.state().adapters] == [False, False]
        checksums = {adapter.info.checksum for adapter in adapters.state().adapters}
        assert len(checksums) == 2
        assert all(checksums)
        changes: list[bool] = []
        adapters.listen(lambda: changes.append(True))
        driver.engine.submit(adapted("x", "a", max_tokens=100))
        await driver.step_until(lambda: "x" in driver.tokens)
        assert adapters.state().running == ["a"]
        assert [adapter.is_loaded for adapter in adapters.state().adapters] == [True, False]
        await driver.step_until(lambda: "x" in driver.ends)
        await driver.read_ready()
        assert adapters.state().running == []
        assert changes

    async def test_an_adapter_that_is_removed_waits_for_its_sequences(self, start_adapted: StartEngine) -> None:
        """New ones are refused at once, and another adapter may then have the name."""
        driver = await start_adapted()
        adapters = _adapters(driver)
        driver.engine.submit(adapted("x", "a", max_tokens=100))
        await driver.step_until(lambda: "x" in driver.tokens)
        removal = asyncio.create_task(adapters.remove("a"))
        await asyncio.sleep(0)
        assert adapters.find("a") is None
        assert not removal.done()
        with pytest.raises(EngineError):
            driver.engine.submit(adapted("y", "a"))
        await driver.step_until(lambda: "x" in driver.ends)
        reading = asyncio.create_task(driver.read_ready())
        await asyncio.wait_for(removal, 10)
        await reading
        assert len(driver.tokens["x"]) == 100


def _adapters(driver: EngineDriver) -> Adapters:
    adapters = adapters_of(driver.engine)
    assert adapters is not None
    return adapters
