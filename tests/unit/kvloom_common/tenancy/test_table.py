"""The table decides who is served: what it was told must be what it answers, also after changes."""

from __future__ import annotations

import hashlib

from kvloom.v1 import control_service_pb2 as pb
from kvloom_common.tenancy.limits import Limits
from kvloom_common.tenancy.sliced_dict import NUM_SLICES
from kvloom_common.tenancy.table import Key, Organisation, Tenant, TenantTable, allows_model
from tests.fakes.tenant_entries import key_to_proto, organisation_to_proto, tenant_to_proto


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


ACME = Organisation("acme", Limits(requests_per_minute=60))
SEARCH = Tenant("acme/search", Limits(tokens_per_day=1000, shadow=True, cached_token_percent=0), "", ("a", "b*"))
KEY = Key("k1", _digest("secret"), "acme/search", ("inference",), ("a",), 100.0, Limits(max_output_tokens=5))


def _table() -> TenantTable:
    table = TenantTable()
    table.apply(
        pb.FollowResponse(
            table_id="t",
            version=1,
            begins_snapshot=True,
            is_complete=True,
            organisations=[organisation_to_proto(ACME)],
            tenants=[tenant_to_proto(SEARCH)],
            keys=[key_to_proto(KEY)],
        )
    )
    return table


def test_a_snapshot_is_read_as_it_was_written() -> None:
    """Nothing is lost on the way, the weights of limits included."""
    table = _table()
    assert table.organisation("acme") == ACME
    assert table.tenant("acme/search") == SEARCH
    assert table.key_of_digest(_digest("secret")) == KEY
    assert table.key_of_digest(_digest("other")) is None


def test_a_key_that_was_replaced_or_removed_opens_nothing() -> None:
    """A rotated or revoked key must not be found by its old digest."""
    table = _table()
    rotated = Key("k1", _digest("new"), "acme/search")
    table.apply(pb.FollowResponse(table_id="t", version=2, is_complete=True, keys=[key_to_proto(rotated)]))
    assert table.key_of_digest(_digest("secret")) is None
    assert table.key_of_digest(_digest("new")) == rotated
    table.apply(pb.FollowResponse(table_id="t", version=3, is_complete=True, removed_keys=["k1"]))
    assert table.key_of_digest(_digest("new")) is None
    assert table.num_keys == 0


def test_keys_end_with_their_time_their_tenant_and_their_organisation() -> None:
    """Each of the three is a way to take access away."""
    table = _table()
    assert table.is_active(KEY, 99.0)
    assert not table.is_active(KEY, 100.0)
    gone = pb.FollowResponse(
        table_id="t", version=2, is_complete=True, organisations=[pb.OrganisationEntry(id="acme", disabled=True)]
    )
    table.apply(gone)
    assert not table.is_active(KEY, 99.0)


def test_lists_of_models_have_prefixes() -> None:
    """An empty list allows everything; "b*" allows what begins so, and nothing else does."""
    assert allows_model((), "x")
    assert allows_model(SEARCH.models, "a")
    assert allows_model(SEARCH.models, "b:adapter")
    assert not allows_model(SEARCH.models, "ab")


def test_expired_keys_leave_and_the_entries_of_identities_stay() -> None:
    """Keys for an hour would fill the memory of every process. Without its entry, an identity would have no
    restriction any more."""
    table = _table()
    entries = [
        Key("ended", _digest("ended"), "acme/search", expires_at=100.0),
        Key("runs", _digest("runs"), "acme/search", expires_at=200.0),
        Key("oidc:login:ada@acme/search", b"", "acme/search", expires_at=100.0),
    ]
    table.apply(pb.FollowResponse(table_id="t", version=2, is_complete=True, keys=map(key_to_proto, entries)))
    for number in range(NUM_SLICES):
        table.drop_expired(number, before=150.0)
    assert [table.key(key.id) is not None for key in (KEY, *entries)] == [False, False, True, True]
    assert table.key_of_digest(_digest("ended")) is None
    assert table.num_keys == 2


def test_keys_share_what_they_have_in_common() -> None:
    """A million keys of a few kinds must not be a million copies of their tenants' names."""
    table = _table()
    keys = [Key(f"k{number}", _digest(str(number)), "acme/search", ("inference",)) for number in range(2)]
    table.apply(pb.FollowResponse(table_id="t", version=2, is_complete=True, keys=map(key_to_proto, keys)))
    one, other = table.key("k0"), table.key("k1")
    assert one is not None
    assert other is not None
    assert one.tenant is other.tenant
    assert one.scopes is other.scopes
    assert one.expires_at is other.expires_at


def test_a_table_can_be_freed_in_parts() -> None:
    """Each of them is small, whatever the size of the table."""
    table = _table()
    for number in range(NUM_SLICES):
        while table.drop_some(number, max_entries=1):
            pass
    assert (table.num_keys, table.num_tenants, table.organisation("acme")) == (0, 0, None)
    assert table.key_of_digest(_digest("secret")) is None
