"""The load client of `kvloom-lab bench data-plane`, a process of its own. It reads an Order from stdin, prints a line
when the first request has been answered, and prints the figures at the end. Order and figures are JSON.

The client does as little as possible, so that it does not disturb what it measures: one callback per read, requests
prepared beforehand, no task per connection, and only the last token's stamp of each read is parsed.
"""

from __future__ import annotations

import asyncio
import re
import resource
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import uvloop

from kvloom_common.addresses import join_address
from kvloom_common.text.tokenizer import ModelTokenizer
from lab.bench.data_plane.workloads import Workload, request_bodies
from lab.process_counters import context_switches, cpu_microseconds, rss_bytes
from shard_server.engines.sim_tokens import TICK_SECONDS, seconds_since, stamp_token_ids

BEGUN: Final = b"begun\n"
"""The line that is printed when the first request has been answered."""
_CALL: Final = b'"tool_calls":[{'
_TOKEN: Final = b'"content":" '
_EVENT: Final = b"\ndata: "
_END: Final = b"\r\n0\r\n\r\n"
_BETWEEN_CHUNKS: Final = re.compile(rb"\r\n[0-9a-f]+\r\n")
"""Chunk boundaries inside the data: a proxy may cut anywhere."""
_TAIL_BYTES: Final = 96
"""Bytes that surely hold the end of an answer."""
_CONNECT_TIMEOUT_SECONDS: Final = 20.0
_NUM_SHOWN_ERRORS: Final = 5


class Order(msgspec.Struct):
    host: str
    port: int
    model: str
    model_path: str
    workload: Workload
    seed: int
    pids: dict[str, list[int]]
    """The processes to be watched, by role."""
    api_key: str = ""
    """"": requests have none."""


class Load:
    """One run of a workload."""

    def __init__(self, order: Order, stamps: dict[bytes, int]) -> None:
        self._order = order
        self.stamps = stamps
        self._bodies = request_bodies(order.workload, order.model, order.seed)
        self._head = _head(order)
        self._next_body = 0
        self._num_open = 0
        self._done = asyncio.Event()
        self.errors: Counter[str] = Counter()
        self.num_complete = 0
        self.num_events = 0
        self.num_reads = 0
        self.first_token_seconds: list[float] = []
        """Time from each request to its first token, minus the prefill time that the engine reports."""
        self.transit_seconds: list[float] = []
        """Time from the engine to the client, for the last token of each read."""

    async def run(self) -> dict[str, Any]:
        workload, pids = self._order.workload, self._order.pids
        connections = [await self._connect() for _ in range(workload.num_streams)]
        rss_before = {role: rss_bytes(own) for role, own in pids.items()}
        rss_after: dict[str, int] = {}
        cpu_before = {role: cpu_microseconds(own) for role, own in pids.items()}
        switches_before = {role: context_switches(own) for role, own in pids.items()}
        own_cpu = time.process_time()
        began = time.monotonic()
        loop = asyncio.get_running_loop()

        def note_memory() -> None:
            rss_after.update({role: rss_bytes(own) for role, own in pids.items()})

        if workload.settle_seconds is not None:
            loop.call_later(workload.settle_seconds, note_memory)
        self._num_open = len(connections)
        for number, connection in enumerate(connections):
            delay = workload.stagger_seconds * number / len(connections)
            loop.call_later(delay, connection.send_next)
        try:
            async with asyncio.timeout(workload.timeout_seconds):
                await self._done.wait()
        except TimeoutError:
            self.errors["not finished in time"] += self._num_open
        wall_seconds = time.monotonic() - began
        own_cpu = time.process_time() - own_cpu
        cpu_after = {role: cpu_microseconds(own) for role, own in pids.items()}
        switches_after = {role: context_switches(own) for role, own in pids.items()}
        if not rss_after:
            note_memory()
        for connection in connections:
            connection.close()
        return {
            "wall_seconds": wall_seconds,
            "client_cpu_us": own_cpu * 1e6,
            "cpu_us": {role: cpu_after[role] - cpu_before[role] for role in pids},
            "switches": {role: switches_after[role] - switches_before[role] for role in pids},
            "rss_bytes": {role: rss_after[role] - rss_before[role] for role in pids},
            "num_complete": self.num_complete,
            "num_events": self.num_events,
            "num_reads": self.num_reads,
            "errors": dict(self.errors.most_common(_NUM_SHOWN_ERRORS)),
            "num_errors": self.errors.total(),
            "first_token_seconds": sorted(self.first_token_seconds),
            "transit_seconds": sorted(self.transit_seconds),
        }

    @property
    def wants_calls(self) -> bool:
        """True when every answer is to be a tool call."""
        return bool(self._order.workload.tools)

    def next_request(self) -> bytes | None:
        """Return the next request, or None when all have been sent."""
        if self._next_body == len(self._bodies):
            return None
        body = self._bodies[self._next_body]
        self._next_body += 1
        return b"%bContent-Length: %d\r\n\r\n%b" % (self._head, len(body), body)

    def on_answer(self) -> None:
        if not self.num_complete:
            sys.stdout.buffer.write(BEGUN)
            sys.stdout.buffer.flush()
        self.num_complete += 1

    def on_idle(self) -> None:
        """Called when a connection has nothing more to do."""
        self._num_open -= 1
        if not self._num_open:
            self._done.set()

    async def _connect(self) -> LoadConnection:
        async with asyncio.timeout(_CONNECT_TIMEOUT_SECONDS):
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: LoadConnection(self), self._order.host, self._order.port
            )
        return connection


class LoadConnection(asyncio.Protocol):
    """Sends its requests one after the other. A failed request ends the connection; the remaining requests are left to
    the others."""

    __slots__ = (
        "_has_call",
        "_head",
        "_in_answer",
        "_is_idle",
        "_load",
        "_sent_at",
        "_tail",
        "_transport",
        "_waits_for_token",
    )

    def __init__(self, load: Load) -> None:
        self._load = load
        self._transport: asyncio.Transport | None = None
        self._head = b""
        self._tail = b""
        self._in_answer = False
        self._has_call = False
        self._waits_for_token = True
        self._is_idle = False
        self._sent_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._is_idle:
            self._fail(f"connection lost: {exc}")

    def close(self) -> None:
        self._is_idle = True
        if self._transport is not None:
            self._transport.abort()

    def send_next(self) -> None:
        request = self._load.next_request()
        if request is None or self._transport is None:
            self._is_idle = True
            self._load.on_idle()
            return
        self._head = self._tail = b""
        self._in_answer = self._has_call = False
        self._waits_for_token = True
        self._sent_at = time.monotonic()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        if self._is_idle:
            return
        load = self._load
        if not self._in_answer:
            self._head += data
            head, separator, data = self._head.partition(b"\r\n\r\n")
            if not separator:
                return
            if not head.startswith(b"HTTP/1.1 200"):
                self._fail(f"{head[:40].decode(errors='replace')} {data[:120].decode(errors='replace')}")
                return
            self._in_answer = True
            data = b"\r\n" + data
        load.num_reads += 1
        load.num_events += (self._tail[1 - len(_EVENT) :] + data).count(_EVENT)
        self._has_call = self._has_call or _CALL in data
        self._read_stamp(data, now)
        if data.endswith(_END) or (self._tail + data[-len(_END) :]).endswith(_END):
            self._finish(self._tail + data)
        else:
            self._tail = (self._tail + data[-_TAIL_BYTES:])[-_TAIL_BYTES:]

    def _read_stamp(self, data: bytes, now: float) -> None:
        """Record the transit time of the last stamp. A stamp that spans two reads is skipped."""
        load = self._load
        if self._waits_for_token:
            start = data.find(_TOKEN)
            if start < 0:
                return
            self._waits_for_token = False
            words = data[start + len(_TOKEN) : data.find(b'"', start + len(_TOKEN))].split(b" ")
            engine_stamp = load.stamps.get(words[0])
            if engine_stamp is not None:
                load.first_token_seconds.append(now - self._sent_at - engine_stamp * TICK_SECONDS)
            if len(words) == 1 and data.find(_TOKEN, start + 1) < 0:
                return
        start = data.rfind(_TOKEN)
        if start < 0:
            return
        start += len(_TOKEN)
        stamp = load.stamps.get(data[start : data.find(b'"', start)].rpartition(b" ")[2])
        if stamp is not None:
            load.transit_seconds.append(seconds_since(stamp, now))

    def _finish(self, end: bytes) -> None:
        if b"data: [DONE]\n" not in _BETWEEN_CHUNKS.sub(b"", end[-_TAIL_BYTES:]):
            self._fail(f"broken off: {end[-200:].decode(errors='replace')}")
            return
        if self._load.wants_calls and not self._has_call:
            self._fail("an answer without a tool call")
            return
        self._load.on_answer()
        self.send_next()

    def _fail(self, error: str) -> None:
        self._load.errors[error] += 1
        self.close()
        self._load.on_idle()


def _head(order: Order) -> bytes:
    """Returns the head of every request, but for its length."""
    key = f"Authorization: Bearer {order.api_key}\r\n" if order.api_key else ""
    host = f"Host: {join_address(order.host, order.port)}\r\n"
    return f"POST /v1/chat/completions HTTP/1.1\r\n{host}{key}Content-Type: application/json\r\n".encode()


def read_stamps(model_path: Path) -> dict[bytes, int]:
    """Map each stamp's word (without its space) to its position."""
    tokenizer = ModelTokenizer.load(model_path)
    try:
        texts = tokenizer.token_texts
        words = [texts[token_id] or "" for token_id in stamp_token_ids(texts)]
    finally:
        tokenizer.close()
    return {word.lstrip().encode(): stamp for stamp, word in enumerate(words)}


def main() -> None:
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    async def run() -> dict[str, Any]:
        return await Load(order, read_stamps(Path(order.model_path))).run()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.stdout.buffer.write(msgspec.json.encode(runner.run(run())))


if __name__ == "__main__":
    main()
