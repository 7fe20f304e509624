"""What fabric/hatch_build.py puts into the wheel is one fact, on which others depend."""

from __future__ import annotations

import re
import tomllib

from fabric.hatch_build import PACKAGES
from tests.conftest import REPOSITORY

CONTRACT = "what is shipped does not import the laboratory"
NAMES_THE_LABORATORY = re.compile(r"^\s*(from|import) lab\b|[\"']lab\.", re.MULTILINE)


def test_a_contract_forbids_all_that_is_shipped_to_import_the_laboratory():
    """An import of it works in the repository and breaks the command that pip installs."""
    contracts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = [contract for contract in contracts if contract["name"] == CONTRACT]
    assert contract["forbidden_modules"] == ["lab"]
    assert set(contract["source_modules"]) == {"kvloom", *PACKAGES}
    assert "lab" not in PACKAGES


def test_nothing_that_is_shipped_names_a_module_of_the_laboratory():
    """A module that is named by a string is not seen by the contract."""
    sources = [path for package in ("kvloom", *PACKAGES) for path in (REPOSITORY / package).rglob("*.py")]
    assert not [path for path in sources if NAMES_THE_LABORATORY.search(path.read_text())]


def test_no_page_says_that_pip_finds_kvloom_by_itself() -> None:
    """`pip install kvloom` was in the docs while no index had it: a make target builds both, and pip is told where."""
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]
    promised = [
        f"{page.name}: {line}"
        for page in pages
        for line in page.read_text().splitlines()
        if "pip install" in line and "kvloom" in line.partition("pip install")[2].partition("#")[0]
        if "--find-links" not in line and "-e ." not in line
    ]
    assert not promised
    makefile = (REPOSITORY / "Makefile").read_text()
    assert "\nwheels:" in makefile
    for project in ("kvloom", "kvloom-fabric"):
        folder = REPOSITORY if project == "kvloom" else REPOSITORY / "fabric"
        assert f'name = "{project}"' in (folder / "pyproject.toml").read_text()
    assert makefile.count("hatchling build -t wheel") == 2
