"""What every engine with Capability.KV_SHARES must do; part of the suite of engine_suite.py."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvloom_common.kv_share import KvShare
from kvloom_common.text.block_hash import block_hashes, root_hash
from shard_server.engines.base import Capability, EngineRequest
from tests.conformance.engine_driver import EngineDriver, prompt_of, request_of
from tests.conformance.started_engines import StartedEngines, StartEngine

NUM_BLOCKS = 32
BLOCK_SIZE = 16
HALF = KvShare(owner=7, percent=50)


def own_request(number: int, name: str, share: KvShare | None = HALF) -> EngineRequest:
    """A request of the tenant, of four whole blocks."""
    root = root_hash("model", cache_salt="guaranteed")
    return request_of(name, prompt_of(number, 4 * BLOCK_SIZE), 2, kv_share=share, root_hash=root)


def flood(name: str, num_requests: int, max_tokens: int = 2) -> list[EngineRequest]:
    """Requests of another tenant, of six whole blocks each."""
    root = root_hash("model", cache_salt="flood")
    return [
        request_of(f"{name}-{i}", prompt_of(1000 + i, 6 * BLOCK_SIZE), max_tokens, root_hash=root)
        for i in range(num_requests)
    ]


def cached_blocks(driver: EngineDriver, requests: Sequence[EngineRequest]) -> int:
    """How many blocks of these prompts are in the prefix cache."""
    hashes = [block for one in requests for block in block_hashes(one.prompt_token_ids, BLOCK_SIZE, one.root_hash)]
    return len(driver.cached().intersection(hashes))


class KvShareSuite(StartedEngines):
    """Engines without the capability skip these tests."""

    @pytest.fixture
    async def start_small(self, start: StartEngine) -> StartEngine:
        """Starts an engine of 32 blocks."""

        async def start_small() -> EngineDriver:
            driver = await start(num_blocks=NUM_BLOCKS, max_model_len=NUM_BLOCKS * BLOCK_SIZE)
            if Capability.KV_SHARES not in driver.engine.info.capabilities:
                pytest.skip("not promised")
            return driver

        return start_small

    async def test_a_flood_of_another_tenant_leaves_a_guaranteed_share_alone(self, start_small: StartEngine) -> None:
        """What the share is for. Without it the same flood evicts everything."""
        driver = await start_small()
        without_share = [own_request(i, f"unguarded-{i}", None) for i in range(3)]
        await driver.run(*without_share)
        await driver.run(*flood("first", 8))
        assert not cached_blocks(driver, without_share)
        own = [own_request(10 + i, f"own-{i}") for i in range(3)]
        await driver.run(*own)
        await driver.run(*flood("second", 8))
        assert cached_blocks(driver, own) == 12
        await driver.run(*(own_request(10 + i, f"again-{i}") for i in range(3)))
        assert all(driver.starts[f"again-{i}"].num_cached_tokens >= 3 * BLOCK_SIZE for i in range(3))

    async def test_an_idle_share_is_lent_and_taken_back(self, start_small: StartEngine) -> None:
        """An idle share costs others nothing; its owner has it again with its first requests, and no more than it."""
        driver = await start_small()
        others = flood("others", 6)
        await driver.run(own_request(1, "early"))
        await driver.run(*others)
        assert cached_blocks(driver, others) > NUM_BLOCKS // 2
        own = [own_request(10 + i, f"own-{i}") for i in range(6)]
        await driver.run(*own)
        await driver.run(*flood("second", 8))
        usage = driver.load.kv_shares
        assert usage is not None
        assert usage.num_last_resorts == 0
        assert cached_blocks(driver, own) == usage.num_kept == NUM_BLOCKS // 2

    async def test_a_sequence_within_its_share_overtakes_those_that_wait_for_other_blocks(
        self, start_small: StartEngine
    ) -> None:
        """While the blocks that a share has lent are in use, its owner waits for these, and for nothing else."""
        driver = await start_small()
        await driver.run(own_request(1, "early"))
        await driver.run(own_request(2, "late"))
        for request in flood("others", 6, max_tokens=20):
            driver.engine.submit(request)
        driver.engine.submit(own_request(1, "own"))
        await driver.step_until(lambda: "own" in driver.ends and len(driver.ends) == 9)
        started = list(driver.starts)
        assert started.index("own") < started.index("others-5")

    async def test_shares_never_keep_another_sequence_from_running(self, start_small: StartEngine) -> None:
        """A sequence that needs nearly all blocks fits alone. What a share protects is then the last resort."""
        driver = await start_small()
        await driver.run(*(own_request(10 + i, f"own-{i}") for i in range(3)))
        (tokens,) = await driver.run(request_of("large", prompt_of(99, 29 * BLOCK_SIZE), 8))
        assert len(tokens) == 8
        assert driver.load.kv_shares is not None
        assert driver.load.kv_shares.num_last_resorts > 0
