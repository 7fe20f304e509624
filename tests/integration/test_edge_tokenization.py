"""POST /tokenize and POST /detokenize: vLLM's shape, and the tokens that the model really gets."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.fakes.edge_world import EdgeWorld, edge_world
from tests.fakes.fake_router_link import answer


@pytest.fixture
async def world() -> AsyncIterator[EdgeWorld]:
    async with edge_world() as started:
        yield started


async def post(world: EdgeWorld, path: str, **body: Any) -> tuple[int, Any]:
    raw = io.BytesIO(json.dumps({"model": "tiny", **body}).encode())
    async with world.http.post(world.url + path, data=raw, headers={"Content-Type": "application/json"}) as response:
        return response.status, await response.json()


async def test_a_text_and_back(world: EdgeWorld) -> None:
    """What is tokenized reads the same afterwards, special tokens too."""
    status, tokens = await post(world, "/tokenize", prompt="Hello, wörld! <|im_end|>", return_token_strs=True)
    assert status == 200
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert tokens["max_model_len"] > 0
    assert "<|im_end|>" in tokens["token_strs"]
    status, text = await post(world, "/detokenize", tokens=tokens["tokens"])
    assert (status, text) == (200, {"prompt": "Hello, wörld! <|im_end|>"})


async def test_a_conversation_has_the_prompt_of_its_answer(world: EdgeWorld) -> None:
    """Who counts tokens before asking must count those that are used."""
    messages = [{"role": "user", "content": "Hi <|im_end|> there"}]
    _, tokens = await post(world, "/tokenize", messages=messages)
    assert tokens["token_strs"] is None
    world.link.script = answer("Yes.")
    status, _ = await world.chat(messages=messages)
    assert status == 200
    (request,) = world.link.requests
    assert list(request.request.prompt_token_ids) == tokens["tokens"]
    _, begun = await post(
        world,
        "/tokenize",
        messages=[*messages, {"role": "assistant", "content": "Ye"}],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert begun["tokens"][: tokens["count"]] == tokens["tokens"]
    assert begun["count"] > tokens["count"]


@pytest.mark.parametrize(
    ("path", "body", "status", "field"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, 400, "messages"),
        ("/tokenize", {"prompt": "x", "tools": []}, 400, "tools"),
        ("/tokenize", {"prompt": ""}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages[0].role"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "x"}], "add_generation_prompt": False},
            400,
            "add_generation_prompt",
        ),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": "x", "temperature": 1}, 400, "temperature"),
        ("/tokenize", {"prompt": "x" * 2_000_000}, 400, "prompt"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": []}, 400, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, 400, "tokens[1]"),
        ("/detokenize", {"tokens": [10**9]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [1] * (2**20 + 1)}, 413, "tokens"),
    ],
)
async def test_bad_bodies(world: EdgeWorld, path: str, body: Any, status: int, field: str) -> None:
    """Every refusal names the field."""
    answered, error = await post(world, path, **body)
    assert (answered, error["error"]["param"]) == (status, field)
