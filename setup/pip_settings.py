"""Translates pip's settings for uv, which reads neither pip's configuration files nor its PIP_* variables."""

from __future__ import annotations

import ast
import dataclasses
import math
from collections.abc import Mapping
from typing import Final

_PRECEDENCE: Final = ("global", "install", ":env:")
"""Sections of `pip config list`, the weakest first."""
_VARIABLES: Final = {
    "index-url": ("UV_DEFAULT_INDEX",),
    "cert": ("SSL_CERT_FILE",),
    "client-cert": ("SSL_CLIENT_CERT",),
    "proxy": ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"),
    "timeout": ("UV_HTTP_TIMEOUT",),
    "retries": ("UV_HTTP_RETRIES",),
}
_WHOLE_NUMBERS: Final = ("timeout", "retries")
_SYNONYMS: Final = {"default-timeout": "timeout", "pypi-url": "index-url"}
_LISTS: Final = {
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "trusted-host": ("UV_INSECURE_HOST", " "),
}
"""Their variable, and what separates its values. pip separates by white space."""
_SWITCHES: Final = {
    "no-index": "--no-index",
    "pre": "--prerelease=allow",
    "no-cache-dir": "--no-cache",
}
_FLAGS: Final = ("constraint", "no-binary", "only-binary")
"""These become flags of uv, which are added to others of the same name; its variables would be overridden by those."""
_WITHOUT_EFFECT: Final = frozenset(
    (
        "break-system-packages",
        "cache-dir",
        "compile",
        "config-file",
        "debug",
        "disable-pip-version-check",
        "log",
        "no-color",
        "no-compile",
        "no-input",
        "no-python-version-warning",
        "no-warn-conflicts",
        "no-warn-script-location",
        "prefer-binary",
        "progress-bar",
        "quiet",
        "require-virtualenv",
        "root-user-action",
        "upgrade-strategy",
        "user",
        "verbose",
    )
)
"""They do not change which packages come into a virtual environment, and from where."""


@dataclasses.dataclass(frozen=True, slots=True)
class UvSettings:
    """The same settings for uv."""

    environment: Mapping[str, str]
    flags: tuple[str, ...]


class UntranslatableError(Exception):
    """uv has no counterpart of a setting. The message names the setting, and not its value, which may be a secret."""


def parse_settings(listed: str) -> dict[str, str]:
    """The settings that hold for `pip install`, from what `pip config list` prints: `section.name='value'` a line."""
    sections: dict[str, dict[str, str]] = {name: {} for name in _PRECEDENCE}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in sections:
            name = name.replace("_", "-")
            sections[section][_SYNONYMS.get(name, name)] = str(ast.literal_eval(value))
    return {name: value for section in _PRECEDENCE for name, value in sections[section].items()}


def for_uv(settings: Mapping[str, str]) -> UvSettings:
    """Raises UntranslatableError if uv would install something else than pip."""
    environment: dict[str, str] = {}
    flags: list[str] = []
    for name, value in settings.items():
        if name in _WHOLE_NUMBERS:
            value = str(math.ceil(float(value)))
        if name in _VARIABLES:
            environment.update(dict.fromkeys(_VARIABLES[name], value))
        elif name in _LISTS:
            variable, separator = _LISTS[name]
            environment[variable] = separator.join(value.split())
        elif name in _SWITCHES:
            flags += [_SWITCHES[name]] if is_on(value) else []
        elif name in _FLAGS:
            flags += [f"--{name}={single}" for single in value.replace(",", " ").split()]
        elif name == "use-feature":
            environment.update({"UV_SYSTEM_CERTS": "1"} if "truststore" in value.split() else {})
        elif name not in _WITHOUT_EFFECT and not _is_off(value):
            raise UntranslatableError(f"uv has no counterpart of pip's setting '{name}'")
    if "UV_INDEX" in environment:
        # pip takes the best version of all indexes; uv by itself would stop at the first index that has the package.
        environment["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return UvSettings(environment, tuple(flags))


def is_on(value: str) -> bool:
    return value.strip().lower() in ("1", "true", "yes", "on")


def _is_off(value: str) -> bool:
    return value.strip().lower() in ("", "0", "false", "no", "off")
