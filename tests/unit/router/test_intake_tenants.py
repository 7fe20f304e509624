"""Whose a request is, as the router takes it in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import Choice
from kvloom.v1.router_service_pb2 import TIER_BATCH
from kvloom_common.access.kv_shares import CacheSalts
from kvloom_common.tenancy.scopes import ClassRights
from kvloom_common.tenancy.table import Tenant
from router.caller_scope import TRUSTED, CallerAccess, CallerScope
from router.core.events import Request
from router.request_validator import RequestValidator
from tests.fakes.fake_control import SEARCH_KEY, two_organisations
from tests.fakes.link_requests import make_submit
from tests.fakes.tenants import change, identities_of

SALTS = CacheSalts(b"key")


def request_of(scope: CallerScope, **fields: Any) -> Request:
    intake = RequestValidator({}, 1000, lambda: False, cache_salts=SALTS)
    submit = make_submit(
        request_id="r",
        model="m",
        prompt_token_ids=[1, 2],
        choices=[Choice(slot=1)],
        tenant="other/app",
        key_id="id-of-another",
        **fields,
    )
    return intake.request_from_submit(submit, "client", scope)


def test_an_edge_says_whose_a_request_is_and_others_do_not(tmp_path: Path) -> None:
    """Limits, bills and cached prompts follow these names."""
    identities = identities_of(tmp_path, two_organisations())
    principal = identities.at_once(SEARCH_KEY, b"")
    assert principal is not None
    trusted = request_of(TRUSTED)
    assert (trusted.tenant, trusted.key_id) == ("other/app", "id-of-another")
    assert trusted.cache_salt == SALTS.of("other/app")
    own = request_of(CallerScope(principal.tenant, CallerAccess(identities.tenants, principal)))
    assert (own.tenant, own.key_id) == ("acme/search", f"id-{SEARCH_KEY}")
    assert own.cache_salt == SALTS.of("acme/search")
    without_tenants = request_of(CallerScope("key-alice"))
    assert (without_tenants.tenant, without_tenants.key_id) == ("key-alice", "")


def test_the_guardrails_of_a_tenant_hold_besides_those_that_are_named() -> None:
    """Whoever sends the request: an edge, or a client over gRPC. Its answer is then not taken from the result cache,
    where answers lie that were screened by other rules."""
    chosen = {"acme/web": ("codes",)}
    intake = RequestValidator(
        {}, 1000, lambda: False, guardrails_of=lambda tenant: chosen.get(tenant, ()), caches_results=True
    )
    found = [
        intake.request_from_submit(
            make_submit(
                request_id="r",
                model="m",
                prompt_token_ids=[1],
                choices=[Choice(slot=1)],
                tenant=tenant,
                guardrails=names,
            ),
            "client",
        )
        for tenant, names in (("acme/web", []), ("acme/web", ["names", "codes"]), ("other/app", []))
    ]
    assert [request.guardrails for request in found] == [("codes",), ("codes", "names"), ()]
    assert not found[0].is_cacheable


def test_a_stream_that_has_begun_gets_no_model_that_was_taken_away(tmp_path: Path) -> None:
    """Such a stream may last for weeks, and what its key may do changes meanwhile."""
    identities = identities_of(tmp_path, two_organisations())
    principal = identities.at_once(SEARCH_KEY, b"")
    assert principal is not None
    scope = CallerScope(principal.tenant, CallerAccess(identities.tenants, principal))
    assert request_of(scope).model == "m"
    change(identities, Tenant("acme/search", models=("another",)))
    with pytest.raises(KvloomError) as denied:
        request_of(scope)
    assert denied.value.reason == ErrorReason.ERROR_REASON_PERMISSION_DENIED
    change(identities, Tenant("acme/search", disabled=True))
    with pytest.raises(KvloomError) as refused:
        request_of(scope)
    assert refused.value.reason == ErrorReason.ERROR_REASON_UNAUTHENTICATED


@pytest.mark.parametrize("fields", [{}, {"priority_class": "interactive"}, {"tier": TIER_BATCH}])
def test_a_class_that_the_key_may_not_use_is_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    """A direct client has no edge in front of it that would ask, and it may leave the field out."""
    identities = identities_of(tmp_path, two_organisations())
    principal = identities.at_once(SEARCH_KEY, b"")
    assert principal is not None
    scope = CallerScope(principal.tenant, CallerAccess(identities.tenants, principal))
    assert request_of(scope, **fields).key_id == f"id-{SEARCH_KEY}"
    change(identities, Tenant("acme/search", classes=ClassRights(("gold",))))
    with pytest.raises(KvloomError) as denied:
        request_of(scope, **fields)
    assert denied.value.reason == ErrorReason.ERROR_REASON_PERMISSION_DENIED
    assert (denied.value.field, denied.value.end) == ("priority_class", "rejected")


def test_the_default_class_is_that_of_requests_which_name_none(tmp_path: Path) -> None:
    """An operator moves a tenant to another class without a change of its programs; what it names itself holds."""
    identities = identities_of(tmp_path, two_organisations())
    principal = identities.at_once(SEARCH_KEY, b"")
    assert principal is not None
    scope = CallerScope(principal.tenant, CallerAccess(identities.tenants, principal))
    change(identities, Tenant("acme/search", classes=ClassRights(default="batch")))
    served = [request_of(scope), request_of(scope, priority_class="interactive")]
    assert [one.priority_class and one.priority_class.name for one in served] == ["batch", "interactive"]
    change(identities, Tenant("acme/search", classes=ClassRights(default="interactive")))
    batch = request_of(scope, tier=TIER_BATCH).priority_class
    assert batch is not None
    assert batch.name == "batch"
