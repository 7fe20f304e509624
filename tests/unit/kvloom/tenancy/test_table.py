"""The table decides who is served: what it was told must be what it answers, also after changes."""

from __future__ import annotations

import hashlib

from kvloom.tenancy.limits import Limits
from kvloom.tenancy.table import (
    Key,
    Organisation,
    Tenant,
    TenantTable,
    allows_model,
    key_to_proto,
    organisation_to_proto,
    tenant_to_proto,
)
from kvloom.v1 import control_service_pb2 as pb


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


ACME = Organisation("acme", Limits(requests_per_minute=60))
SEARCH = Tenant("acme/search", Limits(tokens_per_day=1000, shadow=True, cached_token_percent=0), "", ("a", "b*"))
KEY = Key("k1", _digest("secret"), "acme/search", "ci", ("inference",), ("a",), 100.0, Limits(max_output_tokens=5))


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
