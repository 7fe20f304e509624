"""Runs side by side in processes of their own, with their progress on one screen."""

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
from tools.simulate.runs import TellProgress

J = TypeVar("J")
R = TypeVar("R")

_TELL_EVERY_SECONDS: Final = 0.2
_MAX_UNREAD_MESSAGES: Final = 10_000

_worker: dict[str, Any] = {}
"""In a worker process: the queue and the event that it was started with."""


class _StoppedError(Exception):
    """The parent wants no more."""


class RunDisplay:
    """Progress bars on stderr where that is a terminal; else nothing."""

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
            return  # told before the result, read after it
        if index not in self._tasks:
            self._tasks[index] = self._progress.add_task(self._names[index], total=1.0, text=text)
        self._progress.update(self._tasks[index], completed=share, text=text)

    def done(self, index: int) -> None:
        """Its bar goes away: there may be hundreds."""
        self._done.add(index)
        if (task := self._tasks.pop(index, None)) is not None:
            self._progress.remove_task(task)
        if self._total is not None:
            self._progress.advance(self._total)


def perform_all(
    perform: Callable[[J, TellProgress], R],
    jobs: Sequence[J],
    names: Sequence[str],
    num_processes: int,
    on_done: Callable[[J, R], None] | None = None,
) -> list[R]:
    """Results in the order of `jobs`. `on_done` is told each one as it comes. `perform` must be a module's function.

    The first job that raises ends the rest. Raises what it raised, and CommandError when a process died.
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
    """Fresh interpreters: a fork would copy threads' locks in whatever state they are."""

    def __init__(
        self,
        perform: Callable[[J, TellProgress], R],
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
                ended, waiting = wait(waiting, _TELL_EVERY_SECONDS, FIRST_COMPLETED)
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
    """Passes on only so many reports as eyes can follow."""

    def __init__(self, tell: TellProgress) -> None:
        self._tell = tell
        self._next_time = 0.0

    def __call__(self, text: str, share: float) -> None:
        now = time.monotonic()
        if now >= self._next_time:
            self._next_time = now + _TELL_EVERY_SECONDS
            self._tell(text, share)


def _begin_worker(messages: Any, stop: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its workers
    messages.cancel_join_thread()  # progress nobody reads must not keep a process alive
    _worker.update(messages=messages, stop=stop)


def _perform_in_worker(perform: Callable[[J, TellProgress], R], job: J, index: int) -> R:
    def tell(text: str, share: float) -> None:
        if _worker["stop"].is_set():
            raise _StoppedError
        with suppress(Full):
            _worker["messages"].put_nowait((index, text, share))

    return perform(job, _Throttled(tell))
