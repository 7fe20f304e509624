"""Traces of requests, as a collector of OpenTelemetry's protocol gets them from an edge, a router, a safety service and
a shard."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from kvloom_common.config import TracingConfig
from kvloom_common.process.service import StartError
from kvloom_common.tracing.trace_context import TraceContext
from kvloom_common.tracing.tracer import open_tracer
from lab.traces.collector import CollectedSpan, Collector, collecting
from lab.traces.picture import as_svg, as_text, in_order
from tests.fakes.fake_router_link import answer
from tests.fakes.screened_world import ScreenedWorld, WritingEngine, screened_world, showing_tokenizer
from tests.fakes.state_world import state_world
from tests.waiting import eventually

pytest_plugins = ("tests.fakes.router_fixtures",)

POLICY = '[[rules]]\nname = "codes"\ncategory = "weapons"\nmessage = "No."\nphrases = ["launch code"]\n'
CHAT = "/v1/chat/completions"
CLIENT = TraceContext(0xABCDEF0123456789, 0x1234, is_sampled=True)


@pytest.fixture
async def collector() -> AsyncIterator[tuple[Collector, str]]:
    async with collecting() as started:
        yield started


@pytest.fixture
async def fabric(
    router_redis_url: str, tmp_path: Path, collector: tuple[Collector, str]
) -> AsyncIterator[tuple[ScreenedWorld, Collector]]:
    """Only what is notable is kept of requests whose clients have not sampled their traces."""
    policy = tmp_path / "policy.toml"
    policy.write_text(POLICY)
    engine = WritingEngine(showing_tokenizer())
    tracing = TracingConfig(otlp_endpoint=collector[1], sample_share=0.0, slow_ttft_seconds=60.0, slow_seconds=60.0)
    async with screened_world(router_redis_url, policy, engine, tracing=tracing) as world:
        yield world, collector[0]


def chat(text: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}


async def ask(world: ScreenedWorld, body: dict[str, Any], context: TraceContext = CLIENT) -> int:
    headers = {"traceparent": context.header, "x-session-id": "conversation-7", "x-request-id": "mine"}
    async with world._http.post(world.url + CHAT, json=body, headers=headers) as response:
        await response.read()
        return response.status


def by_name(spans: list[CollectedSpan]) -> dict[str, CollectedSpan]:
    return {span.name: span for span in spans}


async def until_traced(collector: Collector, *names: str, trace_id: int = CLIENT.trace_id) -> dict[str, CollectedSpan]:
    hexadecimal = f"{trace_id:032x}"
    await eventually(lambda: by_name(collector.trace(hexadecimal)).keys() >= set(names), f"spans {names}")
    return by_name(collector.trace(hexadecimal))


async def test_a_request_is_one_trace_from_the_edge_to_the_engine(fabric: tuple[ScreenedWorld, Collector]) -> None:
    """Somebody who asks why an answer was slow sees each process's part of it below its caller's."""
    world, collector = fabric
    assert await ask(world, chat(stream=True, safety_identifier="user-9")) == 200
    spans = await until_traced(collector, "chat tiny", "route tiny", "sequence tiny", "decode", "engine step")
    edge, router, shard = spans["chat tiny"], spans["route tiny"], spans["sequence tiny"]
    assert [span.service for span in (edge, router, shard)] == ["kvloom-edge", "kvloom-router", "kvloom-shard"]
    assert edge.parent_id == f"{CLIENT.span_id:016x}"
    assert (router.parent_id, shard.parent_id) == (edge.span_id, router.span_id)
    assert {spans[phase].parent_id for phase in ("queue", "prefill", "decode")} == {shard.span_id}
    assert spans["engine step"].links == [shard.span_id]
    assert edge.began_at <= router.began_at <= shard.began_at + 0.05
    assert edge.attributes["gen_ai.operation.name"] == "chat"
    assert edge.attributes["http.response.status_code"] == 200
    assert edge.attributes["kvloom.client_request_id"] == router.attributes["kvloom.client_request_id"] == "mine"
    for span in (edge, router):
        assert span.attributes["gen_ai.usage.input_tokens"] > 0
        assert span.attributes["gen_ai.usage.output_tokens"] == 1
        assert span.attributes["session.id"] == "conversation-7"
        assert span.attributes["user.id"] == "user-9"
    (placed,) = [event for event in router.events if event.name == "placed"]
    assert placed.attributes["kvloom.shard.id"] == "shard-0"
    assert any(name.startswith("kvloom.cost.") for name in placed.attributes)


async def test_a_refusal_by_the_policy_is_kept_whatever_the_share(fabric: tuple[ScreenedWorld, Collector]) -> None:
    """It is what operators look for, and the rule's name stands in the trace, not the text."""
    world, collector = fabric
    unsampled = TraceContext(77, 1, is_sampled=False)
    assert await ask(world, chat("tell me the launch code"), unsampled) == 400
    spans = await until_traced(collector, "route tiny", "guardrail", trace_id=77)
    assert spans["guardrail"].attributes["kvloom.safety.rule"] == "codes"
    assert spans["guardrail"].parent_id == spans["route tiny"].span_id
    assert "launch" not in str([span.attributes for span in spans.values()])


async def test_an_ordinary_request_outside_the_share_is_not_exported(fabric: tuple[ScreenedWorld, Collector]) -> None:
    """Otherwise a collector would get every request of a busy fabric."""
    world, collector = fabric
    assert await ask(world, chat(), TraceContext(78, 1, is_sampled=False)) == 200
    assert await ask(world, chat()) == 200
    await until_traced(collector, "chat tiny", "route tiny", "sequence tiny")
    assert collector.trace(f"{78:032x}") == []


async def test_probes_are_not_traced(fabric: tuple[ScreenedWorld, Collector]) -> None:
    """A load balancer asks every second: a tenth of that would be most of what a quiet fabric sends."""
    world, collector = fabric
    async with world._http.get(f"{world.url}/health", headers={"traceparent": CLIENT.header}) as response:
        assert response.status == 200
    assert await ask(world, chat()) == 200
    await until_traced(collector, "chat tiny")
    assert "GET /health" not in {span.name for span in collector.spans}


async def test_what_the_orchestrator_does_is_traced(collector: tuple[Collector, str], tmp_path: Path) -> None:
    """What a request waits for in the orchestrator stands below its edge's span. The orchestrator's own requests, here
    of a background response, are traces that begin with it, above the edge and so above the router."""
    tracing = TracingConfig(otlp_endpoint=collector[1], sample_share=1.0)
    async with state_world(f"sqlite:///{tmp_path}/state.db", tmp_path, traced=tracing) as world:
        world.edge.link.script = answer("Hello")
        headers = {"traceparent": CLIENT.header}
        made = await world.client.responses.create(model="tiny", input="hi", background=True, extra_headers=headers)
        with pytest.raises(openai.NotFoundError):
            await world.client.responses.retrieve("resp_none", extra_headers=headers)
        async with world.jobs():
            await eventually(lambda: world.edge.link.requests, "the request of the background response")
            spans = await until_traced(collector[0], "store BeginResponse", "store getResponse", "POST /v1/responses")
            await eventually(
                lambda: by_name(collector[0].spans).get("work /v1/responses"), "the orchestrator's own span"
            )
    begun, missed = spans["store BeginResponse"], spans["store getResponse"]
    assert begun.service == "kvloom-orchestrator"
    assert begun.parent_id == next(span.span_id for span in spans.values() if span.name == "POST /v1/responses")
    assert missed.error == ""
    work = by_name(collector[0].spans)["work /v1/responses"]
    assert (work.parent_id, work.error) == ("", "")
    assert work.attributes["kvloom.client_request_id"] == made.id
    assert work.attributes["kvloom.tenant"] == "acme/search"
    (edge,) = [span for span in collector[0].trace(work.trace_id) if span.service == "kvloom-edge"]
    assert edge.parent_id == work.span_id
    assert world.edge.link.requests[-1].request.submit.traceparent.split("-")[1:3] == [edge.trace_id, edge.span_id]


async def test_a_trace_can_be_read_as_text_and_as_a_picture(fabric: tuple[ScreenedWorld, Collector]) -> None:
    """`kvloom-lab trace` prints the one and writes the other."""
    world, collector = fabric
    assert await ask(world, chat(stream=True)) == 200
    await until_traced(collector, "chat tiny", "route tiny", "sequence tiny", "decode")
    spans = collector.trace(f"{CLIENT.trace_id:032x}")
    depths = {span.name: depth for depth, span in in_order(spans)}
    assert (depths["chat tiny"], depths["route tiny"], depths["sequence tiny"], depths["decode"]) == (0, 1, 2, 3)
    text, svg = as_text(spans), as_svg(spans)
    for name in ("edge: chat tiny", "router: route tiny", "shard: sequence tiny"):
        assert name in text
        assert name in svg


def test_an_endpoint_without_the_package_says_what_to_install() -> None:
    """OpenTelemetry is an extra, which most fabrics do without."""

    def missing(_endpoint: str) -> None:
        raise ModuleNotFoundError("No module named 'opentelemetry'", name="opentelemetry")

    with pytest.raises(StartError, match=r"tracing.otlp_endpoint: opentelemetry .* \"kvloom-fabric\[tracing\]\""):
        open_tracer(TracingConfig(otlp_endpoint="http://127.0.0.1:4317"), "edge", "edge-0", missing)


def test_without_an_endpoint_there_is_no_tracer() -> None:
    """What is off costs nothing."""
    assert open_tracer(TracingConfig(), "edge", "edge-0") is None
