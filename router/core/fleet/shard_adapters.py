"""The adapters of one shard: which it has, and how long a request has to wait for one that is not loaded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from kvloom.adapters import Adapter
from router.core.events import ShardAdapter

GUESSED_LOAD_SECONDS: Final = 0.1
"""How long a load takes until the shard has measured one: enough that requests for an adapter stay together."""


class ShardAdapters:
    """Requests that were sent but not started count: the first one for an adapter makes the shard load it."""

    __slots__ = ("_load_seconds", "_loaded_at", "_states")

    def __init__(self) -> None:
        self._states: dict[str, ShardAdapter] = {}
        self._loaded_at: dict[str, float] = {}
        """When adapters that are being loaded are expected to be there."""
        self._load_seconds = GUESSED_LOAD_SECONDS

    @property
    def states(self) -> Iterable[ShardAdapter]:
        return self._states.values()

    def has(self, adapter: Adapter) -> bool:
        """True when the shard has this very adapter, loaded or not."""
        state = self._states.get(adapter.name)
        return state is not None and state.checksum == adapter.checksum

    def wait_seconds(self, adapter: Adapter, now: float) -> float:
        """How long a request that is sent now waits until the adapter is loaded."""
        if self._states[adapter.name].loaded:
            return 0.0
        loaded_at = self._loaded_at.get(adapter.name)
        return self._load_seconds if loaded_at is None else max(0.0, loaded_at - now)

    def note_sent(self, adapter: Adapter, now: float) -> None:
        """A request for an adapter that the shard has was sent there."""
        if not self._states[adapter.name].loaded:
            self._loaded_at.setdefault(adapter.name, now + self._load_seconds)

    def report(self, states: Sequence[ShardAdapter], load_seconds: float, now: float) -> bool:
        """The shard now has these adapters. Returns whether one that it had is gone, or has become another one."""
        before, self._states = self._states, {state.name: state for state in states}
        self._load_seconds = load_seconds or GUESSED_LOAD_SECONDS
        self._loaded_at = {
            name: at
            for name, at in self._loaded_at.items()
            if at > now and self.has(Adapter(name, before[name].checksum)) and not self._states[name].loaded
        }
        return not all(self.has(Adapter(state.name, state.checksum)) for state in before.values())
