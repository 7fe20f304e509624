"""Which tokens an engine chooses, and what it says of their probabilities; part of the suite of engine_suite.py."""

from __future__ import annotations

import dataclasses

import pytest

from shard_server.engines.base import Capability, Sampling
from tests.conformance.engine_driver import prompt_of, request_of
from tests.conformance.started_engines import BLOCK_SIZE, StartedEngines, StartEngine


class SamplingSuite(StartedEngines):
    """Engines without the capability of a test skip it."""

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

    async def test_a_prediction_changes_no_token(self, start: StartEngine) -> None:
        """Whether it is right, wrong or half right, and whether or not the engine makes use of it."""
        driver = await start()
        (plain,) = await driver.run(request_of("plain", prompt_of(3, 20), 12))
        for name, predicted in {"right": plain, "wrong": [9] * 12, "half": [*plain[:5], 9, *plain[6:]]}.items():
            (tokens,) = await driver.run(request_of(name, prompt_of(3, 20), 12, predicted_token_ids=predicted))
            if Capability.BATCH_INVARIANT in driver.engine.info.capabilities:
                assert tokens == plain
            assert len(tokens) == 12

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
