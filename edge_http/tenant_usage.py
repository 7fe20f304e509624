"""What an edge knows of its callers' usage: prices from the table of tenants, and budgets that it asks control for,
aside from requests, which never wait for that."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from typing import Final

import structlog

from edge_http.answers.bill import AnswerBill
from kvloom.access.control_client import CALL_SECONDS, ControlClient
from kvloom.access.tenants import Tenants
from kvloom.errors import KvloomError
from kvloom.tenancy.principal import Principal
from kvloom.v1 import usage_service_pb2 as pb
from kvloom.v1.control_service_pb2 import BUDGET_UNIT_NANOS

log = structlog.get_logger()

FRESH_SECONDS: Final = 5.0
"""What is known of a budget is asked for again after that."""
MAX_AGE_SECONDS: Final = 60.0
"""What is older is not shown."""
MAX_CALLERS: Final = 10_000
MAX_QUESTIONS: Final = 4
"""That are asked at the same time."""

_Caller = tuple[str, str]


class TenantUsage:
    """`watch` must run while requests are served."""

    def __init__(self, tenants: Tenants, control: ControlClient) -> None:
        self.control = control
        self._tenants = tenants
        self._known: OrderedDict[_Caller, tuple[float, int | None]] = OrderedDict()
        """(when it was asked for, nanos that were left then; None: no budget)."""
        self._questions: set[asyncio.Task[None]] = set()
        self._asking: set[_Caller] = set()

    async def watch(self) -> None:
        try:
            await self.control.watch()
            await asyncio.Event().wait()
        finally:
            for question in self._questions:
                question.cancel()

    def bill(self, principal: Principal, model: str, *, is_batch: bool) -> AnswerBill:
        """For a request that arrives now."""
        remaining = self._remaining(principal)
        return AnswerBill(self._tenants.table.prices, model, time.time(), is_batch=is_batch, remaining_nanos=remaining)

    def _remaining(self, principal: Principal) -> int | None:
        caller = principal.tenant, principal.key_id
        now = time.monotonic()
        asked_at, remaining = self._known.get(caller, (-MAX_AGE_SECONDS, None))
        if now - asked_at > FRESH_SECONDS and caller not in self._asking and len(self._questions) < MAX_QUESTIONS:
            self._asking.add(caller)
            question = asyncio.create_task(self._ask(caller), name="budget")
            self._questions.add(question)
            question.add_done_callback(self._questions.discard)
        return remaining if now - asked_at < MAX_AGE_SECONDS else None

    async def _ask(self, caller: _Caller) -> None:
        tenant, key_id = caller
        try:
            async with self.control.usage() as usage:
                request = pb.GetBudgetsRequest(tenant=tenant, key_id=key_id)
                found = await usage.GetBudgets(request, timeout=CALL_SECONDS)
        except KvloomError as error:
            log.info("a budget is not known", cause=error.message)
            return
        finally:
            self._asking.discard(caller)
        left = [max(0, one.limit - one.spent) for one in found.budgets if one.budget.unit == BUDGET_UNIT_NANOS]
        self._known[caller] = time.monotonic(), min(left, default=None)
        self._known.move_to_end(caller)
        if len(self._known) > MAX_CALLERS:
            self._known.popitem(last=False)
