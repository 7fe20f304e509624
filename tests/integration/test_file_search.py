"""The tool `file_search` of responses, as OpenAI's client uses it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai.types.responses import Response, ResponseFileSearchToolCall

from edge_http.endpoints import file_search
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.router_service_pb2 import FleetState
from tests.fakes.fake_encoder import embedding, encoder_info, encoder_model
from tests.fakes.fake_router_link import FakeRequest, answer
from tests.fakes.fake_safety import FORBIDDEN
from tests.fakes.state_world import StateWorld, state_world
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")  # the tests share their world

FILES = {
    "loom.md": "The Jacquard loom reads punched cards.",
    "mill.txt": "The water mill grinds wheat.",
    "evil.txt": f"The {FORBIDDEN} loom reads all cards.",
}
MARKED = ("It reads", " cards [1].")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[StateWorld, str]]:
    folder = tmp_path_factory.mktemp("file-search")
    async with state_world(f"sqlite:///{folder}/state.db", folder, more_models=[encoder_model()]) as started:
        link = started.edge.link
        tiny = next(info for info in link.fleet.models if info.name == "tiny")
        link.tell(FleetState(models=[tiny, encoder_info()]))
        link.script = embedding(answer(*MARKED))
        ids = [
            (await started.client.files.create(file=(name, text.encode()), purpose="assistants")).id
            for name, text in FILES.items()
        ]
        store = await started.client.vector_stores.create(file_ids=ids)
        async with started.jobs():
            await eventually(lambda: is_ready(started, store.id), "the end of indexing")
        yield started, store.id


async def is_ready(world: StateWorld, store: str) -> bool:
    return (await world.client.vector_stores.retrieve(store)).file_counts.completed == len(FILES)


@pytest.fixture
def world(shared: tuple[StateWorld, str]) -> StateWorld:
    started, _ = shared
    started.edge.link.script = embedding(answer(*MARKED))
    return started


@pytest.fixture
def tool(shared: tuple[StateWorld, str]) -> Any:
    return {"type": "file_search", "vector_store_ids": [shared[1]]}


def search_in(response: Response) -> ResponseFileSearchToolCall:
    search = response.output[0]
    assert isinstance(search, ResponseFileSearchToolCall)
    return search


def citations_in(response: Response) -> list[Any]:
    message: Any = response.output[1]
    return message.content[0].annotations


async def test_the_model_reads_what_was_found_and_its_citations_name_files(world: StateWorld, tool: Any) -> None:
    """One call of the model answers a question about a file."""
    num_before = len(world.edge.link.requests)
    made = await world.client.responses.create(
        model="tiny",
        input="Who reads punched cards?",
        tools=[tool],
        include=["file_search_call.results"],
    )
    asked = [one for one in world.edge.link.requests[num_before:] if not one.request.wanted.HasField("pooling")]
    assert len(asked) == 1
    prompt = world.prompt()
    assert FILES["loom.md"] in prompt
    assert prompt.index(FILES["loom.md"]) < prompt.index("Who reads punched cards?")
    search = search_in(made)
    assert (search.status, search.queries) == ("completed", ["Who reads punched cards?"])
    assert search.results is not None
    assert search.results[0].filename == "loom.md"
    [citation] = citations_in(made)
    assert (citation.type, citation.filename, citation.index) == ("file_citation", "loom.md", len("It reads cards "))
    assert citation.file_id == search.results[0].file_id
    assert made.tools[0].type == "file_search"
    found = await world.client.responses.retrieve(made.id)
    assert found == made
    then = await world.client.responses.create(model="tiny", input="And who grinds?", previous_response_id=made.id)
    assert then.output_text == "".join(MARKED)
    assert FILES["loom.md"] not in world.prompt(), "passages belong to their question"


async def test_a_passage_that_the_policy_flags_is_left_out(world: StateWorld, tool: Any) -> None:
    """One document must not have all questions about it refused, nor be read."""
    await world.client.responses.create(model="tiny", input="Which loom reads all cards?", tools=[tool])
    assert FORBIDDEN not in world.prompt()
    assert FILES["loom.md"] in world.prompt()


async def test_a_stream_is_one_lifecycle(world: StateWorld, tool: Any) -> None:
    """OpenAI's client puts the response together from the events, and checks their order."""
    async with world.client.responses.stream(
        model="tiny",
        input="Who reads punched cards?",
        tools=[tool],
    ) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:7] == [
        "created",
        "in_progress",
        "output_item.added",
        "file_search_call.in_progress",
        "file_search_call.searching",
        "file_search_call.completed",
        "output_item.done",
    ]
    assert kinds.count("created") == kinds.count("completed") == 1
    assert "output_text.annotation.added" in kinds
    assert search_in(final).results is None
    assert final.output_text == "".join(MARKED)
    [citation] = citations_in(final)
    assert citation.filename == "loom.md"
    found = await world.client.responses.retrieve(final.id)
    assert found.output[0] == final.output[0]
    assert citations_in(found) == [citation]


@pytest.mark.parametrize("why", ["timeout", "orchestrator_unavailable"])
async def test_without_the_search_there_is_an_answer_and_a_warning(
    world: StateWorld, tool: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow or dead search costs the passages, and not the answer."""

    def script(request: FakeRequest) -> None:
        if not request.request.wanted.HasField("pooling"):
            answer("Hello")(request)
        elif why == "orchestrator_unavailable":
            request.fail(ErrorReason.ERROR_REASON_SHARD_LOST)

    world.edge.link.script = script
    if why == "timeout":
        monkeypatch.setattr(file_search, "SEARCH_SECONDS", 0.05)
    raw = await world.client.responses.with_raw_response.create(
        model="tiny",
        input="Who reads punched cards?",
        tools=[tool],
    )
    assert raw.headers["x-kvloom-file-search"] == why
    made = raw.parse()
    assert search_in(made).status == "failed"
    assert made.output_text == "Hello"
    assert FILES["loom.md"] not in world.prompt()
    for request in world.edge.link.requests:
        request.lose()  # what the search still waits for


async def test_a_conversation_that_leaves_no_room_is_answered_without_passages(world: StateWorld, tool: Any) -> None:
    """Passages must not make a question too long that fits by itself."""
    tokenizer = world.edge.edge.models.by_name["tiny"].tokenizer
    words = "the quick brown fox "
    text = words * 400
    while len(await tokenizer.encode(text)) < 4096 - 80:  # the window, and what the template and another message take
        text += words
    raw = await world.client.responses.with_raw_response.create(
        model="tiny",
        input=[{"role": "user", "content": text}, {"role": "user", "content": "cards?"}],
        tools=[tool],
        max_output_tokens=5,
    )
    assert raw.headers["x-kvloom-file-search"] == "no_room"
    assert search_in(raw.parse()).status == "incomplete"


async def test_a_background_response_reads_what_was_found_when_it_was_begun(world: StateWorld, tool: Any) -> None:
    """It is generated again after a crash, and its events must not depend on what is found then."""
    client = world.client
    made = await client.responses.create(
        model="tiny",
        input="Who reads punched cards?",
        tools=[tool],
        background=True,
    )
    num_embedded = sum(one.request.wanted.HasField("pooling") for one in world.edge.link.requests)

    async def ended() -> Response | None:
        now = await client.responses.retrieve(made.id)
        assert now.error is None, now.error
        return now if now.status == "completed" else None

    async with world.jobs():
        done = await eventually(ended, "the end of the response")
    assert done is not None
    assert FILES["loom.md"] in world.prompt()
    assert sum(one.request.wanted.HasField("pooling") for one in world.edge.link.requests) == num_embedded
    assert search_in(done).status == "completed"
    assert citations_in(done)[0].filename == "loom.md"
    assert "kvloom_found" not in done.to_json()


async def test_choices_functions_and_turns_without_a_question(world: StateWorld, tool: Any) -> None:
    """The search is no call of the model: it goes along with functions, and is left out where nobody asks."""
    create: Any = world.client.responses.create
    clock = {"type": "function", "name": "clock", "parameters": {"type": "object", "properties": {}}}
    for choice in ("auto", "required", {"type": "file_search"}):
        made = await create(model="tiny", input="cards?", tools=[tool], tool_choice=choice)
        assert search_in(made).status == "completed"
    made = await create(model="tiny", input="cards?", tools=[tool, clock])
    assert [one.type for one in made.tools] == ["file_search", "function"]
    assert search_in(made).status == "completed"
    made = await create(model="tiny", input="cards?", tools=[tool], tool_choice="none")
    assert made.output[0].type == "message"
    items = [
        {"type": "function_call", "call_id": "c", "name": "clock", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "noon"},
    ]
    made = await create(model="tiny", input=items, tools=[tool, clock])
    assert made.output[0].type == "message"


async def test_faults_of_the_request_name_the_tool(world: StateWorld, tool: Any) -> None:
    cases: list[tuple[Any, int, str]] = [
        ([{**tool, "vector_store_ids": ["vs_nothing"]}], 404, "tools[0].vector_store_ids"),
        ([{**tool, "vector_store_ids": []}], 400, "tools[0].vector_store_ids"),
        ([{**tool, "max_num_results": 51}], 400, "tools[0].max_num_results"),
        ([{**tool, "filters": {"type": "eq", "key": "a"}}], 400, "tools[0].filters.value"),
        ([tool, tool], 400, "tools[1]"),
    ]
    for tools, status, field in cases:
        with pytest.raises(openai.APIStatusError) as caught:
            await world.client.responses.create(model="tiny", input="cards?", tools=tools)
        error: Any = caught.value.body
        assert (caught.value.status_code, error["param"]) == (status, field)
    with pytest.raises(openai.NotFoundError):
        await world.other.responses.create(model="tiny", input="cards?", tools=[tool])


async def test_filters_and_thresholds_are_those_of_the_search(world: StateWorld, tool: Any) -> None:
    wanted: Any = {
        **tool,
        "filters": {"type": "eq", "key": "year", "value": 1},
        "ranking_options": {"score_threshold": 0.1},
    }
    made = await world.client.responses.create(model="tiny", input="cards?", tools=[wanted])
    assert search_in(made).status == "completed"
    assert not re.search(r"\[1\]", world.prompt())
