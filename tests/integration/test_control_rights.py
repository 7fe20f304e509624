"""An administrator of an organisation can take nothing from others, nor from the operator of the fabric: over gRPC,
with both kinds of database, and with the table that edges and routers get."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from google.protobuf.field_mask_pb2 import FieldMask

from control.usage.account_limits import hard_limits
from control.usage.accounts import Budget
from kvloom.enums import ErrorReason
from kvloom.errors import KvloomError
from kvloom.v1.control_service_pb2 import BUDGET_UNIT_TOKENS, Limits
from kvloom_common.access.tenants import Tenants
from kvloom_common.tenancy.principal import Principal
from tests.fakes.control_world import ControlWorld, Pb, control_world

SCOPES = ("inference", "usage")
ADA = "oidc:login:ada"
DENIED, MISSING, INVALID = ErrorReason.PERMISSION_DENIED, ErrorReason.NOT_FOUND, ErrorReason.INVALID_ARGUMENT


@pytest.fixture
async def world(database_below_url: str) -> AsyncIterator[ControlWorld]:
    async with control_world(database_below_url) as world:
        for project in ("acme/search", "rival/chat"):
            await world.ask("CreateProject", project=Pb.Project(id=project), create_organisation=True)
        yield world


async def refusal_of(world: ControlWorld, method: str, **fields: Any) -> tuple[ErrorReason, str]:
    """Why a call is refused, and the field that the refusal names."""
    with pytest.raises(KvloomError) as info:
        await world.ask(method, **fields)
    return info.value.reason, info.value.field


async def shown_by_ada(world: ControlWorld, tenant: str = "acme/search") -> Principal:
    """Who someone is, for an edge or a router, whose token says that this is their tenant. Raises KvloomError."""
    tenants = Tenants(max_stale_seconds=60.0)
    tenants.use(await world.table(), time.time())
    tenants.set_connected(True)
    return tenants.of_identity(ADA, tenant, SCOPES, user="ada")


async def assert_ended(world: ControlWorld, tenant: str = "acme/search") -> None:
    with pytest.raises(KvloomError) as info:
        await shown_by_ada(world, tenant)
    assert info.value.reason == ErrorReason.UNAUTHENTICATED


def project(**fields: Any) -> Any:
    return Pb.Project(id="acme/search", **fields)


def mask(*paths: str) -> FieldMask:
    return FieldMask(paths=paths)


# -- identities -------------------------------------------------------------------------------------------------------


async def add_ada(world: ControlWorld, tenant: str = "acme/search", **fields: Any) -> str:
    """Returns the id of the entry."""
    as_admin_of = fields.pop("as_admin_of", None)
    key = Pb.ApiKey(id=ADA, project=tenant, **fields)
    made_id: str = (await world.ask("CreateKey", key=key, as_admin_of=as_admin_of)).key.id
    return made_id


async def test_an_identity_whose_entry_is_revoked_is_ended(world: ControlWorld) -> None:
    """Its entry restricts it. Without one it would have all that its role gives."""
    entry = await add_ada(world, scopes=["usage"])
    assert (await shown_by_ada(world)).scopes == ("usage",)
    await world.ask("RevokeKey", id=entry)
    await assert_ended(world)
    await add_ada(world, scopes=["usage"])
    assert (await shown_by_ada(world)).scopes == ("usage",)


@pytest.mark.parametrize("how", ["disabled", "deleted", "no member"])
async def test_an_identity_ends_with_its_user(world: ControlWorld, how: str) -> None:
    """As the user's keys do: at the latest then the person has left."""
    roles = [Pb.Membership(organisation="acme", role="member")]
    await world.ask("CreateUser", user=Pb.User(id="ada", memberships=roles))
    await add_ada(world, user="ada")
    assert (await shown_by_ada(world)).scopes == SCOPES
    if how == "disabled":
        await world.ask("UpdateUser", user=Pb.User(id="ada", disabled=True), update_mask=mask("disabled"))
    elif how == "deleted":
        await world.ask("DeleteUser", id="ada")
    else:
        await world.ask("DeleteMembership", user="ada", organisation="acme")
    await assert_ended(world)


async def test_an_ended_identity_stays_ended_in_changes_that_follow(world: ControlWorld) -> None:
    """An edge learns of it by a change of one entry, and not by a snapshot."""
    entry = await add_ada(world)
    table = await world.table()
    from kvloom.v1.control_service_pb2 import FollowRequest

    await world.ask("RevokeKey", id=entry)
    call = world.control.Follow(FollowRequest(table_id=table.table_id, version=table.version))
    table.apply(await call.read())
    call.cancel()
    key = table.key(entry)
    assert key is not None
    assert not table.is_active(key, time.time())


async def test_an_organisation_cannot_take_an_identity_from_another(world: ControlWorld) -> None:
    """Whose it is, its issuer's claim says. What one organisation notes of it holds for that one only."""
    theirs = await add_ada(world, "rival/chat", scopes=["usage"], as_admin_of="rival")
    assert (await shown_by_ada(world)).scopes == SCOPES
    ours = await add_ada(world, as_admin_of="acme")  # says nothing of what others have
    assert {ours, theirs} == {f"{ADA}@acme/search", f"{ADA}@rival/chat"}
    await world.ask("RevokeKey", id=theirs, as_admin_of="rival")
    assert (await shown_by_ada(world)).scopes == SCOPES
    await assert_ended(world, "rival/chat")
    listed = (await world.ask("ListKeys", as_admin_of="acme")).keys
    assert [key.id for key in listed] == [ours]
    assert await refusal_of(world, "RevokeKey", id=theirs, as_admin_of="acme") == (MISSING, "")


async def test_what_the_operator_has_ended_only_the_operator_adds_again(world: ControlWorld) -> None:
    """Nor can an administrator revoke the entry and add it without what the operator has set of it."""
    limited = Limits(tokens_per_day=5)
    entry = await add_ada(world, scopes=["usage"], limits=limited)
    await world.ask("RevokeKey", id=entry, as_admin_of="acme")
    wider = Pb.ApiKey(id=ADA, project="acme/search")
    assert await refusal_of(world, "CreateKey", key=wider, as_admin_of="acme") == (DENIED, "key.scopes")
    await add_ada(world, scopes=["usage"], as_admin_of="acme")
    key = (await world.table()).key(entry)
    assert key is not None
    assert key.limits.tokens_per_day == 5
    await world.ask("RevokeKey", id=entry)
    again = Pb.ApiKey(id=ADA, project="acme/search", scopes=["usage"])
    assert (await refusal_of(world, "CreateKey", key=again, as_admin_of="acme"))[0] == DENIED
    await add_ada(world)


# -- what the operator sets -------------------------------------------------------------------------------------------


async def limits_in_force(world: ControlWorld, tenant: str = "acme/search") -> Any:
    found = (await world.table()).tenant(tenant)
    assert found is not None
    return found.limits


async def set_limits(world: ControlWorld, *, as_admin_of: str | None = "acme", **limits: Any) -> Any:
    """Change one limit each of the project."""
    paths = mask(*(f"limits.{name}" for name in limits))
    changed = project(limits=Limits(**limits))
    return (await world.ask("UpdateProject", project=changed, update_mask=paths, as_admin_of=as_admin_of)).project


async def test_an_administrator_cannot_lift_the_operators_limits(world: ControlWorld) -> None:
    """Neither by a larger limit, nor by none, a smaller weight of tokens, or shadow mode; the own ones hold beside
    them, and the operator can lift both."""
    await set_limits(world, as_admin_of=None, tokens_per_day=1000, requests_per_minute=60)
    shown = await set_limits(world, tokens_per_day=10**9, max_concurrent_requests=3)
    assert (shown.operator_limits.tokens_per_day, shown.effective_limits.tokens_per_day) == (1000, 1000)
    await set_limits(world, shadow=True, cached_token_percent=0)
    await set_limits(world, shadow=False, requests_per_minute=0)
    await world.ask("UpdateProject", project=project(), update_mask=mask("limits"), as_admin_of="acme")
    await set_limits(world, requests_per_minute=7, cached_token_percent=1)
    limits = await limits_in_force(world)
    assert (limits.tokens_per_day, limits.requests_per_minute, limits.shadow) == (1000, 7, False)
    assert limits.cached_token_percent == 100
    budget = Budget("tenant:acme/search", BUDGET_UNIT_TOKENS, "2026-11-27")
    await set_limits(world, tokens_per_day=10**9)
    async with world.database.reading() as connection:
        assert await hard_limits(connection, [budget]) == {budget: 1000}
    await set_limits(world, as_admin_of=None, tokens_per_day=0)
    assert (await limits_in_force(world)).tokens_per_day == 0


async def test_an_administrator_cannot_leave_a_tier(world: ControlWorld) -> None:
    """A tier's limits hold at least, also when the operator lowers them after the administrator has set own ones."""
    tier = Pb.LimitTier(name="bronze", limits=Limits(requests_per_minute=60))
    await world.ask("SetLimitTier", tier=tier)
    await world.ask("SetLimitTier", tier=Pb.LimitTier(name="gold"))
    await world.ask("UpdateProject", project=project(tier="bronze"), update_mask=mask("tier"))
    for other in ("gold", ""):
        leave = {"project": project(tier=other), "update_mask": mask("tier")}
        assert (await refusal_of(world, "UpdateProject", **leave, as_admin_of="acme"))[0] == DENIED
    await set_limits(world, requests_per_minute=1000)
    assert (await limits_in_force(world)).requests_per_minute == 60
    await set_limits(world, requests_per_minute=50)
    tier.limits.requests_per_minute = 5
    await world.ask("SetLimitTier", tier=tier)
    assert (await limits_in_force(world)).requests_per_minute == 5


@pytest.mark.parametrize(
    ("operators", "lifted", "stricter"),
    [
        ({"disabled": True}, {"disabled": False}, {"disabled": True}),
        ({"models": ["smol*", "big"]}, {"models": ["*"]}, {"models": ["smol-1"]}),
        ({"models": ["smol*", "big"]}, {"models": ["smo*"]}, {"models": ["smol-1*", "big"]}),
        ({"models": ["smol*", "big"]}, {"models": ["big*"]}, {"models": ["big"]}),
        ({"priority_classes": ["batch"]}, {"priority_classes": ["*"]}, {"priority_classes": ["batch"]}),
        ({"priority_classes": ["batch", "chat"]}, {"priority_classes": ["chat", "x"]}, {"priority_classes": ["chat"]}),
    ],
)
async def test_other_restrictions_of_the_operator_can_only_become_stricter(
    world: ControlWorld, operators: dict[str, Any], lifted: dict[str, Any], stricter: dict[str, Any]
) -> None:
    """Limits are not the only thing that an operator restricts."""
    (name,) = operators
    changed = mask(name)
    await world.ask("UpdateProject", project=project(**operators), update_mask=changed)
    refused = await refusal_of(
        world, "UpdateProject", project=project(**lifted), update_mask=changed, as_admin_of="acme"
    )
    assert refused == (DENIED, f"project.{name}")
    for by in ("acme", None):
        await world.ask("UpdateProject", project=project(**stricter), update_mask=changed, as_admin_of=by)
    await world.ask("UpdateProject", project=project(**lifted), update_mask=changed)


async def test_an_administrator_lifts_what_it_has_set_itself(world: ControlWorld) -> None:
    """Only what is the operator's is fixed."""
    own = project(models=["a"], disabled=True)
    await world.ask("UpdateProject", project=own, update_mask=mask("models", "disabled"), as_admin_of="acme")
    free = project(models=["*"])
    await world.ask("UpdateProject", project=free, update_mask=mask("models", "disabled"), as_admin_of="acme")
    found = (await world.table()).tenant("acme/search")
    assert found is not None
    assert (found.models, found.disabled) == ((), False)


async def test_a_new_project_or_key_is_under_the_limits_of_its_organisation(world: ControlWorld) -> None:
    """Another project or key leaves the limits of the old one, but never the organisation's."""
    organisation = Pb.Organisation(id="acme", limits=Limits(tokens_per_day=9))
    await world.ask("UpdateOrganisation", organisation=organisation, update_mask=mask("limits"))
    await world.ask("CreateProject", project=Pb.Project(id="acme/new"), as_admin_of="acme")
    table = await world.table()
    found = table.tenant("acme/new")
    assert found is not None
    of_organisation = table.organisation(found.organisation)
    assert of_organisation is not None
    assert of_organisation.limits.tokens_per_day == 9
    lifted = {"organisation": Pb.Organisation(id="acme"), "update_mask": mask("limits")}
    assert (await refusal_of(world, "UpdateOrganisation", **lifted, as_admin_of="acme"))[0] == DENIED


async def test_a_rotated_key_keeps_the_operators_limits(world: ControlWorld) -> None:
    """Its successor has the same rights."""
    made = await world.ask("CreateKey", key=Pb.ApiKey(project="acme/search", limits=Limits(tokens_per_day=9)))
    new = await world.ask("RotateKey", id=made.key.id, as_admin_of="acme")
    more = Pb.ApiKey(id=new.key.id, limits=Limits(tokens_per_day=99))
    changed = await world.ask("UpdateKey", key=more, update_mask=mask("limits"), as_admin_of="acme")
    assert changed.key.effective_limits.tokens_per_day == 9


@pytest.mark.parametrize("field", ["models", "priority_classes", "scopes"])
async def test_an_empty_list_never_allows_everything_unasked(world: ControlWorld, field: str) -> None:
    """Someone who removes the last name of a list means none, and would get all."""
    key = Pb.ApiKey(project="acme/search", models=["a"], priority_classes=["batch"], scopes=["usage"])
    made = await world.ask("CreateKey", key=key, as_admin_of="acme")
    emptied = {"key": Pb.ApiKey(id=made.key.id), "update_mask": mask(field), "as_admin_of": "acme"}
    assert await refusal_of(world, "UpdateKey", **emptied) == (INVALID, f"key.{field}")


# -- shares of KV blocks ----------------------------------------------------------------------------------------------


async def give_share(world: ControlWorld, organisation: str, percent: int) -> None:
    given = Pb.Organisation(id=organisation, limits=Limits(kv_share_percent=percent))
    await world.ask("UpdateOrganisation", organisation=given, update_mask=mask("limits.kv_share_percent"))


async def shares(world: ControlWorld) -> dict[str, int]:
    table = await world.table()
    found = {name: table.tenant(name) for name in ("acme/search", "acme/maps", "rival/chat")}
    by_name = {name: one.limits.kv_share_percent for name, one in found.items() if one is not None}
    for name in ("acme", "rival"):
        organisation = table.organisation(name)
        assert organisation is not None
        by_name[name] = organisation.limits.kv_share_percent
    return {name: percent for name, percent in by_name.items() if percent}


async def test_an_administrator_gets_no_share_that_the_operator_has_not_given(world: ControlWorld) -> None:
    """Shares take KV blocks from other tenants, and the operator must be able to grant them."""
    with pytest.raises(KvloomError) as info:
        await set_limits(world, kv_share_percent=90)
    assert (info.value.reason, info.value.field) == (INVALID, "project.limits.kv_share_percent")
    new = Pb.Project(id="acme/new", limits=Limits(kv_share_percent=90))
    assert (await refusal_of(world, "CreateProject", project=new, as_admin_of="acme"))[0] == INVALID
    await world.ask("SetLimitTier", tier=Pb.LimitTier(name="gold", limits=Limits(kv_share_percent=40)))
    gold = {"project": project(tier="gold"), "update_mask": mask("tier")}
    assert (await refusal_of(world, "UpdateProject", **gold, as_admin_of="acme"))[0] == DENIED
    await give_share(world, "rival", 90)
    assert await shares(world) == {"rival": 90}


async def test_an_administrator_divides_the_share_of_the_own_organisation(world: ControlWorld) -> None:
    """Never more in sum than it has, and nothing that others have changes by it."""
    await world.ask("CreateProject", project=Pb.Project(id="acme/maps"), as_admin_of="acme")
    await give_share(world, "acme", 40)
    await give_share(world, "rival", 50)
    await set_limits(world, kv_share_percent=30)
    assert await shares(world) == {"acme/search": 30, "acme": 10, "rival": 50}
    maps = Pb.Project(id="acme/maps", limits=Limits(kv_share_percent=11))
    divided = {"project": maps, "update_mask": mask("limits.kv_share_percent"), "as_admin_of": "acme"}
    assert (await refusal_of(world, "UpdateProject", **divided))[0] == INVALID
    maps.limits.kv_share_percent = 10
    await world.ask("UpdateProject", **divided)
    assert await shares(world) == {"acme/search": 30, "acme/maps": 10, "rival": 50}
    await give_share(world, "acme", 20)  # the operator is not held up by what was divided
    assert await shares(world) == {"acme": 20, "rival": 50}
    await set_limits(world, kv_share_percent=20)
    await world.ask("DeleteProject", id="acme/search", as_admin_of="acme")
    assert await shares(world) == {"acme": 20, "rival": 50}


async def test_a_share_of_a_project_that_the_operator_has_given_stays(world: ControlWorld) -> None:
    """It is in addition to that of the organisation, and no part of it."""
    await give_share(world, "acme", 20)
    await set_limits(world, as_admin_of=None, kv_share_percent=30)
    for percent in (0, 31):
        with pytest.raises(KvloomError) as info:
            await set_limits(world, kv_share_percent=percent)
        assert (info.value.reason, info.value.field) == (DENIED, "project.limits.kv_share_percent")
    assert await shares(world) == {"acme/search": 30, "acme": 20}
    await set_limits(world, as_admin_of=None, kv_share_percent=0)
    assert await shares(world) == {"acme": 20}


# -- users ------------------------------------------------------------------------------------------------------------


async def test_an_organisation_cannot_take_another_ones_user(world: ControlWorld) -> None:
    """Once a user is in two organisations, neither can disable them: so only the operator puts one into several."""
    member = Pb.Membership(organisation="acme", role="member")
    await world.ask("CreateUser", user=Pb.User(id="ann", memberships=[member]))
    await world.ask("CreateUser", user=Pb.User(id="acme/bob", memberships=[member]), as_admin_of="acme")
    taken = Pb.Membership(organisation="rival", role="reader")
    for user in ("ann", "acme/bob", "acme/none", "unknown"):
        refused = await refusal_of(world, "SetMembership", user=user, membership=taken, as_admin_of="rival")
        assert refused == (MISSING, "")
    for user in ("ann", "acme/bob"):
        disabled = {"user": Pb.User(id=user, disabled=True), "update_mask": mask("disabled")}
        assert (await refusal_of(world, "UpdateUser", **disabled, as_admin_of="rival"))[0] == MISSING
        await world.ask("UpdateUser", **disabled, as_admin_of="acme")


async def test_a_refusal_does_not_tell_which_users_others_have(world: ControlWorld) -> None:
    """Names of users are e-mail addresses."""
    await world.ask("CreateUser", user=Pb.User(id="ann@rival.com"))
    own = [Pb.Membership(organisation="rival", role="member")]
    await world.ask("CreateUser", user=Pb.User(id="rival/bob", memberships=own), as_admin_of="rival")
    role = [Pb.Membership(organisation="acme", role="member")]
    for user in ("ann@rival.com", "rival/bob", "free@rival.com", "rival/free"):
        wanted = Pb.User(id=user, memberships=role)
        assert await refusal_of(world, "CreateUser", user=wanted, as_admin_of="acme") == (INVALID, "user.id")
    await world.ask("CreateUser", user=Pb.User(id="acme/bob", memberships=role), as_admin_of="acme")
    with pytest.raises(KvloomError, match="only have a role in 'acme'"):
        await world.ask("SetMembership", user="acme/bob", membership=own[0])


async def test_a_user_whom_the_operator_has_disabled_stays_so(world: ControlWorld) -> None:
    """Not even by deleting and adding them."""
    role = [Pb.Membership(organisation="acme", role="member")]
    await world.ask("CreateUser", user=Pb.User(id="acme/bob", memberships=role), as_admin_of="acme")
    await world.ask("UpdateUser", user=Pb.User(id="acme/bob", disabled=True), update_mask=mask("disabled"))
    enabled = {"user": Pb.User(id="acme/bob"), "update_mask": mask("disabled")}
    assert await refusal_of(world, "UpdateUser", **enabled, as_admin_of="acme") == (DENIED, "user.disabled")
    assert (await refusal_of(world, "DeleteUser", id="acme/bob", as_admin_of="acme"))[0] == DENIED
    await world.ask("UpdateUser", **enabled)
    await world.ask("DeleteUser", id="acme/bob", as_admin_of="acme")


async def test_the_users_of_a_deleted_organisation_are_gone(world: ControlWorld) -> None:
    """Others must not inherit them."""
    role = [Pb.Membership(organisation="rival", role="admin")]
    await world.ask("CreateUser", user=Pb.User(id="rival/eve", memberships=role), as_admin_of="rival")
    await world.ask("DeleteProject", id="rival/chat")
    await world.ask("DeleteOrganisation", id="rival")
    assert not (await world.ask("ListUsers")).users
