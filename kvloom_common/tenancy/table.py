"""The tenants, keys, limits and prices of a fabric, looked up without a database.

`control` owns them; every edge and router has this copy, which it keeps up to date from `ControlService.Follow`.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from kvloom.v1 import control_service_pb2 as pb
from kvloom_common.tenancy.limits import NO_LIMITS, Limits, limits_from_proto
from kvloom_common.tenancy.prices import Price, Prices
from kvloom_common.tenancy.scopes import ANY_CLASS, ClassRights
from kvloom_common.tenancy.sliced_dict import SlicedDict

EXPIRED_SECONDS: Final = 3600.0
"""How long after its end a key is in the table that `control` sends. It opens nothing in that time."""
NEVER: Final = 0.0
"""The `expires_at` of keys that do not expire: one object for all keys."""


class Organisation(msgspec.Struct, frozen=True, gc=False):
    id: str
    limits: Limits = NO_LIMITS
    disabled: bool = False
    classes: ClassRights = ANY_CLASS
    residency: tuple[str, ...] = ()
    """The cells in which its requests may be computed; empty: all."""


class Tenant(msgspec.Struct, frozen=True, gc=False):
    id: str
    """ORGANISATION/PROJECT"""
    limits: Limits = NO_LIMITS
    cache_scope: str = ""
    """The tenants with the same one share cached prompts; "": nobody shares with this one."""
    models: tuple[str, ...] = ()
    """Names, and prefixes that end in "*"; empty: all."""
    disabled: bool = False
    classes: ClassRights = ANY_CLASS
    residency: tuple[str, ...] = ()
    """The cells, as those of its organisation and in addition to them."""
    guardrails: tuple[str, ...] = ()
    """The rules of the safety policy that hold for its requests besides those that hold anyway."""

    @property
    def organisation(self) -> str:
        return self.id.partition("/")[0]


class Key(msgspec.Struct, frozen=True, gc=False):
    id: str
    digest: bytes
    """SHA-256 of the key; empty for an identity that has no key."""
    tenant: str
    scopes: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    expires_at: float = 0.0
    """Seconds since 1970; 0: never."""
    limits: Limits = NO_LIMITS
    user: str = ""
    classes: ClassRights = ANY_CLASS
    account: str = ""
    """The key whose account of limits it continues; "": its own."""


def identity_id(identity: str, tenant: str) -> str:
    """The id, in the table and in records, of an identity that has no key (`KIND:NAME`, as a token or a certificate
    says it) as a caller of this tenant. An entry of the table narrows or ends the identity there and nowhere else, so
    that no organisation can take it from another one."""
    return f"{identity}@{tenant}"


def allows_model(patterns: Sequence[str], model: str) -> bool:
    """True when these names and prefixes (`Tenant.models`) include the model."""
    return not patterns or any(
        model.startswith(pattern[:-1]) if pattern.endswith("*") else model == pattern for pattern in patterns
    )


class TenantTable:
    """One version of everything. `apply` changes it; lookups are dictionary reads."""

    def __init__(self) -> None:
        self.table_id = ""
        self.version = 0
        self.state: object = object()
        """Another object after every change, by which others see whether what they have found still holds."""
        self.prices = Prices()
        self._organisations: SlicedDict[str, Organisation] = SlicedDict()
        self._tenants: SlicedDict[str, Tenant] = SlicedDict()
        self._keys: SlicedDict[str, Key] = SlicedDict()
        self._by_digest: SlicedDict[bytes, Key] = SlicedDict()
        self._names: dict[tuple[str, ...], tuple[str, ...]] = {}
        """Equal lists of models, scopes, cells or guardrails are one object, since most keys have one of a few."""

    @property
    def is_empty(self) -> bool:
        return not self.table_id

    @property
    def num_keys(self) -> int:
        return len(self._keys)

    @property
    def num_tenants(self) -> int:
        return len(self._tenants)

    def organisation(self, organisation_id: str) -> Organisation | None:
        return self._organisations.get(organisation_id)

    def tenant(self, tenant_id: str) -> Tenant | None:
        return self._tenants.get(tenant_id)

    def key(self, key_id: str) -> Key | None:
        return self._keys.get(key_id)

    def key_of_digest(self, digest: bytes) -> Key | None:
        """The key with this SHA-256, whether or not it has expired."""
        key = self._by_digest.get(digest)
        return key if key is not None and hmac.compare_digest(key.digest, digest) else None

    def is_active(self, key: Key, seconds_since_1970: float) -> bool:
        """True when the key may be used: it has not expired, and neither its tenant nor its organisation is
        disabled."""
        tenant = self._tenants.get(key.tenant)
        has_expired = 0.0 < key.expires_at <= seconds_since_1970
        return tenant is not None and not has_expired and self.is_active_tenant(tenant)

    def is_active_tenant(self, tenant: Tenant) -> bool:
        """True when neither the tenant nor its organisation is disabled."""
        organisation = self._organisations.get(tenant.organisation)
        return not tenant.disabled and organisation is not None and not organisation.disabled

    def apply(self, response: pb.FollowResponse) -> None:
        """Apply a part of a snapshot, or changes. Until a part `is_complete`, the table is that of no version."""
        if response.begins_snapshot:
            self.__init__()
        self._remove(response)
        for organisation in response.organisations:
            self._organisations[organisation.id] = Organisation(
                organisation.id,
                _limits(organisation.limits),
                organisation.disabled,
                self._class_rights(organisation),
                self._shared(organisation.residency),
            )
        for tenant in response.tenants:
            self._tenants[tenant.id] = Tenant(
                tenant.id,
                _limits(tenant.limits),
                tenant.cache_scope,
                self._shared(tenant.models),
                tenant.disabled,
                self._class_rights(tenant),
                self._shared(tenant.residency),
                self._shared(tenant.guardrails),
            )
        for entry in response.keys:
            self._add(self._key(entry))
        if response.has_prices:
            self.prices = Prices(price_from_proto(price) for price in response.prices)
        self.table_id, self.version = response.table_id, response.version
        self.state = object()

    def _remove(self, response: pb.FollowResponse) -> None:
        for organisation_id in response.removed_organisations:
            self._organisations.pop(organisation_id)
        for tenant_id in response.removed_tenants:
            self._tenants.pop(tenant_id)
        for key_id in response.removed_keys:
            self._drop(key_id)

    def _add(self, key: Key) -> None:
        self._drop(key.id)
        self._keys[key.id] = key
        if key.digest:
            self._by_digest[key.digest] = key

    def _drop(self, key_id: str) -> None:
        key = self._keys.pop(key_id)
        if key is not None and self._by_digest.get(key.digest) is key:
            self._by_digest.pop(key.digest)

    def drop_expired(self, slice_number: int, before: float) -> None:
        """Forget the keys of one of NUM_SLICES slices that have expired before that time (seconds since 1970). An
        identity without a key stays: its entry says that it may not be used any more."""
        for key in self._keys.values_of(slice_number):
            if key.digest and 0.0 < key.expires_at < before:
                self._drop(key.id)
                self.state = object()

    def drop_some(self, slice_number: int, max_entries: int) -> bool:
        """Free a part of a table that is not in use any more. Returns whether that slice has more."""
        kinds = (self._by_digest, self._keys, self._tenants, self._organisations)
        return sum(entries.drop_some(slice_number, max_entries) for entries in kinds) > 0

    def _key(self, entry: pb.KeyEntry) -> Key:
        """Most keys differ in their id and digest only. What else they have is one object for many: it would be more
        than half of the memory of the table."""
        tenant, key_id = entry.tenant, entry.id
        if not entry.digest and not key_id.endswith(identity_id("", tenant)):
            key_id = identity_id(key_id, tenant)  # of a copy that was written before ids had their tenant
        known = self._tenants.get(tenant)
        return Key(
            key_id,
            entry.digest,
            tenant if known is None else known.id,
            self._shared(entry.scopes),
            self._shared(entry.models),
            entry.expires_at or NEVER,
            _limits(entry.limits) if entry.HasField("limits") else NO_LIMITS,
            entry.user,
            self._class_rights(entry),
            entry.account,
        )

    def _class_rights(self, entry: pb.OrganisationEntry | pb.TenantEntry | pb.KeyEntry) -> ClassRights:
        allowed, default = entry.priority_classes, entry.default_priority_class
        return ClassRights(self._shared(allowed), default) if allowed or default else ANY_CLASS

    def _shared(self, names: Iterable[str]) -> tuple[str, ...]:
        found = tuple(names)
        return self._names.setdefault(found, found)


def _limits(limits: pb.Limits) -> Limits:
    found = limits_from_proto(limits)
    return NO_LIMITS if found == NO_LIMITS else found


def price_from_proto(price: pb.Price) -> Price:
    return Price(
        price.id,
        price.model,
        price.effective_from,
        price.prompt_nanos,
        price.cached_nanos if price.HasField("cached_nanos") else price.prompt_nanos,
        price.output_nanos,
        price.request_nanos,
        price.batch_percent if price.HasField("batch_percent") else 100,
        price.result_cache_percent,
    )
