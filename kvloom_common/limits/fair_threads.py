"""Threads whose owners take turns: what one of them wants computed waits for one piece of each other's at most, and not
for all that a flood has queued."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, NamedTuple, TypeVar

from kvloom_common.limits.address_limit import KeyedCounts

T = TypeVar("T")
Owner = TypeVar("Owner")


class _Work(NamedTuple):
    future: Future[Any]
    compute: Callable[[], Any]


class FairThreads(Generic[Owner]):
    """Thread-safe. Of several threads an owner has all but one at most, so that long pieces of one owner leave a thread
    to the others."""

    def __init__(
        self, num_threads: int, thread_name_prefix: str, initializer: Callable[[], object] | None = None
    ) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=thread_name_prefix, initializer=initializer)
        self._max_running = max(1, num_threads - 1)
        self._waiting: OrderedDict[Owner, deque[_Work]] = OrderedDict()
        """The owner whose turn is next comes first."""
        self._running = KeyedCounts[Owner]()
        self._lock = threading.Lock()

    def num_waiting(self, owner: Owner) -> int:
        """How many pieces of an owner have not begun."""
        with self._lock:
            return len(self._waiting.get(owner, ()))

    def submit(self, owner: Owner, compute: Callable[[], T]) -> Future[T]:
        """Compute something in a thread. Raises RuntimeError after `shutdown`."""
        future: Future[T] = Future()
        with self._lock:
            self._waiting.setdefault(owner, deque()).append(_Work(future, compute))
        self._pool.submit(self._run)
        return future

    def shutdown(self) -> None:
        """End the threads after what is running. What has not begun is cancelled. Calling it again is safe."""
        with self._lock:
            cancelled = [work for queue in self._waiting.values() for work in queue]
            self._waiting.clear()
        for work in cancelled:
            work.future.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> None:
        """Compute what is due. A piece that was passed over, because its owner had its threads, is due later, when one
        of them is done."""
        while (due := self._take()) is not None:
            owner, work = due
            try:
                if work.future.set_running_or_notify_cancel():
                    _compute(work)
            finally:
                with self._lock:
                    self._running.remove(owner)

    def _take(self) -> tuple[Owner, _Work] | None:
        with self._lock:
            for owner, queue in self._waiting.items():
                if self._running[owner] < self._max_running:
                    work = queue.popleft()
                    if queue:
                        self._waiting.move_to_end(owner)
                    else:
                        del self._waiting[owner]
                    self._running.add(owner)
                    return owner, work
            return None


def _compute(work: _Work) -> None:
    try:
        result = work.compute()
    except BaseException as error:
        work.future.set_exception(error)
    else:
        work.future.set_result(result)
