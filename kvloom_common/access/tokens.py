"""Tokens (JWTs) of OIDC providers, which are accepted like API keys."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.access.key_sets import IssuerSettings, KeySet
from kvloom_common.access.tenants import Tenants, expired_error
from kvloom_common.config import IssuerConfig, with_constants
from kvloom_common.tenancy.principal import Principal
from kvloom_common.tenancy.scopes import ROLES, SCOPES_OF_ROLE, Role

MAX_TOKEN_CHARS: Final = 8 * 2**10
MAX_KEPT: Final = 10_000
"""Verified tokens. The oldest are dropped first."""
_TOKEN: Final = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+")
_SUBJECT: Final = re.compile(r"[\x21-\x7e]{1,128}")


def is_token(credential: str) -> bool:
    """True for the form of a signed token. No API key has it."""
    return "." in credential and _TOKEN.fullmatch(credential) is not None


class Identity(msgspec.Struct, frozen=True):
    """The claims of a verified token."""

    name: str
    """`oidc:NAME:SUBJECT`"""
    tenant: str
    scopes: tuple[str, ...]
    expires_at: float
    user: str

    def principal(self, tenants: Tenants) -> Principal:
        """Raises KvloomError."""
        return tenants.of_identity(self.name, self.tenant, self.scopes, self.expires_at, self.user)


class TokenVerifier:
    """Verifies the tokens of the configured issuers. Each token is verified once while its issuer's keys stay the
    same; of later requests with it only the expiry is checked."""

    def __init__(self, issuers: Sequence[IssuerConfig], now: Callable[[], float] = time.time) -> None:
        """Raises ConfigError. `now`: seconds since 1970."""
        self._now = now
        configs = [with_constants(config, IssuerSettings) for config in issuers]
        self._issuers = {config.issuer: (config, KeySet(config)) for config in configs}
        self._kept: OrderedDict[bytes, Identity] = OrderedDict()
        for _, keys in self._issuers.values():
            keys.on_change(self._kept.clear)

    def known(self, token: str) -> Identity | None:
        """Returns what a token says that was verified before; None if it was not. Raises KvloomError if it has
        expired."""
        identity = self._kept.get(_digest(token))
        if identity is not None and identity.expires_at <= self._now():
            raise expired_error()
        return identity

    async def verify(self, token: str) -> Identity:
        """Raises KvloomError (UNAUTHENTICATED)."""
        if len(token) > MAX_TOKEN_CHARS:
            raise refused("it is too long")
        header, claims = _unverified(token)
        config, keys = self._issuers.get(str(claims.get("iss")), (None, None))
        if config is None or keys is None:
            raise refused("its issuer is not known here")
        algorithm = header.get("alg")
        if algorithm not in config.algorithms:
            raise refused("its algorithm is not accepted here")
        if "crit" in header:
            raise refused("its header has extensions")
        key_id = header.get("kid", "")
        key = await keys.find(key_id) if isinstance(key_id, str) else None
        if key is None:
            raise refused("its key is not known here")
        _check_signature(token, key, str(algorithm))
        identity = self._identity(config, claims)
        self._kept[_digest(token)] = identity
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return identity

    def _identity(self, config: IssuerSettings, claims: Mapping[str, Any]) -> Identity:
        now, leeway = self._now(), config.leeway_seconds
        audiences = claims.get("aud")
        audiences = [audiences] if isinstance(audiences, str) else audiences
        if not isinstance(audiences, list) or not any(audience in config.audiences for audience in audiences):
            raise refused("it is for another audience")
        expires_at = _time(claims, "exp")
        if expires_at is None:
            raise refused("it does not say when it expires")
        if expires_at + leeway <= now:
            raise expired_error()
        for name in ("nbf", "iat"):
            if (_time(claims, name) or 0.0) - leeway > now:
                raise refused("it is not valid yet")
        subject = claims.get("sub")
        if not isinstance(subject, str) or not _SUBJECT.fullmatch(subject):
            raise refused("it has no usable subject")
        tenant = _tenant(config, _texts(claims.get(config.tenant_claim)))
        if tenant is None:
            raise refused(f"its claim {config.tenant_claim!r} names no tenant")
        role = _role(config, _texts(claims.get(config.role_claim)))
        if role is None:
            raise refused(f"its claim {config.role_claim!r} names no role")
        scopes = tuple(sorted(SCOPES_OF_ROLE[role]))
        return Identity(f"oidc:{config.name}:{subject}", tenant, scopes, expires_at + leeway, subject)

    async def watch(self) -> None:
        """Read the issuers' keys until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for config, keys in self._issuers.values():
                tasks.create_task(keys.watch(), name=f"keys of {config.name}")


def refused(why: str) -> KvloomError:
    return KvloomError(ErrorReason.ERROR_REASON_UNAUTHENTICATED, f"The token is not accepted: {why}.")


def _check_signature(token: str, key: Any, algorithm: str) -> None:
    """Raises KvloomError."""
    from joserfc import jws  # only where tokens are accepted

    if (key.get("alg") or algorithm) != algorithm:
        raise refused("its key is one for another algorithm")
    try:
        # The library checks that the key is of the algorithm's type, and of its curve.
        jws.deserialize_compact(token, key, algorithms=[algorithm])
    except Exception as error:  # whatever is wrong with it, it proves nothing
        raise refused("its signature is wrong") from error


def _unverified(token: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Header and claims. Raises KvloomError."""
    parts = token.split(".")
    try:
        header, claims = (
            msgspec.json.decode(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))) for part in parts[:2]
        )
    except (ValueError, RecursionError) as error:
        raise refused("it is malformed") from error
    if not isinstance(header, dict) or not isinstance(claims, dict):
        raise refused("it is malformed")
    return header, claims


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _time(claims: Mapping[str, Any], name: str) -> float | None:
    """Raises KvloomError."""
    value = claims.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**53:
        raise refused(f"its claim {name!r} is no time")
    return float(value)


def _texts(claim: Any) -> Sequence[str]:
    found = claim if isinstance(claim, list) else [claim]
    return [text for text in found if isinstance(text, str)]


def _tenant(config: IssuerConfig, values: Sequence[str]) -> str | None:
    if config.tenants:
        return next((tenant for value, tenant in config.tenants.items() if value in values), None)
    return values[0] if len(values) == 1 else None


def _role(config: IssuerConfig, values: Sequence[str]) -> Role | None:
    found: list[Role] = [role for value, role in config.roles.items() if value in values]
    if found:
        return max(found, key=ROLES.index)
    return None if config.default_role == "" else config.default_role
