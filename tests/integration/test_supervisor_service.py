"""SupervisorService on TCP, where other machines of the fleet call it: only they may."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

from kvloom_common.trust.fabric_trust import NO_SECRET
from kvloom_common.trust.secret import FabricSecret
from kvloom_common.trust.shared_secret import SharedSecret
from tests.fakes.no_adapters import NoAdapters
from tests.fakes.no_rollouts import NoRollouts
from tools.failures import CommandError
from tools.supervisor.logs.entries import LogEntry
from tools.supervisor.logs.files import LogQuery, log_paths
from tools.supervisor.rollout.state import RolloutState
from tools.supervisor.service.client import UnreachableError, remote_supervisor
from tools.supervisor.service.server import SupervisorServicer, serving
from tools.supervisor.state import FabricState
from tools.supervisor.supervised_process import ProcessStatus

SECRET = FabricSecret.draw()
STATE = FabricState(
    supervisor_pid=7,
    supervisor_started=1.5,
    phase="ready",
    http_url="http://127.0.0.1:1",
    router_address="",
    model="m",
    processes=[ProcessStatus("edge", "a-edge", None, "restarting", 2)],
    name="a-kvloom",
    owner="o",
    not_ready=["a-edge is restarting"],
    brownouts=["a-router degrades answers of tiny: it is overloaded (brownout step 2)"],
    alarms=["a-edge has not followed the table of tenants for 90 s"],
    rollouts=[RolloutState("m", "m@2", "serving", 10.0, 2, 4)],
)


async def no_change(*_: object) -> None:
    raise CommandError("this fabric stays as it is")


@pytest.fixture
async def address(tmp_path: Path) -> AsyncIterator[str]:
    async def state() -> FabricState:
        return STATE

    async def restart(names: Sequence[str], on_step: Callable[[str], None]) -> None:
        for name in names:
            on_step(f"{name} was restarted")
        raise CommandError("stopped there")

    run_dir = tmp_path / "run"
    run_dir.mkdir()
    servicer = SupervisorServicer(
        state,
        restart,
        no_change,
        no_change,
        lambda: log_paths(tmp_path, "a-"),
        reload=no_change,
        preview_reload=no_change,
        sleep_model=no_change,
        wake_model=no_change,
        rollouts=NoRollouts(),
        adapters=NoAdapters(),
        drain_shard=no_change,
    )
    trust = SharedSecret(SECRET, ("supervisor",), "a-kvloom")
    async with asyncio.timeout(30), serving(servicer, run_dir, trust, "127.0.0.1") as address:
        yield address


async def test_a_machine_of_the_fleet_sees_the_state_and_each_step_of_a_restart(address: str) -> None:
    """`kvloom status` and `kvloom restart` on another machine say what they would say on this one."""
    async with remote_supervisor(address, "a-kvloom", SharedSecret(SECRET, ("tools",), "t")) as supervisor:
        assert await supervisor.state() == STATE
        steps: list[str] = []
        with pytest.raises(CommandError, match="stopped there"):
            await supervisor.restart(["x", "y"], steps.append)
        assert steps == ["x was restarted", "y was restarted"]


async def test_strangers_and_other_names_are_refused(address: str) -> None:
    """Anyone on the network could restart the fabric and read its logs."""
    for trust, name in (
        (NO_SECRET, "a-kvloom"),
        (SharedSecret(FabricSecret.draw(), ("tools",), "t"), "a-kvloom"),
        (SharedSecret(SECRET, ("tools",), "t"), "b-kvloom"),
    ):
        async with remote_supervisor(address, name, trust) as supervisor:
            with pytest.raises(UnreachableError):
                await supervisor.state()


async def test_logs_are_filtered_there_and_followed_here(address: str, tmp_path: Path) -> None:
    """Only the lines that are wanted cross the network, and those of a request are found by any of its ids."""
    (tmp_path / "a-shard-0.log").write_text(
        "2026-01-01T00:00:00.000000Z [info     ] one request_id=r client_request_id=mine\n"
        "2026-01-01T00:00:01.000000Z [info     ] two request_id=r\n"
        "2026-01-01T00:00:02.000000Z [info     ] three request_id=other\n"
    )
    (tmp_path / "kvloom.log").write_text("2026-01-01T00:00:00.500+00:00 a step\n")
    async with remote_supervisor(address, "a-kvloom", SharedSecret(SECRET, ("tools",), "t")) as supervisor:

        async def read(query: LogQuery) -> list[LogEntry]:
            return [entry async for entries in supervisor.logs(query, follow=False) for entry in entries or []]

        found = await read(LogQuery(request_ids=("mine",)))
        assert [entry.lines[0].split()[3] for entry in found] == ["one", "two"]
        assert {entry.process for entry in await read(LogQuery())} == {"a-shard-0", "a-kvloom"}
        assert len(await read(LogQuery(max_lines=2))) == 2
        assert [entry.process for entry in await read(LogQuery(processes=frozenset({"a-kvloom"})))] == ["a-kvloom"]
        following = supervisor.logs(LogQuery(max_lines=0), follow=True)
        assert await anext(following) is None
        with (tmp_path / "a-shard-0.log").open("a") as log:
            log.write("2026-01-01T00:00:03.000000Z [info     ] four\n")
        entries = await anext(following)
        assert entries is not None
        assert entries[0].lines[0].endswith("four")
        await following.aclose()
