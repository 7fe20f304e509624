"""Models that routes and shadows name: which of them this machine has not."""

from __future__ import annotations

import asyncio

from kvloom_common.config import KvloomConfig, ModelConfig, RouteConfig, RouteRule, RouteTarget, ShadowConfig
from kvloom_common.trust.fabric_trust import NO_SECRET
from tools.supervisor.named_models import names_elsewhere, unserved_models
from tools.supervisor.supervised_process import ProcessStatus


def config() -> KvloomConfig:
    rule = RouteRule(features=["tools"], targets=["with-tools"])
    return KvloomConfig(
        models=[ModelConfig(name="a", path="/a", aliases=["small"]), ModelConfig(name="b", path="/b")],
        routes=[
            RouteConfig(name="cheap", targets=["small", "gone"], rules=[rule], fallback=["b", "gone-too"]),
            RouteConfig(name="fast", targets=[RouteTarget("b"), RouteTarget("gone", 2.0)]),
        ],
        shadows=[ShadowConfig(model="a:law", candidate="candidate")],
    )


def test_all_that_names_a_model_is_looked_at() -> None:
    """Targets, those of rules, fallbacks and shadows; aliases and adapters of models are here."""
    assert names_elsewhere(config()) == {
        "gone": "the route cheap",
        "with-tools": "the route cheap",
        "gone-too": "the route cheap",
        "candidate": "the shadow of a:law",
    }


async def test_a_machine_without_an_edge_does_not_guess() -> None:
    """Only edges know the names that other machines serve."""
    assert await unserved_models(config(), [ProcessStatus("router", "router", 1, "ready")], NO_SECRET) == []


async def test_a_name_that_no_edge_serves_is_a_sentence() -> None:
    """A route whose target exists nowhere started without a word."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        status = "503 No" if b"model=gone " in await reader.readuntil(b"\r\n\r\n") else "200 OK"
        writer.write(f"HTTP/1.1 {status}\r\n\r\n{{}}".encode())
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    edge = ProcessStatus("edge", "edge", 1, "ready", metrics_address=f"127.0.0.1:{port}")
    async with server:
        found = await unserved_models(config(), [edge], NO_SECRET)
        assert found == ["the route cheap names the model gone, which nothing serves"]
    assert await unserved_models(config(), [edge], NO_SECRET) == [], "an edge that does not answer says nothing"
