"""`kvloom projects`: the tenants of the fabric."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import click

from kvloom.v1 import directory_service_pb2 as pb
from tools.cli.tenants.directory import Directory, directory_options, json_option
from tools.cli.tenants.resources import Resource, cell_options, class_options, given_names, shown_classes
from tools.cli.tenants.tables import Columns
from tools.cli.tenants.units import shown_limits
from tools.options import option

_COLUMNS: Final[Columns] = {
    "project": lambda one: one.id,
    "state": lambda one: "disabled" if one.disabled else "active",
    "models": lambda one: " ".join(one.models) or "all",
    "classes": shown_classes,
    "cache scope": lambda one: one.cache_scope or "-",
    "cells": lambda one: " ".join(one.residency) or "all",
    "guardrails": lambda one: " ".join(one.guardrails) or "-",
    "tier": lambda one: one.tier or "-",
    "limits": lambda one: shown_limits(one.effective_limits),
}
PROJECT: Final = Resource("Project", pb.Project, _COLUMNS, "ORG/PROJECT")

model_option = option(
    "--model",
    "models",
    scope="projects",
    multiple=True,
    help='A model, adapter or route that its keys may use; "prefix*" for all that begin so. May be repeated.  '
    "[default: all]",
)
scope_option = option(
    "--cache-scope",
    scope="projects",
    help="Projects with the same scope share cached prompts. Empty: this one shares with nobody.",
)
class_option, all_classes_option, default_class_option = class_options(
    "projects", "all of the organisation", "the organisation's, or else by the tier"
)
cell_option, all_cells_option = cell_options("projects", "all of the organisation")
guardrail_option = option(
    "--guardrail",
    "guardrails",
    scope="projects",
    multiple=True,
    help="A rule of the safety policy with `on_request` that holds for all its requests. May be repeated.",
)
tier_option = option("--tier", scope="projects", help="Its tier of limits (`kvloom limits`).")


@click.group()
def projects() -> None:
    """Add, list, change, disable and delete projects, the tenants of a fabric (`kvloom up --control`)."""


@projects.command("create")
@click.argument("name", metavar="ORG/PROJECT")
@option("--create", "create_org", scope="projects", is_flag=True, help="Add the organisation, too, if there is none.")
@model_option
@class_option
@default_class_option
@scope_option
@cell_option
@guardrail_option
@tier_option
@json_option("projects")
@directory_options
def create(
    name: str,
    create_org: bool,
    models: Sequence[str],
    classes: Sequence[str],
    default_class: str | None,
    cache_scope: str | None,
    cells: Sequence[str],
    guardrails: Sequence[str],
    tier: str | None,
    as_json: bool,
    directory: Directory,
) -> None:
    """Add a project to an organisation."""
    given = {
        "id": name,
        "models": models,
        "priority_classes": classes,
        "default_priority_class": default_class,
        "cache_scope": cache_scope,
        "residency": cells,
        "guardrails": guardrails,
        "tier": tier,
    }
    PROJECT.create(directory, given, as_json=as_json, create_organisation=create_org)


@projects.command("update")
@click.argument("name", metavar="ORG/PROJECT")
@model_option
@option("--all-models", scope="projects", is_flag=True, help="Its keys may use all models.")
@all_classes_option
@class_option
@default_class_option
@scope_option
@all_cells_option
@cell_option
@guardrail_option
@option("--no-guardrails", scope="projects", is_flag=True, help="It has chosen no rule.")
@tier_option
@json_option("projects")
@directory_options
def update(
    name: str,
    models: Sequence[str],
    all_models: bool,
    classes: Sequence[str],
    all_classes: bool,
    default_class: str | None,
    cache_scope: str | None,
    cells: Sequence[str],
    all_cells: bool,
    guardrails: Sequence[str],
    no_guardrails: bool,
    tier: str | None,
    as_json: bool,
    directory: Directory,
) -> None:
    """Change what is given. Limits are changed by `kvloom limits set tenant:ORG/PROJECT`."""
    given = {
        "models": given_names(models, are_all=all_models),
        "priority_classes": given_names(classes, are_all=all_classes),
        "default_priority_class": default_class,
        "cache_scope": cache_scope,
        "residency": given_names(cells, are_all=all_cells),
        "guardrails": guardrails or ([] if no_guardrails else None),
        "tier": tier,
    }
    PROJECT.update(directory, name, given, as_json=as_json)


PROJECT.add_list(
    projects,
    "List projects.",
    "there are no projects (kvloom projects create ORG/PROJECT)",
    "Only those of this organisation.",
)
PROJECT.add_ends(
    projects,
    "a project",
    "Delete a project and its keys, which are refused within a second. Its usage records are kept.",
)
