"""What clients of the HTTP API see of their limits: headers, refusals, and answers that a limit cuts short."""

from __future__ import annotations

import datetime
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import openai
import pytest

from kvloom.errors import KvloomError
from kvloom.limits_state import LimitsState, RateState, limits_state_to_proto
from kvloom.v1.error_reason_pb2 import ErrorReason
from tests.fakes.edge_world import EdgeWorld, chat_body, edge_world
from tests.fakes.fake_control import ACME, SEARCH, SEARCH_KEY, key_of
from tests.fakes.fake_router_link import ERROR, LENGTH, FakeRequest
from tests.fakes.tenants import callers_of
from tests.lazy_imports import imported_when_used

pytestmark = pytest.mark.xdist_group("anthropic")  # which takes seconds to import
anthropic: Any = imported_when_used("anthropic")

STATE = LimitsState(RateState(60, 41, 19.0), RateState(40_000, 39_000, 1.5))
HEADERS = {
    "x-ratelimit-limit-requests": "60",
    "x-ratelimit-remaining-requests": "41",
    "x-ratelimit-reset-requests": "19s",
    "x-ratelimit-limit-tokens": "40000",
    "x-ratelimit-remaining-tokens": "39000",
    "x-ratelimit-reset-tokens": "1.5s",
}
ANTHROPIC_HEADERS = {
    "anthropic-ratelimit-requests-limit": "60",
    "anthropic-ratelimit-requests-remaining": "41",
    **{
        f"anthropic-ratelimit-{unit}-{what}": value
        for unit in ("tokens", "input-tokens", "output-tokens")
        for what, value in (("limit", "40000"), ("remaining", "39000"))
    },
}
RESETS = {"requests": 19.0, "tokens": 1.5, "input-tokens": 1.5, "output-tokens": 1.5}
BUDGET = "tenant:acme/search monthly_budget_nanos"


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[EdgeWorld]:
    callers = callers_of(tmp_path, [ACME, SEARCH, key_of(SEARCH_KEY, "acme/search")])
    async with edge_world(callers=callers) as started:
        started.http.headers["Authorization"] = f"Bearer {SEARCH_KEY}"
        yield started


def limited_answer(request: FakeRequest) -> None:
    request.start(limits=limits_state_to_proto(STATE))
    request.tokens("Hi")
    request.finish()


def cut_answer(request: FakeRequest) -> None:
    request.start()
    request.tokens("Hi")
    request.finish(LENGTH, limited_by=BUDGET)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat_body()),
        ("/v1/completions", {"model": "tiny", "prompt": "the fox"}),
        ("/v1/responses", {"model": "tiny", "input": "the fox"}),
    ],
)
async def test_every_answer_tells_of_the_limits(
    world: EdgeWorld, path: str, body: dict[str, Any], stream: bool
) -> None:
    """Clients pace themselves by these headers, whatever the API."""
    world.link.script = limited_answer
    async with world.http.post(world.url + path, json={**body, "stream": stream}) as response:
        assert response.status == 200
        await response.read()
        assert limit_headers(response.headers) == HEADERS


def limit_headers(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items() if "ratelimit" in name.lower()}


def check_anthropic_headers(headers: Mapping[str, str], began_at: float) -> None:
    """Anthropic's names, and times where OpenAI has durations."""
    found = limit_headers(headers)
    for unit, seconds in RESETS.items():
        reset = found.pop(f"anthropic-ratelimit-{unit}-reset")
        at = datetime.datetime.strptime(reset, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=datetime.UTC).timestamp()
        assert began_at + seconds <= at <= time.time() + seconds + 1.0
    assert found == ANTHROPIC_HEADERS


@pytest.mark.parametrize("stream", [False, True])
async def test_messages_tell_of_the_limits_as_anthropic_does(world: EdgeWorld, stream: bool) -> None:
    """Its clients read no other headers."""
    world.link.script, began_at = limited_answer, time.time()
    body = chat_body(max_tokens=5, stream=stream)
    async with world.http.post(f"{world.url}/v1/messages", json=body) as response:
        assert response.status == 200
        await response.read()
        check_anthropic_headers(response.headers, began_at)


async def test_a_refused_message_is_a_rate_limit_error_of_the_official_client(world: EdgeWorld) -> None:
    """It waits as long as Retry-After says, and its user finds the limits in the response."""
    world.link.script, began_at = refuse(ErrorReason.ERROR_REASON_RATE_LIMITED, 1.25), time.time()
    async with anthropic.AsyncAnthropic(base_url=world.url, api_key=SEARCH_KEY, max_retries=0) as client:
        with pytest.raises(anthropic.RateLimitError) as caught:
            await client.messages.create(model="tiny", max_tokens=5, messages=[{"role": "user", "content": "hi"}])
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["error"]["type"] == "rate_limit_error"
    headers = caught.value.response.headers
    assert headers["retry-after"] == "2"
    check_anthropic_headers(headers, began_at)


async def test_a_caller_without_limits_gets_no_headers_of_them(world: EdgeWorld) -> None:
    """A header without a limit would be a lie."""
    world.link.script = cut_answer
    async with world.http.post(f"{world.url}/v1/chat/completions", json=chat_body()) as response:
        assert not limit_headers(response.headers)


async def test_an_answer_that_a_budget_cuts_short_says_so(world: EdgeWorld) -> None:
    """Otherwise its client would look for the fault in its own max_tokens."""
    world.link.script = cut_answer
    async with world.http.post(f"{world.url}/v1/chat/completions", json=chat_body()) as response:
        body = await response.json()
        assert response.headers["x-kvloom-limited-by"] == BUDGET
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["kvloom"]["limited_by"] == BUDGET
    async with world.http.post(f"{world.url}/v1/chat/completions", json=chat_body(stream=True)) as response:
        text = await response.text()
        assert f'"limited_by":"{BUDGET}"' in text


def refuse(reason: ErrorReason.ValueType, retry_after_seconds: float) -> Any:
    error = KvloomError(
        reason, "The limit is reached.", retry_after_seconds=retry_after_seconds, limit=BUDGET, limits=STATE
    )
    return lambda request: request.finish(ERROR, error=error)


async def test_a_rate_limit_is_a_429_that_says_when_to_retry(world: EdgeWorld) -> None:
    """The official client waits for exactly that long."""
    world.link.script = refuse(ErrorReason.ERROR_REASON_RATE_LIMITED, 1.25)
    async with openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key=SEARCH_KEY, max_retries=0) as client:
        with pytest.raises(openai.RateLimitError) as caught:
            await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
    assert caught.value.code == "rate_limit_exceeded"
    headers = caught.value.response.headers
    assert (headers["retry-after"], headers["retry-after-ms"]) == ("2", "1250")
    assert {name: headers[name] for name in HEADERS} == HEADERS


async def test_official_clients_do_not_retry_without_a_budget(world: EdgeWorld) -> None:
    """A retry would be refused, too."""
    world.link.script = refuse(ErrorReason.ERROR_REASON_BUDGET_EXHAUSTED, 0.0)
    async with openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key=SEARCH_KEY, max_retries=3) as client:
        with pytest.raises(openai.RateLimitError) as caught:
            await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
    assert (caught.value.code, caught.value.type) == ("insufficient_quota", "insufficient_quota")
    async with anthropic.AsyncAnthropic(base_url=world.url, api_key=SEARCH_KEY, max_retries=3) as other:
        with pytest.raises(anthropic.RateLimitError) as refused:
            await other.messages.create(model="tiny", max_tokens=5, messages=[{"role": "user", "content": "hi"}])
    assert isinstance(refused.value.body, dict)
    assert refused.value.body["error"]["type"] == "rate_limit_error"
    assert len(world.link.requests) == 2
