"""Shards that hang, are drained and stop, as processes: their answers continue on other shards, token for token."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import urllib.request
from collections.abc import Iterator

import pytest

from kvloom.client.client import Client
from shard_server.engines.sim_engine import expected_token_id
from tests.e2e.conftest import STALL_SECONDS
from tests.e2e.fabric import RunningFabric, eventually, run_kvloom

pytestmark = pytest.mark.xdist_group("strict")

MODEL = "smollm2-135m-instruct"
NUM_TOKENS = 300
NUM_TOKENS_OF_A_CHECK = 20
NUM_TOKENS_WITHOUT_END = 8_000
"""80 s of steps: more than a test takes, however slow the commands that it waits for."""
NUM_STREAMS = 9


@pytest.fixture
def fabric(strict_fabric: RunningFabric) -> RunningFabric:
    return strict_fabric


class Stream:
    """One answer: its tokens, the shard that began it, and the longest silence."""

    def __init__(self, number: int, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.prompt = [100 + number, 7, 9]
        self.token_ids: list[int] = []
        self.shard_id = ""
        self.has_begun = asyncio.Event()
        self.has_continued = asyncio.Event()
        """Cleared by a test; set by the next token."""
        self.longest_silence_seconds = 0.0

    async def read(self, client: Client) -> None:
        loop = asyncio.get_running_loop()
        heard_at = loop.time()
        request = client.generate(
            model=MODEL, token_ids=self.prompt, max_tokens=self.num_tokens, seed=3, ignore_eos=True
        )
        async for delta in request:
            self.token_ids += delta.token_ids
            self.longest_silence_seconds = max(self.longest_silence_seconds, loop.time() - heard_at)
            heard_at = loop.time()
            if delta.start is not None:
                self.shard_id = delta.start.shard_id
            if len(self.token_ids) >= 5:
                self.has_begun.set()
            if delta.token_ids:
                self.has_continued.set()

    def check(self) -> None:
        assert len(self.token_ids) == self.num_tokens
        self.check_begun()

    def check_begun(self) -> None:
        assert self.token_ids == [expected_token_id(self.prompt, 3, i) for i in range(len(self.token_ids))]


def router_metric(fabric: RunningFabric, sample: str) -> float:
    """Of the router, as Prometheus would scrape it; 0 when it is not there."""
    (router,) = fabric.processes("router")
    with urllib.request.urlopen(f"http://{router['metrics_address']}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(sample))


def is_healthy(fabric: RunningFabric, shard_id: str) -> bool:
    return router_metric(fabric, f'kvloom_router_shard_health{{shard_id="{shard_id}",state="healthy"}}') == 1


async def begin(client: Client, num_tokens: int = NUM_TOKENS) -> tuple[list[Stream], asyncio.Future[list[None]]]:
    """Streams that all have begun, and their ends."""
    streams = [Stream(i, num_tokens) for i in range(NUM_STREAMS)]
    reading = asyncio.gather(*(stream.read(client) for stream in streams))
    async with asyncio.timeout(30):
        await asyncio.gather(*(stream.has_begun.wait() for stream in streams))
    return streams, reading


async def give_up(reading: asyncio.Future[list[None]]) -> None:
    reading.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reading


def pid_of(fabric: RunningFabric, shard_id: str) -> int:
    return next(shard["pid"] for shard in fabric.processes("shard") if shard["name"] == shard_id)


async def test_a_stopped_shard_delays_no_client_and_is_readmitted(fabric: RunningFabric) -> None:
    """SIGSTOP: connected and silent. Its streams continue on other shards within the bound; SIGCONT: its late frames
    change nothing, its probes are answered, and it serves again."""
    async with asyncio.timeout(90), Client(fabric.router_address) as client:
        streams, reading = await begin(client)
        stopped = streams[0].shard_id
        pid = pid_of(fabric, stopped)
        os.kill(pid, signal.SIGSTOP)
        try:
            await reading
        finally:
            os.kill(pid, signal.SIGCONT)
        for stream in streams:
            stream.check()
        longest = max(stream.longest_silence_seconds for stream in streams)
        # The bound is 1 s, a check a tenth later, and the prefill elsewhere; the rest is for a busy machine.
        assert STALL_SECONDS * 0.8 < longest < STALL_SECONDS + 4.0
        assert router_metric(fabric, "kvloom_router_requests_moved_total") >= 1
        await asyncio.to_thread(eventually, "the shard is taken back", lambda: is_healthy(fabric, stopped), 30.0)
        streams, reading = await begin(client, NUM_TOKENS_OF_A_CHECK)
        await reading
        for stream in streams:
            stream.check()
        assert stopped in {stream.shard_id for stream in streams}


@pytest.fixture
def left_undrained(fabric: RunningFabric) -> Iterator[None]:
    """Whatever becomes of the test: others need all shards."""
    yield
    for shard in fabric.processes("shard"):
        run_kvloom("undrain", shard["name"], env=fabric.env)


@pytest.mark.usefixtures("left_undrained")
async def test_a_drained_shard_hands_over_what_runs(fabric: RunningFabric) -> None:
    """`kvloom drain --deadline-seconds`: what has not ended continues on other shards, the command returns when the
    shard is empty, nothing new goes there; `kvloom undrain` takes it back."""
    async with asyncio.timeout(90), Client(fabric.router_address) as client:
        streams, reading = await begin(client, NUM_TOKENS_WITHOUT_END)
        shard_id = streams[0].shard_id
        done = await asyncio.to_thread(
            run_kvloom, "drain", shard_id, "--deadline-seconds", "0.3", env=fabric.env, timeout_seconds=60
        )
        assert (done.returncode, done.stdout) == (0, f"{shard_id} is drained\n"), done.stderr
        assert "running" in done.stderr
        for stream in streams:
            stream.has_continued.clear()
        async with asyncio.timeout(30):
            await asyncio.gather(*(stream.has_continued.wait() for stream in streams))
        assert not reading.done()
        await give_up(reading)
        for stream in streams:
            stream.check_begun()
        streams, reading = await begin(client, NUM_TOKENS_OF_A_CHECK)
        assert shard_id not in {stream.shard_id for stream in streams}
        await reading
        done = await asyncio.to_thread(run_kvloom, "undrain", shard_id, env=fabric.env, timeout_seconds=60)
        assert (done.returncode, done.stdout) == (0, f"{shard_id} takes requests again\n"), done.stderr
        streams, reading = await begin(client, NUM_TOKENS_OF_A_CHECK)
        assert shard_id in {stream.shard_id for stream in streams}
        await reading


async def test_a_shard_that_is_terminated_hands_back_what_runs(fabric: RunningFabric) -> None:
    """SIGTERM: what has not ended within its `drain_timeout_seconds` continues on other shards, and nothing is lost."""
    async with asyncio.timeout(90), Client(fabric.router_address) as client:
        streams, reading = await begin(client)
        os.kill(pid_of(fabric, streams[0].shard_id), signal.SIGTERM)
        await reading
        for stream in streams:
            stream.check()


def test_an_unknown_shard_is_named_with_those_there_are(fabric: RunningFabric) -> None:
    """A typo must not look like success."""
    done = run_kvloom("drain", "shard-9", env=fabric.env)
    assert done.returncode == 1
    assert done.stderr == "error: there is no shard 'shard-9'; there are: shard-0, shard-1, shard-2\n"
