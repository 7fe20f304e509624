"""Conversations that are compacted, as OpenAI's client asks for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from edge_http.openai.responses.compaction import PROMPT
from tests.fakes.edge_world import edge_world
from tests.fakes.fake_router_link import FakeRequest, answer
from tests.fakes.state_world import StateWorld, state_world
from tests.fakes.tiny_tokenizer import model_tokenizer
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")  # the tests share their world

SUMMARY = "Foxes were discussed."
LONG = "a long story about foxes " * 20


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[StateWorld]:
    folder = tmp_path_factory.mktemp("compaction")
    async with state_world(f"sqlite:///{folder}/state.db", folder) as started:
        yield started


@pytest.fixture
def world(shared: StateWorld) -> StateWorld:
    shared.edge.link.script = summarizing(LONG)
    return shared


def summarizing(*deltas: str) -> Any:
    """A script that sums up where it is asked to."""

    def play(request: FakeRequest) -> None:
        prompt = model_tokenizer().decode(request.request.prompt_token_ids, skip_special_tokens=False)
        (answer(SUMMARY) if PROMPT in prompt else answer(*deltas))(request)

    return play


async def turns(client: openai.AsyncOpenAI, *questions: str) -> str:
    """The id of the last of several responses that follow one another."""
    previous: Any = None
    for question in questions:
        made = await client.responses.create(model="tiny", input=question, previous_response_id=previous)
        previous = made.id
    return previous


async def test_a_conversation_is_compacted_on_demand(world: StateWorld) -> None:
    """The user's words stay, and a summary stands for the rest; what follows needs nothing else."""
    last = await turns(world.client, "first question", "second question")
    made = await world.client.responses.compact(
        model="tiny", previous_response_id=last, input="third question", instructions="be brief"
    )
    assert made.object == "response.compaction"
    assert made.usage.output_tokens == 1
    assert [item.type for item in made.output] == ["message"] * 3 + ["compaction"]
    assert [item.content[0].text for item in made.output[:3]] == [
        "first question",
        "second question",
        "third question",
    ]
    asked = world.prompt()
    assert asked.index("be brief") < asked.index(LONG) < asked.index("third question") < asked.index(PROMPT)
    given: Any = [item.model_dump(exclude_none=True, warnings=False) for item in made.output]
    for kept in (given, given[-1:]):  # a client may leave out what comes before the item
        await world.client.responses.create(model="tiny", input=[*kept, {"role": "user", "content": "and now?"}])
        prompt = world.prompt()
        assert prompt.count("first question") == prompt.count(SUMMARY) == 1
        assert prompt.index("third question") < prompt.index(SUMMARY) < prompt.index("and now?")
        assert LONG not in prompt


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_long_conversation_is_compacted_by_itself(world: StateWorld, is_streamed: bool) -> None:
    """One stream is one lifecycle, with the item at its beginning. Later turns begin with the same prompt, so that
    the cache has it."""
    last = await turns(world.client, "first question", "second question")
    world.edge.link.script = summarizing("Fine")
    more: dict[str, Any] = {
        "model": "tiny",
        "input": "third question",
        "previous_response_id": last,
        "context_management": [{"type": "compaction", "compact_threshold": 100}],
    }
    if is_streamed:
        async with world.client.responses.stream(**more) as stream:
            events = [event async for event in stream]
            made = await stream.get_final_response()
        kinds = [event.type for event in events]
        assert kinds.count("response.created") == kinds.count("response.completed") == 1
        assert [event.sequence_number for event in events] == list(range(len(events)))
        place = kinds.index("response.compaction.compacting")
        assert kinds[place - 1 : place + 2] == [
            "response.output_item.added",
            "response.compaction.compacting",
            "response.output_item.done",
        ]
    else:
        made = await world.client.responses.create(**more)
    assert [item.type for item in made.output] == ["compaction", "message"]
    assert made.output_text == "Fine"
    found = await world.client.responses.retrieve(made.id)
    assert found.model_dump(exclude={"output"}) == made.model_dump(exclude={"output"})
    assert [item.id for item in found.output] == [item.id for item in made.output]
    prompt = world.prompt()
    assert LONG not in prompt
    assert prompt.index("second question") < prompt.index(SUMMARY) < prompt.index("third question")
    follows = await world.client.responses.create(model="tiny", input="fourth", previous_response_id=made.id)
    assert [item.type for item in follows.output] == ["message"]
    upto = prompt.index("third question") + len("third question")
    assert world.prompt().startswith(prompt[:upto])
    assert world.prompt().index("Fine") < world.prompt().index("fourth")


async def test_a_background_response_is_compacted_when_it_is_begun(world: StateWorld) -> None:
    """So its events are the same however often it is generated: a summary that was made anew would be another one."""
    last = await turns(world.client, "first question", "second question")
    world.edge.link.script = summarizing("Fine")
    begun = await world.client.responses.create(
        model="tiny",
        input="third question",
        previous_response_id=last,
        background=True,
        context_management=[{"type": "compaction", "compact_threshold": 100}],
    )
    num_requests = len(world.edge.link.requests)

    async def ended() -> Any:
        found = await world.client.responses.retrieve(begun.id)
        return found if found.status == "completed" else None

    async with world.jobs():
        made = await eventually(ended, "the end of the response")
    assert len(world.edge.link.requests) == num_requests + 1
    assert [item.type for item in made.output] == ["compaction", "message"]
    events = [event async for event in await world.client.responses.retrieve(begun.id, stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "response.compaction.compacting" in [event.type for event in events]
    prompt = world.prompt()
    assert LONG not in prompt
    assert prompt.index("second question") < prompt.index(SUMMARY) < prompt.index("third question")
    await world.client.responses.create(model="tiny", input="fourth", previous_response_id=begun.id)
    upto = prompt.index("third question") + len("third question")
    assert world.prompt().startswith(prompt[:upto])


async def test_what_cannot_be_made_smaller_is_left_as_it_is(world: StateWorld) -> None:
    """A first message has nothing before it, and a short conversation needs nothing."""
    wanted: Any = [{"type": "compaction", "compact_threshold": 1}]
    first = await world.client.responses.create(model="tiny", input=LONG, context_management=wanted)
    short: Any = [{"type": "compaction", "compact_threshold": 4000}]
    then = await world.client.responses.create(
        model="tiny", input="b", previous_response_id=first.id, context_management=short
    )
    counted = await world.client.responses.input_tokens.count(
        model="tiny", input="b", previous_response_id=first.id, extra_body={"context_management": wanted}
    )
    assert counted.input_tokens == then.usage.input_tokens
    assert {item.type for made in (first, then) for item in made.output} == {"message"}


async def test_the_earliest_turns_are_left_out(world: StateWorld) -> None:
    """With truncation auto a conversation that is too long is answered, and the next turn begins with the same
    prompt. The system's words stay."""
    items: Any = [{"role": "developer", "content": "Be brief."}]
    items += [{"role": "user", "content": f"Question {number}: {LONG}"} for number in range(60)]
    with pytest.raises(openai.BadRequestError) as caught:
        await world.client.responses.create(model="tiny", input=items)
    assert caught.value.code == "context_length_exceeded"
    first = await world.client.responses.create(model="tiny", input=items, truncation="auto", max_output_tokens=500)
    prompt = world.prompt()
    assert first.truncation == "auto"
    assert "Be brief." in prompt
    assert "Question 0:" not in prompt
    assert "Question 59:" in prompt
    await world.client.responses.create(
        model="tiny", input="Thanks", previous_response_id=first.id, truncation="auto", max_output_tokens=500
    )
    beginning = prompt[: prompt.rindex(LONG)]
    assert world.prompt().startswith(beginning)


async def test_a_compaction_is_its_tenants(world: StateWorld) -> None:
    """Another tenant that has got hold of it learns nothing, and its model knows that something is missing."""
    made = await world.client.responses.compact(model="tiny", input="a secret")
    given: Any = [made.output[-1].model_dump(exclude_none=True), {"role": "user", "content": "tell me"}]
    altered: Any = [{**given[0], "encrypted_content": "QUJD" + given[0]["encrypted_content"][4:]}, given[1]]
    for client, items in ((world.other, given), (world.client, altered)):
        await client.responses.create(model="tiny", input=items)
        assert "a secret" not in world.prompt()
        assert SUMMARY not in world.prompt()
        assert "was compacted by another service" in world.prompt()
    last = await turns(world.client, "first question")
    with pytest.raises(openai.NotFoundError) as foreign:
        await world.other.responses.compact(model="tiny", previous_response_id=last)
    with pytest.raises(openai.NotFoundError) as unknown:
        await world.other.responses.compact(model="tiny", previous_response_id="resp_nothing")
    assert {**foreign.value.body, "message": ""} == {**unknown.value.body, "message": ""}


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("/responses/compact", {}, "input"),
    ("/responses/compact", {"input": []}, "input"),
    ("/responses/compact", {"input": [1]}, "input[0]"),
    ("/responses/compact", {"input": [{"role": "nobody", "content": "a"}]}, "input[0].role"),
    ("/responses", {"context_management": [{"type": "other"}]}, "context_management[0].type"),
    (
        "/responses",
        {"context_management": [{"type": "compaction", "compact_threshold": 0}]},
        "context_management[0].compact_threshold",
    ),
    (
        "/responses",
        {"context_management": [{"type": "compaction"}], "background": True, "prompt": {"id": "pmpt_1"}},
        "context_management",
    ),
]


@pytest.mark.parametrize(("path", "body", "field"), BAD)
async def test_bad_input_is_named(world: StateWorld, path: str, body: dict[str, Any], field: str) -> None:
    headers = {"Authorization": f"Bearer {world.client.api_key}"}
    sent = {"model": "tiny", **({"input": "a"} if path == "/responses" else {}), **body}
    status, answered = await world.edge.post(f"/v1{path}", sent, headers=headers)
    assert (status, answered["error"]["param"]) == (400, field)


async def test_it_needs_no_state() -> None:
    """Clients that keep their conversations themselves compact them, too."""
    async with edge_world() as plain, openai.AsyncOpenAI(base_url=f"{plain.url}/v1", api_key="none") as client:
        plain.link.script = summarizing("Fine")
        made = await client.responses.compact(model="tiny", input="a question")
        given: Any = [made.output[-1].model_dump(exclude_none=True), {"role": "user", "content": "and now?"}]
        answered = await client.responses.create(model="tiny", input=given, store=False)
        assert answered.output_text == "Fine"
        prompt = model_tokenizer().decode(plain.link.requests[-1].request.prompt_token_ids, skip_special_tokens=False)
        assert prompt.index("a question") < prompt.index(SUMMARY) < prompt.index("and now?")
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await client.responses.compact(model="tiny", previous_response_id="resp_1")
