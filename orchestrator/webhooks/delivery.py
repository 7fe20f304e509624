"""Works at one delivery: sends it once, and has it tried again later if it was not taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import structlog

from kvloom.errors import KvloomError
from kvloom_common.database.database import Database
from kvloom_common.trust.seal import SealError
from kvloom_common.trust.state_seal import StateSealer
from orchestrator.jobs.runner import Clock
from orchestrator.metrics import WEBHOOKS
from orchestrator.webhooks import outbox
from orchestrator.webhooks.caller import NotSentError, send
from orchestrator.webhooks.endpoint import check_url, is_private_host
from orchestrator.webhooks.outbox import PendingWebhook

log = structlog.get_logger()

MAX_DELIVERIES: Final = 32
"""That one process works at."""
FIRST_RETRY_SECONDS: Final = 5.0
MAX_RETRY_SECONDS: Final = 3600.0
GIVE_UP_SECONDS: Final = 86_400.0
_GONE: Final = 410


class WebhookDelivery:
    """Work (orchestrator/jobs/runner.py)."""

    def __init__(
        self,
        database: Database,
        sealer: StateSealer,
        private_hosts: Sequence[str],
        holder: str,
        job: Any,
        clock: Clock,
    ) -> None:
        self._database = database
        self._sealer = sealer
        self._private_hosts = private_hosts
        self._holder = holder
        self._job = job
        self._clock = clock

    async def look(self, now: float) -> None:
        pass

    async def run(self) -> None:
        delivery = await self._database.uninterrupted(outbox.read(self._database, self._job))
        if delivery is None:
            await self._database.uninterrupted(outbox.finish(self._database, self._job.id))
            return
        cause = await self._send(delivery)
        if not cause:
            WEBHOOKS.labels("sent").inc()
            await self._database.uninterrupted(outbox.finish(self._database, delivery.id, delivery.endpoint.id))
            return
        now = self._clock()
        until = now + wait_seconds(delivery.num_tries)
        names = {"endpoint": delivery.endpoint.id, "tenant": self._job.tenant, "webhook": delivery.event}
        if cause == str(_GONE) or until > delivery.created_at + GIVE_UP_SECONDS:
            WEBHOOKS.labels("given_up").inc()
            log.warning("webhook_abandoned", **names, cause=cause)
            await self._database.uninterrupted(outbox.finish(self._database, delivery.id))
            return
        WEBHOOKS.labels("failed").inc()
        log.info("webhook_failed", **names, cause=cause)
        await self._database.uninterrupted(outbox.put_off(self._database, self._holder, delivery, until))

    async def _send(self, delivery: PendingWebhook) -> str:
        """Returns why the endpoint has not taken it; "" if it has."""
        endpoint = delivery.endpoint
        try:
            check_url(endpoint.url, self._private_hosts)  # the operator may have changed them
            secrets = endpoint.secrets(self._sealer, self._clock())
            is_private = is_private_host(endpoint.url, self._private_hosts)
            status = await send(endpoint.url, delivery.event, delivery.body, secrets, may_be_private=is_private)
        except SealError as error:
            return f"its secret cannot be read: {error}"
        except NotSentError as error:
            return str(error)
        except KvloomError as error:
            return error.message
        return "" if 200 <= status < 300 else str(status)


def wait_seconds(num_tries: int) -> float:
    """Before the next try, after so many before the last one."""
    return min(FIRST_RETRY_SECONDS * 2.0 ** min(num_tries, 32), MAX_RETRY_SECONDS)
