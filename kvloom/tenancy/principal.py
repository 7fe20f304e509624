"""Who makes a request, and what it may be used for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from kvloom.tenancy.scopes import Scope
from kvloom.tenancy.table import Key, Tenant, allows_model


class Principal(msgspec.Struct, frozen=True, gc=False):
    """The holder of a key, or of an identity that the fabric accepts instead of one."""

    tenant: str
    """ORGANISATION/PROJECT. It is also the caller's name: all keys of a project are one caller."""
    key_id: str
    """The id of the key; of another identity, a name that says what it is."""
    scopes: tuple[str, ...] = ()
    tenant_models: tuple[str, ...] = ()
    """Names, and prefixes that end in "*"; empty: all. A model must be among those of the tenant and of the key."""
    key_models: tuple[str, ...] = ()
    expires_at: float = 0.0
    """Seconds since 1970; 0: never."""
    user: str = ""

    def has_scope(self, scope: Scope) -> bool:
        return scope in self.scopes

    @property
    def may_use_all_models(self) -> bool:
        return not (self.tenant_models or self.key_models)

    def may_use(self, names: Iterable[str]) -> bool:
        """Whether a model may be used that has all of these names: that of the request, and its own."""
        return self.may_use_all_models or (
            any(allows_model(self.tenant_models, name) for name in names)
            and any(allows_model(self.key_models, name) for name in names)
        )


def principal_of_key(key: Key, tenant: Tenant) -> Principal:
    return Principal(key.tenant, key.id, key.scopes, tenant.models, key.models, key.expires_at, key.user)


def principal_of_identity(
    key_id: str, tenant: Tenant, scopes: Sequence[str], expires_at: float, user: str, key: Key | None
) -> Principal:
    """An identity that has no key, such as a subject of an issuer of tokens. `key`: what the table says of it, if it
    does: it then has only the scopes that both give, and the models and the expiry of the entry apply as well."""
    if key is None:
        return Principal(tenant.id, key_id, tuple(scopes), tenant.models, (), expires_at, user)
    both = tuple(scope for scope in scopes if scope in key.scopes)
    ends = [end for end in (expires_at, key.expires_at) if end]
    return Principal(tenant.id, key_id, both, tenant.models, key.models, min(ends, default=0.0), key.user or user)
