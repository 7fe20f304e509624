"""An asyncio event loop in virtual time, in which a simulated process runs coroutines of the product as they are."""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from lab.dst.checker import Violation
from lab.dst.timeline import Timeline

_T = TypeVar("_T")
_Call = tuple[asyncio.Handle, contextvars.Context, Callable[..., object], tuple[Any, ...]]


class VirtualLoop(asyncio.AbstractEventLoop):
    """That of one process: it runs nothing while the process is paused, and nothing more once it is dead. It has no
    threads, sockets or subprocesses. An exception that no task catches ends the simulation."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._tasks: list[asyncio.Task[Any]] = []
        self._due: deque[_Call] = deque()
        self._num_pauses = 0
        self.is_alive = True

    # -- the process --------------------------------------------------------------------------------------------------

    def start(self, coroutine: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Run a coroutine until it returns or the process dies."""
        task = self.create_task(coroutine)
        task.add_done_callback(self._raise_error)
        return task

    def pause(self) -> None:
        """Until `unpause` nothing runs. Then everything that has become due does, in the order in which it did."""
        self._num_pauses += 1

    def unpause(self) -> None:
        self._num_pauses -= 1
        self._timeline.after(0.0, self._run_due)

    @property
    def is_paused(self) -> bool:
        return self._num_pauses > 0

    def kill(self) -> None:
        """The process dies. Its tasks are unwound, so that nothing is left of them; whatever they use must see by
        `is_alive` that what they do meanwhile reaches nobody."""
        self.is_alive = False
        self._num_pauses = 0
        for task in self._tasks:
            task.cancel()
        while self._due:
            self._run_due()

    def _raise_error(self, task: asyncio.Task[Any]) -> None:
        if self.is_alive and not task.cancelled() and (error := task.exception()) is not None:
            raise error

    def _raise_violation(self, task: asyncio.Task[Any]) -> None:
        """Raises what a checker has found: a task whose result nothing waits for must not keep it."""
        if not task.cancelled() and isinstance(error := task.exception(), Violation) and self.is_alive:
            raise error

    def _run_due(self) -> None:
        """One turn: what it makes due belongs to the next one."""
        if self._num_pauses:
            return
        for _ in range(len(self._due)):
            handle, context, callback, args = self._due.popleft()
            if not handle.cancelled():
                outer = asyncio._get_running_loop()
                asyncio._set_running_loop(self)
                try:
                    context.run(callback, *args)
                finally:
                    asyncio._set_running_loop(outer)

    def _take(self, call: _Call) -> None:
        self._due.append(call)
        self._run_due()

    # -- what asyncio needs of a loop ---------------------------------------------------------------------------------

    def time(self) -> float:
        return self._timeline.now

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        context = context or contextvars.copy_context()
        handle = asyncio.Handle(callback, args, self, context)
        self._due.append((handle, context, callback, args))
        if self.is_alive:
            self._timeline.after(0.0, self._run_due)
        return handle

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        context = context or contextvars.copy_context()
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        if self.is_alive:
            self._timeline.at(when, self._take, (handle, context, callback, args))
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Any,
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        task.add_done_callback(self._raise_violation)
        self._tasks = [one for one in self._tasks if not one.done()] + [task]
        return task

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        raise context.get("exception") or RuntimeError(context["message"])

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It stays in the queue and is skipped."""
