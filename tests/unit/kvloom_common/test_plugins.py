"""Plugins of other packages: found without being loaded, and loaded with clear errors."""

from __future__ import annotations

import sys

import pytest

from kvloom_common.plugins import Plugin, PluginError, PluginGroup
from tests.fakes.plugin_site import PluginSite

GROUP = "kvloom.test_parts"
PARTS = PluginGroup(GROUP, "part", ("own", "other"))


def test_an_installed_plugin_is_listed_and_not_loaded(plugin_site: PluginSite) -> None:
    """A package that is installed and not used must not run any code."""
    plugin_site.install("acme_part", GROUP, {"acme": "acme_part:Part"}, "raise RuntimeError('imported')")
    assert PARTS.installed() == [Plugin("acme", "acme_part 1.0", "acme_part:Part")]
    assert PARTS.names() == ["acme", "other", "own"]
    assert "acme_part" not in sys.modules


def test_a_plugin_is_loaded_by_its_name(plugin_site: PluginSite) -> None:
    """This is what the group is for."""
    plugin_site.install("acme_part", GROUP, {"acme": "acme_part:Part"}, "class Part:\n    size = 3\n")
    assert PARTS.load("acme").size == 3


def test_an_unknown_name_is_refused_with_those_that_exist(plugin_site: PluginSite) -> None:
    """The message is what an operator sees who mistyped a name or forgot to install a package."""
    plugin_site.install("acme_part", GROUP, {"acme": "acme_part:Part"}, "")
    with pytest.raises(PluginError, match=r"no part named 'acne'\. There are: acme, other, own\."):
        PARTS.load("acne")


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("", "AttributeError: module 'acme_part' has no attribute 'Part'"),
        ("import acme_missing", "ModuleNotFoundError: No module named 'acme_missing'"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_plugin_that_does_not_load_is_named(plugin_site: PluginSite, source: str, cause: str) -> None:
    """An operator must see which package to repair, and what is wrong with it."""
    plugin_site.install("acme_part", GROUP, {"acme": "acme_part:Part"}, source)
    with pytest.raises(PluginError, match=rf"'acme' of acme_part 1\.0 \(acme_part:Part\) cannot be loaded: {cause}"):
        PARTS.load("acme")


def test_two_packages_with_one_name_are_refused(plugin_site: PluginSite) -> None:
    """Which of them is used must not depend on the order of a directory."""
    for module in ("acme_part", "other_part"):
        plugin_site.install(module, GROUP, {"acme": f"{module}:Part"}, "Part = 1")
    with pytest.raises(PluginError, match=r"Several installed packages .*\(acme_part 1\.0, other_part 1\.0\)"):
        PARTS.load("acme")


def test_a_name_of_kvloom_is_never_replaced(plugin_site: PluginSite) -> None:
    """A package that is installed by chance must not change what a documented name means."""
    plugin_site.install("acme_part", GROUP, {"own": "acme_part:Part"}, "Part = 1")
    assert PARTS.names() == ["other", "own"]
    with pytest.raises(PluginError, match="kvloom's own"):
        PARTS.load("own")
