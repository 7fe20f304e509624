"""Packages with plugins, installed for one test: from source text, or from the examples of docs/how-to/plugins.md."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

PAGE = REPOSITORY / "docs" / "how-to" / "plugins.md"


class PluginSite:
    """A folder on sys.path, with distributions as pip would leave them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._monkeypatch = monkeypatch
        monkeypatch.syspath_prepend(str(folder))

    def install(self, module: str, group: str, entries: dict[str, str], source: str, version: str = "1.0") -> None:
        self._monkeypatch.delitem(sys.modules, module, raising=False)
        (self.folder / f"{module}.py").write_text(source)
        info = self.folder / f"{module}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: {version}\n")
        lines = [f"{name} = {place}" for name, place in entries.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
        importlib.invalidate_caches()

    def install_example(self, group: str) -> None:
        """Install what docs/how-to/plugins.md shows for the group: its entry point and its module."""
        page = PAGE.read_text()
        for block in re.findall(r"```toml\n(.*?)```", page, re.DOTALL):
            entries = tomllib.loads(block).get("project", {}).get("entry-points", {}).get(group)
            if entries is not None:
                break
        else:
            raise AssertionError(f"{PAGE} has no entry points of {group}")
        module = next(iter(entries.values())).partition(":")[0]
        source = re.search(rf"```python\n(# {module}\.py\n.*?)```", page, re.DOTALL)
        assert source is not None, f"{PAGE} has no {module}.py"
        self.install(module, group, entries, source[1])
