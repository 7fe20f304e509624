"""Brownout over real sockets: an edge, a router and a simulated shard that is slow for a while
(docs/operate/brownout.md)."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from typing import Any

import pytest
from rich.console import Console

from kvloom.client.client import Client
from kvloom_common.config import BrownoutStepConfig, KvloomConfig
from kvloom_common.text.tokenizer import ModelTokenizer
from kvloom_common.trust.fabric_trust import NO_SECRET
from router.core.rule_settings import BrownoutSettings
from tests.fakes.embedding_world import EmbeddingWorld, embedding_world, sim_engine
from tests.fakes.failover_world import MODEL
from tests.waiting import eventually
from tools.cli.explain import print_explanation, print_plan
from tools.supervisor.readiness import brownouts
from tools.supervisor.supervised_process import ProcessState, ProcessStatus

pytest_plugins = ("tests.fakes.router_fixtures",)

CHAT = {"messages": [{"role": "user", "content": "the quick fox"}], "temperature": 0, "max_tokens": 12}
HEADER = "x-kvloom-brownout"


def _enable(config: KvloomConfig) -> None:
    """A first token always takes longer than this objective, until a test makes it generous."""
    config.router.brownout = BrownoutSettings(
        enabled=True,
        ttft_slo_seconds=1e-9,
        fast_window_seconds=0.2,
        slow_window_seconds=0.3,
        min_step_seconds=0.2,
        hold_seconds=0.8,
        min_requests=1,
        steps=[
            BrownoutStepConfig(max_tokens=5, no_speculation=True),
            BrownoutStepConfig(shed=["batch"], max_choices=1, max_tokens=3),
        ],
    )


@pytest.fixture
async def world(router_redis_url: str, tokenizer: ModelTokenizer) -> AsyncIterator[EmbeddingWorld]:
    async with embedding_world(router_redis_url, tokenizer, sim_engine(), configure=_enable) as started:
        yield started


async def ask(world: EmbeddingWorld, **body: Any) -> tuple[int, dict[str, str], Any]:
    url = world.url + "/v1/chat/completions"
    async with world.http.post(url, json={"model": MODEL, **CHAT, **body}) as response:
        return response.status, dict(response.headers), await response.json()


def step_of(world: EmbeddingWorld) -> int:
    return world.fabric.link.fleet.models[0].brownout_step


async def climb(world: EmbeddingWorld, step: int) -> None:
    async with asyncio.timeout(20):
        while step_of(world) < step:
            await ask(world)


async def test_answers_are_capped_refused_and_whole_again(world: EmbeddingWorld) -> None:
    """One fabric goes up its ladder and down: whole answers, capped ones that say so, a refused tier and a refused n,
    and whole answers again when the load is over, without a restart."""
    status, headers, body = await ask(world)
    assert (status, headers.get(HEADER)) == (200, None)
    assert body["usage"]["completion_tokens"] == 12

    await climb(world, 1)
    status, headers, body = await ask(world)
    assert (status, body["choices"][0]["finish_reason"]) == (200, "length")
    assert headers[HEADER] in ("1; max_tokens=5; no_speculation", "2; max_tokens=3; no_speculation")
    assert body["usage"]["completion_tokens"] == (5 if headers[HEADER][0] == "1" else 3)

    await climb(world, 2)
    status, headers, body = await ask(world, service_tier="flex")
    assert (status, body["error"]["code"]) == (429, "brownout")
    assert int(headers["Retry-After"]) >= 1
    status, _, body = await ask(world, n=2)
    assert (status, body["error"]["code"]) == (429, "brownout")
    assert "n may be at most 1" in body["error"]["message"]
    async with world.http.post(
        world.url + "/v1/chat/completions", json={"model": MODEL, **CHAT, "stream": True}
    ) as response:
        assert response.headers[HEADER] == "2; max_tokens=3; no_speculation"
        await response.read()
    async with Client(world.fabric.address) as client:
        answer = await client.complete(text="the quick fox", model=MODEL, max_tokens=12)
        assert answer.brownout == "2; max_tokens=3; no_speculation"
        assert answer.num_output_tokens == 3
        plan = await client.plan(text="the quick fox", model=MODEL, max_tokens=12)
        assert plan.brownout == "2; max_tokens=3; no_speculation"
        explained = await client.explain(answer.request_id)
        console = Console(file=io.StringIO(), width=200)
        print_plan(plan, console)
        print_explanation(explained, console)
        shown = console.file.getvalue()
        assert "would be degraded (brownout step 2; max_tokens=3; no_speculation)" in shown
        assert "is degraded (brownout step 2; max_tokens=3; no_speculation)" in shown

    router = ProcessStatus("router", "router-0", 1, ProcessState.READY, router_address=world.fabric.address)
    assert await brownouts([router], NO_SECRET) == [
        f"router-0 degrades answers of {MODEL}: it is overloaded (brownout step {step_of(world)})"
    ]

    await eventually(lambda: step_of(world) == 0, "the end of the brownout")
    world.fabric.config.router.brownout.ttft_slo_seconds = 60.0
    status, headers, body = await ask(world)
    assert (status, headers.get(HEADER), body["usage"]["completion_tokens"]) == (200, None, 12)
    counted = {
        sample.labels["effect"]: sample.value
        for family in world.fabric.metrics.collect()
        for sample in family.samples
        if sample.name == "kvloom_router_brownout_requests_total"
    }
    assert counted["shed"] == counted["max_choices"] == 1
    assert counted["max_tokens"] >= 2
