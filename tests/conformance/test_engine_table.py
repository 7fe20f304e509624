"""docs/engines.md says what the engines can do: a router filters on these, and so do people."""

from __future__ import annotations

from pathlib import Path

from tests.conformance.engine_table import PAGE, capabilities, split_page, table


async def test_the_page_says_what_the_engines_say(model_dir: Path) -> None:
    """A capability that comes or goes must not leave the page behind: `python -m tests.conformance.engine_table`."""
    assert split_page(PAGE.read_text())[1] == table(await capabilities(model_dir))
