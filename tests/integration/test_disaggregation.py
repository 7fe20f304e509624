"""Shards with roles behind a real router, with the simulated engine and with TensorRT-LLM's adapter over its fake."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from kvloom.v1.generation_pb2 import FINISH_REASON_LENGTH, SamplingParams, SequenceFinish
from kvloom_common.config import ShardConfig, SimConfig
from kvloom_common.process.service import StartError
from kvloom_common.text.tokenizer import ModelTokenizer
from shard_server.engines.base import Engine
from shard_server.engines.sim_engine import SimEngine
from tests.conformance.engine_driver import prompt_of
from tests.fakes.failover_world import MODEL, Collected, FailoverWorld, failover_world
from tests.fakes.fake_tensorrt_llm import (
    NEWEST,
    RELEASE_1_2,
    FakeTensorRtLlm,
    LibraryRelease,
    Variant,
    installed_tensorrt_llm,
)
from tests.fakes.tensorrt_llm_engine import make_tensorrt_llm_engine, options
from tests.waiting import eventually

pytest_plugins = ("tests.fakes.router_fixtures",)

PROMPT = prompt_of(1, 200)
GREEDY = SamplingParams(temperature=0.0, seed=0)
NUM_TOKENS = 40
TIMEOUT_SECONDS = 10.0


@pytest.fixture
def library() -> Iterator[FakeTensorRtLlm]:
    with installed_tensorrt_llm(Variant(step_seconds=0.003)) as fake:
        yield fake


def sim_shard(role: str) -> tuple[Engine, ShardConfig]:
    config = ShardConfig(engine="sim", role=role, sim=SimConfig(step_ms=3.0))
    return SimEngine(MODEL, config, vocab_size=49152), config


def tensorrt_llm_shard(role: str, timeout_ms: int = 300) -> tuple[Engine, ShardConfig]:
    settings = options(cache_transceiver_config={"backend": "NIXL", "kv_transfer_timeout_ms": timeout_ms})
    config = ShardConfig(engine="tensorrt_llm", role=role, tensorrt_llm=settings)
    return make_tensorrt_llm_engine(settings, role=role), config


def patient_shard(role: str) -> tuple[Engine, ShardConfig]:
    """One that keeps KV for longer than a test takes."""
    return tensorrt_llm_shard(role, timeout_ms=600_000)


async def start(world: FailoverWorld, shard: Callable[[str], tuple[Engine, ShardConfig]], *ids: str) -> None:
    """The shards p..., for prompts, and d..., for answers, and the router."""
    world.config.router.disaggregation.min_prompt_tokens = 100
    for shard_id in ids:
        await world.add_shard(shard_id, *shard("prefill" if shard_id[0] == "p" else "decode"))
    await world.start_router()
    await eventually(lambda: world.link.fleet.models and world.link.fleet.models[0].num_ready_shards == len(ids))


async def run(world: FailoverWorld) -> tuple[list[int], SequenceFinish]:
    answer = world.begin(PROMPT, NUM_TOKENS, sampling=GREEDY)
    await answer.ended()
    return answer.token_ids[0], answer.finish


def submitted(world: FailoverWorld) -> dict[str, int]:
    """How many sequences each shard's engine has been given."""
    return {shard_id: member.engine.num_submitted for shard_id, member in world.members.items()}


@pytest.mark.parametrize("shard", [sim_shard, tensorrt_llm_shard], ids=["sim", "tensorrt_llm"])
@pytest.mark.usefixtures("library")
async def test_a_split_answer_is_the_one_of_a_single_shard(
    redis_url: str, tokenizer: ModelTokenizer, shard: Callable[[str], tuple[Engine, ShardConfig]]
) -> None:
    """The client sees one answer, and pays for one prompt and for each token once, wherever it was computed."""
    async with failover_world(redis_url, tokenizer) as world:
        await start(world, shard, "p0", "d0")
        split, finish = await run(world)
        assert submitted(world) == {"p0": 1, "d0": 1}
        assert (finish.reason, finish.num_output_tokens, finish.num_cached_tokens) == (
            FINISH_REASON_LENGTH,
            NUM_TOKENS,
            0,
        )
        assert not finish.handoff
        again, finish = await run(world)
        assert (again, submitted(world)["p0"]) == (split, 1), "its prompt is cached where the answer is given"
        assert finish.num_cached_tokens > 0
        other = world.begin(PROMPT[:50], NUM_TOKENS, sampling=GREEDY)
        await other.ended()
        assert submitted(world) == {"p0": 1, "d0": 3}
        assert world.metered()["output_tokens"] == 3 * NUM_TOKENS


@pytest.mark.parametrize("release", [RELEASE_1_2, NEWEST], ids=["1.2.1", "newest"])
async def test_an_answer_with_logprobs_is_split_where_they_are_handed_over(
    redis_url: str, tokenizer: ModelTokenizer, release: LibraryRelease
) -> None:
    """Every token has its log-probability, the first one too, which the prefill shard has computed."""
    sampling = SamplingParams(temperature=0.0, seed=0, logprobs=2)
    with installed_tensorrt_llm(Variant(release=release, step_seconds=0.003)):
        async with failover_world(redis_url, tokenizer) as world:
            await start(world, tensorrt_llm_shard, "p0", "d0")
            answer = world.begin(PROMPT, NUM_TOKENS, sampling=sampling)
            (complete,) = await answer.ended()
            assert submitted(world)["p0"] == (release is NEWEST)
            assert len(complete.logprobs) == len(complete.token_ids) == NUM_TOKENS
            for token_id, (logprob, likeliest, logprobs) in zip(complete.token_ids, complete.logprobs, strict=True):
                assert (likeliest[0], logprobs[0], len(likeliest)) == (token_id, logprob, 2)


async def test_either_shard_may_fail(redis_url: str, tokenizer: ModelTokenizer, library: FakeTensorRtLlm) -> None:
    """The answer is the same to the byte, and no KV stays behind."""
    async with failover_world(redis_url, tokenizer) as world:
        await start(world, tensorrt_llm_shard, "p0", "p1", "d0", "d1")
        wanted, _ = await run(world)
        for shard_id in ("p0", "p1"):
            world.members[shard_id].engine.fails_at = lambda _: 0
        prompt = [*PROMPT[::-1]]
        alone = world.begin(prompt, NUM_TOKENS, sampling=GREEDY)
        await alone.ended()
        assert len(alone.token_ids[0]) == NUM_TOKENS
        assert sum(member.engine.num_failed for member in world.members.values()) == 2
        answer = world.begin(PROMPT, NUM_TOKENS, sampling=GREEDY)
        await answer.has_tokens(5)
        assert answer.starts[0] is not None
        world.members[answer.starts[0].shard_id].proxy.reset()
        await answer.ended()
        assert answer.token_ids[0] == wanted
        for llm in library.llms:
            assert await asyncio.to_thread(llm.executor.wait_until_released, TIMEOUT_SECONDS)


async def test_a_cancelled_answer_leaves_no_kv(
    redis_url: str, tokenizer: ModelTokenizer, library: FakeTensorRtLlm
) -> None:
    """The KV is fetched all the same, and its shard frees it at once instead of after the timeout."""
    async with failover_world(redis_url, tokenizer) as world:
        await start(world, patient_shard, "p0", "d0")
        library.llms[1].executor.hangs = True
        answer = Collected(1)
        slot = world.submit(PROMPT, NUM_TOKENS, answer, sampling=GREEDY)
        await eventually(lambda: submitted(world)["d0"])
        assert library.llms[0].num_held_blocks
        world.link.cancel(slot)
        await eventually(lambda: world.members["d0"].engine.num_cancelled)
        library.llms[1].executor.hangs = False
        assert await asyncio.to_thread(library.llms[0].executor.wait_until_released, TIMEOUT_SECONDS)
        assert not library.llms[0].cache.num_used
        assert not answer.token_ids[0]


async def test_kv_of_a_leg_that_was_cancelled_too_late_is_collected(
    redis_url: str, tokenizer: ModelTokenizer, library: FakeTensorRtLlm
) -> None:
    """A cancel frees no complete KV in TensorRT-LLM: another shard has to fetch it."""
    async with failover_world(redis_url, tokenizer) as world:
        await start(world, patient_shard, "p0", "d0")
        prefill = library.llms[0].executor
        prefill.hangs = True
        prefill.ignores_aborts = True  # as if it had been complete
        answer = Collected(1)
        slot = world.submit(PROMPT, NUM_TOKENS, answer, sampling=GREEDY)
        await eventually(lambda: submitted(world)["p0"])
        world.link.cancel(slot)
        await eventually(lambda: world.members["p0"].engine.num_cancelled)
        prefill.hangs = False
        await eventually(lambda: submitted(world)["d0"])
        assert await asyncio.to_thread(prefill.wait_until_released, TIMEOUT_SECONDS)
        await eventually(lambda: all(not llm.cache.num_used for llm in library.llms))
        assert not world.metered()["output_tokens"]


async def test_kv_whose_decode_shard_is_lost_is_freed_after_the_timeout(
    redis_url: str, tokenizer: ModelTokenizer, library: FakeTensorRtLlm
) -> None:
    """Whether the lost shard has fetched it is not known, and a second fetch could block the engine that has it."""
    async with failover_world(redis_url, tokenizer) as world:
        await start(world, tensorrt_llm_shard, "p0", "d0", "d1")
        for llm in library.llms[1:]:
            llm.executor.hangs = True
        answer = world.begin(PROMPT, NUM_TOKENS, sampling=GREEDY)
        await eventually(lambda: submitted(world)["d0"] + submitted(world)["d1"])
        lost = "d0" if submitted(world)["d0"] else "d1"
        world.members[lost].proxy.reset()
        other = library.llms[2 if lost == "d0" else 1]
        other.executor.hangs = False
        await answer.ended()
        assert len(answer.token_ids[0]) == NUM_TOKENS
        assert not any(fields["is_fetched"] for _, _, fields in other.submitted)
        assert await asyncio.to_thread(library.llms[0].executor.wait_until_released, TIMEOUT_SECONDS)


async def test_a_role_needs_an_engine_that_hands_over(redis_url: str, tokenizer: ModelTokenizer) -> None:
    """Routers would send it hand-offs that it cannot use."""
    with installed_tensorrt_llm():
        config = ShardConfig(engine="tensorrt_llm", role="decode")
        async with failover_world(redis_url, tokenizer) as world:
            with pytest.raises(StartError, match=r"shard\.role: the engine tensorrt_llm hands no KV over"):
                await world.add_shard("d0", make_tensorrt_llm_engine(), config)
