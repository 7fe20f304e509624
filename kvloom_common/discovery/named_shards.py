"""Finds shards without a registry: by the names at which they listen, of which DNS gives the addresses."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Sequence
from typing import Final

import grpc.aio
import structlog

from kvloom.transport.channel_options import CHANNEL_OPTIONS
from kvloom.v1.shard_service_pb2 import GetInfoRequest
from kvloom.v1.shard_service_pb2_grpc import ShardServiceStub
from kvloom_common.addresses import join_address, split_address
from kvloom_common.discovery.records import ShardRecord
from kvloom_common.discovery.registry import POLL_SECONDS
from kvloom_common.process.aligned_timer import seconds_to_aligned_tick
from kvloom_common.trust.fabric_trust import NO_SECRET, FabricTrust

log = structlog.get_logger()

QUERY_SECONDS: Final = 2.0
"""How long the list of shards waits for the addresses of a name. The query goes on; there is one for each name."""
ASK_SECONDS: Final = 2.0
"""How long a shard may take to say who it is."""
MAX_ADDRESSES: Final = 4096
"""The names have at most so many together."""
MAX_ASKED: Final = 64
"""How many shards are asked at the same time."""

_NO_ADDRESS: Final = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))
"""Answers that a name has no address, such as that of a headless service without pods. Others are failures."""

Resolve = Callable[[str], Awaitable[Sequence[str]]]
"""The IP addresses of a name. Raises OSError; socket.gaierror with one of _NO_ADDRESS if it is known that
there are none."""


async def resolved(name: str) -> Sequence[str]:
    """By this machine's resolver, which also limits how long that takes."""
    found = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return [str(address[0]) for _, _, _, _, address in found]


class NamedShards:
    """The shards that listen at some names. Each says itself who it is, when it is found and whenever it is not
    connected; a fabric with a secret has proved then that it belongs to it. A name that is not answered keeps the
    addresses that it had."""

    def __init__(self, names: Sequence[str], trust: FabricTrust = NO_SECRET, resolve: Resolve = resolved) -> None:
        """`names`: host:port, of which a host may have many addresses."""
        self._names = dict.fromkeys(split_address(name) for name in names)
        self._trust = trust
        self._resolve = resolve
        self._queries: dict[str, asyncio.Future[Sequence[str]]] = {}
        """Those that have not been answered, by host."""
        self._ips: dict[str, Sequence[str]] = {}
        """By host, as it was answered last."""
        self._unanswered: set[str] = set()
        self._records: dict[str, ShardRecord] = {}
        """By address, those that the latest list has."""
        self._rivals: set[str] = set()
        """Addresses of shards that were reported to have the name of another one."""

    async def watch(self) -> AsyncIterator[None]:
        """Yields whenever the shards should be listed again, that is, every POLL_SECONDS, at another moment in each
        process."""
        while True:
            yield
            await asyncio.sleep(seconds_to_aligned_tick(time.monotonic(), POLL_SECONDS))

    async def list_shards(self, connected: Container[str] = ()) -> dict[str, ShardRecord]:
        """By shard_id, those that answer. The shards of the ids in `connected` are not asked again."""
        await asyncio.gather(*(self._find(host) for host in {host for host, _ in self._names}))
        addresses = dict.fromkeys(
            join_address(ip, port) for host, port in self._names for ip in self._ips.get(host, ())
        )
        slots = asyncio.Semaphore(MAX_ASKED)

        async def record_of(address: str) -> ShardRecord | None:
            known = self._records.get(address)
            if known is not None and known.shard_id in connected:
                return known
            async with slots:
                return await self._ask(address)

        # Who has a name keeps it from another one while it answers.
        chosen = sorted(list(addresses)[:MAX_ADDRESSES], key=lambda address: address not in self._records)
        records: dict[str, ShardRecord] = {}
        rivals: set[str] = set()
        for record in filter(None, await asyncio.gather(*map(record_of, chosen))):
            holder = records.setdefault(record.shard_id, record)
            if holder is not record:
                rivals.add(record.address)
                if record.address not in self._rivals:
                    log.warning("shard_name_taken", shard_id=record.shard_id, address=record.address, by=holder.address)
        self._rivals = rivals
        self._records = {record.address: record for record in records.values()}
        return records

    async def _find(self, host: str) -> None:
        if host not in self._queries:
            self._queries[host] = asyncio.ensure_future(self._resolve(host))
        query = self._queries[host]
        await asyncio.wait({query}, timeout=QUERY_SECONDS)
        if not query.done():
            self._note_failure(host, "no answer")
            return
        del self._queries[host]
        try:
            self._ips[host] = query.result()
        except (OSError, UnicodeError) as error:  # UnicodeError: it cannot be a name
            if not isinstance(error, socket.gaierror) or error.errno not in _NO_ADDRESS:
                self._note_failure(host, str(error))
                return
            self._ips[host] = ()
        self._unanswered.discard(host)

    def _note_failure(self, host: str, cause: str) -> None:
        if host not in self._unanswered:
            log.warning("shard_query_failed", host=host, cause=cause, num_addresses=len(self._ips.get(host, ())))
        self._unanswered.add(host)

    async def _ask(self, address: str) -> ShardRecord | None:
        """None if no shard of this fabric answers there."""
        async with self._trust.open_channel(address, "shard", options=CHANNEL_OPTIONS) as channel:
            try:
                info = (await ShardServiceStub(channel).GetInfo(GetInfoRequest(), timeout=ASK_SECONDS)).info
            except grpc.aio.AioRpcError:
                return None
        return ShardRecord(info.shard_id, address, info.model, info.incarnation_id) if info.shard_id else None

    async def close(self) -> None:
        """Give up the queries that have not been answered."""
        for query in self._queries.values():
            query.cancel()
        await asyncio.gather(*self._queries.values(), return_exceptions=True)
        self._queries.clear()
