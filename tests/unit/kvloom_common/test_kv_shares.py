"""What routers send to shards of a caller's guaranteed share of KV blocks."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvloom.v1 import control_service_pb2 as pb
from kvloom_common.access.kv_shares import KvShares
from kvloom_common.access.tenants import Tenants
from kvloom_common.config import ConfigError, load_config
from kvloom_common.kv_share import KvShare
from kvloom_common.tenancy.limits import Limits
from kvloom_common.tenancy.table import Organisation, Tenant, TenantTable
from tests.fakes.tenant_entries import organisation_to_proto, tenant_to_proto


def tenants_of(*entries: Organisation | Tenant) -> Tenants:
    table = TenantTable()
    table.apply(
        pb.FollowResponse(
            begins_snapshot=True,
            table_id="t",
            organisations=[organisation_to_proto(one) for one in entries if isinstance(one, Organisation)],
            tenants=[tenant_to_proto(one) for one in entries if isinstance(one, Tenant)],
        )
    )
    tenants = Tenants(60.0)
    tenants.use(table, 0.0)
    return tenants


def test_a_project_has_its_own_share_or_that_of_its_organisation() -> None:
    """Projects without one of their own have the organisation's together: they are one owner."""
    tenants = tenants_of(
        Organisation("acme", Limits(kv_share_percent=30)),
        Organisation("other"),
        Tenant("acme/own", Limits(kv_share_percent=10)),
        Tenant("acme/a"),
        Tenant("acme/b"),
        Tenant("other/app"),
    )
    shares = KvShares(b"key", tenants.kv_share)
    own, first, second = (shares.of(f"acme/{name}") for name in ("own", "a", "b"))
    assert own is not None
    assert first is not None
    assert (own.percent, first.percent) == (10, 30)
    assert first is second
    assert first.owner != own.owner
    assert shares.of("other/app") is None
    assert shares.of("unknown/app") is None


def test_owners_are_the_same_for_all_routers_of_a_fabric_and_for_no_other() -> None:
    """Several routers use one shard; and from the number alone no name can be guessed."""

    def share(key: bytes, percent: int) -> KvShare:
        found = KvShares(key, lambda caller: (caller, percent)).of("acme/search")
        assert found is not None
        return found

    assert share(b"key", 10) == share(b"key", 10)
    assert share(b"key", 10).owner == share(b"key", 20).owner
    assert share(b"key", 10).owner != share(b"another key", 10).owner


def test_more_than_can_be_guaranteed_is_refused_in_the_configuration(tmp_path: Path) -> None:
    """With the key that has to be changed."""
    path = tmp_path / "kvloom.toml"
    path.write_text("[callers]\nkv_shares = { key-a = 50, key-b = 45 }\n")
    with pytest.raises(ConfigError, match=r"kv_shares guarantees 95% together.*callers"):
        load_config(path)
