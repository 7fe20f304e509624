"""Checks names, times, scopes, models, cells, guardrails and priority classes. All functions return what they were
given, or raise KvloomError (INVALID_ARGUMENT) that names the field."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Final, get_args

from kvloom.errors import invalid_argument
from kvloom_common.tenancy.scopes import DEFAULT_SCOPES, ROLES, SCOPES, Role

_ID: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,62}[a-z0-9])?")
_USER: Final = re.compile(r"[A-Za-z0-9._@+-]{1,128}")
_IDENTITY: Final = re.compile(r"[a-z0-9-]{1,32}:[!-~]{1,470}")
_MODEL: Final = re.compile(r"[^\x00-\x20\x7f*]{1,256}\*?|\*")
MAX_NAME_CHARS: Final = 128
_CLASS: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
MAX_MODELS: Final = 256
MAX_MODELS_BYTES: Final = 16 * 2**10
"""The names of one entry have at most so many bytes together, in UTF-8: every edge and router keeps them."""
MAX_CLASSES: Final = 18
"""Those that may be declared (docs/concepts/scheduling.md), and the built-in ones."""
MAX_CELLS: Final = 16
MAX_GUARDRAILS: Final = 16
"""Half of those that a request may have (router/request_builder.py): it may name as many more."""
MAX_TIME: Final = 253_402_300_800.0
"""The year 10000."""


def organisation_id(text: str, field: str) -> str:
    if not _ID.fullmatch(text):
        raise invalid_argument(
            f"{text[:64]!r} is no name: 1 to 64 lower-case letters, digits and hyphens, with no hyphen at the ends.",
            field,
        )
    return text


tier_name = organisation_id


def project_id(text: str, field: str) -> str:
    organisation, slash, project = text.partition("/")
    if not slash or not _ID.fullmatch(organisation) or not _ID.fullmatch(project):
        raise invalid_argument(
            f"{text[:129]!r} is no ORGANISATION/PROJECT: both are 1 to 64 lower-case letters, digits and hyphens.",
            field,
        )
    return text


def organisation_of(project: str) -> str:
    return project.partition("/")[0]


def user_id(text: str, field: str) -> str:
    organisation, slash, name = text.rpartition("/")
    if not _USER.fullmatch(name) or (slash and not _ID.fullmatch(organisation)):
        raise invalid_argument(
            f"{text[:64]!r} is no user: NAME or ORGANISATION/NAME, and NAME is 1 to 128 letters, digits and any of "
            "'._@+-'.",
            field,
        )
    return text


def organisation_of_user(user: str) -> str:
    """The organisation whose own user this is (ORGANISATION/NAME); "": the operator has given the name."""
    return user.rpartition("/")[0]


def identity(text: str, field: str) -> str:
    if not _IDENTITY.fullmatch(text):
        raise invalid_argument(
            f"{text[:64]!r} is no identity: KIND:NAME, without spaces, at most 500 characters.", field
        )
    return text


def display_name(text: str, field: str) -> str:
    if len(text) > MAX_NAME_CHARS or not text.isprintable():
        raise invalid_argument(f"A name has at most {MAX_NAME_CHARS} printable characters.", field)
    return text


def require_some(given: Sequence[str], before: Sequence[str], field: str) -> None:
    """For a list of what is allowed, of which an empty one allows everything: who takes away its last name must not get
    that unasked."""
    if before and not given:
        raise invalid_argument("An empty list would allow everything: say '*' for that.", field)


def models(patterns: Sequence[str], field: str, before: Sequence[str] = ()) -> list[str]:
    """`before`: those that a change replaces."""
    if list(patterns) == ["*"]:
        return []
    require_some(patterns, before, field)
    if len(patterns) > MAX_MODELS:
        raise invalid_argument(f"There are at most {MAX_MODELS} models.", field)
    for pattern in patterns:
        if not _MODEL.fullmatch(pattern):
            raise invalid_argument(
                f"{pattern[:64]!r} is neither the name of a model nor the beginning of one with '*' at its end.", field
            )
    if sum(len(pattern.encode()) for pattern in patterns) > MAX_MODELS_BYTES:
        raise invalid_argument(f"The models have at most {MAX_MODELS_BYTES} bytes together.", field)
    return list(dict.fromkeys(patterns))


def residency(cells: Sequence[str], field: str, before: Sequence[str] = ()) -> list[str]:
    """Checks number and form: which cells there are is known to edges alone. `before`: those that a change replaces."""
    if list(cells) == ["*"]:
        return []
    require_some(cells, before, field)
    if len(cells) > MAX_CELLS:
        raise invalid_argument(f"There are at most {MAX_CELLS} cells.", field)
    return list(dict.fromkeys(organisation_id(cell, field) for cell in cells))


def guardrails(given: Sequence[str], field: str) -> list[str]:
    """Checks number and form: which rules there are is known to the safety service alone."""
    if len(given) > MAX_GUARDRAILS or any(not 0 < len(name) <= MAX_NAME_CHARS for name in given):
        raise invalid_argument(
            f"There are at most {MAX_GUARDRAILS} guardrails, with names of 1 to {MAX_NAME_CHARS} characters.", field
        )
    return list(dict.fromkeys(given))


def priority_classes(given: Sequence[str], field: str) -> list[str]:
    """Checks only number and form: which classes there are is known to edges and routers alone."""
    if len(given) > MAX_CLASSES:
        raise invalid_argument(f"There are at most {MAX_CLASSES} priority classes.", field)
    for name in given:
        if not _CLASS.fullmatch(name):
            raise invalid_argument(f"{name[:64]!r} cannot be the name of a priority class.", field)
    return list(dict.fromkeys(given))


def default_priority_class(name: str, allowed: Sequence[str], field: str) -> str:
    """One of those that are allowed. Empty: there is none."""
    if name:
        priority_classes((name,), field)
        if allowed and name not in allowed:
            raise invalid_argument(f"{name[:64]!r} is none of the priority classes that are allowed.", field)
    return name


def scopes(names: Sequence[str], field: str, before: Sequence[str] = ()) -> list[str]:
    """The default ones for none. `before`: those that a change replaces; it must name some."""
    if before and not names:
        raise invalid_argument("A key has at least one scope. To end it, revoke it.", field)
    for name in names:
        if name not in SCOPES:
            raise invalid_argument(f"{name[:64]!r} is no scope: there are {', '.join(SCOPES)}.", field)
    return [scope for scope in SCOPES if scope in (names or DEFAULT_SCOPES)]


def role(text: str, field: str) -> Role:
    for known in get_args(Role):
        if text == known:
            return known
    raise invalid_argument(f"{text[:64]!r} is no role: there are {', '.join(ROLES)}.", field)


def time(seconds: float, field: str) -> float:
    if not math.isfinite(seconds) or not 0.0 <= seconds <= MAX_TIME:
        raise invalid_argument(f"{field} must be a number of seconds from 0 to {MAX_TIME:.0f}.", field)
    return seconds


def integer(number: int, largest: int, field: str) -> int:
    if number > largest:
        raise invalid_argument(f"{number} is larger than {largest}.", field)
    return number
