"""A client that loses its connection where a test wants it to, and resumes the stream."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from typing import Any

import aiohttp

EVENT = re.compile(rb"id: (\d+)\n(?:event: [^\n]*\n)?data: (.*)", re.DOTALL)
LAST_EVENT = re.compile(rb'\[DONE\]$|{"type":"response\.(completed|incomplete|failed)"|{"type":"message_stop"}$')


@dataclasses.dataclass
class ResumingClient:
    """Collects the events of one answer over any number of connections."""

    url: str
    """Of the collection: .../v1/chat/completions, .../v1/completions, .../v1/responses or .../v1/messages"""
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    response_id: str = ""
    events: list[bytes] = dataclasses.field(default_factory=list)
    """The data of all events, in the order of their ids."""
    notices: list[bytes] = dataclasses.field(default_factory=list)
    """Events without an id: about a connection, not of the answer."""
    status: int = 0
    is_resumable: bool = True
    """Whether the server said that the answer can be resumed; only then its events have ids."""

    async def begin(self, body: dict[str, Any], *, stop_after: int | None = None, resume: str = "on") -> None:
        """Make the request, read until that many events have arrived, and then drop the connection."""
        headers = {"x-kvloom-resume": resume, **self.headers}
        async with self._session() as http, http.post(self.url, json=body, headers=headers) as response:
            self.response_id = response.headers.get("x-kvloom-response-id", "")
            self.is_resumable = response.status != 200 or "x-kvloom-resume" in response.headers
            await self._read(response, stop_after)

    async def resume(self, *, stop_after: int | None = None, by_header: bool = False, **headers: str) -> int:
        """Resume the stream behind the last event that has arrived. Returns the status."""
        params = {"stream": "true", "starting_after": str(0 if by_header else len(self.events))}
        if self.url.endswith("/responses"):  # its events count from 0
            params["starting_after"] = str(len(self.events) - 1)
            if by_header or not self.events:
                del params["starting_after"]
        more = {"Last-Event-ID": str(len(self.events))} if by_header and self.events else {}
        url = f"{self.url}/{self.response_id}"
        async with (
            self._session() as http,
            http.get(url, params=params, headers={**self.headers, **more, **headers}) as response,
        ):
            await self._read(response, stop_after)
        return self.status

    async def read_to_the_end(self) -> list[bytes]:
        while not self.done:
            assert await self.resume() == 200
        return self.events

    @property
    def done(self) -> bool:
        return bool(self.events) and LAST_EVENT.match(self.events[-1]) is not None

    def _session(self) -> aiohttp.ClientSession:
        # A connection of its own, so that dropping it is what the server sees.
        return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20))

    async def _read(self, response: aiohttp.ClientResponse, stop_after: int | None) -> None:
        self.status = response.status
        if response.status != 200:
            self.notices.append(await response.read())
            return
        rest = b""
        while stop_after is None or len(self.events) < stop_after:
            piece = await response.content.readany()
            if not piece:
                return
            *whole, rest = (rest + piece).split(b"\n\n")
            for event in whole:
                self._take(event)
                if len(self.events) == stop_after:
                    break
        connection = response.connection
        if connection is not None and connection.transport is not None:
            connection.transport.abort()
            await asyncio.sleep(0)

    def _take(self, event: bytes) -> None:
        match = EVENT.fullmatch(event)
        if match is None and not self.is_resumable:
            self.events.append(event.removeprefix(b"data: "))
            return
        if match is None:
            self.notices.append(event)
            return
        assert int(match[1]) == len(self.events) + 1, "an event was lost or doubled"
        self.events.append(match[2])
