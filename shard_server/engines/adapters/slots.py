"""Decides which adapters are loaded. Pure: the caller loads, and says when it has.

Sequences get their adapters in the order of their arrival: one whose adapter must be loaded does not keep others from
those that are. An adapter is evicted only when no sequence uses it, the least recently used one first. So that a busy
adapter cannot keep its slot for ever, a sequence that has waited for a slot longer than the patience is not overtaken
any more: the slots then become free as the running sequences end.
"""

from __future__ import annotations

import dataclasses
import enum


class _State(enum.Enum):
    UNLOADED = enum.auto()
    LOADING = enum.auto()
    LOADED = enum.auto()


@dataclasses.dataclass(slots=True)
class _Slot:
    """One registered adapter."""

    state: _State = _State.UNLOADED
    num_users: int = 0
    """Sequences that have been given the adapter and have not left."""
    last_used: int = 0
    """Larger for a later use."""
    retires: bool = False
    """True when the adapter goes as soon as no sequence needs it any more."""


@dataclasses.dataclass(slots=True)
class SlotChanges:
    """Lists what the caller does now."""

    evictions: list[str] = dataclasses.field(default_factory=list)
    """Adapters whose weights are dropped. They come first: they make room."""
    loads: list[str] = dataclasses.field(default_factory=list)
    """Adapters to load; `on_loaded` or `on_failed` follows for each."""
    ready: list[str] = dataclasses.field(default_factory=list)
    """Sequences that may begin: their adapters are loaded, and stay until `leave`."""
    retired: list[str] = dataclasses.field(default_factory=list)
    """Adapters that are not registered any more."""


class AdapterSlots:
    """`max_loaded` adapters at most are loaded or being loaded. Times are in seconds."""

    def __init__(self, max_loaded: int, patience_seconds: float) -> None:
        self.max_loaded = max_loaded
        self._patience_seconds = patience_seconds
        self._slots: dict[str, _Slot] = {}
        self._waiting: dict[str, tuple[str, float]] = {}
        """By sequence, in the order of arrival: its adapter and since when it waits."""
        self._users: dict[str, str] = {}
        """The adapters of the sequences that have been given one."""
        self._num_uses = 0

    def __contains__(self, name: str) -> bool:
        """True when sequences may ask for the adapter."""
        slot = self._slots.get(name)
        return slot is not None and not slot.retires

    @property
    def names(self) -> list[str]:
        """The adapters that sequences may ask for, in the order of their registration."""
        return [name for name in self._slots if name in self]

    def is_loaded(self, name: str) -> bool:
        return name in self._slots and self._slots[name].state is _State.LOADED

    def is_retiring(self, name: str) -> bool:
        return name in self._slots and self._slots[name].retires

    def adapter_of(self, sequence: str) -> str:
        """The adapter that a sequence has been given."""
        return self._users[sequence]

    def users(self) -> set[str]:
        """The adapters that sequences are using."""
        return set(self._users.values())

    def wanted(self) -> set[str]:
        """The adapters that sequences wait for."""
        return {name for name, _ in self._waiting.values()}

    def add(self, name: str) -> None:
        """Register an adapter whose name is free."""
        assert name not in self._slots, f"{name} is registered"
        self._slots[name] = _Slot()

    def retire(self, name: str) -> None:
        """Take an adapter away once no sequence needs it; `retired` says when."""
        self._slots[name].retires = True

    def wait(self, sequence: str, name: str, now: float) -> None:
        """A sequence asks for an adapter that is in `self`."""
        assert name in self
        assert sequence not in self._waiting
        assert sequence not in self._users
        self._waiting[sequence] = name, now

    def leave(self, sequence: str) -> None:
        """A sequence has ended, whether it has its adapter or waits for it; unknown ones are ignored."""
        self._waiting.pop(sequence, None)
        name = self._users.pop(sequence, None)
        if name is not None:
            self._slots[name].num_users -= 1
            self._use(self._slots[name])

    def on_loaded(self, name: str) -> None:
        slot = self._slots[name]
        assert slot.state is _State.LOADING
        slot.state = _State.LOADED
        self._use(slot)

    def on_failed(self, name: str) -> list[str]:
        """Returns the sequences that waited for the adapter. They wait no more."""
        assert self._slots[name].state is _State.LOADING
        self._slots[name].state = _State.UNLOADED
        failed = [sequence for sequence, (wanted, _) in self._waiting.items() if wanted == name]
        for sequence in failed:
            del self._waiting[sequence]
        return failed

    def advance(self, now: float) -> SlotChanges:
        """Returns what follows from the calls since the last one. May be called at any time."""
        changes = SlotChanges()
        self._take_retired(changes)
        is_held_up = False
        for sequence, (name, since) in list(self._waiting.items()):
            slot = self._slots[name]
            if slot.state is _State.UNLOADED:
                if self._make_room(changes):
                    slot.state = _State.LOADING
                    changes.loads.append(name)
                elif now - since >= self._patience_seconds:
                    is_held_up = True
            elif slot.state is _State.LOADED and not is_held_up:
                del self._waiting[sequence]
                self._users[sequence] = name
                slot.num_users += 1
                self._use(slot)
                changes.ready.append(sequence)
        return changes

    def _take_retired(self, changes: SlotChanges) -> None:
        wanted = self.wanted()
        for name, slot in list(self._slots.items()):
            if slot.retires and not slot.num_users and name not in wanted and slot.state is not _State.LOADING:
                if slot.state is _State.LOADED:
                    changes.evictions.append(name)
                del self._slots[name]
                changes.retired.append(name)

    def _make_room(self, changes: SlotChanges) -> bool:
        """Returns True when another adapter may be loaded, if need be in place of one that nobody uses."""
        held = [slot for slot in self._slots.values() if slot.state is not _State.UNLOADED]
        if len(held) < self.max_loaded:
            return True
        idle = [
            (slot.last_used, name)
            for name, slot in self._slots.items()
            if slot.state is _State.LOADED and not slot.num_users
        ]
        if not idle:
            return False
        _, name = min(idle)
        self._slots[name].state = _State.UNLOADED
        changes.evictions.append(name)
        return True

    def _use(self, slot: _Slot) -> None:
        self._num_uses += 1
        slot.last_used = self._num_uses
