"""An OIDC provider: keys that can be rotated, published over real HTTP, and tokens signed with them."""

from __future__ import annotations

import base64
import contextlib
import hmac
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web
from joserfc import jwt
from joserfc.jwk import ECKey, RSAKey

from kvloom_common.access.key_sets import IssuerSettings

ISSUER = "https://login.example.com"
AUDIENCE = "kvloom"


class FakeIssuer:
    def __init__(self) -> None:
        self.keys: list[Any] = []
        self.url = ""
        self.num_fetches = 0
        self.body: bytes | None = None
        """What is published instead of the keys."""
        self.rotate("RS256")

    def rotate(self, algorithm: str = "RS256", *, keeps_old: bool = False) -> None:
        """From now on tokens are signed with another key, which is published."""
        parameters = {"kid": f"key-{len(self.keys)}-{time.monotonic_ns()}", "use": "sig", "alg": algorithm}
        made = (
            RSAKey.generate_key(2048, parameters, private=True)
            if algorithm.startswith(("RS", "PS"))
            else ECKey.generate_key("P-256", parameters, private=True)
        )
        self.keys = [*(self.keys if keeps_old else []), made]

    def token(self, *, header: dict[str, Any] | None = None, key: Any = None, **claims: Any) -> str:
        """Claims that are None are left out."""
        key = key or self.keys[-1]
        now = int(time.time())
        everything = {
            "iss": ISSUER,
            "aud": AUDIENCE,
            "sub": "ada",
            "exp": now + 300,
            "iat": now,
            "tenant": "acme/search",
            **claims,
        }
        content = {name: value for name, value in everything.items() if value is not None}
        used = {"alg": key.get("alg") or "HS256", "kid": self.keys[-1].kid, **(header or {})}
        return jwt.encode(used, content, key, algorithms=[used["alg"]])

    def forged_with_public_key(self) -> str:
        """An HMAC whose key is what everybody knows: the text of the public key."""
        _, claims, _ = self.token().split(".")
        head = _encoded(json.dumps({"alg": "HS256", "kid": self.keys[-1].kid}).encode())
        signature = hmac.digest(self.keys[-1].as_pem(private=False), f"{head}.{claims}".encode(), "sha256")
        return f"{head}.{claims}.{_encoded(signature)}"

    def config(self, **fields: Any) -> IssuerSettings:
        settings = {"name": "login", "issuer": ISSUER, "audiences": [AUDIENCE], "jwks_url": self.url}
        return IssuerSettings(**{**settings, "min_refetch_seconds": 0.1, **fields})

    async def publish(self, _request: web.Request) -> web.Response:
        self.num_fetches += 1
        if self.body is not None:
            return web.Response(body=self.body)
        return web.json_response({"keys": [key.as_dict(private=False) for key in self.keys]})


@contextlib.asynccontextmanager
async def fake_issuer() -> AsyncIterator[FakeIssuer]:
    issuer = FakeIssuer()
    app = web.Application()
    app.router.add_get("/keys", issuer.publish)
    app.router.add_get("/elsewhere", _redirected)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    issuer.url = f"http://127.0.0.1:{runner.addresses[0][1]}/keys"
    try:
        yield issuer
    finally:
        await runner.cleanup()


def _encoded(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode().rstrip("=")


async def _redirected(_request: web.Request) -> web.Response:
    raise web.HTTPFound("/keys")
