"""docs/concepts/engines.md lists the capabilities of the engines, which routers and operators rely on."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.shallow_model import write_shallow_model
from tests.conformance.engine_table import BEGIN, END, PAGE, capabilities, split_page, table


def test_only_the_table_is_replaced() -> None:
    """The text around the table is written by hand."""
    assert split_page(f"a\n{BEGIN}\n{END}\nb") == ("a\n", "", "\nb")
    assert split_page(f"a\n{BEGIN}\n| x |\n{END}\nb") == ("a\n", "| x |", "\nb")
    with pytest.raises(ValueError):
        split_page(f"a\n{BEGIN}\n| x |")


async def test_the_page_says_what_the_engines_say(model_dir: Path, tmp_path: Path) -> None:
    """A capability that comes or goes must not leave the page behind: `python -m tests.conformance.engine_table`."""
    shallow_dir = write_shallow_model(model_dir, tmp_path / "shallow", num_layers=1)
    assert split_page(PAGE.read_text())[1] == table(await capabilities(shallow_dir))
