"""How the orchestrator finds an edge that answers."""

from __future__ import annotations

import socket

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kvloom_common.config import KvloomConfig
from kvloom_common.trust.fabric_trust import NO_SECRET
from orchestrator.jobs.edges import EdgeAwayError, Edges


async def test_an_edge_that_has_died_is_asked_once() -> None:
    """Jobs that are tried again in turn could otherwise meet the same dead edge each time, until the registry forgets
    it. If there is no other, it is asked all the same."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=b"{}")

    application = web.Application()
    application.router.add_post("/v1/responses", answer)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens there
        dead = f"127.0.0.1:{taken.getsockname()[1]}"
        async with TestServer(application) as server:
            edges = Edges(KvloomConfig(), "orchestrator", NO_SECRET, dead)
            finder = edges._finder

            async def status() -> int:
                return (await edges.post("acme/search", "", "/v1/responses", b"{}")).status

            for _ in range(2):
                with pytest.raises(EdgeAwayError):
                    await status()
            finder._announced = [f"127.0.0.1:{server.port}"]
            assert [await status() for _ in range(4)] == [200] * 4
            assert edges._session is not None
            await edges._session.close()
