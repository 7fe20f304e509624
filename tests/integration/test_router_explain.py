"""`Explain` over real sockets: after a request, while it runs, after a failover; trailers; the decision file."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import grpc
import pytest
import structlog.testing
from rich.console import Console

from kvloom.client.client import Client
from kvloom.errors import KvloomError
from kvloom.transport.grpc_errors import from_rpc_error
from kvloom.v1 import generation_pb2
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import StopConditions
from kvloom.v1.router_service_pb2 import ExplainRequest, GenerateRequest, ListModelsRequest, PlanRequest, TokenIds
from kvloom_common.config import CascadeConfig, RouteConfig, RouteRule
from kvloom_common.process.service import StartError
from router.decisions.records import FleetLine, RequestLine, read_decisions
from tests.fakes.fake_shard import FakeShard
from tests.fakes.router_world import MODEL, TIMEOUT_SECONDS, Answer, RouterWorld, link_request
from tests.waiting import eventually
from tools.cli.explain import print_explanation, print_plan

pytest_plugins = ("tests.fakes.router_fixtures",)

PROMPT = list(range(40))


async def start(world: RouterWorld, num_shards: int = 2, **options):
    """Returns (a connected link, the shards)."""
    shards = [await world.start_shard(f"shard-{number}", **options) for number in range(num_shards)]
    await world.start_router()
    link = await world.connect()
    await world.wait_for_shards(link, num_shards)
    return link, shards


async def explain(world: RouterWorld, request_id: str):
    return await (await world.stub()).Explain(ExplainRequest(request_id=request_id), timeout=TIMEOUT_SECONDS)


async def explain_error(world: RouterWorld, request_id: str) -> tuple[grpc.StatusCode, KvloomError]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await explain(world, request_id)
    return caught.value.code(), from_rpc_error(caught.value)


async def test_a_request_is_explained_after_it_ran(world: RouterWorld) -> None:
    """An explanation has every shard's score at the time of the placement, and how accurate the prediction was."""
    link, _ = await start(world)
    answer = await world.ask(link, PROMPT, 5, request_id="mine", n=2)
    explained = await explain(world, "mine")
    assert explained.request_id == "mine"
    (decision,) = explained.decisions
    assert decision.attempt_id == 1
    assert sorted(shard.shard_id for shard in decision.plan.shards) == ["shard-0", "shard-1"]
    picked = decision.plan.shards[0]
    assert answer.starts[0] is not None
    assert picked.shard_id == decision.plan.picked_shard_id == explained.outcome.shard_id == answer.starts[0].shard_id
    for shard in decision.plan.shards:
        assert shard.cost_seconds == pytest.approx(sum(shard.cost_terms.values()))
        assert not shard.filtered_reason
    assert decision.plan.num_prompt_tokens == 40
    assert decision.plan.regret.cost_seconds >= 0
    outcome = explained.outcome
    assert outcome.reason == generation_pb2.FINISH_REASON_LENGTH
    assert (outcome.num_attempts, outcome.num_prompt_tokens, outcome.num_output_tokens) == (1, 40, 10)
    assert 0 < outcome.ttft_seconds <= outcome.e2e_latency_seconds
    assert outcome.predicted_ttft_seconds >= picked.predicted_ttft_seconds
    assert outcome.ttft_error_seconds == pytest.approx(outcome.ttft_seconds - outcome.predicted_ttft_seconds)


async def test_what_was_predicted_is_shown_beside_what_happened(world: RouterWorld, tmp_path: Path) -> None:
    """After the fact the operator sees which part of a wait was not foreseen, the metric counts it, and the file has
    it for `kvloom simulate --decisions`."""
    path = tmp_path / "decisions.jsonl"
    world.config.router.decision_log.path = str(path)
    link, _ = await start(world, num_shards=1)
    await world.ask(link, PROMPT, 5, request_id="mine")
    explained = await explain(world, "mine")
    outcome, terms = explained.outcome, {one.term: one for one in explained.outcome.predictions}
    assert {"waiting", "prefill", "ttft"} <= terms.keys()
    assert terms["waiting"].predicted_seconds == 0, "the shard was idle"
    ttft = terms["ttft"]
    assert ttft.predicted_seconds == pytest.approx(
        terms["waiting"].predicted_seconds + terms["prefill"].predicted_seconds
    )
    assert 0 < ttft.actual_seconds <= outcome.ttft_seconds
    assert terms["prefill"].actual_seconds <= ttft.actual_seconds
    output = io.StringIO()
    print_explanation(explained, Console(file=output, width=500))
    assert f"ttft {1000 * ttft.predicted_seconds:.1f} ms (was {1000 * ttft.actual_seconds:.1f} ms)" in output.getvalue()
    late = world.metric("kvloom_router_prediction_error_seconds_count", model=MODEL, term="ttft", direction="late")
    early = world.metric("kvloom_router_prediction_error_seconds_count", model=MODEL, term="ttft", direction="early")
    assert late + early == 1
    world.stop.set()
    assert world.served is not None
    await asyncio.wait_for(world.served, TIMEOUT_SECONDS)
    (line,) = (one for one in read_decisions(path.read_bytes().splitlines()) if isinstance(one, RequestLine))
    recorded = {one.term: one for one in line.outcome.predictions}
    assert recorded["ttft"].actual_seconds == pytest.approx(ttft.actual_seconds)


async def test_a_running_request_is_explained_without_an_outcome(world: RouterWorld) -> None:
    """A request that does not get its answer can be explained while it runs."""
    link, (shard,) = await start(world, num_shards=1)
    shard.pause()
    link.submit(link_request(PROMPT, 5, request_id="mine"), Answer())
    await eventually(lambda: shard.submits, "the submit")
    explained = await explain(world, "mine")
    assert explained.decisions[0].plan.picked_shard_id == "shard-0"
    assert not explained.HasField("outcome")
    shard.resume()


async def test_every_attempt_of_a_failover_is_explained(world: RouterWorld) -> None:
    """Each attempt has its own scores; the second one excludes the first one's shard."""
    shards: dict[str, FakeShard] = {f"shard-{i}": await world.start_shard(f"shard-{i}") for i in range(2)}
    await world.start_router()
    link = await world.connect()
    await world.wait_for_shards(link, 2)
    for shard in shards.values():
        shard.pause()
    answer = Answer()
    link.submit(link_request(PROMPT, 5, request_id="mine"), answer)
    await eventually(lambda: any(shard.submits for shard in shards.values()), "the submit")
    first = next(shard_id for shard_id, shard in shards.items() if shard.submits)
    await shards.pop(first).stop()
    (second,) = shards
    shards[second].resume()
    await eventually(lambda: answer.done, "the answer's end")
    explained = await explain(world, "mine")
    assert [decision.attempt_id for decision in explained.decisions] == [1, 2]
    assert [decision.plan.picked_shard_id for decision in explained.decisions] == [first, second]
    assert (explained.outcome.shard_id, explained.outcome.num_attempts) == (second, 2)


async def test_what_is_not_remembered_is_not_found(world: RouterWorld) -> None:
    """Unknown ids, requests that were never placed, and forgotten requests all give NOT_FOUND."""
    world.config.router.decision_log.max_remembered = 2
    link, _ = await start(world, num_shards=1)
    for request_id in ("first", "second", "third"):
        await world.ask(link, PROMPT, 2, request_id=request_id)
    await world.ask(link, PROMPT, 10_000, request_id="too-long")
    for request_id in ("first", "too-long", "never seen"):
        code, error = await explain_error(world, request_id)
        assert (code, error.reason) == (grpc.StatusCode.NOT_FOUND, ErrorReason.ERROR_REASON_NOT_FOUND)
        assert request_id in error.message
    for request_id in ("second", "third"):
        assert (await explain(world, request_id)).HasField("outcome")
    code, error = await explain_error(world, "")
    assert (code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "request_id")
    assert world.metric("kvloom_router_decisions_remembered") == 2


async def test_nothing_is_remembered_without_a_sample(world: RouterWorld) -> None:
    """Operators can switch the log off to save CPU."""
    world.config.router.decision_log.sample_share = 0.0
    link, _ = await start(world, num_shards=1)
    await world.ask(link, PROMPT, 2, request_id="mine")
    assert (await explain_error(world, "mine"))[0] is grpc.StatusCode.NOT_FOUND


async def test_plan_has_the_regret_of_its_pick(world: RouterWorld) -> None:
    """A plan has a regret as an explanation does, unless no shard was picked."""
    await start(world)
    stub = await world.stub()
    request = GenerateRequest(model=MODEL, token_ids=TokenIds(ids=PROMPT))
    plan = await stub.Plan(PlanRequest(request=request), timeout=TIMEOUT_SECONDS)
    assert plan.HasField("regret")
    assert plan.regret.cost_seconds == 0
    request.stop.max_tokens = 10_000
    refused = await stub.Plan(PlanRequest(request=request), timeout=TIMEOUT_SECONDS)
    assert refused.HasField("error")
    assert not refused.HasField("regret")


@pytest.mark.parametrize(("metadata", "is_asked_for"), [((("kvloom-explain", "1"),), True), ((), False)])
async def test_trailers_name_shard_and_cached_tokens_when_asked_for(world: RouterWorld, metadata, is_asked_for) -> None:
    """Callers that only want these values for their own logs need no second RPC."""
    await start(world, num_shards=1)
    request = GenerateRequest(model=MODEL, token_ids=TokenIds(ids=PROMPT), stop=StopConditions(max_tokens=3), n=2)
    call = (await world.stub()).Generate(request, metadata=metadata)
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while await call.read() is not grpc.aio.EOF:
            pass
        trailers = dict(await call.trailing_metadata() or ())
    assert (trailers.get("kvloom-shard"), trailers.get("kvloom-cached-tokens")) == (
        ("shard-0", "0") if is_asked_for else (None, None)
    )


async def test_the_sdk_explains(world: RouterWorld) -> None:
    """The Python client can explain, too, including errors, and a delta's start names the shard anyway."""
    await start(world, num_shards=1)
    async with Client(world.address) as client:
        options = {"model": MODEL, "token_ids": PROMPT, "max_tokens": 2, "session_key": "chat-17"}
        deltas = [delta async for delta in client.generate(request_id="mine", **options)]
        assert deltas[0].start is not None
        explained = await client.explain("mine")
        assert explained.outcome.shard_id == deltas[0].start.shard_id
        with pytest.raises(KvloomError, match="remembers no placement"):
            await client.explain("other")
        with pytest.raises(KvloomError, match="session_key has 257 characters"):
            _ = [delta async for delta in client.generate(**{**options, "session_key": "x" * 257})]


async def test_the_file_gets_a_line_for_each_request_that_ended(world: RouterWorld, tmp_path: Path) -> None:
    """`kvloom simulate --decisions` replays this file: it starts with the fleet, and a graceful stop loses no line."""
    path = tmp_path / "decisions.jsonl"
    world.config.router.decision_log.path = str(path)
    link, _ = await start(world)
    for number in range(20):
        await world.ask(link, PROMPT[number:], 3, request_id=f"r{number}", session_key="chat-17", tenant="acme")
    world.stop.set()
    assert world.served is not None
    await asyncio.wait_for(world.served, TIMEOUT_SECONDS)
    with path.open("rb") as file:
        lines = list(read_decisions(file))
    assert isinstance(lines[0], FleetLine)
    assert (lines[0].router_id, lines[0].policy) == ("router-0", world.config.router.placement.policy)
    assert [shard.shard_id for shard in lines[0].shards] == ["shard-0", "shard-1"]
    requests = [line for line in lines if isinstance(line, RequestLine)]
    assert [line.request_id for line in requests] == [f"r{number}" for number in range(20)]
    assert [line.num_prompt_tokens for line in requests] == [40 - number for number in range(20)]
    assert [len(line.hashes()) for line in requests] == [(40 - number) // 16 for number in range(20)]
    assert {line.outcome.reason for line in requests} == {"length"}
    assert {line.outcome.num_output_tokens for line in requests} == {3}
    assert len({(line.session, line.tenant) for line in requests}) == 1
    assert [line.arrived_at for line in requests] == sorted(line.arrived_at for line in requests)
    assert all(line.arrived_at <= line.attempts[0].decided_at for line in requests)
    assert world.metric("kvloom_router_decisions_dropped_total") == 0


async def test_a_router_whose_decision_file_cannot_be_written_does_not_start(
    world: RouterWorld, tmp_path: Path
) -> None:
    """The reason is reported before any request arrives."""
    world.config.router.decision_log.path = str(tmp_path / "missing" / "decisions.jsonl")
    with pytest.raises(StartError, match="missing"):
        await world.start_router()


async def test_a_request_is_explained_by_the_id_that_its_caller_gave_it(world: RouterWorld) -> None:
    """A caller knows its own x-request-id. The latest of several is explained, the others named."""
    await start(world)
    stub = await world.stub()
    metadata = (("x-request-id", "shared"),)
    for name in ("first", "second"):
        wanted = GenerateRequest(model=MODEL, request_id=name, token_ids=TokenIds(ids=PROMPT))
        wanted.stop.max_tokens = 2
        async for _ in stub.Generate(wanted, metadata=metadata, timeout=TIMEOUT_SECONDS):
            pass
    explained = await stub.Explain(ExplainRequest(client_request_id="shared"), timeout=TIMEOUT_SECONDS)
    assert (explained.request_id, explained.client_request_id) == ("second", "shared")
    assert list(explained.other_request_ids) == ["first"]
    for wrong in (ExplainRequest(), ExplainRequest(request_id="first", client_request_id="shared")):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Explain(wrong, timeout=TIMEOUT_SECONDS)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_every_rpc_leaves_a_line_with_its_code(world: RouterWorld) -> None:
    """Refused RPCs must be in the access log too, with the caller's id and without the credential."""
    await start(world)
    stub = await world.stub()
    metadata = (("x-request-id", "mine"), ("authorization", "Bearer sk-secret"))
    with structlog.testing.capture_logs() as lines:
        await stub.ListModels(ListModelsRequest(), metadata=metadata, timeout=TIMEOUT_SECONDS)
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Explain(ExplainRequest(request_id="none"), metadata=metadata, timeout=TIMEOUT_SECONDS)
        await eventually(lambda: len([line for line in lines if line["event"] == "rpc_ended"]) == 2, "both lines")
    rpcs = [line for line in lines if line["event"] == "rpc_ended"]
    assert [(line["method"].rpartition("/")[2], line["code"]) for line in rpcs] == [
        ("ListModels", "OK"),
        ("Explain", "NOT_FOUND"),
    ]
    assert all(line["client_request_id"] == "mine" and line["tenant"].startswith("key-") for line in rpcs)
    assert "sk-secret" not in repr(lines)


async def test_a_plan_says_which_rule_held_and_what_a_cascade_asks_first(world: RouterWorld) -> None:
    """An operator who writes rules sees what they do before traffic does."""
    cascade = CascadeConfig(escalate_on=["refusal", "logprob"], min_mean_logprob=-0.7)
    rule = RouteRule(languages=["de", "fr"], max_prompt_tokens=100, targets=["little"])
    world.config.routes = [RouteConfig(name="chat", targets=["x"], rules=[rule], fallback=[MODEL], cascade=cascade)]
    await start(world, num_shards=1)
    request = GenerateRequest(model="chat", text="Was ist die Hauptstadt von Frankreich?")
    plan = await (await world.stub()).Plan(PlanRequest(request=request), timeout=TIMEOUT_SECONDS)
    assert (plan.model, plan.route) == (MODEL, f"chat;rule=1;target={MODEL}")
    assert plan.conditions == "max_prompt_tokens 100, languages de/fr"
    assert (list(plan.candidates), list(plan.tests)) == (["little"], ["refusal", "logprob >= -0.7"])
    console = Console(file=io.StringIO(), width=200)
    print_plan(plan, console)
    shown = console.file.getvalue()
    assert "chosen by chat;rule=1" in shown
    assert "judges by refusal, logprob >= -0.7: little" in shown
