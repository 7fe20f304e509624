"""The SDK's `text`, `messages` and resumable answers while routers die, restart, hang and stop."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvloom.client import resumed_call
from kvloom.client.client import Client
from kvloom.client.generation import Delta
from kvloom.errors import KvloomError
from kvloom.transport import channel_options
from kvloom.transport.channel_options import CHANNEL_OPTIONS
from kvloom.v1.generation_pb2 import SamplingParams, SequenceFinish, StopConditions
from kvloom.v1.router_service_pb2 import GenerateRequest, PartialChoice
from kvloom.v1.router_service_pb2_grpc import RouterServiceStub
from lab.chaos.checking.metering import parse_usage_record
from tests.fakes.breaking_proxy import BreakingProxy
from tests.fakes.router_processes import MODEL, RouterProcess, RouterProcesses, router_processes
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(120)

NUM_REQUESTS = 12
NUM_TOKENS = 50
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "seed": 1},
    {"seed": 7},
    {"seed": 8, "logprobs": 2},
    {"temperature": 0.7, "seed": 2**63 + 1},
)


def questions() -> list[dict[str, Any]]:
    """Requests of every kind: text and messages (token ids take another path), resumable and not, one choice and
    two."""
    asked: list[dict[str, Any]] = []
    for i in range(NUM_REQUESTS):
        words = f"Story number {i}, please."
        prompt = {"text": words} if i % 2 else {"messages": [{"role": "user", "content": words}]}
        some = {"n": 2 if i % 3 == 0 else 1, "resumable": i % 4 < 2, "max_tokens": NUM_TOKENS}
        asked.append({"model": MODEL, **prompt, **KINDS[i % 4], **some})
    return asked


@dataclasses.dataclass
class Got:
    """What a loop has received of an answer."""

    n: int
    token_ids: list[list[int]] = dataclasses.field(default_factory=list)
    texts: list[str] = dataclasses.field(default_factory=list)
    logprobs: list[list[tuple[float, tuple[int, ...]]]] = dataclasses.field(default_factory=list)
    starts: list[int] = dataclasses.field(default_factory=list)
    ends: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.token_ids = [[] for _ in range(self.n)]
        self.texts = [""] * self.n
        self.logprobs = [[] for _ in range(self.n)]
        self.starts = [0] * self.n
        self.ends = [()] * self.n

    def take(self, delta: Delta) -> None:
        i = delta.index
        assert not self.ends[i], "output after the end"
        self.token_ids[i] += delta.token_ids
        self.texts[i] += delta.text
        self.logprobs[i] += [(entry.logprob, tuple(entry.top_token_ids)) for entry in delta.logprobs]
        self.starts[i] += delta.start is not None
        if delta.finish is not None:
            self.ends[i] = _end(delta.finish)
            assert delta.finish.num_output_tokens == len(self.token_ids[i])

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))


def _end(finish: SequenceFinish) -> tuple[Any, ...]:
    return finish.reason, finish.stop_string, finish.num_prompt_tokens, finish.num_output_tokens


class Readers:
    """Answers that are being read, each by its own loop."""

    def __init__(self, client: Client, asked: list[dict[str, Any]], prefix: str) -> None:
        self.got = [Got(options["n"]) for options in asked]
        self._tasks = [
            asyncio.create_task(self._read(client, {**options, "request_id": f"{prefix}-{i}"}, got))
            for i, (options, got) in enumerate(zip(asked, self.got, strict=True))
        ]

    async def _read(self, client: Client, options: dict[str, Any], got: Got) -> None:
        async for delta in client.generate(**options):
            got.take(delta)

    async def half_way(self) -> None:
        await eventually(
            lambda: all(len(got.token_ids[0]) >= 5 or got.ends[0] for got in self.got), "first tokens", 20.0
        )

    async def ended(self) -> list[Got]:
        async with asyncio.timeout(40.0):
            await asyncio.gather(*self._tasks)
        return self.got

    async def failures(self) -> list[KvloomError]:
        async with asyncio.timeout(40.0):
            results = await asyncio.gather(*self._tasks, return_exceptions=True)
        return [result for result in results if isinstance(result, KvloomError)]


Known = list[tuple[list[dict[str, Any]], list[Got]]]


@pytest.fixture(scope="module")
def known() -> Known:
    """What `undisturbed` has returned once: shards answer the same questions alike in every test."""
    return []


async def undisturbed(client: Client, known: Known) -> tuple[list[dict[str, Any]], list[Got]]:
    """Questions, with a stop string in the middle of some answers, and their undisturbed answers."""
    if known:
        return known[0]
    asked = questions()
    first = await Readers(client, asked, "first").ended()
    for options, got in list(zip(asked, first, strict=True))[1::4]:
        text = got.texts[0]
        options["stop"] = text[len(text) * 3 // 4 :][:3]
    expected = await Readers(client, asked, "undisturbed").ended()
    assert any(end[1] for got in expected for end in got.ends)
    assert any("\U0001f642" in got.texts[0] for got in expected), "no character whose bytes lie in two tokens"
    known.append((asked, expected))
    return asked, expected


@pytest.fixture
async def world(tmp_path: Path, redis_url: str) -> AsyncIterator[RouterProcesses]:
    async with router_processes(tmp_path, redis_url) as started:
        started.config.log.format = "json"
        yield started


async def two_routers(world: RouterProcesses) -> tuple[RouterProcess, RouterProcess]:
    first, second = await asyncio.gather(world.start_router("router-0"), world.start_router("router-1"))
    await world.link(2)
    return first, second


async def test_kill_of_one_router_of_two(world: RouterProcesses, known: Known) -> None:
    """kill -9: the router's answers continue at the other one with the same tokens, text, logprobs, finishes and
    counts. So do requests that had not begun, and later ones."""
    first, second = await two_routers(world)
    async with Client([first.address, second.address]) as client:
        asked, expected = await undisturbed(client, known)
        readers = Readers(client, asked, "killed")
        await readers.half_way()
        unheard = Readers(client, asked, "unheard")
        await asyncio.sleep(0)
        await first.kill()
        assert await readers.ended() == expected
        assert await unheard.ended() == expected
        assert await Readers(client, asked, "later").ended() == expected


@pytest.mark.long
async def test_kill_and_restart_of_the_only_router(world: RouterProcesses, known: Known) -> None:
    """Without another router, answers wait until it is back at its address."""
    router = await world.start_router("router-0")
    await world.link(1)
    async with Client(router.address, reattach_seconds=20.0) as client:
        asked, expected = await undisturbed(client, known)
        readers = Readers(client, asked, "restarted")
        await readers.half_way()
        await router.kill()
        await world.start_router("router-0", router.port)
        assert await readers.ended() == expected


async def test_no_answer_waits_longer_than_wanted(world: RouterProcesses) -> None:
    """A router that does not come back ends in ROUTER_LOST; with 0 seconds at once."""
    router = await world.start_router("router-0")
    await world.link(1)
    asked = [options for options in questions() if not options["resumable"]]
    async with (
        Client(router.address, reattach_seconds=1.0) as client,
        Client(router.address, reattach_seconds=0) as hasty,
    ):
        readers, hasty_readers = Readers(client, asked, "patient"), Readers(hasty, asked, "hasty")
        await readers.half_way()
        await hasty_readers.half_way()
        await router.kill()
        killed_at = asyncio.get_running_loop().time()
        assert {error.reason_name for error in await hasty_readers.failures()} == {"ROUTER_LOST"}
        assert asyncio.get_running_loop().time() - killed_at < 0.9
        assert {error.reason_name for error in await readers.failures()} == {"ROUTER_LOST"}
        assert asyncio.get_running_loop().time() - killed_at < 8.0


async def test_usage_records_add_up_when_living_routers_are_left(
    world: RouterProcesses, known: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routers whose connections break and are rejected, that hang, and that stop: tokens that they have metered beyond
    what the loop received are credited, so that all usage records together are the tokens of the loop."""
    monkeypatch.setattr(resumed_call, "OPEN_TIMEOUT_SECONDS", 0.5)
    quick = {"grpc.keepalive_time_ms": 600, "grpc.http2.ping_timeout_ms": 400}
    options = [(name, quick.get(name, value)) for name, value in channel_options.CHANNEL_OPTIONS]
    monkeypatch.setattr(channel_options, "CHANNEL_OPTIONS", options)
    world.config.fabric.drain_timeout_seconds = 0.2
    first, second = await two_routers(world)
    proxy = BreakingProxy(first.address)
    await proxy.start()
    delivered: dict[str, Got] = {}

    async def check(readers: Readers, prefix: str) -> None:
        assert await readers.ended() == expected
        delivered.update({f"{prefix}-{i}": got for i, got in enumerate(readers.got)})

    async with Client([proxy.address, second.address]) as client:
        asked, expected = await undisturbed(client, known)
        readers = Readers(client, asked, "refused")
        await readers.half_way()
        proxy.freeze(True)
        await world.decoded(10)  # some tokens are metered, and on their way
        proxy.refuse(True)
        proxy.reset()
        await check(readers, "refused")
    await proxy.stop()
    async with Client([first.address, second.address]) as client:
        readers = Readers(client, asked, "hung")
        await readers.half_way()
        first.send(signal.SIGSTOP)
        await check(readers, "hung")
        first.send(signal.SIGCONT)
        await eventually(lambda: not client._cancel_notifier.num_waiting, "the settlements")
    async with Client([second.address, first.address]) as client:
        readers = Readers(client, asked, "stopped")
        await readers.half_way()
        second.send(signal.SIGTERM)
        await check(readers, "stopped")
    first.send(signal.SIGTERM)
    metered, num_credited = await metered_tokens(first, second)
    for name, got in delivered.items():
        assert metered[name] == got.num_tokens, name
    assert num_credited, "nothing was lost on its way: the test shows nothing"


def test_a_hung_process_is_found_out_about_in_seconds() -> None:
    """gRPC waits a minute for the answer to a ping, whatever keepalive_timeout_ms is, unless this option is set. The
    test above shows that it works."""
    assert dict(CHANNEL_OPTIONS)["grpc.http2.ping_timeout_ms"] == 5_000


async def test_a_client_of_any_language_can_continue(world: RouterProcesses) -> None:
    """Using only the proto's documentation, without the SDK and without a seed: the responses contain all that is
    needed."""
    first, second = await two_routers(world)
    request = GenerateRequest(model=MODEL, text="Once upon a time", stop=StopConditions(max_tokens=NUM_TOKENS))
    parts: list[tuple[list[int], str]] = []
    async with grpc.aio.insecure_channel(first.address) as channel:
        call = RouterServiceStub(channel).Generate(request)
        seed = None
        async for response in call:
            seed = response.seed if response.HasField("seed") else seed
            parts += [(list(delta.token_ids), delta.text) for delta in response.deltas]
            if len(parts) == 10:
                await first.kill()
                break
    assert seed is not None
    async with grpc.aio.insecure_channel(second.address) as channel:
        stub = RouterServiceStub(channel)
        request.sampling.CopyFrom(SamplingParams(seed=seed))
        whole = [(list(d.token_ids), d.text) async for r in stub.Generate(request) for d in r.deltas]
        partial_choices = PartialChoice(token_ids=_ids(parts), num_delivered_chars=len(_text(parts)))
        request.partial_choices.append(partial_choices)
        rest = [(list(d.token_ids), d.text) async for r in stub.Generate(request) for d in r.deltas]
    assert _ids(parts) + _ids(rest) == _ids(whole)
    assert _text(parts) + _text(rest) == _text(whole)


def _ids(parts: list[tuple[list[int], str]]) -> list[int]:
    return [token_id for ids, _ in parts for token_id in ids]


def _text(parts: list[tuple[list[int], str]]) -> str:
    return "".join(text for _, text in parts)


async def metered_tokens(*routers: RouterProcess) -> tuple[dict[str, int], int]:
    """The tokens metered by request, from the logs of routers that end; and how many were credited."""
    metered: dict[str, int] = {}
    num_credited = 0
    for router in routers:
        _, log = await router.wait()
        for record in filter(None, map(parse_usage_record, log.encode().splitlines())):
            metered[record.request_id] = (
                metered.get(record.request_id, 0) + record.num_output_tokens - record.num_credited_tokens
            )
            num_credited += record.num_credited_tokens
    return metered, num_credited
