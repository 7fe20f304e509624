"""The tenants of a fabric as an edge or a router uses them: who holds a key, and whether what is known is fresh enough
to say so. A lookup is a SHA-256 and a dictionary read; nothing waits."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.access.api_keys import MAX_KEY_CHARS, missing_key_error, wrong_key_error
from kvloom_common.access.auth_provider import auth_unavailable
from kvloom_common.tenancy.principal import Principal, principal_of_identity, principal_of_key
from kvloom_common.tenancy.table import TenantTable, identity_id

log = structlog.get_logger()

MAX_USES: Final = 10_000
"""Keys whose use is noted at a time: as many as `control` takes in one report."""
MAX_KEPT: Final = 16_384
"""Holders of keys that are kept. When there are more, all are forgotten."""
IDENTITY_PREFIXES: Final = ("oidc:", "cert:")
"""The ids of identities that have no key begin with one of these."""


class Tenants:
    """The table in use. It changes only through `use` and `changed`, on the event loop."""

    def __init__(
        self,
        max_stale_seconds: float,
        now: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        cell: str = "",
    ) -> None:
        """`now`: seconds since 1970. `monotonic`: those of a clock that nothing sets. `cell`: the one that this process
        belongs to; "": there is but one, whatever the residency of tenants."""
        self.table = TenantTable()
        self.connected = False
        """True while the table follows that of `control`."""
        self._now = now
        self._monotonic = monotonic
        self._cell = cell
        self._max_stale_seconds = max_stale_seconds
        self._current_at = 0.0
        """When the table was last known to be that of `control`."""
        self._seen_at = monotonic()
        """The same by the other clock, or when this process began."""
        self._on_change: list[Callable[[], None]] = []
        self._used: dict[str, float] = {}
        self._kept: dict[bytes, Principal] = {}
        """Holders of keys, by the SHA-256 of these, as the table in its state `_kept_state` has them: a revoked key is
        gone with the change that says so."""
        self._kept_state: object = None

    # -- the table ----------------------------------------------------------------------------------------------------

    def use(self, table: TenantTable, current_at: float) -> None:
        """Replace the table, which was that of `control` at `current_at` (seconds since 1970)."""
        self.table = table
        self._current_at = current_at
        self.changed()

    def changed(self) -> None:
        """To be called when the table has changed."""
        for callback in self._on_change:
            callback()

    def on_change(self, callback: Callable[[], None]) -> None:
        """`callback` is called when the table has changed: keys may have come or gone."""
        self._on_change.append(callback)

    def set_connected(self, connected: bool) -> None:
        if self.connected or connected:
            self._current_at, self._seen_at = self._now(), self._monotonic()
        self.connected = connected

    @property
    def age_seconds(self) -> float:
        """How long the table has not followed that of `control`; 0 while it does. By the clock that says more: one that
        was set back would make an old table new."""
        return 0.0 if self.connected else max(self._now() - self._current_at, self._monotonic() - self._seen_at)

    def check_fresh(self) -> None:
        """Raises KvloomError (AUTH_UNAVAILABLE) while there is no table, or only one that is too old."""
        is_fresh = self.connected or self.age_seconds <= self._max_stale_seconds
        if not is_fresh or not self.table.table_id:
            raise auth_unavailable()

    # -- principals ---------------------------------------------------------------------------------------------------

    def of_credential(self, credential: str) -> Principal:
        """The holder of an API key. Raises KvloomError (UNAUTHENTICATED, AUTH_UNAVAILABLE,
        CELL_UNAVAILABLE)."""
        self.check_fresh()
        if not credential:
            raise missing_key_error()
        if len(credential) > MAX_KEY_CHARS:
            raise wrong_key_error()
        digest = hashlib.sha256(credential.encode("utf-8", "surrogateescape")).digest()
        if self.table.state is not self._kept_state:
            self._kept.clear()
            self._kept_state = self.table.state
        principal = self._kept.get(digest) or self._of_digest(digest)
        if 0.0 < principal.expires_at <= self._now():
            raise wrong_key_error()
        if principal.key_id not in self._used:
            self._note_use(principal.key_id)
        return principal

    def _of_digest(self, digest: bytes) -> Principal:
        """The holder of the key with this SHA-256, who is kept until the table changes. Raises KvloomError
        (UNAUTHENTICATED)."""
        table = self.table
        key = table.key_of_digest(digest)
        if key is None or not table.is_active(key, self._now()):
            raise wrong_key_error()
        tenant = table.tenant(key.tenant)
        assert tenant is not None
        self.check_residency(tenant.id)
        if len(self._kept) >= MAX_KEPT:
            self._kept.clear()
        principal = self._kept[digest] = principal_of_key(key, tenant, table.organisation(tenant.organisation))
        return principal

    def of_identity(
        self, identity: str, tenant_id: str, scopes: Sequence[str], expires_at: float = 0.0, user: str = ""
    ) -> Principal:
        """Someone who has shown another identity than a key (`oidc:NAME:SUBJECT`, `cert:NAME`), which belongs to that
        tenant. Raises KvloomError (UNAUTHENTICATED, AUTH_UNAVAILABLE)."""
        self.check_fresh()
        table, now = self.table, self._now()
        key_id = identity_id(identity, tenant_id)
        if 0.0 < expires_at <= now:
            raise expired_error()
        key = table.key(key_id)
        if key is not None and (key.digest or key.tenant != tenant_id or not table.is_active(key, now)):
            raise wrong_identity_error()
        tenant = table.tenant(tenant_id)
        if tenant is None or not table.is_active_tenant(tenant):
            raise wrong_identity_error()
        self.check_residency(tenant_id)
        if key is not None:
            self._note_use(key.id)
        return principal_of_identity(
            key_id, tenant, table.organisation(tenant.organisation), scopes, expires_at, user, key
        )

    def _note_use(self, key_id: str) -> None:
        used = self._used
        if key_id not in used and len(used) < MAX_USES:
            used[key_id] = self._now()

    def take_uses(self) -> dict[str, float]:
        """When keys were first used since the last call (seconds since 1970), by their ids."""
        used, self._used = self._used, {}
        return used

    def renewed(self, principal: Principal) -> Principal:
        """Returns the principal with what it may do now. Raises KvloomError (UNAUTHENTICATED, AUTH_UNAVAILABLE) if that
        is nothing."""
        if principal.key_id.startswith(IDENTITY_PREFIXES):
            identity = principal.key_id.removesuffix(identity_id("", principal.tenant))
            return self.of_identity(identity, principal.tenant, principal.scopes, principal.expires_at, principal.user)
        self.check_fresh()
        key = self.table.key(principal.key_id)
        if key is None or not self.table.is_active(key, self._now()):
            raise wrong_key_error()
        tenant = self.table.tenant(key.tenant)
        assert tenant is not None
        self.check_residency(tenant.id)
        return principal_of_key(key, tenant, self.table.organisation(tenant.organisation))

    def have_limits(self, principal: Principal) -> bool:
        """True when a key, its tenant or its organisation has limits."""
        table = self.table
        key, tenant = table.key(principal.key_id), table.tenant(principal.tenant)
        organisation = None if tenant is None else table.organisation(tenant.organisation)
        return any(one is not None and not one.limits.are_none for one in (key, tenant, organisation))

    def cache_scope(self, tenant_id: str) -> str:
        tenant = self.table.tenant(tenant_id)
        return "" if tenant is None else tenant.cache_scope

    def guardrails(self, tenant_id: str) -> Sequence[str]:
        """The rules of the safety policy that a tenant has chosen."""
        tenant = self.table.tenant(tenant_id)
        return () if tenant is None else tenant.guardrails

    def residency(self, tenant_id: str) -> Sequence[frozenset[str]]:
        """Sets of cells: the tenant's requests may be computed in a cell that is in all of them."""
        tenant = self.table.tenant(tenant_id)
        organisation = None if tenant is None else self.table.organisation(tenant.organisation)
        return [frozenset(one.residency) for one in (tenant, organisation) if one is not None and one.residency]

    def check_residency(self, tenant_id: str) -> None:
        """Raises KvloomError (CELL_UNAVAILABLE) if the tenant's requests may not be computed in this cell."""
        if self._cell and not all(self._cell in cells for cells in self.residency(tenant_id)):
            raise residency_error(self.residency(tenant_id))

    def kv_share(self, tenant_id: str) -> tuple[str, int]:
        """The account whose share of KV blocks a tenant's requests have, and the share in percent; 0: none. It is the
        tenant's own or else that of its organisation."""
        tenant = self.table.tenant(tenant_id)
        if tenant is None:
            return "", 0
        if tenant.limits.kv_share_percent:
            return f"tenant:{tenant.id}", tenant.limits.kv_share_percent
        organisation = self.table.organisation(tenant.organisation)
        percent = 0 if organisation is None else organisation.limits.kv_share_percent
        return f"org:{tenant.organisation}", percent


def residency_error(residency: Sequence[frozenset[str]]) -> KvloomError:
    """The error for a tenant with this residency none of whose cells can be reached."""
    names = ", ".join(sorted(frozenset.intersection(*residency))) or "there is none"
    message = f"None of the cells in which this tenant's requests may be computed can be reached from here ({names})."
    return KvloomError(ErrorReason.ERROR_REASON_CELL_UNAVAILABLE, message, retry_after_seconds=1.0)


def wrong_identity_error() -> KvloomError:
    return KvloomError(
        ErrorReason.ERROR_REASON_UNAUTHENTICATED, "The identity belongs to no tenant of this server that may use it."
    )


def expired_error() -> KvloomError:
    return KvloomError(ErrorReason.ERROR_REASON_UNAUTHENTICATED, "The credential has expired.")
