"""Loads, unloads, puts to sleep and wakes models while a machine's processes run."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import grpc
import msgspec
import psutil

from kvloom.v1 import shard_service_pb2_grpc
from kvloom.v1.shard_service_pb2 import DrainRequest, SleepRequest, WakeRequest, WithdrawRequest
from kvloom_common.config import ConfigError, KvloomConfig, ModelConfig, dump_config
from kvloom_common.models.configured import configured_models, shard_config
from kvloom_common.trust.fabric_trust import FabricTrust
from shard_server.engines.engine_kinds import shards_per_process
from tools.failures import CommandError
from tools.supervisor.child import ChildFailedError, ChildSpec
from tools.supervisor.models.idle_watch import POLL_SECONDS, IdleWatch, ShardWork
from tools.supervisor.process_specs import started_roles
from tools.supervisor.readiness import models_of, reachable_address
from tools.supervisor.supervised_process import ProcessState, ProcessStatus
from tools.supervisor.supervisor import Supervisor

_RESTART_SECONDS: Final = 10.0
"""How long a shard that is being restarted is waited for, which has not been told that its model is to end. Routers
would otherwise take the model for one that comes back."""
_CALL_TIMEOUT_SECONDS: Final = 5.0
_SLEEP_TIMEOUT_SECONDS: Final = 60.0
_WAKE_TIMEOUT_SECONDS: Final = 600.0

OnStep = Callable[[str], None]
Resolve = Callable[[ModelConfig, OnStep], ModelConfig]
"""Finds a model's files. Blocks. Raises CommandError."""

Announce = Callable[[Any], Awaitable[Any]]
"""Called with the stub of a shard. Returns an answer with `num_running`, `num_waiting` and `num_submitted`."""


async def _withdraw(stub: Any) -> Any:
    return await stub.Withdraw(WithdrawRequest(withdrawn=True), timeout=_CALL_TIMEOUT_SECONDS)


async def _announce_sleep(stub: Any) -> Any:
    return await stub.Sleep(SleepRequest(only_announce=True), timeout=_CALL_TIMEOUT_SECONDS)


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
    check_free: Callable[[str], None] = lambda _: None
    """Raises CommandError if a model must stay as it is, because it is being rolled out."""
    asleep: dict[str, set[int]] = dataclasses.field(default_factory=dict)
    """The sleeping models, each with the pids of the shards that have been put to sleep."""

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

    async def unload(self, name: str, timeout_seconds: float, on_step: OnStep, *, for_rollout: bool = False) -> None:
        """Let the answers of a model end, and stop its shards. Raises CommandError."""
        models = configured_models(self.config)
        model = self._require(name)
        if not for_rollout:
            self.check_free(name)
        if len(models) == 1:
            raise CommandError(f"{name} is the only model here: `kvloom down` stops the fabric")
        try:
            await self._let_end(name, timeout_seconds, on_step, _withdraw)
        except BaseException:
            await self._take_back(name)
            raise
        await self.supervisor.remove([status.name for status in self.statuses(name)])
        self.asleep.pop(name, None)
        if model is self.config.model:
            self.config.model = ModelConfig()
        self.config.models = [other for other in self.config.models if other is not model]
        dump_config(self.config, self.config_path)

    async def sleep(self, name: str, timeout_seconds: float, on_step: OnStep) -> None:
        """Let the answers of a model end, and free the memory of its shards. Raises CommandError."""
        model = self._require(name)
        self.check_free(name)
        if name in self.asleep:
            raise CommandError(f"{name} sleeps already (kvloom models wake {name})")
        settings = shard_config(self.config, model)
        if shards_per_process(settings) > 1:
            raise CommandError(f"{name} cannot sleep: its shards share a process (shard.sim.shards_per_process)")
        if not self._running(name):
            raise CommandError(f"{name} cannot sleep: none of its shards runs")
        try:
            await self._let_end(name, timeout_seconds, on_step, _announce_sleep)
            self.asleep[name] = set()
            for text in await asyncio.gather(*(self._put_to_sleep(status) for status in self._running(name))):
                on_step(text)
        except BaseException:
            self.asleep.pop(name, None)
            await self._take_back(name)
            raise

    async def wake(self, name: str, on_step: OnStep) -> None:
        """Load the weights of a sleeping model again. Raises CommandError; then the call may be repeated."""
        self._require(name)
        if name not in self.asleep:
            raise CommandError(f"{name} does not sleep")
        for text in await asyncio.gather(*(self._wake_one(status) for status in self._running(name))):
            on_step(text)
        del self.asleep[name]

    async def keep_asleep(self) -> None:
        """Put shards of sleeping models to sleep whose processes have been restarted. Raises CommandError."""
        restarted = [
            status for name in self.asleep for status in self._running(name) if status.pid not in self.asleep[name]
        ]
        await asyncio.gather(*(self._put_to_sleep(status) for status in restarted))

    @property
    def num_awake_shards(self) -> int:
        """How many shards are configured, without those of sleeping models, and those that have ended for good."""
        models = [model for model in configured_models(self.config) if model.name not in self.asleep]
        num_ended = sum(spec.model == model.name for spec in self.supervisor.ended for model in models)
        return sum(shard_config(self.config, model).num_started for model in models) - num_ended

    async def _put_to_sleep(self, status: ProcessStatus) -> str:
        """Raises CommandError."""
        before = _resident_bytes(status)
        async with self._stub(status) as stub:
            try:
                answer = await stub.Sleep(SleepRequest(), timeout=_SLEEP_TIMEOUT_SECONDS)
            except grpc.aio.AioRpcError as error:
                raise CommandError(f"{status.name} does not sleep: {error.details()}") from error
        if answer.HasField("error"):
            raise CommandError(f"{status.name} does not sleep: {answer.error.message}")
        if status.pid is not None:
            self.asleep.setdefault(status.model, set()).add(status.pid)
        return f"{status.name} sleeps: {_megabytes(before)} of memory became {_megabytes(_resident_bytes(status))}"

    async def _wake_one(self, status: ProcessStatus) -> str:
        """Raises CommandError."""
        began = time.monotonic()
        async with self._stub(status) as stub:
            try:
                answer = await stub.Wake(WakeRequest(), timeout=_WAKE_TIMEOUT_SECONDS)
            except grpc.aio.AioRpcError as error:
                raise CommandError(f"{status.name} does not wake: {error.details()}") from error
        if answer.HasField("error"):
            raise CommandError(f"{status.name} does not wake: {answer.error.message}")
        return f"{status.name} is awake after {time.monotonic() - began:.1f} s"

    def _require(self, name: str) -> ModelConfig:
        """Raises CommandError."""
        models = configured_models(self.config)
        model = next((model for model in models if model.name == name), None)
        if model is None:
            raise CommandError(f"there is no model {name}; there are {', '.join(one.name for one in models)}")
        return model

    async def _let_end(self, name: str, timeout_seconds: float, on_step: OnStep, announce: Announce) -> None:
        """Return when the model's shards have nothing to do any more, or after the timeout. `announce` tells a shard
        that is the only one to end."""
        began, watch, is_announced = time.monotonic(), IdleWatch(), False
        drains = await self.is_served_elsewhere(name)
        while not watch.is_over:
            works: list[ShardWork | None] = await asyncio.gather(
                *(self._announce(status, None if drains else announce) for status in self._running(name))
            )
            if not is_announced:
                is_announced = True
                on_step(f"{name} takes no new requests" + (" on this machine" if drains else ""))
            if time.monotonic() - began < _RESTART_SECONDS:
                states = [status.state for status in self.statuses(name)]
                works += [None] * (states.count(ProcessState.RESTARTING) + states.count(ProcessState.STARTING))
            watch.take(works)
            if time.monotonic() - began >= timeout_seconds:
                num_left = sum(1 if work is None else work.num_sequences for work in works)
                on_step(f"{num_left} answers did not end within {timeout_seconds:g} s and are broken off")
                return
            await asyncio.sleep(POLL_SECONDS)
        on_step(f"all answers of {name} have ended")

    async def is_served_elsewhere(self, name: str) -> bool:
        """True when other machines have shards of the model, which then takes requests as before."""
        addresses = [status.internal_address or status.router_address for status in self.supervisor.statuses]
        listed = await asyncio.gather(*(models_of(address, self.trust) for address in addresses if address))
        infos = [info for models in listed for info in models or () if info.name == name]
        num_ready = max((info.num_ready_shards for info in infos), default=0)
        return num_ready > len(self._running(name))

    async def _announce(self, status: ProcessStatus, announce: Announce | None) -> ShardWork | None:
        """Returns what the shard has to do; None: it did not answer. Without `announce` it drains, as others serve the
        model. Called again and again: the process may have been restarted."""
        async with self._stub(status) as stub:
            try:
                if announce is None:
                    load = await stub.Drain(DrainRequest(draining=True), timeout=_CALL_TIMEOUT_SECONDS)
                else:
                    load = await announce(stub)
            except grpc.aio.AioRpcError as error:
                # One that is gone has taken its answers with it; one that is only slow still has them.
                return None if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED else ShardWork(0, 0)
        return ShardWork(load.num_running + load.num_waiting, load.num_submitted)

    async def _take_back(self, name: str) -> None:
        for status in self._running(name):
            async with self._stub(status) as stub:
                try:
                    await stub.Wake(WakeRequest(), timeout=_WAKE_TIMEOUT_SECONDS)
                    await stub.Withdraw(WithdrawRequest(withdrawn=False), timeout=_CALL_TIMEOUT_SECONDS)
                    await stub.Drain(DrainRequest(draining=False), timeout=_CALL_TIMEOUT_SECONDS)
                except grpc.aio.AioRpcError:
                    continue

    @contextlib.asynccontextmanager
    async def _stub(self, status: ProcessStatus) -> AsyncIterator[Any]:
        async with self.trust.open_channel(reachable_address(status.address), "shard", status.name) as channel:
            yield shard_service_pb2_grpc.ShardServiceStub(channel)

    def find(self, name: str) -> ModelConfig:
        """The model that a name or alias stands for. Raises CommandError."""
        models = configured_models(self.config)
        by_alias = next((model for model in models if name in model.aliases), None)
        return next((model for model in models if model.name == name), by_alias) or self._require(name)

    def statuses(self, model: str) -> list[ProcessStatus]:
        return [status for status in self.supervisor.statuses if status.role == "shard" and status.model == model]

    def _running(self, model: str) -> list[ProcessStatus]:
        return [status for status in self.statuses(model) if status.state == ProcessState.READY]


def _resident_bytes(status: ProcessStatus) -> int:
    try:
        return psutil.Process(status.pid or 0).memory_info().rss if status.pid else 0
    except psutil.NoSuchProcess:
        return 0


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.0f} MB"
