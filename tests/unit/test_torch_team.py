"""Kernels run on torch's own threads: every task once, and its failure is the caller's."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from shard_server.engines.torch_engine.team import ThreadTeam


@pytest.fixture
def team() -> Iterator[ThreadTeam]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield ThreadTeam()
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_tasks", [1, 2, 5])
def test_every_task_runs_once_before_the_call_returns(team: ThreadTeam, num_tasks: int):
    """Also when there are more tasks than threads."""
    done: list[int] = []
    team.run(done.append, num_tasks)
    assert sorted(done) == list(range(num_tasks))


def test_two_tasks_run_at_the_same_time(team: ThreadTeam):
    """Each waits for the other; where there is only one thread there is nothing to see."""
    if team.num_threads < 2:
        pytest.skip("OpenMP's entry point is not there")
    both = threading.Barrier(2)
    team.run(lambda _index: (both.wait(10), None)[1], 2)


def test_a_failure_is_raised_to_the_caller(team: ThreadTeam):
    """C code between the threads could not pass it on: it would be lost."""

    def fail(index: int) -> None:
        raise MemoryError(str(index))

    with pytest.raises(MemoryError):
        team.run(fail, 2)
