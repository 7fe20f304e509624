"""A safety service that hangs, and one that says what no service may say. Nothing is shown on such a word."""

from __future__ import annotations

import pytest

from kvloom.errors import reason_name
from kvloom.router_link.link import GrpcRouterLink
from kvloom.v1.generation_pb2 import FINISH_REASON_CONTENT_FILTER, FINISH_REASON_LENGTH
from kvloom.v1.safety_service_pb2 import DECISION_UNSPECIFIED, ScreenResponse
from lab.redteam.faults import GARBLES, Garble
from tests.fakes.fake_safety import FakeSafety
from tests.fakes.fake_shard import expected_text
from tests.fakes.router_world import Answer, RouterWorld, link_request
from tests.waiting import eventually

pytest_plugins = ("tests.fakes.router_fixtures",)


async def connect(world: RouterWorld) -> tuple[FakeSafety, GrpcRouterLink]:
    safety = await world.start_safety(screens_answers=True)
    world.config.safety.patience_seconds = 0.0
    await world.start_shard("shard-0")
    await world.start_router()
    link = await world.connect()
    await world.wait_for_shards(link, 1)
    await is_connected(world)
    return safety, link


async def is_connected(world: RouterWorld) -> None:
    await eventually(lambda: world.metric("kvloom_router_safety_connected") == 1, "the safety link")


@pytest.mark.parametrize("garble", GARBLES.values(), ids=GARBLES)
async def test_a_garbled_verdict_on_an_answer_shows_nothing(world: RouterWorld, garble: Garble) -> None:
    """The stream is broken, and the answer ends as if the service were away. The next stream is asked afresh."""
    safety, link = await connect(world)
    safety.garble = lambda response: garble(response) if response.slots else response
    refused = await world.ask(link, [1], 30, prompt_text="fine")
    assert reason_name(refused.finish.error.reason) == "SAFETY_UNAVAILABLE"
    assert (refused.texts[0], refused.finish.num_output_tokens) == ("", 0)
    safety.garble = lambda response: response
    await is_connected(world)
    answer = await world.ask(link, [1], 30, prompt_text="fine")
    assert (answer.finish.reason, answer.texts[0]) == (FINISH_REASON_LENGTH, expected_text([1], 0, 30))


async def test_a_garbled_verdict_on_a_prompt_is_no_yes(world: RouterWorld) -> None:
    """Only what says that a prompt is allowed allows it, and only for the prompt it names."""
    safety, link = await connect(world)

    def says_nothing(response: ScreenResponse) -> ScreenResponse:
        for verdict in response.prompts:
            verdict.decision = DECISION_UNSPECIFIED
        return response

    safety.garble = says_nothing
    blocked = await world.ask(link, [1], 5, prompt_text="fine")
    assert (blocked.finish.reason, blocked.texts[0]) == (FINISH_REASON_CONTENT_FILTER, "")

    def names_another(response: ScreenResponse) -> ScreenResponse:
        for verdict in response.prompts:
            verdict.check_id += 100
        return response

    safety.garble = names_another
    asked, answer = len(safety.prompts), Answer()
    link.submit(link_request([1], 5, prompt_text="fine"), answer)
    await eventually(lambda: len(safety.prompts) > asked, "the check")
    safety.garble = lambda response: response
    other = await world.ask(link, [2], 5, prompt_text="fine")
    assert other.finish.reason == FINISH_REASON_LENGTH
    assert (answer.done, answer.texts[0]) == (False, "")


async def test_a_hung_service_is_waited_for_and_nothing_is_shown(world: RouterWorld) -> None:
    """It has taken the prompt and the answer, and says nothing. What it has not judged stays withheld; a client that
    waits no longer than it wants gets an error instead of text."""
    safety, link = await connect(world)
    safety.pause()
    answer = Answer()
    link.submit(link_request([1], 30, prompt_text="fine", timeout_seconds=0.3), answer)
    await eventually(lambda: answer.done, "the deadline")
    assert (answer.texts[0], answer.token_ids[0]) == ("", [])
    assert reason_name(answer.finish.error.reason) == "DEADLINE_EXCEEDED"
    safety.resume()
    later = await world.ask(link, [1], 30, prompt_text="fine")
    assert later.texts[0] == expected_text([1], 0, 30)
