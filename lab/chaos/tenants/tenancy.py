"""All of a run's tenants: set up before the users come, changed and trespassed against meanwhile, and judged at the
end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from kvloom.v1.control_service_pb2 import BUDGET_UNIT_NANOS
from kvloom.v1.usage_service_pb2 import BudgetState
from kvloom_common.delivery_log import read_witness, witness_files
from lab.chaos.checking.record import Record
from lab.chaos.fabric.cluster import Cluster
from lab.chaos.fabric.faults import Disturbance
from lab.chaos.tenants.control import ControlDesk
from lab.chaos.tenants.hostile import HostileTenant, greedy_tenant
from lab.chaos.tenants.judgement import Books, judge_hostile, judge_tenants
from lab.chaos.tenants.operator import Operator
from lab.chaos.tenants.population import make_tenants
from lab.chaos.tenants.trespass import OpenAnswer, Trespasser
from tools.failures import CommandError
from tools.usage.reconcile import reconcile

_SETTLE_SECONDS: Final = 60.0
"""How long records and leases may take to arrive at the end."""
_POLL_SECONDS: Final = 1.0


class Tenancy:
    def __init__(self, cluster: Cluster, count: int, seed: int, may_attack: Callable[[], bool] = lambda: True) -> None:
        """`may_attack`: whether the hostile tenant may, at this moment."""
        self._cluster = cluster
        self._seed = seed
        self._desk = ControlDesk(cluster)
        self.tenants = make_tenants(count)
        self.open_answers: dict[str, OpenAnswer] = {}
        self._operator = Operator(cluster, self.tenants, seed)
        self.hostile = HostileTenant(cluster, seed, may_attack)
        self._greedy = greedy_tenant()
        self._trespasser = Trespasser(cluster, self.tenants, self.open_answers, seed)
        self._books: Books | None = None
        self._ended_at = 0.0

    async def set_up(self) -> None:
        """Returns when all keys are known. Raises CommandError and KvloomError."""
        await self._operator.set_up(self.hostile.tenant, self._greedy)
        self._cluster.probe_key = self.tenants[0].lasting_key.secret
        self._cluster.attackers_key = self._greedy.lasting_key.secret

    async def run(self, stop: asyncio.Event) -> None:
        """Returns when `stop` is set and the last change has been made."""
        async with self._trespasser, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._operator.run(stop), name="operator")
            tasks.create_task(self._trespasser.run(stop), name="trespasser")
            tasks.create_task(self.hostile.run(stop), name="hostile tenant")

    async def close(self) -> None:
        """At the end, when all faults are over: try all revoked keys once more, and wait until nothing is on its
        way."""
        self._ended_at = time.monotonic()
        async with self._trespasser:
            await self._trespasser.use_all_revoked()
        deadline = time.monotonic() + _SETTLE_SECONDS
        while True:
            with contextlib.suppress(CommandError):
                self._books = await self._close_books()
                if self._books.reconciliation.is_exact and self._are_settled(self._books):
                    return
            if time.monotonic() > deadline:
                return
            await asyncio.sleep(_POLL_SECONDS)

    def judge(self, records: Sequence[Record], disturbances: Sequence[Disturbance]) -> dict[str, Any]:
        """The figures, with `problems`."""
        if self._books is None:
            return {"problems": ["control could not be asked what was metered"]}
        found = judge_tenants(self.tenants, records, disturbances, self._trespasser.found, self._books, self._ended_at)
        hostile = judge_hostile(self.hostile.tenant, self.hostile.made, disturbances, self._books)
        for name in ("problems", "mis_metered", "over_served"):
            found[name] += hostile.pop(name)
        return {**found, "hostile": hostile, "changes": dict(self._operator.changes)}

    async def _close_books(self) -> Books:
        answers = await self._desk.answers()
        tenants = [*self.tenants, self.hostile.tenant, self._greedy]
        budgets = {tenant.id: await self._budget_of(tenant.id) for tenant in tenants}
        files = witness_files(self._cluster.folder.data_dir)
        witnessed = await asyncio.to_thread(lambda: list(read_witness(files)))
        return Books(answers, budgets, reconcile(answers, witnessed))

    async def _budget_of(self, tenant: str) -> BudgetState:
        of_tenant = [
            state
            for state in await self._desk.budgets(tenant)
            if state.budget.account == f"tenant:{tenant}" and state.budget.unit == BUDGET_UNIT_NANOS
        ]
        return of_tenant[0]

    def _are_settled(self, books: Books) -> bool:
        costs = dict.fromkeys(books.budgets, 0)
        for answer in books.answers:
            costs[answer.tenant] += answer.cost_nanos
        return all(state.spent == costs[name] and not state.leased for name, state in books.budgets.items())
