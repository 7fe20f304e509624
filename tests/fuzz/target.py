"""What a fuzzing target is, and the session that runs its examples."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Final

import uvloop
from hypothesis.strategies import SearchStrategy

from tests.fuzz.log_watch import LogWatch

EXAMPLE_SECONDS: Final = 90.0
"""An example that takes longer hangs."""
INTERNALS: Final = re.compile(r"Traceback|File \"|\b[A-Z]\w*(?:Error|Exception)\b|<class |object at 0x|\.py\b|panicked")
"""What a message to a client or an operator must not have: names of classes and places in the code."""

Check = Callable[[Any], Awaitable[None]]
"""Feeds one input. Raises AssertionError if the target does not do as it should."""


@dataclasses.dataclass(frozen=True)
class Target:
    name: str
    inputs: SearchStrategy[Any]
    """JSON values, see tests/fuzz/__init__.py."""
    open: Callable[[LogWatch], contextlib.AbstractAsyncContextManager[Check]]
    """Starts what is fuzzed. It serves many examples."""
    suite_examples: int
    """How many new examples the test suite tries: about two seconds' worth."""


class Session:
    """Runs examples of a target, on an event loop as the services have. After an example that fails, whatever is
    fuzzed is started again."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._runner: asyncio.Runner | None = None
        self._check: Check | None = None
        self._opened: contextlib.AsyncExitStack
        self._watch = LogWatch()

    def __enter__(self) -> Session:
        self._watch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._close()
        finally:
            self._watch.stop()

    def run(self, value: Any) -> None:
        """Raises what the target's check raises, and AssertionError for what it logged."""
        self._watch.clear()
        try:
            if self._runner is None:
                self._open()
            assert self._runner is not None
            self._runner.run(self._bounded(value))
            self._watch.check()
        except BaseException:
            with contextlib.suppress(Exception):
                self._close()
            raise

    async def _bounded(self, value: Any) -> None:
        assert self._check is not None
        async with asyncio.timeout(EXAMPLE_SECONDS):
            await self._check(value)

    def _open(self) -> None:
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._runner.get_loop().set_exception_handler(self._watch.on_loop_error)

        async def enter() -> Check:
            self._opened = contextlib.AsyncExitStack()
            return await self._opened.enter_async_context(self.target.open(self._watch))

        self._check = self._runner.run(enter())

    def _close(self) -> None:
        runner, self._runner, self._check = self._runner, None, None
        if runner is None:
            return
        try:
            runner.run(self._opened.aclose())
        finally:
            runner.close()


def check_message(message: str) -> None:
    """A message to a client or an operator is short, and tells nothing about the code."""
    assert INTERNALS.search(message) is None, message
    assert len(message) < 2000, message[:200]


def bytes_of(text: str) -> bytes:
    """The bytes that a string of an input stands for."""
    return text.encode("latin-1")


def text_of(raw: bytes) -> str:
    return raw.decode("latin-1")
