"""Gives attackers their targets, connections from their own addresses, and the tally of the answers."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Final

import msgspec

from kvloom_common.addresses import split_address
from kvloom_common.callers import Callers

ATTACKER_HOST: Final = "127.0.0.66"
"""Fabrics without keys take an IP address for a caller, so that the attackers are not the users' caller."""
FLOOD_HOST: Final = "127.0.0.67"
TIMEOUT_SECONDS: Final = 20.0
"""One exchange takes at most so long: an attacker that waits forever attacks nothing."""
_CONNECT_SECONDS: Final = 5.0
_MAX_READ_BYTES: Final = 64 * 2**20


GUESSED_KEY: Final = "guess"
"""The bearer token of attackers that use gRPC."""


def attackers_tenants(caller_key: bytes) -> set[str]:
    """Whom a fabric with this key takes the attackers for."""
    callers = Callers(caller_key)
    return {callers.name(GUESSED_KEY, ""), callers.name("", ATTACKER_HOST), callers.name("", FLOOD_HOST)}


class Targets(msgspec.Struct, frozen=True):
    http_address: str
    """host:port of the edges."""
    router_address: str
    """host:port of the routers for clients."""
    model: str
    inner_addresses: list[str] = []
    """host:port inside the fabric, where only its processes are welcome."""
    redis_socket: str = ""
    """The path of the registry's Unix socket."""
    user_seed: int = 0
    """The names of the users' requests can be guessed: u0-SEED-1 and so on."""
    num_users: int = 0
    key: str = ""
    """The key of a tenant of the attackers'; "": they have none, or the fabric has no tenants."""

    def guessed_name(self, rng: random.Random) -> str:
        return f"u{rng.randrange(max(1, self.num_users))}-{self.user_seed}-{rng.randrange(1, 500)}"


class Attack:
    """The things that every attack gets."""

    def __init__(self, targets: Targets, rng: random.Random, tally: Counter[str], name: str) -> None:
        self.targets = targets
        self.rng = rng
        self._tally = tally
        self._name = name

    def note(self, answer: object, count: int = 1) -> None:
        """Count an answer of this attack."""
        self._tally[f"{self._name}: {answer}"] += count


Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def connection(address: str, host: str = ATTACKER_HOST) -> AsyncIterator[Stream]:
    """A connection from an address of the attackers; it is reset at the end. Raises OSError or TimeoutError."""
    to_host, port = split_address(address)
    async with asyncio.timeout(_CONNECT_SECONDS):
        reader, writer = await asyncio.open_connection(to_host, port, local_addr=(host, 0))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def status_of(reader: asyncio.StreamReader) -> str:
    """The status of the next HTTP answer; "closed" if there is none. Raises TimeoutError."""
    async with asyncio.timeout(TIMEOUT_SECONDS):
        try:
            line = await reader.readline()
        except (OSError, ValueError):
            return "closed"
    return line.split(b" ")[1].decode(errors="replace")[:3] if line.startswith(b"HTTP/") else "closed"


async def exchange(attack: Attack, raw: bytes) -> None:
    """Send something over HTTP and count the status of the answer."""
    try:
        async with connection(attack.targets.http_address) as (reader, writer):
            writer.write(raw)
            answer = asyncio.create_task(status_of(reader))
            try:
                async with asyncio.timeout(TIMEOUT_SECONDS):
                    with contextlib.suppress(OSError):
                        await writer.drain()
                    attack.note(await answer)
            finally:
                answer.cancel()
                await asyncio.gather(answer, return_exceptions=True)
    except OSError as error:
        attack.note(type(error).__name__)


async def read_all(reader: asyncio.StreamReader, seconds: float) -> int:
    """Read to the end and keep nothing. Returns the number of bytes, also when the time is over."""
    num_bytes = 0
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(seconds):
            while num_bytes < _MAX_READ_BYTES and (piece := await reader.read(65_536)):
                num_bytes += len(piece)
    return num_bytes
