"""docs/reference/tensorrt-llm-features.md says how each feature was verified: its test must exist, and no GPU was
there."""

from __future__ import annotations

import re

from tests.conftest import REPOSITORY

PAGE = REPOSITORY / "docs" / "reference" / "tensorrt-llm-features.md"
HEADER = "| feature | 1.2.1 | newest | verified | test |"
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def rows() -> list[list[str]]:
    _, _, table = PAGE.read_text().partition(HEADER)
    lines = table.partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_feature_names_a_test_that_exists() -> None:
    """A renamed test would leave a claim that nothing proves."""
    assert len(rows()) > 10
    for feature, *_, cell in rows():
        found = TEST.fullmatch(cell)
        assert found is not None, feature
        path, name = found.groups()
        assert re.search(rf"^(async )?def {name}\(", (REPOSITORY / path).read_text(), re.MULTILINE), feature


def test_nothing_is_claimed_of_a_gpu() -> None:
    """What only a fake has shown must not read as if the library had."""
    for feature, _, _, verified, _ in rows():
        assert set(verified.split(", ")) <= {"by source", "by fake", "–"}, feature
