"""Applies a changed configuration to a machine's processes while they run."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from kvloom_common.config import AdapterConfig, ConfigError, KvloomConfig, ModelConfig, dump_config
from kvloom_common.config.keys import set_value, value_of
from kvloom_common.config.section import FOLLOWED
from kvloom_common.models.configured import configured_models
from tools.failures import CommandError
from tools.supervisor.child import ChildSpec
from tools.supervisor.config_changes import (
    Change,
    changed_model,
    changes,
    model_changes,
    models_by_key,
    restart_command,
    shown_value,
)
from tools.supervisor.models.adapters import UNLOAD_TIMEOUT_SECONDS, AdapterChanges
from tools.supervisor.models.changes import ModelChanges
from tools.supervisor.process_specs import started_roles
from tools.supervisor.supervised_process import ProcessState, ProcessStatus
from tools.supervisor.supervisor import Supervisor

OnStep = Callable[[str], None]


@dataclasses.dataclass(slots=True)
class ConfigSource:
    """Where the settings of a running `kvloom up` come from."""

    given: KvloomConfig
    """The configuration that the file and the flags gave, before it was completed."""
    file: Path | None
    read: Callable[[Path], KvloomConfig]
    """The settings of a file with the flags of `kvloom up` on top, checked as at a start. Blocks. Raises
    CommandError."""
    has_model_flags: bool
    """True when the models are those of the flags, whatever the file says."""


@dataclasses.dataclass(slots=True)
class ConfigReload:
    """`config`, which is changed, is stored at `config_path` for processes that start later."""

    config: KvloomConfig
    config_path: Path
    supervisor: Supervisor
    models: ModelChanges
    adapters: AdapterChanges
    source: ConfigSource
    plan: Callable[[KvloomConfig], Sequence[ChildSpec]]
    """The processes of a configuration, without Redis."""
    wait_served: Callable[[str], Awaitable[None]]
    """Returns when requests for a model are served. Raises CommandError."""
    _started: KvloomConfig = dataclasses.field(init=False)
    """The configuration given to `kvloom up`, on which ports, names and numbers of processes depend."""
    _names: dict[str, str] = dataclasses.field(default_factory=dict, init=False)
    """The names of the file's models by `model_key`, as they were loaded."""
    _loaded: dict[str, ModelConfig] = dataclasses.field(default_factory=dict, init=False)
    """Those models as they were given when they were loaded, on which their files and numbers of shards depend."""
    _adapters: dict[str, dict[str, AdapterConfig]] = dataclasses.field(default_factory=dict, init=False)
    """The adapters of those models by name, as they were applied: others were loaded by command, and stay."""
    _read_by: dict[tuple[str, int], KvloomConfig] = dataclasses.field(default_factory=dict, init=False)
    """The configuration that each process has read, by name and pid, as given. Those that started after the last change
    have read `source.given`."""

    def __post_init__(self) -> None:
        self._started = self.source.given
        if self._takes_models:
            self._loaded = models_by_key(self._started)
            self._adapters = {key: _adapters_of(model) for key, model in self._loaded.items()}
            names = [model.name for model in configured_models(self.config)]
            self._names = dict(zip(self._loaded, names, strict=True))

    @property
    def _takes_models(self) -> bool:
        """True when the models are those of the file. A machine without shards has none of its own."""
        return "shard" in started_roles(self.config) and not self.source.has_model_flags

    async def apply(self, file: Path | None, on_step: OnStep) -> dict[str, list[str]]:
        """Read the file again (or another one, from now on). Returns the processes that must be restarted for a key, by
        key; what no restart applies is reported. Raises CommandError; then nothing has changed."""
        file = self._chosen(file)
        given = await asyncio.to_thread(self.source.read, file)
        changed = self._changed(given)
        specs = self.plan(changed)
        self._check_same_processes(specs)
        dump_config(changed, self.config_path)
        self._remember_what_was_read()
        before, self.source.given, self.source.file = self.source.given, given, file
        for section in KvloomConfig.__struct_fields__:
            setattr(self.config, section, getattr(changed, section))
        self.supervisor.update_stop_timeouts(specs)
        pending = self._pending()
        fixed = self._report_fixed(on_step)
        for change in changes(before, given):
            if change.key not in pending and change.key not in fixed:
                on_step(f"{change.key}: {self._outcome(change)}")
        return pending

    async def preview(self, file: Path | None, on_step: OnStep) -> None:
        """Report what `apply` and `change_models` would change. Raises CommandError as `apply` does."""
        given = await asyncio.to_thread(self.source.read, self._chosen(file))
        self._check_same_processes(self.plan(self._changed(given)))
        before = self.source.given
        for change in changes(before, given):
            values = "" if change.model else f"{shown_value(before, change.key)} -> {shown_value(given, change.key)}, "
            on_step(f"{change.key}: {values}{self._remedy(change)}")
        if self._takes_models:
            old, new = models_by_key(before).keys(), models_by_key(given).keys()
            for key in new - old:
                on_step(f"models: {key} would be loaded")
            for key in old - new:
                on_step(f"models: {key} would be unloaded")

    def _chosen(self, file: Path | None) -> Path:
        """Raises CommandError."""
        if chosen := file or self.source.file:
            return chosen
        raise CommandError("`kvloom up` was started without --config: name a file with `kvloom reload --config FILE`")

    def _remedy(self, change: Change) -> str:
        """Says how a change that was not made yet would take effect."""
        if not change.readers:
            return self._reload_of_model(change.model) if change.model else "needs kvloom down and up"
        if change.readers == FOLLOWED.roles:
            return "would be applied at once"
        names = [status.name for status in self._statuses if self._reads(status, change)]
        return f"would need {self.needed_restart(names)}" if names else "no process here reads it"

    def needed_restart(self, names: Sequence[str]) -> str:
        """The command that restarts these processes."""
        return restart_command(names, {status.name: status.role for status in self._statuses})

    async def change_models(self, on_step: OnStep) -> None:
        """Load the models that the file has and that do not run, change the adapters of the others, and then unload the
        models that were removed from it. Raises CommandError at the end if some could not be."""
        if not self._takes_models:
            return
        wanted = models_by_key(self.source.given)
        failures: list[str] = []
        for key, model in wanted.items():
            if self._name(key) in self._replaced_models:
                continue
            try:
                if self._name(key) in self._running_models:
                    await self._change_adapters(key, model, on_step)
                else:
                    await self._load(key, model, on_step)
            except CommandError as error:
                failures.append(f"{key}: {error.message}")
        for key in [key for key in self._names if key not in wanted]:
            try:
                await self._unload(key, on_step)
            except CommandError as error:
                failures.append(f"{key}: {error.message}")
        if failures:
            raise CommandError(f"the models could not all be changed: {'; '.join(failures)}")

    async def _load(self, key: str, model: ModelConfig, on_step: OnStep) -> None:
        # With only a path, the model has the name of the path.
        wanted = model if key == model.name else msgspec.structs.replace(model, name="")
        name = self._names[key] = await self.models.load(wanted, None, on_step)
        self._loaded[key] = model
        self._adapters[key] = _adapters_of(model)
        await self.wait_served(name)
        on_step(f"models: {name} was loaded")

    async def _unload(self, key: str, on_step: OnStep) -> None:
        name = self._name(key)
        if name in self._running_models:
            await self.models.unload(name, UNLOAD_TIMEOUT_SECONDS, on_step)
            on_step(f"models: {name} was unloaded")
        self._names.pop(key, None)
        self._loaded.pop(key, None)
        self._adapters.pop(key, None)

    async def _change_adapters(self, key: str, model: ModelConfig, on_step: OnStep) -> None:
        """Raises CommandError."""
        name, applied, wanted = self._name(key), self._adapters.setdefault(key, {}), _adapters_of(model)
        for adapter in [adapter for adapter in applied.values() if wanted.get(adapter.name) != adapter]:
            if adapter.name in self._running_adapters(name):
                await self.adapters.unload(name, adapter.name, UNLOAD_TIMEOUT_SECONDS, on_step)
                on_step(f"models.{key}.adapters: {adapter.name} was unloaded")
            del applied[adapter.name]
        for adapter in [adapter for adapter in wanted.values() if adapter.name not in applied]:
            if self._running_adapters(name).get(adapter.name) != adapter:
                await self.adapters.load(name, adapter, on_step)
                on_step(f"models.{key}.adapters: {adapter.name} was loaded")
            applied[adapter.name] = adapter

    def _running_adapters(self, name: str) -> dict[str, AdapterConfig]:
        return next(_adapters_of(model) for model in configured_models(self.config) if model.name == name)

    def _changed(self, given: KvloomConfig) -> KvloomConfig:
        """The running configuration with all keys of the given one that a process reads. Raises CommandError."""
        changed = copy.deepcopy(self.config)
        for change in changes(self.source.given, given):
            if change.readers and not change.model:
                set_value(changed, change.key, value_of(given, change.key))
        new = {self._names[key]: model for key, model in models_by_key(given).items() if key in self._names}
        changed.models = [_updated(model, new) for model in changed.models]
        if changed.model != ModelConfig():
            changed.model = _updated(changed.model, new)
        try:
            configured_models(changed)
        except ConfigError as error:
            raise CommandError(str(error)) from error
        return changed

    def _check_same_processes(self, specs: Sequence[ChildSpec]) -> None:
        """Raises CommandError."""
        if different := {status.name for status in self._statuses} ^ {spec.name for spec in specs}:
            raise CommandError(
                f"nothing was changed: there would be other processes ({', '.join(sorted(different))}), which needs "
                "kvloom down and up"
            )

    def _remember_what_was_read(self) -> None:
        running = [(status.name, status.pid) for status in self._statuses if status.pid is not None]
        self._read_by = {process: self._read_by.get(process, self.source.given) for process in running}

    def _pending(self) -> dict[str, list[str]]:
        """The processes that have read another value of a key, by key."""
        pending: dict[str, list[str]] = {}
        for status in self._statuses:
            read = self._read_by.get((status.name, status.pid or 0))
            if read is None or status.state == ProcessState.STOPPING:
                continue
            for change in changes(read, self.source.given):
                if self._reads(status, change):
                    pending.setdefault(change.key, []).append(status.name)
        return pending

    def _reads(self, status: ProcessStatus, change: Change) -> bool:
        if change.model:
            return bool(change.readers) and change.model in self._names and status.model == self._name(change.model)
        is_colocated = status.role == "edge" and self.config.edge.colocate
        return status.role in change.readers or (is_colocated and "router" in change.readers)

    def _report_fixed(self, on_step: OnStep) -> set[str]:
        """Reports the keys that no restart of processes applies, and returns them."""
        given = self.source.given
        found = {
            change.key: "needs kvloom down and up"
            for change in changes(self._started, given)
            if not change.readers and not change.model
        }
        models = models_by_key(given)
        if not self._takes_models and models != models_by_key(self._started):
            has_flags = self.source.has_model_flags
            found["models"] = (
                "the flag --model of kvloom up has precedence" if has_flags else "this machine has no shards"
            )
        for key in models.keys() & self._loaded.keys():
            for change in model_changes(key, self._loaded[key], models[key]):
                if not change.readers:
                    found[change.key] = self._reload_of_model(key)
        for key, remedy in found.items():
            on_step(f"{key}: {remedy}")
        return set(found)

    def _reload_of_model(self, key: str) -> str:
        if len(self._running_models) == 1:
            return "needs kvloom down and up"
        return f"needs kvloom models unload {self._name(key)}, and then kvloom reload"

    def _outcome(self, change: Change) -> str:
        if change.model and not self._takes_models:
            return "not used"
        if not change.readers:
            return "applied: it is as at the start again"
        if change.readers == FOLLOWED.roles:
            return "applied"
        if any(self._reads(status, change) for status in self._statuses):
            return "applied: the processes run with it"
        return "applied: no process here reads it"

    def _name(self, key: str) -> str:
        return self._names.get(key, key)

    @property
    def _running_models(self) -> set[str]:
        return {model.name for model in configured_models(self.config)}

    @property
    def _replaced_models(self) -> set[str]:
        """The names of the file that stand for new versions now, which have been rolled out."""
        return {name for model in configured_models(self.config) if model.succeeds for name in model.aliases}

    @property
    def _statuses(self) -> list[ProcessStatus]:
        return [status for status in self.supervisor.statuses if status.role != "redis"]


def _updated(running: ModelConfig, new: Mapping[str, ModelConfig]) -> ModelConfig:
    return changed_model(running, new[running.name]) if running.name in new else running


def _adapters_of(model: ModelConfig) -> dict[str, AdapterConfig]:
    return {adapter.name: adapter for adapter in model.adapters}
