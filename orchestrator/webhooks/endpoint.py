"""An endpoint: a tenant's URL, and the secrets with which its messages are signed. They are stored sealed."""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from kvloom.errors import invalid_argument
from kvloom_common.transport.public_addresses import is_public, split_url
from kvloom_common.trust.state_seal import StateSealer
from orchestrator.store.objects import StoredObject

KIND: Final = "webhook_endpoint"
OLD_SECRET_SECONDS: Final = 86_400.0
_PREFIX: Final = "whsec_"
_SECRET_BYTES: Final = 32
_HINT_CHARS: Final = 4


class WebhookEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """`secret` and `old_secret` are sealed; the old one also signs until then."""

    id: str = ""
    name: str
    url: str
    event_types: list[str]
    updated_at: int
    secret: bytes
    hint: str
    old_secret: bytes = b""
    old_until: float = 0.0

    @classmethod
    def of(cls, endpoint_id: str, body: bytes) -> WebhookEndpoint:
        return msgspec.structs.replace(msgspec.json.decode(body, type=cls), id=endpoint_id)

    @classmethod
    def read(cls, one: StoredObject) -> WebhookEndpoint:
        return msgspec.structs.replace(msgspec.convert(one.body, cls), id=one.id)

    def body(self) -> dict[str, Any]:
        """The fields that are stored."""
        return {name: value for name, value in msgspec.to_builtins(self).items() if name != "id"}

    def with_secret(self, sealer: StateSealer, now: float, *, keeps_old: bool) -> tuple[WebhookEndpoint, str]:
        """The endpoint with a new secret, and the secret, which nobody can find out later."""
        secret = _PREFIX + base64.b64encode(os.urandom(_SECRET_BYTES)).decode()
        changed = msgspec.structs.replace(
            self,
            secret=sealer.seal(self._seal_name, secret.encode()),
            hint=f"{_PREFIX}...{secret[-_HINT_CHARS:]}",
            old_secret=self.secret if keeps_old else b"",
            old_until=now + OLD_SECRET_SECONDS if keeps_old else 0.0,
            updated_at=int(now),
        )
        return changed, secret

    def secrets(self, sealer: StateSealer, now: float) -> Sequence[str]:
        """Those that sign what is sent now. Raises SealError if the fabric has another secret than it had."""
        sealed = [self.secret, *([self.old_secret] if now < self.old_until else [])]
        return [sealer.opened(self._seal_name, one).decode() for one in sealed]

    @property
    def _seal_name(self) -> str:
        return f"webhook endpoint {self.id}"


def check_url(url: str, private_hosts: Sequence[str]) -> None:
    """`private_hosts`: those that may be called though they are not public. Raises KvloomError (INVALID_ARGUMENT)."""
    try:
        parts = split_url(url)
    except ValueError as error:
        raise invalid_argument(f"url cannot be used: {error}.", "url") from error
    if is_private_host(url, private_hosts):
        return
    if parts.scheme != "https":
        raise invalid_argument("url must begin with https://.", "url")
    host = parts.hostname or ""
    if (":" in host or host.replace(".", "").isdigit()) and not is_public(host):
        raise invalid_argument("url must have a public address.", "url")


def is_private_host(url: str, private_hosts: Sequence[str]) -> bool:
    """True for a URL whose host the operator has allowed."""
    parts = split_url(url)
    return parts.hostname in private_hosts or f"{parts.hostname}:{parts.port}" in private_hosts
