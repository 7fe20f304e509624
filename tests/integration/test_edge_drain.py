"""An edge that is stopped while resumable answers run."""

from __future__ import annotations

import json

from tests.fakes.resume_world import CHAT
from tests.integration.test_edge_resume_peers import begin, edges


async def test_at_its_deadline_it_leaves_what_was_written_to_others(redis_url: str) -> None:
    """As in the process (edge_http/process.py): the client gets from another edge what it has missed, up to the last
    event, and is told that there is no more."""
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
        assert await streamed.resume() == 200
        contents = [json.loads(event)["choices"][0]["delta"].get("content") for event in streamed.events]
        assert contents[-3:] == ["while", "it", "drains"]
        assert json.loads(streamed.notices[-1].removeprefix(b"data: "))["error"]["code"] == "events_gone"
