"""`kvloom limits`: limits of organisations, projects and keys, and tiers."""

from __future__ import annotations

from typing import Any, Final

import click

from kvloom.v1 import directory_service_pb2 as pb
from tools.cli.tenants.directory import Directory, directory_options, json_option
from tools.cli.tenants.keys import KEY
from tools.cli.tenants.orgs import ORGANISATION
from tools.cli.tenants.projects import PROJECT
from tools.cli.tenants.tables import Columns, show_list, show_one
from tools.cli.tenants.units import given_limits, kv_share_option, limit_options, shown_limits
from tools.failures import CommandError
from tools.options import option

_TIERS: Final[Columns] = {"tier": lambda one: one.name, "limits": lambda one: shown_limits(one.limits)}
_ACCOUNT: Final[Columns] = {
    "account": lambda one: one.id,
    "tier": lambda one: one.tier or "-",
    "own limits": lambda one: shown_limits(one.limits),
    "in force": lambda one: shown_limits(one.effective_limits),
}


_KINDS: Final = {"org": ORGANISATION, "tenant": PROJECT, "key": KEY}
_TIER: Final = "tier"


@click.group()
def limits() -> None:
    """Show and set what organisations, projects, keys and tiers may use (`kvloom up --control`).

    ACCOUNT is org:ORG, tenant:ORG/PROJECT, key:ID or tier:NAME. A request counts for its key, its project and its
    organisation, and each of them may refuse it.
    """


@limits.command("show")
@click.argument("account")
@json_option("limits")
@directory_options
def show(account: str, as_json: bool, directory: Directory) -> None:
    """Show the limits of an account: its own, and what holds together with those of its tier."""
    kind, name = _split(account)
    if kind == _TIER:
        show_one(_tier(directory, name), _TIERS, as_json=as_json)
        return
    show_one(_KINDS[kind].get(directory, name), _ACCOUNT, as_json=as_json)


@limits.command("set")
@click.argument("account")
@limit_options("limits")
@kv_share_option
@option("--tier", scope="limits", help='The tier whose limits hold where the account has none of its own; "": none.')
@json_option("limits")
@directory_options
def set_(account: str, tier: str | None, as_json: bool, directory: Directory, **flags: Any) -> None:
    """Set the given limits, and leave the others as they are. 0: no limit of this kind, or that of the tier."""
    kind, name = _split(account)
    given = given_limits(flags)
    if not given and tier is None:
        raise CommandError("no limit was given, e.g. --requests-per-minute 60")
    if kind == _TIER:
        if tier is not None:
            raise CommandError("--tier can be set for an organisation, a project or a key, not for a tier")
        known = {one.name: one for one in directory.list_all("ListLimitTiers", "tiers")}
        changed = known.get(name, pb.LimitTier(name=name))
        for field, value in given.items():
            setattr(changed.limits, field, value)
        show_one(directory.ask("SetLimitTier", tier=changed).tier, _TIERS, as_json=as_json)
        return
    _KINDS[kind].update(directory, name, {"tier": tier}, as_json=as_json, limits=given, columns=_ACCOUNT)


@limits.command("clear")
@click.argument("account")
@json_option("limits")
@directory_options
def clear(account: str, as_json: bool, directory: Directory) -> None:
    """Remove an account's own limits and its tier, or delete a tier that nothing has any more."""
    kind, name = _split(account)
    if kind == _TIER:
        directory.ask("DeleteLimitTier", name=name)
        click.echo(f"deleted the tier {name}")
        return
    _KINDS[kind].update(directory, name, {"limits": {}, "tier": ""}, as_json=as_json, columns=_ACCOUNT)


@limits.command("tiers")
@json_option("limits")
@directory_options
def tiers(as_json: bool, directory: Directory) -> None:
    """List the tiers."""
    found = directory.list_all("ListLimitTiers", "tiers")
    empty = "there are no tiers (kvloom limits set tier:NAME --requests-per-minute 60)"
    show_list(found, _TIERS, as_json=as_json, empty=empty)


def _split(account: str) -> tuple[str, str]:
    """Raises CommandError."""
    kind, colon, name = account.partition(":")
    if not colon or not name or kind not in (*_KINDS, _TIER):
        raise CommandError(f"{account!r} is none of org:ORG, tenant:ORG/PROJECT, key:ID and tier:NAME")
    return kind, name


def _tier(directory: Directory, name: str) -> pb.LimitTier:
    """Raises CommandError."""
    for tier in directory.list_all("ListLimitTiers", "tiers"):
        if tier.name == name:
            return tier
    raise CommandError(f"there is no tier {name!r} (`kvloom limits tiers`)")
