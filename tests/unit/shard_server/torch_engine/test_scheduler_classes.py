"""Prefill gives way to that of more urgent sequences, and of tenants that had less, at the next step."""

from __future__ import annotations

import dataclasses
import random

import pytest

from shard_server.engines.base import EngineRequest
from shard_server.engines.queue_order import CLASS_PATIENCE_SECONDS
from tests.unit.shard_server.torch_engine.test_scheduler_steps import Bench, alone, make_request, same, various_requests

BUDGET = 8


def _batch(name: str, num_tokens: int, token: int = 1) -> EngineRequest:
    return make_request(name, [token] * num_tokens, max_tokens=2, class_rank=2)


def _num_steps_until_start(bench: Bench, name: str) -> int:
    for number in range(1, 100):
        bench.step()
        if bench.answers[name].start is not None:
            return number
    raise AssertionError(f"{name} never starts")


def test_a_running_batch_prefill_yields_at_the_next_step() -> None:
    """An interactive request waits for one step, not for a prompt of a hundred thousand tokens."""
    bench = Bench(budget=BUDGET)
    bench.add(_batch("batch", 80))
    bench.step()
    bench.add(make_request("interactive", [5] * 7, max_tokens=2))
    assert _num_steps_until_start(bench, "interactive") == 1
    assert bench.answers["batch"].start is None
    assert _num_steps_until_start(bench, "batch") <= 10


def test_the_most_urgent_of_several_waiting_goes_first() -> None:
    """Without regard to when they came, as long as the patience of none is over."""
    bench = Bench(max_batch=1, budget=BUDGET)
    ranks = {"batch": 2, "shadow": 3, "interactive": 1, "premium": 0}
    for token, (name, rank) in enumerate(ranks.items(), 1):
        bench.add(make_request(name, [token] * 12, max_tokens=1, class_rank=rank))
    order: list[str] = []
    while bench.loop.has_work:
        output = bench.step()
        order += [start.request_id for start in output.starts] if output else []
    assert order == sorted(ranks, key=lambda name: ranks[name])


def test_patience_ends() -> None:
    """Batch prefill that has waited for CLASS_PATIENCE_SECONDS yields no more: a class must not starve in an engine."""
    bench = Bench(budget=BUDGET)
    bench.add(_batch("batch", 80))
    bench.step()
    bench.scheduler.running[0].submit_time -= CLASS_PATIENCE_SECONDS + 1
    bench.add(make_request("interactive", [5] * 7, max_tokens=2))
    assert _num_steps_until_start(bench, "batch") < 12
    assert bench.answers["interactive"].start is None or bench.answers["batch"].start is not None


def test_decoding_goes_on_while_prefill_yields() -> None:
    """Only prefill is put in order: a batch answer that streams keeps streaming."""
    bench = Bench(budget=BUDGET)
    bench.add(make_request("decoding", [1, 2, 3], max_tokens=40, class_rank=2))
    bench.step()
    bench.add(_batch("batch", 40), make_request("interactive", [5] * 30, max_tokens=2))
    for _ in range(8):
        output = bench.step()
        assert output is not None
        assert "decoding" in output.request_ids


def test_an_urgent_sequence_does_not_wait_for_a_prefix_that_batch_computes() -> None:
    """The prefill that it would wait for gives way to every urgent sequence that comes meanwhile."""
    bench = Bench(budget=BUDGET)
    bench.add(_batch("batch", 80, token=7))
    bench.step()
    bench.add(make_request("urgent", [7] * 70, max_tokens=2))
    assert _num_steps_until_start(bench, "urgent") <= 9
    assert bench.answers["batch"].start is None


def test_a_running_prefill_yields_to_another_tenant_at_the_next_step() -> None:
    """And so do all that wait: a tenant's flood costs another one a step, not a queue."""
    bench = Bench(num_blocks=256, budget=BUDGET)
    bench.add(*(make_request(f"flood-{i}", [i + 1] * 40, max_tokens=2, tenant="flood") for i in range(8)))
    bench.step()
    bench.add(make_request("calm", [99] * 7, max_tokens=2, tenant="calm"))
    assert _num_steps_until_start(bench, "calm") == 1


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("num_blocks", "budget"), [(256, 5), (24, 16), (21, 3)])
def test_tokens_do_not_depend_on_classes_and_tenants(seed: int, num_blocks: int, budget: int) -> None:
    """Whatever order they cause, with or without preemption: all sequences end, with the tokens they have alone, and
    blocks, ranks and tenants are accounted for."""
    rng = random.Random(seed)
    bench = Bench(num_blocks=num_blocks, max_batch=8, budget=budget)
    requests = [
        dataclasses.replace(one, class_rank=rng.randrange(4), tenant=rng.choice("abc"))
        for one in various_requests(8, seed)
    ]
    for request in requests:
        bench.add(request)
        for _ in range(rng.randrange(3)):
            bench.step()
    bench.run()
    for request in requests:
        assert same(bench.answers[request.request_id], alone(request))
