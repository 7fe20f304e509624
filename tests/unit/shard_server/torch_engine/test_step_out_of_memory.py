"""Memory that runs out in a step costs the newest request, and no other request anything."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from shard_server.engines.base import SequenceFinishReason
from tests.unit.shard_server.torch_engine.test_scheduler_steps import Bench, alone, same, various_requests

FAULTS: dict[str, Callable[[], Exception]] = {
    "python": lambda: MemoryError(),
    "cpu": lambda: RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory"),
    "gpu": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
}


@pytest.mark.parametrize(("fault", "overlaps"), [*((fault, False) for fault in FAULTS), ("gpu", True)])
@pytest.mark.parametrize("when", [0, 3, 11], ids=["first-step", "prefilling", "decoding"])
def test_the_newest_ends_with_an_error_and_the_others_go_on_exactly(fault: str, when: int, overlaps: bool):
    """A shard that died of one long prompt would take every answer with it."""
    requests = various_requests(8)
    bench = Bench(budget=16, overlaps=overlaps)
    newest: list[str] = []
    num_runs = 0

    def fail(batch: list[object]) -> None:
        nonlocal num_runs
        num_runs += 1
        if num_runs == when + 1:
            newest.append(bench.scheduler.running[-1].request.request_id)
            raise FAULTS[fault]()

    bench.runner.before_run = fail
    answers = bench.run(*requests)
    failed = [name for name, answer in answers.items() if answer.reason is SequenceFinishReason.ERROR]
    assert failed == newest
    for request in requests:
        if request.request_id not in failed:
            assert same(answers[request.request_id], alone(request)), request.request_id
    assert bench.pool.num_available == bench.pool.num_blocks


def test_memory_that_stays_short_fails_one_after_another_and_the_loop_lives_on():
    """Even the last one must not be tried for ever; and the next request finds a working engine."""
    requests = various_requests(4)
    bench = Bench()

    def fail(batch: list[object]) -> None:
        raise MemoryError

    bench.runner.before_run = fail
    answers = bench.run(*requests)
    assert {answer.reason for answer in answers.values()} == {SequenceFinishReason.ERROR}
    bench.runner.before_run = lambda batch: None
    again = various_requests(4, seed=2)
    later = bench.run(*again)
    assert all(same(later[request.request_id], alone(request)) for request in again)


def test_another_fault_is_no_matter_of_memory():
    """What is wrong with the program must not pass for a lack of memory."""
    bench = Bench()

    def fail(batch: list[object]) -> None:
        raise RuntimeError("shape mismatch")

    bench.runner.before_run = fail
    with pytest.raises(RuntimeError, match="shape mismatch"):
        bench.run(*various_requests(1))
