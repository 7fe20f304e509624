"""Reads the commands that a document promises to work, and what it says comes out of them.

<!-- test: NAME -->            the ```bash block that follows is run
<!-- output of: NAME -->       the ```text block that follows is what it prints, "…" standing for anything
"""

from __future__ import annotations

import dataclasses
import re

_BLOCK = r"<!-- {marker}: (?P<name>[\w-]+) -->\n```{language}\n(?P<body>.*?)^```$"
_ELLIPSIS = "…"


@dataclasses.dataclass(frozen=True)
class Example:
    name: str
    command: str
    output: str | None


def find_examples(markdown: str) -> list[Example]:
    """In order. Raises ValueError for a marker without its block, or for an output of no command."""
    commands = _blocks(markdown, "test", "bash")
    outputs = _blocks(markdown, "output of", "text")
    if orphans := outputs.keys() - commands.keys():
        raise ValueError(f"output of commands that do not exist: {', '.join(sorted(orphans))}")
    return [Example(name, command, outputs.get(name)) for name, command in commands.items()]


def missing_from(printed: str, documented: str) -> str | None:
    """The first piece of the documented text that was not printed behind the pieces before it; None if all were.

    Lines are pieces, cut again at each "…"."""
    position = 0
    for line in documented.splitlines():
        for piece in filter(None, (piece.strip() for piece in line.split(_ELLIPSIS))):
            found = printed.find(piece, position)
            if found < 0:
                return piece
            position = found + len(piece)
    return None


def _blocks(markdown: str, marker: str, language: str) -> dict[str, str]:
    pattern = _BLOCK.format(marker=marker, language=language)
    found = {match["name"]: match["body"] for match in re.finditer(pattern, markdown, re.DOTALL | re.MULTILINE)}
    if len(found) != len(re.findall(f"<!-- {marker}: ", markdown)):
        raise ValueError(f"a <!-- {marker}: NAME --> is not followed by a ```{language} block, or a name occurs twice")
    return found
