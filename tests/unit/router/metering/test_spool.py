"""The files of usage records: torn ends, full disks, restarts."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom_common.tenancy.usage_record import UsageRecord
from router.metering import segment
from router.metering.orphans import finish, without_gaps
from router.metering.recent import HALF_BYTES, RecentRecords, read_recent
from router.metering.spool import Spool, SpoolInUseError


def record(number: int, request_id: str = "", **changes: object) -> bytes:
    made = UsageRecord("r/1", number, request_id or f"req-{number}", "o/p", 100.0, "m")
    return msgspec.json.encode(msgspec.structs.replace(made, **changes))


def numbered(*numbers: int) -> list[tuple[int, bytes]]:
    return [(number, record(number)) for number in numbers]


@given(payloads=st.lists(st.binary(max_size=40), max_size=8), cut=st.integers(min_value=0), junk=st.binary(max_size=24))
def test_whatever_a_crash_leaves_of_a_file_the_whole_records_before_it_are_read(
    payloads: list[bytes], cut: int, junk: bytes
) -> None:
    """A record that was fsync'd must never be lost, and a torn one never be taken for a record."""
    encoded = [segment.encode(number, payload) for number, payload in enumerate(payloads, 1)]
    content = b"".join(encoded)
    at = cut % (len(content) + 1)
    found = list(segment.decode(content[:at] + junk))
    num_whole = sum(sum(map(len, encoded[: i + 1])) <= at for i in range(len(encoded)))
    expected = list(enumerate(payloads, 1))
    assert found[:num_whole] == expected[:num_whole]
    if found != expected[:num_whole]:  # the junk happened to continue the record that was cut
        assert (content[:at] + junk).startswith(b"".join(segment.encode(*one) for one in found))


@given(st.binary(min_size=1, max_size=60), st.integers(min_value=0), st.integers(min_value=1, max_value=255))
def test_a_changed_byte_is_noticed(payload: bytes, position: int, flip: int) -> None:
    """A disk that returns something else than was written must not change a bill."""
    content = bytearray(segment.encode(7, payload))
    content[position % len(content)] ^= flip
    assert list(segment.decode(bytes(content))) == []


@given(
    batches=st.lists(st.integers(min_value=1, max_value=5), min_size=1, max_size=6),
    stored=st.integers(min_value=0, max_value=30),
    torn=st.binary(max_size=30),
)
def test_a_spool_gives_back_all_that_is_not_stored(
    tmp_path_factory: pytest.TempPathFactory, batches: list[int], stored: int, torn: bytes
) -> None:
    """After a crash at any byte, every record whose append had returned is there exactly once, in order."""
    folder = tmp_path_factory.mktemp("spool") / "r" / "1"
    spool = Spool(folder, segment_bytes=200)
    spool.open()
    last = 0
    for size in batches:
        spool.append(numbered(*range(last + 1, last + size + 1)))
        last += size
    stored = min(stored, last)
    spool.trim(stored)
    spool.close()
    newest = max(folder.glob("*.seg"))
    with newest.open("ab") as file:
        file.write(torn)  # an append that never returned
    again = Spool(folder)
    again.open()
    found = again.read(stored + 1, 1000)
    assert [number for number, _ in found][: last - stored] == list(range(stored + 1, last + 1))
    assert again.read(stored + 1, 2) == found[:2]
    again.close()


def test_a_failed_append_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a batch before a later one would end the reading there, and so lose the later one."""
    spool = Spool(tmp_path / "r" / "1")
    spool.open()
    spool.append(numbered(1))
    write = os.write

    def fails_in_the_middle(fd: int, content: bytes) -> int:
        if len(content) > 20:
            return write(fd, content[:20])
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", fails_in_the_middle)
        with pytest.raises(OSError, match="full"):
            spool.append([(2, b"x" * 10)])
    spool.append(numbered(2, 3))
    assert [number for number, _ in spool.read(1, 10)] == [1, 2, 3]


def test_a_spool_of_its_full_size_counts_as_a_full_disk(tmp_path: Path) -> None:
    """Records that cannot be delivered for months must not fill the disk of the machine."""
    spool = Spool(tmp_path / "r" / "1", max_bytes=500)
    spool.open()
    spool.append(numbered(1))
    with pytest.raises(OSError, match="full size"):
        spool.append(numbered(*range(2, 20)))
    assert [number for number, _ in spool.read(1, 10)] == [1]


def test_a_spool_belongs_to_one_process(tmp_path: Path) -> None:
    """Two routers that finished the same spool would give different records the same numbers."""
    spool, other = Spool(tmp_path / "r" / "1"), Spool(tmp_path / "r" / "1")
    spool.open()
    with pytest.raises(SpoolInUseError):
        other.open()
    spool.close()
    other.open()


def test_requests_that_ran_when_the_router_was_killed_get_a_record(tmp_path: Path) -> None:
    """What was delivered of them is known from the last checkpoint, unless they had ended since."""
    spool = Spool(tmp_path / "r" / "1")
    spool.open()
    spool.append(numbered(1, 2))
    spool.write_progress(2, [record(0, "running", num_output_tokens=7), record(0, "ended")])
    spool.append([(3, record(3, "ended"))])
    spool.close()
    again = Spool(tmp_path / "r" / "1")
    again.open()
    assert finish(again, 0) == 4
    [*_, (number, payload)] = again.read(1, 10)
    lost = msgspec.json.decode(payload, type=UsageRecord)
    assert (number, lost.number, lost.request_id, lost.num_output_tokens) == (4, 4, "running", 7)
    assert finish(again, 0) == 4, "a second attempt makes no more records"


@given(num_done=st.integers(min_value=0, max_value=400))
def test_finishing_a_spool_may_be_interrupted_anywhere(tmp_path_factory: pytest.TempPathFactory, num_done: int) -> None:
    """The process that finishes a spool may be killed as well, at any byte of what it writes."""
    folder = tmp_path_factory.mktemp("spool") / "r" / "1"
    spool = Spool(folder)
    spool.open()
    spool.append(numbered(1))
    spool.write_progress(1, [record(0, name) for name in ("a", "b", "c")])
    spool.close()
    progress = (folder / "progress").read_bytes()
    first = Spool(folder)
    first.open()
    finish(first, 0)
    first.close()
    added = max(folder.glob("*.seg"))
    added.write_bytes(added.read_bytes()[:num_done])
    (folder / "progress").write_bytes(progress)
    second = Spool(folder)
    second.open()
    last = finish(second, 0)
    found = [msgspec.json.decode(payload, type=UsageRecord) for _, payload in second.read(1, 100)]
    assert last == 4
    assert [one.number for one in found] == [1, 2, 3, 4]
    assert {one.request_id for one in found} == {"req-1", "a", "b", "c"}
    second.close()
    shutil.rmtree(folder)


def test_numbers_whose_records_are_lost_are_reported_as_such() -> None:
    """Otherwise control would wait for them for ever, and never close the router's leases."""
    found = without_gaps(numbered(3, 5), "r/1", 3, 6)
    assert [number for number, _ in found] == [3, 4, 5, 6]
    assert [msgspec.json.decode(payload, type=UsageRecord).outcome for _, payload in found] == [
        "stop", "void", "stop", "void",
    ]  # fmt: skip


def test_records_that_were_not_in_the_spool_yet_survive_a_kill(tmp_path: Path) -> None:
    """The client has its answer already when the record is still on its way to the disk."""
    spool = Spool(tmp_path / "r" / "1")
    spool.open()
    recent = RecentRecords()
    recent.open(spool.folder)
    for number in range(1, 8):
        recent.put(number, record(number), durable_number=0)
    spool.append(numbered(1, 2, 3))
    spool.write_progress(3, [record(0, "req-6"), record(0, "running")])
    spool.close()
    again = Spool(tmp_path / "r" / "1")
    again.open()
    assert finish(again, 0) == 8
    found = [msgspec.json.decode(payload, type=UsageRecord) for _, payload in again.read(1, 100)]
    assert [one.number for one in found] == list(range(1, 9))
    assert found[-1].request_id == "running", "what has ended is not taken for running"


@given(sizes=st.lists(st.integers(min_value=0, max_value=300_000), max_size=30), lag=st.integers(0, 4))
def test_what_is_not_in_the_spool_is_never_overwritten(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], lag: int
) -> None:
    """The memory is small, and used again and again; a record may be left out, but none be replaced too early."""
    folder = tmp_path_factory.mktemp("recent")
    recent = RecentRecords()
    recent.open(folder)
    was_room = True
    for number, size in enumerate(sizes, 1):
        recent.put(number, b"x" * size, durable_number=max(0, number - lag - 1))
        was_room = was_room and sum(sizes[max(0, number - lag - 1) : number]) < HALF_BYTES // 2
    found = dict(read_recent(folder))
    recent.close()
    for number in range(max(1, len(sizes) - lag), len(sizes) + 1):
        if was_room:
            assert found[number] == b"x" * sizes[number - 1]
    shutil.rmtree(folder)
