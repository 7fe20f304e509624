"""The adapter when TensorRT-LLM misbehaves: dies, hangs, loses things, or ignores requests."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from kvloom_common.config import TensorRtLlmConfig
from kvloom_common.text.block_hash import block_hashes
from shard_server.engines.base import AllBlocksCleared, Capability, EngineError, Sampling, SequenceFinishReason
from shard_server.engines.tensorrt_llm import daemon_thread
from shard_server.engines.tensorrt_llm.engine import PROBE_SALT
from shard_server.engines.tensorrt_llm.health import WatchSettings
from tests.conformance.engine_driver import EngineDriver, prompt_of, request_of
from tests.fakes.fake_tensorrt_llm import (
    IN_1_2,
    IN_NEWEST,
    NEWEST,
    RELEASE_1_2,
    LibraryRelease,
    RequestError,
    Variant,
    installed_tensorrt_llm,
)
from tests.fakes.tensorrt_llm_engine import EOS, make_tensorrt_llm_engine, options, running_tensorrt_llm

TIMEOUT_SECONDS = 10.0


async def end_of(driver: EngineDriver, request_id: str) -> tuple[SequenceFinishReason, str]:
    while True:
        output = await driver.step()
        for end in output.ends:
            if end.request_id == request_id:
                return end.reason, end.error


async def test_a_requests_own_failure_is_its_own():
    """Other requests continue, and the engine lives."""
    async with running_tensorrt_llm() as (driver, fake):
        fake.llm.executor.fail_next = (3, RequestError("too long for the draft model"))
        driver.engine.submit(request_of("bad", prompt_of(1, 10), 20))
        driver.engine.submit(request_of("good", prompt_of(2, 10), 20))
        assert await end_of(driver, "bad") == (SequenceFinishReason.ERROR, "too long for the draft model")
        await driver.step_until(lambda: "good" in driver.ends)
        assert driver.ends["good"] is SequenceFinishReason.LENGTH
        assert len(driver.tokens["bad"]) == 3


@pytest.mark.parametrize("notices_death", [True, False])
async def test_an_engine_whose_worker_has_ended_is_dead(notices_death: bool):
    """Its health says so, or a probe that gets no token. A stream that has raised is never asked again: that hangs in
    the library."""
    config = WatchSettings(probe_timeout_seconds=0.2)
    async with running_tensorrt_llm(Variant(notices_death=notices_death), config) as (driver, fake):
        driver.engine.submit(request_of("a", prompt_of(1, 10), 2000))
        driver.engine.submit(request_of("b", prompt_of(2, 10), 2000))
        await driver.step_until(lambda: len(driver.tokens) == 2)
        fake.llm.die(RuntimeError("CUDA error: an illegal memory access was encountered"))
        with pytest.raises(EngineError, match="illegal memory access"):
            await driver.step_until(lambda: False)
        with pytest.raises(EngineError):
            driver.engine.submit(request_of("c", prompt_of(2, 10), 5))
        assert not any(output.misused for output in fake.llm.outputs)


async def test_an_engine_that_hangs_with_work_is_dead():
    """The library's own health check would still report that it is healthy."""
    config = WatchSettings(stall_timeout_seconds=0.2)
    async with running_tensorrt_llm(config=config) as (driver, fake):
        driver.engine.submit(request_of("a", prompt_of(1, 10), 2000))
        await driver.step_until(lambda: "a" in driver.tokens)
        fake.llm.executor.hangs = True
        with pytest.raises(EngineError, match="no progress"):
            await driver.step_until(lambda: False)


@pytest.mark.parametrize("variant", [IN_1_2, IN_NEWEST], ids=["1.2.1", "newest"])
async def test_an_engine_that_fails_every_request_is_dead(variant: Variant):
    """It accepts the next ones, and each of them would restart the clock of an idle engine's probe."""
    config = WatchSettings(max_failed_requests=3, cancel_timeout_seconds=0.1)
    async with running_tensorrt_llm(variant, config) as (driver, fake):
        fake.llm.executor.fails_all = RequestError("CUDA error: an illegal memory access was encountered")

        async def send_without_end() -> None:
            for number in itertools.count():
                driver.engine.submit(request_of(f"r{number}", prompt_of(number, 10), 5))
                await driver.step_until(lambda number=number: f"r{number}" in driver.ends)

        with pytest.raises(EngineError, match=r"failed a one-token request|health check|no longer running"):
            async with asyncio.timeout(TIMEOUT_SECONDS):
                await send_without_end()


async def test_a_clients_bad_requests_do_not_end_an_engine_that_works():
    """Otherwise one client could stop a shard after another."""
    config = WatchSettings(max_failed_requests=2, cancel_timeout_seconds=0.05)
    async with running_tensorrt_llm(config=config) as (driver, fake):
        for number in range(3):
            fake.llm.executor.fail_next = (0, RequestError("no such adapter"))
            driver.engine.submit(request_of(f"bad{number}", prompt_of(1, 10), 5))
            await driver.step_until(lambda number=number: f"bad{number}" in driver.ends)
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while fake.llm.submitted[-1][2]["cache_salt"] != PROBE_SALT:
                fake.llm.submit_called.clear()
                await fake.llm.submit_called.wait()
        (tokens,) = await driver.run(request_of("good", prompt_of(1, 10), 5))
        assert len(tokens) == 5


async def test_the_librarys_own_health_check_is_asked():
    """Newer versions know of failures that none of our requests has met."""
    config = WatchSettings(cancel_timeout_seconds=0.1)
    async with running_tensorrt_llm(IN_NEWEST, config) as (driver, fake):
        fake.llm.executor.num_failed = 9
        with pytest.raises(EngineError, match="own health check"):
            await driver.step_until(lambda: False)


async def test_an_idle_engine_that_has_crashed_is_found_by_the_probe():
    """Before the next client is."""
    config = WatchSettings(probe_interval_seconds=0.1, probe_timeout_seconds=0.2)
    async with running_tensorrt_llm(config=config) as (driver, fake):
        await driver.run(request_of("a", prompt_of(1, 10), 3))
        fake.llm.executor.hangs = True
        with pytest.raises(EngineError, match=r"no token within 0\.2 s"):
            await driver.step_until(lambda: False)
        assert fake.llm.outputs[-1].aborted()


async def test_probes_of_a_healthy_engine_are_not_seen():
    """They are no one's sequences."""
    config = WatchSettings(probe_interval_seconds=0.02)
    async with running_tensorrt_llm(config=config) as (driver, fake):
        async with asyncio.timeout(TIMEOUT_SECONDS):
            for _ in range(3):
                fake.llm.submit_called.clear()
                await fake.llm.submit_called.wait()
        (tokens,) = await driver.run(request_of("a", prompt_of(1, 10), 3))
        assert len(tokens) == 3
        assert driver.starts.keys() == {"a"}
        assert driver.load.num_submitted == 1


async def test_an_abort_that_is_not_obeyed_is_cut_off():
    """The client must get its end, and the slot must become free."""
    config = WatchSettings(cancel_timeout_seconds=0.1)
    async with running_tensorrt_llm(config=config) as (driver, fake):
        driver.engine.submit(request_of("a", prompt_of(1, 10), 4000))
        await driver.step_until(lambda: "a" in driver.tokens)
        fake.llm.executor.ignores_aborts = True
        driver.engine.cancel("a")
        assert await end_of(driver, "a") == (SequenceFinishReason.CANCELLED, "")


async def test_an_abort_that_raises_is_survived():
    """It reaches through a weak reference."""
    config = WatchSettings(cancel_timeout_seconds=0.1)
    async with running_tensorrt_llm(config=config) as (driver, fake):
        driver.engine.submit(request_of("a", prompt_of(1, 10), 4000))
        await driver.step_until(lambda: "a" in driver.tokens)
        fake.llm.drop_executor()
        driver.engine.cancel("a")
        assert (await end_of(driver, "a"))[0] is SequenceFinishReason.CANCELLED


async def test_a_reader_that_stalls_does_not_keep_the_gpu_busy():
    """Its sequences are aborted, not waited for."""
    config = WatchSettings(unread_timeout_seconds=0.1)
    async with running_tensorrt_llm(config=config) as (driver, fake):
        driver.engine.submit(request_of("a", prompt_of(1, 10), 4000))
        await driver.step_until(lambda: "a" in driver.tokens)
        async with asyncio.timeout(TIMEOUT_SECONDS):
            await fake.llm.outputs[-1].abort_called.wait()
        reason, error = await end_of(driver, "a")
        assert reason is SequenceFinishReason.ERROR
        assert "not read" in error


async def test_several_tokens_a_step_are_delivered_whole_and_cut_at_the_stop_token():
    """Speculation; behind a stop token nothing is output."""
    async with running_tensorrt_llm(Variant(tokens_per_step=5)) as (driver, _):
        (tokens,) = await driver.run(request_of("a", prompt_of(1, 10), 23))
        assert len(tokens) == 23
        stop = tokens[11]
        (stopped,) = await driver.run(request_of("b", prompt_of(1, 10), 23, stop_token_ids=frozenset({stop})))
        assert stopped == tokens[: tokens.index(stop) + 1]
        assert driver.ends["b"] is SequenceFinishReason.STOP


async def test_a_resumed_sequence_goes_on_from_the_delivered_tokens():
    """They become prompt, and max_tokens shrinks; that it continues identically is not promised."""
    async with running_tensorrt_llm() as (driver, fake):
        prompt, emitted = prompt_of(1, 10), prompt_of(2, 4)
        (rest,) = await driver.run(request_of("a", prompt, 9, output_token_ids=emitted))
        assert len(rest) == 5
        token_ids, params, _ = fake.llm.submitted[-1]
        assert token_ids == prompt + emitted
        assert params.max_tokens == 5
        assert Capability.SEEDED_RESUME not in driver.engine.info.capabilities
        assert Capability.BATCH_INVARIANT not in driver.engine.info.capabilities


@pytest.mark.parametrize("variant", [IN_1_2, IN_NEWEST], ids=["1.2.1", "newest"])
async def test_the_end_token_is_the_last_of_the_output(variant: Variant):
    """The library appends it before it looks for a stop; without it a router could not tell which token ended."""
    pytest.importorskip("torch")  # a bias is one of its tensors
    end_id = min(EOS)
    sampling = Sampling(logit_bias=((end_id, 100.0),))
    async with running_tensorrt_llm(variant) as (driver, fake):
        request = request_of("a", prompt_of(1, 10), 5, sampling=sampling, stop_token_ids=EOS)
        (tokens,) = await driver.run(request)
        assert tokens == [end_id]
        assert driver.ends["a"] is SequenceFinishReason.STOP
        assert fake.llm.submitted[-1][1].end_id == end_id


async def test_the_library_gets_salt_and_streaming():
    """Without a salt tenants would share their KV."""
    async with running_tensorrt_llm() as (driver, fake):
        await driver.run(request_of("a", prompt_of(1, 10), 2, root_hash=0xABC))
        _, _, arguments = fake.llm.submitted[-1]
        assert {name: arguments[name] for name in ("lora_request", "cache_salt", "streaming")} == {
            "lora_request": None,
            "cache_salt": "0000000000000abc",
            "streaming": True,
        }


async def test_a_version_without_salts_must_not_reuse_blocks():
    """Better no start than one tenant probing another's cache."""
    variant = Variant(takes_cache_salt=False)
    with pytest.raises(EngineError, match="cache_salt"):
        async with running_tensorrt_llm(variant):
            pass
    config = options(kv_cache_config={"enable_block_reuse": False})
    async with running_tensorrt_llm(variant, config) as (driver, _):
        await driver.run(request_of("a", prompt_of(1, 40), 2))
        assert Capability.PREFIX_CACHING not in driver.engine.info.capabilities
        assert not driver.kv_events


async def test_what_the_library_refuses_concerns_that_request_only():
    """Its ValueError comes out of generate_async."""
    config = options(enable_chunked_prefill=False, max_num_tokens=32)
    async with running_tensorrt_llm(config=config) as (driver, _):
        with pytest.raises(EngineError, match="max_num_tokens"):
            driver.engine.submit(request_of("a", prompt_of(1, 40), 2))
        await driver.run(request_of("b", prompt_of(1, 10), 2))


async def test_admission_is_bounded_here():
    """The library has no limit."""
    async with running_tensorrt_llm(max_batch=1, max_waiting=2) as (driver, _):
        for number in range(3):
            driver.engine.submit(request_of(f"r{number}", prompt_of(number, 10), 50))
        with pytest.raises(EngineError, match="queued"):
            driver.engine.submit(request_of("r3", prompt_of(3, 10), 50))


async def test_getters_that_raise_when_there_is_nothing():
    """Some versions do, and do not wait either."""
    async with running_tensorrt_llm(Variant(raises_queue_empty=True)) as (driver, _):
        prompt = prompt_of(1, 40)
        await driver.run(request_of("a", prompt, 30, root_hash=5))
        await _until_cached(driver, set(block_hashes(prompt, 16, 5)))


async def test_lost_events_clear_the_routers_view():
    """It costs speed; a wrong view would, for ever."""
    async with running_tensorrt_llm() as (driver, fake):
        first = prompt_of(1, 40)
        await driver.run(request_of("a", first, 30, root_hash=5))
        await _until_cached(driver, set(block_hashes(first, 16, 5)))
        fake.llm.events.next_id += 7
        second = prompt_of(2, 40)
        await driver.run(request_of("b", second, 30, root_hash=5))
        await _until_cached(driver, set(block_hashes(second, 16, 5)))
        assert AllBlocksCleared() in driver.kv_events


async def test_there_is_one_consumer_of_events():
    """A drain is destructive: two would lose most of them."""
    async with running_tensorrt_llm() as (driver, fake):
        await driver.run(request_of("a", prompt_of(1, 40), 30), request_of("b", prompt_of(2, 40), 30))
        await _until_cached(driver, set(block_hashes(prompt_of(1, 40), 16, 0)))
        assert len(fake.llm.num_pollers) == 1


async def test_without_statistics_the_configuration_must_tell_the_blocks():
    """Then the load is our own estimate."""
    variant = Variant(has_stats=False)
    with pytest.raises(EngineError, match=r"shard\.num_blocks"):
        async with running_tensorrt_llm(variant):
            pass
    async with running_tensorrt_llm(variant, num_blocks=32) as (driver, _):
        driver.engine.submit(request_of("a", prompt_of(1, 40), 30))
        await driver.step_until(lambda: "a" in driver.tokens)
        assert driver.load.num_available_blocks == 29


@pytest.mark.parametrize("has_stats", [True, False])
async def test_the_blocks_of_all_ranks_count(has_stats: bool):
    """With attention data parallelism each rank has a cache of its own, and the capacity is said for one."""
    config = options(tensor_parallel_size=2, enable_attention_dp=True)
    variant = Variant(release=NEWEST, has_stats=has_stats, tokens_per_step=3)
    async with running_tensorrt_llm(variant, config, num_blocks=40) as (driver, _):
        assert driver.engine.info.num_blocks == 80
        driver.engine.submit(request_of("a", prompt_of(1, 40), 300))
        await driver.step_until(lambda: not has_stats or driver.load.num_draft_tokens > 0)
        await driver.step_until(lambda: driver.load.num_available_blocks in range(30, 78))


async def test_statistics_that_no_longer_come_are_noticed_and_said():
    """The load would otherwise stay what it was then. Here the getter returns nothing, and then works again."""
    config = WatchSettings(stall_timeout_seconds=0.2)
    async with running_tensorrt_llm(config=config, num_blocks=600) as (driver, fake):
        for number, name in enumerate(("a", "b")):
            driver.engine.submit(request_of(name, prompt_of(number, 40), 4000))
        await driver.step_until(lambda: driver.load.num_available_blocks < 600)
        assert driver.load.lost_reports == ()
        fake.llm.loses_stats = True
        await driver.step_until(lambda: driver.load.lost_reports == ("statistics",))
        await driver.step_until(lambda: len(driver.tokens["a"]) >= 1000)  # far from what was reported last
        num_own = sum(-(-(40 + len(driver.tokens[name])) // 16) for name in ("a", "b"))
        assert abs(600 - num_own - driver.load.num_available_blocks) <= 8, "our own estimate, of a moment ago"
        fake.llm.loses_stats = False
        await driver.step_until(lambda: driver.load.lost_reports == ())


async def test_statistics_that_cannot_be_fetched_are_noticed_and_said(monkeypatch: pytest.MonkeyPatch):
    """The getter raises once the connection to the executor has failed."""
    monkeypatch.setattr(daemon_thread, "FAILURE_PAUSE_SECONDS", 0.01)
    async with running_tensorrt_llm() as (driver, fake):
        fake.llm.stats_error = RuntimeError("RPC: connection lost")
        driver.engine.submit(request_of("a", prompt_of(1, 40), 4000))
        await driver.step_until(lambda: driver.load is not None and driver.load.lost_reports == ("statistics",))


async def test_kv_events_that_no_longer_come_are_noticed_and_said():
    """The getter swallows its errors and returns nothing: routers would trust an old view of the cache for ever."""
    config = WatchSettings(stall_timeout_seconds=0.2)
    async with running_tensorrt_llm(config=config) as (driver, fake):
        first = prompt_of(1, 40)
        await driver.run(request_of("a", first, 30, root_hash=5))
        await _until_cached(driver, set(block_hashes(first, 16, 5)))
        fake.llm.loses_events = True
        async with asyncio.timeout(TIMEOUT_SECONDS):
            for number in itertools.count(2):
                await driver.run(request_of(f"r{number}", prompt_of(number, 40), 1, root_hash=5))
                if driver.load.lost_reports:
                    break
        assert driver.load.lost_reports == ("kv_events",)
        assert not driver.cached()


async def test_a_request_error_of_the_submit_itself_is_the_requests():
    """The worker in this process raises it there, and lives on."""
    async with running_tensorrt_llm() as (driver, fake):
        fake.llm.refuse_next = RequestError("no such adapter")
        with pytest.raises(EngineError, match="no such adapter"):
            driver.engine.submit(request_of("a", prompt_of(1, 10), 5))
        await driver.run(request_of("b", prompt_of(1, 10), 5))
        fake.llm.refuse_next = AttributeError("'NoneType' object has no attribute 'x'")
        with pytest.raises(EngineError, match="has no attribute"):
            driver.engine.submit(request_of("c", prompt_of(1, 10), 5))
        await driver.run(request_of("d", prompt_of(1, 10), 5))


async def test_a_failed_start_shuts_the_library_down():
    """Its worker processes hold the GPU's memory."""
    with installed_tensorrt_llm(Variant(has_stats=False)) as fake:
        engine = make_tensorrt_llm_engine()
        with pytest.raises(EngineError):
            await engine.start()
        assert fake.llm.num_shutdowns == 1
        await engine.close()
        assert fake.llm.num_shutdowns == 1


async def test_close_shuts_the_library_down_once():
    """Last, and in a thread, for it blocks."""
    async with running_tensorrt_llm() as (driver, fake):
        driver.engine.submit(request_of("a", prompt_of(1, 10), 500))
        await driver.step_until(lambda: "a" in driver.tokens)
        await driver.engine.close()
        await driver.engine.close()
        assert fake.llm.num_shutdowns == 1


async def test_logprobs_hold_the_chosen_token_also_when_it_was_unlikely():
    """The library adds it to the k likeliest; ours are exactly k."""
    async with running_tensorrt_llm() as (driver, _):
        await driver.run(request_of("a", prompt_of(1, 10), 4, sampling=Sampling(seed=1, num_logprobs=2)))
        for entry in driver.logprobs["a"]:
            assert entry.logprob == -9.0
            assert [logprob for _, logprob in entry.top] == [-0.5, -1.5]


@pytest.mark.parametrize(
    ("release", "sampler_type", "has"),
    [(RELEASE_1_2, "auto", False), (RELEASE_1_2, "TRTLLMSampler", True), (NEWEST, None, True)],
)
async def test_parameters_are_offered_where_the_sampler_applies_them(
    release: LibraryRelease, sampler_type: str | None, has: bool
):
    """In 1.2.1 the default sampler ignores penalties without a word, and applies min_p and a bias."""
    config = None if sampler_type is None else options(sampler_type=sampler_type)
    async with running_tensorrt_llm(Variant(release=release), config) as (driver, _):
        found = driver.engine.info.capabilities
        assert {Capability.MIN_P, Capability.LOGIT_BIAS} <= found
        assert ({Capability.PENALTIES, Capability.REPETITION_PENALTY} <= found) is has
        assert Capability.MIN_TOKENS not in found, "only one of the stop tokens is kept back"
        with pytest.raises(EngineError, match="min_tokens"):
            driver.engine.submit(request_of("a", prompt_of(1, 10), 5, min_tokens=2))


async def test_adapters_must_exist_at_the_start(tmp_path: Path):
    """The library would find out with the first request for it."""
    config = TensorRtLlmConfig(adapters={"legal": str(tmp_path / "none")})
    with pytest.raises(EngineError, match=r"adapters\.legal"):
        async with running_tensorrt_llm(config=config):
            pass


async def test_queue_time_is_the_time_without_a_place_in_the_batch():
    """Placement and dashboards read it."""
    async with running_tensorrt_llm(max_batch=1) as (driver, _):
        await driver.run(request_of("a", prompt_of(1, 10), 30), request_of("b", prompt_of(2, 10), 2))
        assert driver.starts["a"].queue_time_seconds == 0
        assert driver.starts["b"].queue_time_seconds > 0.01


async def _until_cached(driver: EngineDriver, wanted: set[int]) -> None:
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while not wanted <= driver.cached():
            await driver.step()
