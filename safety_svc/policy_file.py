"""The current policy: the file is checked once a second and reloaded when it has changed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

from kvloom.v1.safety_service_pb2 import PolicyState
from safety_svc.metrics import POLICY_LOADS
from safety_svc.policy import BUILTIN_POLICY, PolicyError, SafetyPolicy, load_policy
from safety_svc.prefilter import policy_state

log = structlog.get_logger()

POLL_SECONDS: Final = 1.0


class PolicyFile:
    """Holds the current policy. When a changed file is invalid, the old policy remains in force."""

    def __init__(self, path: str, poll_seconds: float = POLL_SECONDS) -> None:
        """An empty `path` means the built-in policy. Raises PolicyError."""
        self._poll_seconds = poll_seconds
        self._path = Path(path) if path else BUILTIN_POLICY
        self._stamp = _stamp(self._path)
        self.current: SafetyPolicy
        self.state: PolicyState
        """The state of the current policy that is sent to routers."""
        self.current, self.state = _load(self._path)
        self._listeners: set[Callable[[], None]] = set()
        self._reported = ""
        """The fault of the current file that was reported last."""

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` after every change until it is passed to `unlisten`."""
        self._listeners.add(listener)

    def unlisten(self, listener: Callable[[], None]) -> None:
        self._listeners.discard(listener)

    async def watch(self) -> None:
        """Reload the file whenever it changes. Never returns."""
        while True:
            await asyncio.sleep(self._poll_seconds)
            await self.reload_if_changed()

    async def reload_if_changed(self) -> None:
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        # Until it has been read: it may be unreadable only for now, for example for want of descriptors.
        self._stamp = None
        try:
            policy, state = await asyncio.to_thread(_load, self._path)
        except PolicyError as error:
            if str(error) != self._reported:
                POLICY_LOADS.labels("refused").inc()
                log.warning("policy_rejected", error=str(error))
            self._reported = str(error)
            return
        self._stamp, self._reported = stamp, ""
        if policy.revision == self.current.revision:
            return
        self.current, self.state = policy, state
        POLICY_LOADS.labels("loaded").inc()
        log.info("policy_loaded", revision=policy.revision)
        for listener in list(self._listeners):
            listener()


def _load(path: Path) -> tuple[SafetyPolicy, PolicyState]:
    """Raises PolicyError."""
    policy = load_policy(path)
    return policy, policy_state(policy)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
