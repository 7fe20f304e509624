"""Programs run on torch's own threads, which wait for one another where a task needs what others did before."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.fakes.kernel_threads import kernel_thread_pool

tasks = pytest.importorskip("shard_server.engines.torch_engine.kernels.codegen.tasks")
COLUMNS = 64


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[object]:
    with kernel_thread_pool(request.param) as found:
        yield found


class Chain:
    """Tasks each of which takes the rows that the one before has left, in reverse: other threads'."""

    def __init__(self, num_rows: int, num_tasks: int) -> None:
        self.reverse = torch.arange(num_rows).flip(0)
        generator = torch.Generator().manual_seed(1)
        self.stages = [torch.randn(num_rows, COLUMNS, generator=generator).bfloat16()]
        self.stages += [torch.zeros(num_rows, COLUMNS).bfloat16() for _ in range(num_tasks)]
        rows = [
            tasks.task(tasks.LOOK_UP, num_rows, self.reverse.data_ptr(), source.data_ptr(), COLUMNS, target.data_ptr())
            for source, target in zip(self.stages[:-1], self.stages[1:], strict=True)
        ]
        self.program = tasks.program(rows)
        # As after a product: threads do not wait after a task by rows if the next one uses the same rows.
        self.program[:, tasks.IS_AWAITED] = 1

    def is_done(self) -> bool:
        first = self.stages[0]
        return all(
            torch.equal(stage, first if index % 2 == 0 else first.flip(0)) for index, stage in enumerate(self.stages)
        )


@pytest.mark.parametrize("num_rows", [1, 2, 33])
def test_a_task_sees_what_every_thread_did_before_it(threads, num_rows: int):
    """With fewer rows than threads, too, and time after time."""
    for _ in range(20):
        chain = Chain(num_rows, 100)
        threads.run(chain.program)
        assert chain.is_done()


@pytest.mark.parametrize("num_busy", [0, pytest.param(2, marks=pytest.mark.long)])
def test_more_threads_than_cores_come_to_an_end(threads, num_busy: int):
    """They wait for one another hundreds of times in a step: one that waits must let the one it waits for have its
    core, also beside other processes that want all there is."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_busy)]
    try:
        chain = Chain(8, 200)
        begin = time.perf_counter()
        threads.run(chain.program)
        assert chain.is_done()
        assert time.perf_counter() - begin < 30
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_only_tasks_that_go_on_with_others_rows_are_waited_for():
    """A wait costs as much as a short task."""
    kinds = [tasks.LOOK_UP, tasks.NORM, tasks.SPLIT, tasks.INT8_PRODUCT, tasks.ROTATE, tasks.ATTEND, tasks.PRODUCT]
    program = tasks.program([tasks.task(kind, 1) for kind in kinds])
    assert program[:, tasks.IS_AWAITED].astype(bool).tolist() == [False, False, True, True, True, True, True]
    assert program.dtype == np.int64
