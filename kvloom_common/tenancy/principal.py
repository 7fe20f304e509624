"""Who makes a request, and what it may be used for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from kvloom_common.tenancy.scopes import ANY_CLASS, ClassRights, Scope
from kvloom_common.tenancy.table import Key, Organisation, Tenant, allows_model


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
    classes: tuple[ClassRights, ...] = ()
    """Those of the key, its tenant and its organisation, in this order, as far as they say something of priority
    classes. A class must be allowed by all of them."""

    def has_scope(self, scope: Scope) -> bool:
        return scope in self.scopes

    @property
    def may_use_all_models(self) -> bool:
        return not (self.tenant_models or self.key_models)

    def may_use(self, names: Iterable[str]) -> bool:
        """True when a model may be used that has all of these names: that of the request, and its own."""
        return self.may_use_all_models or (
            any(allows_model(self.tenant_models, name) for name in names)
            and any(allows_model(self.key_models, name) for name in names)
        )

    @property
    def default_class(self) -> str:
        """The priority class of requests that name none; "": that of their tier."""
        return next((rights.default for rights in self.classes if rights.default), "")

    def may_use_class(self, name: str) -> bool:
        return all(rights.allows(name) for rights in self.classes)


def _class_rights(*holders: Key | Tenant | Organisation | None) -> tuple[ClassRights, ...]:
    return tuple(one.classes for one in holders if one is not None and one.classes is not ANY_CLASS)


def principal_of_key(key: Key, tenant: Tenant, organisation: Organisation | None) -> Principal:
    classes = _class_rights(key, tenant, organisation)
    return Principal(key.tenant, key.id, key.scopes, tenant.models, key.models, key.expires_at, key.user, classes)


def principal_of_identity(
    key_id: str,
    tenant: Tenant,
    organisation: Organisation | None,
    scopes: Sequence[str],
    expires_at: float,
    user: str,
    key: Key | None,
) -> Principal:
    """An identity that has no key, such as a subject of an issuer of tokens. `key`: what the table says of it, if it
    does: it then has only the scopes that both give, and the models and the expiry of the entry apply as well."""
    classes = _class_rights(key, tenant, organisation)
    if key is None:
        return Principal(tenant.id, key_id, tuple(scopes), tenant.models, (), expires_at, user, classes)
    both = tuple(scope for scope in scopes if scope in key.scopes)
    ends = [end for end in (expires_at, key.expires_at) if end]
    expires_at, user = min(ends, default=0.0), key.user or user
    return Principal(tenant.id, key_id, both, tenant.models, key.models, expires_at, user, classes)
