"""Organisations, projects, users and keys: what their commands have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from tools.cli.tenants.directory import Directory, directory_options, json_option
from tools.cli.tenants.tables import Columns, show_list, show_one
from tools.failures import CommandError
from tools.options import option

AddOption = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Resource:
    """A kind of entry of the directory."""

    name: str
    """It stands in the names of DirectoryService's methods. In lower case, it is their field."""
    message: Any
    columns: Columns
    metavar: str = "NAME"

    def get(self, directory: Directory, id_: str) -> Any:
        """Returns an entry. Raises CommandError."""
        return self._field_of(directory.ask(f"Get{self.name}", id=id_))

    def create(self, directory: Directory, given: Mapping[str, Any], *, as_json: bool, **more: Any) -> None:
        """Add an entry with the fields that are not None, and show it. `more` are fields of the request. Raises
        CommandError."""
        made = directory.ask(f"Create{self.name}", **{self.name.lower(): self.message(**_known(given))}, **more)
        show_one(self._field_of(made), self.columns, as_json=as_json)

    def update(
        self,
        directory: Directory,
        id_: str,
        given: Mapping[str, Any],
        *,
        as_json: bool,
        limits: Mapping[str, Any] | None = None,
        columns: Columns | None = None,
    ) -> None:
        """Change the fields and limits that are not None, and show the entry. Raises CommandError."""
        fields = _known(given)
        paths = [*fields, *(f"limits.{name}" for name in limits or ())]
        if not paths:
            raise CommandError("nothing was given that is to be changed")
        if limits:
            fields["limits"] = limits
        wanted = {self.name.lower(): self.message(id=id_, **fields), "update_mask": {"paths": paths}}
        changed = self._field_of(directory.ask(f"Update{self.name}", **wanted))
        show_one(changed, columns or self.columns, as_json=as_json)

    def add_list(self, group: click.Group, text: str, empty: str, org_help: str = "") -> None:
        """Add the command `list`. `org_help`: the help of its option --org, if it has one."""
        plural = f"{self.name.lower()}s"

        def show(as_json: bool, directory: Directory, **fields: Any) -> None:
            found = directory.list_all(f"List{self.name}s", plural, **fields)
            show_list(found, self.columns, as_json=as_json, empty=empty)

        show.__doc__ = text
        command = json_option(plural.replace("organisations", "orgs"))(directory_options(show))
        if org_help:
            command = option("--org", "organisation", scope=plural, default="", help=org_help)(command)
        group.command("list")(command)

    def add_ends(self, group: click.Group, noun: str, deletion: str) -> None:
        """Add the commands `delete`, `disable` and `enable`. `deletion` says what the first one does."""

        def delete(name: str, directory: Directory) -> None:
            directory.ask(f"Delete{self.name}", id=name)
            click.echo(f"deleted {name}")

        delete.__doc__ = deletion
        group.command("delete")(click.argument("name", metavar=self.metavar)(directory_options(delete)))
        for verb, is_disabled in (("disable", True), ("enable", False)):

            def change(name: str, directory: Directory, *, is_disabled: bool = is_disabled, verb: str = verb) -> None:
                wanted = {self.name.lower(): self.message(id=name, disabled=is_disabled)}
                directory.ask(f"Update{self.name}", **wanted, update_mask={"paths": ["disabled"]})
                click.echo(f"{verb}d {name}")

            effect = "Refuse all keys" if is_disabled else "Accept the keys again"
            change.__doc__ = f"{effect} of {noun}, within a second."
            group.command(verb)(click.argument("name", metavar="NAME")(directory_options(change)))

    def _field_of(self, response: Any) -> Any:
        return getattr(response, self.name.lower())


def _known(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


def class_options(scope: str, all_of_them: str, otherwise: str) -> tuple[AddOption, AddOption, AddOption]:
    """`--class`, `--all-classes` and `--default-class`, with what holds without the first and the last one."""
    return (
        option(
            "--class",
            "classes",
            scope=scope,
            multiple=True,
            help="A priority class (docs/concepts/scheduling.md) that may be named. May be repeated.  "
            f"[default: {all_of_them}]",
        ),
        option("--all-classes", scope=scope, is_flag=True, help="All priority classes may be named."),
        option(
            "--default-class",
            scope=scope,
            help=f"The priority class of requests that name none. Empty: none.  [default: {otherwise}]",
        ),
    )


def cell_options(scope: str, all_of_them: str) -> tuple[AddOption, AddOption]:
    """`--cell` and `--all-cells`, with what holds without them."""
    return (
        option(
            "--cell",
            "cells",
            scope=scope,
            multiple=True,
            help="A cell (docs/operate/regions.md) in which requests may be computed. May be repeated.  "
            f"[default: {all_of_them}]",
        ),
        option("--all-cells", scope=scope, is_flag=True, help="Requests may be computed in all cells."),
    )


def given_names(names: Sequence[str], *, are_all: bool = False) -> Sequence[str] | None:
    """The names that are allowed from now on; None: they stay as they are."""
    return names or (["*"] if are_all else None)


def shown_classes(one: Any) -> str:
    """Those of an organisation, a project or a key, with the default one in brackets."""
    default = one.default_priority_class
    allowed = " ".join(one.priority_classes) or "all"
    return f"{allowed} (default {default})" if default else allowed
