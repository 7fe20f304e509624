"""What every engine with Capability.PREFIX_CACHING must do; part of the suite of engine_suite.py."""

from __future__ import annotations

import pytest

from kvloom_common.text.block_hash import block_hashes, root_hash
from shard_server.engines.base import BlockStored, Capability
from tests.conformance.engine_driver import prompt_of, request_of
from tests.conformance.started_engines import BLOCK_SIZE, StartedEngines, StartEngine


class PrefixCacheSuite(StartedEngines):
    """Engines without the capability skip these tests."""

    async def test_stored_hashes_are_the_prompts_own_parents_first(self, start: StartEngine) -> None:
        """Routers compute the same hashes from the same tokens."""
        driver = await start()
        if Capability.PREFIX_CACHING not in driver.engine.info.capabilities:
            pytest.skip("not promised")
        root = root_hash(driver.engine.info.model, cache_salt="tenant")
        prompt = prompt_of(8, 50)
        (tokens,) = await driver.run(request_of("a", prompt, 30, root_hash=root))
        chain = block_hashes(prompt + tokens, BLOCK_SIZE, root)
        stored = [h for event in driver.kv_events if isinstance(event, BlockStored) for h in event.block_hashes]
        assert stored == chain[: len(stored)]
        assert len(stored) >= 50 // BLOCK_SIZE

    async def test_kv_events_replay_to_what_is_cached_also_when_blocks_are_evicted(self, start: StartEngine) -> None:
        """Removed only what was stored; a cached block's parent is cached too."""
        driver = await start(num_blocks=8, max_model_len=96)
        if Capability.PREFIX_CACHING not in driver.engine.info.capabilities:
            pytest.skip("not promised")
        parents: dict[int, int] = {}
        for i in range(6):
            shared = prompt_of(100 + i % 2, 32)
            prompt = shared + prompt_of(i, 20)
            (tokens,) = await driver.run(request_of(f"r{i}", prompt, 6))
            chain = block_hashes(prompt + tokens, BLOCK_SIZE, 0)
            parents.update(zip(chain, [0, *chain], strict=False))
        cached = driver.cached()
        assert cached
        assert len(parents) > 8, "nothing had to be evicted"
        assert all(parents[h] == 0 or parents[h] in cached for h in cached)

    async def test_a_known_prefix_is_reused_and_reported(self, start: StartEngine) -> None:
        """Prefix-aware routing depends on it; the last token is always computed."""
        driver = await start()
        if Capability.PREFIX_CACHING not in driver.engine.info.capabilities:
            pytest.skip("not promised")
        prompt = prompt_of(9, 64)
        first, again, longer = [
            (await driver.run(request_of(name, tokens, 4)))[0]
            for name, tokens in {"first": prompt, "again": prompt, "longer": prompt + prompt_of(10, 5)}.items()
        ]
        assert first == again
        assert len(longer) == 4
        assert driver.starts["first"].num_cached_tokens == 0
        assert driver.starts["again"].num_cached_tokens in (48, 63)
        assert driver.starts["longer"].num_cached_tokens == 64

    async def test_prefixes_are_apart_for_other_roots(self, start: StartEngine) -> None:
        """One tenant must not probe another's cache."""
        driver = await start()
        prompt = prompt_of(9, 64)
        await driver.run(request_of("mine", prompt, 2, root_hash=1))
        await driver.run(request_of("yours", prompt, 2, root_hash=2))
        assert driver.starts["yours"].num_cached_tokens == 0

    async def test_discarded_blocks_never_enter_the_cache(self, start: StartEngine) -> None:
        """A router that scores a caller's answer may use the caller's cached blocks, and must not add to them."""
        driver = await start()
        if not {Capability.PROMPT_LOGPROBS, Capability.PREFIX_CACHING} <= driver.engine.info.capabilities:
            pytest.skip("not promised")
        prompt = prompt_of(9, 64)
        await driver.run(request_of("keeps", prompt[:40], 2))
        cached = driver.cached()
        (tokens,) = await driver.run(request_of("discards", prompt, 30, discards_blocks=True))
        assert driver.starts["discards"].num_cached_tokens == 32
        assert driver.cached() == cached
        assert driver.load.num_available_blocks == driver.engine.info.num_blocks
        (again,) = await driver.run(request_of("keeps all", prompt, 30))
        assert driver.starts["keeps all"].num_cached_tokens == 32
        assert len(driver.cached()) > len(cached)
        if Capability.BATCH_INVARIANT in driver.engine.info.capabilities:
            assert tokens == again
