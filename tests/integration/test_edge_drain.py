"""An edge that is stopped while resumable answers run."""

from __future__ import annotations

import asyncio
import json

from tests.fakes.edge_peers import begin, edges
from tests.fakes.resume_world import CHAT


async def test_at_its_deadline_it_leaves_what_was_written_to_others(redis_url: str) -> None:
    """As in the process (edge_http/process.py): the client gets from another edge what it has missed, and the rest,
    which that one asks its router for."""
    async with edges(redis_url) as ((first, peers), (second, _)):
        first.edge.config.drain_timeout_seconds = 0.05
        streamed, request = await begin(first, 2)
        for delta in ("while", "it", "drains"):
            request.tokens(delta)
        await first.server.drain()
        await peers.stop_publishing()
        await first.server.stop()
        assert request.cancelled.is_set()
        await peers.close()
        streamed.url = second.url + CHAT
        back = asyncio.create_task(streamed.resume())
        rest = await second.link.next_request()
        assert [list(choice.token_ids) for choice in rest.request.begun] == [[65] * 4]
        rest.start()
        rest.tokens("more")
        rest.finish()
        assert await back == 200
        contents = [json.loads(event)["choices"][0]["delta"].get("content") for event in streamed.events[:-1]]
        assert contents[-5:] == ["while", "it", "drains", "more", None]
        assert streamed.done
