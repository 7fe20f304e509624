"""Applies the planned faults to the fabric."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Callable, Sequence
from typing import Final

from lab.chaos.fabric.cluster import Cluster
from lab.chaos.fabric.faults import Disturbance, Fault, pick
from lab.chaos.fabric.model_faults import StrikeSkippedError
from lab.chaos.fabric.proxy import FaultProxy
from lab.chaos.fabric.surroundings import STRIKES
from tools.supervisor.supervised_process import ProcessState

_REPLACED_TIMEOUT_SECONDS: Final = 60.0
_RESET_SHARE: Final = 0.6
_SIGNALS: Final = {"kill": signal.SIGKILL, "stop": signal.SIGTERM}


class Injector:
    """`disturbances` lists the faults that have struck so far, in order."""

    def __init__(self, cluster: Cluster, seed: int, on_fault: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._rng = random.Random(f"connections of {seed}")
        self._on_fault = on_fault
        self.disturbances: list[Disturbance] = []
        self.num_skipped = 0
        """Faults that were skipped because the part was already down, or the only one."""
        self.never_restarted: list[str] = []

    async def run(self, faults: Sequence[Fault], begin: float) -> None:
        """Returns when every fault is over. `begin` is the start of the load on the monotonic clock."""
        async with asyncio.TaskGroup() as group:
            for fault in faults:
                await asyncio.sleep(max(0.0, begin + fault.at_seconds - time.monotonic()))
                group.create_task(self._strike(fault), name=f"fault {fault.kind}")

    async def _strike(self, fault: Fault) -> None:
        part = fault.kind.part
        if fault.kind in STRIKES:
            try:
                await self._disturb_for_a_while(fault)
            except StrikeSkippedError:
                self.num_skipped += 1
        elif part in ("clients", "link"):
            proxies = self._cluster.edge_proxies if part == "clients" else self._cluster.link_proxies
            name = pick(list(proxies), fault.choice)
            await self._disturb_link(fault, name, proxies[name])
        elif fault.kind.verb == "restart":
            await self._restart_process(fault, pick(self._cluster.names(part), fault.choice))
        else:
            await self._disturb_process(fault, pick(self._cluster.names(part), fault.choice))

    async def _disturb_for_a_while(self, fault: Fault) -> None:
        rng = random.Random(f"{fault.kind} at {fault.at_seconds}")
        began_at = time.monotonic()
        async with STRIKES[fault.kind](self._cluster, fault, rng) as name:
            disturbance = self._begin(fault, name)
            disturbance.began_at = began_at
            await asyncio.sleep(fault.duration_seconds)
        disturbance.ended_at = time.monotonic()

    async def _disturb_link(self, fault: Fault, name: str, proxy: FaultProxy) -> None:
        disturbance = self._begin(fault, name)
        if fault.kind.verb == "reset":
            proxy.reset(_RESET_SHARE if fault.kind.part == "clients" else 1.0, self._rng)
        else:
            proxy.stall()
            await asyncio.sleep(fault.duration_seconds)
            proxy.heal()
        disturbance.ended_at = time.monotonic()

    async def _restart_process(self, fault: Fault, name: str) -> None:
        if self._cluster.status(name).state != ProcessState.READY:
            self.num_skipped += 1
            return
        disturbance = self._begin(fault, name)
        if not await self._cluster.restart(name):
            self.num_skipped += 1  # another fault struck first
        disturbance.ended_at = time.monotonic()

    async def _disturb_process(self, fault: Fault, name: str) -> None:
        hangs = fault.kind.verb == "hang"
        pid = self._cluster.signal(name, signal.SIGSTOP if hangs else _SIGNALS[fault.kind.verb])
        if pid is None:
            self.num_skipped += 1
            return
        disturbance = self._begin(fault, name)
        if hangs:
            await asyncio.sleep(fault.duration_seconds)
            self._cluster.wake(pid)
        elif not await self._cluster.wait_replaced(name, pid, _REPLACED_TIMEOUT_SECONDS):
            self.never_restarted.append(
                f"{name} did not restart within {_REPLACED_TIMEOUT_SECONDS:g} s of {fault.kind}"
            )
        disturbance.ended_at = time.monotonic()

    def _begin(self, fault: Fault, name: str) -> Disturbance:
        lasts = f" for {fault.duration_seconds:.1f} s" if fault.duration_seconds else ""
        self._on_fault(f"{fault.kind} {name}{lasts}")
        disturbance = Disturbance(fault.kind, name, time.monotonic())
        self.disturbances.append(disturbance)
        return disturbance
