"""`kvloom doctor plugins`: what other packages bring, and whether it can be loaded."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any, Final

import click
import msgspec

from kvloom_common.access.auth_provider import AUTH_PROVIDERS
from kvloom_common.parsers.registry import PARSERS
from kvloom_common.plugins import PluginError, PluginGroup
from router.placement_plugins import PLACEMENT_POLICIES
from safety_svc.rule_plugins import RULE_KINDS
from shard_server.engines.engine_kinds import ENGINES
from tools.options import option

GROUPS: Final[tuple[PluginGroup, ...]] = (PARSERS, PLACEMENT_POLICIES, ENGINES, RULE_KINDS, AUTH_PROVIDERS)


class FoundPlugin(msgspec.Struct, frozen=True):
    group: str
    name: str
    package: str
    """The distribution, and its version."""
    place: str
    """module:object"""
    error: str
    """Why it cannot be used; "" if it can be loaded."""


@click.command("plugins")
@option("--json", "as_json", scope="doctor_plugins", is_flag=True, help="Print one JSON array.")
def doctor_plugins(as_json: bool) -> None:
    """List the installed plugins (docs/how-to/plugins.md), each of which is loaded once.

    The exit status is 1 if one cannot be loaded.
    """
    found = list(_found())
    if as_json:
        click.echo(json.dumps([msgspec.to_builtins(plugin) for plugin in found]))
    else:
        _print(found)
    if any(plugin.error for plugin in found):
        sys.exit(1)


def _found() -> Iterator[FoundPlugin]:
    for group in GROUPS:
        for plugin in group.installed():
            yield FoundPlugin(group.group, plugin.name, plugin.package, plugin.place, _fault(group, plugin.name))


def _fault(group: PluginGroup, name: str) -> str:
    try:
        loaded: Any = group.load(name)
    except PluginError as error:
        return str(error)
    return "" if callable(loaded) else f"The {group.noun} {name!r} cannot be called: {type(loaded).__name__}."


def _print(found: list[FoundPlugin]) -> None:
    for group in GROUPS:
        own = [plugin for plugin in found if plugin.group == group.group]
        click.echo(f"{group.group}: {'' if own else 'none'}".rstrip())
        for plugin in own:
            sign, more = ("✗", f": {plugin.error}") if plugin.error else ("✓", "")
            click.echo(f"  {sign} {plugin.name}, {plugin.package} ({plugin.place}){more}")
