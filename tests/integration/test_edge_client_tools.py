"""Tools of kinds that a model does not know: mapped to functions and back, or left out, in every API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pydantic
import pytest
from openai.types.chat import ChatCompletion
from openai.types.responses import Response, ResponseStreamEvent

from kvloom_common.parsers.spec import ParserSpec
from tests.fakes.edge_world import EdgeWorld, chat_body, edge_world
from tests.fakes.fake_router_link import LENGTH, answer

GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Patches.", "format": GRAMMAR}
SHELL = {"type": "function", "name": "shell", "parameters": {"type": "object", "properties": {}}, "strict": False}
IDEA = {"type": "namespace", "name": "mcp__idea", "description": "An IDE.", "tools": [SHELL | {"name": "open"}]}
WEB = {"type": "web_search", "external_web_access": False}
TEXT = '*** Begin Patch\n+ "é"\\n\n*** End'
LEFT_OUT = "x-kvloom-left-out-tools"


def call(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def pieces(text: str, size: int = 3) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]


@pytest.fixture
async def world() -> AsyncIterator[EdgeWorld]:
    async with edge_world(output=ParserSpec(tools="hermes")) as started:
        yield started


async def posted(world: EdgeWorld, path: str, body: dict[str, Any]) -> tuple[Any, dict[str, str]]:
    async with world.http.post(world.url + path, json=body) as response:
        text = await response.text()
        assert response.status == 200, text
        if body.get("stream"):
            data = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: {")]
            return [json.loads(each) for each in data], dict(response.headers)
        return json.loads(text), dict(response.headers)


def prompt_of(world: EdgeWorld) -> str:
    model = world.edge.models.by_name["tiny"]
    return model.tokenizer.decode(world.link.requests[-1].request.prompt_token_ids, skip_special_tokens=False)


async def test_codex_gets_its_tools_calls_in_the_form_in_which_it_sent_them(world: EdgeWorld) -> None:
    """Codex finds a tool by namespace and name, and runs a custom tool on text: anything else is an unknown call."""
    text = call("mcp__idea__open", {"file": "a"}) + call("apply_patch", {"input": TEXT})
    world.link.script = answer(*pieces(text))
    request = {"model": "tiny", "input": "fix it", "tools": [SHELL, IDEA, PATCH, WEB]}
    body, headers = await posted(world, "/v1/responses", request)
    pydantic.TypeAdapter[Response](Response).validate_python(body)
    opened, patched = body["output"]
    assert (opened["type"], opened["namespace"], opened["name"]) == ("function_call", "mcp__idea", "open")
    assert json.loads(opened["arguments"]) == {"file": "a"}
    assert (patched["type"], patched["name"], patched["input"]) == ("custom_tool_call", "apply_patch", TEXT)
    assert headers[LEFT_OUT] == "web_search"
    assert [tool["type"] for tool in body["tools"]] == ["function", "namespace", "custom"]
    assert "start: /.+/" in prompt_of(world)
    assert "web_search" not in prompt_of(world)
    world.link.script = answer(*pieces(text, 5))
    events, headers = await posted(world, "/v1/responses", request | {"stream": True})
    for number, event in enumerate(events):
        assert event["sequence_number"] == number
        pydantic.TypeAdapter[ResponseStreamEvent](ResponseStreamEvent).validate_python(event)
    assert headers[LEFT_OUT] == "web_search"
    shape = [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in body["output"]]
    output = events[-1]["response"]["output"]
    assert [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in output] == shape
    deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == TEXT


async def test_a_custom_call_that_is_cut_off_has_the_text_so_far(world: EdgeWorld) -> None:
    """The client must neither get JSON for the text, nor half an escape."""
    whole = call("apply_patch", {"input": TEXT})
    for end in range(whole.index("Begin"), whole.index("End"), 3):
        world.link.script = answer(whole[:end], reason=LENGTH)
        body, _ = await posted(world, "/v1/responses", {"model": "tiny", "input": "x", "tools": [PATCH]})
        [item] = body["output"]
        assert TEXT.startswith(item["input"])
        assert item["status"] == "incomplete"


@pytest.mark.parametrize("streams", [False, True])
async def test_custom_tools_of_chat_completions(world: EdgeWorld, *, streams: bool) -> None:
    """In this API the tool and its call stand in a field of their own."""
    world.link.script = answer(*pieces(call("apply_patch", {"input": TEXT})))
    tool = {"type": "custom", "custom": {"name": "apply_patch", "format": {"type": "grammar", "grammar": GRAMMAR}}}
    body = chat_body(tools=[tool, {"type": "web_search"}, {"type": "x y"}], stream=streams)
    found, headers = await posted(world, "/v1/chat/completions", body)
    assert headers[LEFT_OUT] == "web_search, other"
    if not streams:
        pydantic.TypeAdapter[ChatCompletion](ChatCompletion).validate_python(found)
        [made] = found["choices"][0]["message"]["tool_calls"]
        assert (made["type"], made["custom"]) == ("custom", {"name": "apply_patch", "input": TEXT})
        return
    deltas = [made for chunk in found for made in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert [made["custom"].get("name") for made in deltas] == ["apply_patch", None]
    assert "".join(made["custom"]["input"] for made in deltas) == TEXT
    assert found[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_demanded_custom_tool_is_called(world: EdgeWorld) -> None:
    """By the name and the kind that the client gives it."""
    world.link.script = answer(json.dumps({"name": "apply_patch", "arguments": {"input": TEXT}}))
    choice = {"type": "custom", "name": "apply_patch"}
    body, _ = await posted(
        world, "/v1/responses", {"model": "tiny", "input": "x", "tools": [PATCH, IDEA], "tool_choice": choice}
    )
    assert body["output"][0]["input"] == TEXT
    assert body["tool_choice"] == choice
    guide = json.loads(world.link.requests[-1].request.wanted.sampling.guide.json_schema)
    assert guide["properties"]["name"] == {"const": "apply_patch"}


async def test_the_tools_of_messages_that_a_client_runs_are_functions(world: EdgeWorld) -> None:
    """Anthropic's models know them without a schema; those that Anthropic's servers run are left out."""
    world.link.script = answer(*pieces(call("bash", {"command": "ls"})))
    tools = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 9},
        {"name": "find", "input_schema": {"type": "object"}, "defer_loading": True},
        {"name": "inner", "input_schema": {"type": "object"}, "allowed_callers": ["code_execution_20250825"]},
        {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
    ]
    request = {"model": "tiny", "max_tokens": 99, "messages": [{"role": "user", "content": "x"}], "tools": tools}
    body, headers = await posted(world, "/v1/messages", request)
    [block] = body["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "bash", {"command": "ls"})
    assert headers[LEFT_OUT] == "web_search_20250305, inner, tool_search_tool_regex_20251119"
    assert '"find"' in prompt_of(world)
    assert "str_replace_based_edit_tool" in prompt_of(world)


async def test_errors_name_the_place_in_the_body(world: EdgeWorld) -> None:
    """Tools that are left out must not move those behind them."""
    strict = {"type": "object", "properties": {"a": {"not": {}}}}
    status, body = await world.chat(
        tools=[
            {"type": "web_search"},
            {"type": "function", "function": {"name": "f", "strict": True, "parameters": strict}},
        ]
    )
    assert status == 400
    assert body["error"]["param"] == "tools[1].function.parameters.properties.a"
    assert "'not'" in body["error"]["message"]
    assert "'f'" in body["error"]["message"]


async def test_hundreds_of_tools_are_served(world: EdgeWorld) -> None:
    """Agents with several MCP servers bring 130 to 250, and their users do not choose how many."""
    world.link.script = answer("ok")
    tools = [{"name": f"mcp__server__tool_{i}", "input_schema": {"type": "object"}} for i in range(250)]
    request = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}], "tools": tools}
    async with world.http.post(world.url + "/v1/messages", json=request) as response:
        text = await response.text()
    assert response.status == 200 or "prompt is too long" in text, text


async def test_calls_come_back_as_the_model_has_written_them(world: EdgeWorld) -> None:
    """What a response has answered is in the next request's input, under the client's names."""
    world.link.script = answer("ok")
    items = [
        {"role": "user", "content": "fix it"},
        {
            "type": "function_call",
            "call_id": "c1",
            "namespace": "mcp__idea",
            "name": "open",
            "arguments": '{"file": "a"}',
        },
        {"type": "function_call_output", "call_id": "c1", "output": "opened"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "the patch"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
    ]
    await posted(world, "/v1/responses", {"model": "tiny", "input": items, "tools": [IDEA, PATCH]})
    prompt = prompt_of(world)
    assert call("mcp__idea__open", {"file": "a"}) in prompt
    assert call("apply_patch", {"input": "the patch"}) in prompt
