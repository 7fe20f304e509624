"""Callers of the router's gRPC API are isolated from one another, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from kvloom.client.client import Client
from kvloom.errors import KvloomError
from kvloom.v1 import router_service_pb2 as pb
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import StopConditions
from kvloom.v1.router_service_pb2_grpc import RouterServiceStub
from kvloom_common.access.api_keys import digest_of
from kvloom_common.trust.shared_secret import SharedSecret
from tests.fakes.link_requests import make_submit
from tests.fakes.router_world import TIMEOUT_SECONDS, RouterWorld
from tests.fakes.trusted_router import MODEL, SECRET, served_router

pytest_plugins = ("tests.fakes.router_fixtures",)

ALICE = (("authorization", "Bearer alice"),)
BOB = (("authorization", "Bearer bob"),)
PROMPT = list(range(1, 65))


@pytest.fixture
async def stub(world: RouterWorld) -> AsyncIterator[RouterServiceStub]:
    async with served_router(world) as (_, address), grpc.aio.insecure_channel(address) as channel:
        yield RouterServiceStub(channel)


def request(request_id: str, max_tokens: int = 4) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        model=MODEL,
        token_ids=pb.TokenIds(ids=PROMPT),
        request_id=request_id,
        stop=StopConditions(max_tokens=max_tokens, ignore_eos=True),
    )


async def num_cached(stub: RouterServiceStub, caller: tuple[tuple[str, str], ...], name: str) -> int:
    found = 0
    async for response in stub.Generate(request(name), metadata=caller, timeout=TIMEOUT_SECONDS):
        for delta in response.deltas:
            found = max(found, delta.start.num_cached_tokens)
    return found


async def test_a_callers_prompts_are_not_in_anothers_cache(stub: RouterServiceStub) -> None:
    """`cached_tokens` and `Plan` told one user what another one had sent."""
    assert await num_cached(stub, ALICE, "a") == 0
    assert await num_cached(stub, BOB, "b") == 0
    assert await num_cached(stub, ALICE, "c") > 0
    planned = pb.PlanRequest(request=request(""))
    for caller, sees_it in ((ALICE, True), ((("authorization", "Bearer carol"),), False)):
        plan = await stub.Plan(planned, metadata=caller, timeout=TIMEOUT_SECONDS)
        assert bool(plan.shards[0].num_overlap_tokens) is sees_it


async def test_a_caller_cannot_cancel_explain_or_block_anothers_request(stub: RouterServiceStub) -> None:
    """Anybody could end, or by holding a name prevent, anybody's request whose name he knew."""
    running = stub.Generate(request("same name", max_tokens=4000), metadata=ALICE, timeout=60)
    assert isinstance(first := await running.read(), pb.GenerateResponse)
    assert first.request_id == "same name"
    cancel = pb.CancelRequest(request_id="same name")
    assert not (await stub.Cancel(cancel, metadata=BOB, timeout=TIMEOUT_SECONDS)).found
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Explain(pb.ExplainRequest(request_id="same name"), metadata=BOB, timeout=TIMEOUT_SECONDS)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    explained = await stub.Explain(pb.ExplainRequest(request_id="same name"), metadata=ALICE, timeout=TIMEOUT_SECONDS)
    assert explained.request_id == "same name"
    assert await num_cached(stub, BOB, "same name") == 0  # the name is not taken for Bob
    assert (await stub.Cancel(cancel, metadata=ALICE, timeout=TIMEOUT_SECONDS)).found
    running.cancel()


async def test_a_callers_own_id_explains_only_its_own_requests(stub: RouterServiceStub) -> None:
    """Callers choose the same x-request-id by chance or on purpose; neither may learn of the other's requests."""
    same_id = ("x-request-id", "shared")
    for caller, name in ((ALICE, "of alice"), (BOB, "of bob")):
        async for _ in stub.Generate(request(name), metadata=(*caller, same_id), timeout=TIMEOUT_SECONDS):
            pass
    asked = pb.ExplainRequest(client_request_id="shared")
    for caller, name in ((ALICE, "of alice"), (BOB, "of bob")):
        explained = await stub.Explain(asked, metadata=caller, timeout=TIMEOUT_SECONDS)
        assert (explained.request_id, list(explained.other_request_ids)) == (name, [])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Explain(asked, metadata=(("authorization", "Bearer carol"),), timeout=TIMEOUT_SECONDS)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_an_rpc_with_several_credentials_is_refused(world: RouterWorld, tmp_path: Path) -> None:
    """A proxy that checks one of them must not let another one pass; router and edge would choose differently."""
    path = tmp_path / "keys"
    path.write_text("".join(f"{name} sha256:{digest_of(name)}\n" for name in ("alice", "bob")))
    for world.config.callers.api_keys_file in ("", str(path)):
        async with served_router(world) as (_, address), grpc.aio.insecure_channel(address) as channel:
            stub = RouterServiceStub(channel)
            for metadata in ((*ALICE, *BOB), (*BOB, *ALICE), (("x-api-key", "alice"), ("x-api-key", "bob"))):
                for call in (
                    stub.Generate(request("r"), metadata=metadata),
                    stub.Connect(metadata=metadata),
                    stub.ListModels(pb.ListModelsRequest(), metadata=metadata),
                ):
                    assert await failure_of(call) is grpc.StatusCode.INVALID_ARGUMENT
            assert await num_cached(stub, (*ALICE, ("x-api-key", "bob")), "same") == 0


async def test_a_client_cannot_claim_to_be_another_caller(world: RouterWorld) -> None:
    """`Submit.tenant` is an edge's word; from anyone else it would be a key to another's cache."""
    async with served_router(world) as (server, address):
        trusted = SharedSecret(SECRET, ("edge",), "edge-0")
        async with trusted.open_channel(server.internal_address, "router") as channel:
            assert await submitted(RouterServiceStub(channel), "alice") == 0
            assert await submitted(RouterServiceStub(channel), "alice") > 0
        async with grpc.aio.insecure_channel(address) as channel:
            assert await submitted(RouterServiceStub(channel), "alice") == 0


async def submitted(stub: RouterServiceStub, tenant: str) -> int:
    """Returns how many tokens of the prompt were cached for a request that claims to be the tenant's."""
    stream = stub.Connect()
    await stream.write(pb.RouterServiceConnectRequest(hello=pb.ClientHello(client_id="test")))
    wanted = request("")
    submit = make_submit(
        model=MODEL, prompt_token_ids=PROMPT, stop=wanted.stop, tenant=tenant, choices=[{"slot": 1, "index": 0}]
    )
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while not (await stream.read()).fleet.models:
            pass
        await stream.write(pb.RouterServiceConnectRequest(submits=[submit]))
        found = 0
        while True:
            frame = await stream.read()
            found = max([found, *(start.num_cached_tokens for start in frame.step.starts)])
            if frame.step.finishes:
                stream.cancel()
                return found


async def failure_of(call: grpc.aio.Call) -> grpc.StatusCode:
    async with asyncio.timeout(TIMEOUT_SECONDS):
        return await call.code()


async def read_to_the_end(stream: AsyncIterator[object]) -> None:
    async for _ in stream:
        pass


async def test_every_rpc_needs_an_api_key_where_keys_are_required(world: RouterWorld, tmp_path: Path) -> None:
    """An RPC that is forgotten would be a way around the keys."""
    path = tmp_path / "keys"
    path.write_text(f"alice sha256:{digest_of('alice')}\n")
    world.config.callers.api_keys_file = str(path)
    async with served_router(world) as (_, address), grpc.aio.insecure_channel(address) as channel:
        stub = RouterServiceStub(channel)
        for metadata in ((), BOB):
            calls = [
                stub.Generate(request("r"), metadata=metadata),
                stub.Resume(pb.ResumeRequest(request_id="r"), metadata=metadata),
                stub.Connect(metadata=metadata),
                stub.Plan(pb.PlanRequest(request=request("r")), metadata=metadata),
                stub.Explain(pb.ExplainRequest(request_id="r"), metadata=metadata),
                stub.Cancel(pb.CancelRequest(request_id="r"), metadata=metadata),
                stub.ListModels(pb.ListModelsRequest(), metadata=metadata),
            ]
            codes = await asyncio.gather(*map(failure_of, calls))
            assert codes == [grpc.StatusCode.UNAUTHENTICATED] * len(calls)
        models = await stub.ListModels(pb.ListModelsRequest(), metadata=ALICE, timeout=TIMEOUT_SECONDS)
        assert [model.name for model in models.models] == [MODEL]


async def test_the_sdk_sends_its_key_and_a_removed_key_ends_its_stream(world: RouterWorld, tmp_path: Path) -> None:
    """The stream that a client's requests share may last for weeks: it must not outlive the key."""
    path = tmp_path / "keys"
    path.write_text(f"alice sha256:{digest_of('alice')}\nbob sha256:{digest_of('bob')}\n")
    world.config.callers.api_keys_file = str(path)
    async with served_router(world) as (_, address):
        proxied = f"127.0.0.1:{address.rpartition(':')[2]}"
        async with Client(proxied, api_key="bob") as client:
            assert [model.name for model in await client.list_models()] == [MODEL]
        async with grpc.aio.insecure_channel(address) as channel:
            stream = RouterServiceStub(channel).Connect(metadata=ALICE)
            await stream.write(pb.RouterServiceConnectRequest(hello=pb.ClientHello(client_id="alice")))
            path.write_text(f"bob sha256:{digest_of('bob')}\n")
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await asyncio.wait_for(read_to_the_end(stream), TIMEOUT_SECONDS)
            assert ended.value.code() == grpc.StatusCode.UNAUTHENTICATED
        async with Client(proxied, api_key="alice") as client:
            with pytest.raises(KvloomError) as failure:
                await client.list_models()
            assert failure.value.reason == ErrorReason.ERROR_REASON_UNAUTHENTICATED


async def test_the_routers_metrics_are_for_processes_of_the_fabric(world: RouterWorld) -> None:
    """They name all models and how much each is used. Supervisors need them although /metrics may want a key."""
    wanted = pb.GetMetricsRequest(names=["kvloom_router_draining"])
    async with served_router(world) as (server, address):
        async with grpc.aio.insecure_channel(address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await RouterServiceStub(channel).GetMetrics(wanted, metadata=ALICE, timeout=TIMEOUT_SECONDS)
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        trust = SharedSecret(SECRET, ("supervisor",), "kvloom")
        async with trust.open_channel(server.internal_address, "router") as channel:
            answer = await RouterServiceStub(channel).GetMetrics(wanted, timeout=TIMEOUT_SECONDS)
        assert "kvloom_router_draining 0.0" in answer.text
