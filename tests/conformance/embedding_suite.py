"""What every engine with Capability.EMBED must do; part of the suite of engine_suite.py."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import pytest

from kvloom_common.text.block_hash import root_hash
from shard_server.engines.base import (
    Capability,
    EngineError,
    EngineRequest,
    Pooling,
    PoolingKind,
    Sampling,
    SequenceFinishReason,
)
from tests.conformance.engine_driver import EngineDriver, prompt_of, request_of
from tests.conformance.started_engines import StartedEngines, StartEngine


def embedding_of(request_id: str, prompt: Sequence[int], pooling: Pooling | None = None) -> EngineRequest:
    """A request for an embedding."""
    root = root_hash("model")
    return EngineRequest(request_id, prompt, Sampling(), 0, pooling=pooling or Pooling(), root_hash=root)


class EmbeddingSuite(StartedEngines):
    """Engines without the capability skip these tests."""

    @pytest.mark.parametrize("name", ["model", "org/other:v2"])
    async def test_an_engine_goes_by_the_name_of_its_model(self, start: StartEngine, name: str) -> None:
        """Engines of several models run in one fabric: the name is in the hello to routers and in the block hashes."""
        self.model_name = name
        assert (await start()).engine.info.model == name

    @pytest.fixture
    async def start_embedding(self, start: StartEngine) -> StartEngine:
        """Starts engines that give embeddings."""

        async def start_embedding(**shard_fields: int) -> EngineDriver:
            driver = await start(**shard_fields)
            if Capability.EMBED not in driver.engine.info.capabilities:
                pytest.skip("this engine gives no embeddings")
            return driver

        return start_embedding

    async def test_an_embedding_starts_and_ends_without_tokens(self, start_embedding: StartEngine) -> None:
        """Its vector has the announced size and the length 1, and its blocks are free."""
        driver = await start_embedding()
        (vector,) = await embed(driver, embedding_of("a", prompt_of(1, 20)))
        assert len(vector) == driver.engine.info.embedding_size > 0
        assert math.isclose(math.fsum(value * value for value in vector), 1.0, rel_tol=1e-5)
        assert driver.ends == {"a": SequenceFinishReason.STOP}
        assert driver.starts["a"].queue_time_seconds >= 0
        assert driver.load.num_available_blocks == driver.engine.info.num_blocks
        assert driver.load.num_running == driver.load.num_queued_prefill_tokens == 0

    async def test_embeddings_do_not_depend_on_the_batch(self, start_embedding: StartEngine) -> None:
        """A text must have the same vector tomorrow, whatever else is embedded then."""
        driver = await start_embedding()
        prompts = [prompt_of(number, 5 + 23 * number) for number in range(1, 5)]
        alone = [
            (await embed(driver, embedding_of(f"alone {number}", prompt)))[0] for number, prompt in enumerate(prompts)
        ]
        together = await embed(
            driver, *(embedding_of(f"together {number}", prompt) for number, prompt in enumerate(prompts))
        )
        if Capability.BATCH_INVARIANT in driver.engine.info.capabilities:
            assert together == alone
        for left, right in zip(alone, together, strict=True):
            assert math.fsum(map(float.__mul__, left, right)) > 0.9999
        assert len({tuple(vector) for vector in alone}) == len(prompts)

    @pytest.mark.parametrize("kind", list(PoolingKind))
    async def test_every_kind_of_pooling(self, start_embedding: StartEngine, kind: PoolingKind) -> None:
        """Without normalisation a vector has the direction of the normalised one."""
        driver = await start_embedding()
        unit, raw = await embed(
            driver,
            embedding_of("unit", prompt_of(7, 30), Pooling(kind)),
            embedding_of("raw", prompt_of(7, 30), Pooling(kind, normalize=False)),
        )
        length = math.sqrt(math.fsum(value * value for value in raw))
        assert unit == pytest.approx([value / length for value in raw], abs=1e-6)

    async def test_the_whole_window_can_be_embedded(self, start_embedding: StartEngine) -> None:
        """There is no token to leave room for."""
        driver = await start_embedding(max_model_len=64, num_blocks=4)
        (vector,) = await embed(driver, embedding_of("a", prompt_of(1, 64)))
        assert vector
        with pytest.raises(EngineError):
            driver.engine.submit(embedding_of("b", prompt_of(1, 65)))

    async def test_more_embeddings_than_a_batch_end_all(self, start_embedding: StartEngine) -> None:
        """They wait for one another."""
        driver = await start_embedding(max_batch=2)
        vectors = await embed(driver, *(embedding_of(f"{number}", prompt_of(number, 12)) for number in range(7)))
        assert len({tuple(vector) for vector in vectors}) == 7

    async def test_a_cancelled_embedding_ends(self, start_embedding: StartEngine) -> None:
        """Whether it was already complete or not."""
        driver = await start_embedding()
        driver.engine.submit(embedding_of("a", prompt_of(3, 40)))
        driver.engine.cancel("a")
        await driver.step_until(lambda: "a" in driver.ends)
        assert driver.ends["a"] in (SequenceFinishReason.CANCELLED, SequenceFinishReason.STOP)
        assert driver.load.num_available_blocks == driver.engine.info.num_blocks

    async def test_text_is_generated_beside_embeddings(self, start_embedding: StartEngine) -> None:
        """Decodes go on in every step of a long prompt that is embedded, with the tokens that they have anyhow."""
        driver = await start_embedding(max_prefill_tokens_per_step=32)
        engine = driver.engine
        if Capability.GENERATE not in engine.info.capabilities:
            pytest.skip("this engine generates no text")
        (alone,) = await driver.run(request_of("alone", prompt_of(1, 10), 24))
        engine.submit(request_of("beside", prompt_of(1, 10), 24))
        await driver.step_until(lambda: "beside" in driver.tokens)
        num_before = len(driver.tokens["beside"])
        engine.submit(embedding_of("long", prompt_of(9, 200)))
        await driver.step_until(lambda: "long" in driver.ends or "beside" in driver.ends)
        assert len(driver.tokens["beside"]) - num_before >= 200 // 32
        await driver.step_until(lambda: {"long", "beside"} <= driver.ends.keys())
        assert driver.tokens["beside"] == alone


async def embed(driver: EngineDriver, *requests: EngineRequest) -> list[list[float]]:
    """Submit all, read until all have ended; returns their vectors."""
    for request in requests:
        driver.engine.submit(request)
    await driver.step_until(lambda: all(request.request_id in driver.ends for request in requests))
    packed = [driver.embeddings[request.request_id] for request in requests]
    return [list(struct.unpack(f"<{len(vector) // 4}f", vector)) for vector in packed]
