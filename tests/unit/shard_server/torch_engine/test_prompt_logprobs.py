"""The logprobs of a prompt's tokens are those of the model, however the prompt is computed."""

from __future__ import annotations

import dataclasses

import pytest

from kvloom.config import SpeculationConfig
from shard_server.engines.base import EngineRequest, TokenLogprobs
from tests.fakes.fake_model_runner import logits_of
from tests.step_bench import Answer, same
from tests.unit.shard_server.torch_engine.test_scheduler_steps import make_request, various_requests
from tests.unit.shard_server.torch_engine.test_speculation import Bench


def asking(request: EngineRequest, num_top: int) -> EngineRequest:
    return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, num_prompt_logprobs=num_top))


def expected_of(request: EngineRequest) -> list[TokenLogprobs]:
    """From the model's logits after every prefix, without an engine."""
    prompt, num_top = list(request.prompt_token_ids), request.sampling.num_prompt_logprobs
    found: list[TokenLogprobs] = []
    for length in range(1, len(prompt)):
        logprobs = logits_of(prompt[:length]).log_softmax(-1).tolist()
        ranked = sorted(range(len(logprobs)), key=lambda i: (-logprobs[i], i))[:num_top]
        found.append(TokenLogprobs(logprobs[prompt[length]], [(i, logprobs[i]) for i in ranked]))
    return found


def check(answer: Answer, plain: Answer, request: EngineRequest) -> None:
    assert answer.start is not None
    assert list(answer.start.prompt_logprobs) == expected_of(request)
    assert answer.start.num_cached_tokens == 0
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
    wanting = [asking(request, index % 4) if index % 3 else request for index, request in enumerate(requests)]
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
            assert answers[name].start.prompt_logprobs == ()  # pyright: ignore[reportOptionalMemberAccess]
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
