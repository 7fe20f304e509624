"""docs/reference/configuration.md shows the whole tree with its defaults; this keeps it so."""

from __future__ import annotations

import re

from kvloom_common.config import KvloomConfig, load_config
from tests.config_page import PAGE, page_with_derived_parts


def test_the_page_shows_every_key_with_its_default(tmp_path) -> None:
    """A reader copies the block: it must load, change nothing, and leave no key out."""
    page = PAGE.read_text()
    block = re.search(r"```toml\n(.*?)```", page, re.DOTALL)
    assert block is not None
    path = tmp_path / "kvloom.toml"
    path.write_text(block.group(1))
    assert load_config(path) == KvloomConfig()
    shown = set(re.findall(r"^(?:# )?(\w+) =(?: |$)", block.group(1), re.MULTILINE))
    assert shown == _keys(KvloomConfig())


def test_the_page_derives_from_the_definition_of_the_keys() -> None:
    """A key has one record; what the page says otherwise would be a second one (`python -m tests.config_page`)."""
    page = PAGE.read_text()
    assert page_with_derived_parts(page) == page


def _keys(section: object) -> set[str]:
    keys: set[str] = set()
    for name in section.__struct_fields__:
        value = getattr(section, name)
        keys |= _keys(value) if hasattr(value, "__struct_fields__") else {name}
    return keys
