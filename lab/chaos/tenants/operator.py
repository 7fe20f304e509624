"""Sets the tenants up, and during the run revokes keys and changes limits."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import aiohttp

from kvloom.v1.control_service_pb2 import Limits
from lab.chaos.fabric.cluster import Cluster
from lab.chaos.tenants.control import ControlDesk
from lab.chaos.tenants.population import MORE_SCARCE_NANOS, OUTPUT_NANOS, PROMPT_NANOS, REQUESTS_PER_MINUTE, ChaosTenant
from tools.failures import CommandError

_PAUSE_SECONDS: Final = (2.0, 5.0)
"""Between two changes."""
_OVERLAP_SECONDS: Final = 1.5
"""Between a new key and the end of the one before: time for it to be known everywhere, if nothing is away."""
_KNOWN_SECONDS: Final = 30.0
_POLL_SECONDS: Final = 0.1


class Operator:
    """`changes` counts what was changed."""

    def __init__(self, cluster: Cluster, tenants: Sequence[ChaosTenant], seed: int) -> None:
        self._cluster = cluster
        self._tenants = tenants
        self._desk = ControlDesk(cluster)
        self._rng = random.Random(f"operator of {seed}")
        self.changes: Counter[str] = Counter()

    async def set_up(self, *others: ChaosTenant) -> None:
        """Returns when every edge knows all keys. `others` are tenants of which nothing is changed later. Raises
        CommandError and KvloomError."""
        tenants = [*self._tenants, *others]
        price = {"model": "*", "prompt_nanos": PROMPT_NANOS, "output_nanos": OUTPUT_NANOS}
        await self._desk.change("CreatePrice", price=price)
        for tenant in tenants:
            project = {"id": tenant.id, "limits": _limits(tenant.limits)}
            await self._desk.change("CreateProject", project=project, create_organisation=True)
            for _ in range(2):
                await self._issue_key(tenant)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
            for tenant in tenants:
                await self._wait_until_known(session, tenant)

    async def run(self, stop: asyncio.Event) -> None:
        """Change something now and then until `stop` is set. Raises CommandError and KvloomError."""
        while not await is_set_within(stop, self._rng.uniform(*_PAUSE_SECONDS)):
            tenant = self._rng.choice(self._tenants)
            if tenant.is_scarce and self._rng.random() < 0.5:
                await self._add_to_budget(tenant)
            elif "requests_per_minute" in tenant.limits and self._rng.random() < 0.5:
                await self._change_rate(tenant)
            else:
                await self._replace_key(tenant)

    async def _replace_key(self, tenant: ChaosTenant) -> None:
        old = tenant.current_key
        await self._issue_key(tenant)
        await asyncio.sleep(_OVERLAP_SECONDS)
        await self._desk.change("RevokeKey", id=old.id)
        old.revoked_at = time.monotonic()
        self.changes["keys revoked"] += 1

    async def _issue_key(self, tenant: ChaosTenant) -> None:
        found = await self._desk.change("CreateKey", key={"project": tenant.id})
        tenant.add_key(found.key.id, found.secret)

    async def _add_to_budget(self, tenant: ChaosTenant) -> None:
        budget = tenant.largest_budget_nanos + MORE_SCARCE_NANOS
        tenant.largest_budget_nanos = budget  # before it is in force: an answer that has it in hand is none too many
        await self._set_limit(tenant, "monthly_budget_nanos", budget)
        self.changes["budgets raised"] += 1

    async def _change_rate(self, tenant: ChaosTenant) -> None:
        (other,) = {*REQUESTS_PER_MINUTE} - {tenant.limits["requests_per_minute"]}
        await self._set_limit(tenant, "requests_per_minute", other)
        self.changes["rates changed"] += 1

    async def _set_limit(self, tenant: ChaosTenant, name: str, value: int) -> None:
        tenant.limits[name] = value
        project = {"id": tenant.id, "limits": _limits({name: value})}
        await self._desk.change("UpdateProject", project=project, update_mask={"paths": [f"limits.{name}"]})

    async def _wait_until_known(self, session: aiohttp.ClientSession, tenant: ChaosTenant) -> None:
        deadline = time.monotonic() + _KNOWN_SECONDS
        num_edges = len(self._cluster.names("edge"))
        for key in tenant.keys:
            headers, num_known = {"Authorization": f"Bearer {key.secret}"}, 0
            while num_known < 4 * num_edges:  # they share a port: so often that each was asked
                async with session.get(f"http://{self._cluster.http_address}/v1/models", headers=headers) as response:
                    num_known = num_known + 1 if response.status == 200 else 0
                if time.monotonic() > deadline:
                    raise CommandError(f"the keys of {tenant.id} were not known within {_KNOWN_SECONDS:g} s")
                await asyncio.sleep(0.0 if num_known else _POLL_SECONDS)


def _limits(values: Mapping[str, int]) -> Limits:
    limits = Limits()
    for name, value in values.items():
        setattr(limits, name, value)
    return limits


async def is_set_within(stop: asyncio.Event, seconds: float) -> bool:
    """Waits for so long, or until it is set."""
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        return False
    return True
