"""Runs a machine's part of a fabric, mostly the whole: starts it, reports when it is ready, keeps it running, stops
it. The commands on it are in fabric_commands.py, and whether it is complete says fabric_readiness.py."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Final

import grpc.aio
import redis.exceptions

from kvloom.v1.shard_service_pb2 import DrainRequest
from kvloom.v1.shard_service_pb2_grpc import ShardServiceStub
from kvloom_common.config import KvloomConfig
from kvloom_common.discovery.announcer import announced_process, name_owner, process_record
from kvloom_common.discovery.records import NameTakenError
from kvloom_common.models.configured import configured_models
from kvloom_common.process.watched_files import following
from kvloom_common.trust.fabric_trust import FabricTrust
from tools.failures import CommandError
from tools.supervisor.bindings import describe_bindings
from tools.supervisor.child import ChildFailedError, ChildSpec
from tools.supervisor.config_reload import ConfigReload, ConfigSource
from tools.supervisor.detach import has_terminal
from tools.supervisor.fabric_commands import FabricCommands
from tools.supervisor.fabric_readiness import FabricReadiness
from tools.supervisor.fleet_registry import FleetRegistry
from tools.supervisor.logs.files import log_paths
from tools.supervisor.models.adapters import AdapterChanges
from tools.supervisor.models.changes import ModelChanges, Resolve
from tools.supervisor.models.history import ModelHistory
from tools.supervisor.named_models import unserved_models
from tools.supervisor.process_specs import STOP_ORDER, plan_stages, started_roles, supervisor_name
from tools.supervisor.readiness import (
    brownouts,
    http_url,
    reachable_address,
    router_address,
)
from tools.supervisor.reporters import Reporter
from tools.supervisor.rollout.commands import MachineRollouts
from tools.supervisor.rollout.rollouts import Rollouts
from tools.supervisor.service.server import SupervisorServicer, serving
from tools.supervisor.shared_port import SharedPort
from tools.supervisor.state import FabricState, RunFolder, StateWriter, own_start_time
from tools.supervisor.supervised_process import ProcessStatus
from tools.supervisor.supervisor import Supervisor
from tools.supervisor.tenant_tables import not_following

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
        http_port: SharedPort | None,
        embed_redis: bool,
        start_timeout_seconds: float,
        trust: FabricTrust,
        resolve: Resolve,
        source: ConfigSource,
    ) -> None:
        """Without `embed_redis` this machine may be one of several of a fleet. `resolve` finds models that are loaded
        later, and `source` has what `config` was made from."""
        self._config = config
        self._folder = folder
        self._reporter = reporter
        self._is_fleet = not embed_redis
        roles = started_roles(config)
        self._state_writer = StateWriter(folder, reporter.step)
        has_router = "router" in roles or config.edge.colocate
        self._state = FabricState(
            supervisor_pid=os.getpid(),
            supervisor_started=own_start_time(),
            http_url=http_url(config) if "edge" in roles else "",
            router_address=router_address(config) if has_router else "",
            model="",
            name=supervisor_name(config.fabric.name_prefix),
            owner=name_owner(config.data_dir),
        )
        self._trust = trust
        self._registry = FleetRegistry(config.redis, trust.sealer)
        self._reloading: asyncio.Task[None] | None = None
        """A reload that a signal asked for."""
        self._resleeping: asyncio.Task[None] | None = None
        """Puts restarted shards of sleeping models to sleep."""

        def plan(config: KvloomConfig) -> list[list[ChildSpec]]:
            return plan_stages(
                config,
                folder.config_path,
                embed_redis=embed_redis,
                start_timeout_seconds=start_timeout_seconds,
                http_port=http_port,
            )

        self._supervisor = Supervisor(
            plan(config),
            stop_order=STOP_ORDER,
            log_dir=folder.log_dir,
            on_change=self._on_change,
            on_event=reporter.step,
        )

        def services(config: KvloomConfig) -> Sequence[ChildSpec]:
            return [spec for stage in plan(config) for spec in stage if spec.role != "redis"]

        history = ModelHistory(folder.data_dir, reporter.step)
        rollouts = Rollouts()
        self._models = ModelChanges(
            config, folder.config_path, self._supervisor, trust, services, resolve, rollouts.check_free
        )
        self._readiness = FabricReadiness(
            config,
            self._state,
            self._supervisor,
            self._models,
            self._registry if self._is_fleet else None,
            trust,
            folder.log_dir,
        )
        adapters = AdapterChanges(config, folder.config_path, self._supervisor, trust)
        self._commands = FabricCommands(
            config,
            self._state,
            self._supervisor,
            self._models,
            adapters,
            ConfigReload(
                config,
                folder.config_path,
                self._supervisor,
                self._models,
                adapters,
                source,
                services,
                self._readiness.wait,
            ),
            self._readiness,
            history,
            services,
            trust,
            folder.log_dir,
            reporter.step,
            self._write_state,
        )
        self._rollouts = MachineRollouts(
            config,
            self._state.name,
            self._state.owner,
            trust,
            self._models,
            self._commands.changing,
            self._commands.check_ready,
            self._readiness.wait,
            self._write_state,
            reporter.step,
            history,
            rollouts,
        )

    async def run(self) -> None:
        """Run until SIGINT or SIGTERM, or until the terminal is closed (without one, SIGHUP reloads the configuration).
        A second signal kills all processes. Leaves no process behind. Raises CommandError if the fabric does not
        start."""
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
            tasks = [work, stopped, *filter(None, [self._reloading, self._resleeping])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._rollouts.close()
            await self._supervisor.stop()
            await self._registry.close()
            self._state_writer.close()
            if stop.is_set():
                self._reporter.line("stopped")

    async def _start_and_watch(self) -> None:
        fleet_host = self._config.fabric.host or "127.0.0.1" if self._is_fleet else ""
        commands = self._commands
        servicer = SupervisorServicer(
            self._current_state,
            commands.restart,
            commands.load_model,
            commands.unload_model,
            self._log_paths,
            reload=commands.reload,
            preview_reload=commands.preview_reload,
            sleep_model=commands.sleep_model,
            wake_model=commands.wake_model,
            rollouts=self._rollouts,
            adapters=commands,
            drain_shard=ShardDrains(lambda: self._supervisor.statuses, self._registry, self._trust).set,
        )
        async with (
            following(self._trust),
            serving(servicer, self._folder.run_dir, self._trust, fleet_host) as address,
            self._announced(address),
        ):
            await self._run_and_watch()

    @contextlib.asynccontextmanager
    async def _announced(self, address: str) -> AsyncIterator[None]:
        """In a fleet, other machines find this supervisor in the registry. Raises CommandError if another one has its
        name."""
        if not address:
            yield
            return
        record = process_record(self._config, self._state.name, address)
        try:
            async with announced_process(self._config, "supervisor", record, self._trust.sealer):
                yield
        except NameTakenError as error:
            raise CommandError(str(error)) from error

    async def _run_and_watch(self) -> None:
        await self._supervisor.start()
        await self._readiness.wait()
        self._enter_phase("ready")
        await self._announce()
        await self._supervisor.watch()

    async def _announce(self) -> None:
        url = self._state.http_url
        line = self._reporter.line
        line("")
        line(f"  model      {self._state.model or 'those of the shards of the fleet'}")
        if url:
            line(f"  chat page  {url}/")
            line(f"  API        {url}/v1")
        if self._state.router_address:
            line(f"  router     {self._state.router_address} (gRPC)")
        line(f"  logs       {self._folder.log_dir}")
        for text in describe_bindings(self._config, self._supervisor.statuses, is_fleet=self._is_fleet):
            line(f"  {text}")
        records = await self._readiness.records()
        for role in [] if records is None else self._readiness.roles_missing(records):
            line(f"  waiting    the fleet has no {role} yet: requests are refused until a machine joins that has one")
        for text in await unserved_models(self._config, self._supervisor.statuses, self._trust):
            line(f"  warning    {text}")
        line("")
        self._reporter.ready(self._state.place)

    async def _current_state(self) -> FabricState:
        """The state, and whether the fabric serves, as asked for by a command."""
        state = copy.copy(self._state)
        state.processes = self._supervisor.statuses
        state.rollouts = list(self._rollouts.rollouts.running)
        if state.phase == "ready":
            state.not_ready = await self._readiness.why_not_served()
            if self._config.router.brownout.enabled:
                state.brownouts = await brownouts(state.processes, self._trust)
            state.warnings = await unserved_models(self._config, state.processes, self._trust)
            if self._config.control.enabled:
                state.alarms = not_following(self._folder.data_dir, state.processes, time.time())
        return state

    def _log_paths(self) -> dict[str, Path]:
        return log_paths(self._folder.log_dir, self._config.fabric.name_prefix)

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

        def on_hang_up() -> None:
            if self._reloading is None or self._reloading.done():
                self._reloading = loop.create_task(self._commands.reload_on_signal(), name="reload")

        # Daemons reload at SIGHUP. To a command in a terminal it says that the terminal has gone.
        hang_up = on_signal if has_terminal() and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else on_hang_up
        for signum, handler in ((signal.SIGINT, on_signal), (signal.SIGTERM, on_signal), (signal.SIGHUP, hang_up)):
            loop.add_signal_handler(signum, handler)
        return stop

    def _enter_phase(self, phase: str) -> None:
        self._state.phase = phase
        self._write_state()

    def _on_change(self) -> None:
        self._write_state()
        if self._models.asleep and (self._resleeping is None or self._resleeping.done()):
            self._resleeping = asyncio.get_running_loop().create_task(
                self._commands.keep_asleep(), name="keep models asleep"
            )

    def _write_state(self) -> None:
        self._state.processes = self._supervisor.statuses
        self._state.model = ", ".join(model.name for model in configured_models(self._config) if model.path)
        self._state_writer.write(self._state)


CALL_SECONDS: Final = 5.0


class ShardDrains:
    def __init__(
        self,
        statuses: Callable[[], Sequence[ProcessStatus]],
        registry: FleetRegistry,
        trust: FabricTrust,
    ) -> None:
        self._statuses = statuses
        self._registry = registry
        self._trust = trust

    async def set(self, shard: str, draining: bool, deadline_seconds: float | None) -> tuple[int, int]:
        """Begin a drain, or end it. Returns how many of its sequences run and wait. Raises CommandError."""
        found = {one.name: one.address for one in self._statuses() if one.role == "shard" and one.address}
        if shard not in found:
            with contextlib.suppress(redis.exceptions.RedisError, OSError):
                found |= {name: record.address for name, record in (await self._registry.read()).shards.items()}
        if shard not in found:
            raise CommandError(f"there is no shard {shard[:128]!r}; there are: {', '.join(sorted(found))}")
        request = DrainRequest(draining=draining, deadline_seconds=deadline_seconds)
        try:
            async with self._trust.open_channel(reachable_address(found[shard]), "shard", shard) as channel:
                answer = await ShardServiceStub(channel).Drain(request, timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise CommandError(f"{shard} does not answer at {found[shard]}") from error
        if answer.HasField("error"):
            raise CommandError(answer.error.message)
        return answer.num_running, answer.num_waiting
