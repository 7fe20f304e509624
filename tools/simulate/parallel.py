"""Runs jobs in parallel processes and shows their progress."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from queue import Empty, Full
from typing import Any, Final, Generic, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tools.failures import CommandError
from tools.simulate.runs import ProgressCallback

J = TypeVar("J")
R = TypeVar("R")

_REPORT_INTERVAL_SECONDS: Final = 0.2
_MAX_UNREAD_MESSAGES: Final = 10_000

_worker: dict[str, Any] = {}
"""The queue and the event of a worker process."""


class _StoppedError(Exception):
    """The parent has stopped the run."""


class RunDisplay:
    """Progress bars on stderr if it is a terminal, otherwise nothing."""

    def __init__(self, names: Sequence[str]) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}% {task.fields[text]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not sys.stderr.isatty(),
        )
        self._names = names
        self._tasks: dict[int, TaskID] = {}
        self._done: set[int] = set()
        self._total = self._progress.add_task("all", total=len(names), text="") if len(names) > 1 else None

    @contextmanager
    def shown(self) -> Iterator[None]:
        with self._progress:
            yield

    def update(self, index: int, text: str, share: float) -> None:
        if index in self._done:
            return  # sent before the result, but read after it
        if index not in self._tasks:
            self._tasks[index] = self._progress.add_task(self._names[index], total=1.0, text=text)
        self._progress.update(self._tasks[index], completed=share, text=text)

    def done(self, index: int) -> None:
        """Remove the bar of a finished job, because there may be hundreds."""
        self._done.add(index)
        if (task := self._tasks.pop(index, None)) is not None:
            self._progress.remove_task(task)
        if self._total is not None:
            self._progress.advance(self._total)


def perform_all(
    perform: Callable[[J, ProgressCallback], R],
    jobs: Sequence[J],
    names: Sequence[str],
    num_processes: int,
    on_done: Callable[[J, R], None] | None = None,
) -> list[R]:
    """Returns the results in the order of `jobs`. `on_done` is called with each one as it arrives. `perform` must be a
    function of a module.

    The first job that raises stops the others. Raises its exception, or CommandError if a process died.
    """
    display = RunDisplay(names)
    results: dict[int, R] = {}

    def keep(index: int, result: R) -> None:
        results[index] = result
        display.done(index)
        if on_done is not None:
            on_done(jobs[index], result)

    with display.shown():
        if min(num_processes, len(jobs)) <= 1:
            for index, job in enumerate(jobs):
                keep(index, perform(job, _Throttled(lambda text, share, i=index: display.update(i, text, share))))
        else:
            _Pool(perform, jobs, num_processes, display, keep).run()
    return [results[index] for index in range(len(jobs))]


class _Pool(Generic[J, R]):
    """Workers in new interpreters, because a fork would copy the locks of threads in an arbitrary state."""

    def __init__(
        self,
        perform: Callable[[J, ProgressCallback], R],
        jobs: Sequence[J],
        num_processes: int,
        display: RunDisplay,
        keep: Callable[[int, R], None],
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._messages = context.Queue(_MAX_UNREAD_MESSAGES)
        self._stop = context.Event()
        self._executor = ProcessPoolExecutor(
            min(num_processes, len(jobs)), context, _begin_worker, (self._messages, self._stop)
        )
        self._perform = perform
        self._jobs = jobs
        self._display = display
        self._keep = keep

    def run(self) -> None:
        try:
            indices: dict[Future[R], int] = {
                self._executor.submit(_perform_in_worker, self._perform, job, index): index
                for index, job in enumerate(self._jobs)
            }
            waiting = set(indices)
            while waiting:
                ended, waiting = wait(waiting, _REPORT_INTERVAL_SECONDS, FIRST_COMPLETED)
                self._show_messages()
                for future in ended:
                    self._keep(indices[future], future.result())
        except BrokenProcessPool as error:
            raise CommandError("a simulation's process died (out of memory? try fewer --jobs)") from error
        finally:
            self._stop.set()
            self._executor.shutdown(cancel_futures=True)
            self._messages.close()

    def _show_messages(self) -> None:
        for _ in range(_MAX_UNREAD_MESSAGES):
            try:
                index, text, share = self._messages.get_nowait()
            except Empty:
                return
            self._display.update(index, text, share)


class _Throttled:
    """Forwards progress reports at a limited rate."""

    def __init__(self, report: ProgressCallback) -> None:
        self._report = report
        self._next_time = 0.0

    def __call__(self, text: str, share: float) -> None:
        now = time.monotonic()
        if now >= self._next_time:
            self._next_time = now + _REPORT_INTERVAL_SECONDS
            self._report(text, share)


def _begin_worker(messages: Any, stop: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group, but the parent stops its workers
    messages.cancel_join_thread()  # unread progress must not keep a process alive
    _worker.update(messages=messages, stop=stop)


def _perform_in_worker(perform: Callable[[J, ProgressCallback], R], job: J, index: int) -> R:
    def report(text: str, share: float) -> None:
        if _worker["stop"].is_set():
            raise _StoppedError
        with suppress(Full):
            _worker["messages"].put_nowait((index, text, share))

    return perform(job, _Throttled(report))
