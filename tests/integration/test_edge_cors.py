"""Web pages of other origins: only those that the configuration lists may use the API from a browser."""

from __future__ import annotations

import aiohttp
import msgspec
import pytest

from edge_http.server.http_router import HANDLERS
from kvloom_common.access.api_keys import ApiKeys
from kvloom_common.callers import Callers
from kvloom_common.config import EdgeConfig
from tests.fakes.edge_world import EdgeWorld, chat_body, edge_world
from tests.fakes.fake_router_link import FakeRouterLink, answer

PAGE = "https://chat.example.com"
ALLOW_ORIGIN = "Access-Control-Allow-Origin"
ASKED = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}


def scripted(*texts: str) -> FakeRouterLink:
    link = FakeRouterLink()
    link.script = answer(*texts)
    return link


async def preflight(world: EdgeWorld, path: str, **headers: str) -> aiohttp.ClientResponse:
    more = {name.replace("_", "-"): value for name, value in headers.items()}
    async with world.http.options(world.url + path, headers={**ASKED, **more}) as response:
        await response.read()
        return response


async def test_off_by_default() -> None:
    """An edge that was not configured for it tells no page that it may read its answers."""
    async with edge_world(link=scripted("x")) as world:
        asked = await preflight(world, "/v1/chat/completions")
        assert (asked.status, asked.headers["Allow"]) == (405, "POST, GET")
        async with world.http.post(
            f"{world.url}/v1/chat/completions", json=chat_body(), headers={"Origin": PAGE}
        ) as response:
            assert response.status == 200
        for headers in (asked.headers, response.headers):
            assert not [name for name in headers if name.lower().startswith("access-control-") or name == "Vary"]


async def test_preflights_of_every_route_need_no_key() -> None:
    """Browsers ask before they send a page's key; without an answer, no page could use any route."""
    keys = Callers(api_keys=ApiKeys([]))
    async with edge_world(EdgeConfig(cors_origins=[PAGE]), callers=keys) as world:
        for route, methods in HANDLERS.items():
            response = await preflight(world, route.replace("{id}", "x"))
            assert (response.status, response.headers[ALLOW_ORIGIN]) == (204, PAGE), route
            assert response.headers["Access-Control-Allow-Methods"].split(", ") == list(methods)
            assert response.headers["Access-Control-Allow-Credentials"] == "true"
            assert "x-request-id" in response.headers
        async with world.http.post(
            f"{world.url}/v1/chat/completions", json=chat_body(), headers={"Origin": PAGE}
        ) as refused:  # the page can read why
            assert (refused.status, refused.headers[ALLOW_ORIGIN]) == (401, PAGE)


async def test_headers_of_official_clients_are_allowed() -> None:
    """The clients of OpenAI and Anthropic work in a page, and so do kvloom's own headers; others are not allowed."""
    async with edge_world(EdgeConfig(cors_origins=[PAGE])) as world:
        asked = "x-stainless-lang, X-Stainless-Retry-Count, x-evil, x-stainless-\u00e9"
        response = await preflight(world, "/v1/chat/completions", Access_Control_Request_Headers=asked)
        allowed = response.headers["Access-Control-Allow-Headers"].split(", ")
        needed = ["authorization", "x-api-key", "anthropic-version", "last-event-id", "idempotency-key", "x-session-id"]
        assert set(needed) | {"x-kvloom-resume", "x-stainless-lang", "x-stainless-retry-count"} <= set(allowed)
        assert not any("evil" in name or not name.isascii() for name in allowed)


async def test_any_header_is_allowed_where_any_origin_is() -> None:
    """Pages send headers of their tracing and of routers that they also use: http-referer, baggage, their own."""
    async with edge_world(EdgeConfig(cors_origins=["*"])) as world:
        asked = "http-referer,x-title, Baggage,sentry-trace,x-my-own-header,bad header,x-\u00e9"
        response = await preflight(world, "/v1/chat/completions", Access_Control_Request_Headers=asked)
        allowed = response.headers["Access-Control-Allow-Headers"].split(", ")
        assert {"http-referer", "x-title", "baggage", "sentry-trace", "x-my-own-header"} <= set(allowed)
        assert not any(" " in name or not name.isascii() for name in allowed)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("origins", [[PAGE], ["*"]])
async def test_pages_read_answers_and_their_headers(stream: bool, origins: list[str]) -> None:
    """A page sees the text, the request's id and the advice on retries, of streams as well; "*" never goes with
    credentials, because any page could then use those of its visitors."""
    async with edge_world(EdgeConfig(cors_origins=origins), scripted("x")) as world:
        body, headers = chat_body(stream=stream), {"Origin": PAGE, "x-kvloom-resume": "on"}
        async with world.http.post(f"{world.url}/v1/chat/completions", json=body, headers=headers) as response:
            assert response.status == 200
            assert b"x" in await response.read()
        assert response.headers[ALLOW_ORIGIN] == ("*" if origins == ["*"] else PAGE)
        assert ("Access-Control-Allow-Credentials" in response.headers) == (origins == [PAGE])
        exposed = response.headers["Access-Control-Expose-Headers"].split(", ")
        assert {"x-request-id", "Retry-After", "openai-processing-ms", "x-kvloom-response-id"} <= set(exposed)


async def test_other_origins_get_nothing() -> None:
    """A page that is not listed is told nothing, and caches keep the answers of different origins apart."""
    async with edge_world(EdgeConfig(cors_origins=[PAGE]), scripted("x")) as world:
        for origin in ("https://evil.example", f"{PAGE}.evil.example", "null", f"{PAGE}:8443"):
            response = await preflight(world, "/v1/models", Origin=origin)
            assert (response.status, response.headers["Vary"]) == (204, "Origin")
            assert not [name for name in response.headers if name.lower().startswith("access-control-")]
        async with world.http.get(f"{world.url}/v1/models") as plain:
            assert (plain.headers["Vary"], ALLOW_ORIGIN in plain.headers) == ("Origin", False)


@pytest.mark.parametrize(
    "wrong", ["example.com", "https://a.example/", "https://A.example", "null", "https://*.a.com/x"]
)
def test_malformed_origins_are_configuration_errors(wrong: str) -> None:
    """An origin that no browser sends would silently allow nothing."""
    with pytest.raises(msgspec.ValidationError, match="is not an origin"):
        msgspec.convert({"cors_origins": [wrong]}, EdgeConfig)
    with pytest.raises(msgspec.ValidationError, match=r"both \* and"):
        msgspec.convert({"cors_origins": ["*", PAGE]}, EdgeConfig)
