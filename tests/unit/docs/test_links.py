"""Links between documentation pages lead somewhere."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

_FIGURE = re.compile(r"\d[\d.,]*\d|\d")
_NAMED_PAGE = re.compile(r"(?<![\w/.])docs/([\w/-]+)(\.md)?(?:#([\w-]+))?")
_TEST = re.compile(r"def (test_\w+)")
_NAMED_TEST = re.compile(r"`(?:tests/[\w/]+/)?(test_\w+(?:\.py)?)`")
_SOURCES = ("*.py", "*.proto", "*.toml", "*.md", "Makefile", "*Dockerfile", "*.html")
PAGES = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md"), *(REPOSITORY / "deploy").rglob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_relative_link_has_its_file_and_heading(page: Path):
    """A page that was moved or a heading that was renamed leaves dead links elsewhere."""
    for linked, heading in _links(page):
        assert linked.exists(), linked
        assert not heading or heading in _anchors(linked), f"{linked} has no #{heading}"


def test_every_page_that_sources_name_has_its_file_and_heading():
    """Docstrings, help texts and error messages send readers to pages, by the path from the top of the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *_SOURCES],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    named: dict[tuple[str, str], set[str]] = {}
    for source in filter(Path.is_file, map(REPOSITORY.joinpath, listed)):
        for name, suffix, heading in _NAMED_PAGE.findall(source.read_text()):
            if suffix or name.startswith("adr/"):
                named.setdefault((name + suffix, heading), set()).add(str(source.relative_to(REPOSITORY)))
    assert len(named) > 60
    for (name, heading), sources in named.items():
        pages = [REPOSITORY / "docs" / name] if name.endswith(".md") else list(REPOSITORY.glob(f"docs/{name}*.md"))
        assert len(pages) == 1, (name, sources)
        assert pages[0].exists(), (name, sources)
        assert not heading or heading in _anchors(pages[0]), (name, heading, sources)


def test_every_test_that_a_page_names_exists():
    """Pages about security and reliability name the proof of each line, which may be renamed."""
    sources = {path: path.read_text() for path in (REPOSITORY / "tests").rglob("*.py")}
    known = {path.name for path in sources} | set(_TEST.findall("".join(sources.values())))
    named = {(page.name, name) for page in PAGES for name in _NAMED_TEST.findall(page.read_text())}
    assert len(named) > 150
    assert {(page, name) for page, name in named if name not in known} == set()


def test_the_index_lists_every_page():
    """A page that docs/README.md does not list is a page that readers do not find."""
    index = REPOSITORY / "docs" / "README.md"
    listed = {linked for page in (index, REPOSITORY / "docs" / "adr" / "README.md") for linked, _ in _links(page)}
    assert {page for page in PAGES if page.is_relative_to(index.parent)} - {index} <= listed


@pytest.mark.parametrize("name", ["operate/performance.md", "concepts/routing.md"])
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
