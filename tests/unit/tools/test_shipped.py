"""The folders that fabric/hatch_build.py leaves out of the wheel are one fact, on which others depend."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from fabric.hatch_build import LEFT_OUT, PACKAGES
from tests.conftest import REPOSITORY

CONTRACT = "what is shipped imports nothing that is left out of the wheels"


def is_left_out(path: Path) -> bool:
    return any(path.is_relative_to(REPOSITORY / folder) for folder in LEFT_OUT)


def shipped_packages(path: Path) -> Iterator[str]:
    """The largest ones that hold nothing that is left out."""
    if is_left_out(path) or path.name in ("__init__.py", "__pycache__"):
        return
    if path.is_file() and path.suffix == ".py":
        yield ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
    elif (path / "__init__.py").exists():
        if any((REPOSITORY / folder).is_relative_to(path) for folder in LEFT_OUT):
            for child in path.iterdir():
                yield from shipped_packages(child)
        else:
            yield ".".join(path.relative_to(REPOSITORY).parts)


def test_a_contract_forbids_all_that_is_shipped_to_import_what_is_not():
    """An import of a bench works in the repository and breaks the command that pip installs."""
    contracts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = [contract for contract in contracts if contract["name"] == CONTRACT]
    assert contract["forbidden_modules"] == [folder.replace("/", ".") for folder in LEFT_OUT]
    shipped = {name for package in ("kvloom", *PACKAGES) for name in shipped_packages(REPOSITORY / package)}
    assert {"router", "tools.models", "tools.failures"} <= shipped
    assert set(contract["source_modules"]) == shipped


def test_the_command_alone_names_what_is_left_out():
    """A module that is named by a string is not seen by the contract. The command names its benches' group, and the
    message that the wheel shows instead of it names the folder."""
    pattern = re.compile("|".join(re.escape(folder.replace("/", ".")) for folder in LEFT_OUT))
    sources = [path for package in ("kvloom", *PACKAGES) for path in (REPOSITORY / package).rglob("*.py")]
    named = {path for path in sources if not is_left_out(path) and pattern.search(path.read_text())}
    assert named == {
        REPOSITORY / "kvloom_common/process/extras.py",
        REPOSITORY / "tools/cli/commands.py",
    }


def test_no_page_says_that_pip_finds_kvloom_by_itself() -> None:
    """`pip install kvloom` was in the docs while no index had it: a make target builds both, and pip is told where."""
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")]
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
