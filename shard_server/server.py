"""One shard process: the engine, gRPC server, health service and registration, and the order in which they start and
stop."""

from __future__ import annotations

import asyncio
import gc
import importlib.metadata
import time
import uuid
from collections.abc import Callable
from typing import Any, Final

import grpc
import structlog
from prometheus_client import REGISTRY, CollectorRegistry

from kvloom.errors import KvloomError, invalid_argument
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import ImageTokens
from kvloom.v1.model_card_pb2_grpc import add_ModelCardServiceServicer_to_server
from kvloom.v1.shard_service_pb2 import ShardInfo, ShardServiceConnectRequest
from kvloom.v1.shard_service_pb2_grpc import add_ShardServiceServicer_to_server
from kvloom_common.config import KvloomConfig
from kvloom_common.discovery.announcer import Announcer, advertised_address, fabric_host, name_owner
from kvloom_common.discovery.records import NameTakenError, ShardRecord
from kvloom_common.discovery.registry import ShardRegistry
from kvloom_common.models.card_service import SERVICE_NAME as CARD_SERVICE_NAME
from kvloom_common.models.card_service import ModelCardServicer
from kvloom_common.models.model_card import PackedCard
from kvloom_common.process import service
from kvloom_common.process.access_log import AccessLog
from kvloom_common.process.freed_memory import return_freed_memory
from kvloom_common.text.detokenizer import TokenText
from kvloom_common.tracing.tracer import Tracer
from kvloom_common.transport.checked_server import CheckedServer
from kvloom_common.transport.local_server import LocalServer
from kvloom_common.transport.standard_services import add_health_and_reflection
from kvloom_common.trust.fabric_trust import NO_SECRET, FabricTrust
from shard_server.connection import MAX_PENDING_FRAMES
from shard_server.engine_multiplexer import EngineMultiplexer
from shard_server.engines.base import Capability, Engine, EngineError, EngineInfo
from shard_server.metrics import ShardMetrics
from shard_server.shard_servicer import DrainOrder, ShardServicer
from shard_server.spot_notice import SpotNotices
from shard_server.tracing import SequenceTracer

log = structlog.get_logger()

SERVICE_NAMES: Final = ("kvloom.v1.ShardService", CARD_SERVICE_NAME)
FLUSH_SECONDS: Final = 2.0
"""How long the last frames may take to be written."""
END_MARGIN_SHARE: Final = 0.1
"""Share of a notice that a shard keeps to return what is left, and to end, ..."""
MAX_END_MARGIN_SECONDS: Final = 1.0
"""... but at most this."""
_RECHECK_SECONDS: Final = 0.25
"""How often a stopping shard looks whether it has to end earlier, since another notice came."""


def free_memory() -> None:
    """Free an engine that was closed. Takes a fraction of a second, in which nobody waits for this process."""
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()  # the process froze what it had when it was ready (settle_memory), and thus the first engine
    gc.collect()
    if is_frozen:
        gc.freeze()
    return_freed_memory()


class ShardServer:
    """Call `start`, then `serve`. Both raise EngineError: when the engine cannot start, and when it has died."""

    def __init__(
        self,
        config: KvloomConfig,
        engine: Engine,
        tokenizer: TokenText,
        shard_id: str,
        *,
        metrics_registry: CollectorRegistry = REGISTRY,
        max_pending_frames: int = MAX_PENDING_FRAMES,
        advertised_address: str = "",
        trust: FabricTrust = NO_SECRET,
        card: PackedCard | None = None,
        make_engine: Callable[[], Engine] | None = None,
        free_memory: Callable[[], None] = free_memory,
        notices: SpotNotices | None = None,
        on_leave: Callable[[], None] | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """`advertised_address` is the host:port that is registered for routers; "" registers the listening address.
        `card` is that of the model; without it, routers need the model's files. `make_engine`
        makes another engine like `engine`, in a thread; without it, the shard cannot sleep. `free_memory` is
        called in a thread when an engine was closed or replaced. `on_leave` is called when the shard begins to end for
        good, by a notice or a Drain call; without it, it does not end by itself."""
        self.tracer = tracer
        """None: there are no traces."""
        self._notices = notices
        self._on_leave = on_leave
        self._leaves = asyncio.Event()
        self._ends_at: float | None = None
        """When a shard that stops returns what still runs, by the loop's clock; None: it does not stop."""
        self._card = card
        self._config = config
        self._engine = engine
        self._make_engine = make_engine
        self._free_memory = free_memory
        self._changing_engine = asyncio.Lock()
        self._tokenizer = tokenizer
        self._shard_id = shard_id
        self.incarnation_id = uuid.uuid4().hex
        self._metrics_registry = metrics_registry
        self._max_pending_frames = max_pending_frames
        self._advertised_address = advertised_address
        self._trust = trust
        self._stopping = False
        self._hand_over_timer: asyncio.TimerHandle | None = None
        self._multiplexer: EngineMultiplexer
        self._server: grpc.aio.Server
        self._local_server: LocalServer[ShardServiceConnectRequest]
        self._health: Any
        self._announcer: Announcer[ShardRecord] | None = None
        self._engine_task: asyncio.Task[None]

    async def start(self, port: int = 0) -> str:
        """Load the engine and start serving; returns the address. Raises EngineError and StartError."""
        self._server = grpc.aio.server(options=service.SERVER_OPTIONS)
        try:
            # The port is bound first: loading an engine would be wasted if the port were taken.
            host = fabric_host(self._config, self._config.shard.host)
            address = service.bind(self._server, host, port, self._trust.add_port)
            await self._engine.start()
            await self._serve_engine(address)
        except BaseException:
            await self._server.stop(None)
            await self._engine.close()
            raise
        return address

    async def _serve_engine(self, address: str) -> None:
        info = self._engine.info
        if self._config.shard.role and Capability.KV_HANDOFF not in info.capabilities:
            raise service.StartError(
                f"shard.role: the engine {info.engine} hands no KV over as it is configured "
                "(docs/how-to/disaggregation.md)"
            )
        if self._config.redis.url:
            registry = ShardRegistry(self._config.redis.url, self._config.redis.key_prefix, self._trust.sealer)
            advertised = self._advertised_address or advertised_address(self._config, address)
            owner = name_owner(self._config.data_dir)
            record = ShardRecord(self._shard_id, advertised, info.model, self.incarnation_id, owner)
            self._announcer = Announcer(registry, record)
            await self._wait_for_name(self._announcer)
        else:
            log.warning("announcement_disabled", cause="redis.url is not set: only router.shards finds this shard")
        self._multiplexer = EngineMultiplexer(
            self._engine,
            self._tokenizer,
            self._shard_info(info),
            ShardMetrics(info.model, info.block_size, info.num_blocks, self._metrics_registry),
            self._config.shard.max_waiting,
            max_pending_frames=self._max_pending_frames,
            access_log=AccessLog(self._config.log),
            tracer=self._new_tracer(info.model),
        )
        await self._multiplexer.adapters.use(self._engine)
        for adapter in self._config.model.adapters:
            await self._multiplexer.adapters.add_configured(adapter.name, adapter.path)
        drain_timeout_seconds = self._config.fabric.drain_timeout_seconds
        servicer = ShardServicer(self._multiplexer, self._on_drain_call, self._sleep, self._wake, drain_timeout_seconds)
        add_ShardServiceServicer_to_server(servicer, CheckedServer(self._server, self._trust.may_call))
        add_ModelCardServiceServicer_to_server(
            ModelCardServicer(self._card_of), CheckedServer(self._server, self._trust.may_call)
        )
        self._local_server = LocalServer(lambda stream: servicer.Connect(stream, stream), ShardServiceConnectRequest)
        self._health = add_health_and_reflection(
            self._server, SERVICE_NAMES, with_reflection=self._config.fabric.reflection
        )
        self._engine_task = asyncio.create_task(self._multiplexer.run(), name="engine steps")
        await self._local_server.start(address)
        await self._server.start()
        await service.set_serving(self._health, SERVICE_NAMES, True)
        log.info("shard_started", address=address, engine=info.engine, model=info.model, num_blocks=info.num_blocks)

    def _shard_info(self, info: EngineInfo) -> ShardInfo:
        card, model, rule = self._card, self._config.model, info.image_tokens
        return ShardInfo(
            shard_id=self._shard_id,
            incarnation_id=self.incarnation_id,
            model=info.model,
            engine=info.engine,
            block_size=info.block_size,
            num_blocks=info.num_blocks,
            max_batch=info.max_batch,
            max_model_len=info.max_model_len,
            capabilities=sorted(info.capabilities),
            version=importlib.metadata.version("kvloom"),
            variant=info.variant,
            description=info.description,
            embedding_size=info.embedding_size,
            image_tokens=None if rule is None else ImageTokens(patch_pixels=rule[0], max_tokens=rule[1]),
            role=self._config.shard.role,
            yield_tokens=info.yield_tokens,
            reserves_output=info.reserves_output,
            model_version=model.version,
            model_checksum=model.sha256,
            card_checksum="" if card is None else card.checksum,
            tokenizer_checksum="" if card is None else card.tokenizer_checksum,
        )

    def _card_of(self, model: str) -> PackedCard | None:
        return self._card if self._card is not None and self._card.model == model else None

    async def _wait_for_name(self, announcer: Announcer[ShardRecord]) -> None:
        """Raises StartError if another machine has a shard of this name."""
        try:
            await announcer.wait_for_name()
        except NameTakenError as error:
            await announcer.close()
            raise service.StartError(str(error)) from error

    def _new_tracer(self, model: str) -> SequenceTracer | None:
        if self.tracer is None:
            return None
        return SequenceTracer(self.tracer, self._shard_id, model, time.monotonic)

    async def serve(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set or notice is given, then drain and stop. Raises EngineError when the engine dies."""
        stopped = asyncio.create_task(stop.wait(), name="stop")
        leaving = asyncio.create_task(self._leaves.wait(), name="leave")
        tasks: list[asyncio.Task[Any]] = [stopped, leaving, self._engine_task]
        noticed = None
        if self._notices is not None:
            noticed = asyncio.create_task(self._notices.wait(), name="notice")
            tasks.append(noticed)
        announcing = None
        if self._announcer is not None:
            announcing = asyncio.create_task(self._announcer.run(), name="announcer")
            tasks.append(announcing)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if noticed is not None and noticed.done():
                await self._take_notice(noticed.result(), exits=True)
            if stopped.done() or self._leaves.is_set():
                await self._drain()
        finally:
            for task in (stopped, leaving, noticed):
                if task is not None:
                    task.cancel()
            if announcing is not None:
                announcing.cancel()
            await self._stop()
        self._raise_failure(announcing)

    async def _drain(self) -> None:
        """Let the live sequences finish or move within the time of the notice, or else finish within the configured
        time."""
        self._stopping = True
        loop = asyncio.get_running_loop()
        if self._ends_at is None:
            await self._set_draining(True)
            self._ends_at = loop.time() + self._config.fabric.drain_timeout_seconds
        idle = asyncio.create_task(self._multiplexer.wait_idle(), name="drain")
        while not (idle.done() or self._engine_task.done()) and loop.time() < self._ends_at:
            await asyncio.wait(
                {idle, self._engine_task},
                timeout=min(self._ends_at - loop.time(), _RECHECK_SECONDS),
                return_when=asyncio.FIRST_COMPLETED,
            )
        if not idle.done():
            log.warning("drain_timed_out")
            idle.cancel()
            self._multiplexer.return_sequences()

    async def _stop(self) -> None:
        self._stopping = True
        await service.set_serving(self._health, SERVICE_NAMES, False)
        if self._announcer is not None:
            await self._announcer.withdraw()
        if self._hand_over_timer is not None:
            self._hand_over_timer.cancel()
        self._multiplexer.end_connections()
        await asyncio.gather(self._server.stop(FLUSH_SECONDS), self._local_server.stop(FLUSH_SECONDS))
        await self._engine.close()
        if self._multiplexer.asleep:
            self._engine_task.cancel()
        await asyncio.wait({self._engine_task}, timeout=FLUSH_SECONDS)
        self._engine_task.cancel()

    def _raise_failure(self, announcing: asyncio.Task[None] | None) -> None:
        if announcing is not None and announcing.done() and not announcing.cancelled():
            announcing.result()  # a bug: the announcer never returns by itself
        if self._engine_task.done() and not self._engine_task.cancelled():
            error = self._engine_task.exception()
            if error is not None:
                raise EngineError(f"the engine died: {error}") from error

    async def _on_drain_call(self, order: DrainOrder) -> None:
        if self._multiplexer.asleep and not order.draining:
            raise KvloomError(ErrorReason.ERROR_REASON_DRAINING, "This shard sleeps: `kvloom models wake` wakes it.")
        if order.empty_within_seconds is not None:
            await self._take_notice(order.empty_within_seconds, exits=order.exits)
        elif not self._stopping:
            await self._set_draining(order.draining, order.deadline_seconds)
        elif not order.draining:
            raise KvloomError(ErrorReason.ERROR_REASON_DRAINING, "This shard is stopping; it cannot resume.")

    async def _take_notice(self, seconds: float, *, exits: bool) -> None:
        """The shard has to be empty within that time, and then ends if `exits`. Raises KvloomError."""
        if exits and self._on_leave is None:
            raise invalid_argument("This shard does not end by itself: it shares its process with others.", "exit")
        loop = asyncio.get_running_loop()
        margin_seconds = min(END_MARGIN_SHARE * seconds, MAX_END_MARGIN_SECONDS)
        ends_at = loop.time() + seconds - margin_seconds
        if self._ends_at is not None and self._ends_at <= ends_at:
            return  # it stops earlier than that
        log.info("spot_notice_received", within_seconds=seconds, exits=exits)
        await self._set_draining(True, seconds, is_notice=True)
        if exits or self._stopping:
            self._stopping = True
            self._ends_at = ends_at
        if exits and self._on_leave is not None and not self._leaves.is_set():
            self._leaves.set()
            self._on_leave()

    async def _set_draining(
        self, draining: bool, deadline_seconds: float | None = None, *, is_notice: bool = False
    ) -> None:
        if self._hand_over_timer is not None:
            self._hand_over_timer.cancel()
            self._hand_over_timer = None
        self._multiplexer.set_draining(draining, empty_within_seconds=deadline_seconds if is_notice else None)
        if draining and deadline_seconds is not None:
            loop = asyncio.get_running_loop()
            self._hand_over_timer = loop.call_later(deadline_seconds, self._hand_over)
        await service.set_serving(self._health, SERVICE_NAMES, not draining)
        log.info("drain_began" if draining else "drain_cancelled")

    async def _sleep(self) -> None:
        """Close the engine and free its memory. Raises KvloomError."""
        if self._make_engine is None:
            raise invalid_argument("This shard cannot sleep.", "")
        async with self._changing_engine:
            if self._multiplexer.asleep:
                return
            self._multiplexer.announce_sleep(True)
            await self._set_draining(True)
            self._multiplexer.return_sequences()
            self._multiplexer.give_up_engine()
            await self._engine.close()
            await asyncio.to_thread(self._free_memory)
            log.info("shard_slept")

    async def _wake(self) -> None:
        """Load another engine. Raises KvloomError."""
        async with self._changing_engine:
            if self._multiplexer.asleep and not self._stopping:
                self._engine = await self._another_engine(self._engine.info)
                self._multiplexer.use(self._engine)
                await self._multiplexer.adapters.use(self._engine)
                await asyncio.to_thread(self._free_memory)
                log.info("shard_woke")
                await self._set_draining(False)
            self._multiplexer.announce_sleep(False)

    async def _another_engine(self, before: EngineInfo) -> Engine:
        """One that has started, and that routers and running metrics can take for the old one. Raises KvloomError."""
        assert self._make_engine is not None, "it sleeps"
        try:
            engine = await asyncio.to_thread(self._make_engine)
            try:
                await engine.start()
                _check_same(before, engine.info)
            except BaseException:
                await engine.close()
                raise
        except (EngineError, OSError, ValueError) as error:
            log.warning("engine_load_failed", error=str(error))
            raise KvloomError(
                ErrorReason.ERROR_REASON_ENGINE_FAILED, f"The engine cannot be loaded: {error}"
            ) from error
        return engine

    def _hand_over(self) -> None:
        self._hand_over_timer = None
        log.info("sequences_handed_over")
        self._multiplexer.set_draining(True, hand_over=True)


def _check_same(before: EngineInfo, now: EngineInfo) -> None:
    """Raises EngineError. Speeds, and the description that names them, may differ."""
    for field in ("block_size", "num_blocks", "max_batch", "max_model_len", "capabilities", "variant"):
        if getattr(before, field) != getattr(now, field):
            raise EngineError(
                f"{field} was {getattr(before, field)} and is {getattr(now, field)} now: restart the shard instead"
            )
