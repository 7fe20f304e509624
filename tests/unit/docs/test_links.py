"""Links between documentation pages lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

_FIGURE = re.compile(r"\d[\d.,]*\d|\d")
PAGES = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md"), *(REPOSITORY / "deploy").rglob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_relative_link_has_its_file_and_heading(page: Path):
    """A page that was moved or a heading that was renamed leaves dead links elsewhere."""
    for linked, heading in _links(page):
        assert linked.exists(), linked
        assert not heading or heading in _anchors(linked), f"{linked} has no #{heading}"


def test_the_index_lists_every_page():
    """A page that docs/README.md does not list is a page that readers do not find."""
    index = REPOSITORY / "docs" / "README.md"
    listed = {linked for page in (index, REPOSITORY / "docs" / "adr" / "README.md") for linked, _ in _links(page)}
    assert {page for page in PAGES if page.is_relative_to(index.parent)} - {index} <= listed


@pytest.mark.parametrize("name", ["performance.md", "routing.md"])
def test_an_excerpt_has_the_figures_of_its_table(name: str):
    """Pages for users show excerpts of tables that `--page` options of benches rewrite in the notes."""
    page = (REPOSITORY / "docs" / name).read_text()
    excerpt = re.search(r"<!-- excerpt of: (\S+) -->\n(.*?)\n\n", page, re.DOTALL)
    assert excerpt is not None
    table = (REPOSITORY / "docs" / excerpt[1]).read_text().splitlines()
    for row in excerpt[2].splitlines()[2:]:
        subject, _, figures = row.strip("| ").partition(" |")
        source = " ".join(line for line in table if line.startswith(f"| {subject.partition(' (')[0]} "))
        assert set(_FIGURE.findall(figures)) <= set(_FIGURE.findall(source)), subject


def _links(page: Path) -> list[tuple[Path, str]]:
    """(file, heading or "") of each relative link. In code, brackets are no links."""
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    targets = [target.partition("#") for target in re.findall(r"\]\((?!https?://)([^)\s]+)\)", prose)]
    return [((page.parent / path).resolve() if path else page, heading) for path, _, heading in targets]


def _anchors(page: Path) -> set[str]:
    """As GitHub makes them: lower case, without punctuation, a hyphen for each space."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
