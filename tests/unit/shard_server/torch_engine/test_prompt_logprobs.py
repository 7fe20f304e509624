"""The logprobs of a prompt's tokens are those of the model, however the prompt is computed."""

from __future__ import annotations

import dataclasses

import pytest

from kvloom_common.config import SpeculationConfig
from shard_server.engines.base import EngineRequest, TokenLogprobs
from shard_server.engines.torch_engine.scheduler import max_prompt_logits_on_cpu
from tests.fakes.fake_model_runner import logits_of
from tests.step_bench import Answer, same
from tests.unit.shard_server.torch_engine.test_scheduler_steps import make_request, various_requests
from tests.unit.shard_server.torch_engine.test_speculation import Bench


def asking(request: EngineRequest, num_top: int, start: int = 0) -> EngineRequest:
    sampling = dataclasses.replace(request.sampling, num_prompt_logprobs=num_top, prompt_logprobs_start=start)
    return dataclasses.replace(request, sampling=sampling)


def expected_of(request: EngineRequest) -> list[TokenLogprobs]:
    """From the model's logits after every prefix, without an engine."""
    prompt, num_top = list(request.prompt_token_ids), request.sampling.num_prompt_logprobs
    found: list[TokenLogprobs] = []
    for length in range(max(request.sampling.prompt_logprobs_start, 1), len(prompt)):
        logprobs = logits_of(prompt[:length]).log_softmax(-1).tolist()
        ranked = sorted(range(len(logprobs)), key=lambda i: (-logprobs[i], i))[:num_top]
        found.append(TokenLogprobs(logprobs[prompt[length]], [(i, logprobs[i]) for i in ranked]))
    return found


def check(answer: Answer, plain: Answer, request: EngineRequest) -> None:
    assert answer.start is not None
    assert list(answer.start.prompt_logprobs) == expected_of(request)
    assert answer.start.num_cached_tokens <= max(request.sampling.prompt_logprobs_start, 1) - 1
    assert same(answer, plain)


@pytest.mark.parametrize(
    ("num_blocks", "budget", "max_batch", "max_draft_tokens"),
    [
        pytest.param(512, 512, 16, 0, id="batched"),
        pytest.param(512, 5, 16, 0, id="chunked"),
        pytest.param(512, 5, 16, 6, id="with speculation"),
        pytest.param(22, 16, 16, 0, id="preempted"),
    ],
)
def test_they_are_those_of_the_model(num_blocks: int, budget: int, max_batch: int, max_draft_tokens: int) -> None:
    """Beside sequences that want none, in chunks, and when the prompt is computed twice; answers do not change."""
    requests = various_requests(10)
    starts = [(index * 7) % len(request.prompt_token_ids) for index, request in enumerate(requests)]
    wanting = [
        asking(request, index % 4, starts[index] if index % 2 else 0) if index % 3 else request
        for index, request in enumerate(requests)
    ]
    plain = Bench(None, num_context_tokens=None).run(*requests)
    bench = Bench(
        SpeculationConfig(max_draft_tokens=max_draft_tokens),
        num_blocks=num_blocks,
        budget=budget,
        max_batch=max_batch,
        num_context_tokens=None,
    )
    answers = bench.run(*wanting)
    for request in wanting:
        name = request.request_id
        if request.sampling.num_prompt_logprobs is None:
            assert same(answers[name], plain[name])
            assert answers[name].start.prompt_logprobs == ()
        else:
            check(answers[name], plain[name], request)
    assert num_blocks > 22 or bench.scheduler.num_preemptions


def test_a_cached_prompt_is_computed_again() -> None:
    """Reusing its blocks would leave no logits. Afterwards others reuse them as before."""
    request = make_request("a", list(range(1, 31)), 4)
    bench = Bench(None, num_context_tokens=None)
    plain = bench.run(request)["a"]
    again = asking(dataclasses.replace(request, request_id="b"), 2)
    check(bench.run(again)["b"], plain, again)
    start = bench.run(dataclasses.replace(request, request_id="c"))["c"].start
    assert start is not None
    assert start.num_cached_tokens > 0


@pytest.mark.parametrize("budget", [512, 5])
def test_from_a_start_on_they_are_computed_and_nothing_else_is(budget: int) -> None:
    """An answer is scored for the price of its tokens, where the KV of its prompt is cached; and with the same bits."""
    request = make_request("a", list(range(1, 31)), 4)
    bench = Bench(None, num_context_tokens=None, budget=budget)
    plain = bench.run(request)["a"]
    block_size = bench.pool.block_size
    for start in (1, block_size, block_size + 1, 13, 22, 29):
        again = asking(dataclasses.replace(request, request_id=f"from {start}"), 2, start)
        bench.runner.batches.clear()
        answer = bench.run(again)[again.request_id]
        assert answer.start is not None
        assert list(answer.start.prompt_logprobs) == expected_of(again)
        assert same(answer, plain)
        num_cached = (start - 1) // block_size * block_size
        assert answer.start.num_cached_tokens == num_cached
        prompt = [part for batch in bench.runner.batches for part in batch if part.num_computed_tokens < 30]
        assert sum(len(part.token_ids) for part in prompt) == 30 - num_cached
        assert sum(part.num_logits for part in prompt) == 30 - (start - 1)


def test_they_wait_for_a_prefix_that_is_being_computed() -> None:
    """Answers to one long prompt that are scored at once compute it once."""
    prompt = [1 + i % 50 for i in range(64)]
    requests = [asking(make_request(name, [*prompt, index + 1, 7], 1), 0, 64) for index, name in enumerate("abc")]
    bench = Bench(None, num_context_tokens=None, budget=16)
    answers = bench.run(*requests)
    for request in requests:
        start = answers[request.request_id].start
        assert start is not None
        assert list(start.prompt_logprobs) == expected_of(request)
    assert sorted(one.start.num_cached_tokens for one in answers.values() if one.start)[1:] == [60, 60]


def test_a_prompt_of_one_token_has_none() -> None:
    """There is nothing before it."""
    answer = Bench(None, num_context_tokens=None).run(asking(make_request("a", [7], 3), 2))["a"]
    assert answer.start is not None
    assert answer.start.prompt_logprobs in ([], ())


def test_logits_of_a_long_prompt_take_bounded_memory() -> None:
    """Each row has as many floats as the vocabulary has tokens."""
    request = asking(make_request("a", [1 + i % 50 for i in range(700)], 2), 0)
    bench = Bench(None, num_blocks=512, budget=2048, num_context_tokens=1)
    answer = bench.run(request, asking(dataclasses.replace(request, request_id="b"), 0))
    assert all(len(one.start.prompt_logprobs) == 699 for one in answer.values() if one.start)
    assert max(sum(len(s.token_ids) for s in batch) for batch in bench.runner.batches) <= 256 + 2


@pytest.mark.parametrize("vocab_size", [1000, 49_152, 152_000, 2_000_000])
def test_on_a_cpu_their_bytes_are_bounded_too(vocab_size: int) -> None:
    """The C library takes larger arrays from the system each time. Progress needs some rows, however long they are."""
    num_rows = max_prompt_logits_on_cpu(vocab_size)
    assert 16 <= num_rows <= 256
    assert num_rows == 16 or num_rows * vocab_size * 4 < 32 * 2**20


def test_tokens_without_logits_are_computed_beside_them() -> None:
    """The bound is one of logits: it must not make the prefill of a prompt in chunks that gives none any longer."""
    request = asking(make_request("a", [1 + i % 50 for i in range(1500)], 2), 0, 1200)
    bench = Bench(None, num_blocks=512, budget=1000, num_context_tokens=1)
    answer = bench.run(request)["a"]
    assert answer.start is not None
    assert len(answer.start.prompt_logprobs) == 300
    sizes = [(len(part.token_ids), part.num_logits) for batch in bench.runner.batches for part in batch]
    assert sizes[:3] == [(1000, 0), (455, 256), (45, 45)]
