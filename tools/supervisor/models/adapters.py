"""Loads and unloads adapters of models while a machine's processes run."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import grpc
import msgspec

from kvloom.adapters import full_name
from kvloom.v1 import shard_service_pb2_grpc
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.shard_service_pb2 import AdapterState, GetInfoRequest, LoadAdapterRequest, UnloadAdapterRequest
from kvloom_common.config import AdapterConfig, KvloomConfig, ModelConfig, dump_config
from kvloom_common.models.configured import configured_models, shard_config
from kvloom_common.trust.fabric_trust import FabricTrust
from shard_server.engines.engine_kinds import shards_per_process
from tools.failures import CommandError
from tools.supervisor.readiness import reachable_address
from tools.supervisor.supervised_process import ProcessState, ProcessStatus
from tools.supervisor.supervisor import Supervisor

_LIST_TIMEOUT_SECONDS: Final = 5.0
_LOAD_TIMEOUT_SECONDS: Final = 120.0
UNLOAD_TIMEOUT_SECONDS: Final = 600.0
"""How long the answers of an adapter may take to end."""
_GRACE_SECONDS: Final = 5.0
"""How much later than that a shard must have said so."""

OnStep = Callable[[str], None]


@dataclasses.dataclass(slots=True)
class ListedAdapter:
    """An adapter of a model on this machine."""

    model: str
    name: str
    checksum: str
    rank: int
    shards: list[str] = dataclasses.field(default_factory=list)
    """Those that have it."""
    loaded_on: list[str] = dataclasses.field(default_factory=list)
    """Those of them that have its weights in memory."""


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterChanges:
    """`config`, which is changed, is stored at `config_path` for processes that start later: a shard that is restarted
    gets the adapters that were loaded at run time, too."""

    config: KvloomConfig
    config_path: Path
    supervisor: Supervisor
    trust: FabricTrust

    async def load(self, model_name: str, adapter: AdapterConfig, on_step: OnStep) -> None:
        """Give the adapter to all shards of the model. Raises CommandError; then none has it."""
        model = self._require(model_name)
        name = full_name(model.name, adapter.name)
        if any(other.name == adapter.name for other in model.adapters):
            raise CommandError(f"there is an adapter {name} already: unload it first")
        shards = self._running(model)
        if not shards:
            raise CommandError(f"{name} cannot be loaded: no shard of {model.name} runs")
        changed = self._set(model, [*model.adapters, adapter])
        try:
            states = await self._load_all(shards, adapter, name)
        except BaseException:
            self._set(changed, model.adapters)
            raise
        state = states[0]
        on_step(f"{name} is on {len(shards)} shards: checksum {state.checksum[:12]}, rank {state.rank}")

    async def _load_all(self, shards: Sequence[ProcessStatus], adapter: AdapterConfig, name: str) -> list[AdapterState]:
        """One shard loads it before the others get it: an adapter that ends an engine ends one."""
        first, *others = shards
        try:
            results: list[AdapterState | BaseException] = []
            results += await asyncio.gather(self._load_one(first, adapter, load_now=True), return_exceptions=True)
            if isinstance(results[0], AdapterState):
                loads = (self._load_one(shard, adapter) for shard in others)
                results += await asyncio.gather(*loads, return_exceptions=True)
        except asyncio.CancelledError:
            await self._unload_all(shards, adapter.name, 0.0)
            raise
        states = [result for result in results if isinstance(result, AdapterState)]
        failures = [result for result in results if isinstance(result, BaseException)]
        if not failures and len({state.checksum for state in states}) > 1:
            failures = [CommandError("the shards have read different files")]
        if failures:
            taken = [shard for shard, result in zip(shards, results, strict=False) if isinstance(result, AdapterState)]
            kept = await self._unload_all(taken, adapter.name, 0.0)
            undone = f"; it could not be taken back from {', '.join(kept)}" if kept else ""
            raise CommandError(f"{name} was not loaded: {_message(failures[0])}{undone}")
        return states

    async def unload(self, model_name: str, adapter_name: str, timeout_seconds: float, on_step: OnStep) -> None:
        """Take the adapter from all shards of the model, when its answers have ended. Raises CommandError if there is
        no such adapter, or if some shards still have it."""
        model = self._require(model_name)
        name = full_name(model.name, adapter_name)
        kept = [other for other in model.adapters if other.name != adapter_name]
        if len(kept) == len(model.adapters):
            names = ", ".join(other.name for other in model.adapters)
            raise CommandError(f"there is no adapter {name}: {model.name} has {names or 'none'}")
        self._set(model, kept)
        on_step(f"{name} takes no new requests")
        failures = await self._unload_all(self._running(model), adapter_name, timeout_seconds)
        if failures:
            raise CommandError(f"{name} takes no new requests, but has not gone everywhere: {'; '.join(failures)}")

    async def listed(self) -> list[ListedAdapter]:
        """The adapters of all models of this machine, as those shards have them that answer."""
        models = [model.name for model in configured_models(self.config)]
        shards = [status for status in self.supervisor.statuses if status.role == "shard" and status.model in models]
        found: dict[tuple[str, str, str], ListedAdapter] = {}
        for shard, states in zip(shards, await asyncio.gather(*map(self._states_of, shards)), strict=True):
            for state in states:
                key = (shard.model, state.name, state.checksum)
                adapter = found.setdefault(key, ListedAdapter(*key, rank=state.rank))
                adapter.shards.append(shard.name)
                if state.loaded:
                    adapter.loaded_on.append(shard.name)
        return [found[key] for key in sorted(found)]

    async def _states_of(self, shard: ProcessStatus) -> Sequence[AdapterState]:
        if shard.state != ProcessState.READY:
            return ()
        try:
            answer = await self._call(shard, "GetInfo", GetInfoRequest(), _LIST_TIMEOUT_SECONDS)
        except CommandError:
            return ()
        return answer.adapters.adapters

    async def _load_one(self, shard: ProcessStatus, adapter: AdapterConfig, *, load_now: bool = False) -> AdapterState:
        """Raises CommandError."""
        request = LoadAdapterRequest(name=adapter.name, path=adapter.path, load_now=load_now)
        answer = await self._call(shard, "LoadAdapter", request, _LOAD_TIMEOUT_SECONDS)
        if answer.HasField("error"):
            raise CommandError(f"{shard.name}: {answer.error.message}")
        return answer.adapter

    async def _unload_all(self, shards: Sequence[ProcessStatus], name: str, timeout_seconds: float) -> list[str]:
        """Returns the reasons of the shards that still have it."""
        reasons = await asyncio.gather(*(self._unload_one(shard, name, timeout_seconds) for shard in shards))
        return [reason for reason in reasons if reason]

    async def _unload_one(self, shard: ProcessStatus, name: str, timeout_seconds: float) -> str:
        request = UnloadAdapterRequest(name=name, deadline_seconds=timeout_seconds)
        try:
            answer = await self._call(shard, "UnloadAdapter", request, timeout_seconds + _GRACE_SECONDS)
        except CommandError as error:
            return error.message
        if answer.HasField("error") and answer.error.reason != ErrorReason.ERROR_REASON_ADAPTER_NOT_FOUND:
            return f"{shard.name}: {answer.error.message}"
        return ""

    async def _call(self, shard: ProcessStatus, rpc: str, request: Any, timeout_seconds: float) -> Any:
        """Raises CommandError."""
        async with self.trust.open_channel(reachable_address(shard.address), "shard", shard.name) as channel:
            stub = shard_service_pb2_grpc.ShardServiceStub(channel)
            try:
                return await getattr(stub, rpc)(request, timeout=timeout_seconds)
            except grpc.aio.AioRpcError as error:
                raise CommandError(f"{shard.name} does not answer: {error.details() or error.code().name}") from error

    def _require(self, name: str) -> ModelConfig:
        """Raises CommandError."""
        models = configured_models(self.config)
        model = next((model for model in models if model.name == name), None)
        if model is None:
            raise CommandError(f"there is no model {name}; there are {', '.join(one.name for one in models)}")
        settings = shard_config(self.config, model)
        if shards_per_process(settings) > 1:
            raise CommandError(
                f"{name} takes no adapters now: its shards share a process (shard.sim.shards_per_process)"
            )
        return model

    def _running(self, model: ModelConfig) -> list[ProcessStatus]:
        return [
            status
            for status in self.supervisor.statuses
            if status.role == "shard" and status.model == model.name and status.state == ProcessState.READY
        ]

    def _set(self, model: ModelConfig, adapters: list[AdapterConfig]) -> ModelConfig:
        """Replaces a model of the configuration by one with these adapters."""
        changed = msgspec.structs.replace(model, adapters=adapters)
        if self.config.model is model:
            self.config.model = changed
        self.config.models = [changed if other is model else other for other in self.config.models]
        dump_config(self.config, self.config_path)
        return changed


def adapter_config(name: str, path: str) -> AdapterConfig:
    """Raises CommandError."""
    try:
        return msgspec.convert({"name": name, "path": path}, AdapterConfig)
    except msgspec.ValidationError as error:
        raise CommandError(f"{name[:128]!r} is no name of an adapter: {error}") from error


def _message(failure: BaseException) -> str:
    return failure.message if isinstance(failure, CommandError) else str(failure)
