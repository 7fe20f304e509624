"""Sends notices about budgets to the configured URLs, signed as standardwebhooks.com describes it.

Nothing but those URLs is ever called: redirects are not followed. A notice that could not be sent is tried again, less
and less often, and given up after a day. Each URL gets a notice at least once; `webhook-id` tells repeats apart.
"""

from __future__ import annotations

import asyncio
import datetime
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import sqlalchemy as sa
import structlog
from standardwebhooks import Webhook

from control.database.usage_tables import budget_alerts
from control.usage.metrics import UsageMetrics
from kvloom.v1.control_service_pb2 import BUDGET_UNIT_NANOS
from kvloom_common.database.database import DATABASE_ERRORS, Database
from kvloom_common.transport.public_addresses import NoRedirects

log = structlog.get_logger()

POLL_SECONDS: Final = 1.0
TIMEOUT_SECONDS: Final = 5.0
MAX_AT_A_TIME: Final = 16
FIRST_RETRY_SECONDS: Final = 5.0
MAX_RETRY_SECONDS: Final = 3600.0
GIVE_UP_SECONDS: Final = 86_400.0


class AlertSender:
    """`run` is its task."""

    def __init__(
        self,
        database: Database,
        urls: Sequence[str],
        secret: str,
        metrics: UsageMetrics,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        """Raises ValueError for a secret that is none. The database is asked every `poll_seconds`."""
        self._database = database
        self._urls = urls
        self._webhook = Webhook(secret)
        self._metrics = metrics
        self._poll_seconds = poll_seconds
        self._opener = urllib.request.build_opener(NoRedirects, urllib.request.ProxyHandler({}))

    async def run(self) -> None:
        """Runs until it is cancelled."""
        while True:
            try:
                await self.send_due(time.time())
            except DATABASE_ERRORS as error:
                log.warning("budget_notices_read_failed", cause=type(error).__name__)
            await asyncio.sleep(self._poll_seconds)

    async def send_due(self, now: float) -> None:
        """Try all notices that are due at `now` (seconds since 1970). Raises SQLAlchemyError."""
        alerts = budget_alerts.c
        waiting = (
            sa.select(budget_alerts)
            .where(alerts.sent_at.is_(None), alerts.reached_at > now - GIVE_UP_SECONDS)
            .order_by(alerts.num_tries, alerts.reached_at)
            .limit(MAX_AT_A_TIME)
        )
        rows = await self._database.uninterrupted(self._rows(waiting))
        due = [row for row in rows if now >= row.reached_at + _wait_seconds(row.num_tries)]
        for row, was_sent in zip(due, await asyncio.gather(*map(self._send, due)), strict=True):
            self._metrics.alerts.labels("sent" if was_sent else "failed").inc()
            values = {"num_tries": row.num_tries + 1, "sent_at": now if was_sent else None}
            changed = sa.update(budget_alerts).where(alerts.id == row.id).values(**values)
            await self._database.uninterrupted(self._execute(changed))

    async def _rows(self, query: sa.Select[Any]) -> Sequence[Any]:
        async with self._database.reading() as connection:
            return (await connection.execute(query)).all()

    async def _execute(self, statement: sa.Update) -> None:
        async with self._database.writing() as connection:
            await connection.execute(statement)

    async def _send(self, row: Any) -> bool:
        body = msgspec.json.encode(
            {
                "type": "budget.threshold_reached",
                "timestamp": _iso(row.reached_at),
                "data": {
                    "account": row.account,
                    "unit": "nanos" if row.unit == BUDGET_UNIT_NANOS else "tokens",
                    "period": row.period,
                    "percent": row.percent,
                    "spent": row.spent,
                    "limit": row.limit,
                },
            }
        ).decode()
        sent_at = datetime.datetime.now(datetime.UTC)
        headers = {
            "content-type": "application/json",
            "webhook-id": f"msg_{row.id}",
            "webhook-timestamp": str(int(sent_at.timestamp())),
            "webhook-signature": self._webhook.sign(f"msg_{row.id}", sent_at, body),
        }
        results = await asyncio.gather(*(asyncio.to_thread(self._post, url, body, headers) for url in self._urls))
        return all(results)

    def _post(self, url: str, body: str, headers: dict[str, str]) -> bool:
        request = urllib.request.Request(url, body.encode(), headers, method="POST")
        try:
            with self._opener.open(request, timeout=TIMEOUT_SECONDS) as response:
                return 200 <= response.status < 300
        except (OSError, ValueError) as error:  # urllib's errors are OSErrors
            log.warning("budget_notice_failed", cause=str(error)[:200])
            return False


def _wait_seconds(num_tries: int) -> float:
    """Since the threshold was reached, before the next try."""
    return 0.0 if not num_tries else min(FIRST_RETRY_SECONDS * 2.0**num_tries, MAX_RETRY_SECONDS * num_tries)


def _iso(seconds_since_1970: float) -> str:
    return datetime.datetime.fromtimestamp(seconds_since_1970, datetime.UTC).isoformat().replace("+00:00", "Z")
