"""`kvloom-lab chaos` tells growing memory from noise."""

from __future__ import annotations

import random

from lab.chaos.checking.memory import FLAT_MB_PER_HOUR, MemorySamples, Sample, soak_problems, trend_of

MB = 1_000_000


def samples(mb_per_hour: float, *, minutes: float = 25, noise_mb: float = 0.0) -> list[Sample]:
    rng = random.Random(1)
    times = [5.0 * i for i in range(int(minutes * 12))]
    return [(at, int(MB * (100 + mb_per_hour * at / 3600 + noise_mb * rng.uniform(-1, 1)))) for at in times]


def test_a_slow_leak_is_found():
    """Two megabytes an hour are found within the half hour of a soak, even with some noise."""
    for noise_mb in (0.0, 0.2):
        trend = trend_of(samples(2.0, noise_mb=noise_mb))
        assert trend is not None
        assert not trend.is_flat


def test_noise_is_no_leak():
    """False alarms would make real ones worthless."""
    for mb_per_hour, noise_mb in ((0.0, 0.0), (0.0, 3.0), (-5.0, 0.5), (0.9 * FLAT_MB_PER_HOUR, 0.0)):
        trend = trend_of(samples(mb_per_hour, noise_mb=noise_mb))
        assert trend is not None
        assert trend.is_flat, (mb_per_hour, noise_mb)


def test_too_few_samples_have_no_trend():
    """A slope through three points is a guess."""
    assert trend_of(samples(100.0, minutes=0.25)) is None


def test_the_warm_up_does_not_count_and_the_longest_process_does():
    """A process fills its caches at first, and one that was killed at once shows nothing."""
    watch = MemorySamples()
    for at, size in samples(0.0, minutes=30):
        grown = MB * 50 * min(1.0, at / 240.0)
        watch.note(1, "router-0", "router", at, int(size + grown))
    watch.note(2, "router-0", "router", 0.0, 400 * MB)
    (row,) = watch.figures()
    assert (row["incarnations"], row["most_mb"], row["start_mb"], row["end_mb"]) == (2, 400.0, 150.0, 150.0)
    assert row["is_flat"]
    assert 1150 < row["seconds"] < 1200


def test_a_soak_fails_if_a_process_grows_or_dies():
    """Neither may happen without faults."""
    watch = MemorySamples()
    for at, size in samples(30.0, minutes=30):
        watch.note(1, "edge-0", "edge", at, size)
    for at, size in samples(0.0, minutes=30):
        watch.note(2, "redis", "redis", at, size)
    for at, size in samples(30.0, minutes=5):
        watch.note(5, "router-0", "router", at, size)  # short: it still fills up
    for at, size in samples(0.0, minutes=30):
        watch.note(3 if at < 60 else 4, "safety", "safety", at, size)
    problems = soak_problems(watch.figures())
    assert [problem.split()[0] for problem in problems] == ["edge-0", "safety"]
