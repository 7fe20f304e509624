"""The examples of docs/how-to/plugins.md, installed as pip would, in real processes' code."""

from __future__ import annotations

import asyncio
import contextlib
import json
import zlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import grpc
import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer
from click.testing import CliRunner

from edge_http.edge import Edge
from edge_http.server.http_server import EdgeServer
from kvloom.enums import ErrorReason
from kvloom.v1 import router_service_pb2 as pb
from kvloom.v1.generation_pb2 import FinishReason
from kvloom.v1.router_service_pb2_grpc import RouterServiceStub
from kvloom.v1.safety_service_pb2_grpc import add_SafetyServiceServicer_to_server
from kvloom_common.access.exposure import exposure_risk
from kvloom_common.access.listener_tls import ListenerTls
from kvloom_common.callers import configured_callers
from kvloom_common.config import CallersConfig, ConfigError, KvloomConfig
from kvloom_common.metrics.server import MetricsServer
from kvloom_common.models.served_model import ServedModel
from kvloom_common.parsers.events import ReasoningDelta, TextDelta
from kvloom_common.parsers.output_parser import ParserSpec, make_parser
from kvloom_common.process.service import SERVER_OPTIONS
from kvloom_common.process.watched_files import following
from router.rpc import provider_check
from safety_svc.policy_file import PolicyFile
from safety_svc.server import SafetyServicer
from tests.fakes.certificates import Authority
from tests.fakes.edge_world import EdgeWorld, chat_body, edge_world
from tests.fakes.fake_router_link import FakeRouterLink
from tests.fakes.fake_router_link import answer as fake_answer
from tests.fakes.plugin_site import PluginSite
from tests.fakes.router_world import RouterWorld
from tests.integration.test_listener_tls import get, tls_config, trusting
from tests.integration.test_router_callers import failure_of, num_cached, request, served_router
from tests.waiting import eventually
from tools.simulate.command import simulate_command

pytest_plugins = ("tests.fakes.router_fixtures",)

PROMPT = list(range(40))


def session(*, is_canary: bool) -> str:
    """A session that the example's policy counts among those of canaries, or not."""
    return next(name for name in map(str, range(1000)) if (zlib.crc32(name.encode()) % 10 == 0) == is_canary)


def test_the_parser_reads_reasoning(plugin_site: PluginSite) -> None:
    """A reader who follows the page gets a family that works."""
    plugin_site.install_example("kvloom.parsers")
    parser = make_parser(ParserSpec(reasoning="acme"))
    assert parser.feed("<thinking>why</thinking>so") == [ReasoningDelta("why"), TextDelta("so")]


async def test_the_placement_policy_places_requests(world: RouterWorld, plugin_site: PluginSite) -> None:
    """The router's core uses the policy of another package, chosen in the configuration."""
    plugin_site.install_example("kvloom.placement_policies")
    world.config.router.placement.policy = "canary"
    shards = {name: await world.start_shard(name) for name in ("canary-0", "shard-0")}
    await world.start_router()
    link = await world.connect()
    await world.wait_for_shards(link, 2)
    for is_canary in (True, False, True):
        answer = await world.ask(link, PROMPT, 3, session_key=session(is_canary=is_canary))
        assert len(answer.token_ids[0]) == 3
    assert {name: len(shard.submits) for name, shard in shards.items()} == {"canary-0": 2, "shard-0": 1}


def test_the_placement_policy_is_simulated(tmp_path: Path, plugin_site: PluginSite) -> None:
    """The author of a policy compares it with others before routers use it."""
    plugin_site.install_example("kvloom.placement_policies")
    trace = tmp_path / "mooncake.jsonl"
    calls = [{"timestamp": 50 * i, "input_length": 600, "output_length": 4, "hash_ids": [i, i + 1]} for i in range(20)]
    trace.write_text("".join(json.dumps(call) + "\n" for call in calls))
    arguments = ["--trace", str(trace), "--shards", "2", "--policy", "canary,ect", "--jobs", "1", "--json"]
    result = CliRunner().invoke(simulate_command, arguments)
    assert result.exit_code == 0, result.output
    assert [row["policy"] for row in json.loads(result.stdout)] == ["canary", "ect", "pool", "bound"]


RULE = """
[[rules]]
name = "card-number"
kind = "card_number"
message = "Card numbers must not be shared here."
first_digits = "45"
"""
CARD = "4111 1111 1111 1111".replace(" ", "")
FAILING_RULE = """
class Acme:
    max_length = 4

    def __init__(self, fields):
        pass

    def find(self, text, start):
        if "poison" in text:
            raise ValueError(text)
"""


@contextlib.asynccontextmanager
async def safety_service(world: RouterWorld, policy: Path) -> AsyncIterator[None]:
    """The real service, which the router that starts next uses."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_SafetyServiceServicer_to_server(SafetyServicer(PolicyFile(str(policy))), server)
    world.config.safety.port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield
    finally:
        await server.stop(0)


async def test_the_safety_rule_stops_an_answer_and_a_prompt(
    world: RouterWorld, plugin_site: PluginSite, tmp_path: Path
) -> None:
    """A rule of another package holds for prompts, and no part of what it forbids reaches a client that streams."""
    plugin_site.install_example("kvloom.safety_rules")
    (tmp_path / "policy.toml").write_text(RULE)
    script = list(enumerate([*"My card: ", *CARD, *" thanks, and more text behind it"]))
    await world.start_shard("shard-0", script=script)
    async with safety_service(world, tmp_path / "policy.toml"):
        await world.start_router()
        link = await world.connect()
        await world.wait_for_shards(link, 1)
        answer = await world.ask(link, PROMPT, 100)
        refused = await world.ask(link, PROMPT, 100, prompt_text=f"Is {CARD} a card?")
    assert "My card: ".startswith(answer.texts[0])
    assert answer.finish.reason == FinishReason.FINISH_REASON_CONTENT_FILTER
    assert answer.finish.error.message == "Card numbers must not be shared here."
    assert refused.texts == [""]
    assert refused.finish.reason == FinishReason.FINISH_REASON_CONTENT_FILTER


async def test_a_safety_rule_that_fails_ends_its_request_only(
    world: RouterWorld, plugin_site: PluginSite, tmp_path: Path
) -> None:
    """An error in a plugin is no crash and no stack trace for a client, shows nothing unscreened, and harms no other
    request, although all share a stream to the service."""
    plugin_site.install("acme_rules", "kvloom.safety_rules", {"acme": "acme_rules:Acme"}, FAILING_RULE)
    (tmp_path / "policy.toml").write_text('[[rules]]\nname = "r"\nkind = "acme"\n')
    world.config.safety.on_unavailable = "refuse"
    await world.start_shard("shard-0")
    async with safety_service(world, tmp_path / "policy.toml"):
        await world.start_router()
        link = await world.connect()
        await world.wait_for_shards(link, 1)
        failed = await world.ask(link, PROMPT, 10, prompt_text="poison")
        served = await world.ask(link, PROMPT, 10, prompt_text="fine")
    assert failed.texts == [""]
    assert failed.finish.error.reason == ErrorReason.SAFETY_UNAVAILABLE
    assert "poison" not in failed.finish.error.message
    assert len(served.token_ids[0]) == 10


def test_an_auth_provider_counts_as_authentication(plugin_site: PluginSite) -> None:
    """A listener that others can reach is guarded by it, as by API keys; its settings are checked at the start."""
    plugin_site.install_example("kvloom.auth_providers")
    config = KvloomConfig(callers=CallersConfig(provider="introspection", plugin={"url": "http://127.0.0.1:1"}))
    assert "API keys" not in exposure_risk(config, "0.0.0.0")
    assert configured_callers(config).are_authenticated
    config.callers.plugin = {"uri": "x"}
    with pytest.raises(ConfigError, match=r"callers\.provider: The auth provider 'introspection' cannot be made: .*ur"):
        configured_callers(config)


class Identities:
    """A service for token introspection."""

    def __init__(self) -> None:
        self.tokens = {"t1": "alice", "t2": "alice", "t3": "bob"}
        self.num_asked = 0
        self.is_broken = False

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self.num_asked += 1
        if self.is_broken:
            return web.Response(status=500)
        found = self.tokens.get(str((await request.post())["token"]))
        return web.json_response({"active": found is not None, "sub": found})


@pytest.fixture
async def identities(plugin_site: PluginSite) -> AsyncIterator[tuple[Identities, CallersConfig]]:
    """A running service, and the configuration that has callers checked there."""
    plugin_site.install_example("kvloom.auth_providers")
    service = Identities()
    async with RawTestServer(service.answer) as server:
        url = str(server.make_url("/introspect"))
        yield service, CallersConfig(provider="introspection", plugin={"url": url}, provider_cache_seconds=600.0)


@contextlib.asynccontextmanager
async def guarded_edge(config: CallersConfig) -> AsyncIterator[EdgeWorld]:
    callers = configured_callers(KvloomConfig(callers=config))
    assert callers.verifier is not None
    async with edge_world(callers=callers) as world, following(callers.verifier):
        world.link.script = fake_answer("a")
        yield world


async def test_the_auth_provider_names_the_callers_of_the_http_api(
    identities: tuple[Identities, CallersConfig],
) -> None:
    """It decides on every route but the open ones; an id is a caller, whichever of its credentials it uses."""
    service, config = identities
    async with guarded_edge(config) as world:
        tenants: list[str] = []
        for headers in ({"Authorization": "Bearer t1"}, {"x-acme-token": "t2"}, {"Authorization": "Bearer t3"}) * 2:
            status, _ = await world.post("/v1/chat/completions", chat_body(), headers=headers)
            assert status == 200
            tenants.append(world.link.requests[-1].request.submit.tenant)
        assert tenants == ["id-alice", "id-alice", "id-bob"] * 2
        assert service.num_asked == 3
        for headers in ({}, {"Authorization": "Bearer t4"}):
            status, body = await world.post("/v1/chat/completions", chat_body(), headers=headers)
            assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        service.is_broken = True
        status, body = await world.post("/v1/chat/completions", chat_body(), headers={"x-acme-token": "t9"})
        assert (status, body["error"]["code"]) == (503, "auth_unavailable")
        status, _ = await world.post("/v1/chat/completions", chat_body(), headers={"x-acme-token": "t2"})
        assert status == 200, "a known caller is served while the provider is away"
        async with world.http.get(world.url + "/health") as response:
            assert response.status == 200
        assert len(world.link.requests) == 7


async def test_a_stream_is_resumed_with_new_credentials_of_its_caller(
    identities: tuple[Identities, CallersConfig],
) -> None:
    """Tokens are short-lived; a response belongs to the caller who began it, and to no other."""
    _, config = identities
    async with guarded_edge(config) as world:
        begin = {"Authorization": "Bearer t1", "x-kvloom-resume": "on"}
        body = chat_body(stream=True)
        async with world.http.post(world.url + "/v1/chat/completions", json=body, headers=begin) as response:
            response_id = response.headers["x-kvloom-response-id"]
            await response.read()
        found: list[int] = []
        for token in ("t2", "t3"):
            path = f"{world.url}/v1/chat/completions/{response_id}?stream=true"
            async with world.http.get(path, headers={"Authorization": f"Bearer {token}"}) as response:
                found.append(response.status)
        assert found == [200, 404]


async def test_the_auth_provider_guards_every_rpc(
    world: RouterWorld, identities: tuple[Identities, CallersConfig]
) -> None:
    """Direct callers of the router are checked alike, and are isolated by the provider's id."""
    service, world.config.callers = identities
    async with served_router(world) as (_, address), grpc.aio.insecure_channel(address) as channel:
        stub = RouterServiceStub(channel)

        def calls(name: str, token: str) -> list[grpc.aio.Call]:
            metadata = (("authorization", f"Bearer {token}"),)
            return [
                stub.Generate(request(name), metadata=metadata),
                stub.Resume(pb.ResumeRequest(request_id=name), metadata=metadata),
                stub.Connect(metadata=metadata),
                stub.Plan(pb.PlanRequest(request=request(name)), metadata=metadata),
                stub.Explain(pb.ExplainRequest(request_id=name), metadata=metadata),
                stub.Cancel(pb.CancelRequest(request_id=name), metadata=metadata),
                stub.Moderate(pb.ModerateRequest(texts=["a"]), metadata=metadata),
                stub.ListModels(pb.ListModelsRequest(), metadata=metadata),
            ]

        codes = await asyncio.gather(*map(failure_of, calls("r", "t4")))
        assert codes == [grpc.StatusCode.UNAUTHENTICATED] * 8
        cached = {
            name: await num_cached(stub, (("x-acme-token", token),), name)
            for name, token in {"a": "t1", "b": "t3", "c": "t2"}.items()
        }
        assert cached["a"] == cached["b"] == 0
        assert cached["c"] > 0, "t1 and t2 are one caller's"
        service.is_broken = True
        codes = await asyncio.gather(*map(failure_of, calls("r", "t5")))
        assert codes == [grpc.StatusCode.UNAVAILABLE] * 8


async def test_a_lasting_stream_ends_when_its_caller_is_refused(
    world: RouterWorld, identities: tuple[Identities, CallersConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream that a client's requests share may last for weeks: it must not outlive the caller's access, and a
    provider that is away must not end it."""
    monkeypatch.setattr(provider_check, "RECHECK_SECONDS", 0.02)
    service, world.config.callers = identities
    world.config.callers.provider_cache_seconds = 0.0
    async with served_router(world) as (_, address), grpc.aio.insecure_channel(address) as channel:
        stream = RouterServiceStub(channel).Connect(metadata=(("authorization", "Bearer t1"),))
        await stream.write(pb.RouterServiceConnectRequest(hello=pb.ClientHello(client_id="alice")))
        assert isinstance(await stream.read(), pb.RouterServiceConnectResponse)
        service.is_broken, num_asked = True, service.num_asked
        await eventually(lambda: service.num_asked > num_asked + 1, "a check while the provider is broken")
        assert not stream.done()
        service.tokens.clear()
        service.is_broken = False
        assert await failure_of(stream) == grpc.StatusCode.UNAUTHENTICATED


async def test_scrapers_are_checked_too(identities: tuple[Identities, CallersConfig]) -> None:
    """Metrics name models and rules: where clients need credentials, scrapers do."""
    _, config = identities
    server = MetricsServer(KvloomConfig(callers=config), 0)
    try:
        async with following(server), aiohttp.ClientSession() as http:
            found: list[int] = []
            for headers in ({}, {"x-acme-token": "t1"}):
                async with http.get(f"http://{server.address}/metrics", headers=headers) as response:
                    found.append(response.status)
            assert found == [401, 200]
    finally:
        server.close()


BY_CERTIFICATE = """
from kvloom import ErrorReason, KvloomError

class ByCertificate:
    def __init__(self, settings):
        self._known = settings["pem"].split()

    async def authenticate(self, credentials):
        if credentials.certificate.split() != self._known:
            raise KvloomError(ErrorReason.UNAUTHENTICATED, "Not this certificate.")
        return "alice"
"""


async def test_a_provider_sees_the_client_s_certificate(
    world: RouterWorld, plugin_site: PluginSite, tmp_path: Path
) -> None:
    """Machines that call often have a certificate and nothing else; both ports present it in the same form."""
    plugin_site.install(
        "by_certificate", "kvloom.auth_providers", {"certificate": "by_certificate:ByCertificate"}, BY_CERTIFICATE
    )
    server, clients = Authority("issuer"), Authority("clients")
    world.config.tls = tls_config(tmp_path, server, clients)
    known, other = clients.issue_to(tmp_path, "known"), clients.issue_to(tmp_path, "other")
    world.config.callers = CallersConfig(provider="certificate", plugin={"pem": known[0].read_text()})
    callers = configured_callers(world.config)
    assert callers.verifier is not None
    model = ServedModel("tiny", world.tokenizer, 1_700_000_000, "fp_test")
    edge = EdgeServer(Edge(KvloomConfig(), FakeRouterLink(), {"tiny": model}, callers=callers))
    address = await edge.listen("127.0.0.1", 0, ListenerTls(world.config.tls).http_context())
    try:
        async with following(callers.verifier):
            found = [await get(f"https://{address}/v1/models", trusting(server, own)) for own in (known, other)]
    finally:
        await edge.stop()
    assert found == [200, 401]
    async with served_router(world) as (_, address):
        codes: list[grpc.StatusCode] = []
        for certificate, key in (known, other):
            credentials = grpc.ssl_channel_credentials(server.pem, key.read_bytes(), certificate.read_bytes())
            async with grpc.aio.secure_channel(address, credentials) as channel:
                codes.append(await failure_of(RouterServiceStub(channel).ListModels(pb.ListModelsRequest())))
    assert codes == [grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED]
