"""A hostile tenant: it calls `Generate` itself, and claims that its answers were begun, how much of them it has, and
tickets of other answers; under names and in sizes that no client needs.

What it received it counts itself, so that it can be compared with what was metered (judgement.py).
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import grpc
import grpc.aio

from kvloom.transport.channel_options import open_plain_channel
from kvloom.v1.generation_pb2 import SamplingParams, StopConditions
from kvloom.v1.router_service_pb2 import GenerateRequest, PartialChoice, TokenIds
from kvloom.v1.router_service_pb2_grpc import RouterServiceStub
from lab.chaos.fabric.cluster import Cluster
from lab.chaos.tenants.operator import is_set_within
from lab.chaos.tenants.population import AMPLE_NANOS, ChaosTenant

MAX_PROMPT_TOKENS: Final = 60
_BUDGET_NANOS: Final = 20_000_000
_NUM_CLIENTS: Final = 2
_PAUSE_SECONDS: Final = 0.2
_CALL_SECONDS: Final = 20.0
_MAX_ID: Final = 4000
"""The largest token id that is sent: all models have these."""


def hostile_tenant() -> ChaosTenant:
    """Its prompts are short, its requests few, and its budget is used up in some minutes."""
    limits = {
        "monthly_budget_nanos": _BUDGET_NANOS,
        "requests_per_minute": 240,
        "tokens_per_minute": 20_000,
        "max_prompt_tokens": MAX_PROMPT_TOKENS,
    }
    return ChaosTenant("hostile/app", limits, _BUDGET_NANOS)


def greedy_tenant() -> ChaosTenant:
    """That of the attackers' process (lab/chaos/attackers/). No limit of its own protects the others."""
    return ChaosTenant("greedy/app", {"monthly_budget_nanos": AMPLE_NANOS}, AMPLE_NANOS)


@dataclasses.dataclass(slots=True)
class Claimed:
    """One request. Times are those of the monotonic clock."""

    request_id: str
    num_prompt: int
    num_claimed: int
    """Tokens that its choices were said to have, but for those that were said to be done: these are not computed."""
    has_ticket: bool
    """It sent one, which may hold or not."""
    sent_at: float
    ended_at: float = 0.0
    num_received: int = 0
    """Tokens of its choices."""
    code: str = ""
    """That of the RPC."""


@dataclasses.dataclass(slots=True)
class _Begun:
    request: GenerateRequest
    ticket: bytes
    choices: dict[int, list[int]]


class HostileTenant:
    """`made` has all of its requests. `tenant` has a key once it is set up."""

    def __init__(self, cluster: Cluster, seed: int, may_attack: Callable[[], bool] = lambda: True) -> None:
        """It waits while `may_attack` says no."""
        self._may_attack = may_attack
        self.tenant = hostile_tenant()
        self.made: list[Claimed] = []
        self._cluster = cluster
        self._rng = random.Random(f"hostile tenant of {seed}")
        self._begun: deque[_Begun] = deque(maxlen=20)
        self._number = 0

    async def run(self, stop: asyncio.Event) -> None:
        async with open_plain_channel(self._cluster.router_address) as channel, asyncio.TaskGroup() as tasks:
            for _ in range(_NUM_CLIENTS):
                tasks.create_task(self._run_client(RouterServiceStub(channel), stop), name="hostile client")

    async def _run_client(self, stub: RouterServiceStub, stop: asyncio.Event) -> None:
        while not stop.is_set():
            if self._may_attack():
                await self._ask(stub, self._draw())
            await is_set_within(stop, _PAUSE_SECONDS)

    async def _ask(self, stub: RouterServiceStub, request: GenerateRequest) -> None:
        num_claimed = sum(len(choice.token_ids) for choice in request.partial_choices if not choice.done)
        made = Claimed(
            request.request_id,
            len(request.token_ids.ids),
            num_claimed,
            bool(request.continuation_ticket),
            time.monotonic(),
        )
        self.made.append(made)
        begun = _Begun(request, b"", {})
        leave_after = self._rng.choice((None, None, 1, 5))
        call = stub.Generate(
            request,
            metadata=(("authorization", f"Bearer {self.tenant.lasting_key.secret}"),),
            timeout=_CALL_SECONDS,
            wait_for_ready=True,
        )
        try:
            async for response in call:
                for delta in response.deltas:
                    begun.ticket = delta.start.continuation_ticket or begun.ticket
                    begun.choices.setdefault(delta.index, []).extend(delta.token_ids)
                    made.num_received += len(delta.token_ids)
                if leave_after is not None and made.num_received >= leave_after:
                    break
            else:
                made.code = "OK"
        except grpc.aio.AioRpcError as error:
            made.code = error.code().name
        finally:
            call.cancel()
            made.ended_at = time.monotonic()
        if begun.ticket:
            self._begun.append(begun)

    # -- what it asks -------------------------------------------------------------------------------------------------

    def _draw(self) -> GenerateRequest:
        kind = self._rng.choice(("new", "new", "claims", "again", "again", "other", "size"))
        if kind in ("again", "other") and self._begun:
            return self._again(self._rng.choice(self._begun), is_other=kind == "other")
        request = self._new()
        if kind == "claims":
            for index in range(request.n):
                count = self._rng.choice((0, 1, 10, 200))
                request.partial_choices.add(
                    index=index, token_ids=self._tokens(count), done=index > 0 and self._rng.random() < 0.5
                )
        elif kind == "size":
            request.token_ids.ids[:] = self._tokens(self._rng.choice((MAX_PROMPT_TOKENS + 1, 5000)))
        return request

    def _new(self) -> GenerateRequest:
        rng = self._rng
        self._number += 1
        name = rng.choice((f"h{self._number}", f"h{self._number}@chaos-0/app", "same", "\u2603" * 200, f"{'h' * 250}"))
        return GenerateRequest(
            model=rng.choice(self._cluster.model_names),
            token_ids=TokenIds(ids=self._tokens(rng.randint(1, 30))),
            request_id=name,
            n=rng.choice((1, 1, 3)),
            stop=StopConditions(max_tokens=rng.choice((1, 20, 250)), ignore_eos=True),
            sampling=SamplingParams(temperature=rng.choice((0.0, 0.8)), seed=rng.randrange(1000)),
        )

    def _again(self, begun: _Begun, *, is_other: bool) -> GenerateRequest:
        """An answer that has begun, continued where it was left, or before, or later; or another answer under its name
        and with its ticket."""
        request = GenerateRequest()
        request.CopyFrom(begun.request)
        del request.partial_choices[:]
        for index in range(request.n):
            token_ids = begun.choices.get(index, [])
            most = self._rng.choice((len(token_ids), len(token_ids), 1, len(token_ids) // 2))
            claim = PartialChoice(index=index, token_ids=token_ids[:most])
            if self._rng.random() < 0.2:
                claim.token_ids.extend(self._tokens(100))
            request.partial_choices.append(claim)
        request.continuation_ticket = begun.ticket if self._rng.random() < 0.9 else begun.ticket[:-1]
        if is_other:
            request.sampling.seed += 1
            request.sampling.logit_bias[self._rng.randrange(_MAX_ID)] = 5.0
        return request

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(100, _MAX_ID) for _ in range(count)]
