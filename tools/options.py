"""Flags that several commands share. Every flag is in kebab case and can be set with a variable `KVLOOM_...`."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from kvloom_common.access.exposure import is_loopback
from kvloom_common.config import ConfigError, KvloomConfig, load_config
from kvloom_common.config.keys import complete_paths
from tools.failures import CommandError

DEFAULT_DATA_DIR: Final = Path("~/.kvloom")

_TIME: Final = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)(ms|s|m|h|)")
_UNIT_SECONDS: Final = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}

F = TypeVar("F", bound=Callable[..., Any])


def option(flag: str, *names: str, scope: str = "", **settings: Any) -> Callable[[F], F]:
    """click.option with an environment variable: KVLOOM_SOME_FLAG for `--some-flag`, or KVLOOM_SCOPE_SOME_FLAG if
    another command has a flag of the same name with another meaning."""
    variable = f"kvloom_{scope}{flag.replace('--', '_' if scope else '', 1)}".replace("-", "_").upper()
    return click.option(flag, *names, envvar=variable, show_envvar=True, **settings)


class Seconds(click.ParamType):
    """A time as people write it: 5, 5s, 500ms, 2m or 1h. Above 0 and at most `max_seconds`."""

    name = "time"

    def __init__(self, max_seconds: float) -> None:
        self._max_seconds = max_seconds

    def convert(self, value: str | float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = _TIME.fullmatch(str(value))
        if match is None:
            self.fail(f"{value!r} is no time such as 5s, 500ms, 2m or 1h", param, ctx)
        seconds = float(match[1]) * _UNIT_SECONDS[match[2]]
        if not 0 < seconds <= self._max_seconds:
            self.fail(f"{value!r} must be above 0 and at most {self._max_seconds:g} s", param, ctx)
        return seconds


class EngineName(click.ParamType):
    """An engine of kvloom's, or of a plugin. Those that exist are found out when a name is given."""

    name = "engine"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from shard_server.engines.engine_kinds import ENGINES  # every command imports this module

        names = ENGINES.names()
        if value not in names:
            self.fail(f"{value!r} is none of {', '.join(names)}", param, ctx)
        return value


def data_dir_option(function: F) -> F:
    return option(
        "--data-dir",
        type=click.Path(path_type=Path, file_okay=False),
        help=f"The directory for state, logs and models.  [default: {DEFAULT_DATA_DIR}]",
    )(function)


def local_option(function: F) -> F:
    return option("--local", is_flag=True, help="Only this machine of a fleet.")(function)


def config_option(function: F) -> F:
    return option(
        "--config",
        "config_file",
        type=click.Path(path_type=Path, dir_okay=False),
        help="A TOML or JSON file. Flags and environment variables override it.",
    )(function)


def load_config_file(path: Path | None) -> KvloomConfig:
    """Relative paths in the file are relative to its directory. Raises CommandError."""
    try:
        config = load_config(path)
    except ConfigError as error:
        raise CommandError(str(error)) from error
    base = Path.cwd() if path is None else path.absolute().parent
    complete_paths(config, base)
    return config


def given_as(name: str, kind: type[Any], *add_options: Callable[[F], F]) -> Callable[[F], F]:
    """Give a command the values of several flags as one argument: `kind` is a dataclass whose fields have the names of
    the flags' parameters."""
    fields = [field.name for field in dataclasses.fields(kind)]

    def decorate(function: F) -> F:
        @functools.wraps(function)  # also click's parameters
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            values = {field: kwargs.pop(field) for field in fields}
            return function(*args, **{name: kind(**values)}, **kwargs)

        made: Any = wrapped
        for add_option in add_options:
            made = add_option(made)
        return made

    return decorate


@dataclasses.dataclass(frozen=True)
class FabricFlags:
    """The flags by which a command finds its fabric."""

    data_dir: Path | None = None
    config_file: Path | None = None

    def load_config(self) -> KvloomConfig:
        """Raises CommandError."""
        return load_config_file(self.config_file)

    def home(self) -> Path:
        """The data directory. Raises CommandError."""
        return choose_data_dir(self.data_dir, self.load_config())


fabric_options: Final = given_as("fabric", FabricFlags, config_option, data_dir_option)


def choose_data_dir(flag: Path | None, config: KvloomConfig) -> Path:
    return (flag or Path(config.data_dir or DEFAULT_DATA_DIR)).expanduser().absolute()


def listener_options(scope: str, served: str, port: int) -> Callable[[F], F]:
    """Adds `--host`, `--port` (by default `port`), `--metrics-port` and `--insecure` to the command `scope`. `served`
    names who connects to it."""
    any_port = click.IntRange(0, 65535)
    about_host = f"The address on which {served} is served."
    flags = (
        option("--host", scope=scope, default="127.0.0.1", show_default=True, help=about_host),
        option("--port", scope=scope, type=any_port, default=port, show_default=True, metavar="N",
               help="Its port. 0 picks one."),
        option("--metrics-port", scope=scope, type=any_port, metavar="N", help="Serve /metrics there."),
        option("--insecure", scope=scope, is_flag=True, help="Listen on other addresses than loopback without TLS."),
    )  # fmt: skip

    def add(function: F) -> F:
        for flag in reversed(flags):
            function = flag(function)
        return function

    return add


def check_listener(host: str, config: KvloomConfig, risk: str, *, insecure: bool) -> None:
    """`risk` says what is accepted with `--insecure`. Raises CommandError if other machines can reach the address
    without TLS, which was not accepted either."""
    if not (is_loopback(host) or config.tls.certificate_file or insecure):
        raise CommandError(
            f"{host} can be reached from other machines: give a certificate (tls.certificate_file, tls.key_file), or "
            f"accept with --insecure that {risk}"
        )
