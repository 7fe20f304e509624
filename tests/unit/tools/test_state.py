"""The state file and the logs, as commands see them while another process runs the fabric or after it was killed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tools.failures import EXIT_NOT_RUNNING, CommandError
from tools.supervisor.logs.bounded_log import BoundedLog
from tools.supervisor.logs.files import LogTail
from tools.supervisor.state import FabricState, RunFolder, own_start_time
from tools.supervisor.supervised_process import ProcessStatus


def state(**changes: float) -> FabricState:
    fields = {"supervisor_pid": os.getpid(), "supervisor_started": own_start_time()} | changes
    return FabricState(
        **fields,
        http_url="http://127.0.0.1:1",
        router_address="127.0.0.1:2",
        model="m",
        processes=[ProcessStatus(role="edge", name="edge", pid=None, state="restarting")],
    )


def test_what_was_written_is_read(tmp_path: Path):
    """The file is how other commands learn about the fabric."""
    folder = RunFolder(tmp_path)
    with folder.locked():
        folder.write(state())
        assert folder.read_running() == state()
        assert RunFolder(tmp_path).require_running() == state()
    assert folder.read_running() is None


def test_a_pid_that_passed_to_another_process_is_not_a_running_fabric(tmp_path: Path):
    """After a crash and a reboot, `down` must not stop an unrelated process."""
    folder = RunFolder(tmp_path)
    with folder.locked():
        folder.write(state(supervisor_started=own_start_time() - 1))
        assert folder.read_running() is None


@pytest.mark.parametrize("content", [b"", b"{", b'{"supervisor_pid": "x"}'])
def test_a_damaged_state_file_means_that_nothing_runs(tmp_path: Path, content: bytes):
    """A full disk must not turn `status` into a stack trace."""
    folder = RunFolder(tmp_path)
    folder.run_dir.mkdir()
    (folder.run_dir / "state.json").write_bytes(content)
    assert folder.read_running() is None
    with pytest.raises(CommandError, match="kvloom is not running") as failure:
        folder.require_running()
    assert failure.value.exit_code == EXIT_NOT_RUNNING


def test_a_data_directory_is_used_by_one_fabric_at_a_time(tmp_path: Path):
    """Two supervisors would overwrite each other's state and logs."""
    with (
        RunFolder(tmp_path).locked(),
        pytest.raises(CommandError, match="already running"),
        RunFolder(tmp_path).locked(),
    ):
        pass
    with RunFolder(tmp_path).locked():
        pass


def test_a_data_directory_that_cannot_be_made_is_named(tmp_path: Path):
    """The reason must name the path, which may come from a file or the environment."""
    (tmp_path / "file").touch()
    with pytest.raises(CommandError, match="cannot use the data directory"), RunFolder(tmp_path / "file").locked():
        pass


def test_following_a_log_continues_across_rotations(tmp_path: Path):
    """`logs --follow` must neither stop nor repeat lines when the file is renamed."""
    path = tmp_path / "x.log"
    log = BoundedLog(path, max_bytes=40)
    log.write(b"one\ntwo\nthree\n")
    tail = LogTail(path)
    found: list[str] = []
    for i in range(10):
        log.write(b"line %d\n" % i)
        found += shown(tail)
    found += shown(tail)
    found += shown(tail)
    log.close()
    tail.close()
    assert found == [f"line {i}" for i in range(10)]


def test_an_incomplete_line_is_shown_when_it_is_complete(tmp_path: Path):
    """Pipes deliver pieces of lines, but readers need whole lines."""
    path = tmp_path / "x.log"
    log = BoundedLog(path)
    log.write(b"before\nh")
    tail = LogTail(path)
    found: list[str] = []
    for piece in (b"el", b"lo\nwor"):
        log.write(piece)
        found += shown(tail)
    found += shown(tail)
    log.close()
    tail.close()
    assert found == ["hello"]


def shown(tail: LogTail) -> list[str]:
    """The lines of the entries that have ended."""
    return [line for entry in tail.new_entries() for line in entry.lines]
