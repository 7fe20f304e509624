"""Whoever uses the database of control may be cancelled wherever it waits, and the service may stop at that moment:
the server of gRPC cancels the handlers of its RPCs, and does not wait for their ends."""

from __future__ import annotations

import asyncio
import collections
import gc
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from prometheus_client import CollectorRegistry
from sqlalchemy import event
from sqlalchemy.engine import make_url

from control.database.migrate import migrate
from control.replication.follower import Follower
from control.replication.versions import Versions
from control.service.control_servicer import ControlServicer
from control.service.directory_servicer import DirectoryServicer
from control.usage.metrics import UsageMetrics
from control.usage.servicer import UsageServicer
from control.usage.webhook import AlertSender
from kvloom.v1.control_service_pb2 import (
    BUDGET_UNIT_NANOS,
    BudgetChange,
    BudgetName,
    KeyUse,
    LeaseBudgetsRequest,
    ReportKeyUsesRequest,
)
from kvloom.v1.directory_service_pb2 import CreateProjectRequest, ListProjectsRequest
from kvloom.v1.usage_service_pb2 import GetBudgetsRequest, GetUsageRequest, ListAnswersRequest
from kvloom_common.database.database import Database, DatabaseAwayError, open_database, with_driver

Call = Callable[[Database], Awaitable[Any]]


class CancelledAtStep:
    """Awaits a call, and cancels the task that awaits it once the call has waited `step` times: while it waits, or
    (`late`) as soon as what it waits for is there, before the task has seen it."""

    def __init__(self, call: Awaitable[Any], step: int, late: bool) -> None:
        self.cancelled = asyncio.Event()
        self._call = call
        self._step = step
        self._late = late

    def __await__(self) -> Generator[Any, Any, Any]:
        task: asyncio.Task[Any] | None = asyncio.current_task()
        assert task is not None
        cancel = lambda *_: (self.cancelled.set(), task.cancel())  # noqa: E731
        steps = self._call.__await__()
        thrown: BaseException | None = None
        while True:
            try:
                waits_for = steps.send(None) if thrown is None else steps.throw(thrown)
            except StopIteration as stop:
                return stop.value
            if not self._step:
                if self._late and waits_for is not None:
                    waits_for.add_done_callback(cancel)
                else:
                    asyncio.get_running_loop().call_soon(cancel)
            self._step -= 1
            try:
                yield waits_for
                thrown = None
            except BaseException as error:
                thrown = error


class Context:
    """What gRPC hands to a handler, as far as the handlers of control use it."""

    async def send_initial_metadata(self, _metadata: Any) -> None:
        await asyncio.sleep(0)

    async def write(self, _response: Any) -> None:
        await asyncio.sleep(0)

    async def abort(self, code: Any, details: str, _trailing: Any = ()) -> None:
        raise AssertionError(f"{code}: {details}")

    def invocation_metadata(self) -> tuple[()]:
        return ()


async def reads(database: Database) -> None:
    async with database.reading() as connection:
        await connection.execute(sa.text("SELECT 1"))


async def writes(database: Database) -> None:
    async with database.writing() as connection:
        await connection.execute(sa.text("CREATE TABLE IF NOT EXISTS t (a INT)"))
        await connection.execute(sa.text("INSERT INTO t VALUES (1)"))


def leases(database: Database) -> Awaitable[Any]:
    async def requests() -> AsyncIterator[LeaseBudgetsRequest]:
        budget = BudgetName(account="tenant:acme/search", unit=BUDGET_UNIT_NANOS, period="2025-11")
        yield LeaseBudgetsRequest(producer="r0/1", changes=[BudgetChange(budget=budget, wanted=1, number=1)])

    return ControlServicer(database, Versions(database)).LeaseBudgets(requests(), Context())


async def follows(database: Database) -> None:
    responses = Follower(database, Versions(database), "", 0).responses()
    while not (await anext(responses)).is_complete:
        pass
    await responses.aclose()


def notices(database: Database) -> Awaitable[None]:
    return AlertSender(database, [], "c2VjcmV0", UsageMetrics(CollectorRegistry())).send_due(0.0)


def of_directory(method: str, request: Any) -> Call:
    return lambda database: getattr(DirectoryServicer(database, Versions(database)), method)(request, Context())


def of_usage(method: str, request: Any) -> Call:
    return lambda database: getattr(UsageServicer(database), method)(request, Context())


CALLS: dict[str, Call] = {
    "ListProjects": of_directory("ListProjects", ListProjectsRequest(organisation="acme")),
    "CreateProject": of_directory(
        "CreateProject", CreateProjectRequest(project={"id": "acme/search"}, create_organisation=True)
    ),
    "GetUsage": of_usage("GetUsage", GetUsageRequest(organisation="acme")),
    "GetBudgets": of_usage("GetBudgets", GetBudgetsRequest(tenant="acme/search")),
    "ListAnswers": of_usage("ListAnswers", ListAnswersRequest()),
    "LeaseBudgets": leases,
    "ReportKeyUses": lambda database: ControlServicer(database, Versions(database)).ReportKeyUses(
        ReportKeyUsesRequest(uses=[KeyUse(key_id="k1", at=1)]), Context()
    ),
    "Follow": follows,
    "notices": notices,
}
"""Everything that asks the database and may be cancelled, but for the consumer of Redis."""


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database file with the tables of this version."""
    path = tmp_path_factory.mktemp("template") / "control.db"

    async def make() -> None:
        async with open_database(with_driver(make_url(f"sqlite:///{path}"))) as database:
            await migrate(database)

    asyncio.run(make())
    return path


async def left_behind(path: Path, call: Call, step: int, late: bool, warm: bool) -> collections.Counter[str] | None:
    """Close the database right after a call has been cancelled, and count what became of connections. None: the call
    does not wait so often."""
    counts: collections.Counter[str] = collections.Counter()
    async with open_database(with_driver(make_url(f"sqlite:///{path}"))) as database:
        event.listen(database.engine.sync_engine, "do_connect", lambda *_: counts.update(["opened"]))
        for name in ("close", "invalidate"):
            event.listen(database.engine.sync_engine.pool, name, lambda *_, name=name: counts.update([name]))
        if warm:
            await reads(database)
        stepped = CancelledAtStep(call(database), step, late)

        async def run() -> None:
            await stepped

        task, cancelled = asyncio.create_task(run()), asyncio.create_task(stepped.cancelled.wait())
        await asyncio.wait((task, cancelled), return_when=asyncio.FIRST_COMPLETED)
        was_cancelled = stepped.cancelled.is_set()
        cancelled.cancel()
    await asyncio.wait((task,))
    if not was_cancelled:
        task.result()
    return counts if was_cancelled else None


async def swept(template: Path, folder: Path, call: Call, warm: bool) -> list[tuple[int, bool, dict[str, int]]]:
    """Every way to be cancelled, with what was left behind."""
    found: list[tuple[int, bool, dict[str, int]]] = []
    for late in (False, True):
        step = 0
        while True:
            path = folder / f"{step}-{late}" / "control.db"
            path.parent.mkdir()
            shutil.copyfile(template, path)
            counts = await left_behind(path, call, step, late, warm)
            if counts is None:
                break
            found.append((step, late, dict(counts)))
            step += 1
    return found


@pytest.mark.parametrize("name", CALLS)
async def test_no_cancellation_reaches_the_driver(name: str, template: Path, tmp_path: Path) -> None:
    """A connection whose statement is cancelled is thrown away, and its thread may never answer."""
    found = await swept(template, tmp_path, CALLS[name], warm=False)
    assert found
    assert [one for one in found if one[2].get("invalidate") or one[2].get("opened") != one[2].get("close")] == []


@pytest.mark.parametrize("call", [reads, writes])
async def test_a_database_closes_after_the_last_connection_has_come_back(
    call: Call, template: Path, tmp_path: Path
) -> None:
    """One that comes back later is in a pool that nobody has, and the garbage collector finds it open."""
    found = await swept(template, tmp_path, call, warm=True)
    assert len(found) > 10
    assert [one for one in found if one[2]["opened"] != one[2].get("close")] == []
    gc.collect()


async def test_a_closed_database_refuses_work(template: Path) -> None:
    """A handler that was not cancelled in time would open a connection that nobody closes."""
    async with open_database(with_driver(make_url(f"sqlite:///{template}"))) as database:
        pass
    for call in (reads, writes):
        with pytest.raises(DatabaseAwayError, match="closed"):
            await database.uninterrupted(call(database))


async def test_a_database_closes_also_for_a_caller_who_is_cancelled(template: Path) -> None:
    counts: collections.Counter[str] = collections.Counter()

    async def use() -> None:
        async with open_database(with_driver(make_url(f"sqlite:///{template}"))) as database:
            event.listen(database.engine.sync_engine, "do_connect", lambda *_: counts.update(["opened"]))
            event.listen(database.engine.sync_engine.pool, "close", lambda *_: counts.update(["closed"]))
            async with database.reading(), database.reading():
                pass
            await CancelledAtStep(database.close(), 0, late=False)

    task = asyncio.create_task(use())
    await asyncio.wait((task,))
    assert task.cancelled()
    assert counts == {"opened": 2, "closed": 2}
