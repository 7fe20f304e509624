"""The safety policy as a guardrail of others, by LiteLLM's generic contract, for keys that may, as their tenants."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvloom.v1.router_service_pb2 import ModerateRequest, ModerateResponse
from kvloom.v1.safety_service_pb2 import Classification
from tests.fakes.edge_world import chat_body, edge_world
from tests.fakes.fake_control import SEARCH_KEY, key_of, two_organisations
from tests.fakes.fake_router_link import FakeRouterLink
from tests.fakes.screened_world import ScreenedWorld, WritingEngine, screened_world, showing_tokenizer
from tests.fakes.tenants import callers_of

pytest_plugins = ("tests.fakes.router_fixtures",)

PATH = "/beta/litellm_basic_guardrail_api"
MAIL = "eve@example.org"
POLICY = """
[[rules]]
name = "codes"
message = "No launch codes."
phrases = ["launch code"]

[[rules]]
name = "said"
message = "Do not say so."
phrases = ["secret sauce"]
applies_to = ["answer"]

[[rules]]
name = "extra"
message = "Not with this rule."
phrases = ["extra word"]
on_request = true

[[rules]]
name = "email"
kind = "pii"
finds = "email"
mode = "mask"
"""


async def judged(world: ScreenedWorld, **body: Any) -> dict[str, Any]:
    status, text = await world.post(PATH, body)
    assert status == 200, text
    return json.loads(text)


async def test_the_contract(router_redis_url: str, tmp_path: Path) -> None:
    """Prompts and answers are judged by the rules that hold for them; personal data is replaced, the same text by the
    same placeholder in all texts of a trace; what cannot be replaced is blocked. Nothing unjudged passes as judged."""
    path = tmp_path / "policy.toml"
    path.write_text(POLICY)
    async with screened_world(router_redis_url, path, WritingEngine(showing_tokenizer())) as world:
        assert await judged(world, texts=["hello", "there"]) == {"action": "NONE"}
        assert await judged(world, texts=[], input_type="request", request_data={"a": 1}) == {"action": "NONE"}
        blocked = {"action": "BLOCKED", "blocked_reason": "No launch codes."}
        assert await judged(world, texts=["hello", "the launch code"], litellm_call_id="c1") == blocked
        assert await judged(world, texts=["the launch code"], input_type="response") == blocked
        assert await judged(world, texts=["secret sauce"]) == {"action": "NONE"}
        assert (await judged(world, texts=["secret sauce"], input_type="response"))["action"] == "BLOCKED"
        named = {"guardrails": ["extra"], "another": True}
        assert await judged(world, texts=["extra word"]) == {"action": "NONE"}
        answer = await judged(world, texts=["extra word"], additional_provider_specific_params=named)
        assert answer["blocked_reason"] == "Not with this rule."
        found = await judged(world, texts=[f"I am {MAIL}", "no", f"{MAIL}!"], litellm_trace_id="t1")
        assert found["action"] == "GUARDRAIL_INTERVENED"
        first, second, third = found["texts"]
        placeholder = first.removeprefix("I am ")
        assert placeholder.startswith("[EMAIL-")
        assert (second, third) == ("no", f"{placeholder}!")
        call = {"type": "function", "function": {"name": "f", "arguments": json.dumps({"to": MAIL})}}
        assert (await judged(world, texts=["hi"], tool_calls=[call]))["action"] == "BLOCKED"
        tool = {"type": "function", "function": {"name": "f", "description": "Sends the launch code."}}
        assert await judged(world, texts=["hi"], tools=[tool]) == blocked
        for body, field in (
            ({"texts": ["x"], "images": ["data:"]}, "images"),
            ({"texts": ["x"], "input_type": "other"}, "input_type"),
            ({"texts": ["x"], "additional_provider_specific_params": {"guardrails": ["nobody"]}}, "guardrails"),
            ({"texts": 1}, "texts"),
        ):
            status, text = await world.post(PATH, body)
            assert (status, json.loads(text)["error"]["param"]) == (400, field), text


class NotingLink(FakeRouterLink):
    """Notes what is asked, and forbids nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.wishes: list[ModerateRequest] = []

    async def moderate(self, request: ModerateRequest) -> ModerateResponse:
        self.wishes.append(request)
        return ModerateResponse(results=[Classification() for _ in request.texts])


async def test_it_needs_a_scope_of_its_own_and_is_the_tenants(tmp_path: Path) -> None:
    """A key that may use models may not try out the policy, and nobody is judged by another tenant's rules."""
    link = NotingLink()
    table = [*two_organisations(), key_of("kvl-guard", "acme/search", scopes=("guardrails",))]
    async with edge_world(link=link, callers=callers_of(tmp_path, table)) as world:
        status, refused = await world.post(PATH, {"texts": ["x"]}, headers={"x-api-key": SEARCH_KEY})
        assert (status, "guardrails" in refused["error"]["message"]) == (403, True)
        body = {"texts": ["x"], "request_data": {"user_api_key_team_id": "other/app"}}
        status, answer = await world.post(PATH, body, headers={"x-api-key": "kvl-guard"})
        assert (status, answer) == (200, {"action": "NONE"})
        status, _ = await world.post("/v1/chat/completions", chat_body(), headers={"x-api-key": "kvl-guard"})
        assert status == 403
    [wish] = link.wishes
    assert wish.check.tenant == "acme/search"


async def test_too_much_is_refused() -> None:
    """As by moderations."""
    async with edge_world(link=NotingLink()) as world:
        status, answer = await world.post(PATH, {"texts": ["x"] * 257})
        assert (status, answer["error"]["param"]) == (413, "texts")
