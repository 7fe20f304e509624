"""Batches, as OpenAI's client makes them, on SQLite and on PostgreSQL."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai.types import Batch

from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.router_service_pb2 import TIER_BATCH
from tests.fakes.fake_router_link import FakeRequest, answer
from tests.fakes.state_world import StateWorld, state_world_on
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")  # the tests of a database share their world

CHAT = "/v1/chat/completions"
OVER = ("completed", "failed", "expired", "cancelled")


@pytest_asyncio.fixture(
    loop_scope="module", scope="module", params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)]
)
async def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[StateWorld]:
    async with state_world_on(request, tmp_path_factory, batch_concurrency=4) as started:
        yield started


@pytest.fixture
def world(shared: StateWorld) -> StateWorld:
    shared.edge.link.script = answer("Hello")
    return shared


def line(number: int, url: str = CHAT, **body: Any) -> dict[str, Any]:
    content = {"messages": [{"role": "user", "content": f"question {number}"}]}
    if url == "/v1/responses":
        content = {"input": f"question {number}"}
    return {"custom_id": f"c{number}", "method": "POST", "url": url, "body": {"model": "tiny", **content, **body}}


async def begun(world: StateWorld, lines: list[Any], endpoint: Any = CHAT, **more: Any) -> Batch:
    text = "\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines)
    file = await world.client.files.create(file=("in.jsonl", text.encode()), purpose="batch")
    return await world.client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more)


async def over(world: StateWorld, batch: Batch) -> Batch:
    async def found() -> Batch | None:
        now = await world.client.batches.retrieve(batch.id)
        return now if now.status in OVER else None

    ended = await eventually(found, "the end of the batch")
    assert ended is not None
    return ended


async def lines_of(world: StateWorld, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(one) for one in (await world.client.files.content(file_id)).text.splitlines()]


@pytest.mark.parametrize("endpoint", [CHAT, "/v1/responses"])
async def test_a_batch_is_answered_behind_all_others(world: StateWorld, endpoint: str) -> None:
    """Its requests are the tenant's own, of the class batch, and fill capacity that is idle."""
    first = len(world.edge.link.requests)
    batch = await begun(world, [line(number, endpoint) for number in range(9)], endpoint, metadata={"a": "b"})
    assert (batch.status, batch.metadata, batch.expires_at) == ("validating", {"a": "b"}, batch.created_at + 86_400)
    async with world.jobs():
        ended = await over(world, batch)
    assert ended.status == "completed"
    assert ended.request_counts is not None
    assert (ended.request_counts.total, ended.request_counts.completed, ended.request_counts.failed) == (9, 9, 0)
    assert ended.usage is not None
    assert ended.usage.output_tokens == 9
    assert ended.error_file_id is None
    output = await lines_of(world, ended.output_file_id)
    assert [one["custom_id"] for one in output] == [f"c{number}" for number in range(9)]
    assert {one["response"]["status_code"] for one in output} == {200}
    requests = world.edge.link.requests[first:]
    assert len(requests) == 9
    assert {request.request.wanted.tier for request in requests} == {TIER_BATCH}
    assert {request.request.submit.tenant for request in requests} == {"acme/search"}
    assert {request.request.submit.key_id for request in requests} != {""}
    assert batch.id in [one.id async for one in world.client.batches.list(limit=1)]


async def test_a_line_that_is_refused_is_in_the_error_file(world: StateWorld) -> None:
    batch = await begun(world, [line(1), line(2, temperature=9), line(3, model="nothing")])
    async with world.jobs():
        ended = await over(world, batch)
    assert ended.status == "completed"
    assert ended.request_counts is not None
    assert (ended.request_counts.completed, ended.request_counts.failed) == (1, 2)
    errors = {one["custom_id"]: one["response"] for one in await lines_of(world, ended.error_file_id)}
    assert errors["c2"]["status_code"] == 400
    assert errors["c2"]["body"]["error"]["param"] == "temperature"
    assert errors["c3"]["status_code"] in (403, 404)


async def test_an_invalid_file_fails_with_its_lines(world: StateWorld) -> None:
    bad = [line(1), line(1), line(2, "/v1/embeddings"), "no json", line(3, stream=True)]
    batch = await begun(world, bad)
    empty = await begun(world, [])
    async with world.jobs():
        ended, nothing = await over(world, batch), await over(world, empty)
    assert ended.status == nothing.status == "failed"
    assert ended.errors is not None
    assert ended.errors.data is not None
    assert [(one.line, one.code) for one in ended.errors.data] == [
        (2, "duplicate_custom_id"),
        (3, "mismatched_endpoint"),
        (4, "invalid_json_line"),
        (5, "invalid_request"),
    ]
    assert nothing.errors is not None
    assert [one.code for one in nothing.errors.data or ()] == ["empty_file"]


async def test_an_overloaded_fabric_delays_lines(world: StateWorld) -> None:
    """A batch has a day: what is refused because others come first is asked again."""
    refusals = [True] * 3

    def script(request: FakeRequest) -> None:
        if refusals:
            refusals.pop()
            request.fail(ErrorReason.ERROR_REASON_QUEUE_FULL)
        else:
            answer("Hello")(request)

    world.edge.link.script = script
    batch = await begun(world, [line(number) for number in range(2)])
    async with world.jobs():
        ended = await over(world, batch)
    assert ended.status == "completed"
    assert ended.request_counts is not None
    assert ended.request_counts.completed == 2


@pytest.mark.parametrize("why", ["cancelled", "expired"])
async def test_a_batch_that_ends_early_keeps_what_is_done(world: StateWorld, why: str) -> None:
    held: list[FakeRequest] = []

    def script(request: FakeRequest) -> None:
        if len(held) < 2:
            answer("Hello")(request)
        held.append(request)

    world.edge.link.script = script
    batch = await begun(world, [line(number) for number in range(8)])
    async with world.jobs():
        await eventually(lambda: len(held) >= 6, "requests that are held")
        if why == "cancelled":
            assert (await world.client.batches.cancel(batch.id)).status == "cancelling"
        else:
            world.now += 86_401
        ended = await over(world, batch)
    assert ended.status == why
    assert ended.request_counts is not None
    assert (ended.request_counts.total, ended.request_counts.completed, ended.request_counts.failed) == (8, 2, 6)
    assert len(await lines_of(world, ended.output_file_id)) == 2
    errors = await lines_of(world, ended.error_file_id)
    assert {one["error"]["code"] for one in errors} == {f"batch_{why}"}
    assert len(errors) == 6
    with pytest.raises(openai.ConflictError):
        await world.client.batches.cancel(batch.id)


async def test_another_orchestrator_continues(world: StateWorld) -> None:
    """No line is lost, and none is twice in the output."""
    held: list[FakeRequest] = []

    def script(request: FakeRequest) -> None:
        held.append(request)
        if len(held) <= 3:
            answer("Hello")(request)

    world.edge.link.script = script
    batch = await begun(world, [line(number) for number in range(10)])
    async with world.jobs("one"):
        await eventually(lambda: len(held) >= 7, "requests that are held")
    world.edge.link.script = answer("Hello")
    for request in held[3:]:
        answer("Hello")(request)
    world.now += 60.0  # what the first one held is free
    async with world.jobs("two"):
        ended = await over(world, batch)
    assert ended.status == "completed"
    output = await lines_of(world, ended.output_file_id)
    assert sorted(one["custom_id"] for one in output) == sorted(f"c{number}" for number in range(10))


async def test_bad_batches_are_refused_and_others_find_none(world: StateWorld) -> None:
    client = world.client
    file = await client.files.create(file=("in.jsonl", b"x"), purpose="user_data")
    for fields, status, field in (
        ({"input_file_id": file.id}, 400, "input_file_id"),
        ({"input_file_id": "file-nothing"}, 404, "input_file_id"),
        ({"endpoint": "/v1/audio"}, 400, "endpoint"),
        ({"completion_window": "1h"}, 400, "completion_window"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, 400, "output_expires_after.seconds"),
    ):
        body: Any = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h", **fields}
        with pytest.raises(openai.APIStatusError) as caught:
            await client.batches.create(**body)
        assert (caught.value.status_code, caught.value.body["param"]) == (status, field)
    batch = await begun(world, [line(1)])
    for ask in (world.other.batches.retrieve, world.other.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            await ask(batch.id)
    assert [one async for one in world.other.batches.list()] == []
    with pytest.raises(openai.NotFoundError):
        await world.other.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")
    await client.batches.cancel(batch.id)
    async with world.jobs():
        assert (await over(world, batch)).status == "cancelled"


async def test_no_client_speaks_for_others(world: StateWorld) -> None:
    """The port for clients does not read the headers by which an orchestrator says for whom it asks."""
    headers = {"x-kvloom-on-behalf-of": "acme/search", "x-kvloom-on-behalf-of-key": "k"}
    async with world.edge.http.get(f"{world.edge.url}/v1/batches", headers=headers) as response:
        assert response.status == 401
