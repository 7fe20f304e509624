"""`kvloom orgs`: organisations, and the audit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import click

from kvloom.v1 import directory_service_pb2 as pb
from tools.cli.tenants.directory import Directory, directory_options, json_option
from tools.cli.tenants.resources import Resource, cell_options, class_options, given_names, shown_classes
from tools.cli.tenants.tables import Columns, show_list
from tools.cli.tenants.units import shown_limits, shown_time
from tools.failures import CommandError
from tools.options import option

_COLUMNS: Final[Columns] = {
    "organisation": lambda one: one.id,
    "state": lambda one: "disabled" if one.disabled else "active",
    "classes": shown_classes,
    "cells": lambda one: " ".join(one.residency) or "all",
    "tier": lambda one: one.tier or "-",
    "limits": lambda one: shown_limits(one.effective_limits),
}
ORGANISATION: Final = Resource("Organisation", pb.Organisation, _COLUMNS)
MAX_DIGITS: Final = 9
class_option, all_classes_option, default_class_option = class_options("orgs", "all", "by the tier")
cell_option, all_cells_option = cell_options("orgs", "all")
_AUDIT: Final[Columns] = {
    "at": lambda one: shown_time(one.at),
    "actor": lambda one: one.actor,
    "action": lambda one: one.action,
    "target": lambda one: one.target,
}


@click.group()
def orgs() -> None:
    """Add, list, disable and delete organisations, and show who has changed what (`kvloom up --control`)."""


@orgs.command("create")
@click.argument("name")
@option("--tier", scope="orgs", default="", help="Its tier of limits (`kvloom limits`).")
@class_option
@default_class_option
@cell_option
@json_option("orgs")
@directory_options
def create(
    name: str,
    tier: str,
    classes: Sequence[str],
    default_class: str | None,
    cells: Sequence[str],
    as_json: bool,
    directory: Directory,
) -> None:
    """Add an organisation."""
    given = {
        "id": name,
        "tier": tier,
        "priority_classes": classes,
        "default_priority_class": default_class,
        "residency": cells,
    }
    ORGANISATION.create(directory, given, as_json=as_json)


@orgs.command("update")
@click.argument("name")
@class_option
@all_classes_option
@default_class_option
@cell_option
@all_cells_option
@option(
    "--quota",
    "quotas",
    scope="orgs",
    multiple=True,
    metavar="NAME=N",
    help="How much it may have (max_keys, max_projects, max_users, max_entry_bytes); 0: the usual quota.",
)
@json_option("orgs")
@directory_options
def update(
    name: str,
    classes: Sequence[str],
    all_classes: bool,
    default_class: str | None,
    cells: Sequence[str],
    all_cells: bool,
    quotas: Sequence[str],
    as_json: bool,
    directory: Directory,
) -> None:
    """Change what is given. Limits are changed by `kvloom limits set org:NAME`."""
    given: dict[str, Any] = {
        "priority_classes": given_names(classes, are_all=all_classes),
        "default_priority_class": default_class,
        "residency": given_names(cells, are_all=all_cells),
    }
    if quotas:
        changed, given["quotas"] = given_quotas(quotas), ORGANISATION.get(directory, name).quotas
        for field in (text.partition("=")[0] for text in quotas):
            setattr(given["quotas"], field, getattr(changed, field))
    ORGANISATION.update(directory, name, given, as_json=as_json)


@orgs.command("audit")
@option("--org", scope="orgs", default="", help="Only what concerns this organisation.")
@option("--target", scope="orgs", default="", help="Only changes of this one, e.g. key:ID, tenant:ORG/PROJECT.")
@option("--max-entries", scope="orgs", type=click.IntRange(1), default=50, show_default=True, help="How many.")
@json_option("orgs")
@directory_options
def audit(org: str, target: str, max_entries: int, as_json: bool, directory: Directory) -> None:
    """Show who has changed what, the latest first. The JSON has what was before and after."""
    fields: dict[str, Any] = {"organisation": org, "target": target}
    found = directory.list_all("ListAuditEntries", "entries", at_most=max_entries, **fields)
    show_list(found, _AUDIT, as_json=as_json, empty="nothing was changed yet")


def given_quotas(texts: Sequence[str]) -> pb.Quotas:
    """Raises CommandError."""
    quotas = pb.Quotas()
    for text in texts:
        name, _, number = text.partition("=")
        if name not in quotas.DESCRIPTOR.fields_by_name:
            raise CommandError(f"there is no quota {name!r}: there are {', '.join(quotas.DESCRIPTOR.fields_by_name)}")
        if not number.isdecimal() or len(number) > MAX_DIGITS:
            raise CommandError(f"{text!r} is no quota such as max_keys=20000")
        setattr(quotas, name, int(number))
    return quotas


ORGANISATION.add_list(orgs, "List all organisations.", "there are no organisations (kvloom orgs create NAME)")
ORGANISATION.add_ends(orgs, "an organisation", "Delete an organisation, whose projects must have been deleted.")
