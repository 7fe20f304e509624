"""Planned restarts: their processes, their order, and single replacements (with stand-in processes)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from kvloom_common.trust.fabric_trust import NO_SECRET
from tests.fakes.no_adapters import NoAdapters
from tests.fakes.no_rollouts import NoRollouts
from tests.unit.tools.test_supervisor import TIMEOUT_SECONDS, World, assert_gone, breakable, stand_in
from tools.failures import CommandError
from tools.supervisor.child import ChildFailedError, ChildSpec
from tools.supervisor.process_specs import plan_restart
from tools.supervisor.service.client import UnreachableError, local_supervisor
from tools.supervisor.service.server import SupervisorServicer, serving
from tools.supervisor.state import FabricState
from tools.supervisor.supervised_process import ProcessStatus

RUNNING = [
    ProcessStatus(role=name.split("-")[0], name=name, pid=number, state="ready")
    for number, name in enumerate(["redis", "safety", "router-0", "router-1", "shard-0", "shard-1", "edge"])
]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ([], ["safety", "shard-0", "shard-1", "router-0", "router-1", "edge"]),
        (["edge", "shard"], ["shard-0", "shard-1", "edge"]),
        (["redis", "router-1"], ["router-1", "redis"]),
    ],
)
def test_processes_are_restarted_from_the_inside_to_the_edges_and_redis_only_by_name(
    wanted: Sequence[str], expected: Sequence[str]
):
    """Each process starts with the new versions of those that it depends on, and the shared registry is not lost."""
    assert plan_restart(RUNNING, wanted) == expected


def test_an_unknown_name_is_rejected_before_anything_is_restarted():
    """A partial restart because of a typing error is worse than none."""
    with pytest.raises(CommandError, match=r"no process called shard-7; there are redis, safety"):
        plan_restart(RUNNING, ["shard-0", "shard-7"])


def with_successor(spec: ChildSpec) -> ChildSpec:
    return ChildSpec(role=spec.role, name=spec.name, argv=spec.argv, stop_timeout_seconds=10, starts_first=True)


@pytest.mark.parametrize("starts_first", [True, False])
async def test_a_replaced_process_has_ended_by_sigterm_and_its_successor_serves(tmp_path: Path, starts_first: bool):
    """The old process must finish its requests, and no crash must be counted."""
    record = tmp_path / "stopped"
    spec = stand_in("a", "--record", str(record))
    world = World(tmp_path, [with_successor(spec) if starts_first else spec])
    await world.supervisor.start()
    try:
        (before,) = world.supervisor.statuses
        assert before.pid is not None
        async with asyncio.timeout(TIMEOUT_SECONDS):
            await world.supervisor.replace("a")
        (after,) = world.supervisor.statuses
        assert_gone(before.pid)
        assert (after.state, after.restarts) == ("ready", 0)
        assert after.pid != before.pid
        assert record.read_text().split() == ["a"]
        assert not any("ended" in event for event in world.events)
    finally:
        await world.supervisor.stop()


async def test_a_successor_that_fails_to_start_leaves_the_old_process_running(tmp_path: Path):
    """A broken upgrade must not stop a working process."""
    flag = tmp_path / "broken"
    world = World(tmp_path, [breakable(flag, starts_first=True)])
    await world.supervisor.start()
    try:
        (before,) = world.supervisor.statuses
        flag.touch()
        with pytest.raises(ChildFailedError, match="broken"):
            await world.supervisor.replace("a")
        assert world.supervisor.statuses == [before]
        flag.unlink()
        await world.supervisor.replace("a")
        assert world.supervisor.statuses[0].pid != before.pid
    finally:
        await world.supervisor.stop()


async def test_a_process_stopped_from_outside_gets_a_successor_before_it_has_exited(tmp_path: Path):
    """It got a SIGTERM from another process, and its requests may take long. This counts as an unplanned restart."""
    leave = tmp_path / "leave"
    world = World(tmp_path, [with_successor(stand_in("a", "--leave", str(leave)))])
    await world.supervisor.start()
    try:
        (before,) = world.supervisor.statuses
        assert before.pid is not None
        os.kill(before.pid, signal.SIGTERM)
        await world.until(lambda s: s[0].pid != before.pid and s[0].state == "ready")
        assert psutil.pid_exists(before.pid)
        leave.touch()
        assert_gone(before.pid)
        await world.until(lambda s: len(s) == 1)
        (after,) = world.supervisor.statuses
        assert (after.state, after.restarts) == ("ready", 1)
        assert [event.splitlines()[0] for event in world.events][1:] == [
            "a was stopped from outside: a successor replaces it",
            f"a has restarted (pid {after.pid})",
        ]
    finally:
        await world.supervisor.stop()


async def test_one_that_leaves_when_no_successor_can_start_is_started_again_as_after_a_crash(tmp_path: Path):
    """The early attempt must not be the last one."""
    flag = tmp_path / "broken"
    leaves = 'signal.signal(signal.SIGTERM, lambda *_: print(\'{"event":"leaving"}\', flush=True) or sys.exit(0))'
    world = World(tmp_path, [breakable(flag, leaves, starts_first=True)])
    await world.supervisor.start()
    try:
        (before,) = world.supervisor.statuses
        assert before.pid is not None
        flag.touch()
        os.kill(before.pid, signal.SIGTERM)
        await world.until(lambda s: s[0].restarts >= 3)
        flag.unlink()
        await world.until(lambda s: s[0].state == "ready")
    finally:
        await world.supervisor.stop()


async def no_change(*_: object) -> None:
    raise CommandError("this fabric keeps its models")


async def test_commands_reach_a_fabric_in_a_deep_directory_and_get_each_step(tmp_path: Path):
    """Socket paths are limited to 108 characters; data directories are not."""
    run_dir = tmp_path / ("x" * 100) / "run"
    run_dir.mkdir(parents=True)
    asked: list[list[str]] = []

    async def restart(names: Sequence[str], tell: Callable[[str], None]) -> None:
        asked.append(list(names))
        if names == ["bad"]:
            raise CommandError("it cannot be")
        tell("a was restarted")

    async def state() -> FabricState:
        return fabric_state

    fabric_state = FabricState(
        supervisor_pid=1, supervisor_started=2.5, http_url="", router_address="", model="m", processes=RUNNING
    )
    steps: list[str] = []
    servicer = SupervisorServicer(
        state,
        restart,
        no_change,
        no_change,
        dict,
        reload=no_change,
        preview_reload=no_change,
        sleep_model=no_change,
        wake_model=no_change,
        rollouts=NoRollouts(),
        adapters=NoAdapters(),
        drain_shard=no_change,
    )
    async with asyncio.timeout(TIMEOUT_SECONDS):
        async with serving(servicer, run_dir, NO_SECRET), local_supervisor(run_dir) as supervisor:
            await supervisor.restart(["a"], steps.append)
            with pytest.raises(CommandError, match="it cannot be"):
                await supervisor.restart(["bad"], steps.append)
            assert await supervisor.state() == fabric_state
        assert asked == [["a"], ["bad"]]
        assert steps == ["a was restarted"]
        with pytest.raises(UnreachableError, match="accepts no commands"):
            async with local_supervisor(run_dir) as supervisor:
                await supervisor.restart(["a"], steps.append)
