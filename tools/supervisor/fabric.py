"""Runs a machine's part of a fabric, mostly the whole: starts it, reports when it is ready, keeps it running, stops
it."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import msgspec
import redis.exceptions

from kvloom_common.config import AdapterConfig, KvloomConfig, ModelConfig
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
from tools.supervisor.fleet_records import FleetRecords
from tools.supervisor.fleet_registry import FleetRegistry
from tools.supervisor.logs.files import log_paths
from tools.supervisor.models.adapters import AdapterChanges, ListedAdapter
from tools.supervisor.models.changes import ModelChanges, Resolve
from tools.supervisor.models.history import ModelHistory
from tools.supervisor.named_models import unserved_models
from tools.supervisor.process_specs import STOP_ORDER, plan_restart, plan_stages, started_roles, supervisor_name
from tools.supervisor.readiness import (
    brownouts,
    edges_without,
    http_url,
    not_ready_reasons,
    roles_missing,
    router_address,
    shards_to_register,
    shards_without_router,
)
from tools.supervisor.reporters import Reporter
from tools.supervisor.rollout.commands import MachineRollouts
from tools.supervisor.rollout.rollouts import Rollouts
from tools.supervisor.service.server import SupervisorServicer, serving
from tools.supervisor.shared_port import SharedPort
from tools.supervisor.spares import has_stand_in, no_room, spare_of, standing_in
from tools.supervisor.state import FabricState, RunFolder, StateWriter, own_start_time
from tools.supervisor.supervised_process import ProcessStatus
from tools.supervisor.supervisor import Supervisor
from tools.supervisor.tenant_tables import not_following

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
        self._roles = started_roles(config)
        self._state_writer = StateWriter(folder, reporter.step)
        has_router = "router" in self._roles or config.edge.colocate
        self._state = FabricState(
            supervisor_pid=os.getpid(),
            supervisor_started=own_start_time(),
            http_url=http_url(config) if "edge" in self._roles else "",
            router_address=router_address(config) if has_router else "",
            model="",
            name=supervisor_name(config.fabric.name_prefix),
            owner=name_owner(config.data_dir),
        )
        self._trust = trust
        self._registry = FleetRegistry(config.redis, trust.sealer)
        self._changing = asyncio.Lock()
        """Held while processes are restarted, the configuration is reloaded, or models are loaded or unloaded."""
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

        self._services = services
        self._num_spares = 0
        """The shards that stand in for others now."""
        self._history = ModelHistory(folder.data_dir, reporter.step)
        rollouts = Rollouts()
        self._models = ModelChanges(
            config, folder.config_path, self._supervisor, trust, services, resolve, rollouts.check_free
        )
        self._rollouts = MachineRollouts(
            config,
            self._state.name,
            self._state.owner,
            trust,
            self._models,
            self._changing,
            self._check_ready,
            self._wait_ready,
            self._write_state,
            reporter.step,
            self._history,
            rollouts,
        )
        self._adapters = AdapterChanges(config, folder.config_path, self._supervisor, trust)
        self._config_reload = ConfigReload(
            config,
            folder.config_path,
            self._supervisor,
            self._models,
            self._adapters,
            source,
            services,
            self._wait_ready,
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
        servicer = SupervisorServicer(
            self._current_state,
            self._restart,
            self._load_model,
            self._unload_model,
            self._log_paths,
            reload=self._reload,
            sleep_model=self._sleep_model,
            wake_model=self._wake_model,
            rollouts=self._rollouts,
            adapters=self,
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
        await self._wait_ready()
        self._enter_phase("ready")
        await self._announce()
        await self._supervisor.watch()

    async def _restart(self, wanted: Sequence[str], on_step: Callable[[str], None]) -> None:
        """Restart one process after another, each when the fabric is complete again. Raises CommandError."""
        async with self._one_change():
            await self._replace(wanted, self._reporting(on_step))

    async def _replace(self, wanted: Sequence[str], report: Callable[[str], None]) -> None:
        for name in plan_restart(self._supervisor.statuses, wanted):
            async with self._stood_in_for(name, report):
                try:
                    await self._supervisor.replace(name)
                except ChildFailedError as error:
                    raise CommandError(f"{error}\n  (stopped there; logs: {self._folder.log_dir})") from error
                await self._models.keep_asleep()
                await self._wait_ready()
            report(f"{name} was restarted")

    @contextlib.asynccontextmanager
    async def _stood_in_for(self, name: str, report: Callable[[str], None]) -> AsyncIterator[None]:
        """With a spare for the only awake shard of a model, which routers know before the context begins."""
        (status,) = (status for status in self._supervisor.statuses if status.name == name)
        if status.role != "shard" or status.model in self._models.asleep or await self._has_stand_in(status):
            yield
            return
        unnumbered = msgspec.structs.replace(
            self._config, metrics=msgspec.structs.replace(self._config.metrics, port=0)
        )
        spec = next((spec for spec in self._services(unnumbered) if spec.name == name), None)
        spare, reason = spec and spare_of(spec), no_room(self._config, status)
        async with standing_in(self._supervisor, spare, reason, name, report) as runs:
            self._num_spares = int(runs)
            try:
                await self._wait_ready()
                yield
            finally:
                self._num_spares = 0

    async def _has_stand_in(self, status: ProcessStatus) -> bool:
        """True when another shard has the model, here or on another machine of the fleet."""
        if has_stand_in(status, self._supervisor.statuses):
            return True
        records = await self._records()
        return records is not None and any(
            record.model == status.model and record.owner != self._state.owner for record in records.shards.values()
        )

    async def _reload(self, file: Path | None, restarts: bool, on_step: Callable[[str], None]) -> None:
        """Apply the changed configuration. With `restarts`, also by restarting processes one after another. Raises
        CommandError."""
        report = self._reporting(on_step)
        async with self._one_change():
            pending = await self._config_reload.apply(file, report)
            if restarts and pending:
                await self._replace([name for names in pending.values() for name in names], report)
            for key, names in pending.items():
                report(f"{key}: {'applied' if restarts else f'needs {self._config_reload.needed_restart(names)}'}")
            try:
                await self._config_reload.change_models(report)
            finally:
                self._write_state()
            for text in await unserved_models(self._config, self._supervisor.statuses, self._trust):
                report(f"warning: {text}")

    async def _reload_on_signal(self) -> None:
        self._reporter.step("SIGHUP: reloading the configuration")
        try:
            await self._reload(None, False, lambda _: None)
        except CommandError as error:
            self._reporter.step(f"the configuration was not reloaded: {error.message}")
        else:
            self._reporter.step("the configuration was reloaded")

    async def _load_model(self, wanted: ModelConfig, num_shards: int | None, on_step: Callable[[str], None]) -> None:
        """Return when all routers and edges of this machine serve the model. Raises CommandError."""
        async with self._one_change(), self._remembered("load", wanted.name or wanted.path):
            name = await self._models.load(wanted, num_shards, self._reporting(on_step))
            await self._wait_ready(name)
            self._write_state()

    async def _unload_model(self, name: str, timeout_seconds: float, on_step: Callable[[str], None]) -> None:
        """Raises CommandError."""
        async with self._one_change(), self._remembered("unload", name):
            await self._models.unload(name, timeout_seconds, self._reporting(on_step))
            self._write_state()

    async def _sleep_model(self, name: str, timeout_seconds: float, on_step: Callable[[str], None]) -> None:
        """Raises CommandError."""
        async with self._one_change(), self._remembered("sleep", name):
            await self._models.sleep(name, timeout_seconds, self._reporting(on_step))

    async def _wake_model(self, name: str, on_step: Callable[[str], None]) -> None:
        """Return when all routers and edges of this machine serve the model. Raises CommandError."""
        async with self._one_change(), self._remembered("wake", name):
            await self._models.wake(name, self._reporting(on_step))
            await self._wait_ready(name)

    async def load_adapter(self, model: str, adapter: AdapterConfig, on_step: Callable[[str], None]) -> None:
        """Return when all shards of the model have the adapter. Raises CommandError."""
        async with self._one_change():
            await self._adapters.load(model, adapter, self._reporting(on_step))

    async def unload_adapter(
        self, model: str, name: str, timeout_seconds: float, on_step: Callable[[str], None]
    ) -> None:
        """Raises CommandError."""
        async with self._one_change():
            await self._adapters.unload(model, name, timeout_seconds, self._reporting(on_step))

    async def list_adapters(self) -> Sequence[ListedAdapter]:
        return await self._adapters.listed()

    async def _keep_asleep(self) -> None:
        """For shards that have crashed while they slept: a restarted process has loaded its weights again."""
        try:
            async with self._changing:
                await self._models.keep_asleep()
        except CommandError as error:
            self._reporter.step(error.message)

    @contextlib.asynccontextmanager
    async def _one_change(self) -> AsyncIterator[None]:
        """Raises CommandError if the fabric is not ready, or is being changed."""
        self._check_ready()
        if self._changing.locked():
            raise CommandError("another restart, reload or change of models is in progress")
        async with self._changing:
            yield

    def _check_ready(self) -> None:
        """Raises CommandError."""
        if self._state.phase != "ready":
            raise CommandError(f"the fabric accepts no commands now: it is {self._state.phase}")

    @contextlib.asynccontextmanager
    async def _remembered(self, event: str, model: str) -> AsyncIterator[None]:
        """Put what is done to a model into the history, and how it ended."""
        try:
            yield
        except asyncio.CancelledError:
            self._history.add(event, model, "failed", "it was taken back")
            raise
        except CommandError as error:
            self._history.add(event, model, "failed", error.message)
            raise
        self._history.add(event, model, "done")

    def _reporting(self, on_step: Callable[[str], None]) -> Callable[[str], None]:
        """Tells a step to the caller of a command, and to the fabric's own log."""

        def report(text: str) -> None:
            on_step(text)
            self._reporter.step(text)

        return report

    # -- readiness ----------------------------------------------------------------------------------------------------

    async def _what_is_missing(self) -> list[str]:
        """Returns the reasons why this machine is not ready. Roles that other machines of the fleet are to have, and
        that none has yet, are none: then it is ready as soon as its own processes are, and registered."""
        statuses = self._supervisor.statuses
        if not self._supervisor.all_ready:
            away = [f"{status.name} is {status.state}" for status in statuses if status.state != "ready"]
            return away or ["not all processes run"]
        num_shards = self._models.num_awake_shards + self._num_spares if "shard" in self._roles else 0
        if not num_shards and self._models.asleep:
            return []  # nothing is served, as it was asked for
        records = await self._records()
        if records is None:
            return await not_ready_reasons(statuses, num_shards, self._trust)
        missing = [f"{name} is not registered yet" for name in shards_to_register(statuses, records)]
        if not missing and not self._roles_missing(records):
            missing = await not_ready_reasons(statuses, num_shards, self._trust)
        if not missing and records.routers:
            alone = await shards_without_router(statuses, self._trust)
            missing = [f"no router has connected to {name} yet" for name in alone]
        return missing

    async def _edges_without(self, model: str) -> list[str]:
        return await edges_without(self._supervisor.statuses, model, self._trust) if model else []

    def _roles_missing(self, records: FleetRecords) -> list[str]:
        has_router = "router" in self._roles or self._config.edge.colocate
        roles = {*self._roles, *(["router"] if has_router else [])}
        needs_safety = has_router and self._config.safety.on_unavailable == "refuse"
        return roles_missing(roles, records, needs_safety=needs_safety)

    async def _records(self) -> FleetRecords | None:
        """None outside a fleet, or if the registry cannot be read."""
        if not self._is_fleet:
            return None
        try:
            return await self._registry.read()
        except (redis.exceptions.RedisError, OSError):
            return None

    async def _wait_ready(self, model: str = "") -> None:
        """Until the fabric is complete, and its edges serve the model. Raises CommandError."""
        deadline = time.monotonic() + _READY_TIMEOUT_SECONDS
        while missing := await self._what_is_missing() or await self._edges_without(model):
            if time.monotonic() > deadline:
                raise CommandError(
                    f"every process runs, but {self._state.place} did not become ready within "
                    f"{_READY_TIMEOUT_SECONDS:g} s: {'; '.join(missing)} (logs: {self._folder.log_dir})"
                )
            await asyncio.sleep(_POLL_SECONDS)

    # -- reports ------------------------------------------------------------------------------------------------------

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
        records = await self._records()
        for role in [] if records is None else self._roles_missing(records):
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
            state.not_ready = await self._not_ready()
            if self._config.router.brownout.enabled:
                state.brownouts = await brownouts(state.processes, self._trust)
            state.warnings = await unserved_models(self._config, state.processes, self._trust)
            if self._config.control.enabled:
                state.alarms = not_following(self._folder.data_dir, state.processes, time.time())
        return state

    async def _not_ready(self) -> list[str]:
        """Why requests are not served. A fabric that has lost some of its shards serves."""
        statuses = self._supervisor.statuses
        records = await self._records()
        missing = [] if records is None else self._roles_missing(records)
        reasons = [f"the fleet has no {role}" for role in missing]
        if self._models.asleep and not self._models.num_awake_shards:
            reasons += [f"{name} sleeps (kvloom models wake {name})" for name in self._models.asleep]
        reasons += await not_ready_reasons(statuses, 0 if missing else 1, self._trust)
        if not reasons and self._is_fleet:
            alone = await shards_without_router(statuses, self._trust)
            reasons = [f"no router is connected to {name}" for name in alone]
        return reasons

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
                self._reloading = loop.create_task(self._reload_on_signal(), name="reload")

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
            self._resleeping = asyncio.get_running_loop().create_task(self._keep_asleep(), name="keep models asleep")

    def _write_state(self) -> None:
        self._state.processes = self._supervisor.statuses
        self._state.model = ", ".join(model.name for model in configured_models(self._config) if model.path)
        self._state_writer.write(self._state)
