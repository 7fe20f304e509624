"""An edge that is stopped while resumable answers run."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.fakes.edge_peers import begin, edges
from tests.fakes.edge_world import chat_body
from tests.fakes.fake_router_link import answer
from tests.fakes.resume_world import CHAT, client


async def test_at_its_deadline_it_leaves_what_was_written_to_others(redis_url: str) -> None:
    """As in the process (edge_http/server/process.py): the client gets the events that it missed from another edge, and
    the rest, which that edge requests from its router."""
    async with edges(redis_url) as ((first, peers), (second, _)):
        first.edge.drain_timeout_seconds = 0.05
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
        assert [list(choice.token_ids) for choice in rest.request.partial_choices] == [[65] * 4]
        rest.start()
        rest.tokens("more")
        rest.finish()
        assert await back == 200
        contents = [json.loads(event)["choices"][0]["delta"].get("content") for event in streamed.events[:-1]]
        assert contents[-5:] == ["while", "it", "drains", "more", None]
        assert streamed.done


@pytest.mark.parametrize("is_at_another", [True, False])
async def test_what_it_has_left_to_others_is_not_denied(redis_url: str, is_at_another: bool) -> None:
    """Between its last write to Redis and its last connection an edge has no answers any more, and other edges still
    forward their clients to it. These get their answers from the journal or are asked to come back, and never get the
    error that there is no such response. (`kvloom-lab chaos` found it.)"""
    async with edges(redis_url) as ((first, peers), (second, _)):
        first.link.script = answer("Hel", "lo")
        whole, ended = client(first), client(first)
        await whole.begin(chat_body(stream=True))
        first.link.script = None
        running, _ = await begin(first, 2)
        ended.response_id = whole.response_id
        first.edge.admission.drain()
        await peers.stop_publishing()
        await first.edge.resume.close()
        if not is_at_another:
            assert await ended.resume() == 503
            assert await running.resume() == 503
            return
        ended.url = running.url = second.url + CHAT
        assert await ended.read_to_the_end() == whole.events
        back = asyncio.create_task(running.resume())
        rest = await second.link.next_request()
        rest.start()
        rest.finish()
        assert await back == 200
        assert running.done
