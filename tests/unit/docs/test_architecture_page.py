"""ARCHITECTURE.md and CONTRIBUTING.md send readers to files, and every folder maps its own; all of them must be
there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

PACKAGES = (
    "kvloom",
    "kvloom_common",
    "edge_http",
    "router",
    "shard_server",
    "safety_svc",
    "control",
    "orchestrator",
    "tools",
    "lab",
)
PATH = re.compile(
    r"`((?:kvloom|kvloom_common|edge_http|router|shard_server|safety_svc|control|orchestrator|tools|lab|fabric|tests|docs)/[\w./-]*)`"
)


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_every_path_on_the_page_exists(page: str) -> None:
    """A map with wrong paths is worse than none."""
    named = PATH.findall((REPOSITORY / page).read_text())
    assert len(named) > 15
    assert not [path for path in named if not (REPOSITORY / path).exists()]


def packages() -> list[Path]:
    found = [path.parent for package in PACKAGES for path in (REPOSITORY / package).rglob("__init__.py")]
    return sorted(path for path in found if path.name != "v1")


@pytest.mark.parametrize("package", packages(), ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_a_folder_maps_its_files(package: Path) -> None:
    """The first lines of `__init__.py` name every file and every folder inside, one a line, and nothing else."""
    inside = {path.name for path in package.glob("*.py") if path.name not in ("__init__.py", "__main__.py")}
    inside |= {f"{path.parent.name}/" for path in package.glob("*/__init__.py") if path.parent.name != "v1"}
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    mapped = {line.split()[0] for line in text.splitlines() if re.match(r"\s*[\w./]+(\.py|/)\s{2,}\S", line)}
    assert mapped - {"__init__.py", "__main__.py", "v1/"} == inside
