"""Loads and unloads models while a machine's processes run."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import grpc
import msgspec

from kvloom.config import ConfigError, KvloomConfig, ModelConfig, dump_config
from kvloom.models.configured import configured_models
from kvloom.trust.fabric_trust import FabricTrust
from kvloom.v1 import shard_service_pb2_grpc
from kvloom.v1.shard_service_pb2 import DrainRequest, WithdrawRequest
from tools.failures import CommandError
from tools.supervisor.child import ChildFailedError, ChildSpec
from tools.supervisor.process_specs import started_roles
from tools.supervisor.readiness import models_of, reachable_address
from tools.supervisor.supervised_process import ProcessState, ProcessStatus
from tools.supervisor.supervisor import Supervisor

_POLL_SECONDS: Final = 0.1
_NUM_IDLE_POLLS: Final = 3
"""So often in a row the shards must have nothing to do: routers may be about to send what waited there."""
_CALL_TIMEOUT_SECONDS: Final = 5.0

OnStep = Callable[[str], None]
Resolve = Callable[[ModelConfig, OnStep], ModelConfig]
"""Finds a model's files. Blocks. Raises CommandError."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelChanges:
    """`config`, which is changed, is stored at `config_path` for processes that start later."""

    config: KvloomConfig
    config_path: Path
    supervisor: Supervisor
    trust: FabricTrust
    plan: Callable[[KvloomConfig], Sequence[ChildSpec]]
    """The processes of a configuration."""
    resolve: Resolve

    async def load(self, wanted: ModelConfig, num_shards: int | None, on_step: OnStep) -> str:
        """Start the shards of another model, and return its name. Raises CommandError; then everything is as before."""
        if "shard" not in started_roles(self.config):
            raise CommandError("this machine has no shards: load the model on one that has")
        loop = asyncio.get_running_loop()

        def on_progress(text: str) -> None:
            loop.call_soon_threadsafe(on_step, text)

        model = await asyncio.to_thread(self.resolve, wanted, on_progress)
        if num_shards is not None:
            model.shard = {**model.shard, "num_shards": num_shards}
        changed = msgspec.structs.replace(self.config, models=[*self.config.models, model])
        try:
            configured_models(changed)
        except ConfigError as error:
            raise CommandError(str(error)) from error
        dump_config(changed, self.config_path)
        try:
            await self.supervisor.add(self._shards(changed, model.name))
        except BaseException as error:
            dump_config(self.config, self.config_path)
            if isinstance(error, ChildFailedError):
                raise CommandError(f"{model.name} was not loaded: {error}") from error
            raise
        self.config.models = changed.models
        return model.name

    def _shards(self, config: KvloomConfig, model: str) -> list[ChildSpec]:
        """They get free ports for /metrics: those of the configuration belong to shards that run."""
        config = msgspec.structs.replace(config, metrics=msgspec.structs.replace(config.metrics, port=0))
        return [spec for spec in self.plan(config) if spec.role == "shard" and spec.model == model]

    async def unload(self, name: str, timeout_seconds: float, on_step: OnStep) -> None:
        """Let the answers of a model end, and stop its shards. Raises CommandError."""
        models = configured_models(self.config)
        model = next((model for model in models if model.name == name), None)
        if model is None:
            raise CommandError(f"there is no model {name}; there are {', '.join(one.name for one in models)}")
        if len(models) == 1:
            raise CommandError(f"{name} is the only model here: `kvloom down` stops the fabric")
        try:
            await self._withdraw(name, timeout_seconds, on_step)
        except BaseException:
            await self._take_back(name)
            raise
        await self.supervisor.remove([status.name for status in self._statuses(name)])
        if model is self.config.model:
            self.config.model = ModelConfig()
        self.config.models = [other for other in self.config.models if other is not model]
        dump_config(self.config, self.config_path)

    async def _withdraw(self, name: str, timeout_seconds: float, on_step: OnStep) -> None:
        """Return when the model's shards have nothing to do any more, or after the timeout."""
        deadline = time.monotonic() + timeout_seconds
        drains = await self._is_served_elsewhere(name)
        on_step(f"{name} takes no new requests" + (" on this machine" if drains else ""))
        num_idle = 0
        while num_idle < _NUM_IDLE_POLLS:
            counts = await asyncio.gather(*(self._withdraw_one(status, drains) for status in self._running(name)))
            num_idle = 0 if any(counts) else num_idle + 1
            if time.monotonic() >= deadline:
                on_step(f"{sum(counts)} answers did not end within {timeout_seconds:g} s and are broken off")
                return
            await asyncio.sleep(_POLL_SECONDS)
        on_step(f"all answers of {name} have ended")

    async def _is_served_elsewhere(self, name: str) -> bool:
        """Whether other machines have shards of the model, which then takes requests as before."""
        addresses = [status.internal_address or status.router_address for status in self.supervisor.statuses]
        listed = await asyncio.gather(*(models_of(address, self.trust) for address in addresses if address))
        infos = [info for models in listed for info in models or () if info.name == name]
        num_ready = max((info.num_ready_shards for info in infos), default=0)
        return num_ready > len(self._running(name))

    async def _withdraw_one(self, status: ProcessStatus, drains: bool) -> int:
        """Returns how many sequences the shard has. Called again and again: the process may have been restarted."""
        async with self.trust.open_channel(reachable_address(status.address), "shard", status.name) as channel:
            stub = shard_service_pb2_grpc.ShardServiceStub(channel)
            try:
                if drains:
                    load = await stub.Drain(DrainRequest(draining=True), timeout=_CALL_TIMEOUT_SECONDS)
                else:
                    load = await stub.Withdraw(WithdrawRequest(withdrawn=True), timeout=_CALL_TIMEOUT_SECONDS)
            except grpc.aio.AioRpcError:
                return 0  # it is gone, and its answers with it
        return load.num_running + load.num_waiting

    async def _take_back(self, name: str) -> None:
        for status in self._running(name):
            async with self.trust.open_channel(reachable_address(status.address), "shard", status.name) as channel:
                stub = shard_service_pb2_grpc.ShardServiceStub(channel)
                try:
                    await stub.Withdraw(WithdrawRequest(withdrawn=False), timeout=_CALL_TIMEOUT_SECONDS)
                    await stub.Drain(DrainRequest(draining=False), timeout=_CALL_TIMEOUT_SECONDS)
                except grpc.aio.AioRpcError:
                    continue

    def _statuses(self, model: str) -> list[ProcessStatus]:
        return [status for status in self.supervisor.statuses if status.role == "shard" and status.model == model]

    def _running(self, model: str) -> list[ProcessStatus]:
        return [status for status in self._statuses(model) if status.state == ProcessState.READY]
