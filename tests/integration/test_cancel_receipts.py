"""The cost of a cancelled request, in tokens that are generated but not delivered: at most two engine steps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvloom.v1.generation_pb2 import SamplingParams, StopConditions
from kvloom.v1.router_service_pb2 import CancelRequest, GenerateRequest, TokenIds
from kvloom.v1.router_service_pb2_grpc import RouterServiceStub
from kvloom_common.config import ShardConfig, SimConfig, SpeculationConfig, TorchConfig
from kvloom_common.text.tokenizer import ModelTokenizer
from shard_server.engines.base import Engine
from shard_server.engines.sim_engine import SimEngine
from shard_server.engines.torch_engine.engine import TorchEngine
from tests.fakes.failover_world import MODEL, Collected, FailoverWorld, failover_world
from tests.waiting import eventually

pytest_plugins = ("tests.fakes.router_fixtures",)

PROMPT = [1000, 1001, 1002, 1000, 1001, 1002, 1000, 1001]
MAX_TOKENS = 400
STEP_SECONDS = 0.04
"""The least time of a step of the torch engine, so that a cancel arrives within two of them on busy cores."""
NUM_DRAFTS = {"sim": 0, "torch": 0, "torch with speculation": 3}


@pytest.fixture(params=["sim", pytest.param("torch", marks=pytest.mark.long), "torch with speculation"])
async def world(
    request: pytest.FixtureRequest,
    router_redis_url: str,
    tokenizer: ModelTokenizer,
    model_dir: Path,
    load_runner: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[FailoverWorld]:
    def load_slow_runner(*args: Any, **options: Any) -> Any:
        runner = load_runner(*args, **options)
        run = runner.run

        def run_slowly(batch: Any) -> Any:
            time.sleep(STEP_SECONDS)  # sleep: what a step takes
            return run(batch)

        monkeypatch.setattr(runner, "run", run_slowly)
        return runner

    torch = TorchConfig(num_threads=1, speculation=SpeculationConfig(max_draft_tokens=NUM_DRAFTS[request.param]))
    config = ShardConfig(sim=SimConfig(step_ms=80.0), num_blocks=512, torch=torch)
    engine: Engine
    if request.param == "sim":
        engine = SimEngine(MODEL, config, tokenizer.vocab_size)
    else:
        engine = TorchEngine(model_dir, MODEL, config, load_runner=load_slow_runner)
    async with failover_world(router_redis_url, tokenizer) as started:
        await started.start_router()
        await started.add_shard("shard-0", engine, config)
        await started.wait_for_shards(started.link, 1)
        yield started


def per_cancel(world: FailoverWorld, part: str, **labels: str) -> float:
    return world.members["shard-0"].metric(f"kvloom_shard_wasted_tokens_per_cancel_{part}", **labels)


async def check_receipts(world: FailoverWorld, num_cancelled: int, max_step_tokens: int) -> None:
    """Asserts that each cancel cost at most two steps, and that all generated tokens were metered or counted as
    wasted."""
    await eventually(lambda: per_cancel(world, "count") == num_cancelled, "the receipts")
    limit = {1: "2.0", 4: "8.0"}[max_step_tokens]
    assert per_cancel(world, "bucket", le=limit) == num_cancelled, per_cancel(world, "sum")
    shard = world.members["shard-0"]
    wasted = shard.metric("kvloom_shard_wasted_tokens_total")
    assert wasted == per_cancel(world, "sum")
    generated = shard.metric("vllm:generation_tokens_total") + shard.metric("kvloom_shard_discarded_tokens_total")
    assert generated - world.metered()["output_tokens"] == wasted


def max_step_tokens(request: pytest.FixtureRequest) -> int:
    return 1 + NUM_DRAFTS[request.node.callspec.params["world"]]


async def test_an_edge_cancels(world: FailoverWorld, request: pytest.FixtureRequest) -> None:
    """When an HTTP client disconnects the edge's link cancels its request, while others continue."""
    staying = world.begin(PROMPT, 30, sampling=SamplingParams(seed=9))
    for number in range(4):
        answer = Collected(2)
        handle = world.submit(
            [*PROMPT, number], MAX_TOKENS, answer, n=2, sampling=SamplingParams(seed=number), stop={"ignore_eos": True}
        )
        await answer.has_tokens(3 + number)
        world.link.cancel(handle)
    await staying.ended()
    await check_receipts(world, 8, max_step_tokens(request))


async def test_grpc_clients_cancel(world: FailoverWorld, request: pytest.FixtureRequest) -> None:
    """A client either cancels its Generate RPC or calls Cancel for a running request."""
    async with grpc.aio.insecure_channel(world.address) as channel:
        stub = RouterServiceStub(channel)
        for number, by_name in enumerate((False, True, False, True)):
            wanted = GenerateRequest(
                model=MODEL,
                token_ids=TokenIds(ids=[*PROMPT, number]),
                stop=StopConditions(max_tokens=MAX_TOKENS, ignore_eos=True),
                request_id=f"request-{number}",
            )
            call = stub.Generate(wanted)
            async with asyncio.timeout(30):
                for _ in range(3):
                    assert await call.read() is not grpc.aio.EOF
                if by_name:
                    assert (await stub.Cancel(CancelRequest(request_id=f"request-{number}"))).found
                    while await call.read() is not grpc.aio.EOF:
                        pass
                else:
                    call.cancel()
    await check_receipts(world, 4, max_step_tokens(request))


async def test_a_cancel_before_the_first_token_is_free(world: FailoverWorld, request: pytest.FixtureRequest) -> None:
    """A client that leaves during the prefill costs no more than the current step."""
    for number in range(3):
        handle = world.submit([*PROMPT * 20, number], MAX_TOKENS, Collected(1), sampling=SamplingParams(seed=1))
        await eventually(lambda n=number: world.members["shard-0"].engine.num_submitted == n + 1, "its arrival")
        world.link.cancel(handle)
    await check_receipts(world, 3, max_step_tokens(request))
