"""Holds what all service processes have in common: uvloop, signals, the ready line, and a gRPC server on its own
port."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Coroutine, Sequence
from typing import Any, Final, Protocol

import grpc
import msgspec
import uvloop
from grpc_health.v1 import health, health_pb2

from kvloom_common.addresses import join_address
from kvloom_common.config import ConfigError
from kvloom_common.private_file import OTHERS
from kvloom_common.process.freed_memory import return_freed_memory
from kvloom_common.process.ready_line import END_LINE, LEAVING_LINE, ReadyLine
from kvloom_common.trust.fabric_trust import NO_SECRET
from kvloom_common.trust.secret import SecretError

MAX_MESSAGE_BYTES: Final = 64 * 2**20
_SHARE_PORT: Final = "grpc.so_reuseport"
SERVER_OPTIONS: Final = [
    (_SHARE_PORT, 0),  # a second process on the same port must fail, not share its traffic
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", 32 * 2**10),
    # Compressed messages are refused: a few kilobytes would otherwise become 64 MiB each before they are counted.
    ("grpc.compression_enabled_algorithms_bitset", 1),  # identity alone
    # Long silent generations are normal: allow keepalive pings from clients, at intervals of 10 seconds.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
]


def sharing_port(options: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """The options of a server that shares its port with other processes. The supervisor makes sure that the right ones
    share it."""
    return [(name, 1 if name == _SHARE_PORT else value) for name, value in options]


GC_THRESHOLD: Final = 2_000
"""New objects before a collection of the youngest generation, which takes some 0.1 ms. gRPC leaves a cycle of five
objects behind every RPC, and with them the RPC's metadata."""
OPEN_SECONDS: Final = 2.0
"""How long a process waits to be able to serve before it listens anyway."""


class StartError(Exception):
    """The process cannot start. The message tells the operator why."""


def announce_ready(line: ReadyLine) -> None:
    """Report to the parent process that this process serves, and at which addresses."""
    settle_memory()
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()


def announce_leaving() -> None:
    """Report to the parent process that this process is about to accept no new connections any more."""
    sys.stdout.buffer.write(LEAVING_LINE + b"\n")
    sys.stdout.buffer.flush()


def announce_end() -> None:
    """Report to the parent process that this process will end for good: no other one is to take its place."""
    sys.stdout.buffer.write(END_LINE + b"\n")
    sys.stdout.buffer.flush()


def settle_memory() -> None:
    """Exempt everything that is loaded now from garbage collection, and collect the rest less often: cycles are rare
    here, and no token leaves during a collection. Memory that loading has freed is returned to the system."""
    gc.collect()
    return_freed_memory()  # 15 MB of a tokenizer would otherwise be kept for a while
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, 10, 200)


def run_service(main: Coroutine[Any, Any, None]) -> None:
    """Run a service to its end on uvloop. What it writes is for its user alone, also what libraries write, such as
    SQLite. StartError, ConfigError and SecretError become a message on stderr and exit status 1."""
    os.umask(OTHERS)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main)
    except (StartError, ConfigError, SecretError) as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(1) from error


def stop_event() -> asyncio.Event:
    """An event that the first SIGTERM or SIGINT sets. Another SIGINT ends the process at once. Another SIGTERM does
    not: a process may get two (from a supervisor that replaces it, and then stops the whole fabric), and must still
    finish or hand over its requests."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_interrupt() -> None:
        if event.is_set():
            raise SystemExit(1)
        event.set()

    loop.add_signal_handler(signal.SIGTERM, event.set)
    loop.add_signal_handler(signal.SIGINT, on_interrupt)
    return event


async def wait_to_open(can_serve: Coroutine[Any, Any, None], stop: asyncio.Event) -> None:
    """Wait until `can_serve` returns or `stop` is set, but at most OPEN_SECONDS: then the process listens anyway, and
    tells its clients why it cannot serve them. Raises what `can_serve` raises."""
    waits: list[asyncio.Task[Any]] = [
        asyncio.create_task(can_serve, name="until it can serve"),
        asyncio.create_task(stop.wait(), name="stop"),
    ]
    try:
        done, _ = await asyncio.wait(waits, timeout=OPEN_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        for wait in done:
            wait.result()
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


class AddPort(Protocol):
    """Makes a server listen on host:port, and returns the port. Raises RuntimeError if that fails."""

    def __call__(self, server: grpc.aio.Server, address: str, /) -> int: ...


def bind(server: grpc.aio.Server, host: str, port: int, add_port: AddPort = NO_SECRET.add_port) -> str:
    """Listen on host:port (port 0 picks a free one) and return the address. Raises StartError when the port is
    taken."""
    address = join_address(host, port)
    message = f"cannot listen on {address}: is another process using the port?"
    try:
        bound = add_port(server, address)
    except RuntimeError as error:
        raise StartError(message) from error
    if bound == 0:
        raise StartError(message)
    return join_address(host, bound)


class HealthServicer(health.aio.HealthServicer):
    """The health service of grpc.health.v1."""


async def set_serving(servicer: HealthServicer, service_names: Sequence[str], serving: bool) -> None:
    status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
    for name in ("", *service_names):
        await servicer.set(name, status)
