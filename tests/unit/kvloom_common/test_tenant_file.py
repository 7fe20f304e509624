"""The copy of the table of tenants on disk: whatever happened to the file, what is read was once the table."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvloom.v1.control_service_pb2 import FollowResponse
from kvloom_common.access.tenant_file import TenantFile


def written(folder: Path) -> Path:
    """A snapshot in two parts, and a change."""
    path = folder / "tenants" / "router-0.table"
    file = TenantFile(path)
    file.begin_snapshot()
    for part in (
        FollowResponse(table_id="table", begins_snapshot=True),
        FollowResponse(table_id="table", version=3, is_complete=True),
    ):
        file.add_to_snapshot(part)
    file.complete_snapshot()
    change = FollowResponse(table_id="table", version=4, is_complete=True, removed_keys=["k"])
    file.append(change)
    file.close()
    return path


def test_a_copy_is_private_and_has_its_changes(tmp_path: Path) -> None:
    """Hashes of keys are no secrets, but names of tenants are nobody's business."""
    path = written(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    table, current_at = TenantFile(path).load()
    assert (table.table_id, table.version) == ("table", 4)
    assert current_at == pytest.approx(time.time(), abs=60)


def test_every_prefix_of_a_copy_is_an_older_table_or_none(tmp_path: Path) -> None:
    """A process may end while it writes, and a disk may fill up."""
    path = written(tmp_path)
    content = path.read_bytes()
    seen: set[int] = set()
    for size in range(len(content)):
        path.write_bytes(content[:size])
        table, _ = TenantFile(path).load()
        assert table.version in (0, 3)
        assert table.is_empty == (table.version == 0)
        seen.add(table.version)
        if not table.is_empty:  # what is added now can be read as well
            file = TenantFile(path)
            file.load()
            file.append(FollowResponse(table_id="table", version=5, is_complete=True))
            file.close()
            assert TenantFile(path).load()[0].version == 5
    assert seen == {0, 3}


def test_a_damaged_copy_is_not_believed(tmp_path: Path) -> None:
    """A flipped bit could give a key to another tenant."""
    path = written(tmp_path)
    content = bytearray(path.read_bytes())
    content[10] ^= 1
    path.write_bytes(content)
    assert TenantFile(path).load()[0].is_empty


def test_reading_does_not_make_a_copy_younger(tmp_path: Path) -> None:
    """Restarts while control is away would otherwise let revoked keys be used for ever."""
    path = written(tmp_path)
    before = TenantFile(path).load()[1]
    assert TenantFile(path).load()[1] == before


def test_a_snapshot_that_breaks_off_leaves_the_copy_as_it_was(tmp_path: Path) -> None:
    """Otherwise a restart of control while it sends would take everybody's access."""
    path = written(tmp_path)
    file = TenantFile(path)
    file.load()
    file.begin_snapshot()
    file.add_to_snapshot(FollowResponse(table_id="other", begins_snapshot=True))
    file.drop_snapshot()
    file.append(FollowResponse(table_id="table", version=5, is_complete=True))
    file.close()
    assert TenantFile(path).load()[0].version == 5
    assert [found.name for found in path.parent.iterdir()] == [path.name]


def test_a_copy_that_is_replaced_is_left_to_be_closed(tmp_path: Path) -> None:
    """To close it frees its content, which holds up an event loop if that is large."""
    file = TenantFile(written(tmp_path))
    file.load()
    file.begin_snapshot()
    file.add_to_snapshot(FollowResponse(table_id="other", version=1, begins_snapshot=True, is_complete=True))
    replaced = file.complete_snapshot()
    assert replaced is not None
    assert not replaced.closed
    replaced.close()
    file.close()
    assert TenantFile(tmp_path / "tenants" / "router-0.table").load()[0].table_id == "other"


def test_a_disk_that_takes_nothing_stops_nothing(tmp_path: Path) -> None:
    """Serving matters more than the copy."""
    (tmp_path / "tenants").write_text("a file where a folder should be")
    file = TenantFile(tmp_path / "tenants" / "router-0.table")
    assert file.load()[0].is_empty
    file.begin_snapshot()
    file.add_to_snapshot(FollowResponse(table_id="table", begins_snapshot=True))
    file.complete_snapshot()
    file.append(FollowResponse())
    file.touch()
    file.close()
