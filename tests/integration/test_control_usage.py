"""The ledger of usage and the leases of budgets, on SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
import itertools
import random

import msgspec
import pytest
import sqlalchemy as sa

from control.database.schema import keys, projects
from control.database.usage_tables import budget_alerts, budget_leases
from control.usage.leases import ProducerClosedError, change_leases
from control.usage.ledger import forget_records, store
from control.usage.report import answers_of, budgets_of, usage_of
from kvloom.v1 import usage_service_pb2 as pb
from kvloom.v1.control_service_pb2 import (
    BUDGET_UNIT_NANOS,
    BUDGET_UNIT_TOKENS,
    BudgetChange,
    BudgetGrant,
    BudgetName,
)
from kvloom_common.database.database import Database
from kvloom_common.tenancy.usage_record import Charge, UsageRecord
from kvloom_common.tenancy.usage_stream import Stored, UsageEntry
from tests.fakes.usage import NOON, spending, totals, usage_database, usage_record

TENANT = "tenant:acme/search"
MONTH = BudgetName(account=TENANT, unit=BUDGET_UNIT_NANOS, period="2025-11")


def entry(*records: UsageRecord, closed_after: int | None = None) -> UsageEntry:
    return UsageEntry(records[0].producer if records else "r0/1", records, closed_after)


async def test_a_record_counts_once_however_often_it_comes(database_url: str) -> None:
    """Redis delivers at least once, and routers send again what they do not know to be stored."""
    async with usage_database(database_url) as database:
        first, second = usage_record(1, "a"), usage_record(2, "b")
        assert await store(database, [entry(first)]) == {"r0/1": Stored(1)}
        assert await store(database, [entry(first, second), entry(second)]) == {"r0/1": Stored(2)}
        assert await totals(database) == {
            "num_requests": 2, "num_prompt_tokens": 20, "num_output_tokens": 10, "cost_nanos": 50,
        }  # fmt: skip
        assert (await spending(database))[TENANT, BUDGET_UNIT_NANOS, "2025-11"] == 50
        assert (await spending(database))["org:acme", BUDGET_UNIT_TOKENS, "2025-11-25"] == 30


async def test_a_rotated_key_spends_the_budget_of_the_key_that_it_replaces(database_url: str) -> None:
    """A rotation would be a new budget. What it was used for by which key is told apart all the same."""
    month = BudgetName(account="key:k1", unit=BUDGET_UNIT_NANOS, period="2025-11")
    async with usage_database(database_url) as database:
        async with database.writing() as connection:
            first = dict((await connection.execute(sa.select(keys))).mappings().one())
            later = {
                "id": "k2",
                "digest": b"2",
                "account": "k1",
                "limits": {"monthly_budget_nanos": 100},
                "created_at": 1,
            }
            await connection.execute(sa.update(keys).values(revoked_at=1.0))
            await connection.execute(keys.insert(), {**first, **later})
        charge = Charge("key:k1", BUDGET_UNIT_NANOS, "2025-11", own=30, total=30)
        by_new = usage_record(2, "b", key_id="k2", cost_nanos=30, charges=(charge,))
        await store(database, [entry(usage_record(1, "a"), by_new)])
        spent = await spending(database)
        assert spent["key:k1", BUDGET_UNIT_NANOS, "2025-11"] == 25 + 30
        assert not any(account == "key:k2" for account, _, _ in spent)
        (grant,) = await change_leases(database, "r0/1", [BudgetChange(budget=month, wanted=90, number=1)])
        assert (grant.granted, grant.limit) == (45, 100)
        for key_id in ("k1", "k2"):
            (state,) = await budgets_of(database, "acme/search", key_id, NOON)
            assert (state.budget.account, state.spent, state.leased) == ("key:k1", 55, 45)
        by_key = await usage_of(database, pb.GetUsageRequest(group_by=[pb.USAGE_GROUP_KEY]))
        assert {row.key_id: row.cost_nanos for row in by_key.rows} == {"k1": 25, "k2": 30}


async def test_records_of_one_answer_count_as_one_in_any_order(database_url: str) -> None:
    """A router that died and the one that continued may report in any order, and one of them much later."""
    killed = usage_record(1, "a", "r0/1", num_output_tokens=3, outcome="lost", cost_nanos=13)
    continued = usage_record(
        1, "a", "r1/1", num_output_tokens=9, num_resumed_tokens=4, ended_at=NOON + 1, cost_nanos=19
    )
    corrected = msgspec.structs.replace(continued, number=2, corrects=1, num_output_tokens=8, cost_nanos=18)
    records = [killed, continued, corrected]
    async with usage_database(database_url) as database:
        rng = random.Random(1)
        for round_number in range(4):
            rng.shuffle(records)
            for record in records:
                request_id = f"a{round_number}"
                number = 10 * round_number + record.number
                corrects = record.corrects and 10 * round_number + record.corrects
                changed = msgspec.structs.replace(record, request_id=request_id, number=number, corrects=corrects)
                await store(database, [entry(changed)])
        assert await totals(database) == {
            "num_requests": 4, "num_prompt_tokens": 40, "num_output_tokens": 32, "cost_nanos": 72,
        }  # fmt: skip


async def test_what_reached_nobody_is_on_no_account(database_url: str) -> None:
    """Operators see shadow traffic and discarded candidates; callers neither see nor pay them."""
    charge = Charge(TENANT, BUDGET_UNIT_NANOS, "2025-11", own=25, total=25)
    candidate = usage_record(1, "a", charges=(charge,))
    unbilled = {"key_id": "", "cost_nanos": 0}
    discarded = usage_record(2, "a", corrects=1, tier="discarded", tenant="discarded:acme/search", **unbilled)
    shadow = usage_record(3, "b", tier="shadow", tenant="shadow:acme/search", **unbilled)
    async with usage_database(database_url, monthly_budget_nanos=1000) as database:
        await store(database, [entry(candidate)])
        assert (await usage_of(database, pb.GetUsageRequest(tenant="acme/search"))).rows[0].cost_nanos == 25
        await store(database, [entry(discarded, shadow)])
        own = (await usage_of(database, pb.GetUsageRequest(tenant="acme/search"))).rows[0]
        assert (own.num_requests, own.num_output_tokens, own.cost_nanos) == (0, 0, 0)
        of_organisation = (await usage_of(database, pb.GetUsageRequest(organisation="acme"))).rows[0]
        assert of_organisation.num_requests == 0
        assert all(spent == 0 for spent in (await spending(database)).values())
        by_tier = pb.GetUsageRequest(group_by=[pb.USAGE_GROUP_TENANT, pb.USAGE_GROUP_TIER])
        shown = {(row.tenant, row.tier): row.num_output_tokens for row in (await usage_of(database, by_tier)).rows}
        assert shown["discarded:acme/search", "discarded"] == shown["shadow:acme/search", "shadow"] == 5


async def test_usage_is_summed_by_class(database_url: str) -> None:
    """Who uses the urgent classes is what an operator charges for, or talks to a team about. Records of routers that
    do not say the class have that of their tier."""
    records = [
        usage_record(1, "a", priority_class="gold"),
        usage_record(2, "b", priority_class="interactive"),
        usage_record(3, "c", tier="batch"),
        usage_record(4, "a", corrects=1, num_output_tokens=3, priority_class="gold"),
    ]
    async with usage_database(database_url) as database:
        for record in records:
            await store(database, [entry(record)])
        by_class = pb.GetUsageRequest(group_by=[pb.USAGE_GROUP_CLASS])
        found = {row.priority_class: row.num_output_tokens for row in (await usage_of(database, by_class)).rows}
        assert found == {"gold": 3, "interactive": 5, "batch": 5}
        parts = [answers async for answers in answers_of(database, pb.ListAnswersRequest())]
        assert [one.priority_class for answers in parts for one in answers] == ["gold", "interactive", "batch"]


async def test_a_gap_in_the_numbers_is_not_stored(database_url: str) -> None:
    """A router deletes what is reported as stored."""
    async with usage_database(database_url) as database:
        assert await store(database, [entry(usage_record(2, "b"))]) == {"r0/1": Stored(0)}
        assert await store(database, [entry(usage_record(1, "a"))]) == {"r0/1": Stored(2)}


numbers = itertools.count(1)


async def change(
    database: Database,
    producer: str,
    *,
    wanted: int = 0,
    returned: int = 0,
    number: int = 0,
    budget: BudgetName = MONTH,
) -> BudgetGrant:
    """`number`: 0 for the next one."""
    one = BudgetChange(budget=budget, wanted=wanted, returned=returned, number=number or next(numbers))
    [grant] = await change_leases(database, producer, [one])
    return grant


async def leases_of(database: Database) -> list[tuple[str, str, int]]:
    """(producer, period, leased)"""
    columns = budget_leases.c
    async with database.reading() as connection:
        query = sa.select(columns.producer, columns.period, columns.leased).order_by(columns.producer, columns.period)
        return [tuple(row) for row in await connection.execute(query)]


async def test_spent_and_leased_are_never_more_than_the_budget(database_url: str) -> None:
    """Routers spend what they were granted without asking, so control must count it as spent at once."""
    async with usage_database(database_url, monthly_budget_nanos=100) as database:
        assert await change(database, "r0/1", wanted=60) == BudgetGrant(
            budget=MONTH, granted=60, remaining=40, limit=100
        )
        assert (await change(database, "r1/1", wanted=60)).granted == 40
        assert (await change(database, "r1/1", returned=30)).remaining == 30
        charge = Charge(TENANT, BUDGET_UNIT_NANOS, "2025-11", own=25, total=25)
        await store(database, [entry(usage_record(1, "a", charges=(charge,)))])
        after = await change(database, "r1/1", wanted=1000)
        assert (after.granted, after.remaining) == (30, 0), "what was leased for the record is spent now, once"


async def test_many_routers_at_once_cannot_lease_more_than_there_is(database_url: str) -> None:
    """Reading what is left and granting it must be one step."""
    async with usage_database(database_url, monthly_budget_nanos=1000) as database:
        grants = await asyncio.gather(*(change(database, f"r{i}/1", wanted=70) for i in range(30)))
        assert sum(grant.granted for grant in grants) == 1000


async def test_the_lease_of_a_dead_router_is_closed_when_all_its_records_are_known(database_url: str) -> None:
    """Before that, nobody knows how much of it was spent; after that, it must not be lost for the month."""
    async with usage_database(database_url, monthly_budget_nanos=100) as database:
        await change(database, "r0/1", wanted=100)
        await store(database, [entry(usage_record(2, "b"), closed_after=2)])
        assert (await change(database, "r1/1", wanted=100)).granted == 0
        stored = await store(database, [entry(usage_record(1, "a")), entry(closed_after=2)])
        assert stored == {"r0/1": Stored(2, is_closed=True)}
        assert (await change(database, "r1/1", wanted=100)).granted == 50
        with pytest.raises(ProducerClosedError):
            await change(database, "r0/1", wanted=1)


async def test_an_account_without_a_budget_gets_what_it_wants(database_url: str) -> None:
    """A limit may just have been removed."""
    async with usage_database(database_url) as database:
        grant = await change(database, "r0/1", wanted=7)
        assert (grant.granted, grant.limit) == (7, 0)
        assert await leases_of(database) == [("r0/1", "2025-11", 0)]


async def test_a_change_that_is_repeated_is_done_once(database_url: str) -> None:
    """A router that has lost the answer asks again: what it was granted must not be leased twice, and what it returned
    must not be taken twice."""
    async with usage_database(database_url, monthly_budget_nanos=100) as database:
        first = await change(database, "r0/1", wanted=60, number=7)
        assert await change(database, "r0/1", wanted=60, number=7) == first
        assert (await change(database, "r1/1", wanted=60, number=1)).granted == 40
        returned = await change(database, "r0/1", returned=25, number=8)
        assert await change(database, "r0/1", returned=25, number=8) == returned
        assert (returned.granted, returned.remaining) == (0, 25)
        assert await leases_of(database) == [("r0/1", "2025-11", 35), ("r1/1", "2025-11", 40)]


async def test_a_change_that_comes_too_late_does_nothing(database_url: str) -> None:
    """A connection that the router has given up may still deliver it, when nobody waits for the answer."""
    async with usage_database(database_url, monthly_budget_nanos=100) as database:
        await change(database, "r0/1", wanted=60, number=8)
        late = await change(database, "r0/1", wanted=30, returned=60, number=7)
        assert (late.granted, late.remaining) == (0, 40)
        assert await leases_of(database) == [("r0/1", "2025-11", 60)]


async def test_what_is_returned_is_not_granted_again_if_the_budget_was_lowered(database_url: str) -> None:
    """Spent and leased may then be more than there is; it must become less."""
    async with usage_database(database_url, monthly_budget_nanos=100) as database:
        await change(database, "r0/1", wanted=90)
        async with database.writing() as connection:
            await connection.execute(sa.update(projects).values(limits={"monthly_budget_nanos": 50}))
        grant = await change(database, "r0/1", returned=40, wanted=40)
        assert (grant.granted, grant.remaining, grant.limit) == (0, 0, 50)
        assert (await change(database, "r0/1", returned=20, wanted=40)).granted == 20


async def test_leases_of_periods_that_are_over_are_forgotten(database_url: str) -> None:
    """A router that is up for years has a lease of every day; what it has used of one is never forgotten."""
    october = BudgetName(account=MONTH.account, unit=MONTH.unit, period="2025-10")
    september = BudgetName(account=MONTH.account, unit=MONTH.unit, period="2025-09")
    async with usage_database(database_url, monthly_budget_nanos=100) as database:
        await change(database, "r0/1", wanted=10, budget=september)
        await change(database, "r0/1", wanted=10, budget=october)
        await change(database, "r0/1", returned=10, budget=october)
        await change(database, "r0/1", wanted=10)
        assert await leases_of(database) == [("r0/1", "2025-09", 10), ("r0/1", "2025-11", 10)]


async def test_a_budget_in_shadow_mode_is_leased_as_if_it_were_hard(database_url: str) -> None:
    """A router that is granted all it wants never finds out what the budget would refuse. What is spent beyond it is
    nobody's lease, and no notice is sent: the limit does not hold yet."""
    async with usage_database(database_url, monthly_budget_nanos=100, shadow=True) as database:
        assert await change(database, "r0/1", wanted=90) == BudgetGrant(
            budget=MONTH, granted=90, remaining=10, limit=100
        )
        charge = Charge(TENANT, BUDGET_UNIT_NANOS, "2025-11", own=90, total=500)
        await store(database, [entry(usage_record(1, "a", charges=(charge,)))], [50, 100], now=NOON)
        assert await change(database, "r1/1", wanted=1) == BudgetGrant(budget=MONTH, granted=0, remaining=0, limit=100)
        async with database.reading() as connection:
            assert await connection.scalar(sa.select(sa.func.sum(budget_leases.c.leased))) == 0
            assert not (await connection.execute(sa.select(budget_alerts))).all()


async def test_each_threshold_is_noted_once_a_period(database_url: str) -> None:
    """Nobody reads the tenth notice about the same budget."""
    async with usage_database(database_url, monthly_budget_nanos=100) as database:
        for number in range(1, 6):
            await store(database, [entry(usage_record(number, f"r{number}"))], [50, 100], now=NOON)
        async with database.reading() as connection:
            rows = await connection.execute(sa.select(budget_alerts).order_by(budget_alerts.c.percent))
            assert [(row.account, row.percent, row.spent) for row in rows] == [(TENANT, 50, 50), (TENANT, 100, 100)]


async def test_old_records_go_and_their_sums_stay(database_url: str) -> None:
    """The raw records of years would fill the disk, and nobody needs them after the bill was paid."""
    async with usage_database(database_url) as database:
        await store(database, [entry(usage_record(1, "a"), usage_record(2, "b", ended_at=NOON + 100))])
        assert await forget_records(database, NOON + 50) == 1
        assert (await totals(database))["num_requests"] == 2
        assert await store(database, [entry(usage_record(1, "a"), usage_record(3, "c"))]) == {"r0/1": Stored(3)}
        assert (await totals(database))["num_requests"] == 3, "a deleted record that comes again is no new one"
