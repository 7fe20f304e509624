"""A group of commands that are imported only when they are used."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from kvloom_common.process.extras import MissingPackageError, naming_extras
from tools.failures import CommandError


class LazyGroup(click.Group):
    """A group whose commands are imported only when they are used, so that `kvloom status` does not load gRPC.

    `commands_at` maps names to "module:attribute", in the order of --help. `sections` maps headings to such mappings,
    for a --help with several lists. `moved_to` maps names of former commands to the commands of a checkout that have
    replaced them, which the error names.
    """

    def __init__(
        self,
        *args: Any,
        commands_at: Mapping[str, str] | None = None,
        sections: Mapping[str, Mapping[str, str]] | None = None,
        moved_to: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.sections = sections or {"Commands": commands_at or {}}
        self._moved_to = moved_to or {}
        self._commands_at = {name: place for section in self.sections.values() for name, place in section.items()}

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(self._commands_at)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        place = self._commands_at.get(cmd_name)
        if place is None:
            if cmd_name in self._moved_to:
                raise CommandError(
                    f"{ctx.command_path} {cmd_name} is now {self._moved_to[cmd_name]}, which a checkout of kvloom's "
                    "repository has (docs/reference/lab.md)"
                )
            return None
        module, attribute = place.split(":")
        try:
            with naming_extras():
                command = getattr(importlib.import_module(module), attribute)
        except MissingPackageError as error:
            raise CommandError(str(error)) from error
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Like click, but the commands are not imported for it: of each, the source is read."""
        width = formatter.width - 6 - max(map(len, self._commands_at))
        for heading, names in self.sections.items():
            with formatter.section(heading):
                formatter.write_dl([(name, self.summary_of(name, width)) for name in names])

    def summary_of(self, name: str, width: int) -> str:
        """The beginning of the command's documentation."""
        module, attribute = self._commands_at[name].split(":")
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None or found.origin is None:  # it is not installed, and an import says why
            return self._reason_without(name)
        text = documentation(Path(found.origin).read_text(encoding="utf-8"), attribute)
        return click.Command(name, help=text).get_short_help_str(width)

    def _reason_without(self, name: str) -> str:
        try:
            self.get_command(click.Context(self), name)
        except CommandError as error:
            return error.message
        return ""

    def main(self, *args: Any, standalone_mode: bool = True, **kwargs: Any) -> Any:
        """Like click, but every failure is one line on stderr, including that of a wrong flag."""
        if not standalone_mode:
            return super().main(*args, standalone_mode=False, **kwargs)
        try:
            status = super().main(*args, standalone_mode=False, **kwargs)
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            sys.exit(error.exit_code)
        except click.UsageError as error:
            advice = f" (see {error.ctx.command_path} --help)" if error.ctx is not None else ""
            print(f"error: {error.format_message()}{advice}", file=sys.stderr)
            sys.exit(error.exit_code)
        except click.ClickException as error:
            error.show()
            sys.exit(error.exit_code)
        except click.Abort:
            print("aborted", file=sys.stderr)
            sys.exit(130)
        sys.exit(status if isinstance(status, int) else 0)


def documentation(source: str, function: str) -> str:
    """The docstring of a function in a module's source; "" if it has none."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function:
            return ast.get_docstring(node) or ""
    return ""
