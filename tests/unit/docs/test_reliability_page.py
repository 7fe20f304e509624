"""docs/operate/reliability.md and its notes name a test for every promise; those tests must exist."""

from __future__ import annotations

import re

import pytest

from lab.pages import check_page
from tests.conftest import REPOSITORY

PAGE = REPOSITORY / "docs" / "operate" / "reliability.md"
NOTES = REPOSITORY / "docs" / "notes" / "reliability"


@pytest.mark.parametrize("page", [PAGE, *sorted(NOTES.glob("*.md"))], ids=lambda page: page.name)
def test_every_test_on_the_page_exists(page):
    """A promise whose test was renamed or removed is a promise without proof."""
    for path, test in re.findall(r"`(tests/[\w/]+\.py)(?:::(test_\w+))?`", page.read_text()):
        assert re.search(rf"^(async )?def {test}\(" if test else "", (REPOSITORY / path).read_text(), re.MULTILINE), (
            f"{path} has no {test}"
        )


def test_every_row_of_failures_has_a_test():
    """The page promises one for each row."""
    table = PAGE.read_text().partition("| what fails |")[2].partition("\n\n")[0]
    rows = table.splitlines()[2:]
    assert len(rows) > 15
    for row in rows:
        assert "`tests/" in row.rsplit("|", 2)[1], row


def test_reports_have_their_place():
    """`kvloom-lab chaos --page` writes them there."""
    check_page(NOTES / "chaos.md", ["chaos", "soak"])


@pytest.mark.parametrize("page", [REPOSITORY / "docs" / "notes" / "bug-track-record.md", NOTES / "planted-bugs.md"])
def test_every_planted_bug_on_the_page_exists(page):
    """The pages show how to plant a bug by its name."""
    text = page.read_text()
    named = set(re.findall(r"test_planted_bugs\.py -k (\w+)", text)) | set(re.findall(r"\| `([a-z_]{9,})`:", text))
    sources = "".join(path.read_text() for path in (REPOSITORY / "tests/lab/dst/planted_bugs").glob("*.py"))
    assert len(named - {"NAME"}) > 4
    assert not {name for name in named - {"NAME"} if f"def {name}(" not in sources}
