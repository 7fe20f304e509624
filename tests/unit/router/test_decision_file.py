"""The decision file stays within its bounds on disk and in memory, whatever the disk does."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom_common.process.service import StartError
from router.decisions.file import DecisionWriter, Entry, RotatingFile
from tests.examples import num_examples
from tests.waiting import eventually

HEADER = b"# head\n"


def line(number: int, size: int = 20) -> bytes:
    return f"{number}".encode().ljust(size - 1, b".") + b"\n"


@given(sizes=st.lists(st.integers(8, 130), max_size=40), batch=st.integers(1, 7))
@settings(max_examples=num_examples(50))
def test_files_stay_within_their_size_and_each_has_a_header(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], batch: int
) -> None:
    """There are at most two files of at most max_bytes, and they contain the latest lines, complete and in order."""
    path = tmp_path_factory.mktemp("decisions") / "log"
    file = RotatingFile(path, max_bytes=120)
    lines = [line(number, size) for number, size in enumerate(sizes)]
    entries: list[Entry] = [(HEADER if number == 0 else b"", text) for number, text in enumerate(lines)]
    num_left_out = sum(file.append(entries[start : start + batch]) for start in range(0, len(entries), batch))
    file.close()
    fitting = [text for text in lines if len(HEADER) + len(text) <= 120]
    assert num_left_out == len(lines) - len(fitting)
    files = [file for file in (path.with_name("log.1"), path) if file.exists()]
    contents = [file.read_bytes() for file in files]
    assert all(len(content) <= 120 and (not content or content.startswith(HEADER)) for content in contents)
    kept = [text for content in contents for text in content.splitlines(keepends=True) if text != HEADER]
    assert kept == fitting[len(fitting) - len(kept) :]
    assert len(kept) >= min(1, len(fitting))


def test_a_restart_appends_behind_a_torn_line(tmp_path: Path) -> None:
    """The lines of an earlier run stay, and the line that was cut off when it was killed stays a line of its own."""
    path = tmp_path / "log"
    path.write_bytes(b"old\nhalf")
    file = RotatingFile(path, max_bytes=1000)
    file.open()
    file.append([(HEADER, line(1))])
    file.append([(b"", line(2))])
    file.close()
    assert path.read_bytes() == b"old\nhalf\n" + HEADER + line(1) + line(2)


def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    """Block hashes reveal to readers who know a text that it was sent."""
    file = RotatingFile(tmp_path / "log", max_bytes=1000)
    file.open()
    file.close()
    assert (tmp_path / "log").stat().st_mode & 0o077 == 0


def test_after_a_failure_the_file_starts_with_the_header(tmp_path: Path) -> None:
    """After a disk recovers there must be no lines whose header was lost with the failed write."""
    folder = tmp_path / "later"
    file = RotatingFile(folder / "log", max_bytes=1000)
    with pytest.raises(FileNotFoundError):
        file.append([(HEADER, line(1))])
    folder.mkdir()
    file.append([(b"", line(2))])
    file.close()
    assert (folder / "log").read_bytes() == HEADER + line(2)


KEY = "router.decision_log.path"


class Dropped:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, count: int) -> None:
        self.count += count


async def test_what_waits_is_written_before_the_end(tmp_path: Path) -> None:
    """A graceful stop loses nothing."""
    dropped = Dropped()
    writer = DecisionWriter(RotatingFile(tmp_path / "log", 1000), dropped, config_key=KEY)
    writer.open()
    running = asyncio.create_task(writer.run())
    assert writer.put(HEADER, line(1))
    writer.close()
    async with asyncio.timeout(5):
        await running
    assert not writer.put(b"", line(2))
    assert (tmp_path / "log").read_bytes() == HEADER + line(1)
    assert dropped.count == 1


async def test_lines_are_dropped_and_counted_when_the_disk_is_slow(tmp_path: Path) -> None:
    """Memory is bounded; lines that are being written count until they are written."""
    dropped = Dropped()
    writer = DecisionWriter(RotatingFile(tmp_path / "log", 1000), dropped, max_waiting_bytes=50, config_key=KEY)
    assert writer.put(HEADER, line(1))
    assert writer.put(b"", line(2))
    assert not writer.put(b"", line(3))
    running = asyncio.create_task(writer.run())
    async with asyncio.timeout(5):
        await eventually(lambda: writer.put(b"", line(4)), "free room")
        writer.close()
        await running
    assert (tmp_path / "log").read_bytes() == HEADER + line(1) + line(2) + line(4)
    assert dropped.count >= 1


async def test_a_disk_that_fails_stops_neither_the_router_nor_the_log(tmp_path: Path) -> None:
    """Lines that do not fit on a full disk are counted, and the log continues when there is room again."""
    folder = tmp_path / "mount"
    folder.mkdir()
    dropped = Dropped()
    writer = DecisionWriter(RotatingFile(folder / "log", 30), dropped, config_key=KEY)
    writer.open()
    running = asyncio.create_task(writer.run())
    (folder / "log.1").mkdir()  # Rotation cannot replace a folder that is not empty.
    (folder / "log.1" / "x").touch()
    writer.put(HEADER, line(1))
    writer.put(b"", line(2))
    async with asyncio.timeout(5):
        await eventually(lambda: dropped.count, "a dropped line")
        (folder / "log.1" / "x").unlink()
        (folder / "log.1").rmdir()
        writer.put(b"", line(3))
        writer.close()
        await running
    assert (folder / "log").read_bytes() == HEADER + line(3)


async def test_a_path_that_cannot_be_written_is_reported_at_the_start(tmp_path: Path) -> None:
    """A mistake in the configuration must not first show when the log is needed."""
    writer = DecisionWriter(RotatingFile(tmp_path / "missing" / "log", 1000), Dropped(), config_key=KEY)
    with pytest.raises(StartError, match=r"router\.decision_log\.path: .*missing.*No such file"):
        writer.open()
