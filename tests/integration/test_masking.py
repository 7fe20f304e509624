"""Personal data is hidden from the model and given back to the client, through a whole fabric and in every API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.screened_world import ScreenedWorld, WritingEngine, screened_world, showing_tokenizer

pytest_plugins = ("tests.fakes.router_fixtures",)

Fabric = tuple[ScreenedWorld, WritingEngine]
MAIL = "eve@example.org"
POLICY = """
[[rules]]
name = "email"
message = "Personal data."
kind = "pii"
finds = "email"
mode = "mask"
"""
CALL = {"id": "c1", "type": "function", "function": {"name": "send", "arguments": json.dumps({"to": MAIL})}}
HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": f"You work for {MAIL}."},
    {"role": "user", "content": [{"type": "text", "text": f"Ask {MAIL}"}]},
    {"role": "assistant", "content": None, "reasoning_content": f"Who is {MAIL}?", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": f"{MAIL} said no"},
]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HISTORY},
    "/v1/responses": {"input": f"Ask {MAIL}", "instructions": f"For {MAIL}."},
    "/v1/messages": {"system": MAIL, "messages": [{"role": "user", "content": f"Ask {MAIL}"}], "max_tokens": 99},
}


@pytest.fixture
async def fabric(router_redis_url: str, tmp_path: Path) -> AsyncIterator[Fabric]:
    policy = tmp_path / "policy.toml"
    policy.write_text(POLICY)
    engine = WritingEngine(showing_tokenizer())
    async with screened_world(router_redis_url, policy, engine) as world:
        world.edge_config.masks_prompts = True
        yield world, engine


def prompts(fabric: Fabric) -> list[str]:
    world, engine = fabric
    shown = [each.prompt_token_ids for each in engine.submitted]
    return [world.tokenizer.decode(each, skip_special_tokens=False) for each in shown]


def placeholder_in(prompt: str) -> str:
    return "[EMAIL-" + prompt.partition("[EMAIL-")[2].partition("]")[0] + "]"


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_the_model_never_reads_it_and_the_client_gets_it_back(
    fabric: Fabric, path: str, is_stream: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """In every place of a conversation; each token of the placeholder arrives by itself. No log has it."""
    world, engine = fabric
    body = {"model": "tiny", **BODIES[path]}
    status, text = await world.post(path, body)
    assert status == 200, text
    [prompt] = prompts(fabric)
    assert "@" not in prompt
    placeholder = placeholder_in(prompt)
    assert prompt.count(placeholder) == json.dumps(body).count(MAIL)
    engine.answer = world.tokenizer.encode_now(f"I wrote to {placeholder}, [EMAIL- and [{placeholder}.")
    status, text = await world.post(path, {**body, "stream": is_stream})
    assert status == 200, text
    assert prompts(fabric)[-1] == prompt  # so that its prefix is cached
    shown = _text_of(path, text, is_stream=is_stream)
    assert shown == f"I wrote to {MAIL}, [EMAIL- and [{MAIL}."
    captured = capsys.readouterr()
    assert MAIL not in captured.out + captured.err


def _text_of(path: str, text: str, *, is_stream: bool) -> str:
    if not is_stream:
        found = json.loads(text)
        if path == "/v1/messages":
            return found["content"][0]["text"]
        if path == "/v1/responses":
            return found["output"][0]["content"][0]["text"]
        return found["choices"][0]["message"]["content"]
    pieces: list[str] = []
    for line in text.splitlines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        if path == "/v1/messages":
            pieces.append(event.get("delta", {}).get("text", ""))
        elif path == "/v1/responses":
            pieces.append(event["delta"] if event["type"] == "response.output_text.delta" else "")
        else:
            pieces += [choice["delta"].get("content") or "" for choice in event["choices"]]
    return "".join(pieces)


async def test_what_no_edge_has_masked_is_refused(fabric: Fabric) -> None:
    """The same rules judge the prompt as the model would read it: descriptions of tools, and plain prompts."""
    world, engine = fabric
    tool = {"type": "function", "function": {"name": "f", "description": f"Mails {MAIL}."}}
    messages = [{"role": "user", "content": "hi"}]
    for path, body in (
        ("/v1/chat/completions", {"messages": messages, "tools": [tool]}),
        ("/v1/completions", {"prompt": MAIL}),
    ):
        status, text = await world.post(path, {"model": "tiny", **body})
        assert status == 400, text
        assert "Personal data." in text
    world.edge_config.masks_prompts = False
    status, _ = await world.post("/v1/chat/completions", {"model": "tiny", "messages": HISTORY})
    assert status == 400
    world.edge_config.masks_prompts = True
    status, text = await world.post("/v1/chat/completions", {"model": "tiny", "messages": HISTORY, "logprobs": True})
    assert (status, json.loads(text)["error"]["param"]) == (400, "logprobs")
    del engine
