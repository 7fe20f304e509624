"""The flags of `kvloom up` that set keys of the configuration, as the keys themselves describe them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec
from msgspec import inspect

from kvloom_common.config import KvloomConfig
from kvloom_common.config.keys import ConfigKey, is_path, keys_by_flag, set_value
from tools.failures import CommandError
from tools.options import option

F = TypeVar("F", bound=Callable[..., Any])


def config_flags(*names: str) -> Callable[[F], F]:
    """The options of these flags, in this order; their names in Python are those of `apply_config_flags`."""

    def decorate(function: F) -> F:
        for name in reversed(names):
            function = _option_of(keys_by_flag()[name][0])(function)
        return function

    return decorate


def apply_config_flags(config: KvloomConfig, flags: Mapping[str, Any]) -> None:
    """Give the keys of the flags that were given their values. Raises CommandError that names the flag."""
    for name, keys in keys_by_flag().items():
        value = flags.get(name.replace("-", "_"))
        if value is None or value is False or value == ():
            continue
        for key in keys:
            set_value(config, key.name, _converted(name, key, value))


def _converted(flag: str, key: ConfigKey, value: Any) -> Any:
    if isinstance(value, bool):
        return not key.default
    if isinstance(value, Path):  # a daemon opens it from another directory
        return str(value.expanduser().absolute())
    if isinstance(value, tuple):
        value = list(dict.fromkeys(value))
    try:
        return msgspec.convert(value, key.type)
    except msgspec.ValidationError as error:
        raise CommandError(f"--{flag}: {error}") from error


def _option_of(key: ConfigKey) -> Callable[[F], F]:
    flag = key.flag
    assert flag is not None
    settings: dict[str, Any] = {"metavar": flag.metavar}
    default = flag.default or (
        ""
        if isinstance(key.default, bool)
        else f"{key.default:g}"
        if isinstance(key.default, float)
        else str(key.default)
    )
    match inspect.type_info(key.type):
        case inspect.BoolType():
            settings |= {"is_flag": True}
        case inspect.ListType(item_type=inspect.LiteralType(values=values)):
            settings |= {"type": click.Choice(values), "multiple": True}
        case inspect.ListType():
            settings |= {"multiple": True}
        case inspect.IntType(ge=least, le=most):
            settings |= {"type": click.IntRange(least, most)}
        case inspect.FloatType(ge=least, gt=above):
            settings |= {"type": click.FloatRange(min=above if least is None else least, min_open=least is None)}
        case _:
            settings |= {"type": click.Path(path_type=Path, dir_okay=False) if is_path(key) else str}
    names = [f"--{flag.name}", *([f"--{flag.alias}"] if flag.alias else []), flag.name.replace("-", "_")]
    return option(*names, help=flag.help + (f"  [default: {default}]" if default else ""), **settings)
