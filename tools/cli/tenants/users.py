"""`kvloom users`: users and their roles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import click

from kvloom.v1 import directory_service_pb2 as pb
from kvloom_common.tenancy.scopes import ROLES
from tools.cli.tenants.directory import Directory, directory_options, json_option
from tools.cli.tenants.resources import Resource
from tools.cli.tenants.tables import Columns, show_one
from tools.failures import CommandError
from tools.options import option

_COLUMNS: Final[Columns] = {
    "user": lambda one: one.id,
    "name": lambda one: one.name or "-",
    "state": lambda one: "disabled" if one.disabled else "active",
    "roles": lambda one: " ".join(f"{member.organisation}={member.role}" for member in one.memberships) or "-",
}
USER: Final = Resource("User", pb.User, _COLUMNS, "USER")


@click.group()
def users() -> None:
    """Add, list, disable and delete users, and give them roles (`kvloom up --control`)."""


@users.command("create")
@click.argument("user")
@option("--name", scope="users", default="", help="How to show them.")
@option(
    "--role",
    "roles",
    scope="users",
    multiple=True,
    metavar="ORG=ROLE",
    help=f"A role in an organisation: {', '.join(ROLES)}. May be repeated.",
)
@json_option("users")
@directory_options
def create(user: str, name: str, roles: Sequence[str], as_json: bool, directory: Directory) -> None:
    """Add a user, e.g. by their e-mail address."""
    memberships: list[pb.Membership] = []
    for text in roles:
        organisation, equals, role = text.partition("=")
        if not equals:
            raise CommandError(f"--role {text}: expected ORG=ROLE, e.g. acme=member")
        memberships.append(pb.Membership(organisation=organisation, role=role))
    USER.create(directory, {"id": user, "name": name, "memberships": memberships}, as_json=as_json)


@users.command("grant")
@click.argument("user")
@click.argument("org")
@click.argument("role", type=click.Choice(ROLES))
@json_option("users")
@directory_options
def grant(user: str, org: str, role: str, as_json: bool, directory: Directory) -> None:
    """Give a user a role in an organisation, instead of the one that they have."""
    membership = pb.Membership(organisation=org, role=role)
    show_one(directory.ask("SetMembership", user=user, membership=membership).user, USER.columns, as_json=as_json)


@users.command("withdraw")
@click.argument("user")
@click.argument("org")
@directory_options
def withdraw(user: str, org: str, directory: Directory) -> None:
    """Take a user out of an organisation, and revoke their keys there."""
    directory.ask("DeleteMembership", user=user, organisation=org)
    click.echo(f"{user} is no member of {org} any more")


USER.add_list(
    users, "List users.", "there are no users (kvloom users create USER)", "Only members of this organisation."
)
USER.add_ends(users, "a user", "Delete a user and revoke their keys.")
