"""What every implementation of `Engine` must do. test_engines.py runs it; adding an engine is one class there."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from kvloom.text.block_hash import block_hashes, root_hash
from shard_server.engines.base import BlockStored, Capability, EngineError, FinishReason, Sampling
from tests.conformance.adapter_suite import AdapterSuite
from tests.conformance.embedding_suite import StartEngine
from tests.conformance.engine_driver import prompt_of, request_of
from tests.conformance.kv_share_suite import KvShareSuite

MAX_UNREAD_OUTPUTS = 64
BLOCK_SIZE = 16


class EngineSuite(AdapterSuite, KvShareSuite):
    """A subclass defines `make_engine`, which returns an engine that has not started, with a `block_size` of 16, a
    `max_batch` of 16 and the given ShardConfig fields; and `adapter_path` if the engine takes adapters."""

    async def test_info_is_complete_once_started(self, start: StartEngine) -> None:
        """The hello to routers is built from it."""
        info = (await start(max_model_len=256)).engine.info
        assert info.block_size == BLOCK_SIZE
        assert info.max_batch == 16
        assert info.max_model_len == 256
        assert info.num_blocks * info.block_size >= info.max_model_len
        assert info.vocab_size > max(info.eos_token_ids)
        assert info.engine
        assert info.model

    async def test_a_sequence_starts_gives_exactly_max_tokens_and_ends(self, start: StartEngine) -> None:
        """Usage records are built from it."""
        driver = await start()
        (tokens,) = await driver.run(request_of("a", prompt_of(1, 20), 9))
        assert len(tokens) == 9
        assert all(0 <= token_id < driver.engine.info.vocab_size for token_id in tokens)
        assert driver.ends == {"a": FinishReason.LENGTH}
        assert driver.starts["a"].num_cached_tokens == 0
        assert driver.starts["a"].queue_time_seconds >= 0

    async def test_one_token_is_the_shortest_answer(self, start: StartEngine) -> None:
        """The first token comes from prefill: a sequence may never reach decode."""
        driver = await start()
        (tokens,) = await driver.run(request_of("a", prompt_of(1, 16), 1))
        assert len(tokens) == 1
        assert driver.ends == {"a": FinishReason.LENGTH}

    async def test_a_stop_token_ends_the_sequence_and_is_emitted(self, start: StartEngine) -> None:
        """End-of-sequence is a stop token; it counts as output."""
        driver = await start()
        (tokens,) = await driver.run(request_of("free", prompt_of(2, 10), 8))
        stop = tokens[5]
        (stopped,) = await driver.run(request_of("a", prompt_of(2, 10), 8, stop_token_ids=frozenset({stop})))
        assert stopped == tokens[: tokens.index(stop) + 1]
        assert driver.ends["a"] is FinishReason.STOP

    async def test_a_cancelled_sequence_ends_within_two_steps_and_frees_its_blocks(self, start: StartEngine) -> None:
        """A client that goes away must not cost engine time."""
        driver = await start()
        driver.engine.submit(request_of("a", prompt_of(3, 40), 200))
        await driver.step_until(lambda: len(driver.tokens.get("a", [])) >= 2)
        await driver.read_ready()
        num_tokens = len(driver.tokens["a"])
        driver.engine.cancel("a")
        await driver.step_until(lambda: "a" in driver.ends, max_steps=3)
        assert driver.ends["a"] is FinishReason.CANCELLED
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
        assert driver.ends == {"runs": FinishReason.LENGTH, "waits": FinishReason.CANCELLED}
        assert "waits" not in driver.tokens

    async def test_cancelling_the_unknown_or_the_ended_changes_nothing(self, start: StartEngine) -> None:
        """A cancel and the end of its sequence can cross."""
        driver = await start()
        driver.engine.cancel("never heard of")
        await driver.run(request_of("a", prompt_of(1, 10), 3))
        driver.engine.cancel("a")
        await driver.run(request_of("b", prompt_of(1, 10), 3))
        assert driver.ends == {"a": FinishReason.LENGTH, "b": FinishReason.LENGTH}

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

    async def test_the_seed_decides(self, start: StartEngine) -> None:
        """Same seed, same answer; another seed, another answer."""
        driver = await start()
        first, again, other = await driver.run(
            request_of("first", prompt_of(6, 12), 12, sampling=Sampling(seed=2**63 + 1)),
            request_of("again", prompt_of(6, 12), 12, sampling=Sampling(seed=2**63 + 1)),
            request_of("other", prompt_of(6, 12), 12, sampling=Sampling(seed=2)),
        )
        assert first == again
        assert first != other

    async def test_a_resumed_sequence_continues_identically(self, start: StartEngine) -> None:
        """Failover depends on it."""
        driver = await start()
        if Capability.SEEDED_RESUME not in driver.engine.info.capabilities:
            pytest.skip("not promised")
        (whole,) = await driver.run(request_of("whole", prompt_of(7, 30), 12))
        for cut in (1, 5, 11):
            resumed = request_of(f"from {cut}", prompt_of(7, 30), 12, output_token_ids=whole[:cut])
            (rest,) = await driver.run(resumed)
            assert whole[:cut] + rest == whole

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

    async def test_a_bias_decides(self, start: StartEngine) -> None:
        """Clients force and forbid tokens with it."""
        driver = await start()
        if Capability.LOGIT_BIAS not in driver.engine.info.capabilities:
            pytest.skip("not promised")
        greedy = Sampling(temperature=0.0)
        (free,) = await driver.run(request_of("free", prompt_of(1, 12), 3, sampling=greedy))
        forced = dataclasses.replace(greedy, logit_bias=((700, 100.0),))
        banned = dataclasses.replace(greedy, logit_bias=((free[0], -100.0),))
        always, never = await driver.run(
            request_of("always", prompt_of(1, 12), 3, sampling=forced),
            request_of("never", prompt_of(1, 12), 3, sampling=banned),
        )
        assert always == [700, 700, 700]
        assert free[0] not in never

    async def test_min_p_of_one_is_greedy(self, start: StartEngine) -> None:
        """Only the likeliest token is as likely as the likeliest one."""
        driver = await start()
        if Capability.MIN_P not in driver.engine.info.capabilities:
            pytest.skip("not promised")
        greedy, drawn = await driver.run(
            request_of("greedy", prompt_of(1, 12), 6, sampling=Sampling(temperature=0.0)),
            request_of("drawn", prompt_of(1, 12), 6, sampling=Sampling(min_p=1.0, seed=8)),
        )
        assert drawn == greedy

    async def test_a_repetition_penalty_counts_prompt_and_output(self, start: StartEngine) -> None:
        """Unlike OpenAI's penalties; a token of either is penalised the same."""
        driver = await start()
        if Capability.REPETITION_PENALTY not in driver.engine.info.capabilities:
            pytest.skip("not promised")
        biased = Sampling(temperature=0.0, logit_bias=((700, 100.0), (800, 60.0)), repetition_penalty=20.0)
        unseen, seen = await driver.run(
            request_of("unseen", [5, 6, 7], 2, sampling=biased), request_of("seen", [5, 700, 7], 1, sampling=biased)
        )
        assert (unseen, seen) == ([700, 800], [800])

    async def test_prompt_logprobs_come_with_the_start(self, start: StartEngine) -> None:
        """One for each prompt token but the first, also when the prompt is cached; the answer is the same."""
        driver = await start()
        if Capability.PROMPT_LOGPROBS not in driver.engine.info.capabilities:
            pytest.skip("not promised")
        prompt = prompt_of(9, 64)
        (plain,) = await driver.run(request_of("plain", prompt, 4, sampling=Sampling()))
        for name, num_top in {"two": 2, "zero": 0}.items():
            sampling = Sampling(num_prompt_logprobs=num_top)
            (tokens,) = await driver.run(request_of(name, prompt, 4, sampling=sampling))
            found = driver.starts[name].prompt_logprobs
            assert [len(entry.top) for entry in found] == [num_top] * 63
            assert all(entry.logprob <= 0 for entry in found)
            if Capability.BATCH_INVARIANT in driver.engine.info.capabilities:
                assert tokens == plain
        assert not driver.starts["plain"].prompt_logprobs

    async def test_prompt_logprobs_from_a_start_are_the_tail_of_all(self, start: StartEngine) -> None:
        """Scoring an answer is cheap only if the KV of its prompt may come from the cache, and of use only if that
        changes nothing."""
        driver = await start()
        has = driver.engine.info.capabilities
        if Capability.PROMPT_LOGPROBS not in has:
            pytest.skip("not promised")
        prompt = prompt_of(9, 64)
        await driver.run(request_of("whole", prompt, 2, sampling=Sampling(num_prompt_logprobs=2)))
        whole = driver.starts["whole"].prompt_logprobs
        assert driver.starts["whole"].num_cached_tokens == 0
        firsts = (0, 1, 16, 17, 40, 49, 63)
        await driver.run(
            *(
                request_of(f"{at}", prompt, 2, sampling=Sampling(num_prompt_logprobs=2, prompt_logprobs_start=at))
                for at in firsts
            )
        )
        for at in firsts:
            started, num_before = driver.starts[f"{at}"], max(at, 1) - 1
            expected = whole[num_before:]
            if Capability.BATCH_INVARIANT in has:
                assert list(started.prompt_logprobs) == list(expected)
            assert [entry.logprob for entry in started.prompt_logprobs] == pytest.approx(
                [entry.logprob for entry in expected], abs=0.02
            )
            num_blocks = num_before // BLOCK_SIZE if Capability.PREFIX_CACHING in has else 0
            assert num_blocks * BLOCK_SIZE <= started.num_cached_tokens <= num_before

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

    async def test_a_prediction_changes_no_token(self, start: StartEngine) -> None:
        """Whether it is right, wrong or half right, and whether or not the engine makes use of it."""
        driver = await start()
        (plain,) = await driver.run(request_of("plain", prompt_of(3, 20), 12))
        for name, predicted in {"right": plain, "wrong": [9] * 12, "half": [*plain[:5], 9, *plain[6:]]}.items():
            (tokens,) = await driver.run(request_of(name, prompt_of(3, 20), 12, predicted_token_ids=predicted))
            if Capability.BATCH_INVARIANT in driver.engine.info.capabilities:
                assert tokens == plain
            assert len(tokens) == 12

    async def test_no_stop_token_comes_before_min_tokens(self, start: StartEngine) -> None:
        """Also where the sequence is resumed: the tokens of earlier attempts count."""
        driver = await start()
        if Capability.MIN_TOKENS not in driver.engine.info.capabilities:
            pytest.skip("not promised")
        greedy = Sampling(temperature=0.0)
        (free,) = await driver.run(request_of("free", prompt_of(2, 10), 8, sampling=greedy))
        stops = frozenset(free[:5])
        fields = {"sampling": greedy, "stop_token_ids": stops}
        whole, rest = await driver.run(
            request_of("whole", prompt_of(2, 10), 8, min_tokens=4, **fields),
            request_of("rest", prompt_of(2, 10), 8, min_tokens=3, output_token_ids=[99, 98], **fields),
        )
        assert len(whole) >= 4
        assert stops.isdisjoint(whole[:4])
        assert rest[0] not in stops

    async def test_logprobs_have_the_asked_shape(self, start: StartEngine) -> None:
        """One entry per token: its own logprob and those of the k likeliest, likeliest first; none if not requested."""
        driver = await start()
        if Capability.LOGPROBS not in driver.engine.info.capabilities:
            pytest.skip("not promised")
        await driver.run(
            request_of("three", prompt_of(1, 10), 4, sampling=Sampling(temperature=0.0, num_logprobs=3)),
            request_of("zero", prompt_of(1, 10), 4, sampling=Sampling(num_logprobs=0)),
            request_of("none", prompt_of(1, 10), 4),
        )
        assert set(driver.logprobs) == {"three", "zero"}
        assert len(driver.logprobs["three"]) == len(driver.logprobs["zero"]) == 4
        assert all(not entry.top for entry in driver.logprobs["zero"])
        for token_id, entry in zip(driver.tokens["three"], driver.logprobs["three"], strict=True):
            values = [logprob for _, logprob in entry.top]
            assert len(values) == 3
            assert values == sorted(values, reverse=True)
            assert entry.logprob <= 0
            assert entry.top[0] == (token_id, pytest.approx(entry.logprob)), "greedy picks the likeliest"

    async def test_an_engine_with_unread_steps_pauses(self, start: StartEngine) -> None:
        """Memory is bounded when the server falls behind."""
        driver = await start()
        driver.engine.submit(request_of("a", prompt_of(1, 10), 2000))
        await driver.step_until(lambda: "a" in driver.tokens)
        num_read = len(driver.tokens["a"])
        await asyncio.sleep(0.3)  # time to run ahead, which is what must not be used
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
