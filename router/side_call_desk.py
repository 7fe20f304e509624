"""Calls that compute no answer wait here for what the core says about their limits.

See router/core/tenancy/side_calls.py.
"""

from __future__ import annotations

import asyncio
import itertools

from kvloom.limits_state import LimitsState, limits_state_to_proto
from kvloom.v1.router_service_pb2 import ChargeCallRequest, ChargeCallResponse
from router.caller_scope import CallerScope
from router.core.events import SideCallArrived, SideCallSettled
from router.core.lease_messages import SideCallDecided
from router.core_driver import CoreDriver


class SideCallDesk:
    """`has_limits`: whether the core has a limiter; without one nothing is charged."""

    def __init__(self, driver: CoreDriver, *, has_limits: bool) -> None:
        self._driver = driver
        self._has_limits = has_limits
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[SideCallDecided]] = {}
        if has_limits:
            driver.set_side_calls(self)

    async def charge(self, scope: CallerScope, num_tokens: int) -> None:
        """Charge a call of a tenant that reads about so many tokens. Calls of the fabric's processes are charged by
        these. Raises KvloomError (RATE_LIMITED, REQUEST_TOO_LARGE, OVERLOADED)."""
        if scope.caller is not None and scope.access is not None:
            await self._charge(scope.caller, scope.key_id, num_tokens)

    def settle(self, scope: CallerScope, num_more_tokens: int) -> None:
        """A call that was charged has read so many tokens more; below 0: fewer."""
        if self._has_limits and scope.caller is not None and scope.access is not None:
            self._driver.dispatch(SideCallSettled(scope.caller, scope.key_id, num_more_tokens))

    async def serve(self, request: ChargeCallRequest) -> ChargeCallResponse:
        """For edges. Raises KvloomError."""
        response = ChargeCallResponse()
        if request.num_more_tokens:
            if self._has_limits:
                self._driver.dispatch(SideCallSettled(request.tenant, request.key_id, request.num_more_tokens))
            return response
        state = await self._charge(request.tenant, request.key_id, request.num_tokens)
        if state is not None:
            response.limits.CopyFrom(limits_state_to_proto(state))
        return response

    async def _charge(self, tenant: str, key_id: str, num_tokens: int) -> LimitsState | None:
        if not self._has_limits:
            return None
        call_id = next(self._numbers)
        decision = self._waiting[call_id] = asyncio.get_running_loop().create_future()
        try:
            self._driver.dispatch(SideCallArrived(call_id, tenant, key_id, num_tokens))
            decided = await decision
        finally:
            del self._waiting[call_id]
        if decided.error is not None:
            raise decided.error
        return decided.limits

    # -- SideCallSink -----------------------------------------------------------------------------------------------

    def side_call_decided(self, action: SideCallDecided) -> None:
        decision = self._waiting.get(action.call_id)
        if decision is not None and not decision.done():
            decision.set_result(action)
