"""Sampling parameters over HTTP: they reach the fabric unchanged, and errors that only a shard can find name the body's
field."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import SamplingParams, StopConditions, TokenLogprobs
from tests.fakes.edge_world import EdgeWorld, edge_world
from tests.fakes.fake_router_link import FakeRequest, answer
from tests.fakes.tiny_tokenizer import model_tokenizer

FIELDS = {"min_p": 0.1, "repetition_penalty": 1.2, "logit_bias": {"5": -100, "7": 1.5}, "min_tokens": 3}


@pytest.fixture
async def world() -> AsyncIterator[EdgeWorld]:
    async with edge_world() as world:
        yield world


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_parameters_reach_the_fabric(world: EdgeWorld, path: str) -> None:
    """OpenAI's names and vLLM's extensions, at both endpoints."""
    world.link.script = answer("x")
    prompt = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    status, _ = await world.post(path, {"model": "tiny", "seed": 1, "max_tokens": 5, **prompt, **FIELDS})
    assert status == 200
    request = world.link.requests[0].request
    expected = SamplingParams(min_p=0.1, repetition_penalty=1.2, logit_bias={5: -100.0, 7: 1.5}, seed=1)
    assert request.wanted.sampling == expected
    assert request.wanted.stop == StopConditions(max_tokens=5, min_tokens=3)


HARMLESS = [
    {"user": "u", "safety_identifier": "s", "prompt_cache_retention": "24h"},
    {"metadata": {"a": "b"}, "store": False},
    {"service_tier": "priority"},
    {"verbosity": "medium"},
    {"logit_bias": {}},
    {"min_p": 0, "repetition_penalty": 1, "min_tokens": 0},
]


@pytest.mark.parametrize("fields", HARMLESS)
async def test_what_has_no_effect_is_accepted(world: EdgeWorld, fields: dict[str, Any]) -> None:
    """Clients send these as a matter of course, and lose nothing when they change nothing."""
    world.link.script = answer("x")
    status, _ = await world.chat(**fields)
    assert status == 200


async def test_a_prediction_becomes_tokens_and_is_accounted_for(world: EdgeWorld) -> None:
    """Its text may come in parts; usage says how much of it was right, and nothing where there was none."""

    def accept(request: FakeRequest) -> None:
        request.start()
        request.tokens("a fox")
        request.finish(num_predicted_tokens=9, num_accepted_predicted_tokens=7)

    world.link.script = accept
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "fox"}]
    _, body = await world.chat(prediction={"type": "content", "content": parts})
    predicted = world.link.requests[0].request.wanted.sampling.predicted_token_ids
    assert model_tokenizer().decode(predicted) == "a fox"
    details = {"accepted_prediction_tokens": 7, "rejected_prediction_tokens": 2}
    assert body["usage"]["completion_tokens_details"] == details
    world.link.script = answer("x")
    _, body = await world.chat()
    assert "completion_tokens_details" not in body["usage"]
    for bad in ("a fox", {"type": "content"}, {"type": "content", "content": [{"type": "image_url"}]}):
        status, body = await world.chat(prediction=bad)
        assert status == 400
        assert body["error"]["param"].startswith("prediction")


PROMPT = "the fox"
PROMPT_IDS = model_tokenizer().encode_now(PROMPT, add_special_tokens=True)


def report_prompt(request: FakeRequest) -> None:
    """Each prompt token has logprob -1, -2 ... and two likeliest tokens: itself and token 66."""
    entries = [
        TokenLogprobs(logprob=-1.0 - i, top_token_ids=[token_id, 66], top_logprobs=[-1.0 - i, -9.5])
        for i, token_id in enumerate(request.request.prompt_token_ids[1:])
    ]
    has_logprobs = request.request.wanted.sampling.HasField("prompt_logprobs")
    for index in range(request.request.n):
        request.start(index, prompt_logprobs=entries if has_logprobs else ())
        chosen = TokenLogprobs(logprob=-0.5, top_token_ids=[65], top_logprobs=[-0.5])
        logprobs = [chosen] if request.request.wanted.sampling.HasField("logprobs") else []
        request.tokens("a", index, token_ids=[65], logprobs=logprobs)
    for index in range(request.request.n):
        request.finish(index=index)


async def test_echo_repeats_the_prompt_with_its_logprobs(world: EdgeWorld) -> None:
    """Evaluation harnesses score prompts with it: parallel lists over prompt and answer, with null for the first."""
    world.link.script = report_prompt
    status, body = await world.post(
        "/v1/completions", {"model": "tiny", "prompt": PROMPT, "echo": True, "logprobs": 1, "n": 2, "max_tokens": 1}
    )
    assert status == 200
    assert world.link.requests[0].request.wanted.sampling.prompt_logprobs == 1
    for choice in body["choices"]:
        assert choice["text"] == PROMPT + "a"
        logprobs = choice["logprobs"]
        assert {len(values) for values in logprobs.values()} == {len(PROMPT_IDS) + 1}
        assert logprobs["token_logprobs"] == [None, *(-1.0 - i for i in range(len(PROMPT_IDS) - 1)), -0.5]
        assert logprobs["top_logprobs"][0] is None
        assert all(len(top) == 1 for top in logprobs["top_logprobs"][1:])
        assert "".join(logprobs["tokens"][:-1]) == PROMPT
        assert (logprobs["text_offset"][0], logprobs["text_offset"][-1]) == (0, len(PROMPT))
        assert "prompt_logprobs" not in choice


@pytest.mark.parametrize("headers", [{}, {"x-kvloom-resume": "on"}])
async def test_streamed_echo_comes_first(world: EdgeWorld, headers: dict[str, str]) -> None:
    """Concatenated deltas and lists equal the answer that is not streamed; also of several prompts."""
    world.link.script = report_prompt
    asked = {"model": "tiny", "prompt": [PROMPT, "fox"], "echo": True, "logprobs": 1, "max_tokens": 1}
    _, whole = await world.post("/v1/completions", asked)
    async with world.http.post(
        f"{world.url}/v1/completions", json={**asked, "stream": True}, headers=headers
    ) as response:
        lines = [line[6:] for line in (await response.read()).split(b"\n") if line.startswith(b"data: {")]
    chunks = [json.loads(line)["choices"][0] for line in lines]
    for choice in whole["choices"]:
        own = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert "".join(chunk["text"] for chunk in own) == choice["text"]
        logprobs = [chunk["logprobs"] for chunk in own if chunk["logprobs"]]
        for name, values in choice["logprobs"].items():
            assert [value for one in logprobs for value in one[name]] == values


async def test_a_prompt_is_scored(world: EdgeWorld) -> None:
    """Evaluation harnesses ask for the prompt's logprobs and no token, which OpenAI's schema allows."""
    world.link.script = report_prompt
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 1}
    status, body = await world.post("/v1/completions", asked)
    assert status == 200, body
    assert world.link.requests[0].request.wanted.stop.max_tokens == 1
    [choice] = body["choices"]
    assert choice["text"] == PROMPT
    assert {len(values) for values in choice["logprobs"].values()} == {len(PROMPT_IDS)}
    async with world.http.post(f"{world.url}/v1/completions", json={**asked, "stream": True}) as response:
        lines = [line[6:] for line in (await response.read()).split(b"\n") if line.startswith(b"data: {")]
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == PROMPT
    listed = {"model": "tiny", "prompt": PROMPT, "max_tokens": 0, "prompt_logprobs": 1}
    status, body = await world.post("/v1/completions", listed)
    assert (status, body["choices"][0]["text"]) == (200, "")
    assert len(body["choices"][0]["prompt_logprobs"]) == len(PROMPT_IDS)
    status, body = await world.post("/v1/completions", {"model": "tiny", "prompt": PROMPT, "max_tokens": 0})
    assert (status, body["error"]["param"]) == (400, "max_tokens")


async def test_echo_without_logprobs_asks_for_none(world: EdgeWorld) -> None:
    """Token prompts are decoded; the engine has nothing more to do than without echo."""
    world.link.script = report_prompt
    _, body = await world.post("/v1/completions", {"model": "tiny", "prompt": PROMPT_IDS, "echo": True})
    assert body["choices"][0]["text"] == PROMPT + "a"
    assert body["choices"][0]["logprobs"] is None
    assert not world.link.requests[0].request.wanted.sampling.HasField("prompt_logprobs")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_prompt_logprobs_are_listed(world: EdgeWorld, path: str) -> None:
    """vLLM's shape: in the body of a chat completion, in each choice of a plain one."""
    world.link.script = report_prompt
    prompt = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": [{"role": "user", "content": PROMPT}]}
    status, body = await world.post(path, {"model": "tiny", "prompt_logprobs": 1, **prompt})
    assert status == 200
    listed = (body["choices"][0] if path == "/v1/completions" else body)["prompt_logprobs"]
    token_ids = world.link.requests[0].request.prompt_token_ids
    assert listed[0] is None
    assert len(listed) == len(token_ids)
    shown = model_tokenizer().token_bytes(token_ids[1]).decode()
    assert listed[1] == {str(token_ids[1]): {"logprob": -1.0, "rank": 1, "decoded_token": shown}}


async def test_prompt_logprobs_are_bounded_and_not_streamed(world: EdgeWorld) -> None:
    """They would otherwise outgrow messages; the error names the field that asked for them."""
    long = {"model": "tiny", "prompt": [65] * 3000, "n": 3}
    for fields, param in (
        ({**long, "prompt_logprobs": 20}, "prompt_logprobs"),
        ({**long, "echo": True, "logprobs": 20}, "logprobs"),
        ({"model": "tiny", "prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs"),
        ({"model": "tiny", "prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs"),
        ({"model": "tiny", "prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ):
        status, body = await world.post("/v1/completions", fields)
        assert (status, body["error"]["param"]) == (400, param)


REFUSED = [
    ("sampling.top_k", "top_k"),
    ("stop.min_tokens", "min_tokens"),
    ("stop.max_tokens", "max_tokens"),
    ("sampling.logit_bias", "logit_bias"),
    ("prompt_token_ids", "messages"),
    ("prompt", "messages"),
    ("", None),
]


@pytest.mark.parametrize("headers", [{}, {"x-kvloom-resume": "on"}])
@pytest.mark.parametrize(("field", "param"), REFUSED)
async def test_a_shards_error_names_the_bodys_field(
    world: EdgeWorld, field: str, param: str | None, headers: dict[str, str]
) -> None:
    """A client has never seen the fabric's messages, whose fields have other names."""

    def refuse(request: FakeRequest) -> None:
        request.fail(ErrorReason.ERROR_REASON_UNSUPPORTED_PARAMETER, f"{field} is not offered.", field=field)

    world.link.script = refuse
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "stream": bool(headers)}
    status, answered = await world.post("/v1/chat/completions", body, headers=headers)
    assert (status, answered["error"]["param"]) == (400, param)
    assert answered["error"]["message"] == f"{param or ''} is not offered."
