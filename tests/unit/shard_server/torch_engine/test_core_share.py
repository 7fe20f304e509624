"""Engines of one machine share its cores: alone each has all, together each has its part."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shard_server.engines.torch_engine.core_share import CoreShare, available_cores, num_computing, threads_of

NOW = 10**12
MS = 10**6
SECOND = 10**9


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([], 1),
        ([0, 0], 1),
        ([-(NOW - 5 * MS)], 2),
        ([-(NOW - 5 * SECOND), -(NOW - 1)], 3),
        ([NOW - 5 * MS], 2),
        ([NOW - 50 * MS], 1),
        ([-(NOW - 60 * SECOND)], 1),
    ],
    ids=["alone", "never computed", "in a step", "two in steps", "between steps", "idle", "died in a step"],
)
def test_engines_count_while_they_compute(others: list[int], expected: int):
    """An idle engine leaves its cores to the others, and so does one that died."""
    assert num_computing([-(NOW - 1), *others], 0, NOW) == expected


def test_every_engine_has_at_least_one_thread():
    """More engines than cores slow one another down, but none of them stands still."""
    assert [threads_of(8, engines) for engines in (1, 2, 3, 8, 9)] == [8, 4, 2, 1, 1]


def test_two_engines_see_one_another(tmp_path: Path):
    """In one process, too: tests and tools have several."""
    one, other = (CoreShare(4, tmp_path / "deep" / "cores") for _ in range(2))
    assert one.begin() == 4
    assert other.begin() == 2
    one.end()
    assert one.begin() == 2


def test_a_dead_process_leaves_its_slot(tmp_path: Path):
    """Shards restart for months."""
    path = tmp_path / "cores"
    code = f"""
from pathlib import Path
from shard_server.engines.torch_engine.core_share import CoreShare
shares = [CoreShare(4, Path({str(path)!r})) for _ in range(64)]
assert len({{share._own for share in shares}}) == 64
"""
    for _ in range(2):
        subprocess.run((sys.executable, "-c", code), check=True)


def test_where_nothing_can_be_shared_an_engine_has_all_cores(tmp_path: Path):
    """A read-only home must not keep a shard from computing, nor must too many others."""
    assert CoreShare(4, Path("/proc/nowhere/cores")).begin() == 4
    shares = [CoreShare(4, tmp_path / "cores") for _ in range(70)]
    assert all(share.begin() >= 1 for share in shares)


def test_the_machine_has_cores():
    """Of the affinity, and of the container's quota."""
    assert available_cores() >= 1
