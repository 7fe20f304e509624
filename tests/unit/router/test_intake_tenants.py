"""Whose a request is, as the router takes it in."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvloom.access.cache_salts import CacheSalts
from kvloom.errors import KvloomError
from kvloom.tenancy.table import Tenant
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import Choice
from kvloom.v1.router_service_pb2 import Submit
from router.caller_scope import TRUSTED, CallerAccess, CallerScope
from router.core.events import Request
from router.intake import Intake
from tests.fakes.fake_control import SEARCH_KEY, two_organisations
from tests.fakes.tenants import change, identities_of

SALTS = CacheSalts(b"key")


def request_of(scope: CallerScope) -> Request:
    intake = Intake({}, 1000, lambda: False, cache_salts=SALTS)
    submit = Submit(
        request_id="r",
        model="m",
        prompt_token_ids=[1, 2],
        choices=[Choice(slot=1)],
        tenant="other/app",
        key_id="id-of-another",
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
