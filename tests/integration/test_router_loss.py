"""Router processes die, restart and drain while 20 answers of every kind run, and no client sees a difference."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvloom.errors import reason_name
from kvloom.router_link.group import RouterGroup
from kvloom.router_link.link import LinkRequest
from kvloom.transport import local_stream
from kvloom.v1.generation_pb2 import FINISH_REASON_ERROR, FINISH_REASON_STOP, SamplingParams, StopConditions
from lab.chaos.checking.metering import parse_usage_record
from tests.fakes.link_requests import link_request
from tests.fakes.router_processes import MODEL, RouterProcesses, ready_routers, router_processes
from tests.fakes.router_world import Answer
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(120)

NUM_REQUESTS = 20
NUM_TOKENS = 50
KINDS = (
    SamplingParams(temperature=0.0, seed=1),
    SamplingParams(seed=7),
    SamplingParams(seed=8, logprobs=2),
    SamplingParams(temperature=0.7, seed=2**63 + 1),
)


@dataclasses.dataclass
class Question:
    sampling: SamplingParams
    prompt: list[int]
    n: int
    stop: tuple[str, ...] = ()

    def request(self, name: str, timeout_seconds: float = 60.0) -> LinkRequest:
        conditions = StopConditions(max_tokens=NUM_TOKENS, stop=self.stop)
        return link_request(name, MODEL, self.prompt, "", self.sampling, conditions, self.n, timeout_seconds)


def questions() -> list[Question]:
    return [Question(KINDS[i % 4], [10 + i, *range(20, 50)], 2 if i % 3 == 0 else 1) for i in range(NUM_REQUESTS)]


def submit_all(link: RouterGroup, asked: list[Question], prefix: str) -> list[Answer]:
    answers = [Answer(question.n) for question in asked]
    for i, (question, answer) in enumerate(zip(asked, answers, strict=True)):
        link.submit(question.request(f"{prefix}-{i}"), answer)
    return answers


async def all_done(answers: list[Answer]) -> None:
    await eventually(lambda: all(answer.done for answer in answers), "all ends", timeout_seconds=40.0)


async def first_tokens(answers: list[Answer]) -> None:
    await eventually(lambda: all(len(answer.token_ids[0]) >= 5 or answer.done for answer in answers), "first tokens")


Known = list[tuple[list[Question], list[Answer]]]


@pytest.fixture(scope="module")
def known() -> Known:
    """What `undisturbed` has returned once: shards answer the same questions alike in every test."""
    return []


async def undisturbed(link: RouterGroup, known: Known) -> tuple[list[Question], list[Answer]]:
    """Returns questions of every kind, some with a stop string in the middle of the answer, and their answers."""
    if known:
        return known[0]
    asked = questions()
    answers = submit_all(link, asked, "first")
    await all_done(answers)
    for question, answer in zip(asked[1::5], answers[1::5], strict=True):
        text = answer.texts[0]
        question.stop = (text[len(text) * 3 // 4 :][:3],)
    answers = submit_all(link, asked, "undisturbed")
    await all_done(answers)
    assert any(answer.finish.stop_string for answer in answers)
    assert any("\ufffd" in answer.texts[0] or not answer.texts[0].isascii() for answer in answers)
    known.append((asked, answers))
    return asked, answers


def assert_same(answers: list[Answer], expected: list[Answer]) -> None:
    for got, wanted in zip(answers, expected, strict=True):
        assert got.token_ids == wanted.token_ids
        assert got.texts == wanted.texts
        assert got.logprobs == wanted.logprobs
        for index, finish in enumerate(wanted.finishes):
            end, start = got.finishes[index], got.starts[index]
            assert end is not None
            assert finish is not None
            assert start is not None
            assert (end.reason, end.stop_string) == (finish.reason, finish.stop_string)
            assert end.num_prompt_tokens == finish.num_prompt_tokens
            assert end.num_output_tokens == finish.num_output_tokens
            assert end.num_cached_tokens == start.num_cached_tokens


@pytest.fixture
async def world(tmp_path: Path, redis_url: str) -> AsyncIterator[RouterProcesses]:
    async with router_processes(tmp_path, redis_url) as started:
        yield started


async def test_kill_of_one_router_of_two(world: RouterProcesses, known: Known) -> None:
    """After kill -9 of one router its answers continue at the other one, with the same tokens, text, logprobs, finishes
    and counts."""
    routers = await asyncio.gather(world.start_router("router-0"), world.start_router("router-1"))
    link = await world.link(2)
    asked, expected = await undisturbed(link, known)
    answers = submit_all(link, asked, "killed")
    await first_tokens(answers)
    await routers[0].kill()
    await all_done(answers)
    assert_same(answers, expected)
    assert 0 < link.num_reattached <= NUM_REQUESTS
    assert link.num_given_up == 0


async def test_kill_and_restart_of_the_only_router(world: RouterProcesses, known: Known) -> None:
    """Without another router, answers wait until the router is back at its address."""
    router = await world.start_router("router-0")
    link = await world.link(1)
    asked, expected = await undisturbed(link, known)
    answers = submit_all(link, asked, "restarted")
    await first_tokens(answers)
    await router.kill()
    await world.start_router("router-0", router.port)
    await all_done(answers)
    assert_same(answers, expected)
    assert link.num_reattached >= NUM_REQUESTS // 2


@pytest.mark.parametrize("drain_timeout_seconds", [pytest.param(30.0, marks=pytest.mark.long), 0.2])
async def test_a_router_is_stopped_under_load(
    world: RouterProcesses, known: Known, drain_timeout_seconds: float
) -> None:
    """On SIGTERM, with and without time to finish its answers, a router ends cleanly and no answer is affected."""
    world.config.fabric.drain_timeout_seconds = drain_timeout_seconds
    routers = await asyncio.gather(world.start_router("router-0"), world.start_router("router-1"))
    link = await world.link(2)
    asked, expected = await undisturbed(link, known)
    answers = submit_all(link, asked, "stopped")
    await first_tokens(answers)
    routers[0].send(signal.SIGTERM)
    more = submit_all(link, asked, "meanwhile")
    await all_done([*answers, *more])
    assert_same(answers, expected)
    assert_same(more, expected)
    status, errors = await routers[0].wait()
    assert status == 0, errors
    assert "Traceback" not in errors
    # With enough time, only requests that were on their way when the drain began are served elsewhere.
    assert link.num_given_up == 0


async def test_a_router_that_hangs_is_abandoned_and_used_again(
    world: RouterProcesses, known: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After SIGSTOP the router's connection is open and silent. When it wakes up it cancels the requests that others
    have taken over."""
    monkeypatch.setattr(local_stream, "PING_AFTER_SECONDS", 1.0)
    monkeypatch.setattr(local_stream, "PING_TIMEOUT_SECONDS", 0.5)
    routers = await asyncio.gather(world.start_router("router-0"), world.start_router("router-1"))
    link = await world.link(2)
    asked, expected = await undisturbed(link, known)
    answers = submit_all(link, asked, "hung")
    await first_tokens(answers)
    routers[0].send(signal.SIGSTOP)
    await all_done(answers)
    assert_same(answers, expected)
    assert link.num_reattached > 0
    routers[0].send(signal.SIGCONT)
    await eventually(lambda: len(ready_routers(link)) == 2, "the router's return")
    more = submit_all(link, asked, "hung")  # The ids are free again at both routers.
    await all_done(more)
    assert_same(more, expected)


@pytest.mark.long
async def test_tokens_that_a_hung_router_metered_in_vain_are_credited(
    world: RouterProcesses, known: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the router wakes up it processes its shards' frames before it learns that its clients have left. With
    several hangs some of these frames end requests. The usage of both routers together is what was delivered."""
    monkeypatch.setattr(local_stream, "PING_AFTER_SECONDS", 0.6)
    monkeypatch.setattr(local_stream, "PING_TIMEOUT_SECONDS", 0.4)
    world.config.log.format = "json"
    routers = await asyncio.gather(world.start_router("router-0"), world.start_router("router-1"))
    link = await world.link(2)
    asked, expected = await undisturbed(link, known)
    delivered: dict[str, Answer] = {}
    for i, router in enumerate([routers[0], routers[1], routers[0]]):
        answers = submit_all(link, asked, f"hung{i}")
        await first_tokens(answers)
        router.send(signal.SIGSTOP)
        await all_done(answers)
        assert_same(answers, expected)
        router.send(signal.SIGCONT)
        await eventually(lambda: len(ready_routers(link)) == 2, "the router's return")
        delivered |= {f"hung{i}-{number}": answer for number, answer in enumerate(answers)}
    for router in routers:
        router.send(signal.SIGTERM)
    usage: dict[str, int] = {}
    num_credited = 0
    for router in routers:
        _, log = await router.wait()
        for record in filter(None, map(parse_usage_record, log.encode().splitlines())):
            num_tokens = record.num_output_tokens - record.num_credited_tokens
            usage[record.request_id] = usage.get(record.request_id, 0) + num_tokens
            num_credited += record.num_credited_tokens
    for name, answer in delivered.items():
        assert usage[name] == sum(map(len, answer.token_ids)), name
    assert num_credited, "no tokens were lost on their way, so the test shows nothing"


async def test_all_routers_dead_is_an_error_within_the_bound(world: RouterProcesses) -> None:
    """No client waits longer than configured, and delivered tokens are counted once."""
    world.config.edge.reattach_seconds = 1.0
    routers = await asyncio.gather(world.start_router("router-0"), world.start_router("router-1"))
    link = await world.link(2)
    answers = submit_all(link, questions(), "orphans")
    await first_tokens(answers)
    killed_at = asyncio.get_running_loop().time()
    await asyncio.gather(*(router.kill() for router in routers))
    await all_done(answers)
    assert asyncio.get_running_loop().time() - killed_at < 8.0
    for answer in answers:
        for index, finish in enumerate(answer.finishes):
            assert finish is not None
            if finish.reason == FINISH_REASON_ERROR:
                assert reason_name(finish.error.reason) == "ROUTER_LOST"
            else:
                assert finish.reason == FINISH_REASON_STOP
            assert finish.num_output_tokens == len(answer.token_ids[index])
    assert any(answer.finish.reason == FINISH_REASON_ERROR for answer in answers)
