"""Sends requests to the edges of the fabric, on behalf of the tenants that have asked for them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import aiohttp

from kvloom_common.config import KvloomConfig
from kvloom_common.discovery.process_finder import ProcessFinder
from kvloom_common.tracing.attributes import HTTP_STATUS
from kvloom_common.trust.fabric_trust import FabricTrust
from kvloom_common.trust.on_behalf import KEY_ID, TENANT

if TYPE_CHECKING:
    from orchestrator.tracing import OrchestratorTracing

CONNECT_SECONDS: Final = 2.0
MAX_CONNECTIONS: Final = 256
AVOIDED_SECONDS: Final = 5.0
"""How long an edge that does not take a connection is asked only if there is no other."""
SILENT_SECONDS: Final = 120.0
"""A stream that sends nothing for so long, though edges keep streams alive, is lost."""
RETRIED: Final = frozenset((408, 429, 500, 502, 503, 504))
"""The status codes of errors that pass."""
PRIORITY_CLASS: Final = "x-kvloom-priority-class"
IDEMPOTENCY_KEY: Final = "Idempotency-Key"


class EdgeAwayError(Exception):
    """No edge answers."""


class AnsweredLine(NamedTuple):
    status: int
    request_id: str
    is_final: bool
    """Another try would be answered alike."""
    body: bytes


class EdgeRefusedError(Exception):
    """An edge has answered with an error."""

    def __init__(self, answer: AnsweredLine) -> None:
        super().__init__(f"status {answer.status}")
        self.answer = answer


class Edges:
    """`watch` must run while requests are sent."""

    def __init__(
        self,
        config: KvloomConfig,
        own_name: str,
        trust: FabricTrust,
        configured: str = "",
        tracing: OrchestratorTracing | None = None,
    ) -> None:
        """`configured`: the address of an edge for its fabric, where there is no registry. `tracing`: None where there
        are no traces."""
        self._tracing = tracing
        self._finder = ProcessFinder(config.redis, "edge", own_name, configured, trust.sealer)
        self._trust = trust
        self._scheme = "https" if trust.has_secret else "http"
        self._turns = itertools.count()
        self._refused_at: dict[str, float] = {}
        """When an edge has last not taken a connection, by its address."""
        self._session: aiohttp.ClientSession | None = None

    async def watch(self) -> None:
        try:
            await self._finder.run()
            await asyncio.Event().wait()  # without a registry there is nothing to find
        finally:
            if self._session is not None:
                await self._session.close()

    async def post(
        self, tenant: str, key_id: str, path: str, body: bytes, idempotency_key: str = "", priority_class: str = "batch"
    ) -> AnsweredLine:
        """`priority_class`: "" is that of the tenant. Raises EdgeAwayError."""
        await self._finder.found.wait()
        headers = {PRIORITY_CLASS: priority_class} if priority_class else {}
        if idempotency_key:
            headers |= {IDEMPOTENCY_KEY: idempotency_key, "x-request-id": idempotency_key}
        async with self._traced(self._address(), tenant, key_id, path, body, headers) as answer:
            return await _answered(answer)

    @contextlib.asynccontextmanager
    async def stream(
        self, tenant: str, key_id: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[EdgeStream]:
        """Raises EdgeAwayError, EdgeRefusedError."""
        await self._finder.found.wait()
        address = self._address()
        async with self._traced(address, tenant, key_id, path, body, headers) as answer:
            if answer.status != 200:
                raise EdgeRefusedError(await _answered(answer))

            async def cancel() -> None:
                name = answer.headers.get("x-kvloom-response-id", "")
                async with self._sent(address, tenant, key_id, f"{path}/{name}/cancel", b"{}", {}) as told:
                    await told.read()

            yield EdgeStream(answer, cancel)

    def _address(self) -> str:
        candidates = self._finder.candidates()
        if not candidates:
            raise EdgeAwayError("no edge is known")
        oldest = time.monotonic() - AVOIDED_SECONDS
        self._refused_at = {one: at for one, at in self._refused_at.items() if at > oldest}
        usable = [address for address in candidates if address not in self._refused_at] or candidates
        return usable[next(self._turns) % len(usable)]

    @contextlib.asynccontextmanager
    async def _traced(
        self, address: str, tenant: str, key_id: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._tracing is None:
            async with self._sent(address, tenant, key_id, path, body, headers) as answer:
                yield answer
            return
        with self._tracing.asking(path, tenant, headers.get(IDEMPOTENCY_KEY, "")) as (own, attributes):
            headers = {**headers, "traceparent": own.header}
            async with self._sent(address, tenant, key_id, path, body, headers) as answer:
                attributes[HTTP_STATUS] = answer.status
                yield answer

    @contextlib.asynccontextmanager
    async def _sent(
        self, address: str, tenant: str, key_id: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            )
        every = {"Content-Type": "application/json", TENANT: tenant, KEY_ID: key_id}
        url = f"{self._scheme}://{address}{path}"
        try:
            async with self._session.post(url, data=body, headers={**headers, **every}, **self._tls()) as answer:
                yield answer
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if isinstance(error, aiohttp.ClientConnectorError):
                self._refused_at[address] = time.monotonic()
            raise EdgeAwayError(f"{type(error).__name__}: {error}") from error

    def _tls(self) -> dict[str, Any]:
        context = self._trust.client_tls()
        return {} if context is None else {"ssl": context, "server_hostname": self._trust.server_hostname("edge")}


async def _answered(answer: aiohttp.ClientResponse) -> AnsweredLine:
    is_final = answer.headers.get("x-should-retry") == "false"
    return AnsweredLine(answer.status, answer.headers.get("x-request-id", ""), is_final, await answer.read())


class EdgeStream:
    """The stream of an answer."""

    def __init__(self, answer: aiohttp.ClientResponse, cancel: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._answer = answer
        self.cancel = cancel
        """Ends the answer at the edge. Raises EdgeAwayError."""

    async def events(self) -> AsyncIterator[bytes]:
        """The events, without their ids and without the empty line behind them. Raises EdgeAwayError, also when the
        stream ends where it should not."""
        rest = b""
        try:
            while True:
                async with asyncio.timeout(SILENT_SECONDS):
                    piece = await self._answer.content.readany()
                if not piece:
                    raise EdgeAwayError("the stream was broken off")
                *whole, rest = (rest + piece).split(b"\n\n")
                for event in whole:
                    lines = [line for line in event.split(b"\n") if not line.startswith((b"id:", b":"))]
                    if lines:
                        yield b"\n".join(lines)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EdgeAwayError(f"{type(error).__name__}: {error}") from error
