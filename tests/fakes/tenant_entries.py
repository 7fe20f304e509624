"""Entries of the table of tenants as `control` sends them."""

from __future__ import annotations

from kvloom.v1 import control_service_pb2 as pb
from kvloom_common.tenancy.limits import limits_to_proto
from kvloom_common.tenancy.table import Key, Organisation, Tenant


def organisation_to_proto(organisation: Organisation) -> pb.OrganisationEntry:
    return pb.OrganisationEntry(
        id=organisation.id,
        limits=limits_to_proto(organisation.limits),
        disabled=organisation.disabled,
        priority_classes=organisation.classes.allowed,
        residency=organisation.residency,
        default_priority_class=organisation.classes.default,
    )


def tenant_to_proto(tenant: Tenant) -> pb.TenantEntry:
    return pb.TenantEntry(
        id=tenant.id,
        limits=limits_to_proto(tenant.limits),
        cache_scope=tenant.cache_scope,
        models=tenant.models,
        disabled=tenant.disabled,
        priority_classes=tenant.classes.allowed,
        residency=tenant.residency,
        guardrails=tenant.guardrails,
        default_priority_class=tenant.classes.default,
    )


def key_to_proto(key: Key) -> pb.KeyEntry:
    return pb.KeyEntry(
        id=key.id,
        digest=key.digest,
        tenant=key.tenant,
        scopes=key.scopes,
        models=key.models,
        expires_at=key.expires_at,
        limits=limits_to_proto(key.limits),
        user=key.user,
        priority_classes=key.classes.allowed,
        default_priority_class=key.classes.default,
        account=key.account,
    )
