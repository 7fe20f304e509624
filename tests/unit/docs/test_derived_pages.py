"""The pages of reference that are written from the code stay as the code is."""

from __future__ import annotations

import importlib.metadata
import re

import click
import pytest

from kvloom.errors import CATALOGUE
from tests import errors_page
from tests.cli_page import EXPLAINED_ABOVE, PAGES, page_with_commands
from tests.conftest import HAS_TORCH, REPOSITORY


@pytest.mark.skipif(not HAS_TORCH, reason="the help of some benches needs torch")
@pytest.mark.parametrize(("page", "name"), [(page, name) for page, (name, _) in PAGES.items()], ids=["cli", "lab"])
def test_the_page_of_a_command_is_what_its_help_says(page, name) -> None:
    """A flag is described once, where it is defined (`python -m tests.cli_page`)."""
    text = page.read_text()
    assert page_with_commands(text, name, PAGES[page][1]) == text


def test_the_page_of_a_command_has_its_groups_flags_and_links() -> None:
    """The maker of the page is tested on a group with an argument, defaults, a range and a page that is named."""

    @click.group()
    def tool() -> None:
        """A tool."""

    @tool.command()
    @click.argument("name")
    @click.option("--size", type=click.IntRange(1, 9), envvar="SIZE", show_envvar=True, help="The size.  [default: 2]")
    @click.option(
        "--kind", type=click.Choice(["a", "b"]), help="See docs/operate/fleet.md.", default="a", show_default=True
    )
    @click.option("--data-dir")
    def run(name: str, size: int, kind: str, data_dir: str) -> None:
        """Run NAME.

        It takes long."""

    page = page_with_commands("Head.\n<!-- derived: commands -->\nold", "tool", tool)
    assert page.startswith("Head.\n<!-- derived: commands -->\n\n## tool run\n\nRun NAME.\n\nIt takes long.\n\n")
    assert "tool run [flags] NAME" in page
    assert "| `--size N` | The size. (1 to 9) | 2 | `SIZE` |" in page
    assert "| `--kind [a\\|b]` | See [fleet.md](../operate/fleet.md). | a |  |" in page
    assert not any(flag in page for flag in EXPLAINED_ABOVE)
    assert "old" not in page


def test_the_page_of_errors_is_the_catalogue() -> None:
    """Every reason has its row, with what each API makes of it (`python -m tests.errors_page`)."""
    text = errors_page.PAGE.read_text()
    assert errors_page.page_with_tables(text) == text
    assert text.split(errors_page.MARKER)[1].count("\n| `") == len(CATALOGUE)


def test_the_page_of_conformance_is_what_the_client_and_the_routes_say() -> None:
    """A figure that nobody derives again is soon a wish (`python -m tests.conformance_page`)."""
    from tests import conformance_page  # which imports openai

    text = conformance_page.PAGE.read_text()
    assert conformance_page.page_with_tables(text) == text


def test_a_release_in_the_changelog_can_be_read_at_once() -> None:
    """A release has at most 30 lines, and the newest one is the version of the packages. Above it stands what none
    has yet."""
    text = (REPOSITORY / "CHANGELOG.md").read_text()
    heading, *releases = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    assert heading.startswith("Unreleased\n")
    assert releases[0].startswith(f"{importlib.metadata.version('kvloom')} - ")
    for release in releases:
        assert release.count("\n- ") <= 30, release.partition("\n")[0]
