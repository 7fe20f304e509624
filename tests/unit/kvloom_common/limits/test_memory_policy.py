"""When a process refuses work for want of memory, and when it returns freed memory."""

from __future__ import annotations

import mmap

import pytest

from kvloom_common.limits.memory_watch import (
    CHECK_SAMPLES,
    NUM_STEADY_SAMPLES,
    RETURN_BYTES,
    MemoryLevel,
    MemoryPolicy,
    ResidentMemory,
    memory_limit_bytes,
)

MB = 2**20


def levels(policy: MemoryPolicy, *samples_mb: int) -> list[MemoryLevel]:
    return [policy.observe(sample * MB).level for sample in samples_mb]


def test_levels_begin_and_end() -> None:
    """Large work is refused before the limit is reached, and all work at the limit."""
    assert levels(MemoryPolicy(1000 * MB), 100, 849, 851, 999, 1001, 900, 100) == [
        *(MemoryLevel.NORMAL, MemoryLevel.NORMAL, MemoryLevel.HIGH, MemoryLevel.HIGH),
        *(MemoryLevel.FULL, MemoryLevel.HIGH, MemoryLevel.NORMAL),
    ]


def test_a_level_does_not_flicker() -> None:
    """A process at the edge of a level would otherwise refuse and admit in turns, and log each change."""
    policy = MemoryPolicy(1000 * MB)
    assert levels(policy, 851, 840, 851, 820) == [MemoryLevel.HIGH] * 4
    assert levels(policy, 800) == [MemoryLevel.NORMAL]
    assert levels(policy, 1001, 960, 1001) == [MemoryLevel.FULL] * 3


def test_memory_is_returned_once_after_a_burst_has_ended() -> None:
    """Returning costs milliseconds: not during a burst, and not again for memory that is really in use."""
    policy = MemoryPolicy(10_000 * MB)
    grown = 100 * MB + 2 * RETURN_BYTES
    verdicts = [policy.observe(resident) for resident in (100 * MB, grown, grown)]
    assert not any(verdict.returns_memory for verdict in verdicts)
    assert [policy.observe(grown).returns_memory for _ in range(NUM_STEADY_SAMPLES - 1)][-1]
    policy.returned(grown - MB)
    checks = []
    for _ in range(3 * CHECK_SAMPLES):
        checks.append(policy.observe(grown - MB).returns_memory)
        if checks[-1]:
            policy.returned(grown - MB)
    assert sum(checks) == 1, "once more, for what the end of the burst has freed"


def test_growth_counts_from_the_least_that_was_seen() -> None:
    """Memory that a process has freed by itself may be needed again and be freed again."""
    policy = MemoryPolicy(10_000 * MB)
    policy.returned(200 * MB)
    for _ in range(5):
        assert not policy.observe(100 * MB).returns_memory
    policy.observe(100 * MB + RETURN_BYTES)
    policy.observe(100 * MB + RETURN_BYTES)
    assert policy.observe(100 * MB + RETURN_BYTES).returns_memory


@pytest.mark.parametrize("configured_bytes", [0, 123 * MB])
def test_the_limit_is_configured_or_a_share_of_what_there_is(configured_bytes: int) -> None:
    """An operator who sets nothing is protected, too."""
    limit = memory_limit_bytes(configured_bytes)
    assert limit == configured_bytes or (not configured_bytes and 16 * MB < limit < 2**50)


def test_resident_memory_grows_with_what_is_held() -> None:
    """The figure is this process's, in bytes."""
    memory = ResidentMemory()
    before = memory.read()
    with mmap.mmap(-1, 64 * MB) as held:  # The allocator could give memory that the process has already.
        for page in range(0, 64 * MB, mmap.PAGESIZE):
            held[page] = 1
        assert 60 * MB < memory.read() - before < 200 * MB
    memory.close()
