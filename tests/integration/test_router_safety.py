"""The router screens every request with the safety service."""

from __future__ import annotations

import pytest

from kvloom.errors import reason_name
from kvloom.router_link.link import GrpcRouterLink
from kvloom.v1 import generation_pb2
from router.links.step_outbox import MAX_WAITING_ENTRIES
from tests.fakes.fake_safety import FakeSafety
from tests.fakes.fake_shard import expected_text, expected_tokens
from tests.fakes.router_world import Answer, RouterWorld, link_request
from tests.fakes.tiny_tokenizer import model_tokenizer
from tests.waiting import eventually

pytest_plugins = ("tests.fakes.router_fixtures",)

NUM_HELD = 100
HELD_TOKENS = MAX_WAITING_ENTRIES // NUM_HELD + 10
"""Together more than may wait for a client with one answer."""
MORE_TOKENS = 1000
"""Those of each answer that follow, so many that none has ended before."""


async def connect_screened(world: RouterWorld, safety: FakeSafety) -> GrpcRouterLink:
    """Returns a client of a router that has its shard and its safety service."""
    await world.start_router()
    link = await world.connect()
    await world.wait_for_shards(link, 1)
    await eventually(lambda: safety.num_streams == 1, "the safety link")
    return link


async def test_a_forbidden_prompt_is_blocked_and_nothing_of_the_answer_is_shown(world: RouterWorld) -> None:
    """The check runs in parallel with the prefill; tokens that the shard generates meanwhile must not be sent."""
    safety = await world.start_safety()
    await world.start_shard("shard-0")
    link = await connect_screened(world, safety)
    blocked = await world.ask(link, [1, 2], 50, prompt_text="something forbidden")
    assert blocked.finish.reason == generation_pb2.FINISH_REASON_CONTENT_FILTER
    assert reason_name(blocked.finish.error.reason) == "CONTENT_FILTERED"
    assert blocked.texts[0] == ""
    allowed = await world.ask(link, [1, 2], 10, prompt_text="something nice")
    assert allowed.token_ids[0] == expected_tokens([1, 2], 0, 10)


async def test_leaving_the_text_out_does_not_bypass_the_check(world: RouterWorld) -> None:
    """If a client sends only tokens, the router decodes them for the safety service."""
    safety = await world.start_safety()
    await world.start_shard("shard-0")
    link = await connect_screened(world, safety)
    prompt = model_tokenizer().encode_now("a forbidden thing")
    blocked = await world.ask(link, prompt, 50)
    assert blocked.finish.reason == generation_pb2.FINISH_REASON_CONTENT_FILTER
    assert safety.prompts == ["a forbidden thing"]


async def test_tokens_wait_for_the_verdict(world: RouterWorld) -> None:
    """A slow verdict delays the answer, but the check is never skipped."""
    safety = await world.start_safety()
    shard = await world.start_shard("shard-0")
    link = await connect_screened(world, safety)
    safety.pause()
    answer = Answer()
    link.submit(link_request([1, 2], 10, prompt_text="fine"), answer)
    await eventually(lambda: shard.submits and shard.num_running == 0, "the sequence's end on the shard")
    assert answer.token_ids[0] == []
    safety.resume()
    await eventually(lambda: answer.done, "the answer")
    assert answer.token_ids[0] == expected_tokens([1, 2], 0, 10)


async def test_screened_answers_arrive_whole(world: RouterWorld) -> None:
    """Text that is held for the safety service arrives complete and in order."""
    await world.start_safety(screens_answers=True)
    await world.start_shard("shard-0")
    await world.start_router()
    link = await world.connect()
    await world.wait_for_shards(link, 1)
    answers = [Answer() for _ in range(10)]
    for i, answer in enumerate(answers):
        link.submit(link_request([i], 30, prompt_text="fine"), answer)
    await eventually(lambda: all(answer.done for answer in answers), "all answers")
    for i, answer in enumerate(answers):
        assert answer.texts[0] == expected_text([i], 0, 30)
        assert answer.token_ids[0] == expected_tokens([i], 0, 30)


@pytest.mark.long
async def test_the_text_of_many_answers_that_was_held_ends_no_connection(world: RouterWorld) -> None:
    """When a safety service that was waited for allows all of it at once, the client has had no time to read it."""
    safety = await world.start_safety()
    shard = await world.start_shard("shard-0", script=[(1, "a ")] * (HELD_TOKENS + MORE_TOKENS))
    link = await connect_screened(world, safety)
    safety.pause()
    answers = [Answer() for _ in range(NUM_HELD)]
    for i, answer in enumerate(answers):
        link.submit(link_request([i], 2 * HELD_TOKENS, prompt_text="fine"), answer)
    await eventually(lambda: len(shard.submits) == NUM_HELD and shard.num_tokens_each >= HELD_TOKENS, "their tokens")
    shard.pause()
    safety.resume()
    await eventually(lambda: all(len(answer.token_ids[0]) >= HELD_TOKENS for answer in answers), "what was held")
    shard.resume()
    await eventually(lambda: all(answer.done for answer in answers), "all answers")
    assert {len(answer.token_ids[0]) for answer in answers} == {HELD_TOKENS + MORE_TOKENS}


async def test_text_that_can_begin_nothing_is_not_sent_to_be_screened(world: RouterWorld) -> None:
    """The prefilter sends only suspicious text to the service, with its context, and the answer is the same."""
    text = expected_text([1], 0, 30)
    suspicious = expected_text([1], 0, 11)[-2:]
    safety = await world.start_safety(screens_answers=True, beginnings=[suspicious])
    await world.start_shard("shard-0")
    await world.start_router()
    link = await world.connect()
    await world.wait_for_shards(link, 1)
    answer = await world.ask(link, [1], 30, prompt_text="fine")
    assert answer.texts[0] == text
    assert answer.token_ids[0] == expected_tokens([1], 0, 30)
    sent = "".join(delta for _, delta in safety.sent)
    assert suspicious in sent
    assert len(sent) < len(text)
    last_char, first = safety.sent[0]
    assert last_char + first in text


async def test_without_its_safety_service_the_router_refuses_and_recovers(world: RouterWorld) -> None:
    """The router is configured to fail closed, and it recovers when the sidecar restarts."""
    safety = await world.start_safety()
    await world.start_shard("shard-0")
    world.config.safety.patience_seconds = 0.0
    link = await connect_screened(world, safety)
    await safety.stop()
    await eventually(lambda: world.metric("kvloom_router_safety_connected") == 0, "the break")
    refused = await world.ask(link, [1], 5, prompt_text="fine")
    assert reason_name(refused.finish.error.reason) == "SAFETY_UNAVAILABLE"
    await world.start_another_safety()
    await eventually(lambda: world.metric("kvloom_router_safety_connected") == 1, "the recovery")
    answer = await world.ask(link, [1], 5, prompt_text="fine")
    assert answer.token_ids[0] == expected_tokens([1], 0, 5)


async def test_a_safety_service_is_replaced_under_load_without_a_gap(world: RouterWorld) -> None:
    """A restart of the sidecar must neither reject a request nor lose its place in any answer. Answers that the old
    service has cleared continue at the new one, and the others stay until they are clear."""
    beginnings = [expected_text([1], 0, 11)[-2:]]
    old = await world.start_safety(screens_answers=True, beginnings=beginnings, shares_port=True)
    shard = await world.start_shard("shard-0")
    link = await connect_screened(world, old)
    answers: list[Answer] = []

    def ask() -> None:
        answers.append(Answer())
        prompt = [len(answers) % 7]
        link.submit(link_request(prompt, 40, prompt_text="fine"), answers[-1])

    shard.pause()
    for _ in range(14):
        ask()
    await eventually(lambda: shard.num_running == 14, "the shard at work")
    new = await world.start_another_safety(screens_answers=True, beginnings=beginnings, shares_port=True)
    old.pause()  # Verdicts are then outstanding.
    shard.resume()
    await eventually(lambda: any(answer.token_ids[0] for answer in answers) or shard.num_running < 14, "some text")
    await old.drain()

    def reaches_the_successor() -> bool:
        ask()
        return bool(new.prompts)

    await eventually(reaches_the_successor, "the successor's stream")
    num_asked_before = len(answers)
    for _ in range(14):
        ask()
    old.resume()
    await eventually(lambda: all(answer.done for answer in answers), "all answers")
    for number, answer in enumerate(answers, 1):
        assert answer.finish.reason == generation_pb2.FINISH_REASON_LENGTH
        assert answer.texts[0] == expected_text([number % 7], 0, 40)
    await eventually(lambda: old.num_streams == 0, "the end of the old stream")
    assert len(old.prompts) + len(new.prompts) == len(answers)
    assert len(old.prompts) < num_asked_before
    assert world.metric("kvloom_router_safety_connected") == 1
