"""TenantUsage is what an edge knows of its callers' usage: prices from the table of tenants, and budgets that it asks
control for, aside from requests, which never wait for that."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import grpc.aio
import structlog

from edge_http.answers.answer import AnswerFeature, EdgeAnswer
from edge_http.answers.bill import AnswerBill
from edge_http.wire.headers import BUDGET_REMAINING, COST
from kvloom.errors import KvloomError, control_unavailable
from kvloom.v1 import usage_service_pb2 as pb
from kvloom.v1.control_service_pb2 import BUDGET_UNIT_NANOS
from kvloom.v1.usage_service_pb2_grpc import UsageServiceStub
from kvloom_common.tenancy.principal import Principal

if TYPE_CHECKING:  # a fabric without tenants needs nothing of it
    from kvloom_common.access.identities import Identities

log = structlog.get_logger()

CALL_SECONDS: Final = 10.0
"""A time limit for calls."""
FRESH_SECONDS: Final = 5.0
"""A known budget is asked for again after so long."""
MAX_AGE_SECONDS: Final = 60.0
"""An older budget is not shown."""
MAX_CALLERS: Final = 10_000
MAX_QUESTIONS: Final = 4
"""That are asked at the same time."""

_HEADERS: Final = {"cost": COST, "budget_remaining": BUDGET_REMAINING}

_Caller = tuple[str, str]


class TenantUsage(AnswerFeature):
    """`watch` must run while requests are served."""

    def __init__(self, identities: Identities) -> None:
        self._identities = identities
        self._known: OrderedDict[_Caller, tuple[float, int | None]] = OrderedDict()
        """(when it was asked for, nanos that were left then; None: no budget)."""
        self._questions: set[asyncio.Task[None]] = set()
        self._asking: set[_Caller] = set()

    async def watch(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            for question in self._questions:
                question.cancel()

    @contextlib.asynccontextmanager
    async def service(self) -> AsyncIterator[UsageServiceStub]:
        """For calls within the context. Raises KvloomError (CONTROL_UNAVAILABLE) if there is no control service, or a
        call within fails."""
        channel = self._identities.control_channel
        if channel is None:
            raise control_unavailable()
        try:
            yield UsageServiceStub(channel)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError) as error:  # the latter if the channel was closed meanwhile
            raise control_unavailable() from error

    def begin(
        self, principal: Principal | None, model: str, answer: EdgeAnswer, *, is_batch: bool, is_told: bool
    ) -> None:
        if principal is None or not is_told:
            return
        prices, remaining = self._identities.tenants.table.prices, self._remaining(principal)
        answer.bill = AnswerBill(prices, model, time.time(), is_batch=is_batch, remaining_nanos=remaining)

    def headers(self, answer: EdgeAnswer, *, has_ended: bool) -> Mapping[str, str]:
        details = answer.bill_details() if has_ended else {}
        return {_HEADERS[name]: value for name, value in details.items()}

    def details(self, answer: EdgeAnswer, *, wanted: bool) -> Mapping[str, Any]:
        return answer.bill_details() if wanted else {}

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
            async with self.service() as usage:
                request = pb.GetBudgetsRequest(tenant=tenant, key_id=key_id)
                found = await usage.GetBudgets(request, timeout=CALL_SECONDS)
        except KvloomError as error:
            log.info("budget_lookup_failed", cause=error.message)
            return
        finally:
            self._asking.discard(caller)
        left = [max(0, one.limit - one.spent) for one in found.budgets if one.budget.unit == BUDGET_UNIT_NANOS]
        self._known[caller] = time.monotonic(), min(left, default=None)
        self._known.move_to_end(caller)
        if len(self._known) > MAX_CALLERS:
            self._known.popitem(last=False)
