"""Who sends an HTTP request."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

from aiohttp import web

from kvloom.callers import Callers, bare_credential
from kvloom.limits.client_address import client_address, networks_of

API_KEY: Final = "x-api-key"
_CALLER_KEY: Final = web.RequestKey("caller", str)


class RequestCallers:
    """Names the callers of requests. The names isolate callers from one another in the whole fabric."""

    def __init__(self, callers: Callers, trusted_proxies: Sequence[str]) -> None:
        """`trusted_proxies` are networks, as in the configuration."""
        self._callers = callers
        self._trusted_proxies = networks_of(trusted_proxies)

    def caller_of(self, request: web.BaseRequest) -> str:
        """Return the caller's name (kvloom/callers.py)."""
        known = request.get(_CALLER_KEY)
        if known is not None:
            return known
        given = credential_of(request)
        name = self._callers.name(given, "" if given else self.address_of(request))
        request[_CALLER_KEY] = name
        return name

    @property
    def needs_key(self) -> bool:
        """Whether requests without an API key are refused."""
        return self._callers.api_keys is not None

    def check(self, request: web.BaseRequest) -> None:
        """Raises KvloomError (UNAUTHENTICATED) if the request needs an API key and has none that is valid."""
        if self._callers.api_keys is not None:
            self._callers.check(credential_of(request))

    def address_of(self, request: web.BaseRequest) -> str:
        """Return the client's IP address; "" if it has none, as over a Unix socket."""
        peer = request.remote or ""
        if not self._trusted_proxies:
            return peer
        return client_address(peer, request.headers.getall("X-Forwarded-For", ()), self._trusted_proxies)


def credential_of(request: web.BaseRequest) -> str:
    """Return what the Authorization header, or else x-api-key, has; "" if the request has neither."""
    headers = request.headers
    return bare_credential(headers.get("Authorization", ""), headers.get(API_KEY, ""))


def credential_digest(request: web.BaseRequest) -> bytes:
    """Return a digest of the credential, which binds a response to the holder of the credential that began it.

    All requests without one have the same digest: the id of a response, which cannot be guessed, is then all that is
    needed to find it, so that a client may change its address. The credentials themselves are not kept.
    """
    given = credential_of(request).encode("utf-8", "surrogateescape")
    return hashlib.blake2b(given, digest_size=16).digest()
