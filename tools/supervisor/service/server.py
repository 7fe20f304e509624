"""SupervisorService: how commands reach a running `kvloom up`, on this machine and from others of its fleet.

On this machine it listens on a Unix socket in the run folder, which only the folder's owner can access. In a fleet it
also listens on TCP, where callers need a certificate of the fabric.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import grpc

from kvloom.v1 import supervisor_service_pb2_grpc
from kvloom.v1.supervisor_service_pb2 import (
    DrainShardRequest,
    DrainShardResponse,
    FollowRolloutRequest,
    FollowRolloutResponse,
    GetStateRequest,
    GetStateResponse,
    ListModelAdaptersRequest,
    ListModelAdaptersResponse,
    LoadModelAdapterRequest,
    LoadModelAdapterResponse,
    LoadModelRequest,
    LoadModelResponse,
    LogEntry,
    ModelAdapter,
    ReadLogsRequest,
    ReadLogsResponse,
    ReloadRequest,
    ReloadResponse,
    RestartRequest,
    RestartResponse,
    RollBackModelRequest,
    RollBackModelResponse,
    SleepModelRequest,
    SleepModelResponse,
    StartRolloutRequest,
    StartRolloutResponse,
    UnloadModelAdapterRequest,
    UnloadModelAdapterResponse,
    UnloadModelRequest,
    UnloadModelResponse,
    WakeModelRequest,
    WakeModelResponse,
)
from kvloom_common.config import AdapterConfig, ModelConfig
from kvloom_common.process import service
from kvloom_common.process.control_socket import SOCKET, short_path
from kvloom_common.transport.checked_server import CheckedServer
from kvloom_common.trust.fabric_trust import FabricTrust
from tools.failures import CommandError
from tools.supervisor.flag_model import flag_model
from tools.supervisor.logs.entries import LEVELS
from tools.supervisor.logs.entries import LogEntry as Entry
from tools.supervisor.logs.files import LogQuery, LogReader, chunked
from tools.supervisor.models.adapters import ListedAdapter, adapter_config
from tools.supervisor.rollout.judge import RolloutLimits
from tools.supervisor.rollout.plan import RolloutPlan, shard_settings
from tools.supervisor.service.state_messages import state_to_proto
from tools.supervisor.state import FabricState

MAX_LOG_LINES: Final = 100_000
MAX_LOG_READERS: Final = 16
MAX_CONCURRENT_RPCS: Final = 64
MAX_SHARDS: Final = 1024
MAX_UNLOAD_SECONDS: Final = 86_400.0
MAX_SHARD_SETTINGS: Final = 64
_MAX_NAMES: Final = 4096
_MAX_CHUNK_CHARS: Final = 2**18
_POLL_SECONDS: Final = 0.2
_STOP_GRACE_SECONDS: Final = 0.5

OnStep = Callable[[str], None]
RestartCommand = Callable[[Sequence[str], OnStep], Awaitable[None]]
"""Called with names and a callback for each step. Raises CommandError."""
ReloadCommand = Callable[[Path | None, bool, OnStep], Awaitable[None]]
PreviewReloadCommand = Callable[[Path | None, OnStep], Awaitable[None]]
"""Called with the file, if it is another one, and whether to restart processes."""
LoadModelCommand = Callable[[ModelConfig, int | None, OnStep], Awaitable[None]]
UnloadModelCommand = Callable[[str, float, OnStep], Awaitable[None]]
SleepModelCommand = Callable[[str, float, OnStep], Awaitable[None]]
DrainShardCommand = Callable[[str, bool, float | None], Awaitable[tuple[int, int]]]
"""Called with a shard, whether it drains, and the deadline. Returns (running, waiting). Raises CommandError."""
WakeModelCommand = Callable[[str, OnStep], Awaitable[None]]


class RolloutCommands(Protocol):
    """All raise CommandError."""

    async def start(self, plan: RolloutPlan) -> None:
        """Begin a rollout, which continues by itself."""
        ...

    async def follow(self, name: str, on_step: OnStep) -> None:
        """Return at the end of a rollout."""
        ...

    def roll_back(self, name: str) -> None: ...


class AdapterCommands(Protocol):
    """The commands for the adapters of the machine's models. All raise CommandError."""

    async def load_adapter(self, model: str, adapter: AdapterConfig, on_step: OnStep) -> None: ...

    async def unload_adapter(self, model: str, name: str, timeout_seconds: float, on_step: OnStep) -> None: ...

    async def list_adapters(self) -> Sequence[ListedAdapter]: ...


class SupervisorServicer(supervisor_service_pb2_grpc.SupervisorServiceServicer):
    """Answers with what these functions return; `log_paths` gives the logs by the names of their processes."""

    def __init__(
        self,
        current_state: Callable[[], Awaitable[FabricState]],
        restart: RestartCommand,
        load_model: LoadModelCommand,
        unload_model: UnloadModelCommand,
        log_paths: Callable[[], dict[str, Path]],
        *,
        reload: ReloadCommand,
        preview_reload: PreviewReloadCommand,
        sleep_model: SleepModelCommand,
        wake_model: WakeModelCommand,
        rollouts: RolloutCommands,
        adapters: AdapterCommands,
        drain_shard: DrainShardCommand,
    ) -> None:
        self._drain_shard = drain_shard
        self._rollouts = rollouts
        self._current_state = current_state
        self._restart = restart
        self._reload = reload
        self._preview_reload = preview_reload
        self._sleep_model = sleep_model
        self._wake_model = wake_model
        self._adapters = adapters
        self._load_model = load_model
        self._unload_model = unload_model
        self._log_paths = log_paths
        self._num_log_readers = 0

    async def GetState(self, request: GetStateRequest, context: Any) -> GetStateResponse:
        return state_to_proto(await self._current_state())

    async def Restart(self, request: RestartRequest, context: Any) -> AsyncIterator[RestartResponse]:
        if len(request.names) > _MAX_NAMES:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"names: at most {_MAX_NAMES}")
        names = list(request.names)
        async for step in _steps(lambda on_step: self._restart(names, on_step), context):
            yield RestartResponse(step=step)

    async def Reload(self, request: ReloadRequest, context: Any) -> AsyncIterator[ReloadResponse]:
        file = Path(request.config_file) if request.config_file else None
        if file is not None and not file.is_absolute():
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "config_file: the path must be absolute")

        def change(on_step: OnStep) -> Awaitable[None]:
            if request.dry_run:
                return self._preview_reload(file, on_step)
            return self._reload(file, request.restart, on_step)

        async for step in _steps(change, context):
            yield ReloadResponse(step=step)

    async def LoadModel(self, request: LoadModelRequest, context: Any) -> AsyncIterator[LoadModelResponse]:
        num_shards = request.num_shards if request.HasField("num_shards") else None
        if num_shards is not None and not 1 <= num_shards <= MAX_SHARDS:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"num_shards: from 1 to {MAX_SHARDS}")
        wanted = flag_model(request.model)
        async for step in _steps(lambda on_step: self._load_model(wanted, num_shards, on_step), context):
            yield LoadModelResponse(step=step)

    async def UnloadModel(self, request: UnloadModelRequest, context: Any) -> AsyncIterator[UnloadModelResponse]:
        timeout_seconds = request.timeout_seconds
        if not 0 <= timeout_seconds <= MAX_UNLOAD_SECONDS:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"timeout_seconds: from 0 to {MAX_UNLOAD_SECONDS:g}")
        async for step in _steps(lambda on_step: self._unload_model(request.name, timeout_seconds, on_step), context):
            yield UnloadModelResponse(step=step)

    async def SleepModel(self, request: SleepModelRequest, context: Any) -> AsyncIterator[SleepModelResponse]:
        timeout_seconds = request.timeout_seconds
        if not 0 <= timeout_seconds <= MAX_UNLOAD_SECONDS:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"timeout_seconds: from 0 to {MAX_UNLOAD_SECONDS:g}")
        async for step in _steps(lambda on_step: self._sleep_model(request.name, timeout_seconds, on_step), context):
            yield SleepModelResponse(step=step)

    async def WakeModel(self, request: WakeModelRequest, context: Any) -> AsyncIterator[WakeModelResponse]:
        async for step in _steps(lambda on_step: self._wake_model(request.name, on_step), context):
            yield WakeModelResponse(step=step)

    async def StartRollout(self, request: StartRolloutRequest, context: Any) -> StartRolloutResponse:
        try:
            await self._rollouts.start(_plan(request))
        except CommandError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.message)
        return StartRolloutResponse()

    async def FollowRollout(self, request: FollowRolloutRequest, context: Any) -> AsyncIterator[FollowRolloutResponse]:
        async for step in _steps(lambda on_step: self._rollouts.follow(request.name, on_step), context):
            yield FollowRolloutResponse(step=step)

    async def RollBackModel(self, request: RollBackModelRequest, context: Any) -> RollBackModelResponse:
        try:
            self._rollouts.roll_back(request.name)
        except CommandError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.message)
        return RollBackModelResponse()

    async def LoadModelAdapter(
        self, request: LoadModelAdapterRequest, context: Any
    ) -> AsyncIterator[LoadModelAdapterResponse]:
        if request.path and not Path(request.path).is_absolute():
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "path: it must be absolute")

        async def load(on_step: OnStep) -> None:
            adapter = adapter_config(request.name, request.path)
            await self._adapters.load_adapter(request.model, adapter, on_step)

        async for step in _steps(load, context):
            yield LoadModelAdapterResponse(step=step)

    async def UnloadModelAdapter(
        self, request: UnloadModelAdapterRequest, context: Any
    ) -> AsyncIterator[UnloadModelAdapterResponse]:
        timeout_seconds = request.timeout_seconds
        if not 0 <= timeout_seconds <= MAX_UNLOAD_SECONDS:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"timeout_seconds: from 0 to {MAX_UNLOAD_SECONDS:g}")

        async def unload(on_step: OnStep) -> None:
            await self._adapters.unload_adapter(request.model, request.name, timeout_seconds, on_step)

        async for step in _steps(unload, context):
            yield UnloadModelAdapterResponse(step=step)

    async def ListModelAdapters(self, request: ListModelAdaptersRequest, context: Any) -> ListModelAdaptersResponse:
        listed = await self._adapters.list_adapters()
        return ListModelAdaptersResponse(
            adapters=[
                ModelAdapter(
                    model=adapter.model,
                    name=adapter.name,
                    checksum=adapter.checksum,
                    rank=adapter.rank,
                    shards=adapter.shards,
                    loaded_on=adapter.loaded_on,
                )
                for adapter in listed
            ]
        )

    async def DrainShard(self, request: DrainShardRequest, context: Any) -> DrainShardResponse:
        deadline = request.deadline_seconds if request.HasField("deadline_seconds") else None
        try:
            num_running, num_waiting = await self._drain_shard(request.shard, request.draining, deadline)
        except CommandError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.message)
            raise AssertionError("abort raises") from error
        return DrainShardResponse(num_running=num_running, num_waiting=num_waiting)

    async def ReadLogs(self, request: ReadLogsRequest, context: Any) -> AsyncIterator[ReadLogsResponse]:
        query = _query(request)
        if query.level and query.level not in LEVELS:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"level: one of {', '.join(LEVELS)}")
        if self._num_log_readers >= MAX_LOG_READERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_LOG_READERS} others read the logs now")
        self._num_log_readers += 1
        try:
            reader = await asyncio.to_thread(lambda: LogReader(self._log_paths(), query, follow=request.follow))
            with contextlib.closing(reader):
                for chunk in chunked(await asyncio.to_thread(reader.first), _MAX_CHUNK_CHARS):
                    yield _response(chunk)
                yield ReadLogsResponse(end_of_history=True)
                while request.follow:
                    await asyncio.sleep(_POLL_SECONDS)
                    for chunk in chunked(await asyncio.to_thread(reader.poll), _MAX_CHUNK_CHARS):
                        yield _response(chunk)
        except OSError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"the logs cannot be read: {error.strerror}")
        finally:
            self._num_log_readers -= 1


async def _steps(start: Callable[[OnStep], Awaitable[None]], context: Any) -> AsyncIterator[str]:
    """Yields what the work reports. Its failure fails the call."""
    steps: asyncio.Queue[str] = asyncio.Queue()  # about as many as processes
    work = asyncio.ensure_future(start(steps.put_nowait))
    work.add_done_callback(lambda _: steps.put_nowait(""))
    try:
        while step := await steps.get():
            yield step
        work.result()
    except CommandError as error:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.message)
    finally:
        # Like the Ctrl-C of the command that asked: a process that is being replaced still completes that.
        work.cancel()


def _plan(request: StartRolloutRequest) -> RolloutPlan:
    """Raises CommandError."""
    gap = request.max_likelihood_gap if request.HasField("max_likelihood_gap") else None
    limits = RolloutLimits(request.max_error_rate_increase, request.max_ttft_ratio, gap, request.min_requests)
    if request.path.startswith(".") or len(request.shard_settings) > MAX_SHARD_SETTINGS:
        raise CommandError(f"path must be absolute, and shard_settings has at most {MAX_SHARD_SETTINGS} entries")
    return RolloutPlan(
        version=request.version,
        path=request.path,
        num_shards=request.num_shards if request.HasField("num_shards") else None,
        shard=shard_settings(request.shard_settings),
        steps=tuple(request.steps),
        hold_seconds=request.hold_seconds,
        drain_seconds=request.drain_seconds,
        limits=limits,
        scored_share=request.scored_share,
    ).checked()


def _query(request: ReadLogsRequest) -> LogQuery:
    max_lines = request.max_lines if request.HasField("max_lines") else MAX_LOG_LINES
    return LogQuery(
        frozenset(request.processes),
        tuple(request.request_ids),
        request.level,
        request.since,
        min(max_lines, MAX_LOG_LINES),
    )


def _response(entries: Sequence[Entry]) -> ReadLogsResponse:
    return ReadLogsResponse(
        entries=[
            LogEntry(process=entry.process, at=entry.at, level=entry.level, lines=entry.lines) for entry in entries
        ]
    )


@contextlib.asynccontextmanager
async def serving(
    servicer: SupervisorServicer, run_dir: Path, trust: FabricTrust, fleet_host: str = ""
) -> AsyncIterator[str]:
    """Serve as long as the context lasts; its end cancels running calls. Yields the address for other machines, which
    listens on `fleet_host`, or "". Raises CommandError."""
    server = grpc.aio.server(options=service.SERVER_OPTIONS, maximum_concurrent_rpcs=MAX_CONCURRENT_RPCS)
    supervisor_service_pb2_grpc.add_SupervisorServiceServicer_to_server(servicer, CheckedServer(server, trust.may_call))
    (run_dir / SOCKET).unlink(missing_ok=True)
    with short_path(run_dir) as short:
        try:
            server.add_insecure_port(f"unix:{short}/{SOCKET}")
            address = service.bind(server, fleet_host, 0, trust.add_port) if fleet_host else ""
        except (RuntimeError, service.StartError) as error:
            raise CommandError(f"cannot listen for commands: {error}") from error
        await server.start()
        try:
            yield address
        finally:
            await server.stop(_STOP_GRACE_SECONDS)
            (run_dir / SOCKET).unlink(missing_ok=True)
