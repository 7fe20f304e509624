"""Every input that has ever found a bug, and a few new ones of every target. `make fuzz` tries more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzz.corpus import CORPUS, kept_inputs, read_input
from tests.fuzz.target import Session
from tests.fuzz.targets import TARGETS


@pytest.fixture(scope="module")
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    """Of the target that the parameter names; its tests share it."""
    with Session(TARGETS[request.param]) as started:
        yield started


KEPT = [(name, path) for name in TARGETS for path in kept_inputs(name)]


@pytest.mark.parametrize(
    ("session", "path"), KEPT, ids=[f"{name}-{path.stem}" for name, path in KEPT], indirect=["session"]
)
def test_kept_inputs(session: Session, path: Path) -> None:
    """A bug that fuzzing found stays fixed."""
    session.run(read_input(path))


@pytest.mark.filterwarnings("ignore:Generating overly large repr")
@pytest.mark.parametrize("session", list(TARGETS), indirect=True)
def test_new_inputs(session: Session) -> None:
    """Whatever it is sent, a server refuses it in words and serves the others; a loader reports one clear error."""
    target = session.target

    @settings(max_examples=target.suite_examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(value=target.inputs)
    def example(value: Any) -> None:
        session.run(value)

    example()


def test_every_kept_input_has_a_target() -> None:
    """An input in a misspelt folder would never be replayed."""
    assert {path.parent.name for path in CORPUS.glob("*/*.json")} <= set(TARGETS)
