"""What the library's source showed and no fake had: each row of the table "corrected against the source" of
docs/reference/tensorrt-llm-features.md. The fake misbehaves as the library does, from its own table."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shard_server.engines.base import AdapterError, Capability, EngineError, Sampling, SequenceFinishReason
from shard_server.engines.tensorrt_llm.api import NO_USAGE_REPORTS
from shard_server.engines.tensorrt_llm.health import WatchSettings
from tests.conformance.engine_driver import EngineDriver, prompt_of, request_of
from tests.fakes.fake_tensorrt_llm import NEWEST, RELEASE_1_2, LibraryRelease, RequestError, Variant
from tests.fakes.tensorrt_llm_engine import LORA, VOCAB_SIZE, options, running_tensorrt_llm, write_adapter, write_model

BOTH = pytest.mark.parametrize("release", [RELEASE_1_2, NEWEST], ids=["1.2.1", "newest"])
SOON_SECONDS = 5.0
TRANSCEIVER = {"backend": "NIXL"}
EAGLE = {"decoding_type": "Eagle3", "max_draft_len": 2, "speculative_model": "draft"}


async def end_of(driver: EngineDriver, name: str) -> SequenceFinishReason:
    await driver.step_until(lambda: name in driver.ends)
    return driver.ends[name]


# -- 1: prompts for other shards --------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["prefill", "both"])
@BOTH
async def test_the_first_prompt_for_another_shard_ends_no_engine(release: LibraryRelease, role: str):
    """1.2.1's worker ends of one while the overlap scheduler is on."""
    config = options(cache_transceiver_config=TRANSCEIVER)
    async with running_tensorrt_llm(Variant(release=release), config, role=role) as (driver, _):
        await driver.run(request_of("leg", prompt_of(1, 40), 1, prefill_only=True))
        assert driver.ends["leg"] is SequenceFinishReason.LENGTH
        assert driver.handoffs["leg"]
        await driver.run(request_of("next", prompt_of(2, 10), 3))


async def test_a_shard_without_that_role_refuses_them():
    """A router that does not know better must not end it either."""
    async with running_tensorrt_llm(config=options(cache_transceiver_config=TRANSCEIVER)) as (driver, _):
        with pytest.raises(EngineError, match=r"shard\.role"):
            driver.engine.submit(request_of("leg", prompt_of(1, 40), 1, prefill_only=True))
        await driver.run(request_of("next", prompt_of(2, 10), 3))


# -- 2: log-probabilities beside speculation --------------------------------------------------------------------------


@pytest.mark.parametrize("decoding_type", ["Eagle3", "MTP"])
@BOTH
async def test_log_probabilities_are_refused_where_the_sampler_has_none(release: LibraryRelease, decoding_type: str):
    """In 1.2.1 one such request would fail all that run."""
    config = options(speculative_config=EAGLE | {"decoding_type": decoding_type})
    async with running_tensorrt_llm(Variant(release=release), config) as (driver, _):
        assert Capability.LOGPROBS not in driver.engine.info.capabilities
        driver.engine.submit(request_of("running", prompt_of(1, 10), 30))
        await driver.step_until(lambda: "running" in driver.tokens)
        with pytest.raises(EngineError, match="no logprobs"):
            driver.engine.submit(request_of("a", prompt_of(2, 10), 5, sampling=Sampling(num_logprobs=2)))
        assert await end_of(driver, "running") is SequenceFinishReason.LENGTH


@BOTH
async def test_log_probabilities_are_had_beside_ngrams(release: LibraryRelease):
    """Their drafts are verified by the ordinary sampler."""
    config = options(speculative_config={"decoding_type": "NGram", "max_draft_len": 2})
    async with running_tensorrt_llm(Variant(release=release), config) as (driver, _):
        await driver.run(request_of("a", prompt_of(1, 10), 5, sampling=Sampling(num_logprobs=2)))
        assert len(driver.logprobs["a"]) == 5


# -- 3: exceptions that belong to one request -------------------------------------------------------------------------


@pytest.mark.parametrize("error", [AssertionError(), ValueError("Unknown finish reason: 9")])
async def test_an_assertion_about_one_request_fails_that_one(error: Exception):
    """The library makes it in the reader of that request. Routers would retry it on shard after shard."""
    async with running_tensorrt_llm() as (driver, fake):
        fake.llm.executor.fail_next = (2, error)
        driver.engine.submit(request_of("bad", prompt_of(1, 10), 20))
        driver.engine.submit(request_of("good", prompt_of(2, 10), 30))
        assert await end_of(driver, "bad") is SequenceFinishReason.ERROR
        assert await end_of(driver, "good") is SequenceFinishReason.LENGTH
        assert not any(output.misused for output in fake.llm.outputs)
        await driver.run(request_of("next", prompt_of(3, 10), 3))


async def fail_in_a_row(driver: EngineDriver, fake: Any, seeds: list[int]) -> None:
    for number, seed in enumerate(seeds):
        fake.llm.executor.fail_next = (0, AssertionError())
        driver.engine.submit(request_of(f"r{number}", prompt_of(seed, 10), 5))
        assert await end_of(driver, f"r{number}") is SequenceFinishReason.ERROR


async def test_one_request_that_is_sent_again_and_again_ends_no_engine():
    """A client may do so, and a router does."""
    async with running_tensorrt_llm(config=WatchSettings(max_failed_requests=3)) as (driver, fake):
        await fail_in_a_row(driver, fake, [1] * 4)
        await driver.run(request_of("next", prompt_of(2, 10), 3))


async def test_many_different_requests_that_fail_before_any_succeeds_are_the_engines_fault():
    """Here the probe, which would have found out, is still on its way."""
    config = WatchSettings(max_failed_requests=3)
    async with running_tensorrt_llm(config=config) as (driver, fake):
        for number in range(3):
            fake.llm.executor.fail_next = (0, AssertionError())
            driver.engine.submit(request_of(f"r{number}", prompt_of(number, 10), 5))
        with pytest.raises(EngineError, match="many different requests"):
            async with asyncio.timeout(SOON_SECONDS):
                await driver.step_until(lambda: False)


# -- 4: adapters that cannot be loaded --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 65}, "rank is 65"),
        ({"modules": ["k_proj"]}, "lora_target_modules lacks attn_k"),
        ({"layer": 7}, r"layers\.7\.self_attn\.q_proj, which this model does not have"),
        ({"hidden_size": 16}, r"has the shape \(4, 16\); this model and the rank imply \(4, 8\)"),
        ({"r": 2}, "has the shape"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"tensors": {"lm_head.weight": np.zeros((2, 2), np.float32)}}, "no matrix of a LoRA adapter"),
        (
            {"tensors": {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": np.zeros((4, 8), np.int8)}},
            "type I8",
        ),
        (
            {"tensors": {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": np.zeros((4, 8), "f4")}},
            "lacks one of its two matrices",
        ),
    ],
)
async def test_an_adapter_that_does_not_fit_the_model_is_refused(changes: dict[str, Any], message: str, tmp_path: Path):
    """The library loads it inside the executor, which ends."""
    model, path = write_model(tmp_path / "model"), write_adapter(tmp_path / "adapter", **changes)
    async with running_tensorrt_llm(config=options(lora_config=LORA), model_dir=model) as (driver, _):
        with pytest.raises(AdapterError, match=message):
            await driver.engine.adapters.add("bad", str(path))
        await driver.engine.adapters.add("good", str(write_adapter(tmp_path / "good")))
        await driver.run(request_of("a", prompt_of(1, 10), 3, adapter="good"))


@pytest.mark.parametrize("damage", [b"junk", None])
async def test_a_damaged_adapter_is_refused(damage: bytes | None, tmp_path: Path):
    """A download that was cut off is one."""
    file = write_adapter(tmp_path / "adapter") / "adapter_model.safetensors"
    file.unlink() if damage is None else file.write_bytes(damage)
    async with running_tensorrt_llm(config=options(lora_config=LORA)) as (driver, _):
        with pytest.raises(AdapterError, match=r"adapter_model\.safetensors"):
            await driver.engine.adapters.add("bad", str(file.parent))


async def test_an_adapter_that_fails_to_load_is_refused_from_then_on(tmp_path: Path):
    """Whatever no check of its files has seen is found by one token on one shard, which may end with it."""
    path = write_adapter(tmp_path / "adapter")
    async with running_tensorrt_llm(config=options(lora_config=LORA)) as (driver, fake):
        adapters = driver.engine.adapters
        fake.llm.executor.fail_next = (0, RequestError("LoRA task not found"))
        with pytest.raises(AdapterError, match="LoRA task not found"):
            await adapters.add("poison", str(path), load_now=True)
        assert adapters.find("poison") is None
        with pytest.raises(AdapterError, match="it was tried before"):
            await adapters.add("another-name", str(path))
        state = await adapters.add("good", str(write_adapter(tmp_path / "good", alpha=2)), load_now=True)
        assert state.is_loaded
    config = WatchSettings(options={"lora_config": LORA}, cancel_timeout_seconds=0.1)
    async with running_tensorrt_llm(config=config) as (driver, _):
        worse = write_adapter(tmp_path / "worse", alpha=3)
        (worse / "poison").touch()
        with pytest.raises(AdapterError, match="illegal memory access"):
            await driver.engine.adapters.add("worse", str(worse), load_now=True)
        with pytest.raises(EngineError):
            await driver.step_until(lambda: False)


async def test_an_adapter_counts_as_loaded_with_its_first_token(tmp_path: Path):
    """Before, it may be what ends the engine: routers must not take it for proven."""
    path = write_adapter(tmp_path / "adapter")
    async with running_tensorrt_llm(config=options(lora_config=LORA)) as (driver, _):
        state = await driver.engine.adapters.add("legal", str(path))
        assert not state.is_loaded
        driver.engine.submit(request_of("a", prompt_of(1, 10), 3, adapter="legal"))
        assert not driver.engine.adapters.state().adapters[0].is_loaded
        await driver.step_until(lambda: "a" in driver.starts)
        assert driver.engine.adapters.state().adapters[0].is_loaded


# -- 5: the width of a bias -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("vocab_size", "num_gpus"), [(VOCAB_SIZE + 271, 1), (VOCAB_SIZE + 271, 4)])
@BOTH
async def test_a_bias_is_as_wide_as_the_logits(release: LibraryRelease, vocab_size: int, num_gpus: int, tmp_path: Path):
    """That of the tokenizer's vocabulary would fail the whole batch where the model's is padded, as Qwen2.5's."""
    pytest.importorskip("torch")  # a bias is one of its tensors
    model = write_model(tmp_path / "model", vocab_size=vocab_size)
    config = options(tensor_parallel_size=num_gpus)
    async with running_tensorrt_llm(Variant(release=release), config, model_dir=model) as (driver, _):
        sampling = Sampling(logit_bias=((777, 100.0),))
        (tokens,) = await driver.run(request_of("a", prompt_of(1, 10), 3, sampling=sampling))
        assert tokens == [777] * 3


# -- 6: cancels that get no answer ------------------------------------------------------------------------------------


async def test_a_cancelled_request_that_waits_ends_at_once():
    """The library drops it without a response; it would count as load until the timeout."""
    async with running_tensorrt_llm(max_batch=1) as (driver, fake):
        driver.engine.submit(request_of("running", prompt_of(1, 10), 3000))
        await driver.step_until(lambda: "running" in driver.tokens)
        driver.engine.submit(request_of("waiting", prompt_of(2, 10), 5))
        driver.engine.cancel("waiting")
        async with asyncio.timeout(SOON_SECONDS):
            assert await end_of(driver, "waiting") is SequenceFinishReason.CANCELLED
        assert driver.load.num_waiting == 0
        assert fake.llm.outputs[-1].aborted()


async def test_a_cancelled_request_that_waits_for_blocks_ends_at_once():
    """By the size of the batch it should run, so the adapter cannot know that it waits."""
    async with running_tensorrt_llm(num_blocks=16, block_size=16) as (driver, _):
        driver.engine.submit(request_of("running", prompt_of(1, 10), 200))
        await driver.step_until(lambda: "running" in driver.tokens)
        driver.engine.submit(request_of("waiting", prompt_of(2, 10), 200))
        driver.engine.cancel("waiting")
        async with asyncio.timeout(SOON_SECONDS):
            assert await end_of(driver, "waiting") is SequenceFinishReason.CANCELLED


# -- 8: stop tokens of those that ignore the end ----------------------------------------------------------------------


@BOTH
async def test_the_library_itself_ends_at_a_stop_token_of_those_that_ignore_the_end(release: LibraryRelease):
    """With `ignore_eos` the newest drops them, and the adapter would have to abort what it generates beyond."""
    async with running_tensorrt_llm(Variant(release=release)) as (driver, fake):
        (tokens,) = await driver.run(request_of("a", prompt_of(1, 10), 20))
        stops = frozenset({tokens[5]})
        (stopped,) = await driver.run(request_of("b", prompt_of(1, 10), 20, stop_token_ids=stops))
        assert stopped == tokens[: tokens.index(tokens[5]) + 1]
        assert not fake.llm.outputs[-1].aborted()


# -- 12: reports of usage ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wish", "is_reported"), [(None, False), ("0", True)])
async def test_no_usage_is_reported_unless_the_operator_wants_it(
    wish: str | None, is_reported: bool, monkeypatch: pytest.MonkeyPatch
):
    """The newest library sends its configuration to NVIDIA from the constructor on."""
    monkeypatch.delenv(NO_USAGE_REPORTS, raising=False)
    if wish is not None:
        monkeypatch.setenv(NO_USAGE_REPORTS, wish)
    async with running_tensorrt_llm(Variant(release=NEWEST)) as (_, fake):
        assert fake.llm.reported_usage is is_reported
