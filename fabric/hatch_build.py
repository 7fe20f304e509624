"""Puts the services and the command into the wheel as `kvloom_fabric/_root`, a private folder.

The repository's top-level packages have plain names (`router`, `tools`). In site-packages such names could hide a
user's own modules, or be hidden by them, so the wheel owns the one name `kvloom_fabric` there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGES: Final = (
    "control",
    "edge_http",
    "kvloom_common",
    "orchestrator",
    "router",
    "safety_svc",
    "shard_server",
    "tools",
)
"""Not `lab`, which tests the repository that it lies in, and measures it beside the peers that it installs. What is
shipped must not import it: a contract in ../pyproject.toml forbids it."""


class FabricBuildHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return  # kvloom_fabric finds the repository by itself
        repository = Path(self.root).parent
        for package in PACKAGES:
            for path in sorted((repository / package).rglob("*")):
                name = path.relative_to(repository).as_posix()
                if path.is_file() and "__pycache__" not in path.parts:
                    build_data["force_include"][str(path)] = f"kvloom_fabric/_root/{name}"
