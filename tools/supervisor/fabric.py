"""Runs a whole fabric in the foreground: starts it, reports when it is ready, keeps it running, stops it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence

from kvloom.config import KvloomConfig
from kvloom.process.watched_files import following
from kvloom.trust.fabric_trust import FabricTrust
from tools.failures import CommandError
from tools.supervisor.child import ChildFailedError
from tools.supervisor.control import control_socket
from tools.supervisor.process_specs import STOP_ORDER, plan_restart, plan_stages
from tools.supervisor.readiness import http_url, is_complete, router_address
from tools.supervisor.reporters import Reporter
from tools.supervisor.shared_port import SharedPort
from tools.supervisor.state import FabricState, RunFolder, StateWriter, own_start_time
from tools.supervisor.supervisor import Supervisor

_READY_TIMEOUT_SECONDS = 60.0
"""The time in which processes that are ready must find one another."""
_POLL_SECONDS = 0.05
_SAME_SIGNAL_SECONDS = 0.5
"""One Ctrl-C can arrive twice: from the terminal, and from a parent such as make that forwards it."""


class Fabric:
    """One run of a fabric. `config` must have all addresses and the path of the model."""

    def __init__(
        self,
        config: KvloomConfig,
        folder: RunFolder,
        reporter: Reporter,
        *,
        http_port: SharedPort,
        embed_redis: bool,
        start_timeout_seconds: float,
        trust: FabricTrust,
    ) -> None:
        self._config = config
        self._folder = folder
        self._reporter = reporter
        self._state_writer = StateWriter(folder, reporter.step)
        self._state = FabricState(
            supervisor_pid=os.getpid(),
            supervisor_started=own_start_time(),
            http_url=http_url(config),
            router_address=router_address(config),
            model=config.model.name,
        )
        self._trust = trust
        self._restarting = asyncio.Lock()
        self._supervisor = Supervisor(
            plan_stages(
                config,
                folder.config_path,
                embed_redis=embed_redis,
                start_timeout_seconds=start_timeout_seconds,
                http_port=http_port,
            ),
            stop_order=STOP_ORDER,
            log_dir=folder.log_dir,
            on_change=self._write_state,
            on_event=reporter.step,
        )

    async def run(self) -> None:
        """Run until SIGINT, SIGTERM or SIGHUP. A second signal kills all processes. Leaves no process behind. Raises
        CommandError if the fabric does not start."""
        stop = self._stop_on_signals()
        self._write_state()
        work = asyncio.create_task(self._start_and_watch(), name="fabric")
        stopped = asyncio.create_task(stop.wait(), name="stop signal")
        try:
            await asyncio.wait((work, stopped), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        except ChildFailedError as error:
            raise CommandError(f"{error}\n  (logs: {self._folder.log_dir})") from error
        finally:
            self._enter_phase("stopping")
            if stop.is_set():
                self._reporter.step("stopping: running requests may finish (again to stop at once)")
            for task in (work, stopped):
                task.cancel()
            await asyncio.gather(work, stopped, return_exceptions=True)
            await self._supervisor.stop()
            self._state_writer.close()
            if stop.is_set():
                self._reporter.line("stopped")

    async def _start_and_watch(self) -> None:
        async with following(self._trust):
            await self._run_and_watch()

    async def _run_and_watch(self) -> None:
        await self._supervisor.start()
        await self._wait_ready()
        self._enter_phase("ready")
        self._announce()
        async with control_socket(self._folder.run_dir, self._restart):
            await self._supervisor.watch()

    async def _restart(self, wanted: Sequence[str], on_step: Callable[[str], None]) -> None:
        """Restart one process after another, each when the fabric is complete again. Raises CommandError."""
        if self._restarting.locked():
            raise CommandError("another restart is in progress")
        async with self._restarting:
            for name in plan_restart(self._supervisor.statuses, wanted):
                try:
                    await self._supervisor.replace(name)
                except ChildFailedError as error:
                    raise CommandError(f"{error}\n  (stopped there; logs: {self._folder.log_dir})") from error
                await self._wait_ready()
                for report in (on_step, self._reporter.step):
                    report(f"{name} was restarted")

    async def _is_complete(self) -> bool:
        if not self._supervisor.all_ready:
            return False
        return await is_complete(self._supervisor.statuses, self._config.shard.num_shards, self._trust)

    async def _wait_ready(self) -> None:
        deadline = time.monotonic() + _READY_TIMEOUT_SECONDS
        while not await self._is_complete():
            if time.monotonic() > deadline:
                raise CommandError(
                    f"every process runs, but {self._state.http_url}/ready did not become ready within "
                    f"{_READY_TIMEOUT_SECONDS:g} s (logs: {self._folder.log_dir})"
                )
            await asyncio.sleep(_POLL_SECONDS)

    def _announce(self) -> None:
        url = self._state.http_url
        self._reporter.line("")
        self._reporter.line(f"  model      {self._config.model.name}")
        self._reporter.line(f"  chat page  {url}/")
        self._reporter.line(f"  API        {url}/v1")
        self._reporter.line(f"  router     {self._state.router_address} (gRPC)")
        self._reporter.line(f"  logs       {self._folder.log_dir}")
        self._reporter.line("")
        self._reporter.ready(url)

    def _stop_on_signals(self) -> asyncio.Event:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        first_at = 0.0

        def on_signal() -> None:
            nonlocal first_at
            if not stop.is_set():
                first_at = loop.time()
                stop.set()
            elif loop.time() - first_at > _SAME_SIGNAL_SECONDS:
                self._supervisor.force_stop()

        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(signum, on_signal)
        return stop

    def _enter_phase(self, phase: str) -> None:
        self._state.phase = phase
        self._write_state()

    def _write_state(self) -> None:
        self._state.processes = self._supervisor.statuses
        self._state_writer.write(self._state)
