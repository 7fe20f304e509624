"""Background responses while the orchestrator's process is killed again and again, and its edge forgets what it had."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
from collections import defaultdict
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import structlog

from edge_http.orchestrator_link import OrchestratorLink
from kvloom_common.config import KvloomConfig, OrchestratorConfig
from kvloom_common.process.watched_files import following
from kvloom_common.trust.fabric_trust import NO_SECRET
from kvloom_common.trust.state_seal import StateSealer
from tests.fakes.edge_world import EdgeWorld, edge_world
from tests.fakes.fake_router_link import FakeRequest
from tests.fakes.killed_orchestrator import KilledOrchestrator
from tests.waiting import eventually

log = structlog.get_logger()
pytestmark = pytest.mark.long  # so many deaths take minutes

NUM_KILLS, NUM_RESPONSES = 200, 500
AT_A_TIME = 24
EVENTS = 25
"""Fewer than any response has: the kills are over before the responses are."""
EVERY = 10
"""Each response is read again from every so many events."""
LOSSES = 0.4
"""How often the edge loses its streams together with the orchestrator."""
MOST_SECONDS = 1500.0
WORDS = ("loom", "warp", "weft", "shuttle", "heddle", "reed", "thread", "card")
LAST = b"\nevent: response.completed\n"


def words_of(seed: int) -> list[str]:
    """The answer, which follows from the seed alone, as that of a deterministic engine."""
    draw = random.Random(seed)
    return [f"{draw.choice(WORDS)} " for _ in range(draw.randint(20, 60))]


class Engine:
    """Sends each answer slowly, and each time in other portions."""

    def __init__(self) -> None:
        self.seeds = defaultdict[str, list[int]](list)
        """Of each attempt, by the response; some are stored and never acknowledged."""
        self._playing = set[asyncio.Task[None]]()

    def play(self, request: FakeRequest) -> None:
        task = asyncio.create_task(self._play(request))
        self._playing.add(task)
        task.add_done_callback(self._playing.discard)

    async def _play(self, request: FakeRequest) -> None:
        wanted, draw = request.request.wanted, random.Random()
        self.seeds[request.request.submit.client_request_id].append(wanted.sampling.seed)
        words = words_of(wanted.sampling.seed)
        request.start()
        while words and not request.cancelled.is_set():
            size = draw.randint(1, 5)
            portion, words = words[:size], words[size:]
            request.tokens("".join(portion), token_ids=[65] * len(portion))
            await asyncio.sleep(draw.random() * 0.05)  # sleep: an engine takes its time
        request.finish()


async def created(world: EdgeWorld) -> str:
    """Asks until the response is acknowledged, and returns its id."""
    body = {"input": "the fox", "background": True, "temperature": 1.0}
    while True:
        status, answer = await world.post("/v1/responses", {"model": "tiny", **body})
        if status == 200:
            return answer["id"]
        assert status == 503, answer
        await asyncio.sleep(0.05)  # sleep: a client that asks again


def without_comments(block: bytes) -> bytes:
    """An event; nothing is left of what keeps a stream alive."""
    return b"\n".join(line for line in block.split(b"\n") if not line.startswith(b":"))


async def read_on(world: EdgeWorld, response_id: str, events: list[bytes], num_known: int = 0) -> None:
    """Adds the bytes of the events that follow, until the end of the stream or of the connection."""
    rest, num_known = b"", num_known or len(events)
    query = {"stream": "true"} | ({"starting_after": str(num_known - 1)} if num_known else {})
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        async with world.http.get(f"{world.url}/v1/responses/{response_id}", params=query) as answer:
            assert answer.status in (200, 503), await answer.text()
            async for piece in answer.content.iter_any():
                *found, rest = (rest + piece).split(b"\n\n")
                events += filter(None, map(without_comments, found))


async def read_through(world: EdgeWorld, response_id: str, events: list[bytes]) -> None:
    while not events or LAST not in events[-1]:
        await read_on(world, response_id, events)
        await asyncio.sleep(0.02)  # sleep: a client that asks again


async def check(world: EdgeWorld, response_id: str, events: list[bytes], seeds: list[int]) -> None:
    """Nothing is other, lost or twice; the answer is that of its one seed, and counted once."""
    decoded: list[Any] = [json.loads(event.partition(b"\ndata: ")[2]) for event in events]
    assert [one["sequence_number"] for one in decoded] == list(range(len(events)))
    kinds = [one["type"] for one in decoded]
    assert (kinds.count("response.created"), kinds.count("response.completed")) == (1, 1)
    [seed] = set(seeds)
    text = "".join(words_of(seed))
    assert "".join(one["delta"] for one in decoded if one["type"] == "response.output_text.delta") == text
    for after in range(0, len(events), EVERY):
        again = list[bytes]()
        await read_on(world, response_id, again, after)
        assert again == events[after:]
    async with world.http.get(f"{world.url}/v1/responses/{response_id}") as answer:
        stored = await answer.json()
    assert stored == decoded[-1]["response"]
    assert stored["output"][0]["content"][0]["text"] == text
    assert stored["usage"]["output_tokens"] == len(words_of(seed))


@pytest.mark.timeout(MOST_SECONDS + 100)
async def test_kills_at_random_points_change_no_byte(tmp_path: Path) -> None:
    """A client reads each response as if nothing had died, and so does whoever reads it again, from any event on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = OrchestratorConfig(enabled=True, port=port, max_background=NUM_RESPONSES)
    engine, draw, may_begin = Engine(), random.Random(50), asyncio.Semaphore(AT_A_TIME)
    async with asyncio.timeout(MOST_SECONDS), edge_world() as world:
        world.link.script = engine.play
        address = await world.server.listen_to_fabric("127.0.0.1", None, NO_SECRET)
        link = OrchestratorLink(KvloomConfig(orchestrator=settings), "edge-0", NO_SECRET)
        world.edge.orchestrator, world.edge.state_sealer = link, StateSealer(b"k" * 32)
        orchestrator = KilledOrchestrator(tmp_path, settings, address)
        await orchestrator.start()
        read = dict[str, list[bytes]]()

        def num_read() -> int:
            return sum(map(len, read.values()))

        async def one() -> None:
            async with may_begin:
                response_id = await created(world)
                await read_through(world, response_id, read.setdefault(response_id, []))

        async with following(link):
            reading = asyncio.gather(*(one() for _ in range(NUM_RESPONSES)))
            for number in range(1, NUM_KILLS + 1):
                least = number * NUM_RESPONSES * EVENTS // NUM_KILLS
                await eventually(lambda least=least: reading.done() or num_read() >= least, "more events", 120.0)
                await orchestrator.kill()
                if draw.random() < LOSSES:
                    for stream in list(world.edge.resume.streams.values()):
                        world.edge.resume.forget(stream)
                await orchestrator.start()
            await reading
            for response_id, events in read.items():
                await check(world, response_id, events, engine.seeds[response_id])
        await orchestrator.kill()
    num_attempts = sum(map(len, engine.seeds.values()))
    figures = {
        "kills": NUM_KILLS,
        "responses": len(read),
        "generations": num_attempts,
        "events": num_read(),
    }
    log.info("background_kills", **figures)
    assert num_attempts > NUM_RESPONSES, "nothing was interrupted"
