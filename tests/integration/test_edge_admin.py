"""/admin/v1 of an edge, with a real control service behind it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from yarl import URL

from edge_http.tenant_usage import TenantUsage
from kvloom_common.callers import Callers
from tests.fakes.control_world import ControlWorld, Pb, control_world, entries_of
from tests.fakes.edge_world import EdgeWorld, edge_world
from tests.fakes.tenants import identities_of


@contextlib.asynccontextmanager
async def admin_world(folder: Path, **control: Any) -> AsyncIterator[tuple[EdgeWorld, ControlWorld, dict[str, str]]]:
    """An edge whose table has what control has: keys by what they are for. It does not follow control, which other
    tests are about."""
    async with control_world(f"sqlite:///{folder}/control.db") as world:
        secrets: dict[str, str] = {}
        for name, project, scopes in (
            ("admin", "acme/search", ["admin"]),
            ("member", "acme/search", ["inference"]),
            ("operator", "staff/admin", ["admin"]),
        ):
            key = Pb.ApiKey(project=project, scopes=scopes, name=name)
            secrets[name] = (await world.ask("CreateKey", key=key, create_project=True)).secret
        entries = entries_of(await world.table())
        identities = identities_of(folder, entries, **control)
        identities._follower.channel = world.channel
        async with edge_world(callers=Callers(identities=identities)) as edge:
            edge.edge.add_usage(TenantUsage(identities))
            yield edge, world, secrets


async def ask(
    edge: EdgeWorld, secret: str, method: str, path: str, body: Any = None, *, status: int = 200
) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {secret}"}
    async with edge.http.request(
        method, URL(f"{edge.url}/admin/v1/{path}", encoded=True), json=body, headers=headers
    ) as response:
        found = await response.json()
        assert response.status == status, found
        return found


async def test_an_administrator_manages_the_own_organisation(tmp_path: Path) -> None:
    """All of a team's keys can be managed without access to the fabric's machines."""
    async with admin_world(tmp_path) as (edge, world, secrets):
        admin = secrets["admin"]
        made = await ask(edge, admin, "POST", "keys", {"project": "acme/search", "models": ["smol*"]})
        assert made["secret"].startswith("kvl-")
        path = f"keys/{made['key']['id']}"
        changed = await ask(
            edge, admin, "PATCH", path, {"priority_classes": ["batch"], "default_priority_class": "batch"}
        )
        assert (changed["key"]["priority_classes"], changed["key"]["default_priority_class"]) == (["batch"], "batch")
        changed = await ask(edge, admin, "PATCH", path, {"limits": {"tokens_per_day": 10**12}})
        assert changed["key"]["effective_limits"]["tokens_per_day"] == 10**12
        rotated = await ask(edge, admin, "POST", f"{path}/rotate", {"grace_seconds": 5})
        assert rotated["key"]["models"] == ["smol*"]
        assert (await ask(edge, admin, "POST", f"{path}/revoke"))["key"]["revoked_at"] == world.now
        listed = await ask(edge, admin, "GET", "keys?project=acme/search")
        assert len(listed["keys"]) == 3
        await ask(edge, admin, "POST", "projects", {"id": "acme/chat"})
        await ask(
            edge, admin, "POST", "users", {"id": "acme/a@b", "memberships": [{"organisation": "acme", "role": "admin"}]}
        )
        await ask(edge, admin, "PUT", "users/acme%2Fa%40b/memberships/acme", {"role": "reader"})
        assert (await ask(edge, admin, "GET", "users"))["users"][0]["memberships"][0]["role"] == "reader"
        entries = (await ask(edge, admin, "GET", "audit?page_size=1"))["entries"]
        key = next(one for one in listed["keys"] if one["name"] == "admin")
        assert (entries[0]["action"], entries[0]["actor"]) == ("SetMembership", f"key:{key['id']}")


async def test_an_administrator_has_no_power_over_others(tmp_path: Path) -> None:
    """Neither over other organisations, nor over the own limits and prices; and other scopes have none at all."""
    async with admin_world(tmp_path) as (edge, _, secrets):
        admin = secrets["admin"]
        await ask(edge, admin, "GET", "projects/staff/admin", status=404)
        await ask(edge, admin, "POST", "keys", {"project": "staff/admin"}, status=404)
        await ask(edge, admin, "PATCH", "organisations/acme", {"limits": {}}, status=403)
        await ask(edge, admin, "PUT", "tiers/gold", {}, status=403)
        await ask(edge, admin, "POST", "prices", {"model": "*"}, status=403)
        await ask(edge, secrets["member"], "GET", "keys", status=403)
        await ask(edge, "kvl-unknown", "GET", "keys", status=401)


async def test_the_operators_organisation_administers_everything(tmp_path: Path) -> None:
    """By configuration only: else its administrators are like all others."""
    async with admin_world(tmp_path, operator_organisation="staff") as (edge, _, secrets):
        operator = secrets["operator"]
        await ask(edge, operator, "PUT", "tiers/gold", {"limits": {"requests_per_minute": 7}})
        changed = await ask(edge, operator, "PATCH", "organisations/acme", {"tier": "gold"})
        assert changed["organisation"]["effective_limits"]["requests_per_minute"] == 7
        price = await ask(edge, operator, "POST", "prices", {"model": "*", "prompt_nanos": 5, "output_nanos": 6})
        assert (price["price"]["cached_nanos"], price["price"]["batch_percent"]) == (5, 100)
        await ask(edge, secrets["admin"], "PUT", "tiers/gold", {}, status=403)


async def test_refusals_are_openais_errors(tmp_path: Path) -> None:
    """They name the field as the body has it."""
    async with admin_world(tmp_path) as (edge, _, secrets):
        admin = secrets["admin"]
        key = {"project": "acme/search", "scopes": ["x"]}
        error = (await ask(edge, admin, "POST", "keys", key, status=400))["error"]
        assert (error["param"], error["type"]) == ("scopes", "invalid_request_error")
        error = (await ask(edge, admin, "POST", "projects", {"id": "acme/search"}, status=409))["error"]
        assert error["code"] == "already_exists"
        await ask(edge, admin, "POST", "keys", {"colour": "red"}, status=400)
        await ask(edge, admin, "DELETE", "keys", status=405)


async def test_control_that_is_away_is_said_to_be(tmp_path: Path) -> None:
    """Requests are served meanwhile; administrators must try again."""
    async with admin_world(tmp_path) as (edge, _, secrets):
        identities = edge.edge.callers._callers.identities
        assert identities is not None
        identities._follower.channel = None
        error = (await ask(edge, secrets["admin"], "GET", "keys", status=503))["error"]
        assert error["code"] == "control_unavailable"


async def test_a_fabric_without_tenants_has_no_administration() -> None:
    """Its paths answer as any that does not exist."""
    async with edge_world() as edge:
        for path in ("keys", "nothing"):
            async with edge.http.get(f"{edge.url}/admin/v1/{path}") as response:
                assert response.status == 404


@pytest.mark.parametrize("body", ["", "{", "[]"])
async def test_bodies_that_are_no_objects_are_refused(tmp_path: Path, body: str) -> None:
    """As at all other paths."""
    async with admin_world(tmp_path) as (edge, _, secrets):
        headers = {"Authorization": f"Bearer {secrets['admin']}", "Content-Type": "application/json"}
        async with edge.http.post(f"{edge.url}/admin/v1/keys", data=body, headers=headers) as response:
            assert response.status == 400
