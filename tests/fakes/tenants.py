"""The identities of an edge or a router, with a table of tenants that a test has made."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvloom.v1.control_service_pb2 import FollowResponse
from kvloom_common.access.identities import Identities
from kvloom_common.callers import Callers
from kvloom_common.config import ControlConfig, KvloomConfig, TlsConfig
from kvloom_common.tenancy.table import Key, Organisation, Tenant, TenantTable
from kvloom_common.trust.fabric_trust import NO_SECRET, FabricTrust
from tests.fakes.tenant_entries import key_to_proto, organisation_to_proto, tenant_to_proto

Entry = Organisation | Tenant | Key


def table_of(entries: Iterable[Entry]) -> TenantTable:
    response = FollowResponse(table_id="table", version=1, begins_snapshot=True, is_complete=True)
    _add(response, entries)
    table = TenantTable()
    table.apply(response)
    return table


def change(identities: Identities, *entries: Entry, removed_keys: Iterable[str] = ()) -> None:
    """As if `control` had sent it."""
    table = identities.tenants.table
    response = FollowResponse(
        table_id=table.table_id, version=table.version + 1, is_complete=True, removed_keys=removed_keys
    )
    _add(response, entries)
    table.apply(response)
    identities.tenants.changed()


def _add(response: FollowResponse, entries: Iterable[Entry]) -> None:
    for entry in entries:
        if isinstance(entry, Organisation):
            response.organisations.append(organisation_to_proto(entry))
        elif isinstance(entry, Tenant):
            response.tenants.append(tenant_to_proto(entry))
        else:
            response.keys.append(key_to_proto(entry))


def identities_of(folder: Path, entries: Iterable[Entry], trust: FabricTrust = NO_SECRET, **control: Any) -> Identities:
    """They follow nothing, and count as connected."""
    config = KvloomConfig(data_dir=str(folder), control=ControlConfig(enabled=True, **control))
    if config.control.certificates:
        config.tls = TlsConfig(certificate_file="unused", key_file="unused", client_ca_file="unused")
    identities = Identities(config, "edge-0", trust)
    identities.tenants.use(table_of(entries), time.time())
    identities.tenants.set_connected(True)
    return identities


def callers_of(folder: Path, entries: Iterable[Entry], **control: Any) -> Callers:
    return Callers(identities=identities_of(folder, entries, **control))
