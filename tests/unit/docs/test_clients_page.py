"""The table of docs/how-to/clients.md is that of the clients which `make test-clients` installs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.clients.clients import CLIENTS
from tests.clients.results import ClientResult, read_report, rows_of, table
from tests.clients.run_agents import AGENTS, MARK

REPOSITORY = Path(__file__).parents[3]
CLIENTS_FOLDER = REPOSITORY / "tests" / "clients"
PAGE = REPOSITORY / "docs" / "how-to" / "clients.md"


def pinned(environment: str) -> dict[str, str]:
    """The versions of an environment's packages."""
    if environment in ("node", "agents"):
        return json.loads((CLIENTS_FOLDER / environment / "package.json").read_text())["dependencies"]
    text = (CLIENTS_FOLDER / "python" / f"{environment}.txt").read_text()
    return dict(re.findall(r"^([\w.-]+)(?:\[.*\])?==(\S+)$", text, re.MULTILINE))


def test_the_table_has_the_pinned_versions_of_all_clients() -> None:
    """A new version of a client that was not run must not look as if it had been."""
    shown = [row[:2] for row in rows_of(PAGE.read_text())]
    assert [name for name, _ in shown] == [client.name for client in CLIENTS]
    for client, (_, version) in zip(CLIENTS, shown, strict=True):
        for package in client.packages:
            assert pinned(client.environment)[package] in version


def test_the_table_has_the_pinned_versions_of_all_agents() -> None:
    """Likewise, and no agent fails."""
    rows = rows_of(PAGE.read_text(), MARK)
    assert [row[0] for row in rows] == [agent.name for agent in AGENTS]
    for agent, row in zip(AGENTS, rows, strict=True):
        environment = "aider" if agent.name == "aider" else "agents"
        assert row[1] == (pinned(environment)[agent.package] if agent.package else "played")
        assert set(row[3:]) <= {"pass", "-"}
        assert row.count("-") == len(agent.not_offered)


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_every_client_has_its_file(client) -> None:
    """A client without checks would have an empty row."""
    folder = "node" if client.environment == "node" else "python"
    assert (CLIENTS_FOLDER / folder / client.file).exists()


def test_a_check_fails_with_any_of_its_tests(tmp_path: Path) -> None:
    """A parametrised test that failed once, or did not run, must show in the table; and so must a client whose checks
    could not be collected."""
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase name="test_plain[a]"/><testcase name="test_plain[b]"><failure/></testcase>'
        '<testcase name="forced tool: streamed"/><testcase name="test_abort"><skipped/></testcase>'
        "</testsuite></testsuites>"
    )
    outcomes = read_report(report)
    assert outcomes == {"plain": False, "forced tool": True, "abort": False}
    result = ClientResult(CLIENTS[0], "1", outcomes)
    assert not result.passed
    assert table([result]).splitlines()[2] == "| openai (Python) | 1 | FAIL | - | pass | - | - | - | - | - | FAIL |"
    assert not ClientResult(CLIENTS[0], "1", read_report(tmp_path / "none.xml")).passed
    report.write_text('<testsuite><testcase name="test_something_else"/></testsuite>')
    with pytest.raises(ValueError, match="something_else"):
        read_report(report)
