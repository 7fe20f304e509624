"""The whole fabric on the sim engine, whose every token can be checked by anyone: nothing lost, doubled or mixed up."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from kvloom_common.text.tokenizer import ChatMessage, ModelTokenizer
from shard_server.engines.sim_engine import expected_token_id
from tests.e2e.fabric import RunningFabric, eventually, run_kvloom

pytestmark = pytest.mark.xdist_group("sim")

NUM_STREAMS = 64
MODEL = "smollm2-135m-instruct"
READER = """
import json, os, signal, sys, urllib.request
request = urllib.request.Request(sys.argv[1], sys.argv[2].encode(), {"content-type": "application/json"})
received = 0
for line in urllib.request.urlopen(request, timeout=30):
    if line.startswith(b"data: ") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
        received += 1
    if received == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
"""


def body(prompt: str, seed: int, max_tokens: int) -> dict[str, object]:
    return {
        "model": MODEL,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": max_tokens,
        "seed": seed,
        "messages": [{"role": "user", "content": prompt}],
    }


async def expected_text(tokenizer: ModelTokenizer, prompt: str, seed: int, num_tokens: int) -> str:
    prompt_ids, _ = await tokenizer.encode_chat([ChatMessage("user", prompt)])
    return tokenizer.decode([expected_token_id(prompt_ids, seed, i) for i in range(num_tokens)])


class Stream:
    """One streamed answer, read to its end or as far as a test wants."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.text = ""
        self.event_ids: list[int] = []
        self.usage: dict[str, int] = {}
        self.finish_reason: str | None = None
        self.done = False

    async def read(self, min_chars: int | None = None) -> None:
        """To the end, or until the text has that many characters."""
        async for line in self._response.content:
            if line.startswith(b"id: "):
                self.event_ids.append(int(line[4:]))
            elif line.startswith(b"data: [DONE]"):
                self.done = True
            elif line.startswith(b"data: "):
                self._take(json.loads(line[6:]))
            if min_chars is not None and len(self.text) >= min_chars:
                return

    def _take(self, event: dict) -> None:
        assert "error" not in event, event
        self.usage = event.get("usage") or self.usage
        for choice in event["choices"]:
            self.text += choice["delta"].get("content") or ""
            self.finish_reason = choice["finish_reason"] or self.finish_reason


@pytest.mark.parametrize("num_tokens", [32, pytest.param(128, marks=pytest.mark.long)])
async def test_64_streams_arrive_whole(sim_fabric: RunningFabric, model_dir: Path, num_tokens: int):
    """The fabric's promise under concurrency: each stream is exactly its own text, numbered without gaps, and ends."""
    tokenizer = ModelTokenizer.load(model_dir)
    url = f"{sim_fabric.http_url}/v1/chat/completions"

    async def ask(session: aiohttp.ClientSession, i: int) -> tuple[str, Stream]:
        async with session.post(url, json=body(f"Stream number {i}", i, num_tokens)) as response:
            assert response.status == 200, await response.text()
            stream = Stream(response)
            await stream.read()
        return await expected_text(tokenizer, f"Stream number {i}", i, num_tokens), stream

    connector = aiohttp.TCPConnector(limit=NUM_STREAMS)
    async with asyncio.timeout(60), aiohttp.ClientSession(connector=connector) as session:
        answers = await asyncio.gather(*(ask(session, i) for i in range(NUM_STREAMS)))
    for expected, stream in answers:
        assert stream.text == expected
        assert stream.finish_reason == "length"
        assert stream.usage["completion_tokens"] == num_tokens
        assert stream.event_ids == list(range(1, len(stream.event_ids) + 1))
        assert stream.done
    tokenizer.close()


async def test_a_shard_killed_mid_stream_is_not_noticed_by_its_client(sim_fabric: RunningFabric, model_dir: Path):
    """kill -9 of a shard: its streams continue elsewhere with the very tokens they would have had, the supervisor
    brings the shard back, and the fabric serves again with all shards."""
    tokenizer = ModelTokenizer.load(model_dir)
    prompt = "A shard will die"
    shards = sim_fabric.processes("shard")
    async with asyncio.timeout(60), aiohttp.ClientSession() as session:
        url = f"{sim_fabric.http_url}/v1/chat/completions"
        async with session.post(url, json=body(prompt, seed=5, max_tokens=60)) as response:
            stream = Stream(response)
            await stream.read(min_chars=40)
            loads = await asyncio.to_thread(sim_fabric.shard_loads)
            serving = [shard for shard, load in zip(shards, loads, strict=True) if load.num_running]
            assert len(serving) == 1
            os.kill(serving[0]["pid"], signal.SIGKILL)
            await stream.read()
    assert stream.text == await expected_text(tokenizer, prompt, 5, 60)
    assert stream.usage["completion_tokens"] == 60
    assert stream.done
    tokenizer.close()

    def is_back() -> bool:
        now = {shard["name"]: shard for shard in sim_fabric.processes("shard")}[serving[0]["name"]]
        return (
            now["state"] == "ready"
            and now["restarts"] == serving[0]["restarts"] + 1
            and now["pid"] != serving[0]["pid"]
        )

    await asyncio.to_thread(eventually, "the killed shard is back", is_back)
    assert all(load.num_running == 0 for load in await asyncio.to_thread(sim_fabric.shard_loads))


def test_a_client_that_is_killed_mid_stream_stops_the_engine_and_frees_its_blocks(sim_fabric: RunningFabric):
    """An answer without a reader must not cost the fleet: within two steps the engine stops working on it."""

    def generated() -> float:
        return sim_fabric.sum_over_shards("vllm:generation_tokens_total") + sim_fabric.sum_over_shards(
            "kvloom_shard_discarded_tokens_total"
        )

    def is_idle() -> bool:
        return all(load.num_running + load.num_waiting == 0 for load in sim_fabric.shard_loads())

    eventually("the shards are idle", is_idle)
    wasted_before = sim_fabric.sum_over_shards("kvloom_shard_wasted_tokens_total")
    num_before, blocks_before = generated(), [load.num_available_blocks for load in sim_fabric.shard_loads()]
    num_read = 10
    request = json.dumps(body("Will be cut off", seed=1, max_tokens=2000))
    arguments = [f"{sim_fabric.http_url}/v1/chat/completions", request, str(num_read)]
    reader = subprocess.run([sys.executable, "-c", READER, *arguments], timeout=60, check=False)
    assert reader.returncode == -signal.SIGKILL
    eventually("the engine has stopped", is_idle, timeout_seconds=5)
    # Two steps to stop in, and the one that was running while the cancellation travelled.
    assert num_read <= generated() - num_before <= num_read + 3
    assert sim_fabric.sum_over_shards("kvloom_shard_wasted_tokens_total") - wasted_before <= 2
    assert [load.num_available_blocks for load in sim_fabric.shard_loads()] == blocks_before


def test_an_edge_beside_its_router_has_no_threads_of_grpc(sim_fabric: RunningFabric):
    """They wake up several times a second, whether or not there is a channel to look after. An edge that has missed
    its router's socket once, as when the secret was rotated, has them: this one meets a router that is ready."""
    assert run_kvloom("restart", "edge", env=sim_fabric.env).returncode == 0
    (edge,) = sim_fabric.processes("edge")
    names = {(task / "comm").read_text().strip() for task in Path(f"/proc/{edge['pid']}/task").iterdir()}
    assert names
    assert not {name for name in names if name.startswith(("grpc", "event_engine"))}


async def test_callers_do_not_share_cached_prompts(sim_fabric: RunningFabric):
    """The number of cached tokens would tell a caller which prompts others have sent."""
    prompt = "What only one caller knows: " + " ".join(f"word{i}" for i in range(200))

    async def num_cached_tokens(session: aiohttp.ClientSession, bearer: str) -> int:
        fields = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": prompt}]}
        headers = {"Authorization": f"Bearer {bearer}"}
        url = f"{sim_fabric.http_url}/v1/chat/completions"
        async with session.post(url, json=fields, headers=headers) as response:
            assert response.status == 200, await response.text()
            return (await response.json())["usage"]["prompt_tokens_details"]["cached_tokens"]

    async with aiohttp.ClientSession() as session:
        assert await num_cached_tokens(session, "one") == 0
        assert await num_cached_tokens(session, "two") == 0
        assert await num_cached_tokens(session, "one") > 0
