"""What a tenant has spent is one number: in Prometheus, in the API and in the CSV."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry

from control.metric_table import USAGE_COST
from control.usage.ledger import store
from control.usage.spend import SpendMetric
from kvloom_common.metrics.series import MAX_LABEL_VALUES
from kvloom_common.tenancy.usage_stream import UsageEntry
from tests.fakes.usage import NOON, usage_database, usage_record
from tests.integration.test_edge_admin import admin_world, ask


async def test_prometheus_has_the_number_of_the_api(tmp_path: Path) -> None:
    """Finance reads the CSV, the team the page, and the operator Grafana: all of them must be right."""
    async with admin_world(tmp_path, operator_organisation="staff") as (edge, world, secrets):
        records = [usage_record(n, f"r{n}", cost_nanos=1_234_567 * n, key_id="") for n in (1, 2, 3)]
        await store(world.database, [UsageEntry(records[0].producer, tuple(records), None)])
        registry = CollectorRegistry()
        await SpendMetric(world.database, registry, lambda: NOON).refresh()
        shown = registry.get_sample_value(USAGE_COST.name, {"tenant": "acme/search"})
        api = await ask(edge, secrets["admin"], "GET", "usage?first_day=2025-11-01&last_day=2025-11-30")
        (row,) = api["data"]
        assert row["tenant"] == "acme/search"
        assert shown == float(row["cost"]) == 6 * 1_234_567 / 1e9
        headers = {"Authorization": f"Bearer {secrets['operator']}"}
        async with edge.http.get(f"{edge.url}/admin/v1/usage?by=tenant&format=csv", headers=headers) as response:
            assert (await response.text()).splitlines()[1].split(",")[-1] == row["cost"]


async def test_a_month_ends_and_many_tenants_are_folded(database_url: str) -> None:
    """A series for each of a hundred thousand tenants would be too many; last month's spend is last month's."""
    async with usage_database(database_url) as database:
        count = MAX_LABEL_VALUES + 10
        records = [
            usage_record(n, f"r{n}", tenant=f"acme/p{n}", key_id="", cost_nanos=1000 + n) for n in range(1, count + 1)
        ]
        await store(database, [UsageEntry(records[0].producer, tuple(records), None)])
        registry = CollectorRegistry()
        now = [NOON]
        metric = SpendMetric(database, registry, lambda: now[0])
        await metric.refresh()
        (family,) = registry.collect()
        assert len(family.samples) == MAX_LABEL_VALUES + 1
        total = sum(one.cost_nanos for one in records) / 1e9
        assert abs(sum(sample.value for sample in family.samples) - total) < 1e-12
        now[0] += 31 * 86_400
        await metric.refresh()
        (family,) = registry.collect()
        assert family.samples == []
