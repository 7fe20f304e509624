"""One process's part in the trust of a fabric that has a secret: with the secret, TLS on both sides, signed and
encrypted records; or with an identity of one service only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvloom_common.trust.certificates import make_certificates
from kvloom_common.trust.identity import ServiceIdentity, read_identity
from kvloom_common.trust.seal import Sealer
from kvloom_common.trust.sealing import IdentitySealer, SecretSealer
from kvloom_common.trust.secret import FabricSecret, SecretError, read_secret
from kvloom_common.trust.tls_trust import POLL_SECONDS, TlsTrust


class SharedSecret(TlsTrust):
    """The trust of a fabric with a secret."""

    def __init__(
        self,
        secret: FabricSecret,
        roles: Sequence[str],
        name: str,
        path: Path | None = None,
        *,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        """`path`: the file that `watch` follows."""
        super().__init__(secret.fabric_id, path, poll_seconds)
        self._roles = roles
        self._name = name
        self._sealer = SecretSealer(secret)
        self._secret: FabricSecret
        self._use(secret)

    def _use(self, loaded: FabricSecret) -> None:
        self._secret = loaded
        self._show(make_certificates(loaded, self._roles, self._name))
        self._sealer.replace_secret(loaded)

    def _load(self, path: Path) -> FabricSecret:
        secret = read_secret(path)
        if secret.identity != self._secret.identity:
            raise SecretError(f"{path} now holds another fabric's secret")
        return secret

    @property
    def sealer(self) -> Sealer:
        return self._sealer

    @property
    def caller_key(self) -> bytes:
        return self._secret.caller_key

    @property
    def cache_key(self) -> bytes:
        return self._secret.cache_key

    @property
    def state_key(self) -> bytes:
        return self._secret.state_key


_NEEDS_SECRET = "this needs the fabric's secret, and this service has an identity only"


class IdentityTrust(TlsTrust):
    """The trust of a service with an identity."""

    def __init__(
        self, identity: ServiceIdentity, path: Path | None = None, *, poll_seconds: float = POLL_SECONDS
    ) -> None:
        """`path`: the file that `watch` follows."""
        super().__init__(identity.fabric_id, path, poll_seconds)
        self._identity = identity
        self._sealer = IdentitySealer(identity.fabric_id, identity.record_keys)
        self._show(identity.certificates)

    def _load(self, path: Path) -> ServiceIdentity:
        found = read_identity(path)
        own = self._identity
        if found is None or (found.fabric_id, found.role, found.name) != (own.fabric_id, own.role, own.name):
            raise SecretError(f"{path} is no longer the identity of the {own.role} {own.name!r} of this fabric")
        return found

    def _use(self, loaded: ServiceIdentity) -> None:
        self._identity = loaded
        self._sealer.replace_keys(loaded.record_keys)
        self._show(loaded.certificates)

    @property
    def sealer(self) -> Sealer:
        return self._sealer

    @property
    def caller_key(self) -> bytes:
        raise SecretError(_NEEDS_SECRET)

    @property
    def cache_key(self) -> bytes:
        raise SecretError(_NEEDS_SECRET)

    @property
    def state_key(self) -> bytes:
        raise SecretError(_NEEDS_SECRET)
