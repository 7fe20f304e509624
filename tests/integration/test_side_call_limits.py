"""Calls that compute no answer are counted like requests, over HTTP and over gRPC, and tell nothing of others' load."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvloom.errors import KvloomError
from kvloom.v1 import router_service_pb2 as pb
from kvloom.v1.error_reason_pb2 import ErrorReason, LimitsState, RateState
from kvloom.v1.generation_pb2 import StopConditions
from kvloom.v1.router_service_pb2 import FleetState, ModelInfo
from kvloom.v1.router_service_pb2_grpc import RouterServiceStub
from kvloom_common.config import ControlConfig
from kvloom_common.tenancy.limits import Limits
from kvloom_common.tenancy.table import Tenant, TenantTable
from kvloom_common.trust.shared_secret import SharedSecret
from router.core.tenancy.limiter import Limiter
from router.server import RouterServer
from tests.fakes.edge_world import EdgeWorld, edge_world
from tests.fakes.fake_control import MAPS_KEY, OTHER_KEY, SEARCH_KEY, FakeControl, two_organisations
from tests.fakes.fake_router_link import FakeRouterLink
from tests.fakes.recording_tokenizer import RecordingTokenizer
from tests.fakes.router_world import TIMEOUT_SECONDS, RouterWorld
from tests.fakes.served_models import tiny_model
from tests.fakes.tenants import callers_of
from tests.fakes.trusted_router import MODEL, SECRET, served_router
from tests.waiting import eventually

pytest_plugins = ("tests.fakes.router_fixtures",)

TEXT = "the lazy dog, and 12 foxes. " * 40
MESSAGE = {"messages": [{"role": "user", "content": TEXT}]}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/tokenize", {"prompt": TEXT}),
    ("/tokenize", MESSAGE),
    ("/detokenize", {"tokens": [1, 2, 3]}),
    ("/v1/messages/count_tokens", MESSAGE),
    ("/v1/moderations", {"input": TEXT}),
]


def headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}", "anthropic-version": "2023-06-01"}


@pytest.fixture
async def edge(tmp_path: Path) -> AsyncIterator[EdgeWorld]:
    link = FakeRouterLink()
    link.tell(FleetState(models=[ModelInfo(name="heard", num_ready_shards=1, max_model_len=4096)]))
    link.limits = LimitsState(requests=RateState(limit=10, remaining=7))
    tokenizer = RecordingTokenizer()
    limited = Tenant("acme/search", limits=Limits(requests_per_minute=10, tokens_per_minute=1000))
    callers = callers_of(tmp_path, [*two_organisations(), limited])
    async with edge_world(link=link, callers=callers, more_models=[tiny_model("heard", tokenizer)]) as started:
        yield started
    tokenizer.close()


@pytest.mark.parametrize(("path", "body"), CALLS, ids=[f"{path} {next(iter(body))}" for path, body in CALLS])
async def test_a_call_is_charged_before_it_is_served(edge: EdgeWorld, path: str, body: dict[str, Any]) -> None:
    """With what it is expected to read, and then with what it has read. A refusal costs no tokenizing. Tenants without
    limits ask no router."""
    model = {} if path.endswith("moderations") else {"model": "heard"}
    async with edge.http.post(edge.url + path, json={**model, **body}, headers=headers(SEARCH_KEY)) as response:
        assert response.status == 200
        assert "7" in (response.headers.get("x-ratelimit-remaining-requests"),
                       response.headers.get("anthropic-ratelimit-requests-remaining"))  # fmt: skip
        answer = await response.json()
    charge, *more = edge.link.charges
    assert (charge.tenant, charge.key_id, charge.num_more_tokens) == ("acme/search", f"id-{SEARCH_KEY}", 0)
    assert charge.num_tokens >= 1
    num_tokens = answer.get("count", answer.get("input_tokens"))
    if num_tokens is not None:
        assert charge.num_tokens + sum(one.num_more_tokens for one in more) == num_tokens

    edge.link.charges.clear()
    edge.link.charge_error = KvloomError(ErrorReason.ERROR_REASON_RATE_LIMITED, "too many", retry_after_seconds=2.0)
    status, refused = await edge.post(path, {**model, **body}, headers=headers(SEARCH_KEY))
    assert status == 429, refused
    assert len(edge.link.charges) == 1
    status, _ = await edge.post(path, {**model, **body}, headers=headers(OTHER_KEY))
    assert status == 200
    assert len(edge.link.charges) == 1


@pytest.fixture
async def router(world: RouterWorld, tmp_path: Path) -> AsyncIterator[tuple[RouterServer, RouterServiceStub]]:
    """Tenants: acme/search has six requests a minute, acme/maps has 100 tokens a minute, other/app has no limits."""
    control = FakeControl(trust=SharedSecret(SECRET, ("control",), "control"))
    control.put(
        *two_organisations(),
        Tenant("acme/search", limits=Limits(requests_per_minute=6)),
        Tenant("acme/maps", limits=Limits(tokens_per_minute=100)),
    )
    port = await control.start()
    world.config.data_dir = str(tmp_path)
    world.config.control = ControlConfig(enabled=True, host="127.0.0.1", port=port)
    limiter = Limiter(TenantTable, lambda now: now + time.time() - time.monotonic())
    async with (
        served_router(world, limiter) as (server, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        identities = server.callers.identities
        assert identities is not None
        await eventually(lambda: identities.tenants.connected, "the table")
        yield server, RouterServiceStub(channel)
    await control.stop()


def metadata(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


async def code_of(call: Any) -> grpc.StatusCode:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def plan(num_tokens: int = 16) -> pb.PlanRequest:
    wanted = pb.GenerateRequest(
        model=MODEL, token_ids=pb.TokenIds(ids=[1] * num_tokens), stop=StopConditions(max_tokens=4)
    )
    return pb.PlanRequest(request=wanted)


async def test_every_rpc_that_computes_no_answer_counts(router: tuple[RouterServer, RouterServiceStub]) -> None:
    """Plan, Explain and Moderate share the limit with one another, also where one fails for another reason: there is
    no safety service here, and no request that could be explained."""
    _, stub = router
    key = metadata(SEARCH_KEY)
    calls = [
        lambda: stub.Plan(plan(), metadata=key, timeout=TIMEOUT_SECONDS),
        lambda: stub.Moderate(pb.ModerateRequest(texts=["a"]), metadata=key, timeout=TIMEOUT_SECONDS),
        lambda: stub.Explain(pb.ExplainRequest(request_id="r"), metadata=key, timeout=TIMEOUT_SECONDS),
    ]
    codes = [await code_of(call()) for call in (*calls, *calls)]
    assert codes == [grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.NOT_FOUND] * 2
    codes = [await code_of(call()) for call in calls]
    assert codes == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 3
    assert await code_of(stub.Plan(plan(), metadata=metadata(OTHER_KEY), timeout=TIMEOUT_SECONDS)) is grpc.StatusCode.OK


async def test_the_tokens_of_plans_and_moderations_count(router: tuple[RouterServer, RouterServiceStub]) -> None:
    """Over gRPC as over HTTP; a plan by its prompt's tokens."""
    _, stub = router
    key = metadata(MAPS_KEY)
    assert await code_of(stub.Plan(plan(90), metadata=key, timeout=TIMEOUT_SECONDS)) is grpc.StatusCode.OK
    moderate = pb.ModerateRequest(texts=["a" * 200])
    assert await code_of(stub.Moderate(moderate, metadata=key, timeout=TIMEOUT_SECONDS)) is (
        grpc.StatusCode.RESOURCE_EXHAUSTED
    )


async def test_only_the_fabric_charges_calls(router: tuple[RouterServer, RouterServiceStub]) -> None:
    """Anyone else could use up, or give back, what another tenant may have."""
    _, stub = router
    request = pb.ChargeCallRequest(tenant="acme/search", key_id=f"id-{SEARCH_KEY}", num_more_tokens=-1000)
    code = await code_of(stub.ChargeCall(request, metadata=metadata(OTHER_KEY), timeout=TIMEOUT_SECONDS))
    assert code is grpc.StatusCode.PERMISSION_DENIED


async def test_an_edge_charges_calls_at_its_router(router: tuple[RouterServer, RouterServiceStub]) -> None:
    """A link within the process, and what is left is told."""
    server, _ = router
    link = server.local_link("edge-0")
    request = pb.ChargeCallRequest(tenant="acme/search", key_id=f"id-{SEARCH_KEY}", num_tokens=5)
    for remaining in (5, 4):
        assert (await link.charge_call(request)).limits.requests.remaining == remaining
    for _ in range(4):
        await link.charge_call(request)
    with pytest.raises(KvloomError) as refusal:
        await link.charge_call(request)
    assert refusal.value.reason == ErrorReason.ERROR_REASON_RATE_LIMITED
    assert refusal.value.retry_after_seconds > 0


async def test_plans_and_explanations_tell_a_tenant_nothing_of_the_load(
    router: tuple[RouterServer, RouterServiceStub],
) -> None:
    """Whose requests run and wait is not its business: it sees its shard and what is cached of its own."""
    _, stub = router
    running = stub.Generate(
        pb.GenerateRequest(
            model=MODEL,
            token_ids=pb.TokenIds(ids=[2] * 40),
            request_id="theirs",
            stop=StopConditions(max_tokens=4000, ignore_eos=True),
        ),
        metadata=metadata(OTHER_KEY),
    )
    await running.read()
    found = await stub.Plan(plan(), metadata=metadata(SEARCH_KEY), timeout=TIMEOUT_SECONDS)
    explained = await stub.Explain(
        pb.ExplainRequest(request_id="theirs"), metadata=metadata(OTHER_KEY), timeout=TIMEOUT_SECONDS
    )
    for one in (found, *(decision.plan for decision in explained.decisions)):
        assert one.picked_shard_id == "shard-0"
        [shard] = one.shards
        assert (shard.num_running, shard.num_waiting, shard.num_queued_prefill_tokens) == (0, 0, 0)
        assert not shard.cost_terms
        assert not one.HasField("regret")
    running.cancel()
