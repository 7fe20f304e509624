"""A peer of a later version sends what this one does not know: it is ignored, over real sockets, and nothing else
changes (docs/operate/upgrade.md)."""

from __future__ import annotations

import kvloom
from kvloom.v1.generation_pb2 import Choice, StopConditions
from kvloom.v1.router_service_pb2 import (
    ClientHello,
    GenerateRequest,
    RouterServiceConnectRequest,
    RouterServiceConnectResponse,
    Submit,
)
from kvloom.v1.shard_service_pb2 import RouterHello, ShardServiceConnectRequest, ShardServiceConnectResponse
from kvloom_common.finish_reasons import FINISH_REASON_NAMES
from tests.fakes.fake_shard import expected_text, expected_tokens
from tests.fakes.later_version import with_later_fields
from tests.fakes.router_world import MODEL, RouterWorld
from tests.fakes.shard_world import RouterEnd, shard_world, submit_of
from tests.waiting import eventually

pytest_plugins = ("tests.fakes.router_fixtures",)

PROMPT = [4, 5, 6]
LATER_REASON = 99


async def test_a_shard_of_a_later_version_is_used(world: RouterWorld) -> None:
    """While a fleet is upgraded, its shards come first."""
    await world.start_shard("shard-0", as_sent=with_later_fields)
    await world.start_router()
    link = await world.connect()
    await world.wait_for_shards(link, 1)
    answer = await world.ask(link, PROMPT, 20)
    assert answer.token_ids[0] == expected_tokens(PROMPT, 0, 20)
    assert answer.texts[0] == expected_text(PROMPT, 0, 20)


async def test_a_client_of_a_later_version_is_served(world: RouterWorld) -> None:
    """An edge, and whoever has the newest SDK, may know more than the router."""
    await world.start_shard("shard-0")
    await world.start_router()
    await world.wait_for_shards(await world.connect(), 1)
    call = (await world.stub()).Connect()
    await call.write(with_later_fields(RouterServiceConnectRequest(hello=ClientHello(client_id="later"))))
    wanted = GenerateRequest(model=MODEL, request_id="later-1", stop=StopConditions(max_tokens=20))
    submit = Submit(request=wanted, prompt_token_ids=PROMPT, choices=[Choice(slot=1)])
    await call.write(with_later_fields(RouterServiceConnectRequest(submits=[submit])))
    tokens: list[int] = []

    async def is_over() -> bool:
        frame = await call.read()
        assert isinstance(frame, RouterServiceConnectResponse)
        tokens.extend(frame.step.token_ids)
        return bool(frame.step.finishes)

    await eventually(is_over, "the end of the answer")
    call.cancel()
    assert tokens == expected_tokens(PROMPT, 0, 20)


async def test_a_router_of_a_later_version_is_served() -> None:
    """A router that is upgraded before a shard may ask for more than the shard knows."""
    async with shard_world() as world:
        router = RouterEnd(world.stub)
        hello = ShardServiceConnectRequest(hello=RouterHello(router_id="later"))
        await router.call.write(with_later_fields(hello))
        await router.read()
        submits = ShardServiceConnectRequest(submits=[submit_of(1, PROMPT, max_tokens=20)])
        await router.call.write(with_later_fields(submits))
        assert (await router.finish_of(1)).num_output_tokens == 20


async def test_an_answer_that_ends_for_a_reason_of_a_later_version_ends(world: RouterWorld) -> None:
    """A later version may name more reasons. One that is not known ends its request alone, and has a name in metrics
    and in the SDK."""

    def as_sent(frame: ShardServiceConnectResponse) -> ShardServiceConnectResponse:
        for finish in frame.step.finishes:
            finish.reason = LATER_REASON
        return frame

    await world.start_shard("shard-0", as_sent=as_sent)
    await world.start_router()
    link = await world.connect()
    await world.wait_for_shards(link, 1)
    for _ in range(2):
        answer = await world.ask(link, PROMPT, 3)
        assert answer.token_ids[0] == expected_tokens(PROMPT, 0, 3)
        assert answer.finish.reason == LATER_REASON
    assert FINISH_REASON_NAMES[LATER_REASON] == "unspecified"
    assert kvloom.FinishReason(LATER_REASON) is kvloom.FinishReason.UNSPECIFIED
