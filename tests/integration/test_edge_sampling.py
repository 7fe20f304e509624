"""Sampling parameters over HTTP: they reach the fabric unchanged, and errors that only a shard can find name the body's
field."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import SamplingParams, StopConditions
from tests.fakes.edge_world import EdgeWorld, edge_world
from tests.fakes.fake_router_link import FakeRequest, answer

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
    assert request.sampling == expected
    assert request.stop == StopConditions(max_tokens=5, min_tokens=3)


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
