"""Incidents of a running fabric: a real router with a planted bug, real shards, links that break, clients that leave.
Each bug is reproduced from the router's bundle by one command, which names the first decision that the bug has changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner

from kvloom.v1.generation_pb2 import SamplingParams
from kvloom.v1.shard_service_pb2 import DrainRequest
from kvloom.v1.shard_service_pb2_grpc import ShardServiceStub
from kvloom_common.config import ShardConfig, SimConfig
from kvloom_common.text.tokenizer import ModelTokenizer
from lab.dst.command import dst
from lab.dst.replay import read_bundle, replay
from shard_server.engines.sim_engine import SimEngine
from tests.fakes.failover_world import MODEL, Collected, FailoverWorld, failover_world
from tests.fakes.link_requests import link_request
from tests.lab.dst.planted_bugs import PLANTED_BUGS, PlantedBug
from tests.waiting import eventually
from tools.cli.incident import capture

pytest_plugins = ("tests.fakes.router_fixtures",)

NUM_SHARDS = 3
NUM_REQUESTS = 96
MAX_OPEN = 16
"""More than the shards take at a time, however fast the machine is."""
SHORT_QUEUE, LONG_QUEUE = 8, 1024
SETTLE_SECONDS = 20.0
MAX_HOURS = 5
BUGS: dict[str, int] = {
    "counts_the_queue_before_it_grows": SHORT_QUEUE,
    "drops_the_seventh_token": SHORT_QUEUE,
    "forgets_how_long_requests_wait": SHORT_QUEUE,
    "has_no_patience_in_the_queue": SHORT_QUEUE,
    "reports_the_end_of_every_choice": SHORT_QUEUE,
    "restarts_from_the_prompt": SHORT_QUEUE,
    "sends_work_to_draining_shards": LONG_QUEUE,
    "prefers_one_tenant": LONG_QUEUE,
    "leaves_a_large_tenant_nothing": LONG_QUEUE,
    "serves_only_the_head_of_the_queue": SHORT_QUEUE,
    "stops_at_the_first_stalled_step": SHORT_QUEUE,
}
"""How many requests may wait in the router, by bug: some show where it is full, others where it is not."""


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Iterator[ModelTokenizer]:
    loaded = ModelTokenizer.load(model_dir)
    yield loaded
    loaded.close()


async def incident(redis_url: str, tokenizer: ModelTokenizer, folder: Path, max_queued: int) -> Path:
    """An hour in some seconds: returns the bundle. What the router answers meanwhile may be wrong, or nothing."""
    async with failover_world(redis_url, tokenizer) as world:
        world.config.router.records_incidents = True
        world.config.data_dir = str(folder)
        world.config.fabric.drain_timeout_seconds = 1.0
        world.config.router.max_queued_requests = max_queued
        await world.start_router()
        config = ShardConfig(engine="sim", max_batch=2, sim=SimConfig(step_ms=4.0, prefill_tokens_per_second=50_000.0))
        for number in range(NUM_SHARDS):
            await world.add_shard(f"shard-{number}", SimEngine(MODEL, config, tokenizer.vocab_size), config)
        await world.wait_for_shards(world.link, NUM_SHARDS)
        await use(world)
        world.stop.set()
        assert world.served is not None
        await asyncio.wait_for(asyncio.gather(world.served, return_exceptions=True), SETTLE_SECONDS)
    bundle = folder / "bundle"
    told = await asyncio.to_thread(
        CliRunner().invoke, capture, [str(bundle), "--router", "router-0", "--data-dir", str(folder)]
    )
    assert "events in" in told.output, told.output
    return bundle


async def use(world: FailoverWorld) -> None:
    rng = random.Random(3)
    other = await world.connect("edge-1")
    members = list(world.members.values())
    answers: list[Collected] = []
    handles: list[int] = []
    num_cancelled = 0
    for number in range(NUM_REQUESTS):
        n = 2 if number % 6 == 0 else 1
        prompt = [number % 5, *range(20, 20 + rng.randint(10, 400))]
        sampling = SamplingParams(temperature=1.0, seed=number)
        fields = {"n": n, "sampling": sampling, "session_key": f"chat {number % 7}", "tenant": f"acme/{number % 3}"}
        if number % 4 == 3:
            fields["priority_class"] = "batch"
        answer = Collected(n)
        handle = world.submit(prompt, 20 + 10 * (number % 4), answer, **fields)
        answers.append(answer)
        handles.append(handle)
        if number % 4 == 3:
            world.link.cancel(handles[number - 2])
            answers.pop(number - 2 - num_cancelled)
            num_cancelled += 1
        if number % 9 == 4 and number < 60:
            request = link_request(f"o{number}", MODEL, prompt, "", sampling, session_key="other")
            other.submit(request, Collected(1))
        if number % 12 == 7:
            members[number % NUM_SHARDS].proxy.reset()
        if number in (32, 48):
            async with grpc.aio.insecure_channel(members[1].proxy.address) as channel:
                order = DrainRequest(draining=number == 32)
                if number == 32:
                    order.empty_within_seconds = 0.2
                await ShardServiceStub(channel).Drain(order)
        if number == 60:
            await other.close()
        if number == 72:
            members[2].proxy.refuse(True)
            members[2].proxy.reset()
        if number == 84:
            members[2].proxy.refuse(False)
        with contextlib.suppress(AssertionError):  # a bug may have lost some
            await eventually(lambda: sum(not one.done for one in answers[-MAX_OPEN:]) < MAX_OPEN, "an end", 0.5)
    with contextlib.suppress(AssertionError):  # by a bug
        await eventually(lambda: all(answer.done for answer in answers), "the answers' ends", 5.0)


@pytest.mark.parametrize("bug", [pytest.param(bug, id=bug.name) for bug in PLANTED_BUGS if bug.name in BUGS])
@pytest.mark.long
async def test_a_bug_of_a_running_router_is_reproduced(
    bug: PlantedBug,
    router_redis_url: str,
    tokenizer: ModelTokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the bug, the bundle leads to the same decisions; without it, the command ends with 1 and says where. Whether
    a bug strikes depends on when things happen, as in any fabric, so that it may take another hour."""
    for number in range(MAX_HOURS):
        folder = tmp_path / str(number)
        folder.mkdir()
        with monkeypatch.context() as patch:
            bug.plant(patch)
            bundle = await incident(router_redis_url, tokenizer, folder, BUGS[bug.name])
            assert replay(read_bundle(bundle)).difference is None
        told = await asyncio.to_thread(CliRunner().invoke, dst, ["--replay", str(bundle)])
        if told.exit_code:
            break
    assert told.exit_code == 1, told.output
    assert "the first decision that differs is at event" in told.output
