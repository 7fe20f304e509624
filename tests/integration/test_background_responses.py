"""Background responses, as OpenAI's client uses them, on SQLite and on PostgreSQL."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai.types.responses import Response

from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import SamplingParams
from kvloom.v1.router_service_pb2 import TIER_BATCH
from tests.fakes.fake_router_link import FakeRequest, answer
from tests.fakes.served_models import tiny_model
from tests.fakes.state_world import StateWorld, state_world_on
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")  # the tests of a database share their world

TEXT = "The quick brown fox jumps over the lazy dog, and then\n\nit does so again. " * 3
OPEN = ("queued", "in_progress")
SEEDED = dataclasses.replace(tiny_model("seeded"), default_sampling=SamplingParams(seed=7))


@pytest_asyncio.fixture(
    loop_scope="module", scope="module", params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)]
)
async def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[StateWorld]:
    async with state_world_on(request, tmp_path_factory, more_models=[SEEDED], max_background=8) as started:
        yield started


@pytest.fixture
def world(shared: StateWorld) -> StateWorld:
    shared.edge.link.script = answer("Hello", " you")
    return shared


async def begun(world: StateWorld, **more: Any) -> Response:
    return await world.client.responses.create(**{"model": "tiny", "input": "the fox", "background": True, **more})


async def over(world: StateWorld, response_id: str) -> Response:
    async def found() -> Response | None:
        now = await world.client.responses.retrieve(response_id)
        return None if now.status in OPEN else now

    ended = await eventually(found, "the end of the response")
    assert ended is not None
    return ended


async def events_of(world: StateWorld, response_id: str, after: int | None = None) -> list[Any]:
    more = {} if after is None else {"starting_after": after}
    return [event async for event in await world.client.responses.retrieve(response_id, stream=True, **more)]


async def refused(call: Any) -> tuple[int, dict[str, Any]]:
    with pytest.raises(openai.APIStatusError) as caught:
        await call
    return caught.value.status_code, dict(caught.value.body)


def parts(text: str, seed: int) -> list[str]:
    """The text in parts of one to nine characters."""
    draw, found = random.Random(seed), list[str]()
    while text:
        size = draw.randint(1, 9)
        found.append(text[:size])
        text = text[size:]
    return found


def lose_edge(world: StateWorld) -> None:
    """The edge that has the streams is gone, and what it knew."""
    table = world.edge.edge.resume
    for stream in list(table.streams.values()):
        table.forget(stream)


async def test_a_response_is_generated_behind_its_clients_back(world: StateWorld) -> None:
    """The client gets an id at once, and finds the same response that it would have waited for."""
    made = await begun(world, metadata={"topic": "foxes"})
    assert (made.status, made.background, made.output, made.usage) == ("queued", True, [], None)
    assert (await world.client.responses.retrieve(made.id)).status == "queued"
    async with world.jobs():
        ended = await over(world, made.id)
    assert (ended.status, ended.output_text, ended.metadata) == ("completed", "Hello you", {"topic": "foxes"})
    assert (ended.id, ended.created_at, ended.store) == (made.id, made.created_at, True)
    assert ended.usage is not None
    assert ended.usage.output_tokens == 2
    listed = await world.client.responses.input_items.list(made.id)
    assert [item.content[0].text for item in listed.data] == ["the fox"]
    request = world.edge.link.requests[-1].request
    assert (request.submit.tenant, request.wanted.sampling.HasField("seed")) == ("acme/search", True)


async def test_requests_that_name_no_seed_have_that_of_the_model(world: StateWorld) -> None:
    """With `[model.defaults] seed` answers repeat, in every API and in the background. A request that names one keeps
    it, and those of other models are drawn."""
    client, messages = world.client, [{"role": "user", "content": "the fox"}]

    def seed() -> int:
        return world.edge.link.requests[-1].request.wanted.sampling.seed

    async with world.jobs():
        await over(world, (await begun(world, model="seeded")).id)
    assert seed() == 7
    create: Any
    for create, body, expected in (
        (client.responses.create, {"input": "the fox"}, 7),
        (client.responses.create, {"input": "the fox", "store": False}, 7),
        (client.completions.create, {"prompt": "the fox"}, 7),
        (client.chat.completions.create, {"messages": messages}, 7),
        (client.chat.completions.create, {"messages": messages, "seed": 5}, 5),
    ):
        await create(model="seeded", **body)
        assert seed() == expected
    await client.responses.create(model="tiny", input="the fox")
    assert seed() != 7


async def test_its_stream_is_one_lifecycle_that_can_be_read_again(world: StateWorld) -> None:
    """A client that comes back gets what follows the last event that it has, also long after the end."""
    world.edge.link.script = answer(*parts(TEXT, 1))
    async with world.jobs():
        stream = await begun(world, stream=True)
        live = [event async for event in stream]
    kinds = [event.type for event in live]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert [event.sequence_number for event in live] == list(range(len(live)))
    assert "".join(event.delta for event in live if event.type == "response.output_text.delta") == TEXT
    response_id = live[0].response.id
    for after in (None, 0, len(live) // 2, len(live) - 2):
        assert await events_of(world, response_id, after) == live[0 if after is None else after + 1 :]
    assert await events_of(world, response_id, len(live) - 1) == []


async def test_it_follows_a_response_and_belongs_to_a_conversation(world: StateWorld) -> None:
    """What comes before its input is that of the time when it was asked for, whatever is deleted meanwhile."""
    client = world.client
    first = await client.responses.create(model="tiny", input="first question")
    talk = await client.conversations.create()
    second = await begun(world, input="second question", previous_response_id=first.id)
    third = await begun(world, input="third question", conversation=talk.id)
    await client.responses.delete(first.id)
    async with world.jobs():
        ended = await over(world, second.id)
        assert (await over(world, third.id)).conversation.id == talk.id
    assert ended.previous_response_id == first.id
    prompts = [world.prompt(number) for number in (-2, -1)]
    prompt = next(one for one in prompts if "second" in one)
    assert prompt.index("first question") < prompt.index("Hello you") < prompt.index("second question")
    texts = [item.content[0].text for item in (await client.conversations.items.list(talk.id, order="asc")).data]
    assert texts == ["third question", "Hello you"]


@pytest.mark.parametrize("num_parts", [0, 2, 6, 18, 40])
async def test_a_response_is_generated_again_to_the_byte(world: StateWorld, num_parts: int) -> None:
    """An orchestrator and its edge die at any point, and others go on: readers get the same events, though the tokens
    come in other portions, and each answer has the seed of the first."""
    held: list[FakeRequest] = []
    world.edge.link.script = held.append
    made = await begun(world, temperature=1.0)
    before: list[Any] = []
    async with world.jobs():
        reader = asyncio.create_task(read_into(world, made.id, before))
        await eventually(lambda: held, "the first generation")
        held[0].start()
        for part in parts(TEXT, num_parts)[:num_parts]:
            held[0].tokens(part)
        await eventually(lambda: not num_parts or len(before) >= 2 + num_parts // 2, "some events")
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    lose_edge(world)
    async with world.jobs():
        await eventually(lambda: len(held) == 2, "the second generation")
        answer(*parts(TEXT, 99))(held[1])
        ended = await over(world, made.id)
    assert ended.output_text == TEXT
    after = await events_of(world, made.id)
    assert [event.model_dump() for event in after[: len(before)]] == [event.model_dump() for event in before]
    assert held[0].request.wanted.sampling.seed == held[1].request.wanted.sampling.seed


async def read_into(world: StateWorld, response_id: str, found: list[Any]) -> None:
    async for event in await world.client.responses.retrieve(response_id, stream=True):
        found += [event]


async def test_another_answer_than_the_one_that_was_sent_fails(world: StateWorld) -> None:
    """An engine that is not deterministic would otherwise tell a client half of one answer, and half of another."""
    held: list[FakeRequest] = []
    world.edge.link.script = held.append
    made = await begun(world)
    before: list[Any] = []
    async with world.jobs():
        reader = asyncio.create_task(read_into(world, made.id, before))
        await eventually(lambda: held, "the first generation")
        held[0].start()
        held[0].tokens("one two three ")
        await eventually(lambda: len(before) >= 5, "some events")
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    lose_edge(world)
    async with world.jobs():
        await eventually(lambda: len(held) == 2, "the second generation")
        answer("four five six seven")(held[1])
        ended = await over(world, made.id)
    assert ended.status == "failed"
    assert ended.error is not None
    assert "could not be continued" in ended.error.message


async def test_an_overloaded_fabric_delays_it_and_a_refusal_fails_it(world: StateWorld) -> None:
    """Nobody waits, so that what others are told to repeat is repeated for the client."""
    refusals = [True] * 3

    def script(request: FakeRequest) -> None:
        if refusals:
            refusals.pop()
            request.fail(ErrorReason.ERROR_REASON_QUEUE_FULL)
        else:
            answer("Hello")(request)

    world.edge.link.script = script
    made = await begun(world)
    async with world.jobs():
        assert (await over(world, made.id)).output_text == "Hello"
        world.edge.link.script = lambda request: request.fail(ErrorReason.ERROR_REASON_INVALID_ARGUMENT)
        failed = await over(world, (await begun(world)).id)
        assert failed.status == "failed"
        assert failed.error is not None
        assert failed.error.message == "it failed"
        events = await events_of(world, failed.id)
        assert [event.type for event in events][-1] == "response.failed"


async def test_it_is_cancelled_before_it_begins_and_while_it_runs(world: StateWorld) -> None:
    """Its stream ends, the model stops, and it stays cancelled."""
    held: list[FakeRequest] = []
    world.edge.link.script = held.append
    early = await begun(world)
    assert (await world.client.responses.cancel(early.id)).status == "cancelled"
    async with world.jobs():
        made = await begun(world)
        before: list[Any] = []
        reader = asyncio.create_task(read_into(world, made.id, before))
        await eventually(lambda: held, "the generation")
        held[0].start()
        held[0].tokens("one two three ")
        await eventually(lambda: len(before) >= 5, "some events")
        assert (await world.client.responses.cancel(made.id)).status == "cancelled"
        await reader
        await eventually(held[0].cancelled.is_set, "the end of the generation")
        await eventually(lambda: not world.logs, "the end of the work")
        again = await world.client.responses.cancel(made.id)
    assert (again.status, again.output) == ("cancelled", [])
    assert [event.type for event in before][-1] == "response.output_text.delta"
    assert await events_of(world, made.id) == before
    assert len(held) == 1


async def test_a_deleted_response_is_generated_no_further(world: StateWorld) -> None:
    """What is deleted leaves nothing, and costs nothing any more."""
    held: list[FakeRequest] = []
    world.edge.link.script = held.append
    async with world.jobs():
        made = await begun(world)
        await eventually(lambda: held, "the generation")
        held[0].start()
        held[0].tokens("one two three ")
        await world.client.responses.delete(made.id)
        await eventually(held[0].cancelled.is_set, "the end of the generation")
        await eventually(lambda: not world.logs, "the end of the work")
    assert (await refused(world.client.responses.retrieve(made.id)))[0] == 404


async def test_only_its_tenant_reads_and_cancels_it(world: StateWorld) -> None:
    """Another tenant's id is answered as one that nobody has."""
    async with world.jobs():
        made = await begun(world)
        await over(world, made.id)
    unknown = "resp_" + "0" * 48
    for call in (
        world.other.responses.retrieve,
        world.other.responses.cancel,
        world.other.responses.delete,
        lambda name: world.other.responses.retrieve(name, stream=True),
    ):
        own, other = await refused(call(made.id)), await refused(call(unknown))
        assert own[0] == other[0] == 404
        assert own[1]["message"].replace(made.id, unknown) == other[1]["message"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"store": False}, "store"),
        ({"background": False, "background_options": {"completion_window": "2h"}}, "background_options"),
        ({"stream": True, "background_options": {"completion_window": "8h"}}, "stream"),
        ({"background_options": {"completion_window": "1h"}}, "background_options.completion_window"),
        ({"temperature": 9}, "temperature"),
        ({"previous_response_id": "resp_0"}, "previous_response_id"),
    ],
)
async def test_what_is_wrong_is_said_at_once(world: StateWorld, body: dict[str, Any], field: str) -> None:
    """A response that can never be generated is not accepted first."""
    status, error = await refused(begun(world, extra_body=body))
    assert (status in (400, 404), error["param"]) == (True, field)


async def test_one_that_has_time_is_of_the_class_batch(world: StateWorld) -> None:
    """Windows of hours cost less, since they get what others leave."""
    made = await begun(world, extra_body={"background_options": {"completion_window": "2h"}})
    async with world.jobs():
        assert (await over(world, made.id)).status == "completed"
    assert world.edge.link.requests[-1].request.wanted.tier == TIER_BATCH


async def test_a_tenant_has_a_bounded_queue(world: StateWorld) -> None:
    """Nobody fills the table for all."""
    made = [await begun(world) for _ in range(8)]
    status, error = await refused(begun(world))
    assert status == 429
    assert "max_background" in error["message"]
    async with world.jobs():
        for one in made:
            assert (await over(world, one.id)).status == "completed"


async def test_only_an_orchestrator_names_a_response(world: StateWorld) -> None:
    """A client cannot take another response's id by the header of orchestrators."""
    header = {"x-kvloom-run": '{"id": "resp_1", "created_at": 1, "seed": 1}'}
    made = await world.client.responses.create(model="tiny", input="the fox", extra_headers=header)
    assert made.id != "resp_1"
