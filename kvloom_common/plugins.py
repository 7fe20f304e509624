"""Plugins: parts of a fabric that other packages bring, as Python entry points (docs/how-to/plugins.md).

    ENGINES = PluginGroup("kvloom.engines", "engine", ("sim", "torch"))
    factory = ENGINES.load("acme")

A plugin is listed without being loaded, so that an installed package which nothing uses costs nothing and breaks
nothing. Its name is never one of kvloom's own: those always mean what kvloom's documentation says.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Collection
from typing import Any


class PluginError(ValueError):
    """A plugin cannot be used. The message names it, its package and the cause."""


@dataclasses.dataclass(frozen=True, slots=True)
class Plugin:
    """An installed entry point, which may or may not load."""

    name: str
    package: str
    """The distribution, and its version."""
    place: str
    """module:object"""


class PluginGroup:
    """The plugins of one kind, and kvloom's own names of that kind."""

    def __init__(self, group: str, noun: str, built_in: Collection[str]) -> None:
        """`group`: of the entry points. `noun`: what one of them is called in messages."""
        self.group = group
        self.noun = noun
        self._built_in = frozenset(built_in)

    def installed(self) -> list[Plugin]:
        """All that are installed, by name. None is loaded."""
        found = {_plugin(entry) for entry in importlib.metadata.entry_points(group=self.group)}
        return sorted(found, key=lambda plugin: (plugin.name, plugin.package, plugin.place))

    def names(self) -> list[str]:
        """All names that exist: kvloom's own, and those of plugins."""
        return sorted(self._built_in | {plugin.name for plugin in self.installed()})

    def load(self, name: str) -> Any:
        """The object that the entry point of a plugin names. Raises PluginError."""
        if name in self._built_in:
            raise PluginError(f"{name!r} is a {self.noun} of kvloom's own, which no plugin replaces.")
        found = [plugin for plugin in self.installed() if plugin.name == name]
        if not found:
            raise PluginError(f"There is no {self.noun} named {name!r}. There are: {', '.join(self.names())}.")
        if len(found) > 1:
            packages = ", ".join(sorted({plugin.package for plugin in found}))
            raise PluginError(
                f"Several installed packages have a {self.noun} named {name!r} ({packages}): uninstall all but one."
            )
        return self._load(found[0])

    def _load(self, plugin: Plugin) -> Any:
        entry = importlib.metadata.EntryPoint(plugin.name, plugin.place, self.group)
        try:
            return entry.load()
        except Exception as error:  # importing runs the package's code
            cause = f"{type(error).__name__}: {error}"
            raise PluginError(
                f"The {self.noun} {plugin.name!r} of {plugin.package} ({plugin.place}) cannot be loaded: {cause}"
            ) from error


def _plugin(entry: importlib.metadata.EntryPoint) -> Plugin:
    package = "an unknown package" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
    return Plugin(entry.name, package, entry.value)
