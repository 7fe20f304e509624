"""Usage records when no process dies, and only the connections between routers and their clients break."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvloom.router_link.group import RouterGroup
from kvloom.v1.generation_pb2 import SamplingParams, StopConditions
from lab.chaos.checking.metering import parse_usage_record
from tests.fakes.breaking_proxy import BreakingProxy
from tests.fakes.link_requests import link_request
from tests.fakes.router_processes import MODEL, RouterProcess, RouterProcesses, ready_routers, router_processes
from tests.fakes.router_world import Answer
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(120)

NUM_REQUESTS = 40
NUM_TOKENS = 60
NUM_BREAKS = 5


async def test_usage_records_add_up_when_only_connections_break(tmp_path: Path, redis_url: str) -> None:
    """Connections are reset repeatedly, and messages in transit are lost. For every request, the tokens that both
    routers metered, less the credits, are those that its sink received, and these are the undisturbed ones."""
    async with router_processes(tmp_path, redis_url) as world:
        world.config.log.format = "json"
        world.config.edge.reattach_seconds = 20.0
        routers = await asyncio.gather(world.start_router("router-0"), world.start_router("router-1"))
        await world.link(2)
        proxies = [BreakingProxy(router.address) for router in routers]
        group = RouterGroup("usage", [await proxy.start() for proxy in proxies], reattach_seconds=20.0)
        await group.start()
        await eventually(lambda: len(ready_routers(group)) == 2, "both routers")
        expected = await _ask(world, group, "undisturbed", [])
        got = await _ask(world, group, "broken", proxies)
        assert [answer.token_ids for answer in got] == [answer.token_ids for answer in expected]
        assert [answer.texts for answer in got] == [answer.texts for answer in expected]
        assert group.num_reattached >= NUM_REQUESTS
        # The hello of the next connection reports the losses. It has arrived when the routers are ready.
        await eventually(lambda: len(ready_routers(group)) == 2, "both routers again")
        await group.close()
        for proxy in proxies:
            await proxy.stop()
        await _assert_metered(routers, broken=got)


async def test_usage_records_add_up_at_an_address_that_routers_share(tmp_path: Path, redis_url: str) -> None:
    """A router hangs, and its client only knows the address that all routers share. Its next connection reaches another
    router, and the hung one, once it continues, still gets the number of tokens that had arrived."""
    async with router_processes(tmp_path, redis_url) as world:
        world.config.log.format = "json"
        hung, other = await asyncio.gather(world.start_router("router-0"), world.start_router("router-1"))
        await world.link(2)
        shared = BreakingProxy(hung.address)
        group = RouterGroup("usage", [await shared.start()], reattach_seconds=20.0)
        await group.start()
        await eventually(lambda: ready_routers(group), "the router")
        answers = _submit(group, "hung")
        await eventually(lambda: all(answer.token_ids[0] for answer in answers), "first tokens", 20.0)
        shared.freeze(True)
        await world.decoded(10)  # tokens are metered, and on their way
        hung.send(signal.SIGSTOP)
        shared.redirect(other.address)
        shared.reset()
        await eventually(lambda: all(answer.done for answer in answers), "all ends", 60.0)
        assert all(len(ids) == NUM_TOKENS for answer in answers for ids in answer.token_ids)
        assert group.num_reattached == NUM_REQUESTS
        assert group._cancel_notifier.num_waiting == NUM_REQUESTS
        hung.send(signal.SIGCONT)
        await eventually(lambda: not group._cancel_notifier.num_waiting, "the settlements", 20.0)
        # If its next connection reaches the lost router, the same names are different requests.
        again = _submit(group, "again")
        await eventually(lambda: all(answer.token_ids[0] for answer in again), "first tokens", 20.0)
        shared.reset()
        await eventually(lambda: all(answer.done for answer in again), "all ends", 60.0)
        await group.close()
        await shared.stop()
        await _assert_metered([hung, other], hung=answers, again=again)


async def _assert_metered(routers: Sequence[RouterProcess], **answers: Sequence[Answer]) -> None:
    """The metered tokens from the logs of all routers, which end; `answers` by the prefix of their requests' names."""
    metered: dict[str, int] = {}
    num_credited = 0
    for router in routers:
        router.send(signal.SIGTERM)
        _, log = await router.wait()
        for record in filter(None, map(parse_usage_record, log.encode().splitlines())):
            tokens = record.num_output_tokens - record.num_credited_tokens
            metered[record.request_id] = metered.get(record.request_id, 0) + tokens
            num_credited += record.num_credited_tokens
    for prefix, some in answers.items():
        for i, answer in enumerate(some):
            assert metered[f"{prefix}-{i}"] == sum(map(len, answer.token_ids)), (prefix, i)
    assert num_credited, "nothing was lost on its way: the test shows nothing"


def _submit(group: RouterGroup, prefix: str) -> list[Answer]:
    answers = [Answer(1 + i % 2) for i in range(NUM_REQUESTS)]
    for i, answer in enumerate(answers):
        stop = StopConditions(max_tokens=NUM_TOKENS)
        prompt = [10 + i, *range(20, 40)]
        request = link_request(f"{prefix}-{i}", MODEL, prompt, "", SamplingParams(seed=i), stop, 1 + i % 2, 90.0)
        group.submit(request, answer)
    return answers


async def _ask(world: RouterProcesses, group: RouterGroup, prefix: str, proxies: list[BreakingProxy]) -> list[Answer]:
    rng = random.Random(7)
    answers = _submit(group, prefix)
    if proxies:
        await eventually(lambda: all(answer.token_ids[0] for answer in answers), "first tokens", 20.0)
    for number in range(NUM_BREAKS if proxies else 0):
        proxy = proxies[number % 2]
        proxy.freeze(True)
        await world.decoded(rng.randint(3, 8))  # tokens are metered, and on their way
        proxy.reset()
        await eventually(lambda: len(ready_routers(group)) == 2, "the connection's return", 20.0)
    await eventually(lambda: all(answer.done for answer in answers), "all ends", 60.0)
    return answers
