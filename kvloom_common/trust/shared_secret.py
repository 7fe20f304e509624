"""One process's part in the trust of a fabric that has a secret: TLS on both sides, signed and encrypted records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvloom_common.trust.certificates import make_certificates
from kvloom_common.trust.seal import Sealer
from kvloom_common.trust.sealing import SecretSealer
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
