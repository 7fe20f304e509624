"""Requests name rules of the safety policy, through a real edge, router, safety service and shard."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from kvloom.transport.grpc_errors import from_rpc_error
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import StopConditions
from kvloom.v1.router_service_pb2 import GenerateRequest
from kvloom.v1.router_service_pb2_grpc import RouterServiceStub
from kvloom_common.tenancy.table import Tenant
from kvloom_common.trust.shared_secret import SharedSecret
from safety_svc.audit import Audit
from safety_svc.metrics import FLAGS
from safety_svc.policy_file import PolicyFile
from tests.fakes.fake_control import SEARCH_KEY
from tests.fakes.metered_world import TENANT, metered
from tests.fakes.screened_world import ScreenedWorld, WritingEngine, screened_world, serve_safety, showing_tokenizer
from tests.fakes.trusted_router import SECRET
from tests.fakes.two_models_world import FIRST
from tests.waiting import eventually

pytest_plugins = ("tests.fakes.router_fixtures",)

POLICY = """
[[rules]]
name = "codes"
phrases = ["launch code"]

[[rules]]
name = "watched"
phrases = ["budget"]
mode = "monitor"

[[rules]]
name = "names"
message = "No names."
phrases = ["bob"]
on_request = true
"""
CHAT = "/v1/chat/completions"

Fabric = tuple[ScreenedWorld, WritingEngine]


@pytest.fixture
async def fabric(router_redis_url: str, tmp_path: Path) -> AsyncIterator[Fabric]:
    policy = tmp_path / "policy.toml"
    policy.write_text(POLICY)
    engine = WritingEngine(showing_tokenizer())
    async with screened_world(router_redis_url, policy, engine) as world:
        yield world, engine


def chat(text: str, *guardrails: str, **fields: Any) -> dict[str, Any]:
    named = {"guardrails": guardrails} if guardrails else {}
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **named, **fields}


async def send(
    world: ScreenedWorld, body: dict[str, Any], path: str = CHAT, headers: dict[str, str] | None = None
) -> tuple[int, Any, str | None]:
    async with aiohttp.ClientSession() as http, http.post(world.url + path, json=body, headers=headers) as response:
        text = await response.text()
        shown = text if text.startswith("data:") else json.loads(text)
        return response.status, shown, response.headers.get("x-kvloom-safety")


async def test_a_named_rule_holds_in_every_api(fabric: Fabric) -> None:
    """Without its name it does not; the answer says which rules hold."""
    world, _ = fabric
    apis: tuple[tuple[str, dict[str, Any]], ...] = (
        (CHAT, {}),
        (CHAT, {"stream": True}),
        ("/v1/messages", {"max_tokens": 9}),
        ("/v1/responses", {"input": "hi bob", "messages": None}),
        ("/v1/completions", {"prompt": "hi bob", "messages": None}),
    )
    for path, more in apis:
        body = {key: value for key, value in (chat("hi bob") | more).items() if value is not None}
        status, _, header = await send(world, body, path)
        assert (status, header) == (200, None)
        status, answer, _ = await send(world, body | {"guardrails": ["names"]}, path)
        assert status == 400, answer
        assert "No names." in json.dumps(answer)
        harmless = json.loads(json.dumps(body).replace("bob", "you"))
        status, _, header = await send(world, harmless | {"guardrails": ["names"]}, path)
        assert (status, header) == (200, "codes, names, watched")


async def test_who_asks_for_details_learns_which_rules_hold(fabric: Fabric) -> None:
    """Also of a prompt that the router clears by itself, and without naming a rule."""
    world, _ = fabric
    for path, more in ((CHAT, {}), (CHAT, {"stream": True}), ("/v1/messages", {"max_tokens": 9})):
        body = chat("hi you", **more)
        assert (await send(world, body, path))[2] is None
        assert (await send(world, body, path, {"x-kvloom-details": "true"}))[2] == "codes, watched"


async def test_a_tenant_chooses_rules_for_all_its_requests(router_redis_url: str, tmp_path: Path) -> None:
    """They hold as if each request named them: over HTTP and gRPC, for prompts and for answers, within a moment."""
    policy = tmp_path / "policy.toml"
    policy.write_text(POLICY)
    async with contextlib.AsyncExitStack() as stack:
        trust = SharedSecret(SECRET, ("safety",), "safety-0")
        port = await serve_safety(stack, PolicyFile(str(policy)), Audit(), trust)
        world = await stack.enter_async_context(metered(router_redis_url, tmp_path, "hi bob.", safety_port=port))
        stub = RouterServiceStub(world.channel)

        async def shown_over_grpc() -> str:
            wanted = GenerateRequest(model=FIRST, text="hi", stop=StopConditions(max_tokens=60))
            call = stub.Generate(wanted, metadata=[("authorization", f"Bearer {SEARCH_KEY}")])
            return "".join([delta.text async for each in call for delta in each.deltas])

        answer, headers = await world.ask()
        assert answer["choices"][0]["message"]["content"].startswith("hi bob.")
        assert "x-kvloom-safety" not in headers
        assert (await shown_over_grpc()).startswith("hi bob.")
        world.control.put(Tenant(TENANT, guardrails=("names",)))
        identities = world.models.server.callers.identities
        assert identities is not None
        await eventually(lambda: identities.tenants.guardrails(TENANT) == ("names",), "the change")
        answer, headers = await world.ask()
        choice = answer["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("hi ", "content_filter")
        assert headers["x-kvloom-safety"] == "codes, names, watched"
        assert await shown_over_grpc() == "hi "


async def test_answers_are_screened_by_named_rules(fabric: Fabric) -> None:
    """For every choice, and for nobody else."""
    world, engine = fabric
    engine.answer = world.tokenizer.encode_now("hi bob.")
    _, answer, _ = await send(world, chat("x", n=2))
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["hi bob."] * 2
    _, answer, _ = await send(world, chat("x", "names", n=2))
    shown = [(choice["message"]["content"], choice["finish_reason"]) for choice in answer["choices"]]
    assert shown == [("hi ", "content_filter")] * 2


async def test_what_a_request_may_not_name(fabric: Fabric) -> None:
    """The refusal names the field and the guardrail, over HTTP and gRPC."""
    world, _ = fabric
    status, answer, _ = await send(world, chat("hi", "nothing"))
    assert (status, answer["error"]["param"]) == (400, "guardrails")
    assert "nothing" in answer["error"]["message"]
    status, answer, _ = await send(world, chat("hi", *(f"r{n}" for n in range(33))))
    assert (status, answer["error"]["param"]) == (400, "guardrails")
    status, answer, _ = await send(world, chat("hi", safety_identifier="x" * 513))
    assert (status, answer["error"]["param"]) == (400, "safety_identifier")
    # As long as Messages allow a metadata.user_id, in which Claude Code puts some 200 characters.
    assert (await send(world, chat("hi", safety_identifier="x" * 512)))[0] == 200
    stub = await world.router.stub()
    wanted = GenerateRequest(model="tiny", text="hi bob", stop=StopConditions(max_tokens=2), guardrails=["names"])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [each async for each in stub.Generate(wanted)]
    assert from_rpc_error(caught.value).reason == ErrorReason.ERROR_REASON_CONTENT_FILTERED


async def test_a_rule_that_monitors_changes_nothing(fabric: Fabric) -> None:
    """It is counted once for the prompt, and once for the answer."""
    world, engine = fabric
    engine.answer = world.tokenizer.encode_now("the budget, the budget")
    counts = [FLAGS.labels(target, "watched") for target in ("prompt", "answer")]
    before = [count.total for count in counts]
    status, answer, _ = await send(world, chat("budget"))
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "the budget, the budget")
    assert [count.total - was for count, was in zip(counts, before, strict=True)] == [1, 1]


async def test_named_rules_fail_closed(fabric: Fabric) -> None:
    """Without the service, a request that names rules is refused, also where others would be let through."""
    world, _ = fabric
    world.router.server._core._verdicts._safety_required = False
    world.router.server._core._verdicts._patience_seconds = 0.0
    link = world.router.server._parts.safety_link
    assert link is not None
    link._current._call.cancel()
    await eventually(lambda: link._current is None, "the loss of the service")
    status, answer, _ = await send(world, chat("hi", "names"))
    assert (status, answer["error"]["code"]) == (503, "safety_unavailable")
