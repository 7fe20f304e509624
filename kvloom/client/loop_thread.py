"""The event loop on which all synchronous clients of a process run."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")

STOP_SECONDS = 5.0


class LoopThread:
    """A daemon thread that runs an event loop, from the first `open` to the last `close`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="kvloom", daemon=True)
        self._thread.start()

    @property
    def is_usable(self) -> bool:
        """A thread does not survive a fork."""
        return self._pid == os.getpid() and self._thread.is_alive()

    def run(self, job: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine there, and wait for it. An interrupt of the wait (Ctrl-C) cancels it."""
        if not self.is_usable or threading.current_thread() is self._thread:
            job.close()
            raise RuntimeError("This client cannot be used here: it was made before a fork, or runs in this thread.")
        future = asyncio.run_coroutine_threadsafe(job, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def start(self, job: Coroutine[Any, Any, object]) -> None:
        """Run a coroutine there without waiting for it."""
        if self.is_usable:
            asyncio.run_coroutine_threadsafe(job, self._loop)
        else:
            job.close()

    def stop(self) -> None:
        if self.is_usable:
            self._loop.call_soon_threadsafe(self._loop.stop)
            if threading.current_thread() is not self._thread:
                self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            _cancel_all(self._loop)
            self._loop.close()


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=STOP_SECONDS))
    loop.run_until_complete(loop.shutdown_asyncgens())


_lock = threading.Lock()
_shared: LoopThread | None = None
_num_users = 0


def open_loop_thread() -> LoopThread:
    """The loop of this process, which starts with its first user."""
    global _shared, _num_users
    with _lock:
        if _shared is None or not _shared.is_usable:
            _shared, _num_users = LoopThread(), 0
        _num_users += 1
        return _shared


def close_loop_thread(thread: LoopThread) -> None:
    """One user less. The last one stops the loop."""
    global _shared, _num_users
    with _lock:
        if thread is not _shared:
            return
        _num_users -= 1
        if _num_users:
            return
        _shared = None
    thread.stop()
