"""Streams that lose their connection on a real fabric: the client ends up with every token, once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import redis

from kvloom_common.text.tokenizer import ModelTokenizer
from tests import waiting
from tests.e2e.fabric import RunningFabric, eventually
from tests.e2e.test_fabric_sim import body, expected_text
from tests.fakes.resuming_client import ResumingClient

pytestmark = pytest.mark.xdist_group("sim")

CHAT = "/v1/chat/completions"
NUM_TOKENS = 30


@pytest.fixture
def tokenizer(model_dir: Path):
    loaded = ModelTokenizer.load(model_dir)
    yield loaded
    loaded.close()


def client(url: str) -> ResumingClient:
    return ResumingClient(url + CHAT, {"Authorization": "Bearer mine"})


def text_and_usage(events: list[bytes]) -> tuple[str, int]:
    assert events[-1] == b"[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert not any("error" in chunk for chunk in chunks)
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    return text, chunks[-1]["usage"]["completion_tokens"]


@contextlib.asynccontextmanager
async def second_edge(fabric: RunningFabric) -> AsyncIterator[str]:
    """Another edge process of the same fabric; gives its URL."""
    async with edge_process(fabric) as (url, _):
        yield url


@contextlib.asynccontextmanager
async def edge_process(fabric: RunningFabric) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """Another edge of the same fabric, which may be killed; and its URL."""
    config = Path(fabric.env["KVLOOM_DATA_DIR"]) / "run" / "config.json"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "edge_http", "--config", str(config), "--name", "edge-b", "--port", "0"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(30):
            ready = await process.stdout.readline()
        yield "http://" + json.loads(ready)["address"], process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        async with asyncio.timeout(40):
            await process.wait()


def tokens_of(line: str) -> int:
    """Tokens that a usage record in a router's log meters; less than 0: credited tokens."""
    output = re.search(r"num_output_tokens=(\d+)", line)
    credited = re.search(r"num_credited_tokens=(\d+)", line)
    return (int(output[1]) if output else 0) - (int(credited[1]) if credited else 0)


def end_is_in_redis(fabric: RunningFabric, response_id: str) -> bool:
    """With its end, the requests and the snapshot of an answer go, from which it could have been continued."""
    config = json.loads((Path(fabric.env["KVLOOM_DATA_DIR"]) / "run" / "config.json").read_text())
    with redis.Redis.from_url(config["redis"]["url"]) as client:
        fields = [client.hlen(key) for key in client.scan_iter(match=f"*{response_id}*", _type="hash")]
    return fields == [1]


async def until_ready(url: str) -> None:
    async def is_ready() -> bool:
        async with http.get(f"{url}/ready") as response:
            return response.status == 200

    async with aiohttp.ClientSession() as http:
        await waiting.eventually(is_ready, "the edge is ready")


async def test_32_streams_with_flaky_connections_arrive_whole(sim_fabric: RunningFabric, tokenizer: ModelTokenizer):
    """Each client loses its connection again and again, at random events: each has exactly its own text, numbered
    without gaps, and the engines generated every token once."""
    generated = "vllm:generation_tokens_total"
    num_before = sim_fabric.sum_over_shards(generated)

    async def ask(i: int) -> tuple[str, list[bytes]]:
        rng = random.Random(i)
        streamed = client(sim_fabric.http_url)
        await streamed.begin(body(f"Flaky {i}", i, NUM_TOKENS), stop_after=rng.randrange(4))
        while not streamed.done:
            stop_after = len(streamed.events) + rng.randrange(12)
            assert await streamed.resume(stop_after=stop_after, by_header=rng.random() < 0.5) == 200
        assert not streamed.notices
        return await expected_text(tokenizer, f"Flaky {i}", i, NUM_TOKENS), streamed.events

    async with asyncio.timeout(60):
        answers = await asyncio.gather(*(ask(i) for i in range(32)))
    for expected, events in answers:
        assert text_and_usage(events) == (expected, NUM_TOKENS)
    assert sim_fabric.sum_over_shards(generated) - num_before == 32 * NUM_TOKENS


async def test_a_shard_dies_while_the_client_is_away(sim_fabric: RunningFabric, tokenizer: ModelTokenizer):
    """Both at once: the answer continues without its client and without its shard, and the client misses nothing."""
    num_tokens = 60  # three seconds: it must not have ended before the shard is found
    streamed = client(sim_fabric.http_url)
    async with asyncio.timeout(60):
        await streamed.begin(body("Away when it dies", 6, num_tokens), stop_after=6)
        shards = sim_fabric.processes("shard")
        loads = await asyncio.to_thread(sim_fabric.shard_loads)
        (serving,) = [shard for shard, load in zip(shards, loads, strict=True) if load.num_running]
        os.kill(serving["pid"], signal.SIGKILL)
        events = await streamed.read_to_the_end()
    assert text_and_usage(events) == (await expected_text(tokenizer, "Away when it dies", 6, num_tokens), num_tokens)

    def is_back() -> bool:
        now = {shard["name"]: shard for shard in sim_fabric.processes("shard")}[serving["name"]]
        return now["state"] == "ready" and now["pid"] != serving["pid"]

    await asyncio.to_thread(eventually, "the killed shard is back", is_back)


async def test_cancel_stops_the_engine_at_once(sim_fabric: RunningFabric):
    """A client that has gone and says so costs no grace period."""
    streamed = client(sim_fabric.http_url)
    await streamed.begin(body("Will be cancelled", 1, 2000), stop_after=5)

    def num_running() -> int:
        return sum(load.num_running for load in sim_fabric.shard_loads())

    assert await asyncio.to_thread(num_running) == 1
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{streamed.url}/{streamed.response_id}/cancel", headers=streamed.headers) as response,
    ):
        assert response.status == 200
    await asyncio.to_thread(eventually, "the engine has stopped", lambda: num_running() == 0, 5.0)


async def test_stream_goes_on_at_another_edge(sim_fabric: RunningFabric, tokenizer: ModelTokenizer):
    """Two edges behind a load balancer: the client returns to the one that did not begin its stream."""
    async with second_edge(sim_fabric) as url:
        streamed = client(sim_fabric.http_url)
        await streamed.begin(body("To the other edge", 3, NUM_TOKENS), stop_after=6)
        streamed.url = url + CHAT
        await streamed.resume(stop_after=20)
        events = await streamed.read_to_the_end()
    assert text_and_usage(events) == (await expected_text(tokenizer, "To the other edge", 3, NUM_TOKENS), NUM_TOKENS)


async def test_answer_that_ended_survives_the_death_of_its_edge(sim_fabric: RunningFabric, tokenizer: ModelTokenizer):
    """kill -9 of the only edge: the client that was away returns to the one that the supervisor started instead, and
    finds its answer."""
    streamed = client(sim_fabric.http_url)
    await streamed.begin(body("The edge will die", 4, NUM_TOKENS), stop_after=6)
    whole = client(sim_fabric.http_url)
    whole.response_id = streamed.response_id
    await whole.read_to_the_end()
    # What a dying edge has not told Redis is lost with it.
    await asyncio.to_thread(
        eventually, "Redis has the end", lambda: end_is_in_redis(sim_fabric, streamed.response_id), 5.0
    )
    (edge,) = sim_fabric.processes("edge")
    os.kill(edge["pid"], signal.SIGKILL)

    def is_back() -> bool:
        (now,) = sim_fabric.processes("edge")
        return now["state"] == "ready" and now["pid"] != edge["pid"]

    await asyncio.to_thread(eventually, "the edge is back", is_back)
    events = await streamed.read_to_the_end()
    assert events == whole.events
    assert text_and_usage(events) == (await expected_text(tokenizer, "The edge will die", 4, NUM_TOKENS), NUM_TOKENS)


async def test_running_answers_go_on_after_the_death_of_their_edge(
    sim_fabric: RunningFabric, tokenizer: ModelTokenizer
):
    """kill -9 of the edge in the middle of attached streams: their clients come to another one, have every token once,
    and the routers' usage records, less the credited tokens, are exactly what was delivered."""
    num_tokens = 45
    names = [f"Its edge is killed {i}" for i in range(8)]
    async with asyncio.timeout(60), edge_process(sim_fabric) as (url, process):
        await until_ready(url)
        clients = [client(url) for _ in names]
        asking = [
            asyncio.create_task(one.begin(body(name, i, num_tokens)))
            for i, (name, one) in enumerate(zip(names, clients, strict=True))
        ]
        await waiting.eventually(lambda: all(len(one.events) > 5 + 3 * i for i, one in enumerate(clients)))
        process.kill()
        await asyncio.gather(*asking, return_exceptions=True)
        for one in clients:
            assert not one.done
            one.url = sim_fabric.http_url + CHAT
        events = await asyncio.gather(*(one.read_to_the_end() for one in clients))
    for i, (name, one, seen) in enumerate(zip(names, clients, events, strict=True)):
        assert text_and_usage(seen) == (await expected_text(tokenizer, name, i, num_tokens), num_tokens)
        assert not one.notices
        again = client(sim_fabric.http_url)
        again.response_id = one.response_id
        assert await again.read_to_the_end() == seen

    def metered() -> list[int]:
        (log,) = (Path(sim_fabric.env["KVLOOM_DATA_DIR"]) / "logs").glob("router*.log")
        lines = [line for line in log.read_text().splitlines() if "request_ended" in line or "request_credited" in line]
        return [sum(tokens_of(line) for line in lines if one.response_id in line) for one in clients]

    await asyncio.to_thread(
        eventually, "every token is metered once", lambda: metered() == [num_tokens] * len(clients), 10.0
    )
