"""The rollouts of a machine: each runs in a task of its own, whoever asked for it, and any number of commands follow
it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from tools.failures import CommandError
from tools.supervisor.rollout.rollout import Rollout
from tools.supervisor.rollout.state import RolloutState

MAX_REMEMBERED: Final = 16
"""Rollouts that have ended and whose steps can still be read."""
MAX_LINES: Final = 4096
log = structlog.get_logger()


class RunningRollout:
    """A rollout with its task, and what it has reported."""

    def __init__(
        self, make: Callable[[Callable[[str], None]], Rollout], on_end: Callable[[RolloutState], None]
    ) -> None:
        self._lines: list[str] = []
        self._changed = asyncio.Event()
        self._on_end = on_end
        self.rollout = make(self._report)
        self.task = asyncio.create_task(self._run(), name=f"rollout of {self.rollout.state.new}")

    @property
    def state(self) -> RolloutState:
        return self.rollout.state

    async def _run(self) -> None:
        try:
            await self.rollout.run()
        except Exception:
            log.exception("rollout_failed", model=self.state.new)
            self.state.phase, self.state.reason = "failed", "a fault of the supervisor, which its log describes"
        finally:
            self._on_end(self.state)
            self._changed.set()

    def _report(self, text: str) -> None:
        if len(self._lines) < MAX_LINES:
            self._lines.append(text)
        self._changed.set()

    async def follow(self, on_step: Callable[[str], None]) -> None:
        """Report everything from the beginning. Returns at the end; raises CommandError unless the new version serves
        then."""
        num_told = 0
        while True:
            has_ended, self._changed = self.state.has_ended and self.task.done(), asyncio.Event()
            for line in self._lines[num_told:]:
                on_step(line)
            num_told = len(self._lines)
            if has_ended:
                break
            changed = asyncio.ensure_future(self._changed.wait())
            try:
                await asyncio.wait({changed, self.task}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                changed.cancel()
        if self.state.phase != "done":
            what = "was rolled back" if self.state.phase == "rolled back" else "was not rolled out"
            raise CommandError(f"{self.state.new} {what}: {self.state.reason}")


class Rollouts:
    """By the name of the model. `close` ends all of them."""

    def __init__(self) -> None:
        self._by_name: dict[str, RunningRollout] = {}

    @property
    def running(self) -> Sequence[RolloutState]:
        return [one.state for one in self._by_name.values() if not one.state.has_ended]

    def check_free(self, model: str) -> None:
        """Raises CommandError if the model is one of the two versions of a rollout."""
        for name, one in self._by_name.items():
            if not one.state.has_ended and model in (name, one.state.old, one.state.new):
                raise CommandError(
                    f"{one.state.new} is being rolled out in place of {one.state.old} "
                    f"(kvloom models rollback {name} takes it back)"
                )

    def start(self, name: str, make: Callable[[], RunningRollout]) -> None:
        """Raises CommandError if the model is being rolled out already."""
        self.check_free(name)
        self._by_name.pop(name, None)
        ended = [other for other, one in self._by_name.items() if one.task.done()]
        for other in ended[: max(0, len(self._by_name) - MAX_REMEMBERED + 1)]:
            del self._by_name[other]
        self._by_name[name] = make()

    def find(self, name: str) -> RunningRollout:
        """By the name of the model or of one of the versions. Raises CommandError."""
        for known, one in self._by_name.items():
            if name in (known, one.state.new, one.state.old):
                return one
        raise CommandError(f"there is no rollout of {name}")

    def roll_back(self, name: str, reason: str) -> None:
        """Raises CommandError."""
        one = self.find(name)
        if one.state.has_ended:
            raise CommandError(f"the rollout of {one.state.new} has ended already: it was {one.state.phase}")
        if one.state.phase == "finishing":
            raise CommandError(f"{one.state.new} has all requests already, and {one.state.old} is being unloaded")
        one.rollout.roll_back(reason)

    async def close(self) -> None:
        tasks = [one.task for one in self._by_name.values() if not one.task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
