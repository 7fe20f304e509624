"""The supervisor with stand-in processes, which are real but much lighter than the services."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from kvloom.backoff import Backoff
from tools.supervisor.child import ChildFailedError, ChildSpec, launched_command
from tools.supervisor.supervised_process import ProcessStatus
from tools.supervisor.supervisor import Supervisor

TIMEOUT_SECONDS = 20.0


def stand_in(name: str, *args: str, role: str = "shard", stop_timeout_seconds: float = 10.0) -> ChildSpec:
    argv = (sys.executable, "-m", "tests.fakes.stand_in_process", "--name", name, *args)
    return ChildSpec(
        role=role, name=name, argv=argv, start_timeout_seconds=10.0, stop_timeout_seconds=stop_timeout_seconds
    )


def breakable(flag: Path, more_code: str = "", *, starts_first: bool = False) -> ChildSpec:
    """A process that cannot start while the file `flag` exists."""
    code = (
        "import pathlib, signal, sys, time\n"
        f"if pathlib.Path({str(flag)!r}).exists(): sys.exit('error: broken')\n"
        f"{more_code}\n"
        'print(\'{"event":"ready","address":"x"}\', flush=True)\n'
        "time.sleep(60)\n"
    )
    return ChildSpec(role="shard", name="a", argv=(sys.executable, "-S", "-c", code), starts_first=starts_first)


class World:
    """A supervisor whose changes and events can be awaited."""

    def __init__(self, tmp_path: Path, *stages: list[ChildSpec], stop_order: tuple[str, ...] = ("shard",)) -> None:
        self.events: list[str] = []
        self._changed = asyncio.Event()
        self.supervisor = Supervisor(
            stages,
            stop_order=stop_order,
            log_dir=tmp_path,
            on_change=self._changed.set,
            on_event=self.events.append,
            make_backoff=lambda: Backoff(0.01, max_seconds=0.05, stable_seconds=30.0),
        )

    async def until(self, holds: Callable[[list[ProcessStatus]], bool]) -> None:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while not holds(self.supervisor.statuses):
                self._changed.clear()
                await self._changed.wait()


def assert_gone(pid: int) -> None:
    """Wait a little, because SIGKILL and reaping take the kernel a moment."""
    try:
        process = psutil.Process(pid)
        if process.status() != psutil.STATUS_ZOMBIE:
            process.wait(timeout=TIMEOUT_SECONDS)
    except psutil.NoSuchProcess:
        return


def file_sizes(folder: Path, pattern: str) -> list[int]:
    return [file.stat().st_size for file in folder.glob(pattern)]


async def test_start_returns_when_all_processes_are_ready(tmp_path: Path):
    """`ready` must mean that every process is ready, and status must have its address."""
    world = World(tmp_path, [stand_in("a"), stand_in("b")])
    await world.supervisor.start()
    try:
        assert world.supervisor.all_ready
        statuses = world.supervisor.statuses
        assert [(s.name, s.state, s.address, s.metrics_address) for s in statuses] == [
            ("a", "ready", "127.0.0.1:1", "127.0.0.1:2"),
            ("b", "ready", "127.0.0.1:1", "127.0.0.1:2"),
        ]
    finally:
        await world.supervisor.stop()
    for status in statuses:
        assert status.pid is not None
        assert_gone(status.pid)


async def test_a_process_that_cannot_start_fails_the_start_with_its_own_message(tmp_path: Path):
    """The user must read why, not that "something" failed."""
    world = World(tmp_path, [stand_in("good"), stand_in("bad", "--fail", "the model file is damaged")])
    with pytest.raises(ChildFailedError, match=r"^bad ended with status 1: the model file is damaged$"):
        await world.supervisor.start()
    await world.supervisor.stop()
    assert all(status.pid is None for status in world.supervisor.statuses)


async def test_a_process_that_never_gets_ready_fails_the_start(tmp_path: Path):
    """A hanging start must end with a reason."""
    spec = ChildSpec(role="shard", name="slow", argv=stand_in("slow", "--never-ready").argv, start_timeout_seconds=0.5)
    world = World(tmp_path, [spec])
    with pytest.raises(ChildFailedError, match=r"slow was not ready after 0\.5 s"):
        await world.supervisor.start()
    world.supervisor.force_stop()
    await world.supervisor.stop()


async def test_a_command_that_does_not_exist_fails_the_start(tmp_path: Path):
    """A broken installation must be named."""
    world = World(tmp_path, [ChildSpec(role="shard", name="x", argv=(str(tmp_path / "nothing"),))])
    with pytest.raises(ChildFailedError, match=r"cannot run .*nothing"):
        await world.supervisor.start()
    await world.supervisor.stop()


async def test_a_killed_process_is_reported_and_started_again(tmp_path: Path):
    """A crash must neither stop the fabric nor go unnoticed, and a second one is treated in the same way."""
    world = World(tmp_path, [stand_in("a")])
    await world.supervisor.start()
    try:
        for restarts in (1, 2):
            pid = world.supervisor.statuses[0].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await world.until(lambda s, n=restarts: s[0].restarts == n and s[0].state == "ready")
            assert world.supervisor.statuses[0].pid != pid
            assert any("a was killed by SIGKILL" in event for event in world.events)
    finally:
        await world.supervisor.stop()


async def test_a_process_that_fails_after_a_crash_is_restarted_again_and_again(tmp_path: Path):
    """The cause of the failure may disappear, whereas giving up would require an operator."""
    flag = tmp_path / "broken"
    world = World(tmp_path, [breakable(flag)])
    await world.supervisor.start()
    try:
        flag.touch()
        pid = world.supervisor.statuses[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await world.until(lambda s: s[0].restarts >= 3)
        flag.unlink()
        await world.until(lambda s: s[0].state == "ready")
        assert any("a ended with status 1: broken" in event for event in world.events)
    finally:
        await world.supervisor.stop()


async def test_a_process_that_ends_for_good_is_forgotten(tmp_path: Path):
    """A shard that was scaled in is not started again, and leaves no row in the status; the others run on."""
    code = (
        "import time\n"
        'print(\'{"event":"ready","address":"x"}\', flush=True)\n'
        "time.sleep(0.2)\n"
        'print(\'{"event":"end"}\', flush=True)\n'
    )
    leaves = ChildSpec(role="shard", name="leaves", argv=(sys.executable, "-S", "-c", code))
    world = World(tmp_path, [leaves, stand_in("stays")])
    await world.supervisor.start()
    watching = asyncio.create_task(world.supervisor.watch())
    try:
        await world.until(lambda statuses: [status.name for status in statuses] == ["stays"])
        assert world.supervisor.all_ready
        assert [spec.name for spec in world.supervisor.ended] == ["leaves"]
        assert not watching.done()
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await world.supervisor.stop()


async def test_roles_stop_one_after_another_in_the_given_order(tmp_path: Path):
    """The edges stop before the processes behind them, so that running requests can end."""
    record = tmp_path / "order"
    roles = ("edge", "router", "shard", "redis")
    specs = [stand_in(role, "--record", str(record), role=role) for role in reversed(roles)]
    world = World(tmp_path, specs, stop_order=roles)
    await world.supervisor.start()
    await world.supervisor.stop()
    assert record.read_text().split() == list(roles)


async def test_a_process_that_ignores_sigterm_is_killed_after_its_stop_timeout(tmp_path: Path):
    """A hung process must not make Ctrl-C hang."""
    world = World(tmp_path, [stand_in("deaf", "--ignore-sigterm", stop_timeout_seconds=0.3)])
    await world.supervisor.start()
    async with asyncio.timeout(5):
        await world.supervisor.stop()
    assert world.supervisor.statuses[0].pid is None


async def test_a_second_ctrl_c_kills_what_is_still_stopping(tmp_path: Path):
    """The user must be able to stop everything at once."""
    world = World(tmp_path, [stand_in("deaf", "--ignore-sigterm", stop_timeout_seconds=300)])
    await world.supervisor.start()
    stopping = asyncio.create_task(world.supervisor.stop())
    await world.until(lambda s: s[0].state == "stopping")
    world.supervisor.force_stop()
    async with asyncio.timeout(5):
        await stopping


async def test_grandchildren_end_with_their_process(tmp_path: Path):
    """`down` leaves no process behind, including those that a service has started."""
    pid_file = tmp_path / "grandchild.pid"
    world = World(tmp_path, [stand_in("a", "--grandchild", str(pid_file))])
    await world.supervisor.start()
    async with asyncio.timeout(10):
        await world.supervisor.stop()
    assert_gone(int(pid_file.read_text()))


def test_killing_the_supervisor_leaves_no_child(tmp_path: Path):
    """After `kill -9` of the supervisor, a new `up` must find free ports."""
    script = f"""
import asyncio, sys
from pathlib import Path
from tests.unit.tools.test_supervisor import World, stand_in

async def main():
    world = World(Path({str(tmp_path)!r}), [stand_in("a", "--ignore-sigterm"), stand_in("b")])
    await world.supervisor.start()
    print(*[status.pid for status in world.supervisor.statuses], flush=True)
    await world.supervisor.watch()

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as supervisor:
        try:
            assert supervisor.stdout is not None
            pids = [int(pid) for pid in supervisor.stdout.readline().split()]
            assert len(pids) == 2
        finally:
            supervisor.kill()
    for pid in pids:
        assert_gone(pid)


async def test_a_flood_of_output_is_kept_bounded_and_does_not_block_the_process(tmp_path: Path):
    """A process must never block on a full pipe, and the supervisor must not keep all output."""
    started = time.monotonic()
    world = World(tmp_path, [stand_in("loud", "--print-bytes", str(25 * 2**20))])
    await world.supervisor.start()
    await world.supervisor.stop()
    assert time.monotonic() - started < TIMEOUT_SECONDS
    sizes = file_sizes(tmp_path, "loud.log*")
    assert len(sizes) == 2
    assert max(sizes) <= 10 * 2**20


def launched(tmp_path: Path, name: str, *args: str) -> ChildSpec:
    """Behind a launcher that does not pass signals on, as shells do not."""
    launcher = tmp_path / "launch"
    launcher.write_text('#!/bin/bash\n"$@"\nexit $?\n')
    launcher.chmod(0o755)
    spec = stand_in(name, *args)
    return dataclasses.replace(spec, argv=launched_command([str(launcher)], spec.argv), has_launcher=True)


async def test_a_process_behind_a_launcher_is_stopped_with_it(tmp_path: Path) -> None:
    """The signal must reach the process itself, which drains, and neither may stay."""
    world = World(tmp_path, [launched(tmp_path, "a")])
    await world.supervisor.start()
    (status,) = world.supervisor.statuses
    assert status.pid is not None
    pids = [status.pid, *(child.pid for child in psutil.Process(status.pid).children(recursive=True))]
    assert len(pids) >= 2
    began = time.monotonic()
    await world.supervisor.stop()
    assert time.monotonic() - began < 8, "it was stopped, not killed after its timeout"
    for pid in pids:
        assert_gone(pid)


async def test_a_launchers_exit_status_is_its_processs(tmp_path: Path) -> None:
    """It is what an operator sees of an engine that cannot start."""
    spec = launched(tmp_path, "a")
    code = (*spec.argv[: -len(stand_in("a").argv)], sys.executable, "-c", "import sys; sys.exit('no GPU')")
    world = World(tmp_path, [dataclasses.replace(spec, argv=code)])
    with pytest.raises(ChildFailedError, match=r"ended with status 1[\s\S]*no GPU"):
        await world.supervisor.start()
    await world.supervisor.stop()
