"""The adapters of a shard, whichever engine it has: what routers are told of them, and which submits may use them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Final

import structlog

from kvloom.errors import KvloomError, invalid_argument
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.shard_service_pb2 import AdapterList, AdapterState, ShardSubmit
from kvloom_common.config import ADAPTER_NAME
from shard_server.engines import base
from shard_server.engines.base import AdapterError, Adapters, AdaptersState, Engine, EngineError, adapters_of
from shard_server.metrics import ShardMetrics

log = structlog.get_logger()

_NAME: Final = re.compile(ADAPTER_NAME)


class ServedAdapters:
    """`use` comes first. `on_change` is called with the new list after every change of it."""

    def __init__(self, metrics: ShardMetrics, on_change: Callable[[AdapterList], None]) -> None:
        self._metrics = metrics
        self._on_change = on_change
        self._adapters: Adapters | None = None
        self._paths: dict[str, str] = {}
        """The directories of all registered adapters, with which another engine gets them."""
        self.list: AdapterList | None = None
        """None: this shard can have no adapters."""

    async def use(self, engine: Engine) -> None:
        """An engine has started, the first one or one that takes the place of another: it gets the adapters that the
        other had. One that it refuses is left out."""
        self.list = None
        self._adapters = adapters = adapters_of(engine)
        if adapters is None:
            return
        for name, path in list(self._paths.items()):
            try:
                await adapters.add(name, path)
            except AdapterError as error:
                log.warning("adapter_lost", adapter=name, error=str(error))
                del self._paths[name]
        adapters.listen(self._take_change)
        self._take_change()

    def give_up_engine(self) -> None:
        """The engine is about to be closed."""
        self._adapters = None
        if self.list is not None:
            unloaded = [AdapterState(name=a.name, checksum=a.checksum, rank=a.rank) for a in self.list.adapters]
            self._tell(AdapterList(adapters=unloaded, max_loaded=self.list.max_loaded))

    async def add_configured(self, name: str, path: str) -> None:
        """Raises EngineError when the engine cannot have it."""
        try:
            await self.load(name, path, load_now=False)
        except KvloomError as error:
            raise EngineError(f"model.adapters: {name}: {error.message}") from error

    async def load(self, name: str, path: str, *, load_now: bool) -> AdapterState:
        """Register an adapter. Raises KvloomError."""
        adapters = self._present()
        if not _NAME.fullmatch(name):
            raise invalid_argument(
                "An adapter's name has up to 128 letters, digits and any of '._/@-', and a letter or digit first.",
                "name",
            )
        try:
            state = await adapters.add(name, path, load_now=load_now)
        except AdapterError as error:
            raise invalid_argument(f"Adapter {name} cannot be used: {error}.", "path") from error
        self._paths[name] = path
        log.info("adapter_registered", adapter=name, checksum=state.info.checksum, rank=state.info.rank)
        return _to_proto(state)

    async def unload(self, name: str, timeout_seconds: float) -> None:
        """Take an adapter away, when its sequences have ended. Raises KvloomError."""
        adapters = self._present()
        try:
            async with asyncio.timeout(timeout_seconds):
                self._paths.pop(name, None)
                await adapters.remove(name)
        except AdapterError as error:
            raise not_found(name) from error
        except TimeoutError:
            raise KvloomError(
                ErrorReason.ERROR_REASON_DEADLINE_EXCEEDED,
                f"Sequences still run with adapter {name}: it takes no new ones, and goes with the last of them.",
            ) from None
        log.info("adapter_unloaded", adapter=name)

    def check(self, submit: ShardSubmit) -> None:
        """Raises KvloomError unless the engine has exactly the adapter that the submit names."""
        name, checksum = submit.adapter.name, submit.adapter.checksum
        if not checksum:
            # It is a part of every block's hash: without it, blocks of the model would be taken for the adapter's.
            raise invalid_argument("The adapter's checksum is missing.", "adapter.checksum")
        info = None if self._adapters is None else self._adapters.find(name)
        if info is None or info.checksum != checksum:
            raise not_found(name)

    def _present(self) -> Adapters:
        if self._adapters is None:
            reason = "it sleeps" if self.list is not None else "its engine has none, or takes none as it is configured"
            raise KvloomError(
                ErrorReason.ERROR_REASON_UNSUPPORTED_PARAMETER, f"This shard takes no adapters: {reason}.", field="name"
            )
        return self._adapters

    def _take_change(self) -> None:
        if self._adapters is None:
            return
        state = self._adapters.state()
        self._metrics.on_adapters(state)
        self._tell(_list_of(state))

    def _tell(self, new: AdapterList) -> None:
        if new != self.list:
            self.list = new
            self._on_change(new)


def not_found(name: str) -> KvloomError:
    return KvloomError(
        ErrorReason.ERROR_REASON_ADAPTER_NOT_FOUND, f"This shard has no such adapter {name}.", field="adapter"
    )


def _list_of(state: AdaptersState) -> AdapterList:
    return AdapterList(
        adapters=[_to_proto(adapter) for adapter in state.adapters],
        max_loaded=state.max_loaded,
        load_seconds=state.load_seconds,
    )


def _to_proto(adapter: base.AdapterState) -> AdapterState:
    info = adapter.info
    return AdapterState(name=info.name, checksum=info.checksum, loaded=adapter.is_loaded, rank=info.rank)
