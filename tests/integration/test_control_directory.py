"""What administrators see and change, over gRPC and with both kinds of database."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from google.protobuf.field_mask_pb2 import FieldMask

from control.directory.methods import READS, WRITES
from kvloom.enums import ErrorReason
from kvloom.errors import KvloomError
from kvloom.v1 import control_service_pb2 as control_pb
from kvloom.v1.control_service_pb2 import KeyUse, ReportKeyUsesRequest
from kvloom_common.tenancy.limits import Limits
from kvloom_common.tenancy.scopes import ClassRights
from tests.fakes.control_world import ControlWorld, Pb, control_world


@pytest.fixture
async def world(database_url: str) -> AsyncIterator[ControlWorld]:
    async with control_world(database_url) as world:
        yield world


async def make_key(world: ControlWorld, project: str = "acme/search", **fields: Any) -> Pb.CreateKeyResponse:
    return await world.ask("CreateKey", key=Pb.ApiKey(project=project, **fields), create_project=True)


async def audited(world: ControlWorld, **fields: Any) -> list[tuple[str, str]]:
    entries = (await world.ask("ListAuditEntries", **fields)).entries
    return [(entry.action, entry.target) for entry in reversed(entries)]


def reason_of(info: pytest.ExceptionInfo[KvloomError]) -> ErrorReason:
    return info.value.reason


def test_every_method_of_the_service_has_an_implementation() -> None:
    """A method that is declared and missing would answer UNIMPLEMENTED."""
    declared = Pb.DESCRIPTOR.services_by_name["DirectoryService"].methods_by_name
    assert sorted(declared) == sorted([*READS, *WRITES])


async def test_a_key_is_shown_once_and_found_by_its_digest(world: ControlWorld) -> None:
    """The database and the table have the hash only; nobody who reads them can use the key."""
    made = await make_key(world, name="ci", models=["smol*"], scopes=["inference"])
    assert made.secret.startswith("kvl-")
    assert made.key.prefix == made.secret[:8]
    table = await world.table()
    key = table.key_of_digest(hashlib.sha256(made.secret.encode()).digest())
    assert key is not None
    assert (key.id, key.tenant, key.scopes, key.models) == (made.key.id, "acme/search", ("inference",), ("smol*",))
    assert table.is_active(key, world.now)
    entries = (await world.ask("ListAuditEntries")).entries
    assert [entry.action for entry in entries] == ["CreateKey", "CreateProject", "CreateOrganisation"]
    assert made.secret not in str(entries)
    assert "digest" not in str(entries)


async def test_a_revoked_key_leaves_the_table_and_stays_in_the_list(world: ControlWorld) -> None:
    """Who had which key must be known afterwards."""
    made = await make_key(world)
    await world.ask("RevokeKey", id=made.key.id)
    assert (await world.table()).key(made.key.id) is None
    assert not (await world.ask("ListKeys")).keys
    (listed,) = (await world.ask("ListKeys", show_revoked=True)).keys
    assert listed.revoked_at == world.now
    with pytest.raises(KvloomError) as info:
        await world.ask("RotateKey", id=made.key.id)
    assert reason_of(info) == ErrorReason.FAILED_PRECONDITION


async def test_a_rotated_key_is_accepted_for_its_grace_beside_the_new_one(world: ControlWorld) -> None:
    """Clients are given the new key while the old one still works."""
    old = await make_key(world, models=["a"], scopes=["usage"], limits=control_pb.Limits(requests_per_minute=5))
    new = await world.ask("RotateKey", id=old.key.id, grace_seconds=60.0)
    assert new.secret != old.secret
    table = await world.table()
    old_key, new_key = table.key(old.key.id), table.key(new.key.id)
    assert old_key is not None
    assert new_key is not None
    assert old_key.expires_at == world.now + 60.0
    assert (new_key.models, new_key.scopes, new_key.limits) == (old_key.models, old_key.scopes, old_key.limits)
    assert table.is_active(new_key, world.now + 61.0)
    assert not table.is_active(old_key, world.now + 61.0)


async def test_a_rotated_key_shares_the_account_of_the_key_that_it_replaces(world: ControlWorld) -> None:
    """By rotating its key before a limit was reached, a tenant had 156 tokens of a budget of 60."""
    first = await make_key(world, limits=control_pb.Limits(requests_per_minute=5))
    second = await world.ask("RotateKey", id=first.key.id, grace_seconds=60.0)
    third = await world.ask("RotateKey", id=second.key.id, grace_seconds=60.0)
    other = await make_key(world)
    assert [made.key.account for made in (first, second, third, other)] == ["", first.key.id, first.key.id, ""]
    mask = {"paths": ["limits.requests_per_minute"]}
    raised = Pb.ApiKey(id=second.key.id, limits=control_pb.Limits(requests_per_minute=9))
    await world.ask("UpdateKey", key=raised, update_mask=mask)
    table = await world.table()
    for made in (first, second, third):
        key = table.key(made.key.id)
        assert key is not None
        assert (key.account or key.id, key.limits.requests_per_minute) == (first.key.id, 9)
    untouched = table.key(other.key.id)
    assert untouched is not None
    assert not untouched.limits.requests_per_minute


async def test_priority_classes_reach_the_table_from_all_three_levels(world: ControlWorld) -> None:
    """The operator bounds an organisation, its administrators their projects and keys; the audit has who did it."""
    rights = {"priority_classes": ["gold", "batch", "gold"], "default_priority_class": "batch"}
    made = await make_key(world, **rights)
    new = await world.ask("RotateKey", id=made.key.id, grace_seconds=60.0)
    fields = {"priority_classes": ["batch"], "default_priority_class": ""}
    mask = {"paths": list(fields)}
    await world.ask("UpdateProject", project=Pb.Project(id="acme/search", **fields), update_mask=mask)
    await world.ask("UpdateOrganisation", organisation=Pb.Organisation(id="acme", **fields), update_mask=mask)
    table = await world.table()
    key, tenant, organisation = table.key(new.key.id), table.tenant("acme/search"), table.organisation("acme")
    assert key is not None
    assert tenant is not None
    assert organisation is not None
    assert key.classes == ClassRights(("gold", "batch"), "batch")
    assert tenant.classes == organisation.classes == ClassRights(("batch",))
    last = (await world.ask("ListAuditEntries")).entries[0]
    assert (last.action, '"priority_classes":["batch"]' in last.after) == ("UpdateOrganisation", True)
    only_default = {"paths": ["default_priority_class"]}
    await world.ask("UpdateKey", key=Pb.ApiKey(id=new.key.id), update_mask=only_default)
    silver = Pb.ApiKey(id=new.key.id, default_priority_class="silver")
    with pytest.raises(KvloomError) as info:
        await world.ask("UpdateKey", key=silver, update_mask=only_default)
    assert (reason_of(info), info.value.field) == (ErrorReason.INVALID_ARGUMENT, "key.default_priority_class")


async def test_guardrails_reach_the_table_and_an_administrator_only_adds_to_the_operators(world: ControlWorld) -> None:
    """A tenant chooses among the rules of the safety policy; what the operator has chosen for it stays."""
    await make_key(world)
    mask = {"paths": ["guardrails"]}

    async def choose(*names: str, **more: Any) -> Any:
        return await world.ask(
            "UpdateProject", project=Pb.Project(id="acme/search", guardrails=names), update_mask=mask, **more
        )

    await choose("names", as_admin_of="acme")
    assert list((await choose("codes", "codes")).project.guardrails) == ["codes"]
    await choose("names", "codes", as_admin_of="acme")
    tenant = (await world.table()).tenant("acme/search")
    assert tenant is not None
    assert tenant.guardrails == ("names", "codes")
    with pytest.raises(KvloomError) as info:
        await choose("names", as_admin_of="acme")
    assert (reason_of(info), info.value.field) == (ErrorReason.PERMISSION_DENIED, "project.guardrails")
    for names in ([""], ["x" * 129], [f"rule-{number}" for number in range(17)]):
        with pytest.raises(KvloomError) as info:
            await choose(*names)
        assert (reason_of(info), info.value.field) == (ErrorReason.INVALID_ARGUMENT, "project.guardrails")
    assert list((await choose()).project.guardrails) == []


async def test_residency_reaches_the_table_and_an_administrator_only_narrows_the_operators(world: ControlWorld) -> None:
    """Where requests are computed may be the operator's promise to a customer, which no project's administrator undoes;
    an empty list would allow every cell, so that it has to be asked for."""
    await make_key(world)
    mask = {"paths": ["residency"]}
    project = Pb.Project(id="acme/search", residency=["west", "east", "west"])
    await world.ask("UpdateProject", project=project, update_mask=mask)
    await world.ask("UpdateOrganisation", organisation=Pb.Organisation(id="acme", residency=["east"]), update_mask=mask)
    table = await world.table()
    tenant, organisation = table.tenant("acme/search"), table.organisation("acme")
    assert tenant is not None
    assert organisation is not None
    assert (tenant.residency, organisation.residency) == (("west", "east"), ("east",))
    for cells in (["south"], ["*"]):
        widened = Pb.Project(id="acme/search", residency=cells)
        with pytest.raises(KvloomError) as info:
            await world.ask("UpdateProject", project=widened, update_mask=mask, as_admin_of="acme")
        assert (reason_of(info), info.value.field) == (ErrorReason.PERMISSION_DENIED, "project.residency")
    for cells in ([], ["Not a name"]):
        with pytest.raises(KvloomError) as info:
            await world.ask("UpdateProject", project=Pb.Project(id="acme/search", residency=cells), update_mask=mask)
        assert (reason_of(info), info.value.field) == (ErrorReason.INVALID_ARGUMENT, "project.residency")
    shown = await world.ask("UpdateProject", project=Pb.Project(id="acme/search", residency=["*"]), update_mask=mask)
    assert list(shown.project.residency) == []


async def test_limits_are_those_of_the_tier_and_the_account_own_ones_over_them(world: ControlWorld) -> None:
    """A change of a tier reaches everything that has it, in one version."""
    tier = Pb.LimitTier(name="free", limits=control_pb.Limits(requests_per_minute=10, tokens_per_day=1000))
    await world.ask("SetLimitTier", tier=tier)
    made = await make_key(world, tier="free", limits=control_pb.Limits(requests_per_minute=3))
    table = await world.table()
    assert (found := table.key(made.key.id)) is not None
    assert found.limits == Limits(requests_per_minute=3, tokens_per_day=1000)
    tier.limits.tokens_per_day = 7
    await world.ask("SetLimitTier", tier=tier)
    assert (found := (await world.table()).key(made.key.id)) is not None
    assert found.limits == Limits(requests_per_minute=3, tokens_per_day=7)
    with pytest.raises(KvloomError, match=made.key.id) as info:
        await world.ask("DeleteLimitTier", name="free")
    assert reason_of(info) == ErrorReason.FAILED_PRECONDITION
    mask = FieldMask(paths=["limits.requests_per_minute", "tier"])
    await world.ask("UpdateKey", key=Pb.ApiKey(id=made.key.id), update_mask=mask)
    assert (found := (await world.table()).key(made.key.id)) is not None
    assert found.limits == Limits()
    await world.ask("DeleteLimitTier", name="free")


async def test_a_mask_changes_only_what_it_names(world: ControlWorld) -> None:
    """Two administrators who change different fields must not undo each other's work."""
    made = await make_key(world, name="a", limits=control_pb.Limits(requests_per_minute=1, tokens_per_minute=2))
    change = Pb.ApiKey(id=made.key.id, name="ignored", limits=control_pb.Limits(tokens_per_minute=9))
    updated = await world.ask("UpdateKey", key=change, update_mask=FieldMask(paths=["limits.tokens_per_minute"]))
    assert (updated.key.name, updated.key.limits.requests_per_minute, updated.key.limits.tokens_per_minute) == (
        "a",
        1,
        9,
    )
    for paths in ([], ["project"], ["limits.coffee"], ["name.limits"]):
        with pytest.raises(KvloomError) as info:
            await world.ask("UpdateKey", key=change, update_mask=FieldMask(paths=paths))
        assert (reason_of(info), info.value.field) == (ErrorReason.INVALID_ARGUMENT, "update_mask")


async def test_a_users_key_may_do_no_more_than_their_role_and_ends_with_it(world: ControlWorld) -> None:
    """Someone who leaves a team must not keep its keys."""
    await make_key(world)
    user = Pb.User(id="ann@acme.com", memberships=[Pb.Membership(organisation="acme", role="admin")])
    await world.ask("CreateUser", user=user)
    made = await make_key(world, user="ann@acme.com", scopes=["admin", "inference"])

    async def scopes() -> tuple[str, ...] | None:
        key = (await world.table()).key(made.key.id)
        return None if key is None else key.scopes

    assert await scopes() == ("inference", "admin")
    await world.ask("SetMembership", user=user.id, membership=Pb.Membership(organisation="acme", role="member"))
    assert await scopes() == ("inference",)
    with pytest.raises(KvloomError, match="excludes admin"):
        await make_key(world, user="ann@acme.com", scopes=["admin"])
    disabled = FieldMask(paths=["disabled"])
    await world.ask("UpdateUser", user=Pb.User(id=user.id, disabled=True), update_mask=disabled)
    assert await scopes() is None
    await world.ask("UpdateUser", user=Pb.User(id=user.id, disabled=False), update_mask=disabled)
    assert await scopes() == ("inference",)
    await world.ask("DeleteMembership", user=user.id, organisation="acme")
    assert await scopes() is None
    with pytest.raises(KvloomError, match="no role"):
        await make_key(world, user="ann@acme.com")


async def test_an_administrator_sees_and_changes_only_the_own_organisation(world: ControlWorld) -> None:
    """A tenant must not learn of another one, not even that it exists."""
    ours, theirs = await make_key(world), await make_key(world, "rival/secret")
    await world.ask("CreateUser", user=Pb.User(id="both", memberships=[
        Pb.Membership(organisation=one, role="member") for one in ("acme", "rival")
    ]))  # fmt: skip

    async def ask(method: str, **fields: Any) -> Any:
        return await world.ask(method, as_admin_of="acme", **fields)

    async def refused(method: str, **fields: Any) -> ErrorReason:
        with pytest.raises(KvloomError) as info:
            await ask(method, **fields)
        return reason_of(info)

    assert [one.id for one in (await ask("ListKeys")).keys] == [ours.key.id]
    assert [one.id for one in (await ask("ListProjects")).projects] == ["acme/search"]
    assert [one.id for one in (await ask("ListOrganisations")).organisations] == ["acme"]
    (user,) = (await ask("ListUsers")).users
    assert [one.organisation for one in user.memberships] == ["acme"]
    assert {entry.organisation for entry in (await ask("ListAuditEntries")).entries} == {"acme"}
    missing, denied = ErrorReason.NOT_FOUND, ErrorReason.PERMISSION_DENIED
    assert await refused("GetKey", id=theirs.key.id) == missing
    assert await refused("RevokeKey", id=theirs.key.id) == missing
    assert await refused("GetProject", id="rival/secret") == missing
    assert await refused("ListKeys", organisation="rival") == missing
    assert await refused("CreateKey", key=Pb.ApiKey(project="rival/secret")) == missing
    assert await refused("CreateProject", project=Pb.Project(id="rival/new")) == missing
    assert await refused("DeleteMembership", user="both", organisation="rival") == missing
    assert await refused("DeleteUser", id="both") == denied
    assert await refused("CreateOrganisation", organisation=Pb.Organisation(id="new")) == denied
    assert await refused("DeleteOrganisation", id="acme") == denied
    assert await refused("SetLimitTier", tier=Pb.LimitTier(name="x")) == denied
    assert await refused("CreatePrice", price=control_pb.Price(model="*")) == denied
    await ask("CreateKey", key=Pb.ApiKey(project="acme/search"))
    await ask("DeleteMembership", user="both", organisation="acme")
    assert not (await ask("ListUsers")).users


async def test_prices_have_dates_and_stay_once_they_were_in_force(world: ControlWorld) -> None:
    """What was priced must be explainable afterwards."""
    now = control_pb.Price(model="smol", effective_from=world.now, prompt_nanos=100, output_nanos=300)
    later = control_pb.Price(
        model="smol", effective_from=world.now + 50.0, prompt_nanos=1, cached_nanos=0, batch_percent=50
    )
    first, second = [(await world.ask("CreatePrice", price=price)).price for price in (now, later)]
    table = await world.table()
    assert table.prices.at("smol:adapter", world.now).cached_nanos == 100  # absent: as the others
    assert table.prices.at("smol", world.now).batch_percent == 100
    assert table.prices.at("smol", world.now + 50.0).cached_nanos == 0
    with pytest.raises(KvloomError, match="in force"):
        await world.ask("DeletePrice", id=first.id)
    with pytest.raises(KvloomError, match="same time"):
        await world.ask("CreatePrice", price=now)
    await world.ask("DeletePrice", id=second.id)
    assert [price.id for price in (await world.table()).prices] == [first.id]


async def test_a_text_that_a_database_cannot_store_is_no_failure_of_it(world: ControlWorld) -> None:
    """PostgreSQL has no text with a zero, which whoever sent it took for an outage."""
    with pytest.raises(KvloomError) as info:
        await world.ask("GetProject", id="acme/\0")
    assert info.value.reason in (ErrorReason.INVALID_ARGUMENT, ErrorReason.NOT_FOUND)


def _token(key: object) -> str:
    return base64.urlsafe_b64encode(str(key).encode()).decode()


async def test_the_id_of_what_was_deleted_is_never_given_again(world: ControlWorld) -> None:
    """An organisation that was made under the name of an old one had its usage, its audit, and hits in the caches of
    results and prompts, which all know a tenant by its id."""
    made = await world.ask("CreateKey", key=Pb.ApiKey(project="acme/search"), create_project=True)
    role = Pb.Membership(organisation="acme", role="member")
    await world.ask("CreateUser", user=Pb.User(id="ada", memberships=[role]))
    await world.ask("DeleteUser", id="ada")
    await world.ask("DeleteProject", id="acme/search")

    async def refused(method: str, **fields: Any) -> None:
        with pytest.raises(KvloomError, match="Ids are never used again") as info:
            await world.ask(method, **fields)
        assert info.value.reason == ErrorReason.FAILED_PRECONDITION

    for admin in (None, "acme"):
        await refused("CreateProject", as_admin_of=admin, project=Pb.Project(id="acme/search"))
    await refused("CreateUser", user=Pb.User(id="ada"))
    await refused("CreateKey", key=Pb.ApiKey(project="acme/search"), create_project=True)
    await world.ask("CreateProject", project=Pb.Project(id="acme/search-2"))
    await world.ask("DeleteProject", id="acme/search-2")
    await world.ask("DeleteOrganisation", id="acme")
    await refused("CreateOrganisation", organisation=Pb.Organisation(id="acme"))
    await refused("CreateKey", key=Pb.ApiKey(project="acme/new"), create_project=True)
    await refused("CreateProject", project=Pb.Project(id="acme/new"), create_organisation=True)
    await world.ask("CreateOrganisation", organisation=Pb.Organisation(id="acme-2"))
    assert made.key.id not in {key.id for key in (await world.ask("ListKeys", show_revoked=True)).keys}


async def test_lists_come_in_pages(world: ControlWorld) -> None:
    """A fabric has a million keys; what is added in between must not shift a page."""
    for name in "abcdefg":
        await world.ask("CreateOrganisation", organisation=Pb.Organisation(id=f"org-{name}"))
    found: list[str] = []
    token = ""
    while True:
        page = await world.ask("ListOrganisations", page_size=3, page_token=token)
        found += [one.id for one in page.organisations]
        if not (token := page.next_page_token):
            break
    assert found == [f"org-{name}" for name in "abcdefg"]
    audit = await world.ask("ListAuditEntries", page_size=4)
    rest = await world.ask("ListAuditEntries", page_size=4, page_token=audit.next_page_token)
    assert [entry.number for entry in (*audit.entries, *rest.entries)] == [7, 6, 5, 4, 3, 2, 1]
    for token in ("%", "eA==", _token(2**63), _token(-(2**64)), _token("9" * 5000)):  # no base64, no number, too large
        with pytest.raises(KvloomError) as info:
            await world.ask("ListAuditEntries", page_token=token)
        assert info.value.field == "page_token"
    for method in ("ListOrganisations", "ListProjects", "ListUsers", "ListKeys", "ListLimitTiers", "ListPrices"):
        with pytest.raises(KvloomError) as info:  # PostgreSQL has no such text
            await world.ask(method, page_token=_token("a\0b"))
        assert info.value.field == "page_token"
        await world.ask(method, page_token=_token("\N{PILE OF POO}" * 1000))


async def test_a_change_that_fails_leaves_nothing_behind(world: ControlWorld) -> None:
    """Neither half of it, nor an entry in the audit, nor a version."""
    version = (await world.table()).version
    with pytest.raises(KvloomError):
        await make_key(world, scopes=["everything"])
    assert (await world.table()).version == version
    assert await audited(world) == []
    assert not (await world.ask("ListOrganisations")).organisations


async def test_deleted_projects_take_their_keys_with_them(world: ControlWorld) -> None:
    """A key without a project must not be accepted."""
    made = await make_key(world)
    with pytest.raises(KvloomError, match="has projects"):
        await world.ask("DeleteOrganisation", id="acme")
    await world.ask("DeleteProject", id="acme/search")
    await world.ask("DeleteOrganisation", id="acme")
    table = await world.table()
    assert (table.key(made.key.id), table.num_tenants, table.organisation("acme")) == (None, 0, None)
    assert await audited(world, target="tenant:acme/search") == [
        ("CreateProject", "tenant:acme/search"), ("DeleteProject", "tenant:acme/search"),
    ]  # fmt: skip


async def test_the_audit_says_what_was_before_and_after(world: ControlWorld) -> None:
    """Who has raised a limit, and from what."""
    made = await make_key(world)
    change = Pb.ApiKey(id=made.key.id, limits=control_pb.Limits(requests_per_minute=5))
    await world.ask("UpdateKey", key=change, update_mask=FieldMask(paths=["limits"]), actor="key:1234")
    entry = (await world.ask("ListAuditEntries", target=f"key:{made.key.id}")).entries[0]
    assert (entry.actor, entry.action, entry.at, entry.organisation) == ("key:1234", "UpdateKey", world.now, "acme")
    assert msgspec.json.decode(entry.before)["limits"] == {}
    assert msgspec.json.decode(entry.after)["limits"] == {"requests_per_minute": 5}


async def test_uses_are_noted_and_never_go_back(world: ControlWorld) -> None:
    """Several routers report the same key, late ones too; unused keys are the ones to revoke."""
    made = await make_key(world)
    uses = [KeyUse(key_id=made.key.id, at=at) for at in (50.0, 90.0, 70.0)]
    await world.control.ReportKeyUses(ReportKeyUsesRequest(uses=[*uses, KeyUse(key_id="gone", at=1.0)]))
    await world.control.ReportKeyUses(ReportKeyUsesRequest(uses=uses[:1]))
    assert (await world.ask("GetKey", id=made.key.id)).key.last_used_at == 90.0


async def test_an_identity_has_no_key_and_can_be_added_again(world: ControlWorld) -> None:
    """A certificate or a subject of an issuer is a member of a tenant like a key."""
    made = await make_key(world, id="cert:CN=batch")
    assert made.secret == ""
    assert made.key.id == "cert:CN=batch@acme/search"
    assert (key := (await world.table()).key(made.key.id)) is not None
    assert key.digest == b""
    with pytest.raises(KvloomError, match="exists already"):
        await make_key(world, id="cert:CN=batch")
    await world.ask("RevokeKey", id=made.key.id)
    await make_key(world, id="cert:CN=batch")


@pytest.mark.parametrize(
    ("method", "fields", "field"),
    [
        ("CreateOrganisation", {"organisation": Pb.Organisation(id="Acme")}, "organisation.id"),
        ("CreateProject", {"project": Pb.Project(id="acme")}, "project.id"),
        ("CreateUser", {"user": Pb.User(id="a b")}, "user.id"),
        ("CreateKey", {"key": Pb.ApiKey(project="a/b", models=["a*b"]), "create_project": True}, "key.models"),
        ("CreateKey", {"key": Pb.ApiKey(project="a/b", expires_at=5.0), "create_project": True}, "key.expires_at"),
        ("CreateProject", {"project": Pb.Project(id="a/b", priority_classes=["A b"])}, "project.priority_classes"),
        (
            "CreateOrganisation",
            {"organisation": Pb.Organisation(id="a", priority_classes=["x"], default_priority_class="y")},
            "organisation.default_priority_class",
        ),
        (
            "CreateKey",
            {"key": Pb.ApiKey(project="a/b", expires_at=math.nan), "create_project": True},
            "key.expires_at",
        ),
        (
            "CreateKey",
            {"key": Pb.ApiKey(project="a/b", limits=control_pb.Limits(tokens_per_day=2**60)), "create_project": True},
            "key.limits.tokens_per_day",
        ),
        ("CreatePrice", {"price": control_pb.Price(model="")}, "price.model"),
        ("ListKeys", {"page_size": -1}, "page_size"),
    ],
)
async def test_invalid_values_are_refused_with_their_field(
    tmp_path_factory: pytest.TempPathFactory, method: str, fields: dict[str, Any], field: str
) -> None:
    """The message must lead to the mistake."""
    async with control_world(f"sqlite:///{tmp_path_factory.mktemp('control')}/control.db") as world:
        with pytest.raises(KvloomError) as info:
            await world.ask(method, **fields)
    assert (reason_of(info), info.value.field) == (ErrorReason.INVALID_ARGUMENT, field)


async def test_shares_of_kv_blocks_are_bounded_together(world: ControlWorld) -> None:
    """Shards cannot keep what is promised twice. Tiers count for each account that has them; what is lowered, or given
    back, is there for others."""
    half = control_pb.Limits(kv_share_percent=50)
    await world.ask("CreateProject", project=Pb.Project(id="acme/search", limits=half), create_organisation=True)
    await world.ask("CreateProject", project=Pb.Project(id="acme/maps"))
    mask = FieldMask(paths=["limits.kv_share_percent"])

    async def refused(method: str, **fields: Any) -> str:
        with pytest.raises(KvloomError, match="together") as info:
            await world.ask(method, **fields)
        assert reason_of(info) == ErrorReason.INVALID_ARGUMENT
        return info.value.field

    def organisation(percent: int) -> Pb.Organisation:
        return Pb.Organisation(id="acme", limits=control_pb.Limits(kv_share_percent=percent))

    field = await refused("UpdateOrganisation", organisation=organisation(41), update_mask=mask)
    assert field == "organisation.limits.kv_share_percent"
    await world.ask("UpdateOrganisation", organisation=organisation(20), update_mask=mask)
    await world.ask("SetLimitTier", tier=Pb.LimitTier(name="gold", limits=control_pb.Limits(kv_share_percent=20)))
    gold = FieldMask(paths=["tier"])
    await world.ask("UpdateProject", project=Pb.Project(id="acme/maps", tier="gold"), update_mask=gold)
    larger = Pb.LimitTier(name="gold", limits=control_pb.Limits(kv_share_percent=21))
    assert await refused("SetLimitTier", tier=larger) == "tier.limits.kv_share_percent"
    more = Pb.Project(id="acme/more", limits=control_pb.Limits(kv_share_percent=1))
    assert await refused("CreateProject", project=more) == "project.limits.kv_share_percent"
    await world.ask("UpdateOrganisation", organisation=organisation(0), update_mask=mask)
    await world.ask("CreateProject", project=more)
    table = await world.table()
    shares = {
        name: tenant.limits.kv_share_percent
        for name in ("search", "maps", "more")
        if (tenant := table.tenant(f"acme/{name}")) is not None
    }
    assert shares == {"search": 50, "maps": 20, "more": 1}


async def test_a_key_has_no_share_of_kv_blocks(world: ControlWorld) -> None:
    """Keys of one project share its cached prompts."""
    with pytest.raises(KvloomError) as info:
        await make_key(world, limits=control_pb.Limits(kv_share_percent=5))
    assert info.value.field == "key.limits.kv_share_percent"
    made = await make_key(world)
    mask = FieldMask(paths=["limits.kv_share_percent"])
    key = Pb.ApiKey(id=made.key.id, limits=control_pb.Limits(kv_share_percent=5))
    with pytest.raises(KvloomError) as info:
        await world.ask("UpdateKey", key=key, update_mask=mask)
    assert info.value.field == "key.limits.kv_share_percent"
