"""Receives an engine's KV events over ZeroMQ, in order, and has gaps replayed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final

import structlog
import zmq
import zmq.asyncio

from kvloom.backoff import Backoff
from router.core.events import KvChange
from tools.gateway.kv_events import KvBatch, KvTranslator, batch_in

log = structlog.get_logger()

REPLAY_SECONDS: Final = 5.0
"""How long each part of a replay may take."""
MAX_REPLAYED: Final = 100_000
"""Engines keep 10,000 batches by default."""
_END: Final = -1
_MAX_RETRY_SECONDS: Final = 30.0


class KvSubscriber:
    """Follows one engine. `use` is called with every change, in order; `count` with the outcome of each gap."""

    def __init__(
        self,
        events: str,
        replay: str,
        translator: KvTranslator,
        use: Callable[[Sequence[KvChange]], None],
        count: Callable[[str], None],
    ) -> None:
        """`events` and `replay` are ZeroMQ addresses; without the second one nothing is replayed."""
        self._events = events
        self._replay = replay
        self._translator = translator
        self._use = use
        self._count = count
        self._next_number: int | None = None
        """None: nothing has come yet."""
        self._newest = 0.0
        """The engine's time of the newest batch."""

    async def run(self) -> None:
        """Follow the engine until cancelled."""
        backoff = Backoff(1.0, _MAX_RETRY_SECONDS, stable_seconds=_MAX_RETRY_SECONDS)
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                await self._follow()
            except (ValueError, OSError, zmq.ZMQError) as error:
                log.warning("kv_events_interrupted", endpoint=self._events, cause=str(error))
                self._lose()
            await asyncio.sleep(backoff.next_seconds(loop.time() - began))

    async def _follow(self) -> None:
        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as socket:
            socket.linger = context.linger = 0
            socket.connect(self._events)
            socket.subscribe(b"")
            await self._take_replay(context, 0)  # what was stored before this process came
            while True:
                _, number, payload = await socket.recv_multipart()
                await self._take(context, int.from_bytes(number, signed=True), batch_in(payload))

    async def _take(self, context: zmq.asyncio.Context, number: int, batch: KvBatch) -> None:
        expected = self._next_number
        if expected is not None and number < expected:
            if batch.at <= self._newest:
                return  # it was replayed
            self._lose()  # the engine has started again
            expected = 0
        if number <= (expected or 0):
            self._apply(number, batch)
            return
        is_whole = await self._take_replay(context, expected or 0)
        if self._next_number is None or self._next_number <= number:
            is_whole = is_whole and self._next_number in (None, number)
            self._append(number, batch)
        if expected is not None:
            self._count("replayed" if is_whole else "lost")

    async def _take_replay(self, context: zmq.asyncio.Context, begin: int) -> bool:
        """Apply what the engine still has from that batch on. Returns False if some was missing. Raises OSError if it
        does not answer in time."""
        is_whole = True
        if self._replay:
            async for number, payload in _replayed(context, self._replay, begin):
                if self._next_number is None or number >= self._next_number:
                    is_whole = is_whole and self._next_number in (None, number)
                    self._append(number, batch_in(payload))
        return is_whole

    def _append(self, number: int, batch: KvBatch) -> None:
        if self._next_number not in (None, number):
            self._lose()
        self._apply(number, batch)

    def _apply(self, number: int, batch: KvBatch) -> None:
        self._use(self._translator.changes(batch))
        self._next_number, self._newest = number + 1, batch.at

    def _lose(self) -> None:
        """It is not known any more which blocks the engine has."""
        self._use([self._translator.clear()])
        self._next_number = None


async def _replayed(context: zmq.asyncio.Context, address: str, begin: int) -> AsyncIterator[tuple[int, bytes]]:
    with context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(address)
        await socket.send_multipart([b"", begin.to_bytes(8)])
        for _ in range(MAX_REPLAYED):
            try:
                async with asyncio.timeout(REPLAY_SECONDS):
                    frames: list[Any] = await socket.recv_multipart()
            except TimeoutError as error:
                raise OSError(f"{address} replays nothing within {REPLAY_SECONDS:g} s") from error
            number = int.from_bytes(frames[-2], signed=True)
            if number == _END:
                return
            yield number, frames[-1]
