"""Long conversations whose earliest turns are summed up in the background."""

from __future__ import annotations

from typing import Any

from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.router_service_pb2 import TIER_BATCH, ModelInfo
from kvloom_common.config import EdgeConfig
from kvloom_common.models.served_model import ServedModel
from tests.fakes.edge_world import EdgeWorld, edge_world
from tests.fakes.fake_router_link import FakeRequest, FakeRouterLink, answer
from tests.fakes.tiny_tokenizer import model_tokenizer
from tests.waiting import eventually

SUMMARY = "They spoke of foxes."
TURNS: list[dict[str, Any]] = [
    {"role": role, "content": f"{role} {number} " + "the quick brown fox " * 10}
    for number in range(12)
    for role in ("user", "assistant")
]
BODY = {
    "model": "tiny",
    "input": [*TURNS, {"role": "user", "content": "And now?"}],
    "truncation": "auto",
    "max_output_tokens": 64,
}


def model_of(request: FakeRequest) -> str:
    return request.request.wanted.model


def script(request: FakeRequest) -> None:
    answer(SUMMARY if model_of(request) == "small" else "Hello")(request)


def world_with_summaries(link: FakeRouterLink) -> Any:
    link.script = script
    link.fleet.models.append(ModelInfo(name="small", num_ready_shards=1, max_model_len=4096))
    small = ServedModel("small", model_tokenizer(), 1_700_000_000, "fp_small")
    return edge_world(EdgeConfig(summary_model="small"), link, more_models=[small])


def prompts(world: EdgeWorld, model: str) -> list[str]:
    tokenizer = world.edge.models.by_name[model].tokenizer
    found = [each.request for each in world.link.requests if model_of(each) == model]
    return [tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False) for request in found]


async def all_made(world: EdgeWorld) -> None:
    summaries = world.edge.summaries
    assert summaries is not None
    await eventually(lambda: not summaries.num_running)


async def test_what_is_left_out_is_summed_up_for_later_turns() -> None:
    """No answer waits for the summary; the next ones of the same caller have it, and those of nobody else."""
    async with world_with_summaries(FakeRouterLink(max_model_len=1024)) as world:
        keys = [{"Authorization": f"Bearer {name}"} for name in ("ann", "bob")]
        status, _ = await world.post("/v1/responses", BODY, headers=keys[0])
        assert status == 200
        await all_made(world)
        for _ in range(2):
            await world.post("/v1/responses", BODY, headers=keys[0])
        [asked] = prompts(world, "small")
        assert "user 0" in asked
        first, second, third = prompts(world, "tiny")
        assert "user 0" not in first
        assert SUMMARY not in first
        assert SUMMARY in second == third
        await world.post("/v1/responses", BODY, headers=keys[1])
        assert SUMMARY not in prompts(world, "tiny")[-1]
        await all_made(world)
        assert {each.request.wanted.tier for each in world.link.requests if model_of(each) == "small"} == {TIER_BATCH}


async def test_a_pinned_message_is_not_left_out() -> None:
    """Its field is an extension of the API."""
    async with world_with_summaries(FakeRouterLink(max_model_len=1024)) as world:
        given = [{**TURNS[0], "pinned": True}, *TURNS[1:], BODY["input"][-1]]
        await world.post("/v1/responses", {**BODY, "input": given})
        [prompt] = prompts(world, "tiny")
        assert "user 0" in prompt
        assert "assistant 0" in prompt
        assert "user 1 " not in prompt
        await all_made(world)


async def test_summaries_that_fail_leave_answers_alone() -> None:
    """An overloaded model of summaries is tried again at the next turn."""
    link = FakeRouterLink(max_model_len=1024)
    async with world_with_summaries(link) as world:

        def refusing(request: FakeRequest) -> None:
            if model_of(request) == "small":
                request.fail(ErrorReason.ERROR_REASON_QUEUE_FULL)
            else:
                answer("Hello")(request)

        link.script = refusing
        for number in range(2):
            assert (await world.post("/v1/responses", BODY))[0] == 200
            await all_made(world)
            assert len(prompts(world, "small")) == number + 1
