"""Every input that has ever found a bug, and a few new ones of every target. `make fuzz` tries more."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.examples import num_examples
from tests.fuzz.corpus import CORPUS, kept_inputs, read_input
from tests.fuzz.target import Session
from tests.fuzz.targets import TARGETS


class Sessions:
    """One at a time: tests of the same target follow one another and share what is fuzzed."""

    def __init__(self) -> None:
        self._opened = contextlib.ExitStack()
        self._session: Session | None = None

    def of(self, name: str) -> Session:
        if self._session is None or self._session.target.name != name:
            self.close()
            self._session = self._opened.enter_context(Session(TARGETS[name]))
        return self._session

    def close(self) -> None:
        self._session = None
        self._opened.close()


@pytest.fixture(scope="module")
def sessions() -> Iterator[Sessions]:
    """Not a fixture for each target: pytest would start it again for each row of parameters."""
    with contextlib.closing(Sessions()) as shared:
        yield shared


@pytest.fixture
def session(request: pytest.FixtureRequest, sessions: Sessions) -> Session:
    """Of the target that the parameter names."""
    return sessions.of(request.param)


KEPT = [(name, path) for name in TARGETS for path in kept_inputs(name)]


@pytest.mark.parametrize(
    ("session", "path"), KEPT, ids=[f"{name}-{path.stem}" for name, path in KEPT], indirect=["session"]
)
def test_kept_inputs(session: Session, path: Path) -> None:
    """A bug that fuzzing found stays fixed."""
    session.run(read_input(path))


@pytest.mark.hypothesis
@pytest.mark.filterwarnings("ignore:Generating overly large repr")
@pytest.mark.parametrize("session", list(TARGETS), indirect=True)
def test_new_inputs(session: Session) -> None:
    """Whatever it is sent, a server refuses it in words and serves the others; a loader reports one clear error."""
    target = session.target

    @settings(max_examples=num_examples(target.suite_examples), deadline=None, suppress_health_check=list(HealthCheck))
    @given(value=target.inputs)
    def example(value: Any) -> None:
        session.run(value)

    example()


def test_every_kept_input_has_a_target() -> None:
    """An input in a misspelt folder would never be replayed."""
    assert {path.parent.name for path in CORPUS.glob("*/*.json")} <= set(TARGETS)
