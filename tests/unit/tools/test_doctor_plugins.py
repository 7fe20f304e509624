"""`kvloom doctor plugins` shows what is installed, and what is wrong with it."""

from __future__ import annotations

import json

from click.testing import CliRunner

from tests.fakes.plugin_site import PluginSite
from tools.doctor.plugins import GROUPS, doctor_plugins


def test_every_group_is_listed_without_plugins() -> None:
    """An operator sees which kinds there are, and that none is installed is no fault."""
    result = CliRunner().invoke(doctor_plugins)
    assert result.exit_code == 0
    assert result.output.splitlines() == [f"{group.group}: none" for group in GROUPS]


def test_plugins_are_listed_with_their_packages(plugin_site: PluginSite) -> None:
    """All five kinds, as docs/how-to/plugins.md shows them."""
    for group in GROUPS:
        plugin_site.install_example(group.group)
    result = CliRunner().invoke(doctor_plugins)
    assert result.exit_code == 0, result.output
    assert "  ✓ echo, acme_engine 1.0 (acme_engine:EchoEngine)" in result.output.splitlines()
    assert result.output.count("✓") == len(GROUPS)
    found = json.loads(CliRunner().invoke(doctor_plugins, ["--json"]).output)
    assert [plugin["group"] for plugin in found] == [group.group for group in GROUPS]
    assert not any(plugin["error"] for plugin in found)


def test_what_cannot_be_used_says_why(plugin_site: PluginSite) -> None:
    """Each reason leads to the package to repair or to remove."""
    plugin_site.install("broken", "kvloom.engines", {"broken": "broken:Engine"}, "import acme_missing")
    plugin_site.install("taken", "kvloom.placement_policies", {"ect": "taken:Policy"}, "Policy = dict")
    plugin_site.install("number", "kvloom.auth_providers", {"number": "number:NUMBER"}, "NUMBER = 3")
    result = CliRunner().invoke(doctor_plugins)
    assert result.exit_code == 1
    assert "✗ broken, broken 1.0 (broken:Engine): The engine 'broken' of broken 1.0" in result.output
    assert "No module named 'acme_missing'" in result.output
    assert "✗ ect, taken 1.0 (taken:Policy): 'ect' is a placement policy of kvloom's own" in result.output
    assert "✗ number, number 1.0 (number:NUMBER): The auth provider 'number' cannot be called: int." in result.output
