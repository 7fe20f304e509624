"""Guardrails of others judge prompts over HTTP. What they do not say in time is not taken for a yes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from safety_svc.guardrails import FAILURES_TO_OPEN, PATH
from tests.fakes.screened_world import ScreenedWorld, WritingEngine, screened_world, showing_tokenizer

pytest_plugins = ("tests.fakes.router_fixtures",)


class Vendor:
    """A service that blocks what has the word `bad`, or misbehaves."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.fault = ""
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.keys.append(request.headers["x-api-key"])
        match self.fault:
            case "hang":
                await asyncio.Event().wait()
            case "garble":
                return web.Response(text='{"action": "PERHAPS"}')
            case "status":
                return web.json_response({"action": "NONE"}, status=500)
            case "redirect":
                return web.json_response({"action": "NONE"}, status=302, headers={"Location": "/"})
            case "drift":
                return web.json_response({"action": "BLOCKED", "blocked_reason": {"odd": 1}, "texts": 7, "new": []})
            case "cut":
                assert request.transport is not None
                request.transport.abort()
        if "replace me" in self.bodies[-1]["texts"][0]:
            return web.json_response({"action": "GUARDRAIL_INTERVENED", "texts": ["x"]})
        is_bad = "bad" in self.bodies[-1]["texts"][0]
        return web.json_response({"action": "BLOCKED", "blocked_reason": "bad"} if is_bad else {"action": "NONE"})


@contextlib.asynccontextmanager
async def fabric(
    redis_url: str, folder: Path, on_failure: str, mode: str = "gate", timeout_seconds: float = 10.0
) -> AsyncIterator[Any]:
    vendor = Vendor()
    app = web.Application()
    app.router.add_post(PATH, vendor.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.01)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    vendor.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    (folder / "vendor.key").write_text("secret\n")
    (folder / "policy.toml").write_text(
        f'[[rules]]\nname = "vendor"\nkind = "guardrail"\nmessage = "The vendor says no."\nurl = "{vendor.url}"\n'
        f'api_key_file = "vendor.key"\ntimeout_seconds = {timeout_seconds}\napplies_to = ["prompt"]\nmode = "{mode}"\n'
        f'on_failure = "{on_failure}"\n[[rules]]\nname = "own"\nphrases = ["own word"]\n'
    )
    try:
        async with screened_world(redis_url, folder / "policy.toml", WritingEngine(showing_tokenizer())) as world:
            yield world, vendor, runner
    finally:
        await runner.cleanup()


async def chat(world: ScreenedWorld, text: str) -> tuple[int, str]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}]}
    status, answer = await world.post("/v1/chat/completions", body)
    error = json.loads(answer).get("error")
    return status, "" if error is None else error["code"]


async def test_a_vendor_judges_prompts(router_redis_url: str, tmp_path: Path) -> None:
    """It gets the rendered prompt by the contract. What it would replace is refused, and our own rules come first."""
    async with fabric(router_redis_url, tmp_path, "refuse") as (world, vendor, _):
        assert await chat(world, "good") == (200, "")
        assert await chat(world, "bad") == (400, "content_filter")
        assert await chat(world, "replace me") == (400, "content_filter")
        assert await chat(world, "own word") == (400, "content_filter")
        assert (
            await asyncio.gather(*(chat(world, text) for text in ("good", "bad") * 8))
            == [
                (200, ""),
                (400, "content_filter"),
            ]
            * 8
        )
    assert len(vendor.bodies) == 3 + 16
    assert set(vendor.keys) == {"secret"}
    assert "good" in vendor.bodies[0]["texts"][0]
    assert vendor.bodies[0]["input_type"] == "request"
    assert vendor.bodies[0]["litellm_call_id"].startswith("chatcmpl-")


@pytest.mark.parametrize(("on_failure", "outcome"), [("refuse", (503, "safety_unavailable")), ("allow", (200, ""))])
async def test_a_vendor_that_fails(
    router_redis_url: str, tmp_path: Path, on_failure: str, outcome: tuple[int, str]
) -> None:
    """Hung, garbled, cut off, redirected, killed: fail closed means closed, also where the fabric lets texts through
    without a safety service. The breaker ends the waiting, and the vendor is asked again later."""
    async with fabric(router_redis_url, tmp_path, on_failure, timeout_seconds=0.2) as (world, vendor, runner):
        world.router.server._core._verdicts._safety_required = False
        for fault in ("garble", "status", "redirect", "cut"):
            vendor.fault = fault
            assert await chat(world, "good") == outcome, fault
        vendor.fault = ""
        assert await chat(world, "good") == (200, "")
        vendor.fault = "hang"
        for _ in range(FAILURES_TO_OPEN):
            assert await chat(world, "good") == outcome
        asked = len(vendor.bodies)
        assert await chat(world, "good") == outcome
        assert len(vendor.bodies) == asked
        assert await chat(world, "own word") == (400, "content_filter")
        await runner.cleanup()
        assert await chat(world, "good") == outcome


async def test_a_vendors_no_is_heard_whatever_else_it_says(router_redis_url: str, tmp_path: Path) -> None:
    """Fields of other types than the contract's are no failure, which `on_failure` would take for a yes."""
    async with fabric(router_redis_url, tmp_path, "allow") as (world, vendor, _):
        vendor.fault = "drift"
        assert await chat(world, "good") == (400, "content_filter")


async def test_a_rule_that_was_not_applied_is_not_named(router_redis_url: str, tmp_path: Path) -> None:
    """A text that a failing vendor lets through was not judged by it, and its answer must not say so."""
    async with fabric(router_redis_url, tmp_path, "allow") as (world, vendor, _), aiohttp.ClientSession() as http:
        for fault, rules in (("", "own, vendor"), ("garble", "own")):
            vendor.fault = fault
            body = {"model": "tiny", "messages": [{"role": "user", "content": "good"}], "guardrails": ["own"]}
            async with http.post(f"{world.url}/v1/chat/completions", json=body) as response:
                assert (response.status, response.headers["x-kvloom-safety"]) == (200, rules)


async def test_a_vendor_that_is_only_watched(router_redis_url: str, tmp_path: Path) -> None:
    """Its verdicts are noted; its failures change nothing."""
    async with fabric(router_redis_url, tmp_path, "refuse", mode="monitor") as (world, vendor, _):
        assert await chat(world, "bad") == (200, "")
        vendor.fault = "garble"
        assert await chat(world, "bad") == (200, "")
