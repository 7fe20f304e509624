"""Two cells, each a real router with a simulated shard, and an edge's link to both: the other cell is 20 ms away."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_http.cells import known_cells, other_cells
from edge_http.cells.other_cells import OtherCells
from edge_http.metrics import EdgeMetrics
from kvloom.client.client import Client
from kvloom.errors import KvloomError
from kvloom.router_link.group import RouterGroup
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import SamplingParams, StopConditions
from kvloom_common.access.tenants import Tenants
from kvloom_common.config import CellConfig, ConfigError, KvloomConfig, ShardConfig, SimConfig
from kvloom_common.tenancy.table import Organisation, Tenant
from kvloom_common.text.tokenizer import ModelTokenizer
from shard_server.engines.sim_engine import SimEngine
from tests.fakes.breaking_proxy import BreakingProxy
from tests.fakes.failover_world import MODEL, Collected, FailoverWorld, failover_world
from tests.fakes.link_requests import link_request
from tests.fakes.tenants import table_of
from tests.waiting import eventually

pytest_plugins = ("tests.fakes.router_fixtures",)

DELAY_SECONDS = 0.01
"""To the other cell, one way."""
PREFILL_TOKENS_PER_SECOND = 2000.0
RESIDENT = "acme/eu"
"""A tenant whose requests must be computed in the own cell."""
MAX_TOKENS = 40


@dataclasses.dataclass
class Cell:
    world: FailoverWorld
    proxy: BreakingProxy

    async def lose(self) -> None:
        """Nothing of the cell can be reached any more."""
        self.proxy.refuse(True)
        self.proxy.reset()


@dataclasses.dataclass
class Cells:
    own: Cell
    east: Cell
    group: RouterGroup
    cells: OtherCells
    metrics: EdgeMetrics
    num_asked: int = 0

    def begin(self, first_token: int, num_prompt: int = 40, tenant: str = "acme/web", max_tokens: int = 1) -> Collected:
        answer = Collected(1)
        self.num_asked += 1
        prompt = [first_token, *range(20, 19 + num_prompt)]
        stop = StopConditions(max_tokens=max_tokens)
        sampling = SamplingParams(seed=5)
        name = f"r{self.num_asked}"
        self.group.submit(link_request(name, MODEL, prompt, "", sampling, stop, tenant=tenant), answer)
        return answer

    def num_sent(self, cell: str) -> float:
        return self.metrics.registry.get_sample_value("kvloom_edge_cell_requests_total", {"cell": cell}) or 0.0


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Iterator[ModelTokenizer]:
    loaded = ModelTokenizer.load(model_dir)
    yield loaded
    loaded.close()


def residents() -> Tenants:
    tenants = Tenants(60.0)
    projects = [Tenant("acme/web"), Tenant(RESIDENT, residency=("own",)), Tenant("acme/none", residency=("mars",))]
    tenants.use(table_of([Organisation("acme", residency=("own", "east")), *projects]), 0.0)
    return tenants


@pytest.fixture
async def cells(router_redis_url: str, tokenizer: ModelTokenizer) -> AsyncIterator[Cells]:
    async with contextlib.AsyncExitStack() as cleanup:
        found: list[Cell] = []
        for delay_seconds in (0.0, DELAY_SECONDS):
            world = await cleanup.enter_async_context(failover_world(router_redis_url, tokenizer))
            await world.start_router()
            config = ShardConfig(
                engine="sim", sim=SimConfig(step_ms=2.0, prefill_tokens_per_second=PREFILL_TOKENS_PER_SECOND)
            )
            await world.add_shard("shard-0", SimEngine(MODEL, config, tokenizer.vocab_size), config)
            proxy = BreakingProxy(world.address)
            proxy.delay_seconds = delay_seconds
            await proxy.start()
            cleanup.push_async_callback(proxy.stop)
            found.append(Cell(world, proxy))
        own, east = found
        config = KvloomConfig()
        config.fabric.cell = "own"
        config.edge.cells = [CellConfig(name="east", routers=[east.proxy.address])]
        group = RouterGroup("edge", [own.proxy.address], reattach_seconds=0.5)
        metrics = EdgeMetrics(lambda: 0.0, lambda: True)
        others = OtherCells(config, group, metrics, residents().residency)
        others.set_routers("east", {east.proxy.address: ""})
        cleanup.push_async_callback(group.close)
        await group.start()
        await eventually(
            lambda: sum(MODEL in member.ready_models for member in group._members.available) == 2, "both cells"
        )
        await others.ask()
        yield Cells(own, east, group, others, metrics)


async def test_a_queue_sends_new_requests_and_no_short_conversation_to_the_other_cell(cells: Cells) -> None:
    """The other cell is worth its distance only if the wait here is longer. What the other cell would have to compute
    again counts as distance."""
    first = cells.begin(1)
    await first.has_tokens(1)
    assert (cells.num_sent("own"), cells.num_sent("east")) == (1.0, 0.0)
    long = cells.begin(2, num_prompt=1100)
    await eventually(lambda: cells.own.world.server._core._lifecycle.requests, "the long prompt's arrival")
    await cells.cells.ask()
    new = cells.begin(4)
    assert cells.num_sent("east") == 1.0
    again = cells.begin(2, num_prompt=1200)
    assert cells.num_sent("east") == 1.0
    for answer in (long, new, again):
        assert not (await answer.ended())[0].error_reason
    round_trip = cells.metrics.registry.get_sample_value("kvloom_edge_cell_round_trip_seconds", {"cell": "east"})
    assert round_trip is not None
    assert round_trip >= 2 * DELAY_SECONDS


async def test_the_streams_of_a_lost_cell_go_on_in_the_other_and_those_of_residents_do_not(cells: Cells) -> None:
    """What was delivered stays, and what follows is the same; a resident tenant's answers end rather than move, and its
    new requests are refused with the reason."""
    expected = cells.begin(1, max_tokens=MAX_TOKENS)
    whole = await expected.ended()
    moving = [cells.begin(1, max_tokens=MAX_TOKENS) for _ in range(4)]
    staying = cells.begin(1, tenant=RESIDENT, max_tokens=MAX_TOKENS)
    for answer in (*moving, staying):
        await answer.has_tokens(3)
    await cells.own.lose()
    for answer in moving:
        assert await answer.ended() == whole
    (ended,) = await staying.ended()
    assert ended.error_reason == ErrorReason.ERROR_REASON_CELL_UNAVAILABLE
    assert 3 <= len(ended.token_ids) < MAX_TOKENS
    assert cells.num_sent("east") == len(moving)
    for tenant, names in ((RESIDENT, "own"), ("acme/none", "there is none")):
        with pytest.raises(KvloomError, match=names) as refused:
            cells.begin(1, tenant=tenant)
        assert refused.value.reason == ErrorReason.ERROR_REASON_CELL_UNAVAILABLE
    assert not (await cells.begin(9).ended())[0].error_reason
    assert cells.num_sent("east") == len(moving) + 1


@pytest.mark.parametrize("kind", ["token_ids", "text", "resumable"])
async def test_the_answers_of_the_sdk_go_on_in_the_other_cell(cells: Cells, kind: str) -> None:
    """A program without an edge promises its users as much: it notices a pause, and what follows is the same."""
    prompt: Any = {"token_ids": [1, *range(20, 59)]} if kind == "token_ids" else {"text": "one two three"}
    options = {"model": MODEL, "max_tokens": MAX_TOKENS, "resumable": kind == "resumable", "seed": 3, **prompt}
    async with Client(cells.own.proxy.address, other_cells=cells.east.proxy.address) as client:
        whole = await client.complete(**options)
        answer = client.generate(**options)
        deltas = [await anext(answer) for _ in range(3)]
        await cells.own.lose()
        deltas += [delta async for delta in answer]
        assert "".join(delta.text for delta in deltas) == whole.text
        assert sum(len(delta.token_ids) for delta in deltas) == whole.num_output_tokens == MAX_TOKENS
        assert (await client.complete(**options)).text == whole.text


async def test_a_cell_that_does_not_answer_is_asked_last(cells: Cells, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of it any more, so that it may be as good as lost; when it answers again it is as before."""
    monkeypatch.setattr(other_cells, "ANSWER_SECONDS", 0.05)
    monkeypatch.setattr(known_cells, "FRESH_SECONDS", 0.0)
    cells.own.proxy.freeze(True)
    await cells.cells.ask()
    request = link_request("r", MODEL, [1], "", SamplingParams(), StopConditions(), tenant="acme/web")
    assert cells.cells.order(request) == ["own", "east"]
    monkeypatch.setattr(known_cells, "FRESH_SECONDS", 60.0)
    cells.own.proxy.freeze(False)
    await cells.cells.ask()
    assert cells.cells.order(request)[0] == "own"


async def test_cells_need_names_of_their_own() -> None:
    """Residency names cells, so that the own one must be told from the others."""
    config = KvloomConfig()
    config.edge.cells = [CellConfig(name="east", routers=["gpu1:1"])]
    for own in ("", "east"):
        config.fabric.cell = own
        with pytest.raises(ConfigError, match=r"fabric\.cell"):
            OtherCells(config, RouterGroup("edge"), EdgeMetrics(lambda: 0.0, lambda: True))
