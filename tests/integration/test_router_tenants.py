"""The gRPC API of a fabric with tenants, over real sockets: the router believes nobody but the table."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import grpc
import pytest

from edge_http.edge import Edge
from edge_http.server.http_server import EdgeServer
from kvloom.client.client import Client
from kvloom.errors import KvloomError
from kvloom.v1 import model_card_pb2, model_card_pb2_grpc
from kvloom.v1 import router_service_pb2 as pb
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import StopConditions
from kvloom.v1.router_service_pb2_grpc import RouterServiceStub
from kvloom_common.config import CertificateConfig, ControlConfig, TlsConfig
from kvloom_common.tenancy.limits import Limits
from kvloom_common.tenancy.table import Key, Organisation, Tenant
from kvloom_common.trust.shared_secret import SharedSecret
from router.server import RouterServer
from tests.fakes.certificates import Authority
from tests.fakes.fake_control import (
    MAPS_KEY,
    OTHER_KEY,
    SEARCH_KEY,
    SEARCH_KEY_2,
    FakeControl,
    key_of,
    two_organisations,
)
from tests.fakes.fake_issuer import fake_issuer
from tests.fakes.link_requests import make_submit
from tests.fakes.router_world import TIMEOUT_SECONDS, RouterWorld
from tests.fakes.served_models import tiny_model
from tests.fakes.shard_world import sim_config
from tests.fakes.trusted_router import MODEL, SECRET, served_router
from tests.waiting import eventually

pytest_plugins = ("tests.fakes.router_fixtures",)

Metadata = tuple[tuple[str, str], ...]
PROMPT = list(range(1, 65))
USAGE_KEY, FORBIDDEN_KEY = "kvl-usage", "kvl-forbidden"


def bearer(key: str) -> Metadata:
    return (("authorization", f"Bearer {key}"),)


class TenantsWorld(NamedTuple):
    control: FakeControl
    server: RouterServer
    address: str
    stub: RouterServiceStub


@pytest.fixture
async def control(world: RouterWorld, tmp_path: Path) -> AsyncIterator[FakeControl]:
    """Configured, and not started yet: a port of its own would have to be known before the router is made."""
    control = FakeControl(trust=SharedSecret(SECRET, ("control",), "control"))
    control.put(
        *two_organisations(),
        key_of(USAGE_KEY, "acme/search", scopes=("usage",)),
        key_of(FORBIDDEN_KEY, "acme/search", models=("another",)),
    )
    port = await control.start()
    world.config.data_dir = str(tmp_path)
    world.config.control = ControlConfig(enabled=True, host="127.0.0.1", port=port)
    yield control
    await control.stop()


@pytest.fixture
async def tenants(world: RouterWorld, control: FakeControl) -> AsyncIterator[TenantsWorld]:
    async with served_router(world) as (server, address), grpc.aio.insecure_channel(address) as channel:
        identities = server.callers.identities
        assert identities is not None
        await eventually(lambda: identities.tenants.connected, "the table")
        yield TenantsWorld(control, server, address, RouterServiceStub(channel))


def request(request_id: str = "", max_tokens: int = 4, **fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        **{
            "model": MODEL,
            "token_ids": pb.TokenIds(ids=PROMPT),
            "request_id": request_id,
            "stop": StopConditions(max_tokens=max_tokens, ignore_eos=True),
            **fields,
        }
    )


async def code_of(call: Any) -> grpc.StatusCode:
    """How the call ends; what it streams is read, or it would not end."""
    async with asyncio.timeout(TIMEOUT_SECONDS):
        with contextlib.suppress(grpc.aio.AioRpcError):
            while hasattr(call, "read") and await call.read() is not grpc.aio.EOF:
                pass
        return await call.code()


async def num_cached(stub: RouterServiceStub, key: str) -> int:
    found = 0
    async for response in stub.Generate(request(), metadata=bearer(key), timeout=TIMEOUT_SECONDS):
        for delta in response.deltas:
            found = max(found, delta.start.num_cached_tokens)
    return found


async def test_every_rpc_needs_a_key_with_the_scope(tenants: TenantsWorld) -> None:
    """An RPC that is forgotten would be a way around the table."""
    stub = tenants.stub
    for metadata, code in (
        ((), grpc.StatusCode.UNAUTHENTICATED),
        (bearer("wrong"), grpc.StatusCode.UNAUTHENTICATED),
        (bearer(USAGE_KEY), grpc.StatusCode.PERMISSION_DENIED),
    ):
        calls = [
            stub.Generate(request("r"), metadata=metadata),
            stub.Resume(pb.ResumeRequest(request_id="r"), metadata=metadata),
            stub.Connect(metadata=metadata),
            stub.Plan(pb.PlanRequest(request=request("r")), metadata=metadata),
            stub.Explain(pb.ExplainRequest(request_id="r"), metadata=metadata),
            stub.Moderate(pb.ModerateRequest(texts=["a"]), metadata=metadata),
            stub.Cancel(pb.CancelRequest(request_id="r"), metadata=metadata),
            stub.ListModels(pb.ListModelsRequest(), metadata=metadata),
            stub.GetMetrics(pb.GetMetricsRequest(), metadata=metadata),
        ]
        assert await asyncio.gather(*map(code_of, calls)) == [code] * len(calls)
    assert await num_cached(stub, SEARCH_KEY) == 0


@pytest.mark.parametrize("names", [("authorization", "authorization"), ("x-api-key", "x-api-key")])
async def test_an_rpc_with_several_credentials_is_refused(tenants: TenantsWorld, names: tuple[str, str]) -> None:
    """A proxy that checks one of them must not let another one pass; router and edge would choose differently."""
    for keys, code in (
        ((SEARCH_KEY, MAPS_KEY), grpc.StatusCode.INVALID_ARGUMENT),
        ((SEARCH_KEY, SEARCH_KEY), grpc.StatusCode.OK),
    ):
        metadata = tuple(zip(names, keys, strict=True))
        assert await code_of(tenants.stub.Generate(request(), metadata=metadata)) is code
        assert await code_of(tenants.stub.ListModels(pb.ListModelsRequest(), metadata=metadata)) is code


async def test_models_that_a_key_may_not_use_are_refused_and_not_shown(tenants: TenantsWorld) -> None:
    """By every way to name one."""
    stub, metadata = tenants.stub, bearer(FORBIDDEN_KEY)
    denied = grpc.StatusCode.PERMISSION_DENIED
    for wanted in (
        request(),
        request(model="unknown"),
        request(model="auto"),
        request(model="another", models=[MODEL]),
        request(resumable=True),
    ):
        assert await code_of(stub.Generate(wanted, metadata=metadata)) == denied
    assert await code_of(stub.Plan(pb.PlanRequest(request=request()), metadata=metadata)) == denied
    listed = await stub.ListModels(pb.ListModelsRequest(), metadata=metadata, timeout=TIMEOUT_SECONDS)
    assert not listed.models
    listed = await stub.ListModels(pb.ListModelsRequest(), metadata=bearer(SEARCH_KEY), timeout=TIMEOUT_SECONDS)
    assert [model.name for model in listed.models] == [MODEL]
    async with grpc.aio.insecure_channel(tenants.address) as channel:
        cards = model_card_pb2_grpc.ModelCardServiceStub(channel)
        card = model_card_pb2.GetModelCardRequest(model=MODEL)
        assert await code_of(cards.GetModelCard(card, metadata=metadata)) == denied
    frames = await submitted(stub, FORBIDDEN_KEY)
    assert not frames[0].fleet.models
    assert frames[-1].step.finishes[0].error.reason == ErrorReason.ERROR_REASON_PERMISSION_DENIED
    assert MODEL in frames[-1].step.finishes[0].error.message


async def submitted(stub: RouterServiceStub, key: str, **fields: Any) -> list[pb.RouterServiceConnectResponse]:
    """The frames of a stream with one request, to its end."""
    stream = stub.Connect(metadata=bearer(key))
    await stream.write(pb.RouterServiceConnectRequest(hello=pb.ClientHello(client_id="test")))
    submit = make_submit(
        model=MODEL, prompt_token_ids=PROMPT, stop=request().stop, choices=[{"slot": 1, "index": 0}], **fields
    )
    frames: list[pb.RouterServiceConnectResponse] = []
    async with asyncio.timeout(TIMEOUT_SECONDS):
        frames.append(await stream.read())
        await stream.write(pb.RouterServiceConnectRequest(submits=[submit]))
        while not (frames[-1].HasField("step") and frames[-1].step.finishes):
            frames.append(await stream.read())
    stream.cancel()
    return frames


def cached_in(frames: list[pb.RouterServiceConnectResponse]) -> int:
    return max((start.num_cached_tokens for frame in frames for start in frame.step.starts), default=0)


async def test_a_client_cannot_claim_to_be_another_tenant(tenants: TenantsWorld) -> None:
    """`Submit.tenant` and `Submit.key_id` are an edge's word; from anyone else they would be a key to another's cache,
    and to another's budget."""
    assert await num_cached(tenants.stub, SEARCH_KEY) == 0
    claimed = await submitted(tenants.stub, OTHER_KEY, tenant="acme/search", key_id=f"id-{SEARCH_KEY}")
    assert cached_in(claimed) == 0
    assert cached_in(await submitted(tenants.stub, SEARCH_KEY_2)) > 0


async def test_tenants_share_cached_prompts_only_by_a_scope_of_the_table(tenants: TenantsWorld) -> None:
    """Whoever shares a cache can find out what the others have asked: that needs a decision of an administrator, and
    ends with it."""
    stub = tenants.stub
    assert await num_cached(stub, SEARCH_KEY) == 0
    assert await num_cached(stub, SEARCH_KEY_2) > 0  # keys of one tenant
    assert await num_cached(stub, MAPS_KEY) == 0
    assert await num_cached(stub, OTHER_KEY) == 0
    await put(tenants, Tenant("acme/search", cache_scope="acme"), Tenant("acme/maps", cache_scope="acme"))
    assert await num_cached(stub, SEARCH_KEY) == 0
    assert await num_cached(stub, MAPS_KEY) > 0
    assert await num_cached(stub, OTHER_KEY) > 0  # its own
    await put(tenants, Tenant("acme/maps"))
    assert await num_cached(stub, MAPS_KEY) > 0  # what it had before


async def put(tenants: TenantsWorld, *entries: Tenant | Key) -> None:
    """Returns once the router knows it."""
    tenants.control.put(*entries)
    await known(tenants)


async def known(tenants: TenantsWorld) -> None:
    identities = tenants.server.callers.identities
    assert identities is not None
    await eventually(lambda: identities.tenants.table.version == tenants.control.version, "the change")


async def test_requests_belong_to_the_tenant(tenants: TenantsWorld) -> None:
    """Another tenant can neither cancel, explain, resume nor block a request whose name it knows; another key of the
    same tenant can, since keys are replaced."""
    stub = tenants.stub
    running = stub.Generate(
        request("same name", max_tokens=4000, resumable=True), metadata=bearer(SEARCH_KEY), timeout=60
    )
    first = await running.read()
    assert isinstance(first, pb.GenerateResponse)
    resume = pb.ResumeRequest(request_id="same name", resume_token=first.resume_token)
    cancel = pb.CancelRequest(request_id="same name")
    explain = pb.ExplainRequest(request_id="same name")
    for key in (OTHER_KEY, MAPS_KEY):
        metadata = bearer(key)
        assert await code_of(stub.Resume(resume, metadata=metadata)) is grpc.StatusCode.NOT_FOUND
        assert await code_of(stub.Explain(explain, metadata=metadata)) is grpc.StatusCode.NOT_FOUND
        assert not (await stub.Cancel(cancel, metadata=metadata, timeout=TIMEOUT_SECONDS)).found
        assert await code_of(stub.Generate(request("same name"), metadata=metadata)) is grpc.StatusCode.OK
    metadata = bearer(SEARCH_KEY_2)
    explained = await stub.Explain(explain, metadata=metadata, timeout=TIMEOUT_SECONDS)
    assert explained.request_id == "same name"
    resumed = stub.Resume(resume, metadata=metadata, timeout=60)
    assert isinstance(await resumed.read(), pb.ResumeResponse)
    assert (await stub.Cancel(cancel, metadata=metadata, timeout=TIMEOUT_SECONDS)).found
    resumed.cancel()
    running.cancel()


async def test_a_revoked_key_ends_its_streams_and_no_others(tenants: TenantsWorld) -> None:
    """The stream that a client's requests share may last for weeks: it must not outlive the key."""
    streams = {key: tenants.stub.Connect(metadata=bearer(key)) for key in (SEARCH_KEY, SEARCH_KEY_2)}
    for key, stream in streams.items():
        await stream.write(pb.RouterServiceConnectRequest(hello=pb.ClientHello(client_id=key)))
        assert (await stream.read()).HasField("fleet")
    tenants.control.remove_key(f"id-{SEARCH_KEY}")
    assert await code_of(streams[SEARCH_KEY]) is grpc.StatusCode.UNAUTHENTICATED
    assert await code_of(tenants.stub.Generate(request(), metadata=bearer(SEARCH_KEY))) is (
        grpc.StatusCode.UNAUTHENTICATED
    )
    assert await num_cached(tenants.stub, SEARCH_KEY_2) == 0
    assert not streams[SEARCH_KEY_2].done()
    streams[SEARCH_KEY_2].cancel()


async def test_a_stream_ends_when_its_key_expires(tenants: TenantsWorld) -> None:
    """Nothing changes in the table when a key's time has come."""
    identities = tenants.server.callers.identities
    assert identities is not None
    await put(tenants, key_of("kvl-short", "acme/search", expires_at=identities.tenants._now() + 1.0))
    stream = tenants.stub.Connect(metadata=bearer("kvl-short"))
    await stream.write(pb.RouterServiceConnectRequest(hello=pb.ClientHello(client_id="short")))
    assert await code_of(stream) is grpc.StatusCode.UNAUTHENTICATED


async def test_the_sdk_presents_its_key(tenants: TenantsWorld) -> None:
    """Programs that use no HTTP are tenants alike, and get the errors of the catalogue."""
    address = f"127.0.0.1:{tenants.address.rpartition(':')[2]}"
    async with Client(address, api_key=SEARCH_KEY) as client:
        assert [model.name for model in await client.list_models()] == [MODEL]
    async with Client(address, api_key="wrong") as client:
        with pytest.raises(KvloomError) as failure:
            await client.list_models()
        assert failure.value.reason == ErrorReason.ERROR_REASON_UNAUTHENTICATED


def from_elsewhere(tenants: TenantsWorld) -> str:
    """The router's address, written so that the SDK does not know it for one of this machine, whose processes of the
    same user are trusted."""
    return f"ipv4:127.0.0.1:{tenants.address.rpartition(':')[2]}"


async def test_the_sdk_says_that_its_key_was_revoked(tenants: TenantsWorld) -> None:
    """Of requests that share a stream, too: a running one, the next one, and the first of another client. It is not the
    router that is lost, and nothing is tried again."""
    address = from_elsewhere(tenants)
    async with Client(address, api_key=SEARCH_KEY) as client, Client(address, api_key=SEARCH_KEY) as later:
        async with client.generate(token_ids=list(range(5)), model=MODEL, max_tokens=8000) as stream:
            await anext(stream)
            tenants.control.remove_key(f"id-{SEARCH_KEY}")
            with pytest.raises(KvloomError) as failure:
                await stream.collect()
        assert failure.value.reason == ErrorReason.ERROR_REASON_UNAUTHENTICATED
        for one in (client, later):
            with pytest.raises(KvloomError) as failure:
                await one.complete(token_ids=list(range(5)), model=MODEL)
            assert failure.value.reason == ErrorReason.ERROR_REASON_UNAUTHENTICATED


async def test_the_sdk_says_that_its_key_may_not_generate(tenants: TenantsWorld) -> None:
    """It is a good key, for something else."""
    await put(tenants, key_of("kvl-usage", "acme/search", scopes=("usage",)))
    address = from_elsewhere(tenants)
    async with Client(address, api_key="kvl-usage") as client:
        with pytest.raises(KvloomError) as failure:
            await client.complete(token_ids=list(range(5)), model=MODEL)
        assert failure.value.reason == ErrorReason.ERROR_REASON_PERMISSION_DENIED


async def test_edges_are_believed(tenants: TenantsWorld) -> None:
    """They have authenticated the caller by the same table."""
    trust = SharedSecret(SECRET, ("edge",), "edge-0")
    async with trust.open_channel(tenants.server.internal_address, "router") as channel:
        stub = RouterServiceStub(channel)
        assert await num_cached(tenants.stub, SEARCH_KEY) == 0
        assert cached_in(await submitted(stub, "none", tenant="acme/search", key_id=f"id-{SEARCH_KEY}")) > 0


async def test_tokens_are_accepted_over_grpc(world: RouterWorld, control: FakeControl) -> None:
    """In the metadata, as keys are."""
    assert control.address
    async with fake_issuer() as issuer:
        world.config.control.issuers = [issuer.config()]
        async with served_router(world) as (_, address), grpc.aio.insecure_channel(address) as channel:
            stub = RouterServiceStub(channel)
            assert await num_cached(stub, issuer.token()) == 0
            assert await num_cached(stub, SEARCH_KEY) > 0  # of the same tenant
            refused = stub.Generate(request(), metadata=bearer(issuer.token(aud="other")))
            assert await code_of(refused) is grpc.StatusCode.UNAUTHENTICATED


async def test_certificates_are_accepted_over_grpc(world: RouterWorld, control: FakeControl, tmp_path: Path) -> None:
    """A client without a key is whom its certificate names."""
    assert control.address
    authority = Authority("mesh")
    (tmp_path / "ca.pem").write_bytes(authority.pem)
    certificate, key = authority.issue_to(tmp_path, "server")
    world.config.tls = TlsConfig(
        certificate_file=str(certificate), key_file=str(key), client_ca_file=str(tmp_path / "ca.pem")
    )
    world.config.control.certificates = [CertificateConfig(tenant="acme/search", uri="spiffe://mesh/search")]
    async with served_router(world) as (_, address):
        for uri, code in (
            ("spiffe://mesh/search", grpc.StatusCode.OK),
            ("spiffe://mesh/x", grpc.StatusCode.UNAUTHENTICATED),
        ):
            chain, private = authority.issue("worker", uri)
            credentials = grpc.ssl_channel_credentials(authority.pem, private, chain)
            async with grpc.aio.secure_channel(address, credentials) as channel:
                assert await code_of(RouterServiceStub(channel).Generate(request())) is code


async def test_an_edge_in_the_routers_process_knows_the_same_tenants(tenants: TenantsWorld, world: RouterWorld) -> None:
    """Both use one table, and what the edge has checked reaches the router's cache under the same name."""
    link = tenants.server.local_link("edge-0")
    await link.start()
    edge = Edge(world.config, link, {MODEL: tiny_model(MODEL)}, callers=tenants.server.callers)
    http = EdgeServer(edge)
    url = f"http://{await http.listen('127.0.0.1', 0)}/v1/completions"
    try:
        await eventually(lambda: any(model.num_ready_shards for model in link.fleet.models), "the shard")
        async with aiohttp.ClientSession() as client:
            body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2}
            for key, status in ((SEARCH_KEY, 200), (FORBIDDEN_KEY, 403), (USAGE_KEY, 403), ("wrong", 401)):
                headers = {"Authorization": f"Bearer {key}"}
                async with client.post(url, json=body, headers=headers) as response:
                    assert response.status == status, await response.text()
        assert await num_cached(tenants.stub, OTHER_KEY) == 0
        assert await num_cached(tenants.stub, SEARCH_KEY_2) > 0
    finally:
        await http.stop()
        await link.close()


@pytest.mark.parametrize("percent", [0, 50])
async def test_a_guaranteed_share_reaches_the_shard(world: RouterWorld, control: FakeControl, percent: int) -> None:
    """It is the organisation's, as the project has none of its own: a flood of another organisation leaves the
    project's blocks alone."""
    control.put(Organisation("acme", limits=Limits(kv_share_percent=percent)))
    config = sim_config(num_blocks=24)
    async with (
        served_router(world, config=config) as (server, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub = RouterServiceStub(channel)
        identities = server.callers.identities
        assert identities is not None
        await eventually(lambda: identities.tenants.connected, "the table")
        assert await num_cached(stub, SEARCH_KEY) == 0
        for i in range(8):
            wanted = request(token_ids=pb.TokenIds(ids=[i + 1] * 64))
            assert await code_of(stub.Generate(wanted, metadata=bearer(OTHER_KEY))) == grpc.StatusCode.OK
        assert (await num_cached(stub, SEARCH_KEY) > 0) == (percent > 0)
