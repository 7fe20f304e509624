"""The spend of each tenant in this month, as a metric: the number that the page, the API and the CSV have, since all
of them read the same table."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Final

import sqlalchemy.exc
import structlog
from prometheus_client import REGISTRY, CollectorRegistry

from control import metric_table as table
from control.usage.accounts import day_of
from control.usage.report import usage_of
from kvloom.v1 import usage_service_pb2 as pb
from kvloom_common.database.database import Database
from kvloom_common.metrics.series import MAX_LABEL_VALUES, OTHER
from kvloom_common.metrics.table import CollectorOf
from kvloom_common.tenancy.prices import NANOS

log = structlog.get_logger()

REFRESH_SECONDS: Final = 30.0


class SpendMetric:
    """`run` is its task. A scrape shows what the last look at the database has found."""

    def __init__(
        self, database: Database, registry: CollectorRegistry = REGISTRY, clock: Callable[[], float] = time.time
    ) -> None:
        """`clock` returns Unix seconds."""
        self._database = database
        self._clock = clock
        self._by_tenant: Mapping[tuple[str, ...], float] = {}
        CollectorOf(registry, lambda: [table.USAGE_COST.collected(self._by_tenant)])

    async def run(self) -> None:
        while True:
            try:
                await self.refresh()
            except (sqlalchemy.exc.SQLAlchemyError, OSError) as error:
                log.warning("spend_lookup_failed", cause=type(error).__name__)
            await asyncio.sleep(REFRESH_SECONDS)

    async def refresh(self) -> None:
        """Raises SQLAlchemyError."""
        month = day_of(self._clock())[:7]
        request = pb.GetUsageRequest(first_day=f"{month}-01", group_by=[pb.USAGE_GROUP_TENANT])
        rows = sorted((await usage_of(self._database, request)).rows, key=lambda row: -row.cost_nanos)
        found: dict[tuple[str, ...], float] = {(row.tenant,): row.cost_nanos / NANOS for row in rows[:MAX_LABEL_VALUES]}
        if rest := rows[MAX_LABEL_VALUES:]:
            found[(OTHER,)] = sum(row.cost_nanos for row in rest) / NANOS
        self._by_tenant = found
