"""How sequences begin, run beside one another and end in every engine; part of the suite of engine_suite.py."""

from __future__ import annotations

import asyncio

import pytest

from shard_server.engines.base import Capability, EngineError, SequenceFinishReason
from tests.conformance.engine_driver import prompt_of, request_of
from tests.conformance.started_engines import StartedEngines, StartEngine

MAX_UNREAD_OUTPUTS = 64


class SchedulingSuite(StartedEngines):
    """It holds in whatever order an engine takes those that wait."""

    async def test_a_sequence_starts_gives_exactly_max_tokens_and_ends(self, start: StartEngine) -> None:
        """Usage records are built from it."""
        driver = await start()
        (tokens,) = await driver.run(request_of("a", prompt_of(1, 20), 9))
        assert len(tokens) == 9
        assert all(0 <= token_id < driver.engine.info.vocab_size for token_id in tokens)
        assert driver.ends == {"a": SequenceFinishReason.LENGTH}
        assert driver.starts["a"].num_cached_tokens == 0
        assert driver.starts["a"].queue_time_seconds >= 0

    async def test_one_token_is_the_shortest_answer(self, start: StartEngine) -> None:
        """The first token comes from prefill: a sequence may never reach decode."""
        driver = await start()
        (tokens,) = await driver.run(request_of("a", prompt_of(1, 16), 1))
        assert len(tokens) == 1
        assert driver.ends == {"a": SequenceFinishReason.LENGTH}

    async def test_a_stop_token_ends_the_sequence_and_is_emitted(self, start: StartEngine) -> None:
        """End-of-sequence is a stop token; it counts as output."""
        driver = await start()
        (tokens,) = await driver.run(request_of("free", prompt_of(2, 10), 8))
        stop = tokens[5]
        (stopped,) = await driver.run(request_of("a", prompt_of(2, 10), 8, stop_token_ids=frozenset({stop})))
        assert stopped == tokens[: tokens.index(stop) + 1]
        assert driver.ends["a"] is SequenceFinishReason.STOP

    async def test_a_cancelled_sequence_ends_within_two_steps_and_frees_its_blocks(self, start: StartEngine) -> None:
        """A client that goes away must not cost engine time."""
        driver = await start()
        driver.engine.submit(request_of("a", prompt_of(3, 40), 200))
        await driver.step_until(lambda: len(driver.tokens.get("a", [])) >= 2)
        await driver.read_ready()
        num_tokens = len(driver.tokens["a"])
        driver.engine.cancel("a")
        await driver.step_until(lambda: "a" in driver.ends, max_steps=3)
        assert driver.ends["a"] is SequenceFinishReason.CANCELLED
        assert len(driver.tokens["a"]) <= num_tokens + 2
        assert driver.load.num_available_blocks == driver.engine.info.num_blocks
        assert driver.load.num_running == 0

    async def test_a_sequence_is_cancelled_while_it_waits(self, start: StartEngine) -> None:
        """It ends without a token, and running sequences are not affected."""
        driver = await start(max_batch=1)
        driver.engine.submit(request_of("runs", prompt_of(4, 20), 90))  # longer than any engine takes to be told
        driver.engine.submit(request_of("waits", prompt_of(5, 20), 12))
        await driver.step_until(lambda: "runs" in driver.tokens)
        driver.engine.cancel("waits")
        await driver.step_until(lambda: len(driver.ends) == 2)
        assert driver.ends == {"runs": SequenceFinishReason.LENGTH, "waits": SequenceFinishReason.CANCELLED}
        assert "waits" not in driver.tokens

    async def test_cancelling_the_unknown_or_the_ended_changes_nothing(self, start: StartEngine) -> None:
        """A cancel and the end of its sequence can cross."""
        driver = await start()
        driver.engine.cancel("never heard of")
        await driver.run(request_of("a", prompt_of(1, 10), 3))
        driver.engine.cancel("a")
        await driver.run(request_of("b", prompt_of(1, 10), 3))
        assert driver.ends == {"a": SequenceFinishReason.LENGTH, "b": SequenceFinishReason.LENGTH}

    async def test_a_request_that_can_never_run_is_rejected_and_harms_no_other(self, start: StartEngine) -> None:
        """A bad request must not reach the loop that serves the others."""
        driver = await start(max_model_len=128)
        engine = driver.engine
        engine.submit(request_of("good", prompt_of(1, 10), 4))
        beyond = engine.info.vocab_size
        for name, bad in {
            "duplicate id": request_of("good", prompt_of(1, 10), 4),
            "empty prompt": request_of("b", [], 4),
            "over the window": request_of("b", prompt_of(1, 100), 29),
            "unknown token": request_of("b", [5, beyond], 4),
            "negative token": request_of("b", [5, -1], 4),
            "unknown output token": request_of("b", [5], 4, output_token_ids=[beyond]),
        }.items():
            try:
                engine.submit(bad)
            except EngineError:
                continue
            raise AssertionError(f"{name} was taken")
        await driver.step_until(lambda: "good" in driver.ends)
        assert len(driver.tokens["good"]) == 4

    async def test_the_whole_window_can_be_used(self, start: StartEngine) -> None:
        """prompt + max_tokens = max_model_len is allowed."""
        driver = await start(max_model_len=64, num_blocks=4)
        (tokens,) = await driver.run(request_of("a", prompt_of(1, 50), 14))
        assert len(tokens) == 14

    async def test_a_flood_of_one_tenant_does_not_delay_anothers_first_token(self, start: StartEngine) -> None:
        """What Capability.FAIR_PREFILL promises: the newcomer is prefilled in the next step, before what has begun, and
        the tokens of all stay the same."""
        driver = await start(max_prefill_tokens_per_step=16, num_blocks=256)
        if Capability.FAIR_PREFILL not in driver.engine.info.capabilities:
            pytest.skip("not promised")
        flood = [request_of(f"flood {i}", prompt_of(i, 64), 2, tenant="flood") for i in range(12)]
        calm = request_of("calm", prompt_of(99, 16), 2, tenant="calm")
        for request in (*flood, calm):
            driver.engine.submit(request)
        await driver.step_until(lambda: len(driver.ends) == 13)
        # Those of the flood that an engine had begun when the newcomer came, and one of the steps in which both share.
        assert list(driver.starts).index("calm") <= 2
        if Capability.BATCH_INVARIANT in driver.engine.info.capabilities:
            together = [driver.tokens[request.request_id] for request in (flood[0], flood[11], calm)]
            alone = [
                (await driver.run(request_of(f"alone {one.request_id}", one.prompt_token_ids, 2)))[0]
                for one in (flood[0], flood[11], calm)
            ]
            assert together == alone

    async def test_many_sequences_at_once_lose_and_double_nothing(self, start: StartEngine) -> None:
        """More than fit in a batch, ragged, with prompts longer than a prefill chunk; alone, each has the same
        tokens."""
        driver = await start(max_batch=4, max_prefill_tokens_per_step=32)
        lengths = [(5 + 11 * i % 60, 2 + 5 * i % 11) for i in range(12)]
        requests = [request_of(f"r{i}", prompt_of(i, prompt), out) for i, (prompt, out) in enumerate(lengths)]
        together = await driver.run(*requests)
        assert [len(tokens) for tokens in together] == [out for _, out in lengths]
        if Capability.BATCH_INVARIANT in driver.engine.info.capabilities:
            for i in (0, 5, 11):
                prompt, out = lengths[i]
                (alone,) = await driver.run(request_of(f"alone {i}", prompt_of(i, prompt), out))
                assert alone == together[i]
        assert driver.load.num_available_blocks == driver.engine.info.num_blocks

    async def test_sequences_that_outgrow_the_blocks_still_finish_right(self, start: StartEngine) -> None:
        """Preempted, or made to wait: no token is lost or doubled."""
        driver = await start(num_blocks=6, max_model_len=80)
        requests = [request_of(f"r{i}", prompt_of(i, 30), 34) for i in range(3)]
        crowded = await driver.run(*requests)
        assert [len(tokens) for tokens in crowded] == [34, 34, 34]
        if Capability.BATCH_INVARIANT in driver.engine.info.capabilities:
            (alone,) = await driver.run(request_of("alone", prompt_of(2, 30), 34))
            assert alone == crowded[2]
        assert driver.load.num_available_blocks == 6
        driver.cached()

    async def test_load_tells_what_runs_and_waits_and_returns_to_idle(self, start: StartEngine) -> None:
        """Placement depends on it."""
        driver = await start(max_batch=2)
        for i in range(3):
            driver.engine.submit(request_of(f"r{i}", prompt_of(i, 20), 10))
        await driver.step_until(lambda: len(driver.tokens) == 2 and len(driver.tokens["r0"]) >= 2)
        assert driver.load.num_running == 2
        assert driver.load.num_waiting == 1
        assert driver.load.num_queued_prefill_tokens == 20
        assert driver.load.num_decode_context_tokens >= 40
        assert driver.load.num_available_blocks < driver.engine.info.num_blocks
        await driver.step_until(lambda: len(driver.ends) == 3)
        load = driver.load
        assert (load.num_running, load.num_waiting, load.num_queued_prefill_tokens) == (0, 0, 0)
        assert load.num_decode_context_tokens == 0
        assert load.num_available_blocks == driver.engine.info.num_blocks

    async def test_load_tells_whose_it_is(self, start: StartEngine) -> None:
        """Several routers place requests on one shard; each knows its own load, and must learn that of the others."""
        driver = await start(max_batch=2)
        for i in range(4):
            driver.engine.submit(request_of(f"r{i}", prompt_of(i, 20), 10, origin=i % 3))
        await driver.step_until(lambda: len(driver.tokens) == 2)
        shares = driver.load.shares
        assert (shares[0].num_running, shares[0].num_waiting, shares[0].num_queued_prefill_tokens) == (1, 1, 20)
        assert (shares[1].num_running, shares[1].num_waiting) == (1, 0)
        assert shares[1].num_decode_context_tokens >= 20
        assert (shares[2].num_running, shares[2].num_waiting, shares[2].num_queued_prefill_tokens) == (0, 1, 20)
        assert driver.load.num_submitted == 4
        await driver.step_until(lambda: len(driver.ends) == 4)
        assert not driver.load.shares

    async def test_an_engine_with_unread_steps_pauses(self, start: StartEngine) -> None:
        """Memory is bounded when the server falls behind."""
        driver = await start()
        driver.engine.submit(request_of("a", prompt_of(1, 10), 2000))
        await driver.step_until(lambda: "a" in driver.tokens)
        num_read = len(driver.tokens["a"])
        await asyncio.sleep(0.3)  # sleep: time to run ahead, which is what must not be used
        driver.engine.cancel("a")
        await driver.step_until(lambda: "a" in driver.ends)
        assert len(driver.tokens["a"]) - num_read <= MAX_UNREAD_OUTPUTS

    async def test_close_ends_the_steps_and_can_be_repeated(self, start: StartEngine) -> None:
        """A consumer that waits for a step is released, whether the engine is busy or idle."""
        driver = await start()
        driver.engine.submit(request_of("a", prompt_of(1, 10), 500))
        await driver.step_until(lambda: "a" in driver.tokens)
        await driver.engine.close()
        await driver.engine.close()
        with pytest.raises(StopAsyncIteration):
            await driver.step()
        with pytest.raises(EngineError):
            driver.engine.submit(request_of("b", prompt_of(1, 10), 5))

    async def test_close_wakes_who_waits_for_an_idle_engine(self, start: StartEngine) -> None:
        """A drained shard stops like this."""
        driver = await start()
        waiting = asyncio.create_task(driver.step())
        await asyncio.sleep(0)
        await driver.engine.close()
        with pytest.raises(StopAsyncIteration):
            await asyncio.wait_for(waiting, 10)
