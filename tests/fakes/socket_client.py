"""A client of the Responses API over WebSocket that shows every message."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from tests.fakes.edge_world import EdgeWorld


class SocketClient:
    """A connection, and what it has received."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket

    async def create(self, text: str = "the fox", **fields: Any) -> None:
        await self.socket.send_json({"type": "response.create", "model": "tiny", "input": text, **fields})

    async def steer(self, response_id: str, given: Any = "Use metric units.", **more: Any) -> None:
        await self.socket.send_json(
            {"type": "response.steer", "previous_response_id": response_id, "input": given, **more}
        )

    async def next(self) -> dict[str, Any]:
        return json.loads(await self.socket.receive_str(timeout=5))

    async def until(self, *kinds: str) -> list[dict[str, Any]]:
        """The messages up to one of these kinds."""
        messages = [await self.next()]
        while messages[-1]["type"] not in kinds:
            messages.append(await self.next())
        return messages

    async def ended(self) -> dict[str, Any]:
        """The response that ends next."""
        kinds = ("response.completed", "response.incomplete", "response.failed")
        return (await self.until(*kinds))[-1]["response"]

    async def error(self) -> dict[str, Any]:
        return (await self.until("error"))[-1]

    async def close_code(self) -> int | None:
        while (message := await self.socket.receive(timeout=5)).type not in (
            aiohttp.WSMsgType.CLOSE,
            aiohttp.WSMsgType.CLOSED,
        ):
            pass
        return message.data if message.type is aiohttp.WSMsgType.CLOSE else self.socket.close_code


@contextlib.asynccontextmanager
async def connected(world: EdgeWorld, **options: Any) -> AsyncIterator[SocketClient]:
    async with world.http.ws_connect(f"{world.url}/v1/responses", **options) as socket:
        yield SocketClient(socket)
