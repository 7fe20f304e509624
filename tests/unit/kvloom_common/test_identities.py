"""Who a caller is, by the table of tenants and by certificates."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.access.caller_access import check_models, check_scope, may_use
from kvloom_common.access.identities import Identities, contents_of
from kvloom_common.access.kv_shares import CacheSalts
from kvloom_common.access.tenants import Tenants
from kvloom_common.config import (
    CallersConfig,
    CertificateConfig,
    ConfigError,
    ControlConfig,
    KvloomConfig,
    dump_config,
)
from kvloom_common.process.control_socket import stored_config
from kvloom_common.process.watched_files import following
from kvloom_common.tenancy.principal import Principal
from kvloom_common.tenancy.table import Organisation, Tenant
from kvloom_common.trust.fabric_trust import NO_SECRET
from kvloom_common.trust.secret import FabricSecret
from tests.fakes.certificates import Authority
from tests.fakes.fake_control import MAPS_KEY, SEARCH_KEY, SEARCH_KEY_2, key_of, two_organisations
from tests.fakes.tenants import change, identities_of, table_of
from tests.waiting import eventually

R = ErrorReason


def reason_of(identities: Identities, key: str, certificate: bytes = b"") -> int:
    try:
        identities.at_once(key, certificate)
    except KvloomError as error:
        return error.reason
    return 0


def test_only_active_keys_are_accepted(tmp_path: Path) -> None:
    """Expired keys, and those of disabled projects and organisations, open nothing."""
    expired = key_of("kvl-old", "acme/search", expires_at=1.0)
    identities = identities_of(tmp_path, [*two_organisations(), expired])
    principal = identities.at_once(SEARCH_KEY, b"")
    assert principal is not None
    assert (principal.tenant, principal.key_id) == ("acme/search", f"id-{SEARCH_KEY}")
    for wrong in ("", "kvl-old", SEARCH_KEY + "x", "x" * 10_000, "\udcff", "a.b.c"):
        assert reason_of(identities, wrong) == R.ERROR_REASON_UNAUTHENTICATED
    change(identities, Tenant("acme/search", disabled=True))
    assert reason_of(identities, SEARCH_KEY) == R.ERROR_REASON_UNAUTHENTICATED
    assert reason_of(identities, MAPS_KEY) == 0
    change(identities, Organisation("acme", disabled=True))
    assert reason_of(identities, MAPS_KEY) == R.ERROR_REASON_UNAUTHENTICATED


def test_a_cell_refuses_the_tenants_that_must_not_use_it() -> None:
    """Residency holds at the door of edges and routers, for keys and other identities, and lists of a project and its
    organisation hold both. A fabric that names no cell has but one."""
    entries = [*two_organisations(), Organisation("acme", residency=("west", "east"))]
    own, elsewhere = Tenant("acme/search", residency=("west",)), Tenant("acme/maps", residency=("south", "east"))
    for cell, refused in (("west", {MAPS_KEY}), ("east", {SEARCH_KEY}), ("north", {MAPS_KEY, SEARCH_KEY}), ("", set())):
        tenants = Tenants(60.0, cell=cell)
        tenants.use(table_of([*entries, own, elsewhere]), 0.0)
        tenants.set_connected(True)
        for key in (MAPS_KEY, SEARCH_KEY):
            if key in refused:
                with pytest.raises(KvloomError) as info:
                    tenants.of_credential(key)
                assert info.value.reason == R.ERROR_REASON_CELL_UNAVAILABLE
            else:
                principal = tenants.of_credential(key)
                assert tenants.renewed(principal) == principal
        if SEARCH_KEY in refused:
            with pytest.raises(KvloomError, match="west"):
                tenants.of_identity("oidc:x", "acme/search", ())


def test_a_key_that_was_used_stops_working_when_it_ends(tmp_path: Path) -> None:
    """Holders of keys are kept between requests, but neither beyond the end of their keys nor beyond a revocation."""
    now = 100.0
    tenants = Tenants(60.0, now=lambda: now, monotonic=lambda: now)
    known = identities_of(tmp_path, [*two_organisations(), key_of("kvl-short", "acme/search", expires_at=101.0)])
    tenants.use(known.tenants.table, now)
    tenants.set_connected(True)
    assert tenants.of_credential("kvl-short") is tenants.of_credential("kvl-short")
    now = 101.0
    with pytest.raises(KvloomError):
        tenants.of_credential("kvl-short")
    principal = tenants.of_credential(SEARCH_KEY)
    change(known, removed_keys=[principal.key_id])
    with pytest.raises(KvloomError):
        tenants.of_credential(SEARCH_KEY)


def test_nobody_is_served_without_a_table(tmp_path: Path) -> None:
    """Clients must tell "not now" from "never"."""
    config = KvloomConfig(data_dir=str(tmp_path), control=ControlConfig(enabled=True))
    identities = Identities(config, "edge-0", NO_SECRET)
    assert reason_of(identities, SEARCH_KEY) == reason_of(identities, "") == R.ERROR_REASON_AUTH_UNAVAILABLE


def test_keys_of_one_tenant_are_one_caller(tmp_path: Path) -> None:
    """Who replaces a key must keep its cache and its requests."""
    identities = identities_of(tmp_path, two_organisations())
    first, second = identities.at_once(SEARCH_KEY, b""), identities.at_once(SEARCH_KEY_2, b"")
    assert first is not None
    assert second is not None
    assert first.tenant == second.tenant
    assert first.key_id != second.key_id


class _Named:
    def __init__(self, name: str) -> None:
        self.name = name


MODELS = {"large": _Named("large"), "alias": _Named("large"), "style": _Named("large:style")}


@pytest.mark.parametrize(
    ("tenant_models", "key_models", "allowed"),
    [
        ((), (), {"large", "alias", "style", "unknown"}),
        (("large",), (), {"large", "alias"}),
        (("large*",), (), {"large", "alias", "style"}),
        (("alias",), (), {"alias"}),
        (("style",), (), {"style"}),
        (("large", "style"), ("large:style",), {"style"}),
        (("large",), ("style",), set()),
    ],
)
def test_a_model_must_be_allowed_by_the_tenant_and_the_key(
    tenant_models: tuple[str, ...], key_models: tuple[str, ...], allowed: set[str]
) -> None:
    """A model may be named in several ways; an adapter is not its model."""
    principal = Principal("t/p", "k", (), tenant_models, key_models)
    names = ("large", "alias", "style", "unknown")
    assert {name for name in names if may_use(principal, name, MODELS)} == allowed
    for name in names:
        if name not in allowed:
            with pytest.raises(KvloomError, match=name) as caught:
                check_models(principal, (name,), MODELS)
            assert (caught.value.reason, caught.value.field) == (R.ERROR_REASON_PERMISSION_DENIED, "model")


def test_a_scope_is_needed_and_none_includes_another() -> None:
    """A key for a bill must not answer prompts, and one for prompts must not make keys."""
    with pytest.raises(KvloomError, match="admin"):
        check_scope(Principal("t/p", "k", ("inference", "usage")), "admin")
    check_scope(Principal("t/p", "k", ("usage",)), "usage")


# -- certificates -----------------------------------------------------------------------------------------------------

SPIFFE = "spiffe://example.org/search/worker-1"


def test_a_certificate_belongs_to_a_tenant(tmp_path: Path) -> None:
    """Workloads have certificates of a mesh instead of keys."""
    authority = Authority("mesh")
    by_uri, _ = authority.issue("worker", SPIFFE)
    by_name, _ = authority.issue("maps")
    stranger, _ = authority.issue("worker", "spiffe://example.org/searching")
    certificates = [
        CertificateConfig(tenant="acme/search", uri="spiffe://example.org/search/*"),
        CertificateConfig(tenant="acme/maps", common_name="maps", role="reader"),
    ]
    identities = identities_of(tmp_path, two_organisations(), certificates=certificates)
    found = identities.at_once("", by_uri)
    assert found is not None
    assert (found.tenant, found.key_id) == ("acme/search", f"cert:{SPIFFE}@acme/search")
    assert found.has_scope("inference")
    maps = identities.at_once("", by_name)
    assert maps is not None
    assert (maps.tenant, maps.has_scope("inference")) == ("acme/maps", False)
    assert reason_of(identities, "", stranger) == R.ERROR_REASON_UNAUTHENTICATED
    assert reason_of(identities, "", b"no certificate") == R.ERROR_REASON_UNAUTHENTICATED
    assert reason_of(identities, "wrong", by_uri) == R.ERROR_REASON_UNAUTHENTICATED  # the credential counts
    ended = key_of("", "acme/search", f"cert:{SPIFFE}@acme/search")
    change(identities, msgspec.structs.replace(ended, digest=b"", expires_at=1.0))
    assert reason_of(identities, "", by_uri) == R.ERROR_REASON_UNAUTHENTICATED


def test_names_that_only_look_like_a_match_do_not_count() -> None:
    """The common name is not a URI, and two common names are none."""
    authority = Authority("mesh")
    assert contents_of(authority.issue(SPIFFE)[0])[:2] == ([], SPIFFE)
    assert contents_of(authority.issue("a", "x", "y")[0])[:2] == (["x", "y"], "a")


def test_settings_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    """An operator must not believe in a check that does not happen."""
    config = KvloomConfig(data_dir=str(tmp_path), control=ControlConfig(enabled=True))
    config.callers = CallersConfig(provider="x")
    with pytest.raises(ConfigError, match=r"callers\.provider"):
        Identities(config, "edge-0", NO_SECRET)
    config.callers = CallersConfig()
    config.control.certificates = [CertificateConfig(tenant="a/b", common_name="x")]
    with pytest.raises(ConfigError, match="client_ca_file"):
        Identities(config, "edge-0", NO_SECRET)
    for wrong in ({"common_name": "a", "uri": "b"}, {}, {"uri": "*"}):
        with pytest.raises(ValueError, match="uri"):
            CertificateConfig(tenant="a/b", **wrong)


# -- cache salts ------------------------------------------------------------------------------------------------------


def test_salts_separate_callers_unless_they_share_a_scope() -> None:
    """A name that looks like a scope must not open that scope."""
    scopes = {"acme/search": "team", "acme/maps": "team"}
    key = FabricSecret.draw().cache_key
    salts = CacheSalts(key, lambda caller: scopes.get(caller, ""))
    assert salts.of("acme/search") == salts.of("acme/maps")
    others = [salts.of(name) for name in ("team", "other/app", "scope", "")]
    assert len({salts.of("acme/search"), *others}) == 5
    assert CacheSalts(key).of("other/app") == salts.of("other/app")


def test_salts_cannot_be_guessed_and_survive_a_rotation_of_the_secret() -> None:
    """They are an HMAC with a key that only the fabric has."""
    secret = FabricSecret.draw()
    salt = CacheSalts(secret.cache_key).of("acme/search")
    assert "acme" not in salt
    assert salt != CacheSalts(FabricSecret.draw().cache_key).of("acme/search")
    rotated = secret.with_accepted(b"x" * 32).with_used(b"x" * 32).without_others()
    assert salt == CacheSalts(rotated.cache_key).of("acme/search")
    assert secret.cache_key != secret.caller_key


async def test_the_operators_organisation_is_followed(tmp_path: Path) -> None:
    """Who is no operator any more must not stay one until the next restart, and a new one needs none."""
    identities = identities_of(tmp_path, two_organisations(), operator_organisation="acme")
    principal = identities.at_once(SEARCH_KEY, b"")
    assert principal is not None
    assert identities.administered_by(principal) is None
    path = stored_config(tmp_path)
    path.parent.mkdir()
    async with following(identities):
        dump_config(KvloomConfig(control=ControlConfig(enabled=True, operator_organisation="other")), path)
        assert await eventually(lambda: identities.administered_by(principal), "it is known") == "acme"
