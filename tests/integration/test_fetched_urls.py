"""Files and images that requests name by URLs are fetched from origins that the operator allows, and no others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from edge_http.fetching import UrlFetcher
from kvloom.errors import KvloomError
from kvloom_common.config import EdgeConfig
from tests.fakes.fake_control import SEARCH_KEY
from tests.fakes.fake_router_link import answer
from tests.fakes.state_world import state_world
from tests.waiting import eventually

MAX_BYTES = 100
AT = "input[0]"


@contextlib.asynccontextmanager
async def site() -> AsyncIterator[tuple[str, list[str]]]:
    """Its origin, and the paths that were asked for."""
    asked: list[str] = []

    async def serve(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        match request.path:
            case "/moved":
                raise web.HTTPFound("/notes.md")
            case "/large":
                return web.Response(body=b"a" * (MAX_BYTES + 1))
            case "/slow":
                await asyncio.Event().wait()
            case "/zipped":
                return web.Response(body=b"a", headers={"Content-Encoding": "gzip"})
            case "/notes.md":
                return web.Response(text="The loom reads cards.", content_type="text/markdown")
        raise web.HTTPNotFound

    app = web.Application()
    app.router.add_get("/{path:.*}", serve)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    try:
        where = web.TCPSite(runner, "127.0.0.1", 0)
        await where.start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}", asked
    finally:
        await runner.cleanup()


async def refused(fetcher: UrlFetcher, url: str) -> str:
    with pytest.raises(KvloomError) as caught:
        await fetcher.fetch(url, AT, MAX_BYTES)
    assert caught.value.field == AT
    return f"{caught.value.reason_name} {caught.value.message}"


async def test_an_allowed_origin_is_fetched_from() -> None:
    """What it does not give as it is asked for is refused, and no redirect is followed."""
    async with site() as (origin, asked):
        fetcher = UrlFetcher([origin])
        assert await fetcher.fetch(f"{origin}/notes.md", AT, MAX_BYTES) == (b"The loom reads cards.", "text/markdown")
        for path, why in (("moved", "302"), ("large", "TOO_LARGE"), ("zipped", "compressed"), ("none", "404")):
            assert why in await refused(fetcher, f"{origin}/{path}")
        assert asked == ["/notes.md", "/moved", "/large", "/zipped", "/none"]


async def test_the_urls_of_a_request_have_one_time_together() -> None:
    """They are fetched one after another: a request with many slow ones would keep its place for minutes."""
    async with site() as (origin, asked):
        fetcher = UrlFetcher([origin]).of_request(seconds=0.05)
        assert "within" in await refused(fetcher, f"{origin}/slow")
        assert "within" in await refused(fetcher, f"{origin}/notes.md")
        assert asked == ["/slow"]


async def test_slow_urls_are_no_fault_of_another() -> None:
    """One that has no turn may be asked for again. An image of the history would else be left out without a word."""
    async with site() as (origin, asked):
        fetcher = UrlFetcher([origin], max_fetches=1, turn_seconds=0.05)
        slow = asyncio.create_task(fetcher.fetch(f"{origin}/slow", AT, MAX_BYTES))
        await eventually(lambda: asked)
        assert "OVERLOADED" in await refused(fetcher, f"{origin}/notes.md")
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow
        assert (await fetcher.fetch(f"{origin}/notes.md", AT, MAX_BYTES))[1] == "text/markdown"


async def test_nothing_else_is_asked() -> None:
    """A request that names a URL is no way into the operator's network, whatever its name resolves to."""
    async with site() as (origin, asked):
        port = origin.rpartition(":")[2]
        assert "edge.fetch_origins" in await refused(UrlFetcher([]), f"{origin}/notes.md")
        every = UrlFetcher(["https://*"])
        for url in (f"{origin}/notes.md", "ftp://example.com/a", "file:///etc/passwd", f"http://u:p@127.0.0.1:{port}/"):
            await refused(every, url)
        for host in ("127.0.0.1", "localhost", "[::1]", "2130706433", "169.254.169.254", "[::ffff:127.0.0.1]"):
            assert "cannot be reached" in await refused(every, f"https://{host}:{port}/notes.md")
        assert asked == []


async def test_files_are_read_from_urls(tmp_path: Path) -> None:
    """In the APIs of all clients, as those whose contents come with the request."""
    async with site() as (origin, _):
        config = EdgeConfig(fetch_origins=[origin])
        async with state_world(f"sqlite:///{tmp_path}/state.db", tmp_path, edge_config=config) as world:
            world.edge.link.script = answer("It reads.")
            url = f"{origin}/notes.md"
            part: Any = {"type": "input_file", "file_url": url}
            await world.client.responses.create(model="tiny", input=[{"role": "user", "content": [part]}])
            assert "The file notes.md is attached:" in world.prompt()
            assert "The loom reads cards." in world.prompt()
            document = {"type": "document", "source": {"type": "url", "url": url}}
            body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": [document]}]}
            headers = {"Authorization": f"Bearer {SEARCH_KEY}", "anthropic-version": "2023-06-01"}
            status, _ = await world.edge.post("/v1/messages", body, headers=headers)
            assert status == 200
            assert "The loom reads cards." in world.prompt()
