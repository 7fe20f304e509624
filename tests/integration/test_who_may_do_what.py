"""The table of docs/reference/permissions.md (who may do what), walked over an edge and a real control service."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from yarl import URL

from edge_http.admin.routes import ADMIN_ROUTES
from edge_http.tenant_usage import TenantUsage
from kvloom.v1 import control_service_pb2, directory_service_pb2, usage_service_pb2
from kvloom.v1.control_service_pb2 import Price
from kvloom_common.callers import Callers
from kvloom_common.tenancy.scopes import SCOPES_OF_ROLE, Role
from kvloom_common.trust.secret import FabricSecret
from kvloom_common.trust.shared_secret import SharedSecret
from tests.fakes.control_world import ControlWorld, Pb, control_world, entries_of
from tests.fakes.edge_world import EdgeWorld, edge_world
from tests.fakes.tenants import identities_of

PAGE: Final = Path(__file__).parents[2] / "docs" / "reference" / "permissions.md"
SERVICES: Final = (
    control_service_pb2.DESCRIPTOR.services_by_name["ControlService"],
    directory_service_pb2.DESCRIPTOR.services_by_name["DirectoryService"],
    usage_service_pb2.DESCRIPTOR.services_by_name["UsageService"],
)
WITHOUT_PATH: Final = {"ListAnswers", "Follow", "LeaseBudgets", "ReportKeyUses"}
KEYS: Final[Mapping[str, tuple[str, Role]]] = {
    "reader": ("acme/search", "reader"),
    "member": ("acme/search", "member"),
    "operator": ("acme/search", "operator"),
    "admin: own": ("acme/search", "admin"),
    "admin: other": ("rival/chat", "admin"),
    "operator of the fabric": ("staff/ops", "admin"),
}
"""Who asks: the project and the role of a key."""


class Row(NamedTuple):
    methods: tuple[str, ...]
    http_method: str
    path: str
    cells: dict[str, str]
    """By those who ask."""


def rows_of_the_page() -> list[Row]:
    table = PAGE.read_text().partition("<!-- matrix -->\n")[2].partition("\n\n")[0]
    head, _, *lines = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
    rows = []
    for methods, path, *cells in lines:
        by_column = dict(zip(head[2:], cells, strict=True))
        cells_of = {one: by_column[column] for column in by_column for one in re.split(r", ", column)}
        http_method, _, template = path.strip("`").partition(" ")
        rows.append(Row(tuple(re.findall(r"`(\w+)`", methods)), http_method, template, cells_of))
    return rows


ROWS: Final = rows_of_the_page()


def test_the_table_has_every_method_and_every_path() -> None:
    """A new method or path must be added here, and somebody must decide who may use it."""
    declared = sorted(method.name for service in SERVICES for method in service.methods)
    assert sorted([*(method for row in ROWS for method in row.methods), *WITHOUT_PATH]) == declared
    paths = {(row.http_method, row.path, row.methods[0]) for row in ROWS if not row.path.startswith("/")}
    assert paths == {(route.http_method, route.template, route.method) for route in ADMIN_ROUTES}
    assert all(set(row.cells) == {"no key", *KEYS} for row in ROWS)


class World(NamedTuple):
    edge: EdgeWorld
    control: ControlWorld
    secrets: dict[str, str]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """Each row of the table asks about things of its own."""
    tmp_path = tmp_path_factory.mktemp("world")
    async with control_world(f"sqlite:///{tmp_path}/control.db") as control:
        secrets = {"no key": ""}
        for name, (project, role) in KEYS.items():
            key = Pb.ApiKey(project=project, scopes=sorted(SCOPES_OF_ROLE[role]))
            secrets[name] = (await control.ask("CreateKey", key=key, create_project=True)).secret
        entries = entries_of(await control.table())
        identities = identities_of(tmp_path, entries, operator_organisation="staff")
        identities._follower.channel = control.channel
        async with edge_world(callers=Callers(identities=identities)) as edge:
            edge.edge.add_usage(TenantUsage(identities))
            yield World(edge, control, secrets)


_NUMBERS = itertools.count()


async def targets(control: ControlWorld, *, organisation: str) -> dict[str, str]:
    """The things to be read and changed, by their names in paths; all but tier and price are that of `acme`."""
    number = next(_NUMBERS)
    found = {"organisation": organisation, "project": f"p-{number}", "user": f"acme/u-{number}"}
    found |= {"tier": f"t-{number}", "price": f"price-{number}", "new": f"new-{number}"}
    if organisation != "acme":
        await control.ask("CreateOrganisation", organisation=Pb.Organisation(id=organisation))
    await control.ask("CreateProject", project=Pb.Project(id=f"acme/{found['project']}"))
    role = Pb.Membership(organisation="acme", role="member")
    await control.ask("CreateUser", user=Pb.User(id=found["user"], memberships=[role]))
    await control.ask("SetLimitTier", tier=Pb.LimitTier(name=found["tier"]))
    price = Price(id=found["price"], model=found["new"], effective_from=control.now + 1 + number)
    await control.ask("CreatePrice", price=price)
    made = await control.ask("CreateKey", key=Pb.ApiKey(project=f"acme/{found['project']}"))
    return {**found, "key": made.key.id}


def body_of(method: str, found: Mapping[str, str]) -> dict[str, Any] | None:
    role = {"organisation": "acme", "role": "member"}
    bodies: dict[str, dict[str, Any]] = {
        "CreateOrganisation": {"id": found["new"]},
        "UpdateOrganisation": {"limits": {"requests_per_minute": 9}},
        "CreateProject": {"id": f"acme/{found['new']}"},
        "UpdateProject": {"limits": {"requests_per_minute": 9}},
        "CreateUser": {"id": f"acme/{found['new']}", "memberships": [role]},
        "UpdateUser": {"name": "x"},
        "SetMembership": {"role": "reader"},
        "CreateKey": {"project": f"acme/{found['project']}"},
        "UpdateKey": {"name": "x"},
        "RotateKey": {},
        "RevokeKey": {},
        "SetLimitTier": {"limits": {"requests_per_minute": 9}},
        "CreatePrice": {"model": f"{found['new']}-2"},
    }
    return bodies.get(method)


async def ask(world: World, row: Row, who: str, found: Mapping[str, str]) -> tuple[int, str]:
    """The status and the text of the answer."""
    path = row.path if row.path.startswith("/") else f"/admin/v1/{row.path}"
    for name, value in found.items():
        path = path.replace(f"{{{name}}}", value.replace("/", "%2F"))
    headers = {"Authorization": f"Bearer {world.secrets[who]}"} if world.secrets[who] else {}
    url = URL(world.edge.url + path, encoded=True)
    body = body_of(row.methods[0], found)
    async with world.edge.http.request(row.http_method, url, json=body, headers=headers) as response:
        return response.status, await response.text()


def without_names(text: str) -> str:
    """The message of a refusal, apart from what was asked for. It must be the same whether or not that exists."""
    return re.sub(r"'[^']*'", "'...'", json.loads(text)["error"]["message"])


async def refused_in_any_case(world: World, who: str) -> bool:
    """Returns true if an administrator cannot lift any of the operator's restrictions, of each kind."""
    found = await targets(world.control, organisation="acme")
    project = Pb.Project(id=f"acme/{found['project']}", models=["a"])
    await world.control.ask("UpdateProject", project=project, update_mask={"paths": ["models"]})
    user, key = Pb.User(id=found["user"], disabled=True), Pb.ApiKey(id=found["key"], models=["a"])
    await world.control.ask("UpdateUser", user=user, update_mask={"paths": ["disabled"]})
    await world.control.ask("UpdateKey", key=key, update_mask={"paths": ["models"]})
    lifted = {
        f"projects/acme/{found['project']}": {"models": ["*"]},
        f"users/acme%2F{found['user'].partition('/')[2]}": {"disabled": False},
        f"keys/{found['key']}": {"models": ["*"]},
    }
    headers = {"Authorization": f"Bearer {world.secrets[who]}"}
    statuses = []
    for path, body in lifted.items():
        url = URL(f"{world.edge.url}/admin/v1/{path}", encoded=True)
        async with world.edge.http.patch(url, json=body, headers=headers) as response:
            statuses.append(response.status)
    return statuses == [403] * len(lifted)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("row", ROWS, ids=[row.methods[0] for row in ROWS])
async def test_each_cell_is_what_happens(world: World, row: Row) -> None:
    """A promise to operators and their customers."""
    untouched: dict[str, dict[str, str]] = {}  # by organisation: a refusal changes nothing
    for who, cell in row.cells.items():
        spare = row.methods[0] == "DeleteOrganisation" and cell == "yes"  # acme has projects
        organisation = "spare" if spare else "acme"
        found = untouched.pop(organisation, None) or await targets(world.control, organisation=organisation)
        status, text = await ask(world, row, who, found)
        if cell.isdecimal():
            assert status == int(cell), (who, text)
            unknown = {"organisation": "none", "project": "none", "user": "acme/none", "key": "none", "new": "none"}
            _, about_unknown = await ask(world, row, who, {**found, **unknown})
            assert "admin" not in who or without_names(text) == without_names(about_unknown), who
            untouched[organisation] = found
            continue
        assert status == 200, (who, text)
        if cell == "own":
            project, _ = KEYS[who]
            others = {"acme", "rival", "staff"} - {project.partition("/")[0]}
            assert not any(f'"{name}' in text for name in others), (who, text)
        assert cell != "stricter" or await refused_in_any_case(world, who)


async def test_processes_without_the_fabrics_secret_reach_no_method_of_control(tmp_path: Path) -> None:
    """A stranger who reaches the port could otherwise claim to be the operator."""
    trust = SharedSecret(FabricSecret.draw(), ("control",), "control")
    stranger = SharedSecret(FabricSecret.draw(), ("router",), "router-0")
    async with control_world(f"sqlite:///{tmp_path}/control.db", trust) as control:
        own = await control.ask("ListOrganisations")
        assert not own.organisations
        for channel in (
            grpc.aio.insecure_channel(f"127.0.0.1:{control.port}"),
            grpc.aio.secure_channel(f"127.0.0.1:{control.port}", grpc.ssl_channel_credentials()),
            stranger.open_channel(f"127.0.0.1:{control.port}", "control"),
        ):
            async with channel:
                for service in SERVICES:
                    for method in service.methods:
                        call = channel.unary_unary(f"/{service.full_name}/{method.name}")
                        with pytest.raises(grpc.aio.AioRpcError) as info:
                            await call(b"", timeout=10.0)
                        assert info.value.code() is grpc.StatusCode.UNAVAILABLE
