"""The contenders of `kvloom-lab bench data-plane --peers` as processes: our fabric, other gateways, and the engines
behind them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import time
import urllib.request
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from lab.bench.data_plane.run import GATEWAY, BenchPlan, fabric_config, fabric_pids
from lab.bench.data_plane.workloads import Workload
from lab.bench.peers import mock_worker
from lab.bench.peers.install import Installed, last_words
from lab.bench.peers.peer import Peer, PeerError, Site
from lab.free_ports import pick_free_ports
from tools.failures import CommandError
from tools.supervisor.child import bound_command
from tools.supervisor.child_fabric import child_fabric

KVLOOM: Final = "kvloom"
KVLOOM_COLOCATED: Final = "kvloom --colocate"
_NUM_WORKERS: Final = 2
_STOP_TIMEOUT_SECONDS: Final = 8.0
_PROBE_TIMEOUT_SECONDS: Final = 5.0
_LOG_TAIL_BYTES: Final = 2000


class System(msgspec.Struct, frozen=True):
    """One contender that is running."""

    name: str
    version: str
    url: str
    pids: Callable[[], dict[str, list[int]]]
    """The gateway's processes by role, without the engines."""
    max_share: float = 1.0
    has_stamps: bool = True

    @property
    def is_ours(self) -> bool:
        return self.name.startswith(KVLOOM)


@contextlib.asynccontextmanager
async def our_fabric(
    plan: BenchPlan, workload: Workload, work_dir: Path, version: str, *, colocate: bool
) -> AsyncIterator[System]:
    """Start our fabric. Raises CommandError."""
    data_dir = work_dir / f"kvloom-{colocate:d}"
    data_dir.mkdir()
    layout = msgspec.structs.replace(plan.layout, colocate=colocate)
    config = fabric_config(msgspec.structs.replace(plan, layout=layout), workload, data_dir)
    async with child_fabric(config, data_dir) as url:
        yield System(KVLOOM_COLOCATED if colocate else KVLOOM, version, url, lambda: fabric_pids(data_dir))


@contextlib.asynccontextmanager
async def http_workers(plan: BenchPlan, workload: Workload) -> AsyncIterator[list[str]]:
    """Start the engines that all gateways without engines of their own share. Yields their URLs."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(_http_worker(plan, workload)) for _ in range(_NUM_WORKERS)]


@contextlib.asynccontextmanager
async def _http_worker(plan: BenchPlan, workload: Workload) -> AsyncIterator[str]:
    order = mock_worker.WorkerOrder(plan.model.name, plan.model.path, workload.step_ms, workload.decode_every)
    command = bound_command((sys.executable, "-P", "-m", "lab.bench.peers.mock_worker"))
    process = await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, process_group=0
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(msgspec.json.encode(order) + b"\n")
        port = (await process.stdout.readline()).strip().decode()
        if not port:
            raise CommandError("the mock worker did not start")
        yield f"http://127.0.0.1:{port}"
    finally:
        await _stop(process)


def site_of(
    peer: Peer, at: Installed, work_dir: Path, plan: BenchPlan, workload: Workload, urls: Sequence[str]
) -> Site:
    """Assign a peer a folder and ports of its own."""
    own_dir = work_dir / peer.name
    own_dir.mkdir()
    port, metrics_port, *engine_ports = pick_free_ports(2 + _NUM_WORKERS)
    return Site(
        bin_dir=at.bin_dir,
        work_dir=own_dir,
        port=port,
        metrics_port=metrics_port,
        engine_ports=engine_ports,
        worker_urls=urls,
        model=plan.model.name,
        model_path=Path(plan.model.path),
        step_ms=workload.step_ms,
        decode_every=workload.decode_every,
    )


@contextlib.asynccontextmanager
async def gateway(peer: Peer, site: Site, version: str) -> AsyncIterator[System]:
    """Start a gateway, with its own engines if it has any. Raises PeerError when it does not answer."""
    env = {**os.environ, **peer.env(site)}
    async with contextlib.AsyncExitStack() as stack:
        for number, argv in enumerate(peer.engines(site) if peer.engines else ()):
            await stack.enter_async_context(_process(argv, env, site.work_dir / f"engine-{number}"))
        log_path = site.work_dir / "output"
        process = await stack.enter_async_context(_process(peer.argv(site), env, log_path))
        url = f"http://127.0.0.1:{site.port}"
        deadline = time.monotonic() + peer.start_timeout_seconds
        while not await asyncio.to_thread(_answers, url, site.model):
            if process.returncode is not None or time.monotonic() > deadline:
                raise PeerError(f"It does not answer: {last_words(log_path.read_bytes()[-_LOG_TAIL_BYTES:])}")
            await asyncio.sleep(0.3)
        yield System(
            peer.name, version, url, lambda: {GATEWAY: _tree(process.pid)}, peer.max_share, peer.has_stamps
        )  # fmt: skip


@contextlib.asynccontextmanager
async def _process(argv: Sequence[str], env: Mapping[str, str], log_path: Path) -> AsyncIterator[Process]:
    program = shutil.which(argv[0]) or argv[0]
    with log_path.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *bound_command((program, *argv[1:])),
            stdin=DEVNULL, stdout=output, stderr=output, env=env, process_group=0, cwd=log_path.parent,
        )  # fmt: skip
    try:
        yield process
    finally:
        await _stop(process)


async def _stop(process: Process) -> None:
    """End a process and everything it started."""
    tree = _tree(process.pid)
    for signum in (signal.SIGTERM, signal.SIGKILL):
        for pid in tree:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signum)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_TIMEOUT_SECONDS):
                await process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _tree(pid: int) -> list[int]:
    """A process and all its descendants."""
    found = [pid]
    for parent in found:
        try:
            for thread in Path(f"/proc/{parent}/task").iterdir():
                found += [int(child) for child in (thread / "children").read_text().split()]
        except OSError:
            continue
    return found


def _answers(url: str, model: str) -> bool:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=_PROBE_TIMEOUT_SECONDS) as response:
            return b"[DONE]" in response.read()
    except (OSError, ValueError):
        return False
