"""The commands on a running machine's part of a fabric, one at a time: restarts, reloads, models and adapters."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import msgspec

from kvloom_common.config import AdapterConfig, KvloomConfig, ModelConfig
from kvloom_common.trust.fabric_trust import FabricTrust
from tools.failures import CommandError
from tools.supervisor.child import ChildFailedError, ChildSpec
from tools.supervisor.config_reload import ConfigReload
from tools.supervisor.fabric_readiness import FabricReadiness
from tools.supervisor.models.adapters import AdapterChanges, ListedAdapter
from tools.supervisor.models.changes import ModelChanges
from tools.supervisor.models.history import ModelHistory
from tools.supervisor.named_models import unserved_models
from tools.supervisor.process_specs import plan_restart
from tools.supervisor.spares import no_room, spare_of, standing_in
from tools.supervisor.state import FabricState
from tools.supervisor.supervisor import Supervisor


class FabricCommands:
    """Each command tells its steps to its caller and to the fabric's own log."""

    def __init__(
        self,
        config: KvloomConfig,
        state: FabricState,
        supervisor: Supervisor,
        models: ModelChanges,
        adapters: AdapterChanges,
        config_reload: ConfigReload,
        readiness: FabricReadiness,
        history: ModelHistory,
        services: Callable[[KvloomConfig], Sequence[ChildSpec]],
        trust: FabricTrust,
        log_dir: Path,
        report: Callable[[str], None],
        on_change: Callable[[], None],
    ) -> None:
        """`services` plans the processes of a configuration. `report` writes to the fabric's own log, and `on_change`
        writes its state."""
        self._config = config
        self._state = state
        self._supervisor = supervisor
        self._models = models
        self._adapters = adapters
        self._config_reload = config_reload
        self._readiness = readiness
        self._history = history
        self._services = services
        self._trust = trust
        self._log_dir = log_dir
        self._report = report
        self._on_change = on_change
        self.changing = asyncio.Lock()
        """Held while processes are restarted, the configuration is reloaded, or models are loaded or unloaded."""

    async def restart(self, wanted: Sequence[str], on_step: Callable[[str], None]) -> None:
        """Restart one process after another, each when the fabric is complete again. Raises CommandError."""
        async with self._one_change():
            await self._replace(wanted, self._reporting(on_step))

    async def _replace(self, wanted: Sequence[str], report: Callable[[str], None]) -> None:
        for name in plan_restart(self._supervisor.statuses, wanted):
            async with self._stood_in_for(name, report):
                try:
                    await self._supervisor.replace(name)
                except ChildFailedError as error:
                    raise CommandError(f"{error}\n  (stopped there; logs: {self._log_dir})") from error
                await self._models.keep_asleep()
                await self._readiness.wait()
            report(f"{name} was restarted")

    @contextlib.asynccontextmanager
    async def _stood_in_for(self, name: str, report: Callable[[str], None]) -> AsyncIterator[None]:
        """With a spare for the only awake shard of a model, which routers know before the context begins."""
        (status,) = (status for status in self._supervisor.statuses if status.name == name)
        if (
            status.role != "shard"
            or status.model in self._models.asleep
            or await self._readiness.has_stand_in_for(status)
        ):
            yield
            return
        unnumbered = msgspec.structs.replace(
            self._config, metrics=msgspec.structs.replace(self._config.metrics, port=0)
        )
        spec = next((spec for spec in self._services(unnumbered) if spec.name == name), None)
        spare, reason = spec and spare_of(spec), no_room(self._config, status)
        async with standing_in(self._supervisor, spare, reason, name, report) as runs:
            self._readiness.num_spares = int(runs)
            try:
                await self._readiness.wait()
                yield
            finally:
                self._readiness.num_spares = 0

    async def reload(self, file: Path | None, restarts: bool, on_step: Callable[[str], None]) -> None:
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
                self._on_change()
            for text in await unserved_models(self._config, self._supervisor.statuses, self._trust):
                report(f"warning: {text}")

    async def preview_reload(self, file: Path | None, on_step: Callable[[str], None]) -> None:
        """Raises CommandError."""
        async with self._one_change():
            await self._config_reload.preview(file, on_step)

    async def reload_on_signal(self) -> None:
        self._report("SIGHUP: reloading the configuration")
        try:
            await self.reload(None, False, lambda _: None)
        except CommandError as error:
            self._report(f"the configuration was not reloaded: {error.message}")
        else:
            self._report("the configuration was reloaded")

    async def load_model(self, wanted: ModelConfig, num_shards: int | None, on_step: Callable[[str], None]) -> None:
        """Return when all routers and edges of this machine serve the model. Raises CommandError."""
        async with self._one_change(), self._remembered("load", wanted.name or wanted.path):
            name = await self._models.load(wanted, num_shards, self._reporting(on_step))
            await self._readiness.wait(name)
            self._on_change()

    async def unload_model(self, name: str, timeout_seconds: float, on_step: Callable[[str], None]) -> None:
        """Raises CommandError."""
        async with self._one_change(), self._remembered("unload", name):
            await self._models.unload(name, timeout_seconds, self._reporting(on_step))
            self._on_change()

    async def sleep_model(self, name: str, timeout_seconds: float, on_step: Callable[[str], None]) -> None:
        """Raises CommandError."""
        async with self._one_change(), self._remembered("sleep", name):
            await self._models.sleep(name, timeout_seconds, self._reporting(on_step))

    async def wake_model(self, name: str, on_step: Callable[[str], None]) -> None:
        """Return when all routers and edges of this machine serve the model. Raises CommandError."""
        async with self._one_change(), self._remembered("wake", name):
            await self._models.wake(name, self._reporting(on_step))
            await self._readiness.wait(name)

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

    async def keep_asleep(self) -> None:
        """For shards that have crashed while they slept: a restarted process has loaded its weights again."""
        try:
            async with self.changing:
                await self._models.keep_asleep()
        except CommandError as error:
            self._report(error.message)

    @contextlib.asynccontextmanager
    async def _one_change(self) -> AsyncIterator[None]:
        """Raises CommandError if the fabric is not ready, or is being changed."""
        self.check_ready()
        if self.changing.locked():
            raise CommandError("another restart, reload or change of models is in progress")
        async with self.changing:
            yield

    def check_ready(self) -> None:
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
            self._report(text)

        return report
