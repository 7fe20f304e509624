"""Threads for TensorRT-LLM's blocking calls. They are daemons: a call that never returns must not keep the process
alive."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

import structlog

log = structlog.get_logger()

T = TypeVar("T")

DRAIN_TIMEOUT_SECONDS: Final = 0.1
"""How long one fetch may wait inside the library."""
EMPTY_PAUSE_SECONDS: Final = 0.01
"""The pause between two fetches when the library does not wait by itself."""
MAX_FAILURES: Final = 5
"""After this many failures in a row the items count as lost."""
FAILURE_PAUSE_SECONDS: Final = 1.0
"""The pause after a failed fetch."""
LOST_PAUSE_FACTOR: Final = 10
"""By how much longer the pause is once the items are lost."""
JOIN_SECONDS: Final = 2.0


async def call_in_daemon(name: str, function: Callable[[], T]) -> T:
    """Like asyncio.to_thread, but in a daemon thread of its own."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def finish(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # pyrefly: ignore[bad-argument-type]

    def run() -> None:
        result, failure = None, None
        try:
            result = function()
        except BaseException as error:
            failure = error if isinstance(error, Exception) else RuntimeError(repr(error))
        with contextlib.suppress(RuntimeError):  # the loop is closed: no coroutine waits any more
            loop.call_soon_threadsafe(finish, result, failure)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await future


class DrainThread(Generic[T]):
    """The only consumer of one of TensorRT-LLM's queues (a second one would receive part of the items).

    The thread repeatedly calls `fetch(timeout_seconds)` and passes the result to `digest`. `deliver` receives the
    digest on the event loop. Nothing more is fetched until `deliver` has returned, so nothing accumulates here. When
    fetching keeps failing, `on_lost(error)` is called on the event loop, once until it succeeds again.
    """

    def __init__(
        self,
        name: str,
        fetch: Callable[[float], Any],
        digest: Callable[[Any], list[T]],
        deliver: Callable[[list[T]], None],
        on_lost: Callable[[Exception], None],
        *,
        failure_pause_seconds: float | None = None,
    ) -> None:
        self._fetch = fetch
        self._digest = digest
        self._deliver = deliver
        self._on_lost = on_lost
        self._failure_pause_seconds = FAILURE_PAUSE_SECONDS if failure_pause_seconds is None else failure_pause_seconds
        self._loop: asyncio.AbstractEventLoop
        self._stop = threading.Event()
        self._delivered = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Called on the event loop on which `deliver` is to run."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Returns when the thread has ended, or after JOIN_SECONDS if it hangs inside the library."""
        self._stop.set()
        self._delivered.set()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, JOIN_SECONDS)

    def _run(self) -> None:
        num_failures = 0
        while not self._stop.is_set():
            items: list[Any] = []
            try:
                items = self._digest(self._fetch(DRAIN_TIMEOUT_SECONDS))
                num_failures = 0
            except (asyncio.QueueEmpty, queue.Empty, TimeoutError):
                pass  # some versions raise these when there is nothing to fetch
            except Exception as error:
                num_failures += 1
                if num_failures <= MAX_FAILURES:
                    log.warning("trtllm_fetch_failed", thread=self._thread.name, error=repr(error))
                if num_failures == MAX_FAILURES:
                    self._on_loop(self._on_lost, error)
                is_lost = num_failures >= MAX_FAILURES
                self._stop.wait(self._failure_pause_seconds * (LOST_PAUSE_FACTOR if is_lost else 1))
            if not items:
                self._stop.wait(EMPTY_PAUSE_SECONDS)
                continue
            self._delivered.clear()
            if not self._on_loop(self._hand_over, items):
                return
            self._delivered.wait()

    def _hand_over(self, items: list[Any]) -> None:
        try:
            if not self._stop.is_set():
                self._deliver(items)
        finally:
            self._delivered.set()

    def _on_loop(self, callback: Callable[..., None], *arguments: Any) -> bool:
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:  # the loop is closed
            return False
        return True
