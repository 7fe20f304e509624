"""docs/reliability.md names a test for everything that it promises; they must be there."""

from __future__ import annotations

import re

from tests.conftest import REPOSITORY
from tools.simulate.study.page import check_page

PAGE = REPOSITORY / "docs" / "reliability.md"


def test_every_test_on_the_page_exists():
    """A promise whose proof was renamed or removed is a promise without proof."""
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(test_\w+))?`", PAGE.read_text())
    assert len(named) > 20
    for path, test in named:
        assert re.search(rf"^(async )?def {test}\(" if test else "", (REPOSITORY / path).read_text(), re.MULTILINE), (
            f"{path} has no {test}"
        )


def test_every_row_of_failures_has_a_test():
    """The table says so."""
    table = PAGE.read_text().partition("| what fails |")[2].partition("\n\n")[0]
    rows = table.splitlines()[2:]
    assert len(rows) > 15
    for row in rows:
        assert "`tests/" in row.rsplit("|", 2)[1], row


def test_reports_have_their_place():
    """`kvloom chaos --page` fills these in."""
    check_page(PAGE, ["chaos", "soak"])
