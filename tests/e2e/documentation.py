"""Reads the commands that a document promises to work, and what it says comes out of them.

<!-- test: NAME -->            the ```bash block that follows is run
<!-- test: NAME after OTHER -->  it is run in the shell that has run OTHER, for the variables that OTHER sets
<!-- output of: NAME -->       the ```text block that follows is what it prints, "…" standing for anything
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence

_BLOCK = r"<!-- {marker}: (?P<name>[\w-]+)(?: after (?P<after>[\w-]+))? -->\n```{language}\n(?P<body>.*?)^```$"
_ELLIPSIS = "…"
_DELTA = re.compile(r'(?<="delta":\{"content":")((?:[^"\\]|\\.)+)(?="\})')
"""The text of an event, as it stands in its JSON."""
_DELTA_OF_ANY_TEXT = "text"
BEHIND_EXAMPLE = "--- behind an example ---"


@dataclasses.dataclass(frozen=True)
class Example:
    name: str
    command: str
    output: str | None


def find_walks(markdown: str) -> list[list[Example]]:
    """The examples that one shell runs, in their order, for each such shell. Raises ValueError for a marker without its
    block, for an output of no command, or for a command after one that does not come before it."""
    commands = _blocks(markdown, "test", "bash")
    outputs = _blocks(markdown, "output of", "text")
    if orphans := outputs.keys() - commands.keys():
        raise ValueError(f"output of commands that do not exist: {', '.join(sorted(orphans))}")
    walks: dict[str, list[Example]] = {}
    for name, (command, after) in commands.items():
        if after and after not in walks:
            raise ValueError(f"{name} is after {after}, which does not come before it")
        output = outputs.get(name)
        walks[name] = [*walks.get(after, ()), Example(name, command, None if output is None else output[0])]
    continued = {after for _, after in commands.values()}
    return [walk for name, walk in walks.items() if name not in continued]


def script_of(walk: Sequence[Example]) -> str:
    """Bash that prints BEHIND_EXAMPLE behind the output of each example."""
    return "".join(f"{{\n{example.command}}}\nprintf '%s' '{BEHIND_EXAMPLE}'\n" for example in walk)


def missing_from(printed: str, documented: str) -> str | None:
    """The first piece of the documented text that was not printed behind the pieces before it; None if all were.

    Lines are pieces, cut again at each "…". How many tokens an event of a streamed answer brings depends on how busy
    the machine is: of such events the number and the shape count, and of their texts what they make together."""
    lines = _DELTA.sub(_DELTA_OF_ANY_TEXT, documented).splitlines()
    pieces = [piece.strip() for line in lines for piece in line.split(_ELLIPSIS)]
    missing = _first_missing(_DELTA.sub(_DELTA_OF_ANY_TEXT, printed), filter(None, pieces))
    return missing or _first_missing("".join(_DELTA.findall(printed)), _DELTA.findall(documented))


def _first_missing(text: str, pieces: Iterable[str]) -> str | None:
    position = 0
    for piece in pieces:
        found = text.find(piece, position)
        if found < 0:
            return piece
        position = found + len(piece)
    return None


def _blocks(markdown: str, marker: str, language: str) -> dict[str, tuple[str, str]]:
    """By name: (body, the name that it is after or "")."""
    pattern = _BLOCK.format(marker=marker, language=language)
    matches = re.finditer(pattern, markdown, re.DOTALL | re.MULTILINE)
    found = {match["name"]: (match["body"], match["after"] or "") for match in matches}
    if len(found) != len(re.findall(f"<!-- {marker}: ", markdown)):
        raise ValueError(f"a <!-- {marker}: NAME --> is not followed by a ```{language} block, or a name occurs twice")
    return found
