"""Prompts: stored templates that OpenAI's client names in its responses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from tests.fakes.fake_router_link import answer
from tests.fakes.state_world import StateWorld, state_world_on
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")  # the tests share their world

PROMPTS = "/kvloom/v1/prompts"
TEMPLATE: dict[str, Any] = {
    "name": "translator",
    "metadata": {"team": "looms"},
    "instructions": "Answer in {{ language }}.",
    "input": [{"role": "user", "content": "I am {{name}}."}, {"role": "assistant", "content": "Hello {{name}}!"}],
}


@pytest_asyncio.fixture(
    loop_scope="module",
    scope="module",
    params=["sqlite", pytest.param("postgresql", marks=[pytest.mark.postgres, pytest.mark.long])],
)
async def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[StateWorld]:
    async with state_world_on(request, tmp_path_factory) as started:
        started.edge.link.script = answer("Bonjour")
        yield started


async def asked(world: StateWorld, method: str, path: str, body: Any = None, *, of_other: bool = False) -> Any:
    client = world.other if of_other else world.client
    headers = {"Authorization": f"Bearer {client.api_key}"}
    url = f"{world.edge.url}{PROMPTS}{path}"
    async with world.edge.http.request(method, url, json=body, headers=headers) as response:
        return response.status, await response.json()


async def made(world: StateWorld, **more: Any) -> dict[str, Any]:
    status, one = await asked(world, "POST", "", {**TEMPLATE, **more})
    assert status == 200, one
    return one


async def test_a_prompt_has_versions_that_never_change(world: StateWorld) -> None:
    """A response that names a version means the same text for ever."""
    one = await made(world)
    assert (one["object"], one["version"], one["variables"]) == ("prompt", "1", ["language", "name"])
    assert await asked(world, "GET", f"/{one['id']}") == (200, one)
    world.now += 1
    status, second = await asked(world, "POST", f"/{one['id']}/versions", {"instructions": "Answer briefly."})
    assert (status, second["version"], second["latest_version"], second["variables"]) == (200, "2", "2", [])
    assert (second["name"], second["input"]) == ("translator", [])
    assert await asked(world, "GET", f"/{one['id']}") == (200, second)
    assert await asked(world, "GET", f"/{one['id']}?version=1") == (200, {**one, "latest_version": "2"})
    other = await made(world, name="other")
    _, page = await asked(world, "GET", "?limit=1")
    assert ([entry["id"] for entry in page["data"]], page["has_more"]) == ([other["id"]], True)
    assert (await asked(world, "DELETE", f"/{one['id']}"))[1]["deleted"]
    for path in (f"/{one['id']}", f"/{one['id']}?version=1"):
        assert (await asked(world, "GET", path))[0] == 404


@pytest.mark.parametrize("is_background", [False, True])
async def test_a_response_is_made_of_it(world: StateWorld, is_background: bool) -> None:
    """Its messages come before all others, and the response says which version it was."""
    one = await made(world)
    variables: Any = {"language": "French", "name": {"type": "input_text", "text": '{{language}} \\1 "Ann"'}}
    prompt: Any = {"id": one["id"], "variables": variables}
    response = await world.client.responses.create(
        model="tiny", prompt=prompt, input="How are you?", background=is_background
    )
    if is_background:
        async with world.jobs():

            async def ended() -> bool:
                nonlocal response
                response = await world.client.responses.retrieve(response.id)
                return response.status == "completed"

            await eventually(ended, "the end of the response")
    assert response.output_text == "Bonjour"
    assert response.prompt is not None
    assert (response.prompt.id, response.prompt.version) == (one["id"], "1")
    assert response.instructions == "Answer in French."
    text = world.prompt()
    assert 'I am {{language}} \\1 "Ann".' in text  # a value is no template
    assert text.index("Answer in French.") < text.index("I am") < text.index("Hello") < text.index("How are you?")
    listed = await world.client.responses.input_items.list(response.id)
    assert [item.content[0].text for item in listed.data] == ["How are you?"]


async def test_versions_input_and_instructions_are_the_requests_choice(world: StateWorld) -> None:
    one = await made(world)
    await asked(world, "POST", f"/{one['id']}/versions", {"input": [{"role": "user", "content": "Count to ten."}]})
    without = await world.client.responses.create(model="tiny", prompt={"id": one["id"]})
    assert "Count to ten." in world.prompt()
    named: Any = {"id": one["id"], "version": "1", "variables": {"language": "French", "name": "Ann"}}
    await world.client.responses.create(model="tiny", prompt=named, instructions="Be brief.", input="x")
    assert "Be brief." in world.prompt()
    assert "Answer in" not in world.prompt()
    follows = await world.client.responses.create(
        model="tiny", prompt=named, input="and then?", previous_response_id=without.id
    )
    assert world.prompt().index("I am Ann.") < world.prompt().index("Bonjour") < world.prompt().index("and then?")
    counted = await world.client.responses.input_tokens.count(
        model="tiny", input="and then?", previous_response_id=without.id, extra_body={"prompt": named}
    )
    assert counted.input_tokens == follows.usage.input_tokens


async def test_what_is_missing_is_named(world: StateWorld) -> None:
    one = await made(world)
    both = {"language": "French", "name": "Ann"}
    cases: list[tuple[Any, int, str]] = [
        ({"id": one["id"]}, 400, "prompt.variables"),
        ({"id": one["id"], "variables": {**both, "age": "3"}}, 400, "prompt.variables"),
        ({"id": one["id"], "variables": {**both, "name": {"type": "input_image"}}}, 400, "prompt.variables[...].type"),
        ({"id": one["id"], "variables": both, "version": "2"}, 404, "prompt.version"),
        ({"id": one["id"], "variables": both, "version": "../1"}, 404, "prompt.version"),
        ({"id": "pmpt_nothing", "variables": both}, 404, "prompt.id"),
    ]
    for prompt, status, field in cases:
        with pytest.raises(openai.APIStatusError) as refused:
            await world.client.responses.create(model="tiny", prompt=prompt, input="x")
        assert (refused.value.status_code, refused.value.param) == (status, field)
    for body, field in (
        ({}, "instructions"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}]}, "input[0].type"),
        ({"input": [{"role": "nobody", "content": "a"}]}, "input[0].role"),
        ({"instructions": "a", "metadata": {"a": 1}}, "metadata[...]"),
    ):
        status, error = await asked(world, "POST", "", body)
        assert (status, error["error"]["param"]) == (400, field)


async def test_prompts_are_their_tenants(world: StateWorld) -> None:
    one = await made(world)
    for method, path, body in (
        ("GET", "", None), ("DELETE", "", None), ("POST", "/versions", {"instructions": "mine"}),
    ):  # fmt: skip
        foreign = await asked(world, method, f"/{one['id']}{path}", body, of_other=True)
        unknown = await asked(world, method, f"/pmpt_nothing{path}", body, of_other=True)
        assert foreign[0] == unknown[0] == 404
        assert {**foreign[1]["error"], "message": ""} == {**unknown[1]["error"], "message": ""}
    with pytest.raises(openai.NotFoundError):
        await world.other.responses.create(model="tiny", prompt={"id": one["id"]}, input="x")
    assert (await asked(world, "GET", "", of_other=True))[1]["data"] == []
    assert await asked(world, "GET", f"/{one['id']}") == (200, one)
