"""The client of SupervisorService: asks a running `kvloom up`, on this machine or on another one of its fleet."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio

from kvloom.v1 import supervisor_service_pb2_grpc
from kvloom.v1.supervisor_service_pb2 import (
    FollowRolloutRequest,
    GetStateRequest,
    ListModelAdaptersRequest,
    LoadModelAdapterRequest,
    LoadModelRequest,
    ReadLogsRequest,
    ReloadRequest,
    RestartRequest,
    RollBackModelRequest,
    SleepModelRequest,
    StartRolloutRequest,
    UnloadModelAdapterRequest,
    UnloadModelRequest,
    WakeModelRequest,
)
from kvloom_common.process.control_socket import SOCKET, short_path
from kvloom_common.process.service import MAX_MESSAGE_BYTES
from kvloom_common.trust.fabric_trust import FabricTrust
from tools.failures import CommandError
from tools.supervisor.logs.entries import LogEntry
from tools.supervisor.logs.files import LogQuery
from tools.supervisor.models.adapters import ListedAdapter
from tools.supervisor.service.state_messages import state_from_proto
from tools.supervisor.state import FabricState

STATE_TIMEOUT_SECONDS: Final = 5.0
LIST_TIMEOUT_SECONDS: Final = 10.0
_OPTIONS: Final = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
]


class UnreachableError(CommandError):
    """The supervisor does not answer; the message says why."""


class SupervisorClient:
    """`name` is what messages call the supervisor."""

    def __init__(self, channel: grpc.aio.Channel, name: str) -> None:
        self._stub = supervisor_service_pb2_grpc.SupervisorServiceStub(channel)
        self._name = name

    async def state(self) -> FabricState:
        """Raises UnreachableError."""
        try:
            return state_from_proto(await self._stub.GetState(GetStateRequest(), timeout=STATE_TIMEOUT_SECONDS))
        except grpc.aio.AioRpcError as error:
            raise self._unreachable(error) from error

    async def restart(self, names: Sequence[str], on_step: Callable[[str], None]) -> None:
        """Returns when the restart is complete. Raises CommandError with the reason if it fails."""
        await self._follow(self._stub.Restart(RestartRequest(names=names)), on_step, "the restart was complete")

    async def reload(
        self, config_file: Path | None, restart: bool, on_step: Callable[[str], None], *, dry_run: bool = False
    ) -> None:
        """Returns when all is applied that can be. Raises CommandError with the reason if the file cannot be used."""
        request = ReloadRequest(config_file=str(config_file or ""), restart=restart, dry_run=dry_run)
        await self._follow(self._stub.Reload(request), on_step, "the reload was complete")

    async def load_model(self, model: str, num_shards: int | None, on_step: Callable[[str], None]) -> None:
        """Returns when the model is served. Raises CommandError with the reason if it cannot be."""
        call = self._stub.LoadModel(LoadModelRequest(model=model, num_shards=num_shards))
        await self._follow(call, on_step, "the model was loaded")

    async def unload_model(self, name: str, timeout_seconds: float, on_step: Callable[[str], None]) -> None:
        """Returns when the model's shards have stopped. Raises CommandError with the reason if it fails."""
        call = self._stub.UnloadModel(UnloadModelRequest(name=name, timeout_seconds=timeout_seconds))
        await self._follow(call, on_step, "the model was unloaded")

    async def sleep_model(self, name: str, timeout_seconds: float, on_step: Callable[[str], None]) -> None:
        """Returns when the model's shards sleep. Raises CommandError with the reason if it fails."""
        call = self._stub.SleepModel(SleepModelRequest(name=name, timeout_seconds=timeout_seconds))
        await self._follow(call, on_step, "the model slept")

    async def wake_model(self, name: str, on_step: Callable[[str], None]) -> None:
        """Returns when the model is served again. Raises CommandError with the reason if it fails."""
        await self._follow(self._stub.WakeModel(WakeModelRequest(name=name)), on_step, "the model was awake")

    async def start_rollout(self, request: StartRolloutRequest) -> None:
        """Raises CommandError with the reason if the rollout cannot begin."""
        await self._ask(self._stub.StartRollout(request))

    async def follow_rollout(self, name: str, on_step: Callable[[str], None]) -> None:
        """Returns when the new version has replaced the old one. Raises CommandError with the reason if not."""
        await self._follow(self._stub.FollowRollout(FollowRolloutRequest(name=name)), on_step, "the rollout ended")

    async def roll_back(self, name: str) -> None:
        """Returns at once. Raises CommandError if there is nothing to roll back."""
        await self._ask(self._stub.RollBackModel(RollBackModelRequest(name=name)))

    async def _ask(self, call: Any) -> None:
        """Raises CommandError."""
        try:
            await call
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT):
                raise CommandError(error.details() or "") from error
            raise self._unreachable(error) from error

    async def load_adapter(self, model: str, name: str, path: str, on_step: Callable[[str], None]) -> None:
        """Returns when all shards of the model have the adapter. Raises CommandError with the reason if they cannot."""
        call = self._stub.LoadModelAdapter(LoadModelAdapterRequest(model=model, name=name, path=path))
        await self._follow(call, on_step, "the adapter was loaded")

    async def unload_adapter(
        self, model: str, name: str, timeout_seconds: float, on_step: Callable[[str], None]
    ) -> None:
        """Returns when no shard has the adapter any more. Raises CommandError with the reason if some still have it."""
        request = UnloadModelAdapterRequest(model=model, name=name, timeout_seconds=timeout_seconds)
        await self._follow(self._stub.UnloadModelAdapter(request), on_step, "the adapter was unloaded")

    async def adapters(self) -> list[ListedAdapter]:
        """Raises UnreachableError."""
        try:
            answer = await self._stub.ListModelAdapters(ListModelAdaptersRequest(), timeout=LIST_TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise self._unreachable(error) from error
        return [
            ListedAdapter(one.model, one.name, one.checksum, one.rank, list(one.shards), list(one.loaded_on))
            for one in answer.adapters
        ]

    async def _follow(self, call: Any, on_step: Callable[[str], None], end: str) -> None:
        """Raises CommandError."""
        has_begun = False
        try:
            async for response in call:
                has_begun = True
                on_step(response.step)
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT):
                raise CommandError(error.details() or "") from error
            if has_begun:
                raise CommandError(f"{self._name} stopped before {end}") from error
            raise self._unreachable(error) from error

    async def logs(self, query: LogQuery, *, follow: bool) -> AsyncIterator[list[LogEntry] | None]:
        """Yields entries, and None once: at the end of what existed when the call began. Raises CommandError."""
        request = ReadLogsRequest(
            processes=sorted(query.processes),
            request_ids=query.request_ids,
            level=query.level,
            since=query.since,
            max_lines=query.max_lines,
            follow=follow,
        )
        try:
            async for response in self._stub.ReadLogs(request):
                if response.entries:
                    yield [LogEntry(one.process, one.at, one.level, tuple(one.lines)) for one in response.entries]
                if response.end_of_history:
                    yield None
        except grpc.aio.AioRpcError as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: grpc.aio.AioRpcError) -> UnreachableError:
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            return UnreachableError(f"{self._name} cannot be reached")
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return UnreachableError(f"{self._name} does not answer within {STATE_TIMEOUT_SECONDS:g} s")
        return UnreachableError(f"{self._name}: {error.details()}")


@contextlib.asynccontextmanager
async def local_supervisor(run_dir: Path) -> AsyncIterator[SupervisorClient]:
    """That of the fabric which runs with this run folder. Raises UnreachableError if none does."""
    if not (run_dir / SOCKET).exists():
        raise UnreachableError("the fabric accepts no commands now")
    with short_path(run_dir) as short:
        async with grpc.aio.insecure_channel(f"unix:{short}/{SOCKET}", options=_OPTIONS) as channel:
            yield SupervisorClient(channel, "the fabric")


@contextlib.asynccontextmanager
async def remote_supervisor(address: str, name: str, trust: FabricTrust) -> AsyncIterator[SupervisorClient]:
    """The one called `name`, which serves its fleet at `address`."""
    async with trust.open_channel(address, "supervisor", name, options=_OPTIONS) as channel:
        yield SupervisorClient(channel, f"{name} at {address}")
