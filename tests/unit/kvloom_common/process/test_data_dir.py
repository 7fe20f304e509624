"""Modes of what a fabric keeps: found by `kvloom doctor security`, and made right when a fabric starts."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

import pytest

from kvloom_common.process.data_dir import ENTRIES, make_data_dir_private, open_to_others
from tools.doctor.security import _files
from tools.supervisor.state import RunFolder

FILES: Final = (
    "control.db", "control.db-wal", "control.db-shm", "control.db.lock", "receipts.key.lock", "tenants/edge-0.table",
    "usage/router-0/1/progress", "witness/edge-0.jsonl", "run/state.json", "logs/edge-0.log", ".control.dbx1",
)  # fmt: skip
"""Left open to other users by an earlier version."""


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in FILES:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


def modes(data_dir: Path) -> set[tuple[bool, int]]:
    return {(path.is_dir(), stat.S_IMODE(path.lstat().st_mode)) for path in (data_dir, *data_dir.rglob("*"))}


def test_everything_that_others_may_read_is_found_and_made_private(data_dir: Path):
    everything = {data_dir, *data_dir.rglob("*")}
    assert set(open_to_others(data_dir)) == everything
    assert {finding.outcome for finding in _files(RunFolder(data_dir))} == {"failed"}
    assert set(make_data_dir_private(data_dir)) == everything
    assert modes(data_dir) == {(True, 0o700), (False, 0o600)}
    assert open_to_others(data_dir) == []
    assert {finding.outcome for finding in _files(RunFolder(data_dir))} == {"ok"}


def test_a_start_makes_it_right(data_dir: Path):
    with RunFolder(data_dir).locked():
        assert modes(data_dir) == {(True, 0o700), (False, 0o600)}


def test_keys_that_others_could_read_stay_as_they_are(data_dir: Path):
    """Their processes refuse to start: those who read them still have them."""
    for name in ("secret", "receipts.key"):
        (data_dir / name).touch()
        (data_dir / name).chmod(0o640)
    make_data_dir_private(data_dir)
    assert set(open_to_others(data_dir)) == {data_dir / "secret", data_dir / "receipts.key"}


def test_what_is_not_of_the_fabric_stays_as_it_is(data_dir: Path):
    """`--data-dir` may be a home, and its entries links to the outside."""
    outside = data_dir.parent / "outside"
    outside.mkdir(mode=0o755)
    (outside / "file").touch(0o644)
    (data_dir / "logs" / "link").symlink_to(outside)
    (data_dir / "notes.txt").touch(0o644)
    make_data_dir_private(data_dir)
    assert stat.S_IMODE(data_dir.stat().st_mode) == 0o755
    assert stat.S_IMODE((data_dir / "notes.txt").stat().st_mode) == 0o644
    assert stat.S_IMODE(outside.stat().st_mode) == 0o755
    assert stat.S_IMODE((outside / "file").stat().st_mode) == 0o644
    assert set(open_to_others(data_dir)) == {data_dir, data_dir / "logs" / "link"}


def test_many_are_counted_and_not_listed(data_dir: Path):
    for number in range(50):
        os.close(os.open(data_dir / "logs" / str(number), os.O_CREAT | os.O_WRONLY, 0o644))
        (data_dir / "logs" / str(number)).chmod(0o644)
    findings = list(_files(RunFolder(data_dir)))
    assert len(findings) == 21
    assert findings[-1].detail.startswith(f"{50 + len(FILES) + 8 - 20} more")


def test_every_entry_is_named_once():
    assert len(set(ENTRIES)) == len(ENTRIES)
