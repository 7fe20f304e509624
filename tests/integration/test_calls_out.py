"""Addresses that callers give are never called, but for webhooks, which have tests of their own: services call only
what the operator's settings and the fabric's sealed records name. So no tenant reaches a metadata service, a private
network or a link-local address through a fabric, whichever way the address is written, and whatever a name resolves to
the second time."""

from __future__ import annotations

import ast
import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from kvloom.errors import KvloomError
from kvloom_common.process.watched_files import following
from tests.conftest import REPOSITORY
from tests.fakes.edge_world import edge_world
from tests.fakes.fake_control import two_organisations
from tests.fakes.fake_issuer import FakeIssuer, fake_issuer
from tests.fakes.tenants import identities_of
from tests.waiting import eventually


@contextlib.asynccontextmanager
async def trap() -> AsyncIterator[tuple[str, list[str]]]:
    """A listener, and the peers that have connected to it."""
    connected: list[str] = []

    async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.append(repr(await reader.read(200)))
        writer.close()

    server = await asyncio.start_server(note, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", connected


def bodies(url: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Requests with a URL wherever an API of this kind has ever had one."""
    text = [{"role": "user", "content": "the fox"}]
    chat = "/v1/chat/completions"
    for part in (
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "video_url", "video_url": {"url": url}},
        {"type": "input_audio", "input_audio": {"url": url}},
        {"type": "file", "file": {"file_url": url}},
    ):
        yield chat, {"model": "tiny", "messages": [{"role": "user", "content": [part]}]}
    schema = {"$ref": f"{url}/schema.json"}
    yield chat, {"model": "tiny", "messages": text, "web_search_options": {"url": url}}
    yield chat, {"model": url, "messages": text}
    yield chat, {"model": "tiny", "messages": text, "lora": url, "chat_template": url, "metadata": {"callback": url}}
    guide = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    yield chat, {"model": "tiny", "messages": text, "response_format": guide}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    yield chat, {"model": "tiny", "messages": text, "tools": [tool]}
    yield "/v1/responses", {"model": "tiny", "input": text, "tools": [{"type": "mcp", "server_url": url}]}
    for part in ({"type": "input_image", "image_url": url}, {"type": "input_file", "file_url": url}):
        yield "/v1/responses", {"model": "tiny", "input": [{"role": "user", "content": [part]}]}
    yield "/v1/responses", {"model": "tiny", "input": "x", "background": True, "webhook_url": url}
    messages = {"model": "tiny", "max_tokens": 1}
    image = {"type": "image", "source": {"type": "url", "url": url}}
    yield "/v1/messages", {**messages, "messages": [{"role": "user", "content": [image]}]}
    yield "/v1/messages", {**messages, "messages": text, "mcp_servers": [{"type": "url", "url": url, "name": "a"}]}
    yield "/v1/embeddings", {"model": "tiny", "input": [{"type": "image_url", "image_url": url}]}
    yield "/v1/moderations", {"input": [{"type": "image_url", "image_url": {"url": url}}]}
    yield "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": url}
    yield "/tokenize", {"model": "tiny", "prompt": url, "chat_template": url}


async def test_no_field_of_any_request_makes_an_edge_call_its_address() -> None:
    """Images, files, tools' servers, schemas' references, callbacks: all of them are known ways into a network."""
    async with trap() as (address, connected), edge_world() as world:
        names = ("X-Forwarded-Host", "Forwarded", "Origin", "Referer", "X-Kvloom-Relayed", "X-Callback-Url")
        headers = dict.fromkeys(names, f"http://{address}/")
        for url in (f"http://{address}/a.png", f"http://[::ffff:{address.replace(':', ']:', 1)}/a.png"):
            for path, body in bodies(url):
                seen = len(world.link.requests)
                posting = asyncio.create_task(world.post(path, body, headers=headers))
                try:
                    # It is refused, or on its way to a router as it is.
                    await eventually(lambda: posting.done() or len(world.link.requests) > seen, path)  # noqa: B023
                    if posting.done():
                        status, answer = posting.result()
                        assert 400 <= status < 502, (path, body, answer)
                finally:
                    posting.cancel()
                    await asyncio.gather(posting, return_exceptions=True)
                assert not connected, (path, body)


async def test_a_tokens_header_names_no_keys(tmp_path: Path) -> None:
    """`jku`, `x5u` and `jwk` of a token are its bearer's own words: their keys would verify every forgery."""
    async with trap() as (address, connected), fake_issuer() as issuer:
        identities = identities_of(tmp_path, two_organisations(), issuers=[issuer.config()])
        async with following(identities):
            assert (await identities.later(issuer.token())).tenant == "acme/search"
            stranger = FakeIssuer().keys[0]
            for more in (
                {"jku": f"http://{address}/keys"},
                {"x5u": f"http://{address}/certificate"},
                {"jwk": stranger.as_dict(private=False)},
            ):
                for kid in (issuer.keys[0].kid, "another"):
                    with pytest.raises(KvloomError):
                        await identities.later(issuer.token(key=stranger, header={"kid": kid, **more}))
        assert not connected


CALLS: Final = {
    "build_opener", "urlopen", "HTTPConnection", "HTTPSConnection", "ClientSession", "open_connection",
    "create_connection", "open_unix_connection", "create_unix_connection", "insecure_channel", "secure_channel",
    "from_url", "urlretrieve", "getaddrinfo", "gethostbyname", "sock_connect", "connect_ex",
}  # fmt: skip
CALLERS: Final = {
    "control/usage/webhook.py": "control.webhook_urls; redirects are not followed",
    "edge_http/fetching.py": "origins of edge.fetch_origins, by https at public addresses only; no redirects",
    "edge_http/recovery/peer_proxy.py": "edges, by sealed records; redirects are not followed",
    "edge_http/supervisor.py": "the supervisor's socket in the data directory",
    "kvloom/client/credentials.py": "the SDK: what its user names",
    "kvloom/transport/channel_options.py": "routers, by what the link or the SDK's user names",
    "kvloom/transport/local_client.py": "a socket of this user on this machine",
    "kvloom_common/access/key_sets.py": "jwks_url of an issuer; redirects are not followed",
    "kvloom_common/discovery/named_shards.py": "names of router.shards, which it looks up",
    "kvloom_common/discovery/redis_client.py": "redis.url",
    "kvloom_common/metrics/server.py": "metrics.host, which it looks up to listen there",
    "kvloom_common/trust/fabric_trust.py": "processes, by sealed records or the configuration",
    "kvloom_common/trust/tls_trust.py": "likewise",
    "orchestrator/files/contents.py": "orchestrator.files_url",
    "orchestrator/jobs/edges.py": "edges, by sealed records",
    "orchestrator/webhooks/caller.py": "a tenant's endpoint, at public addresses only; redirects are not followed",
    "safety_svc/guardrails.py": "the url of a guardrail in the operator's policy; redirects are not followed",
}
"""Modules of services that call an address, and whose address it is."""


def called_names(source: str) -> set[str]:
    if not any(name in source for name in CALLS):  # parsing takes milliseconds
        return set()
    calls = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return {call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "") for call in calls} & CALLS


def test_services_call_only_what_operators_name() -> None:
    """A new way out must be judged: tenants and their administrators may give no address that is called, but for
    webhooks (tests/integration/test_webhooks.py) and for files of origins that the operator allows
    (tests/integration/test_fetched_urls.py)."""
    packages = (
        "control",
        "edge_http",
        "kvloom",
        "kvloom_common",
        "orchestrator",
        "router",
        "safety_svc",
        "shard_server",
    )
    files = [file for name in packages for file in (REPOSITORY / name).rglob("*.py")]
    assert len(files) > 300
    found = {str(file.relative_to(REPOSITORY)) for file in files if called_names(file.read_text("utf-8"))}
    assert found == set(CALLERS)


@pytest.mark.parametrize("source", ["urllib.request.urlopen(url)", "aiohttp.ClientSession()", "urlopen(url)"])
def test_the_guard_sees_a_call(source: str) -> None:
    assert called_names(source)
