"""Asks the control service for leases of hard budgets, over one stream that is opened when it is needed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

import grpc
import structlog
from google.protobuf.message import DecodeError

from kvloom.transport.channel_options import CHANNEL_OPTIONS
from kvloom.v1 import control_service_pb2_grpc
from kvloom.v1.control_service_pb2 import (
    BUDGET_UNIT_NANOS,
    BUDGET_UNIT_TOKENS,
    BudgetChange,
    BudgetName,
    LeaseBudgetsRequest,
    LeaseBudgetsResponse,
)
from kvloom_common.access.tenant_follower import ROLE
from kvloom_common.process.cancellation import raise_if_cancelled
from kvloom_common.trust.fabric_trust import FabricTrust
from router.core.events import LeasesGranted
from router.core.lease_messages import LeaseGrant, LeaseKind, LeaseName, LeaseWant

log = structlog.get_logger()

ANSWER_SECONDS: Final = 0.75
"""How long requests wait for the service: less than the core holds them (limiter.HOLD_SECONDS)."""
PATIENCE_SECONDS: Final = 5.0
"""How long the only service may take. One that is busy would never answer if it were asked anew each time."""
MAX_CHANGES: Final = 512
"""A request names at most so many changes."""

Call = grpc.aio.StreamStreamCall[LeaseBudgetsRequest, LeaseBudgetsResponse]
_FAILURES: Final = (grpc.aio.AioRpcError, TimeoutError, asyncio.InvalidStateError, DecodeError, EOFError)


class BudgetLeases:
    """`ask` never blocks. Every want is answered. A want that has failed may have been granted, or be granted late; the
    core asks for it again under the same number."""

    def __init__(
        self,
        producer: str,
        candidates: Callable[[], Sequence[str]],
        trust: FabricTrust,
        on_answer: Callable[[LeasesGranted], None],
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        """`producer`: as in usage records. `candidates`: addresses of the service, best first. A want that is not
        answered in `answer_seconds` has failed."""
        self._producer = producer
        self._candidates = candidates
        self._trust = trust
        self._on_answer = on_answer
        self._answer_seconds = answer_seconds
        self._late: asyncio.TimerHandle | None = None
        self._wants: dict[LeaseName, LeaseWant] = {}
        self._wake = asyncio.Event()
        self._channel: grpc.aio.Channel | None = None
        self._call: Call | None = None
        self._turn = 0
        self.is_up = True
        """True when the service answered last."""

    def ask(self, wants: Sequence[LeaseWant]) -> None:
        self._wants.update((want.name, want) for want in wants)
        self._wake.set()

    async def run(self) -> None:
        """Runs until it is cancelled."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._wants:
                    await self._exchange()
        finally:
            await self._close()

    async def _exchange(self) -> None:
        names = list(self._wants)[:MAX_CHANGES]
        wants = [self._wants.pop(name) for name in names]
        self._watch(names)
        has_others = len(self._candidates()) > 1
        try:
            async with asyncio.timeout(self._answer_seconds if has_others else PATIENCE_SECONDS):
                response = await self._ask(wants)
            grants = [
                LeaseGrant(want.name, grant.granted, grant.remaining, grant.limit, want.asked_at, want.number)
                for want, grant in zip(wants, response.grants, strict=True)
            ]
        except (*_FAILURES, ValueError, asyncio.CancelledError) as error:  # gRPC cancels the reader of a broken call.
            raise_if_cancelled()
            self._note(is_up=False, cause=type(error).__name__)
            await self._close()
            self._on_answer(LeasesGranted(failed=names))
            return
        finally:
            if self._late is not None:
                self._late.cancel()
        self._note(is_up=True)
        self._on_answer(LeasesGranted(grants))

    def _watch(self, names: Sequence[LeaseName]) -> None:
        """Until the answer to what was asked for these names arrives, say that there is none, and none to what was
        asked since."""

        def say() -> None:
            self._note(is_up=False, cause="TimeoutError")
            self._on_answer(LeasesGranted(failed=[*{*names, *self._wants}]))
            self._watch(names)

        self._late = asyncio.get_running_loop().call_later(self._answer_seconds, say)

    async def _ask(self, wants: Sequence[LeaseWant]) -> LeaseBudgetsResponse:
        request = LeaseBudgetsRequest(changes=[_change(want) for want in wants])
        if self._call is None:
            self._call = self._open()
            request.producer = self._producer
        await self._call.write(request)
        response = await self._call.read()
        if isinstance(response, LeaseBudgetsResponse):
            return response
        raise EOFError("the service has ended the stream")

    def _open(self) -> Call:
        candidates = self._candidates()
        if not candidates:
            raise EOFError("no control service is known")
        address = candidates[self._turn % len(candidates)]
        self._turn += 1
        self._channel = self._trust.open_channel(address, ROLE, options=CHANNEL_OPTIONS)
        return control_service_pb2_grpc.ControlServiceStub(self._channel).LeaseBudgets()

    async def _close(self) -> None:
        call, self._call = self._call, None
        channel, self._channel = self._channel, None
        if call is not None:
            call.cancel()
        if channel is not None:
            await channel.close()

    def _note(self, *, is_up: bool, cause: str = "") -> None:
        if is_up != self.is_up:
            self.is_up = is_up
            if is_up:
                log.info("budget_lease_resumed")
            else:
                log.warning("budget_lease_failed", cause=cause)


def _change(want: LeaseWant) -> BudgetChange:
    unit = BUDGET_UNIT_TOKENS if want.name.kind is LeaseKind.DAY_TOKENS else BUDGET_UNIT_NANOS
    name = BudgetName(account=want.name.account, unit=unit, period=want.name.period)
    return BudgetChange(budget=name, returned=want.returned, wanted=want.wanted, number=want.number)
