"""The order of the tests under pytest-xdist."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest

from tests import run_order

SECONDS = {
    "tests/e2e/test_a.py": 9.0,
    "tests/e2e/test_b.py": 3.0,
    "tests/unit/test_c.py": 8.0,
    "tests/unit/test_d.py": 4.0,
}


class Test(NamedTuple):
    nodeid: str
    group: str = ""

    __test__ = False  # pytest would take it for a class of tests

    @property
    def path(self) -> Path:
        return Path(self.nodeid.partition("::")[0])

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return getattr(pytest.mark, name)(self.group).mark if self.group else None


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """These files do not exist."""
    monkeypatch.setattr(run_order, "compiles", lambda file: "torch" in file.name)


def ordered(*tests: Test) -> list[str]:
    """As the processes of pytest-xdist run them."""
    items: list[Any] = [*tests]
    begins = run_order.begin_of_groups(items)
    return [test.nodeid for test in sorted(tests, key=lambda test: begins[run_order.group_of(cast(Any, test))])]


def test_what_takes_longest_begins_first_and_fabrics_are_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several fabrics that start at the same time take the two cores from one another, until one is given up."""
    monkeypatch.setattr(run_order, "recorded", lambda: SECONDS)
    c, d = Test("tests/unit/test_c.py::test"), Test("tests/unit/test_d.py::test")
    a, b = Test("tests/e2e/test_a.py::test", "sim"), Test("tests/e2e/test_b.py::test")
    new = Test("tests/unit/test_new.py::test")
    found = ordered(new, b, d, c, a)
    assert set(found[:2]) == {a.nodeid, c.nodeid}
    assert found[2:] == [d.nodeid, b.nodeid, new.nodeid]


def test_tests_of_compiled_kernels_begin_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the first compiles, which takes minutes on a slow machine, other processes would only wait for it."""
    kernels = {f"tests/integration/test_torch_{name}.py": 90.0 - number for number, name in enumerate("abc")}
    monkeypatch.setattr(run_order, "recorded", lambda: SECONDS | kernels)
    found = ordered(*(Test(f"{file}::test") for file in SECONDS | kernels))
    assert ["torch" in test for test in found[:3]] == [False, False, True]


def test_a_file_whose_tests_have_two_groups_counts_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """The record has only the whole file."""
    monkeypatch.setattr(run_order, "recorded", lambda: SECONDS)
    items: list[Any] = [Test("tests/e2e/test_a.py::one", "sim"), *[Test("tests/e2e/test_a.py::two", "control")] * 2]
    assert run_order.seconds_by_group(items) == {"sim": 3.0, "control": 6.0}
