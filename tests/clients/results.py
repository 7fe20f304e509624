"""What the checks of a client came to, from the reports of pytest and of `node --test`, and the table of all."""

from __future__ import annotations

import dataclasses
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.clients.clients import CHECKS, Client

MARK = "clients"
"""Stands around the table in docs/how-to/clients.md."""


@dataclasses.dataclass(frozen=True)
class ClientResult:
    client: Client
    version: str
    outcomes: Mapping[str, bool]
    """Of each check that the client offers: whether all its tests passed."""

    @property
    def passed(self) -> bool:
        return bool(self.outcomes) and all(self.outcomes.values())


def read_report(path: Path) -> dict[str, bool]:
    """The outcome of each check in a JUnit report. Raises ValueError for a test of an unknown check."""
    if not path.exists():  # the runner itself failed, and has said why
        return {}
    outcomes: dict[str, bool] = {}
    for case in ElementTree.parse(path).iter("testcase"):
        name = case.get("name", "")
        passed = all(case.find(kind) is None for kind in ("failure", "error", "skipped"))
        check = _check_of(name)
        outcomes[check] = outcomes.get(check, True) and passed
    return outcomes


def _check_of(test: str) -> str:
    """`test_forced_tool[x]` in Python, `forced tool: x` in Node."""
    words = test.removeprefix("test_").replace("_", " ")
    for check in CHECKS:
        if words.startswith(check):
            return check
    raise ValueError(f"the test {test!r} belongs to none of the checks {', '.join(CHECKS)}")


def table(results: Sequence[ClientResult]) -> str:
    """The table in Markdown: "pass", "FAIL", or "-" for what has no test."""
    rows = [["client", "version", *CHECKS], ["---"] * (len(CHECKS) + 2)]
    for result in results:
        marks = [{True: "pass", False: "FAIL", None: "-"}[result.outcomes.get(check)] for check in CHECKS]
        rows.append([result.client.name, result.version, *marks])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def with_table(page: str, text: str, mark: str = MARK) -> str:
    """The page with this table between its marks."""
    begin, end = marks(mark)
    before, rest = page.split(begin)
    _, behind = rest.split(end)
    return f"{before}{begin}\n{text}\n{end}{behind}"


def rows_of(page: str, mark: str = MARK) -> list[list[str]]:
    """The cells of the table between these marks, without its head."""
    begin, end = marks(mark)
    lines = page.split(begin)[1].split(end)[0].strip().splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def marks(mark: str) -> tuple[str, str]:
    return f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
