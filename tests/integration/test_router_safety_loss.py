"""The safety service's process is killed while answers stream."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

import pytest

from kvloom.errors import reason_name
from kvloom.router_link.link import GrpcRouterLink
from kvloom.v1.generation_pb2 import FINISH_REASON_CONTENT_FILTER, FINISH_REASON_LENGTH
from tests.fakes.fake_shard import expected_text
from tests.fakes.forked_process import ForkedProcess, fork_service
from tests.fakes.router_world import Answer, RouterWorld, link_request
from tests.waiting import eventually

pytest_plugins = ("tests.fakes.router_fixtures",)
pytestmark = pytest.mark.timeout(120)

NUM_TOKENS = 120
POLICY = """
[[rules]]
name = "phrase"
applies_to = ["answer"]
message = "Not this."
phrases = ["t490 t497"]

[[rules]]
name = "anywhere"
applies_to = ["answer"]
message = "Nor this."
patterns = ['q[0-9]{8}']
max_length = 9
"""
"""The answers to [0] and [7] contain the phrase. No answer contains the pattern, but because of it the last 8
characters are always held."""


class SafetyProcess:
    """A safety service that always listens on the same port."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: ForkedProcess | None = None
        self.port = 0

    async def start(self) -> None:
        policy, config = self._folder / "policy.toml", self._folder / "kvloom.json"
        policy.write_text(POLICY)
        config.write_text(json.dumps({"safety": {"policy_file": str(policy)}, "log": {"level": "error"}}))
        flags = ("--config", str(config), "--port", str(self.port))
        self._process = await fork_service("safety_svc", flags)
        line = json.loads(await asyncio.wait_for(self._process.stdout.readline(), 30.0))
        self.port = int(line["address"].rpartition(":")[2])

    async def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            await asyncio.wait_for(process.communicate(), 30.0)


@contextlib.asynccontextmanager
async def safety_process(folder: Path):
    safety = SafetyProcess(folder)
    await safety.start()
    try:
        yield safety
    finally:
        await safety.kill()


async def connect(world: RouterWorld, safety: SafetyProcess, patience_seconds: float) -> GrpcRouterLink:
    world.config.safety.port = safety.port
    world.config.safety.on_unavailable = "refuse"
    world.config.safety.patience_seconds = patience_seconds
    await world.start_shard("shard-0", step_seconds=0.008)
    await world.start_router()
    link = await world.connect()
    await world.wait_for_shards(link, 1)
    await is_screened(world, True)
    return link


async def is_screened(world: RouterWorld, connected: bool) -> None:
    await eventually(
        lambda: world.metric("kvloom_router_safety_connected") == connected, "the safety link", timeout_seconds=30.0
    )


def ask(link: GrpcRouterLink) -> list[Answer]:
    answers = [Answer() for _ in range(8)]
    for i, answer in enumerate(answers):
        link.submit(link_request([i], NUM_TOKENS, prompt_text="fine"), answer)
    return answers


async def all_done(answers: list[Answer]) -> None:
    await eventually(lambda: all(answer.done for answer in answers), "all ends", timeout_seconds=60.0)


@pytest.mark.parametrize(
    "num_tokens", [pytest.param(5, marks=pytest.mark.long), 66, pytest.param(100, marks=pytest.mark.long)]
)
async def test_answers_survive_a_killed_and_restarted_safety_service(
    world: RouterWorld, tmp_path: Path, num_tokens: int
) -> None:
    """Running answers, and those requested during the outage, equal the undisturbed ones. Forbidden text is never sent,
    wherever the service died."""
    async with safety_process(tmp_path) as safety:
        link = await connect(world, safety, patience_seconds=30.0)
        undisturbed = ask(link)
        await all_done(undisturbed)
        for i, answer in enumerate(undisturbed):
            is_bad = i in (0, 7)
            assert answer.finish.reason == (FINISH_REASON_CONTENT_FILTER if is_bad else FINISH_REASON_LENGTH)
            assert "t490 t497" not in answer.texts[0]
            assert is_bad or answer.texts[0] == expected_text([i], 0, NUM_TOKENS)
        answers = ask(link)
        await eventually(lambda: len(answers[1].token_ids[0]) >= num_tokens, "some tokens")
        await safety.kill()
        await is_screened(world, False)
        more = ask(link)
        await safety.start()
        await all_done([*answers, *more])
        for got in (answers, more):
            for answer, expected in zip(got, undisturbed, strict=True):
                assert answer.texts == expected.texts
                assert answer.token_ids == expected.token_ids
                assert answer.finish.reason == expected.finish.reason
                assert answer.finish.num_output_tokens == expected.finish.num_output_tokens


async def test_answers_end_in_an_error_when_the_safety_service_stays_away(world: RouterWorld, tmp_path: Path) -> None:
    """No client waits longer than configured, and the text that was sent is a prefix of the right answer."""
    async with safety_process(tmp_path) as safety:
        link = await connect(world, safety, patience_seconds=0.5)
        answers = ask(link)
        await eventually(lambda: answers[1].token_ids[0], "some tokens")
        await safety.kill()
        await all_done(answers)
        for i, answer in enumerate(answers):
            assert reason_name(answer.finish.error.reason) == "SAFETY_UNAVAILABLE"
            assert expected_text([i], 0, NUM_TOKENS).startswith(answer.texts[0])
            assert answer.finish.num_output_tokens == len(answer.token_ids[0])
        refused = await world.ask(link, [1], 5, prompt_text="fine")
        assert reason_name(refused.finish.error.reason) == "SAFETY_UNAVAILABLE"
