"""How many fabrics a run of the tests starts: each is six to nine processes, which take seconds to start on two cores.

A start is a command that brings one up: `kvloom up` once it is ready (each machine of a fleet has its own), a bench or
chaos. With pytest-xdist every process counts its own. `make test` fails when there are more than MAX_STARTS: tests
share the fabrics of tests/e2e/conftest.py, and a further position of a proof is `long`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from _pytest.terminal import TerminalReporter
    from xdist.workermanage import WorkerController

MAX_STARTS: Final = 12
"""Of `make test`: ten fabrics, one of which has three machines."""
_KEY: Final = "fabric_starts"

_starts: list[str] = []


def count_start() -> None:
    """Counts one, for the test that runs."""
    _starts.append(os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0])


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output[_KEY] = _starts
    elif is_over_budget(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: WorkerController) -> None:
    """A worker that has died says nothing."""
    _starts.extend(getattr(node, "workeroutput", {}).get(_KEY, ()))


def is_over_budget(config: pytest.Config) -> bool:
    return config.option.markexpr == "not long" and len(_starts) > MAX_STARTS


def pytest_terminal_summary(terminalreporter: TerminalReporter, config: pytest.Config) -> None:
    if _starts:
        terminalreporter.write_line(f"{len(_starts)} fabrics were started ({MAX_STARTS} are the most of `make test`)")
    if is_over_budget(config):
        terminalreporter.section("too many fabrics were started, first by", red=True)
        for test in sorted(_starts):
            terminalreporter.write_line(test)
