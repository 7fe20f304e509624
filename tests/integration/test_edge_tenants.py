"""The HTTP API of a fabric with tenants: who may use which model, whose an answer is, and what official clients see."""

from __future__ import annotations

import base64
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from edge_http.wire.headers import RELAYED, RELAYED_CERTIFICATE
from kvloom.v1.router_service_pb2 import FleetState, ModelInfo
from kvloom_common.access.listener_tls import ListenerTls
from kvloom_common.callers import Callers
from kvloom_common.config import CertificateConfig, RouteConfig, TlsConfig
from kvloom_common.models.model_routes import ModelRoutes
from kvloom_common.process.watched_files import following
from kvloom_common.tenancy.scopes import ClassRights
from kvloom_common.tenancy.table import Tenant
from kvloom_common.trust.secret import FabricSecret
from kvloom_common.trust.shared_secret import SharedSecret
from tests.fakes.certificates import Authority
from tests.fakes.edge_world import EdgeWorld, chat_body, edge_world
from tests.fakes.fake_control import (
    ACME,
    MAPS_KEY,
    OTHER,
    OTHER_APP,
    OTHER_KEY,
    SEARCH_KEY,
    SEARCH_KEY_2,
    key_of,
    two_organisations,
)
from tests.fakes.fake_issuer import fake_issuer
from tests.fakes.fake_router_link import FakeRouterLink, answer
from tests.fakes.served_models import tiny_model
from tests.fakes.tenants import callers_of, change, identities_of
from tests.lazy_imports import imported_when_used

pytestmark = pytest.mark.xdist_group("anthropic")  # which takes seconds to import
anthropic: Any = imported_when_used("anthropic")

CHAT = "/v1/chat/completions"
ROUTES = ModelRoutes([RouteConfig(name="split", targets=["tiny", "secret"])])
NARROW_KEY, USAGE_KEY, ADMIN_KEY, OPERATOR_KEY = "kvl-narrow", "kvl-usage", "kvl-admin", "kvl-operator"
BATCH_KEY, DEFAULT_KEY = "kvl-batch", "kvl-default"
TABLE = [
    *(ACME, OTHER, OTHER_APP),
    Tenant("acme/search", models=("tiny", "split")),
    Tenant("acme/maps", models=("sec*",)),
    key_of(SEARCH_KEY, "acme/search"),
    key_of(SEARCH_KEY_2, "acme/search"),
    key_of(NARROW_KEY, "acme/search", models=("split",)),
    key_of(USAGE_KEY, "acme/search", scopes=("usage",)),
    key_of(ADMIN_KEY, "acme/search", scopes=("admin",)),
    key_of(OPERATOR_KEY, "other/app", scopes=("admin",)),
    key_of(BATCH_KEY, "acme/search", classes=ClassRights(("batch",))),
    key_of(DEFAULT_KEY, "acme/search", classes=ClassRights(default="batch")),
    key_of(MAPS_KEY, "acme/maps"),
    key_of(OTHER_KEY, "other/app"),
]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[EdgeWorld]:
    link = FakeRouterLink()
    capabilities = ["embed", "generate", "rerank", "score"]
    names = ("tiny", "secret")
    link.tell(
        FleetState(
            models=[
                ModelInfo(name=name, num_ready_shards=1, max_model_len=4096, capabilities=capabilities)
                for name in names
            ]
        )
    )
    link.script = answer("Hi")
    async with edge_world(
        link=link,
        callers=callers_of(tmp_path, TABLE, operator_organisation="other"),
        routes=ROUTES,
        more_models=[tiny_model("secret")],
    ) as started:
        yield started


MESSAGE = {"messages": [{"role": "user", "content": "the fox"}]}
APIS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, MESSAGE),
    ("/v1/completions", {"prompt": "the fox"}),
    ("/v1/responses", {"input": "the fox"}),
    ("/v1/messages", {**MESSAGE, "max_tokens": 4}),
    ("/v1/messages/count_tokens", MESSAGE),
    ("/v1/embeddings", {"input": "the fox"}),
    ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ("/v1/score", {"text_1": "a", "text_2": "b"}),
    ("/tokenize", {"prompt": "the fox"}),
    ("/detokenize", {"tokens": [1]}),
]


@pytest.mark.parametrize(("path", "body"), APIS, ids=[path for path, _ in APIS])
async def test_every_api_refuses_models_that_the_key_may_not_use(
    world: EdgeWorld, path: str, body: dict[str, Any]
) -> None:
    """One API that forgets to ask makes the others' answers worthless. What does not exist is refused alike, so that
    names cannot be tried."""
    headers = {**bearer(SEARCH_KEY), "anthropic-version": "2023-06-01"}
    for model in ("secret", "nothing"):
        status, refused = await world.post(path, {"model": model, **body}, headers=headers)
        assert status == 403, refused
        assert repr(model) in refused["error"]["message"]
    assert not world.link.requests
    status, refused = await world.post(path, {"model": "secret", **body}, headers={**headers, **bearer(USAGE_KEY)})
    assert (status, "inference" in refused["error"]["message"]) == (403, True)


GENERATING = APIS[:4] + APIS[5:8]


@pytest.mark.parametrize(("path", "body"), GENERATING, ids=[path for path, _ in GENERATING])
async def test_every_api_refuses_classes_that_the_key_may_not_use(
    world: EdgeWorld, path: str, body: dict[str, Any]
) -> None:
    """The classes of others are what they have paid for. A refusal names the header and reaches no router."""
    for headers in ({"x-kvloom-priority-class": "interactive"}, {"x-llm-d-inference-objective": "interactive"}, {}):
        given = {**bearer(BATCH_KEY), "anthropic-version": "2023-06-01", **headers}
        async with world.http.post(world.url + path, json={"model": "tiny", **body}, headers=given) as response:
            refused = await response.json()
        assert (response.status, response.headers["x-kvloom-reason"]) == (403, "rejected-permission-denied"), refused
        assert next(iter(headers), "x-kvloom-priority-class") in refused["error"]["message"]
    assert not world.link.requests


async def test_a_key_has_its_default_class(world: EdgeWorld) -> None:
    """Programs that know nothing of classes are served as their operator wants."""
    async with world.http.post(world.url + CHAT, json=chat_body(), headers=bearer(DEFAULT_KEY)) as response:
        assert (response.status, response.headers["x-kvloom-priority-class"]) == (200, "batch")
    assert world.link.requests[0].request.wanted.priority_class == "batch"


async def test_routes_fallbacks_and_auto_lead_only_to_models_that_are_allowed(world: EdgeWorld) -> None:
    """A route is allowed by its own name, and then leads where its administrator wants; a list of fallbacks must not be
    a way around."""
    for model, more, status in (
        ("split", {}, 200),
        ("tiny", {"models": ["split"]}, 200),
        ("tiny", {"models": ["secret"]}, 403),
        ("secret", {"models": ["tiny"]}, 403),
        ("auto", {}, 200),
        ("auto", {"models": ["secret"]}, 403),
    ):
        found, body = await world.post(CHAT, chat_body(model=model, **more), headers=bearer(SEARCH_KEY))
        assert (model, more, found) == (model, more, status), body
    for _ in range(4):
        await world.post(CHAT, chat_body(model="auto"), headers=bearer(MAPS_KEY))
        assert world.link.requests[-1].request.wanted.model == "secret"
    assert (await world.post(CHAT, chat_body(model="tiny"), headers=bearer(NARROW_KEY)))[0] == 403
    assert (await world.post(CHAT, chat_body(model="split"), headers=bearer(NARROW_KEY)))[0] == 200
    assert (await world.post(CHAT, chat_body(model="auto"), headers=bearer(NARROW_KEY)))[0] == 403


async def test_requests_say_whose_they_are(world: EdgeWorld) -> None:
    """Limits and bills depend on it."""
    for key in (SEARCH_KEY, SEARCH_KEY_2):
        assert (await world.post(CHAT, chat_body(), headers=bearer(key)))[0] == 200
        request = world.link.requests[-1].request
        assert (request.submit.tenant, request.submit.key_id) == ("acme/search", f"id-{key}")
    await world.post("/v1/embeddings", {"model": "tiny", "input": "a"}, headers=bearer(SEARCH_KEY))
    assert world.link.requests[-1].request.submit.key_id == f"id-{SEARCH_KEY}"


async def test_what_concerns_the_whole_fabric_is_for_its_operator(world: EdgeWorld) -> None:
    """Metrics tell about all tenants, and an administrator of one organisation administers nothing else."""
    for path in ("/metrics", "/metrics/targets"):
        for key, status in ((SEARCH_KEY, 403), (ADMIN_KEY, 403), (OPERATOR_KEY, 200)):
            async with world.http.get(world.url + path, headers=bearer(key)) as response:
                assert response.status == status
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        assert (await world.post(path, {}, headers=bearer(SEARCH_KEY)))[0] == 403
        assert (await world.post(path, {}, headers=bearer(ADMIN_KEY)))[0] == 403
        assert (await world.post(path, {}, headers=bearer(OPERATOR_KEY)))[0] == 404  # it is not enabled here
    assert (await world.post(CHAT, chat_body(), headers=bearer(ADMIN_KEY)))[0] == 403
    async with world.http.get(world.url + "/health") as response:
        assert response.status == 200


async def test_a_revoked_key_is_refused_at_once(world: EdgeWorld) -> None:
    """A key that has leaked is used within seconds."""
    identities = world.edge.callers._callers.identities
    assert identities is not None
    assert (await world.post(CHAT, chat_body(), headers=bearer(SEARCH_KEY)))[0] == 200
    change(identities, removed_keys=[f"id-{SEARCH_KEY}"])
    status, body = await world.post(CHAT, chat_body(), headers=bearer(SEARCH_KEY))
    assert (status, body["error"]["code"]) == (401, "invalid_api_key")
    identities.tenants.set_connected(False)
    identities.tenants._max_stale_seconds = -1.0
    status, body = await world.post(CHAT, chat_body(), headers=bearer(SEARCH_KEY_2))
    assert (status, body["error"]["code"]) == (503, "auth_unavailable")


async def test_the_official_openai_client_sees_what_it_expects(world: EdgeWorld) -> None:
    """Programs tell a wrong key from a forbidden model by the exception."""

    def client(key: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key=key, max_retries=0)

    async with client(SEARCH_KEY) as allowed, client("wrong") as wrong, client(MAPS_KEY) as other:
        with pytest.raises(openai.AuthenticationError):
            await wrong.models.list()
        with pytest.raises(openai.PermissionDeniedError) as caught:
            await allowed.chat.completions.create(model="secret", messages=[{"role": "user", "content": "a"}])
        assert (caught.value.status_code, caught.value.param) == (403, "model")
        assert caught.value.code == "permission_denied"
        done = await allowed.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}])
        assert done.choices[0].message.content == "Hi"
        assert [model.id async for model in allowed.models.list()] == ["tiny", "split"]
        assert [model.id async for model in other.models.list()] == ["secret"]
        with pytest.raises(openai.PermissionDeniedError):
            await allowed.models.retrieve("secret")


async def test_the_official_anthropic_client_sees_what_it_expects(world: EdgeWorld) -> None:
    """As OpenAI's, in Anthropic's shape."""

    def client(key: str) -> Any:
        return anthropic.AsyncAnthropic(base_url=world.url, api_key=key, max_retries=0)

    async def ask(asked: Any, model: str) -> Any:
        return await asked.messages.create(model=model, max_tokens=4, messages=[{"role": "user", "content": "a"}])

    async with client(SEARCH_KEY) as allowed, client("wrong") as wrong:
        with pytest.raises(anthropic.AuthenticationError) as unknown:
            await ask(wrong, "tiny")
        assert unknown.value.body["error"]["type"] == "authentication_error"
        with pytest.raises(anthropic.PermissionDeniedError) as caught:
            await ask(allowed, "secret")
        assert caught.value.body["error"]["type"] == "permission_error"
        assert (await ask(allowed, "tiny")).content[0].text == "Hi"
        assert [model.id async for model in allowed.models.list()] == ["tiny"]


async def begin(world: EdgeWorld, key: str, **headers: str) -> str:
    """The id of a streamed answer, which has ended."""
    headers = {**bearer(key), "x-kvloom-resume": "on", **headers}
    async with world.http.post(world.url + CHAT, json=chat_body(stream=True), headers=headers) as response:
        assert response.status == 200, await response.text()
        await response.read()
        return response.headers["x-kvloom-response-id"]


async def test_answers_and_idempotency_keys_belong_to_the_tenant(tmp_path: Path) -> None:
    """Another tenant that has learned an id gets the answer of an id that never was; a new key of the same tenant gets
    the answer, since keys are replaced."""
    async with edge_world(callers=callers_of(tmp_path, two_organisations())) as world:
        world.link.script = answer("Hi")
        response_id = await begin(world, SEARCH_KEY, **{"Idempotency-Key": "k"})
        url = f"{world.url}{CHAT}/{response_id}"
        for key, status in ((OTHER_KEY, 404), (MAPS_KEY, 404), (SEARCH_KEY_2, 200), (SEARCH_KEY, 200)):
            async with world.http.get(url, params={"stream": "true"}, headers=bearer(key)) as response:
                assert response.status == status, key
                await response.read()
            assert await begin(world, key, **{"Idempotency-Key": "k"}) == response_id or status == 404
        assert await begin(world, OTHER_KEY, **{"Idempotency-Key": "k"}) != response_id
        for key, status in ((OTHER_KEY, 404), (SEARCH_KEY_2, 200)):
            async with world.http.post(url + "/cancel", headers=bearer(key)) as response:
                assert response.status == status, key


async def test_a_kept_answer_belongs_to_the_tenant(tmp_path: Path) -> None:
    """Answers in one piece are kept for their idempotency keys as well."""
    async with edge_world(callers=callers_of(tmp_path, two_organisations())) as world:
        world.link.script = answer("Hi")
        ids: dict[str, str] = {}
        for key in (SEARCH_KEY, SEARCH_KEY_2, OTHER_KEY):
            _, body = await world.post(CHAT, chat_body(), headers={**bearer(key), "Idempotency-Key": "k"})
            ids[key] = body["id"]
        assert ids[SEARCH_KEY] == ids[SEARCH_KEY_2] != ids[OTHER_KEY]
        assert len(world.link.requests) == 2


async def test_a_token_is_as_good_as_a_key(tmp_path: Path) -> None:
    """People have tokens, and programs have keys."""
    async with fake_issuer() as issuer:
        identities = identities_of(tmp_path, two_organisations(), issuers=[issuer.config()])
        callers = callers_of(tmp_path, [])
        callers.identities = identities
        async with following(identities), edge_world(callers=callers) as world:
            world.link.script = answer("Hi")
            for _ in range(2):
                status, body = await world.post(CHAT, chat_body(), headers=bearer(issuer.token()))
                assert status == 200, body
                request = world.link.requests[-1].request
                assert (request.submit.tenant, request.submit.key_id) == ("acme/search", "oidc:login:ada@acme/search")
            status, _ = await world.post(CHAT, chat_body(), headers=bearer(issuer.token(aud="other")))
            assert status == 401


async def test_a_certificate_is_as_good_as_a_key(tmp_path: Path) -> None:
    """Over TLS that asks for a client's certificate; the one of a stranger opens nothing, although TLS accepts it."""
    authority = Authority("mesh")
    (tmp_path / "ca.pem").write_bytes(authority.pem)
    certificate, key = authority.issue_to(tmp_path, "server")
    tls = ListenerTls(
        TlsConfig(certificate_file=str(certificate), key_file=str(key), client_ca_file=str(tmp_path / "ca.pem"))
    )
    mapped = [CertificateConfig(tenant="acme/search", uri="spiffe://mesh/search")]
    callers = callers_of(tmp_path, two_organisations(), certificates=mapped)
    async with edge_world(callers=callers) as world:
        world.link.script = answer("Hi")
        address = await world.server.listen("127.0.0.1", 0, tls.http_context())
        for name, uri, status in (("search", "spiffe://mesh/search", 200), ("stranger", "spiffe://mesh/x", 401)):
            context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
            context.load_cert_chain(*authority.issue_to(tmp_path, name, uri))
            async with (
                aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as http,
                http.post(f"https://{address}{CHAT}", json=chat_body()) as response,
            ):
                assert response.status == status
        assert world.link.requests[-1].request.submit.tenant == "acme/search"


async def test_a_relayed_certificate_is_believed_only_if_the_fabric_has_sealed_it(tmp_path: Path) -> None:
    """An edge asks another one for an answer on behalf of a client that has shown its certificate to the first only. No
    client may do the same with a certificate that it has merely seen."""
    trust = SharedSecret(FabricSecret.draw(), ("edge",), "edge-0")
    certificate, _ = Authority("mesh").issue("search")
    der = ssl.PEM_cert_to_DER_cert(certificate.decode())
    mapped = [CertificateConfig(tenant="acme/search", common_name="search")]
    callers = Callers(identities=identities_of(tmp_path, two_organisations(), trust, certificates=mapped))
    stranger = SharedSecret(FabricSecret.draw(), ("edge",), "edge-0")
    async with edge_world(callers=callers) as world:
        for sealed, status in (
            (trust.sealer.encrypt(RELAYED_CERTIFICATE, der), 200),
            (stranger.sealer.encrypt(RELAYED_CERTIFICATE, der), 401),
            (trust.sealer.encrypt("something else", der), 401),
            (der, 401),
        ):
            headers = {RELAYED: "tag", RELAYED_CERTIFICATE: base64.b64encode(sealed).decode()}
            async with world.http.get(f"{world.url}/v1/models", headers=headers) as response:
                assert response.status == status
