"""Flags that several commands share. Every flag is in kebab case and can be set with a variable `KVLOOM_...`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from kvloom_common.config import ConfigError, KvloomConfig, load_config
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
        from shard_server.engines.engine_plugins import ENGINES  # every command imports this module

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
    config.data_dir = _absolute(config.data_dir, base)
    for model in (config.model, *config.models):
        model.path = _model_source(model.path, base)
        for adapter in model.adapters:
            adapter.path = _absolute(adapter.path, base)
    config.control.database_url = _absolute_sqlite(config.control.database_url, base)
    config.fabric.secret_file = _absolute(config.fabric.secret_file, base)
    config.callers.api_keys_file = _absolute(config.callers.api_keys_file, base)
    for issuer in config.control.issuers:
        issuer.jwks_file = _absolute(issuer.jwks_file, base)
    config.tls.certificate_file = _absolute(config.tls.certificate_file, base)
    config.tls.key_file = _absolute(config.tls.key_file, base)
    config.tls.client_ca_file = _absolute(config.tls.client_ca_file, base)
    config.tls.client_crl_file = _absolute(config.tls.client_crl_file, base)
    config.safety.policy_file = _absolute(config.safety.policy_file, base)
    config.router.receipts.key_file = _absolute(config.router.receipts.key_file, base)
    config.shard.spot_notice_file = _absolute(config.shard.spot_notice_file, base)
    config.edge.adapters_dir = _absolute(config.edge.adapters_dir, base)
    config.router.decision_log.path = _absolute(config.router.decision_log.path, base)
    return config


def choose_data_dir(flag: Path | None, config: KvloomConfig) -> Path:
    return (flag or Path(config.data_dir or DEFAULT_DATA_DIR)).expanduser().absolute()


def _model_source(source: str, base: Path) -> str:
    """Returns the absolute path of a file here; what is no path may be the name of a model."""
    found = _absolute(source, base)
    return found if source and Path(found).exists() else source


def _absolute_sqlite(url: str, base: Path) -> str:
    scheme, _, path = url.partition(":///")
    return f"sqlite:///{_absolute(path, base)}" if scheme == "sqlite" and path else url


def _absolute(path: str, base: Path) -> str:
    return str(base / Path(path).expanduser()) if path else ""
