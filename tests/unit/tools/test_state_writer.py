"""The supervisor survives a disk on which it cannot write."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from tools.supervisor.logs.bounded_log import BoundedLog
from tools.supervisor.state import FabricState, RunFolder, StateWriter, own_start_time


def new_state(phase: str) -> FabricState:
    return FabricState(
        supervisor_pid=os.getpid(),
        supervisor_started=own_start_time(),
        phase=phase,
        http_url="http://127.0.0.1:1",
        router_address="127.0.0.1:2",
        model="m",
    )


async def test_a_state_that_cannot_be_written_is_reported_once_and_written_later(tmp_path: Path) -> None:
    """With a full data directory the supervisor died when a process died, and took the whole fabric along."""
    folder, reports = RunFolder(tmp_path), asyncio.Queue[str]()
    folder.run_dir.write_text("a file where the folder should be: every write fails, for root as well")
    writer = StateWriter(folder, reports.put_nowait, retry_seconds=0.01)
    writer.write(new_state("starting"))
    writer.write(new_state("ready"))
    assert "serving continues" in reports.get_nowait()
    assert reports.empty()
    folder.run_dir.unlink()
    folder.run_dir.mkdir()
    async with asyncio.timeout(20):
        assert "again" in await reports.get()
    assert folder.require_running().phase == "ready"
    writer.close()


def test_a_log_that_could_not_be_reopened_is_written_again_when_it_can(tmp_path: Path) -> None:
    """A log that was rotated while the disk was full stayed silent for good."""
    folder = tmp_path / "logs"
    folder.mkdir()
    log = BoundedLog(folder / "a.log", max_bytes=10)
    log.write(b"0123456789")
    folder.rename(tmp_path / "gone")
    log.write(b"lost")
    folder.mkdir()
    log.write(b"kept")
    log.close()
    assert (folder / "a.log").read_bytes() == b"kept"
