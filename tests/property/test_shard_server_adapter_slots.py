"""Which adapters are loaded, against a model that only counts, over random histories of sequences and loads."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shard_server.engines.adapters.slots import AdapterSlots

NAMES = ["a", "b", "c", "d"]
MAX_LOADED = 2
PATIENCE_SECONDS = 2.0

Event = tuple[str, int]
EVENTS = st.lists(st.tuples(st.sampled_from(["wait", "leave", "loaded", "failed", "retire"]), st.integers(0, 7)))


class Bench:
    """Carries out what the slots decide, and checks every decision."""

    def __init__(self) -> None:
        self.slots = AdapterSlots(MAX_LOADED, PATIENCE_SECONDS)
        self.now = 0.0
        self.loaded: set[str] = set()
        self.loading: list[str] = []
        self.waiting: dict[str, str] = {}
        self.running: dict[str, str] = {}
        self.retiring: set[str] = set()
        self.num_sequences = 0
        for name in NAMES:
            self.slots.add(name)

    def wait(self, name: str) -> None:
        if name in self.slots:
            self.num_sequences += 1
            sequence = f"s{self.num_sequences}"
            self.waiting[sequence] = name
            self.slots.wait(sequence, name, self.now)

    def leave(self, index: int) -> None:
        live = [*self.waiting, *self.running]
        if live:
            sequence = live[index % len(live)]
            self.waiting.pop(sequence, None)
            self.running.pop(sequence, None)
            self.slots.leave(sequence)

    def loads_end(self, *, well: bool) -> None:
        if self.loading:
            name = self.loading.pop(0)
            if well:
                self.loaded.add(name)
                self.slots.on_loaded(name)
            else:
                failed = self.slots.on_failed(name)
                assert failed == [sequence for sequence, wanted in self.waiting.items() if wanted == name]
                for sequence in failed:
                    del self.waiting[sequence]

    def retire(self, name: str) -> None:
        if name in self.slots:
            self.retiring.add(name)
            self.slots.retire(name)

    def advance(self) -> None:
        self.now += 1.0
        changes = self.slots.advance(self.now)
        for name in changes.evictions:
            assert name not in self.running.values(), "an adapter in use was evicted"
            self.loaded.remove(name)
        for name in changes.loads:
            assert name in self.waiting.values(), "an adapter is loaded for nobody"
            self.loading.append(name)
        assert len(self.loaded) + len(self.loading) <= MAX_LOADED
        for sequence in changes.ready:
            name = self.waiting.pop(sequence)
            assert name in self.loaded, "a sequence was given an adapter that is not loaded"
            self.running[sequence] = name
        for name in changes.retired:
            assert name in self.retiring
            assert name not in self.waiting.values()
            assert name not in self.running.values()
            self.retiring.remove(name)
        assert self.slots.users() == set(self.running.values())
        assert self.slots.wanted() == set(self.waiting.values())

    def apply(self, event: Event) -> None:
        kind, number = event
        match kind:
            case "wait":
                self.wait(NAMES[number % len(NAMES)])
            case "leave":
                self.leave(number)
            case "retire":
                self.retire(NAMES[number % len(NAMES)])
            case _:
                self.loads_end(well=kind == "loaded")
        self.advance()


@given(EVENTS)
def test_no_history_evicts_what_is_in_use_or_leaves_a_sequence_waiting_for_ever(events: list[Event]) -> None:
    """Whatever happens, once running sequences end and loads succeed, every waiting sequence gets its adapter."""
    bench = Bench()
    for event in events:
        bench.apply(event)
    for _ in range(4 * (len(events) + 1)):
        if bench.running:
            bench.leave(len(bench.waiting))  # one that runs
        bench.loads_end(well=True)
        bench.advance()
    assert not bench.waiting
    assert not bench.running
    assert not bench.retiring


def test_a_busy_adapter_does_not_keep_its_slot_for_ever() -> None:
    """Sequences for a loaded adapter keep arriving: without the patience, one that needs its slot would starve."""
    slots = AdapterSlots(1, PATIENCE_SECONDS)
    slots.add("busy")
    slots.add("other")
    slots.wait("b0", "busy", 0.0)
    assert slots.advance(0.0).loads == ["busy"]
    slots.on_loaded("busy")
    assert slots.advance(0.0).ready == ["b0"]
    slots.wait("other", "other", 0.0)
    slots.wait("b1", "busy", 1.0)
    assert slots.advance(1.0).ready == ["b1"]  # overtakes, which costs the other nothing yet
    slots.leave("b0")
    slots.wait("b2", "busy", 2.5)
    assert slots.advance(2.5).ready == []  # the slot becomes free as soon as b1 ends
    slots.leave("b1")
    changes = slots.advance(2.5)
    assert (changes.evictions, changes.loads, changes.ready) == (["busy"], ["other"], [])
    slots.on_loaded("other")
    assert slots.advance(2.6).ready == ["other"]


def test_the_least_recently_used_adapter_goes_first() -> None:
    """The one that was used last is the likeliest to be used again."""
    slots = AdapterSlots(2, PATIENCE_SECONDS)
    for name in NAMES:
        slots.add(name)
    for sequence, name in enumerate("ab"):
        slots.wait(str(sequence), name, 0.0)
        slots.advance(0.0)
        slots.on_loaded(name)
        slots.advance(0.0)
    slots.leave("1")
    slots.leave("0")
    slots.wait("2", "c", 0.0)
    assert slots.advance(0.0).evictions == ["b"]
