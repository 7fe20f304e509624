"""Sends what must be refused: requests with revoked keys, and requests for answers of other tenants."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import aiohttp

from kvloom.client.client import Client
from kvloom.errors import KvloomError
from lab.chaos.fabric.cluster import Cluster
from lab.chaos.tenants.population import ChaosTenant, IssuedKey

WATCHED_SECONDS: Final = 6.0
"""How long a revoked key is tried again and again."""
_PAUSE_SECONDS: Final = 0.3
_GRPC_SHARE: Final = 0.3
_GRPC_SECONDS: Final = 5.0
_TIMEOUT: Final = aiohttp.ClientTimeout(total=10.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Trespass:
    """One request, and its answer. Times are those of the monotonic clock."""

    kind: str
    """ "revoked key", "revoked key over gRPC" or "other tenant"."""
    what: str
    since: float
    """When it became forbidden."""
    sent_at: float
    status: int
    """That of HTTP, or what stands for the gRPC error there. 0: no answer."""


@dataclasses.dataclass(slots=True)
class OpenAnswer:
    """A stream that its tenant could resume."""

    tenant: str
    path: str
    response_ids: Sequence[str]
    """The last one is that of the stream; empty: it has not begun."""


class Trespasser:
    """`found` has all requests in order. Use `async with`."""

    def __init__(
        self, cluster: Cluster, tenants: Sequence[ChaosTenant], open_answers: Mapping[str, OpenAnswer], seed: int
    ) -> None:
        self._cluster = cluster
        self._tenants = tenants
        self._open_answers = open_answers
        self._rng = random.Random(f"trespasses of {seed}")
        self.found: list[Trespass] = []

    async def __aenter__(self) -> Trespasser:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True), timeout=_TIMEOUT)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def run(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            now = time.monotonic()
            for key in self._revoked():
                if key.revoked_at is not None and now - key.revoked_at < WATCHED_SECONDS:
                    await self._use(key)
            await self._read_another_s_answer()
            await asyncio.sleep(_PAUSE_SECONDS)

    async def use_all_revoked(self) -> None:
        """Once more at the end, several times each, since edges share a port."""
        for key in self._revoked():
            for _ in range(2 * len(self._cluster.names("edge"))):
                await self._use(key)

    def _revoked(self) -> Iterator[IssuedKey]:
        return (key for tenant in self._tenants for key in tenant.keys if key.revoked_at is not None)

    async def _use(self, key: IssuedKey) -> None:
        assert key.revoked_at is not None
        if self._rng.random() < _GRPC_SHARE:
            await self._use_over_grpc(key, key.revoked_at)
            return
        body = {"model": self._rng.choice(self._cluster.model_names), "prompt": "x", "max_tokens": 1}
        await self._ask("POST", "/v1/completions", key.secret, body, "revoked key", key.id, key.revoked_at)

    async def _use_over_grpc(self, key: IssuedKey, revoked_at: float) -> None:
        sent_at, status = time.monotonic(), 0
        model, address = self._rng.choice(self._cluster.model_names), self._cluster.router_address
        client = Client(address, api_key=key.secret, max_retries=0, reattach_seconds=0.0, connect_timeout_seconds=2.0)
        try:
            async with asyncio.timeout(_GRPC_SECONDS), client:
                if self._rng.random() < 0.5:  # by an RPC of its own, or over a stream of many requests
                    answer = client.generate(model=model, text="x", max_tokens=1)
                else:
                    answer = client.generate(model=model, token_ids=[1, 2, 3], max_tokens=1)
                async for _ in answer:
                    status = 200
        except KvloomError as error:
            status = status or error.kind.http_status
        except TimeoutError:
            pass
        self.found.append(Trespass("revoked key over gRPC", key.id, revoked_at, sent_at, status))

    async def _read_another_s_answer(self) -> None:
        answers = [one for one in self._open_answers.values() if one.response_ids]
        if not answers or len(self._tenants) < 2:
            return
        answer = self._rng.choice(answers)
        other = self._rng.choice([tenant for tenant in self._tenants if tenant.id != answer.tenant])
        path = f"{answer.path}/{answer.response_ids[-1]}?stream=true&starting_after=0"
        what = f"{other.id} reads {answer.response_ids[-1]}"
        await self._ask("GET", path, other.lasting_key.secret, None, "other tenant", what, 0.0)

    async def _ask(self, method: str, path: str, secret: str, body: object, kind: str, what: str, since: float) -> None:
        sent_at = time.monotonic()
        url = self._rng.choice(list(self._cluster.edge_urls.values())) + path
        headers = {"Authorization": f"Bearer {secret}"}
        status = 0
        try:
            async with self._session.request(method, url, json=body, headers=headers) as response:
                status = response.status
        except (aiohttp.ClientError, OSError):
            pass  # by a fault: nothing was served
        self.found.append(Trespass(kind, what, since, sent_at, status))
