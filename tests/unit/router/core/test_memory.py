"""Ended requests are freed without the help of the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from router.core.actions import SubmitAttempt
from router.core.live import Choice, LiveRequest
from tests.fakes.core_rig import CoreRig


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Objects that already exist, a million after other tests, are hidden from `gc.get_objects`, which would otherwise
    walk them at every count."""
    gc.collect()
    gc.disable()
    gc.freeze()
    yield
    gc.unfreeze()
    gc.enable()


def count(kind: type) -> int:
    return sum(type(thing) is kind for thing in gc.get_objects())


@pytest.mark.parametrize("slots", [(1,), (1, 2)])
def test_answers_that_ended_are_freed_at_once(no_collector: None, slots: tuple[int, ...]):
    """The collector runs only after thousands of requests; with their prompts and answers they are megabytes until
    then, and its run is a pause. Some requests stay, without their answers, until their deadline is checked."""
    choices_before, requests_before = count(Choice), count(LiveRequest)
    rig = CoreRig()
    rig.add_shard()
    for number in range(150):
        (attempt,) = (action for action in rig.submit(f"r{number}", slots=slots) if isinstance(action, SubmitAttempt))
        shard_slots = [choice.slot for choice in attempt.choices]
        for shard_slot in shard_slots:
            rig.start("s0", shard_slot)
        assert count(Choice) == choices_before + len(slots)
        for shard_slot in shard_slots:
            rig.finish("s0", shard_slot)
        rig.log.clear()
    assert count(Choice) == choices_before
    assert count(LiveRequest) <= requests_before + 80
