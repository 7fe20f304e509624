"""A group of commands that are imported only when they are used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

import click

from kvloom_common.process.extras import MissingPackageError, naming_extras
from tools.failures import CommandError


class LazyGroup(click.Group):
    """A group whose commands are imported only when they are used, so that `kvloom status` does not load gRPC.

    `commands_at` maps names to "module:attribute", in the order of --help. `sections` maps headings to such mappings,
    for a --help with several lists.
    """

    def __init__(
        self,
        *args: Any,
        commands_at: Mapping[str, str] | None = None,
        sections: Mapping[str, Mapping[str, str]] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.sections = sections or {"Commands": commands_at or {}}
        self._commands_at = {name: place for section in self.sections.values() for name, place in section.items()}

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(self._commands_at)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        place = self._commands_at.get(cmd_name)
        if place is None:
            return None
        module, attribute = place.split(":")
        try:
            with naming_extras():
                command = getattr(importlib.import_module(module), attribute)
        except MissingPackageError as error:
            raise CommandError(str(error)) from error
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Like click, but a command that cannot be imported does not hide the others."""
        width = formatter.width - 6 - max(map(len, self._commands_at))
        for heading, names in self.sections.items():
            with formatter.section(heading):
                formatter.write_dl([(name, self._short_help(ctx, name, width)) for name in names])

    def _short_help(self, ctx: click.Context, name: str, width: int) -> str:
        try:
            command = self.get_command(ctx, name)
        except CommandError as error:
            return error.message
        return "" if command is None else command.get_short_help_str(width)

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
