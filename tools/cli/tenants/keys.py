"""`kvloom keys` in a fabric with tenants."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

import click

from kvloom.v1 import directory_service_pb2 as pb
from kvloom.v1.control_service_pb2 import Limits
from kvloom_common.tenancy.scopes import SCOPES
from tools.cli.tenants.directory import Directory, directory_options, json_option
from tools.cli.tenants.resources import Resource, class_options, given_names, shown_classes
from tools.cli.tenants.tables import Columns, show_list, show_one
from tools.cli.tenants.units import (
    DURATION,
    given_limits,
    limit_options,
    moment,
    shown_limits,
    shown_time,
)
from tools.failures import CommandError
from tools.options import F, option

_COLUMNS: Final[Columns] = {
    "id": lambda one: one.id,
    "key": lambda one: f"{one.prefix}..." if one.prefix else "(identity)",
    "project": lambda one: one.project,
    "name": lambda one: one.name or "-",
    "user": lambda one: one.user or "-",
    "scopes": lambda one: " ".join(one.scopes),
    "models": lambda one: " ".join(one.models) or "all",
    "classes": shown_classes,
    "state": lambda one: _state(one),
    "expires": lambda one: shown_time(one.expires_at),
    "last used": lambda one: shown_time(one.last_used_at),
    "limits": lambda one: shown_limits(one.effective_limits),
}
KEY: Final = Resource("Key", pb.ApiKey, _COLUMNS)
_RIGHTS: Final = {
    "inference": "use models",
    "usage": "read its project's usage",
    "guardrails": "have texts judged by the safety policy",
    "admin": "administer its organisation",
}
"""Says what each scope is for."""

class_option, all_classes_option, default_class_option = class_options(
    "keys", "all of the project", "the project's, or else by the tier"
)


def rights_options(function: F) -> F:
    """Adds the options that say what a key may be used for."""
    for add_option in (
        option(
            "--expires",
            scope="keys",
            metavar="30d|DATE",
            help="When it expires: a duration from now on, or a date or time of UTC.  [default: never]",
        ),
        option(
            "--model",
            "models",
            scope="keys",
            multiple=True,
            help='A model, adapter or route that it may use; "prefix*" for all that begin so. May be repeated.  '
            "[default: all of the project]",
        ),
        class_option,
        default_class_option,
        option(
            "--scope",
            "scopes",
            scope="keys",
            multiple=True,
            type=click.Choice(SCOPES),
            help="A use that it is allowed. May be repeated.  [default: inference, usage]",
        ),
        option("--tier", scope="keys", help="Its tier of limits (`kvloom limits`)."),
    ):
        function = add_option(function)
    return function


@click.command("create")
@option("--project", scope="keys", required=True, metavar="ORG/PROJECT", help="The project whose key it is.")
@option(
    "--create", "create_project", scope="keys", is_flag=True, help="Add project and organisation, if there are none."
)
@option("--name", scope="keys", default="", help="A note for people: the use of the key.")
@option("--user", scope="keys", default="", help="The user whose key it is: it may do no more than their role.")
@option(
    "--identity",
    scope="keys",
    default="",
    metavar="KIND:NAME",
    help="Make no key, but let an identity of an OIDC issuer or a certificate use the project "
    "(docs/operate/tenancy.md).",
)
@rights_options
@limit_options("keys")
@json_option("keys")
@directory_options
def create(
    project: str,
    create_project: bool,
    name: str,
    user: str,
    identity: str,
    scopes: Sequence[str],
    models: Sequence[str],
    classes: Sequence[str],
    default_class: str | None,
    expires: str | None,
    tier: str | None,
    as_json: bool,
    directory: Directory,
    **flags: Any,
) -> None:
    """Make a key of a project and print it. It cannot be shown again: only its SHA-256 is kept."""
    made = directory.ask(
        "CreateKey",
        key=pb.ApiKey(
            id=identity,
            project=project,
            name=name,
            user=user,
            scopes=scopes,
            models=models,
            priority_classes=classes,
            default_priority_class=default_class or "",
            tier=tier or "",
            expires_at=_moment(expires),
            limits=Limits(**given_limits(flags)),
        ),
        create_project=create_project,
    )
    click.echo(f"it may: {may_do(made.key.scopes)} (docs/operate/tenancy.md#which-key-for-what)", err=True)
    _show_secret(made, as_json=as_json)


def may_do(scopes: Sequence[str]) -> str:
    """Says what a key with these scopes is for, and for what it is not, in words."""
    may = [words for scope, words in _RIGHTS.items() if scope in scopes]
    not_ = [words for scope, words in _RIGHTS.items() if scope not in scopes]
    return ", ".join(may) + (f"; it may not: {', '.join(not_)}" if not_ else "")


def show_keys(directory: Directory, project: str, org: str, *, show_revoked: bool, as_json: bool) -> None:
    """Shows the list of `kvloom keys list`."""
    found = directory.list_all("ListKeys", "keys", project=project, organisation=org, show_revoked=show_revoked)
    empty = "there are no keys (kvloom keys create --project ORG/PROJECT --create)"
    show_list(found, KEY.columns, as_json=as_json, empty=empty)


@click.command("update")
@click.argument("key_id", metavar="ID")
@option("--name", scope="keys", help="A note for people: the use of the key.")
@rights_options
@all_classes_option
@limit_options("keys")
@json_option("keys")
@directory_options
def update(
    key_id: str,
    name: str | None,
    scopes: Sequence[str],
    models: Sequence[str],
    all_classes: bool,
    classes: Sequence[str],
    default_class: str | None,
    expires: str | None,
    tier: str | None,
    as_json: bool,
    directory: Directory,
    **flags: Any,
) -> None:
    """Change what is given of a key."""
    given = {
        "name": name,
        "scopes": given_names(scopes),
        "models": given_names(models),
        "tier": tier,
        "expires_at": None if expires is None else _moment(expires),
        "priority_classes": given_names(classes, are_all=all_classes),
        "default_priority_class": default_class,
    }
    KEY.update(directory, key_id, given, as_json=as_json, limits=given_limits(flags))


@click.command("rotate")
@click.argument("key_id", metavar="ID")
@option(
    "--grace",
    scope="keys",
    type=DURATION,
    default="1d",
    show_default=True,
    help="How long the old key is still accepted, e.g. 12h; 0s: not at all.",
)
@json_option("keys")
@directory_options
def rotate(key_id: str, grace: float, as_json: bool, directory: Directory) -> None:
    """Make another key with the same rights and print it. The old one expires after the grace period."""
    _show_secret(directory.ask("RotateKey", id=key_id, grace_seconds=grace), as_json=as_json)


@click.command("revoke")
@click.argument("key_ids", metavar="ID...", nargs=-1, required=True)
@directory_options
def revoke(key_ids: Sequence[str], directory: Directory) -> None:
    """Revoke keys. All edges and routers refuse them within a second."""
    for key_id in key_ids:
        directory.ask("RevokeKey", id=key_id)
        click.echo(f"revoked {key_id}")


def _moment(text: str | None) -> float:
    try:
        return moment(text, time.time()) if text else 0.0
    except ValueError as error:
        raise CommandError(f"--expires: {error}") from error


def _show_secret(made: Any, *, as_json: bool) -> None:
    if as_json or not made.secret:
        show_one(made.key, KEY.columns, as_json=as_json, secret=made.secret)
        return
    click.echo(f"made key {made.key.id} of {made.key.project}; it is not shown again", err=True)
    click.echo(made.secret)


def _state(key: pb.ApiKey) -> str:
    if key.revoked_at:
        return "revoked"
    return "expired" if 0.0 < key.expires_at <= time.time() else "active"
