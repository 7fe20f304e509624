"""Writes the reference of the commands, docs/reference/cli.md and docs/reference/lab.md, from the commands themselves.

It is called as `python -m tests.cli_page`. Below the marker of a page stands what `--help` says, so that a flag is
described once, where it is defined; above it stands what no command says.
"""

from __future__ import annotations

import inspect
import os
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import click

from lab.commands import main as lab_command
from tools.cli.commands import main

REFERENCE: Final = Path(__file__).parents[1] / "docs" / "reference"
PAGES: Final[Mapping[Path, tuple[str, click.Group]]] = {
    REFERENCE / "cli.md": ("kvloom", main),
    REFERENCE / "lab.md": ("kvloom-lab", lab_command),
}
MARKER: Final = "<!-- derived: commands -->\n"
EXPLAINED_ABOVE: Final = frozenset({"--data-dir", "--config", "--help"})
_WIDTH: Final = 116
_METAVARS: Final = {"INTEGER RANGE": "N", "INTEGER": "N", "FLOAT RANGE": "X", "FLOAT": "X", "DIRECTORY": "DIR"}
_PAGE: Final = re.compile(r"docs/([\w/-]+)\.md(#[\w-]+)?")
_DEFAULT: Final = re.compile(r"\s*\[default: ([^\]]*)\]")
_RANGE: Final = re.compile(r"(?:(.+?)(<=?))?x(?:(<=?|>=?)(.+))?")


def page_with_commands(page: str, name: str, group: click.Group) -> str:
    """The page with everything below its marker written anew."""
    head, found, _ = page.partition(MARKER)
    assert found, f"the page of {name} has no {MARKER}"
    context = click.Context(group, info_name=name, max_content_width=_WIDTH)
    sections = "\n\n".join(_sections(group, context))
    return f"{head}{MARKER}\n{sections}\n"


def _sections(group: click.Group, context: click.Context) -> Iterator[str]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None, name
        inner = click.Context(command, info_name=name, parent=context)
        yield _section(command, inner)
        if isinstance(command, click.Group):
            yield from _sections(command, inner)


def _section(command: click.Command, context: click.Context) -> str:
    depth = context.command_path.count(" ") + 1
    parts = [f"{'#' * depth} {context.command_path}", _prose(command.help or "")]
    if not isinstance(command, click.Group):
        usage = " ".join([context.command_path, *command.collect_usage_pieces(context)]).replace("[OPTIONS]", "[flags]")
        parts.append(f"```\n{usage}\n```")
    options = [one for one in command.params if isinstance(one, click.Option) and one.opts[0] not in EXPLAINED_ABOVE]
    if options:
        rows = "\n".join(_row(option, context) for option in options)
        parts.append(f"| flag | meaning | default | environment |\n|---|---|---|---|\n{rows}")
    return "\n\n".join(parts)


def _prose(help_text: str) -> str:
    """The paragraphs of a help text. Those that begin with click's mark for "as it is" stay so, in a block."""
    blocks = []
    for block in inspect.cleandoc(help_text).split("\n\n"):
        if block.startswith("\b"):
            blocks.append(f"```\n{block.removeprefix(chr(8)).strip(chr(10))}\n```")
        else:
            text = _with_links(" ".join(block.split()))
            blocks.append(textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False))
    return "\n\n".join(blocks)


def _row(option: click.Option, context: click.Context) -> str:
    record = option.get_help_record(context)
    assert record is not None, option.name
    flags, _, metavar = record[0].partition(" ") if ", " not in record[0] else record[0].rpartition(" ")
    flag = f"{flags} {_METAVARS.get(metavar, metavar)}".strip()
    extra = option.get_help_extra(context)
    meaning = option.help or ""
    written = _DEFAULT.search(meaning)
    default = written[1] if written else extra.get("default", "required" if option.required else "")
    meaning = _DEFAULT.sub("", meaning).strip() + _limits(extra.get("range", ""))
    variables = ", ".join(f"`{name}`" for name in extra.get("envvars", ()))
    cells = (f"`{flag}`", _with_links(meaning), _number(default), variables)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _limits(said: str) -> str:
    """The range of a number in words, where it has an end that is not plain: a count of at least 0 says nothing."""
    found = _RANGE.fullmatch(said)
    if found is None:
        return ""
    low, low_sign, sign, high = found.groups()
    if low is not None and high is not None:
        return f" ({'above ' if low_sign == '<' else ''}{_number(low)} to {_number(high)})"
    return f" (above {_number(high)})" if sign == ">" and high != "0" else ""


def _number(text: str) -> str:
    return text.removesuffix(".0") if re.fullmatch(r"\d+\.0", text) else text


def _with_links(text: str) -> str:
    """The text with links in place of the paths of pages, which are those from the top of the repository."""

    def link(found: re.Match[str]) -> str:
        target = os.path.relpath(f"docs/{found[1]}.md", "docs/reference")
        return f"[{found[1].rpartition('/')[2]}.md]({target}{found[2] or ''})"

    return _PAGE.sub(link, text)


if __name__ == "__main__":
    for _path, (_name, _group) in PAGES.items():
        _path.write_text(page_with_commands(_path.read_text(), _name, _group))
