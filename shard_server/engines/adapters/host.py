"""The registered adapters of one engine, whose files are read and loaded in a thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, Generic, Protocol, TypeVar

import structlog

from shard_server.engines.adapters.slots import AdapterSlots
from shard_server.engines.base import AdapterError, AdapterInfo, AdaptersState, AdapterState

PATIENCE_SECONDS: Final = 2.0
"""How long a sequence that needs a slot lets others overtake it whose adapters are loaded."""
MAX_REGISTERED: Final = 1024
_SMOOTHING: Final = 0.3
"""The weight of the newest load in the moving average."""

log = structlog.get_logger()

Weights = TypeVar("Weights")
_Result = TypeVar("_Result")
_Loads = TypeVar("_Loads", covariant=True)


class ReadsAdapters(Protocol[_Loads]):
    """How an engine gets an adapter. Both methods are called in a thread and may block."""

    def read(self, name: str, path: str) -> AdapterInfo:
        """Check the files completely. Raises AdapterError."""
        ...

    def load(self, adapter: AdapterInfo) -> _Loads:
        """The weights, as the engine computes with them. Raises AdapterError."""
        ...


class AdapterHost(Generic[Weights]):
    """Implements `shard_server.engines.base.Adapters`. All calls are made on one event loop.

    A sequence that is to run with an adapter calls `acquire`, begins when the future has the weights, and calls
    `release` when it has ended. Weights that no sequence has may be dropped at any time.
    """

    def __init__(
        self,
        reader: ReadsAdapters[Weights],
        max_loaded: int,
        *,
        patience_seconds: float = PATIENCE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reader: ReadsAdapters[Weights] | None = reader
        """None: the engine is closed. Its reader knows its model, whose memory a sleeping shard gives back."""
        self._clock = clock
        self._slots = AdapterSlots(max_loaded, patience_seconds)
        self._adapters: dict[str, AdapterInfo] = {}
        self._weights: dict[str, Weights] = {}
        self._acquiring: dict[str, Future[Weights]] = {}
        """By sequence: what those wait for that have no adapter yet."""
        self._removals: dict[str, asyncio.Event] = {}
        """By adapter: set when it has gone."""
        self._registering = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._loads: set[asyncio.Task[None]] = set()
        self._load_seconds = 0.0
        self._num_loads = self._num_evictions = self._num_calls = 0
        self._on_change: Callable[[], None] = _nothing

    # -- operators ----------------------------------------------------------------------------------------------------

    def state(self) -> AdaptersState:
        slots = self._slots
        return AdaptersState(
            adapters=[AdapterState(self._adapters[name], slots.is_loaded(name)) for name in slots.names],
            max_loaded=slots.max_loaded,
            load_seconds=self._load_seconds,
            num_loads=self._num_loads,
            num_evictions=self._num_evictions,
            running=sorted(slots.users()),
            waiting=sorted(slots.wanted()),
        )

    def listen(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change

    def find(self, name: str) -> AdapterInfo | None:
        return self._adapters[name] if name in self._slots else None

    async def add(self, name: str, path: str, *, load_now: bool = False) -> AdapterState:
        async with self._registering:
            if not self._slots.max_loaded:
                raise AdapterError("this shard takes no adapters: model.max_loaded_adapters is 0")
            if self._slots.is_retiring(name):
                raise AdapterError(f"adapter {name!r} is still being unloaded")
            adapter = await self._until_closed(self._read(name, path))
            is_new = self._register(adapter)
        if load_now:
            try:
                await self._until_closed(self._load_now(name))
            except AdapterError:
                if is_new:
                    self._slots.retire(name)
                    self._advance()
                raise
        return AdapterState(adapter, self._slots.is_loaded(name))

    async def _read(self, name: str, path: str) -> AdapterInfo:
        if self._reader is None:
            raise AdapterError("the engine is closed")
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._reader.read, name, path)

    async def _until_closed(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """The result. Raises AdapterError when `close` has cancelled the work."""
        try:
            return await work
        except asyncio.CancelledError:
            if self._reader is None:
                raise AdapterError("the engine is closed") from None
            raise

    def _register(self, adapter: AdapterInfo) -> bool:
        """Registers an adapter; returns True when it is new. Raises AdapterError."""
        name = adapter.name
        known = self._adapters.get(name)
        if known is None:
            if len(self._adapters) >= MAX_REGISTERED:
                raise AdapterError(f"{MAX_REGISTERED} adapters are registered already")
            self._slots.add(name)
        elif known.checksum != adapter.checksum or name not in self._slots:
            raise AdapterError(f"another adapter has the name {name!r}: unload it first")
        self._adapters[name] = adapter
        self._on_change()
        return known is None

    async def _load_now(self, name: str) -> None:
        self._num_calls += 1
        caller = f"call {self._num_calls}"
        try:
            await asyncio.wrap_future(self.acquire(caller, name))
        finally:
            self.release(caller)

    async def remove(self, name: str) -> None:
        gone = self._removals.get(name)
        if gone is None:
            if name not in self._slots:
                raise AdapterError(f"there is no adapter {name!r}")
            gone = self._removals[name] = asyncio.Event()
            self._slots.retire(name)
            self._advance()
        await gone.wait()

    async def close(self) -> None:
        """Drop all weights. Sequences that wait for theirs get none."""
        self._reader = None
        self._thread.shutdown(wait=False, cancel_futures=True)
        for load in self._loads:
            load.cancel()
        await asyncio.gather(*self._loads, return_exceptions=True)
        for future in self._acquiring.values():
            future.cancel()
        for gone in self._removals.values():
            gone.set()
        self._acquiring.clear()
        self._weights.clear()

    # -- sequences ----------------------------------------------------------------------------------------------------

    def acquire(self, sequence: str, name: str) -> Future[Weights]:
        """The future fails with AdapterError when the adapter cannot be loaded. Raises AdapterError if there is none of
        this name. `release` must follow, also after a failure."""
        if name not in self._slots:
            raise AdapterError(f"there is no adapter {name!r}")
        future: Future[Weights] = Future()
        self._acquiring[sequence] = future
        self._slots.wait(sequence, name, self._clock())
        self._advance()
        return future

    def release(self, sequence: str) -> None:
        """The sequence has ended, or does not want its adapter any more; others are ignored."""
        self._acquiring.pop(sequence, None)
        self._slots.leave(sequence)
        self._advance()

    def _advance(self) -> None:
        reader = self._reader
        if reader is None:
            return
        changes = self._slots.advance(self._clock())
        for name in changes.evictions:
            self._weights.pop(name, None)
            self._num_evictions += 1
            log.info("adapter_evicted", adapter=name)
        for name in changes.loads:
            task = asyncio.get_running_loop().create_task(
                self._load(reader, self._adapters[name]), name=f"adapter {name}"
            )
            self._loads.add(task)
            task.add_done_callback(self._loads.discard)
        for sequence in changes.ready:
            ready = self._acquiring.pop(sequence)
            if ready.set_running_or_notify_cancel():
                ready.set_result(self._weights[self._slots.adapter_of(sequence)])
        for name in changes.retired:
            del self._adapters[name]
            if (gone := self._removals.pop(name, None)) is not None:
                gone.set()
        self._on_change()

    async def _load(self, reader: ReadsAdapters[Weights], adapter: AdapterInfo) -> None:
        begin = self._clock()
        loop = asyncio.get_running_loop()
        try:
            weights = await loop.run_in_executor(self._thread, reader.load, adapter)
        except Exception as error:  # whatever a damaged file or too little memory leads to, others are served
            log.warning("adapter_load_failed", adapter=adapter.name, error=repr(error))
            failure = AdapterError(f"adapter {adapter.name!r} cannot be loaded: {error}")
            for sequence in self._slots.on_failed(adapter.name):
                waiting = self._acquiring.pop(sequence)
                if waiting.set_running_or_notify_cancel():
                    waiting.set_exception(failure)
        else:
            seconds = self._clock() - begin
            self._num_loads += 1
            self._load_seconds += (seconds - self._load_seconds) * (_SMOOTHING if self._num_loads > 1 else 1.0)
            self._weights[adapter.name] = weights
            self._slots.on_loaded(adapter.name)
            log.info("adapter_loaded", adapter=adapter.name, seconds=round(seconds, 3))
        self._advance()


def _nothing() -> None:
    pass
