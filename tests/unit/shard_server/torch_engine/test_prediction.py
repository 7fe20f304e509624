"""Predictions change when tokens come, never which."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom_common.config import SpeculationConfig
from shard_server.engines.torch_engine.sampling.prediction import PredictedAnswer
from tests.examples import num_examples
from tests.step_bench import same
from tests.unit.shard_server.torch_engine.test_scheduler_steps import make_request, various_requests
from tests.unit.shard_server.torch_engine.test_speculation import Bench

PREDICTIONS = SpeculationConfig()


def predicting(count: int = 6, wrong_every: int = 9) -> tuple[list, list]:
    """(requests, the same with predictions that are their answers, except for some tokens that were replaced, left out
    or put in)"""
    rng = random.Random(5)
    requests = [dataclasses.replace(r, max_tokens=40 + i) for i, r in enumerate(various_requests(count, seed=3))]
    answers = Bench(None, num_context_tokens=None).run(*requests)
    predictions = []
    for request in requests:
        tokens: list[int] = []
        for index, token_id in enumerate(answers[request.request_id].token_ids):
            if index % wrong_every == wrong_every - 1:
                tokens += rng.choice([[7], [], [token_id, 9]])
            else:
                tokens.append(token_id)
        predictions.append(dataclasses.replace(request, predicted_token_ids=tokens))
    return requests, predictions


@pytest.mark.parametrize(
    ("num_blocks", "max_batch", "budget", "max_draft_tokens"),
    [
        pytest.param(512, 4, 512, 0, id="batched"),
        pytest.param(512, 32, 5, 0, id="chunked"),
        pytest.param(36, 16, 512, 0, id="preempted"),
        pytest.param(512, 8, 512, 6, id="with prompt lookup"),
    ],
)
def test_answers_are_those_without_a_prediction(
    num_blocks: int, max_batch: int, budget: int, max_draft_tokens: int
) -> None:
    """Greedy and seeded, under penalties, beside others: and most drafts were right, so that their KV was used."""
    requests, predictions = predicting()
    expected = Bench(None, num_context_tokens=None).run(*requests)
    speculation = SpeculationConfig(max_draft_tokens=max_draft_tokens)
    fields = {"num_blocks": num_blocks, "max_batch": max_batch, "budget": budget, "num_context_tokens": None}
    bench = Bench(speculation, **fields)
    answers = bench.run(*predictions)
    for name, answer in expected.items():
        assert same(answers[name], answer), name
    if num_blocks > 40:
        assert bench.num_accepted_tokens > 0.5 * sum(len(answer.token_ids) for answer in answers.values())


def test_a_resumed_answer_follows_its_prediction_from_where_it_is() -> None:
    """After a failover the rest comes as fast, and is the same."""
    requests, predictions = predicting(4)
    expected = Bench(None, num_context_tokens=None).run(*requests)
    resumed = [
        dataclasses.replace(request, output_token_ids=expected[request.request_id].token_ids[:20])
        for request in predictions
    ]
    bench = Bench(PREDICTIONS, num_context_tokens=None)
    rests = bench.run(*resumed)
    for name, answer in expected.items():
        assert rests[name].token_ids == answer.token_ids[20:]
    assert bench.num_accepted_tokens > 40


def test_the_step_output_counts_predicted_tokens() -> None:
    """Clients see in their usage what a prediction was worth."""
    request = make_request("a", list(range(8)), 30)
    answer = Bench(None, num_context_tokens=None).run(request)["a"].token_ids
    bench = Bench(PREDICTIONS, num_context_tokens=None)
    counts: list[tuple[int, int]] = []
    bench.add(dataclasses.replace(request, predicted_token_ids=[*answer[:20], *[3] * 9]))
    while bench.loop.has_work:
        output = bench.step()
        if output is not None and "a" in output.predictions:
            counts.append(output.predictions["a"])
    assert sum(accepted for _, accepted in counts) in (17, 18, 19)
    assert len(counts) < 12
    assert sum(drafted for drafted, _ in counts) <= 19 + 31


tokens = st.lists(st.integers(0, 5), max_size=40)


@given(tokens, tokens, st.integers(1, 40))
@settings(max_examples=num_examples(200))
def test_drafts_are_pieces_of_the_prediction(predicted: list[int], output: list[int], limit: int) -> None:
    """Whatever the output, and however often drafts are taken; an answer that follows is drafted at once."""
    answer = PredictedAnswer(predicted, 8)
    for length in range(len(output) + 1):
        draft = answer.draft([9, 9, *output[:length]], length, limit)
        assert len(draft) <= min(limit, 8)
        if output[:length] == predicted[:length]:
            assert draft == predicted[length : length + min(limit, 8)]
        else:
            assert any(predicted[i : i + len(draft)] == draft for i in range(len(predicted) + 1))
