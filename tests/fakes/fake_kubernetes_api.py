"""The part of a Kubernetes API server that lists objects and watches them, without credentials."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web


class FakeKubernetesApi:
    """Objects by collection's path and name. Collections that were never written to do not exist."""

    def __init__(self) -> None:
        self.collections: dict[str, dict[str, dict[str, Any]]] = {}
        self.num_lists = 0
        self.is_down = False
        self._version = 1
        self._events: list[tuple[int, str, str, dict[str, Any]]] = []
        """(version, path, kind of change, object)."""
        self._oldest = 0
        self._changed = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/{path:.*}", self._get)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    def put(self, path: str, name: str, **fields: Any) -> None:
        collection = self.collections.setdefault(path, {})
        one = {**fields, "metadata": {"name": name, **fields.get("metadata", {})}}
        self._note(path, "MODIFIED" if name in collection else "ADDED", one)
        collection[name] = one

    def delete(self, path: str, name: str) -> None:
        self._note(path, "DELETED", self.collections[path].pop(name))

    def forget_history(self) -> None:
        """Watches from an earlier version, also those that are open, end with 410."""
        self._version += 1
        self._oldest = self._version
        self._wake()

    def _note(self, path: str, kind: str, one: dict[str, Any]) -> None:
        self._version += 1
        self._events.append((self._version, path, kind, one))
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _get(self, request: web.Request) -> web.StreamResponse:
        if self.is_down:
            return web.Response(status=500)
        if request.path not in self.collections:
            return web.Response(status=404)
        if "watch" in request.query:
            return await self._watch(request)
        self.num_lists += 1
        items = [one for one in self.collections[request.path].values() if _is_selected(one, request.query)]
        return web.json_response({"metadata": {"resourceVersion": str(self._version)}, "items": items})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        seen = int(request.query["resourceVersion"])
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            changed = self._changed
            if seen < self._oldest:
                await response.write(json.dumps({"type": "ERROR", "object": {"code": 410}}).encode() + b"\n")
                return response
            for version, path, kind, one in self._events:
                if version > seen and path == request.path and _is_selected(one, request.query):
                    await response.write(json.dumps({"type": kind, "object": one}).encode() + b"\n")
            seen = self._version
            await changed.wait()


def _is_selected(one: dict[str, Any], query: Any) -> bool:
    labels = one["metadata"].get("labels", {})
    wanted = [pair.split("=") for pair in query.get("labelSelector", "").split(",") if pair]
    name = query.get("fieldSelector", "").removeprefix("metadata.name=")
    return all(labels.get(key) == value for key, value in wanted) and name in ("", one["metadata"]["name"])
