"""Compares the data plane with other gateways: all of them run at once and are measured alternately."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final

from lab.bench.data_plane.client import drive
from lab.bench.data_plane.peer_systems import System, gateway, http_workers, our_fabric, site_of
from lab.bench.data_plane.run import BenchPlan, figures_of, pace_of, report_of, warm_ups
from lab.bench.data_plane.workloads import Workload
from lab.bench.peers.dynamo import DYNAMO
from lab.bench.peers.install import Installed, install
from lab.bench.peers.litellm import LITELLM
from lab.bench.peers.nginx import NGINX
from lab.bench.peers.peer import Peer, PeerError
from lab.bench.peers.sglang_router import SGLANG_ROUTER
from lab.bench.peers.smg import SMG, SMG_GRPC
from lab.bench.peers.vllm_router import VLLM_ROUTER, VLLM_ROUTER_ROUND_ROBIN
from tools.failures import CommandError

PEERS: Final = {
    peer.name: peer
    for peer in (NGINX, SGLANG_ROUTER, SMG, SMG_GRPC, VLLM_ROUTER, VLLM_ROUTER_ROUND_ROBIN, DYNAMO, LITELLM)
}
_SETTLE_SECONDS: Final = 1.0
"""Pause between two measurements, so that the first leaves no work behind."""

Drive = Callable[[Workload, System, int], Awaitable[dict[str, Any]]]
"""(workload, system, seed) -> one run's raw figures. Raises CommandError."""
Progress = Callable[[str], None]
Outcome = tuple[list[dict[str, Any]], dict[str, str]]
"""Reports, with fields `system` and `version`; and the reason for each contender that is missing."""


def run_with_peers(plan: BenchPlan, peers: Sequence[Peer], cache_dir: Path, on_progress: Progress) -> Outcome:
    """Run the comparison. Raises CommandError when our own fabric fails. Every process that it starts ends with it,
    also at Ctrl-C and SIGTERM."""
    began = time.monotonic()

    def report_progress(message: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - began), 60)
        on_progress(f"[{minutes}:{seconds:02}] {message}")

    try:
        return asyncio.run(_until_terminated(_Run(plan, cache_dir, report_progress).run(peers)))
    except asyncio.CancelledError:
        sys.exit(128 + signal.SIGTERM)


async def _until_terminated(run: Coroutine[Any, Any, Outcome]) -> Outcome:
    """Let SIGTERM end the run as Ctrl-C does: processes that a gateway started would outlive a sudden end."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await run


class _Run:
    def __init__(self, plan: BenchPlan, cache_dir: Path, on_progress: Progress) -> None:
        self._plan = plan
        self._cache_dir = cache_dir
        self._on_progress = on_progress
        self.missing: dict[str, str] = {}

    async def run(self, peers: Sequence[Peer]) -> Outcome:
        installed: list[tuple[Peer, Installed]] = []
        for peer in peers:
            try:
                installed.append((peer, await install(peer, self._cache_dir, self._on_progress)))
            except PeerError as error:
                self.missing[peer.name] = str(error)
        reports: list[dict[str, Any]] = []
        for pace in dict.fromkeys(map(pace_of, self._plan.workloads)):
            workloads = [workload for workload in self._plan.workloads if pace_of(workload) == pace]
            async with contextlib.AsyncExitStack() as stack:
                systems = await self._start_all(workloads[0], installed, stack)
                turns = Turns(self._plan, self._drive, self._on_progress, self.missing)
                systems = await turns.warm_up(systems, workloads[0])
                reports += await turns.measure(systems, workloads)
                self._on_progress("stopping all")
        return reports, self.missing

    async def _start_all(
        self, workload: Workload, installed: Sequence[tuple[Peer, Installed]], stack: contextlib.AsyncExitStack
    ) -> list[System]:
        plan, systems = self._plan, list[System]()
        work_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvloom-peers-")))
        version = importlib.metadata.version("kvloom")
        for colocate in (False, True):
            self._on_progress(f"starting kvloom{' --colocate' if colocate else ''}")
            ours = our_fabric(plan, workload, work_dir, version, colocate=colocate)
            systems.append(await stack.enter_async_context(ours))
        urls = await stack.enter_async_context(http_workers(plan, workload))
        for peer, at in installed:
            if peer.name in self.missing:
                continue
            self._on_progress(f"starting {peer.name}")
            site = site_of(peer, at, work_dir, plan, workload, urls)
            try:
                systems.append(await stack.enter_async_context(gateway(peer, site, at.version)))
            except PeerError as error:
                self.missing[peer.name] = str(error)
        return systems

    async def _drive(self, workload: Workload, system: System, seed: int) -> dict[str, Any]:
        return await drive(self._plan.model, workload, system.url, system.pids(), seed)


class Turns:
    """Measures workloads of one pace: in each run every system once, in alternating order."""

    def __init__(
        self,
        plan: BenchPlan,
        drive: Drive,
        on_progress: Progress,
        missing: dict[str, str],
        settle_seconds: float = _SETTLE_SECONDS,
    ) -> None:
        """Measure the systems. A system that fails is noted in `missing`."""
        self._plan = plan
        self._settle_seconds = settle_seconds
        self._drive = drive
        self._on_progress = on_progress
        self._missing = missing

    async def warm_up(self, systems: Sequence[System], first: Workload) -> list[System]:
        """Return the systems that survived the warm-up. Raises CommandError when our own did not."""
        ready: list[System] = []
        for system in systems:
            self._on_progress(f"warming up {system.name}")
            try:
                for workload in warm_ups(first):
                    await self._drive(workload.scaled(system.max_share), system, 0)
            except CommandError as error:
                self._note(system, system.name, error)
            else:
                ready.append(system)
        return ready

    async def measure(self, systems: Sequence[System], workloads: Sequence[Workload]) -> list[dict[str, Any]]:
        runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for run in range(self._plan.num_runs):
            for workload in workloads:
                for system in systems if run % 2 == 0 else reversed(systems):
                    self._on_progress(f"{workload.name}, run {run + 1} of {self._plan.num_runs}: {system.name}")
                    try:
                        figures = await self._measure_one(workload.scaled(system.max_share), system, seed=1 + run)
                    except CommandError as error:
                        self._note(system, f"{system.name}, {workload.name}", error)
                    else:
                        runs.setdefault((workload.name, system.name), []).append(figures)
                    await asyncio.sleep(self._settle_seconds)
        return [
            {
                "system": system.name,
                "version": system.version,
                **report_of(workload, runs[workload.name, system.name], self._plan),
            }
            for workload in workloads
            for system in systems
            if (workload.name, system.name) in runs
        ]

    async def _measure_one(self, workload: Workload, system: System, seed: int) -> dict[str, Any]:
        raw = await self._drive(workload, system, seed)
        if not raw["num_complete"]:
            raise CommandError(f"No request was answered: {next(iter(raw['errors']), 'no error was reported')}")
        if not system.has_stamps:
            raw = raw | {"first_token_seconds": [], "transit_seconds": []}
        return figures_of(workload, raw)

    def _note(self, system: System, what: str, error: CommandError) -> None:
        if system.is_ours:
            raise error
        self._missing[what] = " ".join(str(error).split())[:300]
