"""Bills when nothing dies and only connections between a client of routers and its routers break."""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path

import pytest

from kvloom.router_group import RouterGroup
from kvloom.router_link import LinkRequest
from kvloom.v1.generation_pb2 import SamplingParams, StopConditions
from tests.fakes.breaking_proxy import BreakingProxy
from tests.fakes.router_processes import MODEL, ready_routers, router_processes
from tests.fakes.router_world import Answer, eventually
from tools.chaos.ledger import parse_bill

pytestmark = pytest.mark.timeout(120)

NUM_REQUESTS = 40
NUM_TOKENS = 60
NUM_BREAKS = 5


async def test_bills_add_up_when_only_connections_break(tmp_path: Path, model_dir: Path, redis_url: str) -> None:
    """Reset again and again, with what was on its way lost: of every request the bills of both routers, less the
    credits, are the tokens that its sink heard of, and these are the undisturbed ones."""
    async with router_processes(tmp_path, model_dir, redis_url) as world:
        world.config.log.format = "json"
        world.config.edge.reattach_seconds = 20.0
        routers = await asyncio.gather(world.start_router("router-0"), world.start_router("router-1"))
        await world.link(2)
        proxies = [BreakingProxy(router.address) for router in routers]
        group = RouterGroup("bills", [await proxy.start() for proxy in proxies], reattach_seconds=20.0)
        await group.start()
        await eventually(lambda: len(ready_routers(group)) == 2, "both routers")
        expected = await _ask(group, "undisturbed", [])
        got = await _ask(group, "broken", proxies)
        assert [answer.token_ids for answer in got] == [answer.token_ids for answer in expected]
        assert [answer.texts for answer in got] == [answer.texts for answer in expected]
        assert group.num_reattached >= NUM_REQUESTS
        # What was lost is said in the hello of the next connection, which has come when the routers are ready.
        await eventually(lambda: len(ready_routers(group)) == 2, "both routers again")
        await group.close()
        for proxy in proxies:
            await proxy.stop()
        bills: dict[str, int] = {}
        num_credited = 0
        for router in routers:
            router.send(signal.SIGTERM)
            _, log = await router.wait()
            for bill in filter(None, map(parse_bill, log.encode().splitlines())):
                tokens = bill.num_output_tokens - bill.num_credited_tokens
                bills[bill.request_id] = bills.get(bill.request_id, 0) + tokens
                num_credited += bill.num_credited_tokens
    for i, answer in enumerate(got):
        assert bills[f"broken-{i}"] == sum(map(len, answer.token_ids)), i
    assert num_credited, "nothing was lost on its way: the test shows nothing"


async def _ask(group: RouterGroup, prefix: str, proxies: list[BreakingProxy]) -> list[Answer]:
    rng = random.Random(7)
    answers = [Answer(1 + i % 2) for i in range(NUM_REQUESTS)]
    for i, answer in enumerate(answers):
        stop = StopConditions(max_tokens=NUM_TOKENS)
        prompt = [10 + i, *range(20, 40)]
        request = LinkRequest(f"{prefix}-{i}", MODEL, prompt, "", SamplingParams(seed=i), stop, 1 + i % 2, 90.0)
        group.submit(request, answer)
    if proxies:
        await eventually(lambda: all(answer.token_ids[0] for answer in answers), "first tokens", 20.0)
    for number in range(NUM_BREAKS if proxies else 0):
        proxy = proxies[number % 2]
        proxy.freeze(True)
        await asyncio.sleep(rng.uniform(0.05, 0.15))  # tokens are metered, and on their way
        proxy.reset()
        await eventually(lambda: len(ready_routers(group)) == 2, "the connection's return", 20.0)
    await eventually(lambda: all(answer.done for answer in answers), "all ends", 60.0)
    return answers
