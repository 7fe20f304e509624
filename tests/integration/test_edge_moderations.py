"""POST /v1/moderations: OpenAI's shape, with the categories of the safety policy."""

from __future__ import annotations

import io
import json
from typing import Any

import openai
import pytest

from edge_http.formatting.moderation import CATEGORIES
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.config import CallersConfig, KvloomConfig
from tests.fakes.edge_world import edge_world

PATH = "/v1/moderations"
JSON = {"Content-Type": "application/json"}


async def test_the_official_client_reads_the_results() -> None:
    """One text, a list of texts, and parts give one result each, in order."""
    async with (
        edge_world() as world,
        openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key="none", max_retries=0) as client,
    ):
        one = await client.moderations.create(input="something forbidden")
        assert one.id.startswith("modr-")
        assert one.model == "kvloom-policy-1"
        assert one.results[0].flagged
        assert one.results[0].categories.to_dict() == dict.fromkeys(CATEGORIES, False) | {
            "forbidden-things": True,
            "other": False,
        }
        assert one.results[0].category_scores.to_dict()["forbidden-things"] == 1.0
        assert one.results[0].category_scores.to_dict()["other"] == 0.0
        assert one.results[0].category_applied_input_types.to_dict()["other"] == ["text"]
        many = await client.moderations.create(input=["nice", "forbidden", ""], model="omni-moderation-latest")
        assert [result.flagged for result in many.results] == [False, True, False]
        parts = await client.moderations.create(input=[{"type": "text", "text": "forbidden"}])
        assert [result.flagged for result in parts.results] == [True]


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"input": 1}, 400, "input"),
        ({"input": "x", "temperature": 1}, 400, "temperature"),
        ({"input": [{"type": "image_url", "image_url": {"url": "data:"}}]}, 400, "input[0].type"),
        ({"input": [{"type": "text"}]}, 400, "input[0].text"),
        ({"input": ["x"] * 257}, 413, "input"),
        ({"input": ["x" * 2**18] * 5}, 413, "input"),
    ],
)
async def test_bad_bodies(body: Any, status: int, field: str) -> None:
    """Every refusal names the field."""
    async with edge_world() as world:
        raw = io.BytesIO(json.dumps(body).encode())
        async with world.http.post(world.url + PATH, data=raw, headers=JSON) as response:
            answered, error = response.status, await response.json()
        assert (answered, error["error"]["param"]) == (status, field)


async def test_without_a_safety_service() -> None:
    """A client that asks whether a text is harmless must not take an outage for a yes."""
    async with edge_world() as world:
        world.link.moderation_error = KvloomError(ErrorReason.ERROR_REASON_SAFETY_UNAVAILABLE, "Gone.")
        status, body = await world.post(PATH, {"input": "x"})
        assert (status, body["error"]["code"]) == (503, "safety_unavailable")
        world.link.connected = False
        status, body = await world.post(PATH, {"input": "x"})
        assert (status, body["error"]["code"]) == (503, "router_unavailable")


async def test_the_callers_limit_holds_here_too() -> None:
    """Moderations take places of their caller like answers, so that no limit can be passed by."""
    async with edge_world(KvloomConfig(callers=CallersConfig(max_concurrent_requests=1))) as world:
        async with world.http.get(world.url + "/health") as response:
            assert response.status == 200
        with world.edge.admission.admit(world.edge.callers._callers.name("", "127.0.0.1")):
            status, body = await world.post(PATH, {"input": "x"})
        assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
