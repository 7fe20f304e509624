"""Log-probabilities of answers that a stop string cut, and usage in every chunk, over HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvloom.v1.generation_pb2 import FINISH_REASON_STOP, TokenLogprobs
from kvloom_common.text.detokenizer import IncrementalDetokenizer
from tests.fakes.edge_world import EdgeWorld, chat_body, edge_world
from tests.fakes.fake_router_link import FakeRequest, answer
from tests.fakes.tiny_tokenizer import model_tokenizer

TEXT, STOP, SHOWN = "the fox jumps over the lazy dog", "jumps ov", "the fox "
BODIES = {
    "/v1/chat/completions": chat_body(logprobs=True, stop=[STOP]),
    "/v1/completions": {"model": "tiny", "prompt": "x", "logprobs": 1, "stop": [STOP]},
}


@pytest.fixture
async def world() -> AsyncIterator[EdgeWorld]:
    async with edge_world() as world:
        yield world


def cut(request: FakeRequest) -> None:
    """Sends what a shard sends: text that may begin the stop string is held back, its tokens are not."""
    detokenizer = IncrementalDetokenizer(model_tokenizer(), [STOP])
    request.start()
    for token_id in model_tokenizer().encode_now(TEXT):
        delta = detokenizer.push((token_id,))
        request.tokens(delta, token_ids=[token_id], logprobs=[TokenLogprobs(logprob=-0.5)])
        if detokenizer.stop_string is not None:
            break
    request.finish(FINISH_REASON_STOP, stop_string=STOP)


async def events_of(world: EdgeWorld, path: str, body: dict[str, Any]) -> list[Any]:
    async with world.http.post(world.url + path, json=body | {"stream": True}) as response:
        assert response.status == 200
        lines = (await response.text()).split("\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def tokens_of(logprobs: Any) -> list[str]:
    if logprobs is None:
        return []
    entries = logprobs.get("content")
    return logprobs["tokens"] if entries is None else [entry["token"] for entry in entries]


@pytest.mark.parametrize("path", BODIES)
async def test_tokens_behind_a_stop_string_have_no_logprobs(world: EdgeWorld, path: str) -> None:
    """Clients lay the tokens over the text: those of the stop string have none."""
    world.link.script = cut
    _, body = await world.post(path, BODIES[path])
    [choice] = body["choices"]
    assert choice.get("text", choice.get("message", {}).get("content")) == SHOWN
    assert "".join(tokens_of(choice["logprobs"])) == SHOWN
    choices = [chunk["choices"][0] for chunk in await events_of(world, path, BODIES[path])]
    text, tokens = "", ""
    for choice in choices:
        text += choice.get("text", choice.get("delta", {}).get("content")) or ""
        tokens += "".join(tokens_of(choice["logprobs"]))
        assert text.startswith(tokens)
    assert tokens == text == SHOWN


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("has_logprobs", [True, False])
async def test_every_chunk_has_the_usage_so_far(world: EdgeWorld, path: str, has_logprobs: bool) -> None:
    """As vLLM's: for clients that show what an answer costs while it streams. The last chunk has the whole usage."""
    world.link.script = cut
    body = BODIES[path] | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    if not has_logprobs:
        body = {name: value for name, value in body.items() if name != "logprobs"}
    *chunks, last = await events_of(world, path, body)
    num_prompt_tokens = last["usage"]["prompt_tokens"]
    for chunk in chunks:
        usage = chunk["usage"]
        assert set(usage) == {"prompt_tokens", "completion_tokens", "total_tokens"}
        assert usage["prompt_tokens"] == num_prompt_tokens
        assert usage["total_tokens"] == num_prompt_tokens + usage["completion_tokens"]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"]
    if path == "/v1/chat/completions":
        assert counts[0] == 0  # the role


@pytest.mark.parametrize("options", [{"continuous_usage_stats": True}, {"include_usage": True}])
async def test_without_both_options_no_chunk_has_it(world: EdgeWorld, options: dict[str, bool]) -> None:
    """vLLM needs both, too."""
    world.link.script = answer("x")
    chunks = await events_of(world, "/v1/chat/completions", chat_body(stream_options=options))
    assert all(chunk.get("usage") is None for chunk in chunks if chunk["choices"])
