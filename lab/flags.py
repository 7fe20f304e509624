"""The flags of commands, with a line for each.

@click.command()
@flags("dst", count("--jobs", 1, "The number of processes.", to="num_jobs"), JSON)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import click

from shard_server.engines.torch_engine.checkpoint.converted_model import BUILTIN_MODEL_NAME
from tools.options import data_dir_option, option

Flag = Callable[[str], Callable[[Callable[..., Any]], Callable[..., Any]]]
"""Given the command's scope, which is in the names of its environment variables, it adds an option to the command."""


def flag(name: str, kind: click.ParamType | type, default: Any = None, about: str = "", **settings: Any) -> Flag:
    """`settings` are those of click.option; `to` is the name of the parameter. Without a default, `about` says what
    holds then."""
    to = settings.pop("to", "")
    names = (name, to) if to else (name,)
    settings |= {"type": kind, "default": default, "show_default": default is not None}
    return lambda scope: option(*names, scope=scope, help=about or None, **settings)


def count(
    name: str, default: int | None, about: str = "", *, least: int = 1, most: int | None = None, to: str = ""
) -> Flag:
    """A whole number. Its parameter has the flag's own name unless `to` is another one."""
    return flag(name, click.IntRange(least, most), default, about, to=to)


def number(
    name: str,
    default: float | None,
    about: str,
    *,
    least: float = 0.0,
    most: float | None = None,
    above: bool = False,
    to: str = "",
) -> Flag:
    """A number between `least` and `most`, and with `above` not `least` itself."""
    return flag(name, click.FloatRange(least, most, min_open=above), default, about, to=to)


def choice(name: str, choices: Sequence[str], default: str | None, about: str = "") -> Flag:
    return flag(name, click.Choice(choices), default, about)


def switch(name: str, about: str, to: str = "") -> Flag:
    return lambda scope: option(name, *filter(None, [to]), scope=scope, is_flag=True, help=about)


def flags(scope: str, *given: Flag) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add options to a command, in this order."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for add in reversed(given):
            command = add(scope)(command)
        return command

    return decorate


def plain(add: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Flag:
    """An option that has the same variable in all commands, or none."""
    return lambda _scope: add


DATA_DIR: Final = plain(data_dir_option)
JSON: Final = plain(click.option("--json", "as_json", is_flag=True, help="Print one JSON object."))
MODEL: Final = flag("--model", str, BUILTIN_MODEL_NAME, "Name, directory or .gguf file.", metavar="NAME|PATH")
