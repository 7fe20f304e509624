"""Runs the consumer of usage records and the notices about budgets in the control process, beside its RPCs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import redis.asyncio.retry
import redis.backoff
import structlog

from control.usage.consumer import UsageConsumer
from control.usage.metrics import UsageMetrics
from control.usage.spend import SpendMetric
from control.usage.webhook import AlertSender
from kvloom_common.config import KvloomConfig
from kvloom_common.database.database import Database
from kvloom_common.discovery.redis_client import redis_client
from kvloom_common.process.service import StartError
from kvloom_common.tenancy.usage_stream import UsageStream
from kvloom_common.trust.seal import Sealer

log = structlog.get_logger()

REDIS_TIMEOUT_SECONDS: Final = 5.0
DAY_SECONDS: Final = 86_400.0


class UsageWork:
    """`run` is its task."""

    def __init__(self, config: KvloomConfig, database: Database, sealer: Sealer, name: str) -> None:
        """Raises StartError for a webhook secret that cannot be used."""
        metrics = UsageMetrics()
        self._spend = SpendMetric(database)
        control = config.control
        self._sender = None
        if control.webhook_urls:
            self._sender = _sender(config, database, metrics)
        self._client = self._consumer = None
        if not config.redis.url:
            log.warning("usage_metering_disabled", cause="redis.url is not set")
            return
        retry = redis.asyncio.retry.Retry(redis.backoff.NoBackoff(), 0)
        self._client = redis_client(config.redis.url, timeout_seconds=REDIS_TIMEOUT_SECONDS, retry=retry)
        self._consumer = UsageConsumer(
            database,
            self._client,
            UsageStream(config.redis.key_prefix, sealer),
            name,
            metrics,
            control.budget_alert_percents if control.webhook_urls else (),
            control.usage_record_days * DAY_SECONDS,
        )

    async def run(self) -> None:
        """Runs until it is cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._spend.run(), name="spend metric")
                if self._consumer is not None:
                    tasks.create_task(self._consumer.run(), name="usage consumer")
                if self._sender is not None:
                    tasks.create_task(self._sender.run(), name="budget alerts")
        finally:
            if self._client is not None:
                await self._client.aclose()


def _sender(config: KvloomConfig, database: Database, metrics: UsageMetrics) -> AlertSender:
    path = Path(config.control.webhook_secret_file)
    try:
        return AlertSender(database, config.control.webhook_urls, path.read_text().strip(), metrics)
    except OSError as error:
        raise StartError(f"control.webhook_secret_file {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise StartError(f"control.webhook_secret_file {path} has no secret: {error}") from error
