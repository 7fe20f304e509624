"""Faults in the middle of answers change neither what the client receives nor what is metered.

These tests use a real router and real shard servers with the simulated engine, and run every case under every fault.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvloom.errors import reason_name
from kvloom.v1.generation_pb2 import FINISH_REASON_ERROR, FINISH_REASON_LENGTH, FINISH_REASON_STOP, SamplingParams
from kvloom_common.config import KvloomConfig, ModelConfig, ShardConfig, SimConfig, dump_config
from kvloom_common.text.tokenizer import ModelTokenizer
from shard_server.engines.base import EngineRequest
from tests.fakes.failing_engine import RecitingEngine
from tests.fakes.failover_world import MODEL, Collected, Ended, FailoverWorld, failover_world
from tests.fakes.fake_shard import FakeShard
from tests.fakes.router_world import Answer, link_request, router_world
from tests.waiting import eventually

pytest_plugins = ("tests.fakes.router_fixtures",)

MAX_TOKENS = 24
CUE = 9999
RECITAL = "Grüße 👩‍👩‍👧‍👦 aus 東京… 🏳️‍🌈 naïve ﷽ 𝔘𝔫𝔦 "
"""Characters of one to four bytes, many of them split over several tokens."""


@dataclasses.dataclass(frozen=True)
class Case:
    prompt: Sequence[int]
    sampling: SamplingParams
    n: int = 1
    stop: Sequence[str] = ()
    max_tokens: int = MAX_TOKENS


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Iterator[ModelTokenizer]:
    loaded = ModelTokenizer.load(model_dir)
    yield loaded
    loaded.close()


def engine(tokenizer: ModelTokenizer, config: ShardConfig) -> RecitingEngine:
    return RecitingEngine(MODEL, config, tokenizer.vocab_size, tokenizer.encode_now(RECITAL), CUE)


def cases(tokenizer: ModelTokenizer) -> dict[str, Case]:
    plain = [1000, 1001, 1002]
    sim = engine(tokenizer, ShardConfig())
    greedy = tokenizer.decode([sim.token_at(plain, 0, position) for position in range(MAX_TOKENS)])
    stop_at = len(greedy) // 2
    seeded = SamplingParams(temperature=1.0, seed=2**63 + 5)
    return {
        "greedy": Case(plain, SamplingParams(temperature=0.0, seed=0)),
        "seeded": Case([7] * 40, seeded),
        "stop string": Case(plain, SamplingParams(temperature=0.0, seed=0), stop=[greedy[stop_at : stop_at + 9]]),
        "stop string of the middle of a character": Case(
            [CUE], seeded, stop=["\N{REGIONAL INDICATOR SYMBOL LETTER A}", "🌈 n"]
        ),
        "utf-8": Case([CUE, 5], seeded, max_tokens=60),
        "logprobs": Case([1005, 1006], SamplingParams(seed=3, logprobs=4)),
        "n": Case([1007], SamplingParams(seed=4), n=3),
        "n with stop strings": Case(plain, seeded, n=3, stop=[" t", "e "]),
        "all at once": Case([1008] * 20, SamplingParams(seed=6, logprobs=1), n=4, stop=[" th"]),
    }


@pytest.fixture
async def world(router_redis_url: str, tokenizer: ModelTokenizer) -> AsyncIterator[FailoverWorld]:
    async with failover_world(router_redis_url, tokenizer) as started:
        await started.start_router()
        yield started


async def add_shards(world: FailoverWorld, count: int, step_ms: float = 2.0) -> None:
    config = ShardConfig(engine="sim", sim=SimConfig(step_ms=step_ms, prefill_tokens_per_second=1e6))
    for number in range(count):
        await world.add_shard(f"shard-{number}", engine(world.tokenizer, config), config)
    await world.wait_for_shards(world.link, count)


def begin(world: FailoverWorld, case: Case) -> Collected:
    stop = {"stop": list(case.stop)}
    return world.begin(case.prompt, case.max_tokens, n=case.n, sampling=case.sampling, stop=stop)


async def undisturbed(world: FailoverWorld, wanted: dict[str, Case]) -> dict[str, list[Ended]]:
    """Returns the answers without a fault, and asserts that they contain enough for a comparison."""
    answers = {name: begin(world, case) for name, case in wanted.items()}
    ended = {name: await answer.ended() for name, answer in answers.items()}
    for name, case in wanted.items():
        for choice in ended[name]:
            assert choice.reason == (FINISH_REASON_STOP if choice.stop_string else FINISH_REASON_LENGTH)
            assert choice.num_output_tokens == len(choice.token_ids)
            if case.sampling.HasField("logprobs"):
                assert len(choice.logprobs) == len(choice.token_ids)
            assert "\N{REPLACEMENT CHARACTER}" not in choice.text[:-3]
    return ended


def at_first_attempt(position: int, request: EngineRequest) -> int | None:
    return position if "#1." in request.request_id else None


@pytest.mark.parametrize(
    ("positions", "least_failed"),
    [
        pytest.param((0, 1, 2, 11, 12, 13, 23, 59), 60, id="some"),
        pytest.param(range(61), 300, marks=pytest.mark.long, id="all"),
    ],
)
async def test_an_engine_fails_a_request_behind_any_token(
    world: FailoverWorld, tokenizer: ModelTokenizer, positions: Sequence[int], least_failed: int
) -> None:
    """With all positions this is exhaustive: each case fails once before its first token and once behind each of its
    tokens, in particular inside characters and stop strings. Each answer's tokens are metered once."""
    await add_shards(world, 2)
    wanted = cases(tokenizer)
    expected = await undisturbed(world, wanted)
    differing: list[str] = []
    for position in positions:
        for member in world.members.values():
            member.engine.fails_at = partial(at_first_attempt, position)
        now = {name: case for name, case in wanted.items() if position < case.max_tokens}
        before = world.metered()
        answers = {name: begin(world, case) for name, case in now.items()}
        for name, answer in answers.items():
            if await answer.ended() != expected[name]:
                differing.append(f"{name} at {position}: {await answer.ended()} instead of {expected[name]}")
        after = world.metered()
        assert after["requests"] - before["requests"] == len(now)
        num_tokens = sum(choice.num_output_tokens for name in now for choice in expected[name])
        assert after["output_tokens"] - before["output_tokens"] == num_tokens
    assert not differing
    assert sum(member.engine.num_failed for member in world.members.values()) > least_failed


Fault = Callable[[FailoverWorld, str], Any]


def reset(world: FailoverWorld, shard_id: str) -> None:
    """Resets the connection. The shard itself is healthy, and must release the sequences of this connection."""
    assert world.members[shard_id].proxy.reset()


def end_engine(world: FailoverWorld, shard_id: str) -> None:
    """Ends the engine in a process that lives on for a moment and reports it."""
    world.members[shard_id].engine.die()


def stop_for_good(world: FailoverWorld, shard_id: str) -> None:
    """Resets the connection and refuses new ones."""
    world.members[shard_id].proxy.refuse(True)
    world.members[shard_id].proxy.reset()


FAULTS = (reset, end_engine, stop_for_good)
POSITIONS = (1, 6, 11)
EVERY_FAULT = [
    pytest.param(fault, position, marks=() if FAULTS.index(fault) == POSITIONS.index(position) else pytest.mark.long)
    for fault in FAULTS
    for position in POSITIONS
]
"""In make test each fault at another position."""


@pytest.mark.parametrize(("fault", "num_tokens"), EVERY_FAULT)
async def test_a_shard_fails_in_the_middle_of_answers(
    world: FailoverWorld, tokenizer: ModelTokenizer, fault: Fault, num_tokens: int
) -> None:
    """All cases run, and the shard of some of them fails. The clients do not notice, although attempts did fail."""
    await add_shards(world, 3, step_ms=4.0)
    wanted = cases(tokenizer)
    expected = await undisturbed(world, wanted)
    before = world.metered()
    world.hold(num_tokens)
    answers = {name: begin(world, case) for name, case in wanted.items()}
    await asyncio.gather(*(answer.has_tokens(num_tokens) for answer in answers.values()))
    serving = Counter(
        start.shard_id
        for answer in answers.values()
        for start, finish in zip(answer.starts, answer.finishes, strict=True)
        if start is not None and finish is None
    )
    fault(world, serving.most_common(1)[0][0])
    world.hold(None)
    assert {name: await answer.ended() for name, answer in answers.items()} == expected
    after = world.metered()
    assert after["attempts"] - before["attempts"] > len(wanted)
    assert after["requests"] - before["requests"] == len(wanted)
    assert after["output_tokens"] - before["output_tokens"] == sum(
        choice.num_output_tokens for choices in expected.values() for choice in choices
    )


async def test_shards_fail_one_after_the_other(world: FailoverWorld, tokenizer: ModelTokenizer) -> None:
    """A request may lose its shard more than once; the third attempt continues what the first two delivered."""
    await add_shards(world, 3, step_ms=4.0)
    wanted = cases(tokenizer)
    expected = await undisturbed(world, wanted)
    world.hold(4)
    answers = {name: begin(world, case) for name, case in wanted.items()}
    for shard_id, num_tokens in (("shard-0", 4), ("shard-1", 9)):
        world.hold(num_tokens)
        await asyncio.gather(*(answer.has_tokens(num_tokens) for answer in answers.values()))
        reset(world, shard_id)
    world.hold(None)
    assert {name: await answer.ended() for name, answer in answers.items()} == expected


async def test_a_shard_process_is_killed(
    world: FailoverWorld, tokenizer: ModelTokenizer, tmp_path: Path, model_dir: Path
) -> None:
    """kill -9 of a real process loses everything in its buffers."""
    await add_shards(world, 1, step_ms=20.0)
    sim = SimConfig(step_ms=20.0, prefill_tokens_per_second=1e6)
    config = KvloomConfig(
        model=ModelConfig(name=MODEL, path=str(model_dir)),
        shard=ShardConfig(engine="sim", sim=sim),
        redis=world.config.redis,
    )
    dump_config(config, tmp_path / "config.json")
    # A shard that has only its configuration does not know the recital.
    wanted = {name: case for name, case in cases(tokenizer).items() if case.prompt[0] != CUE}
    expected = await undisturbed(world, wanted)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "shard_server", "--config", str(tmp_path / "config.json"), "--name", "mortal"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        assert json.loads(await asyncio.wait_for(process.stdout.readline(), 60))["address"]
        await world.wait_for_shards(world.link, 2)
        before = world.metered()
        names = [(copy, name) for copy in range(3) for name in wanted]
        answers = [begin(world, wanted[name]) for _, name in names]
        await asyncio.gather(*(answer.has_tokens(5) for answer in answers))
        lost = [a for a in answers if any(start and start.shard_id == "mortal" for start in a.starts)]
        assert any(not all(answer.finishes) for answer in lost)
        process.kill()
        for (_, name), answer in zip(names, answers, strict=True):
            assert await answer.ended() == expected[name], name
        after = world.metered()
        assert after["requests"] - before["requests"] == len(names)
        assert after["attempts"] - before["attempts"] > len(names)
        assert after["output_tokens"] - before["output_tokens"] == sum(
            choice.num_output_tokens for _, name in names for choice in expected[name]
        )
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


# -- limits -----------------------------------------------------------------------------------------------------------


async def test_attempts_are_bounded(world: FailoverWorld) -> None:
    """A request that every engine fails must not be retried for ever: it ends with the reason after the delivered
    tokens, which are metered once."""
    await add_shards(world, 4)
    for member in world.members.values():
        member.engine.fails_at = lambda request: len(request.output_token_ids) + 3
    answer = begin(world, Case([5, 6], SamplingParams(seed=1), n=2))
    choices = await answer.ended()
    for choice in choices:
        assert choice.reason == FINISH_REASON_ERROR
        assert reason_name(choice.error_reason) == "ENGINE_FAILED"
        expected = [engine(world.tokenizer, ShardConfig()).token_at([5, 6], 1, position) for position in range(9)]
        assert choice.num_output_tokens == len(choice.token_ids) == 9, "three attempts of three tokens"
        if choice is choices[0]:
            assert list(choice.token_ids) == expected
    assert sum(member.engine.num_submitted for member in world.members.values()) == 6
    usage = world.metered()
    assert (usage["requests"], usage["output_tokens"]) == (1, 18)


async def test_without_a_shard_left_a_stream_ends_in_an_error(world: FailoverWorld) -> None:
    """When the last shard dies a request ends at once with a clear reason, and delivered tokens are metered once."""
    await add_shards(world, 1, step_ms=10.0)
    answers = [begin(world, Case([5, i], SamplingParams(seed=i), n=2, max_tokens=500)) for i in range(3)]
    await asyncio.gather(*(answer.has_tokens(4) for answer in answers))
    stop_for_good(world, "shard-0")
    num_tokens = 0
    for answer in answers:
        for choice in await answer.ended():
            assert choice.reason == FINISH_REASON_ERROR
            assert reason_name(choice.error_reason) == "SHARD_LOST"
            assert choice.num_output_tokens == len(choice.token_ids) >= 4
            num_tokens += len(choice.token_ids)
    usage = world.metered()
    assert (usage["requests"], usage["output_tokens"]) == (3, num_tokens)


async def test_the_requests_of_a_dead_shard_spread(router_redis_url: str) -> None:
    """The 30 requests of a dead shard must not all be placed on one other: each of the three left takes its share."""
    async with router_world(router_redis_url) as world:
        shards = [await world.start_shard(f"shard-{number}", step_seconds=0.02) for number in range(4)]
        await world.start_router()
        link = await world.connect()
        await world.wait_for_shards(link, 4)
        answers = []
        for number in range(120):
            answers.append(Answer())
            link.submit(link_request([number, 3], 60), answers[-1])
        await eventually(lambda: all(answer.token_ids[0] for answer in answers), "all to run")
        dead = max(shards, key=lambda shard: shard.num_running)
        num_lost = dead.num_running
        assert num_lost >= 20
        await dead.stop()
        await eventually(lambda: sum(_taken_over(shard) for shard in shards) >= num_lost, "all second attempts")
        shares = [_taken_over(shard) for shard in shards if shard is not dead]
        assert sum(shares) == num_lost
        assert max(shares) <= num_lost // 2, shares
        assert min(shares) >= num_lost // 6, shares
        for answer in answers:
            await eventually(lambda answer=answer: answer.done, "the end")
            assert answer.finish.num_output_tokens == 60


def _taken_over(shard: FakeShard) -> int:
    return sum(submit.attempt_id > 1 for submit in shard.submits)
