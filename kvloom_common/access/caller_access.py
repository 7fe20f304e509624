"""Checks what a caller of a fabric with tenants may use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Protocol

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.tenancy.principal import Principal
from kvloom_common.tenancy.scopes import Scope

MAX_SHOWN_CHARS: Final = 128


class NamedModel(Protocol):
    @property
    def name(self) -> str: ...


def check_scope(principal: Principal, scope: Scope) -> None:
    """Raises KvloomError (PERMISSION_DENIED)."""
    if not principal.has_scope(scope):
        raise KvloomError(
            ErrorReason.ERROR_REASON_PERMISSION_DENIED, f"This needs a key with the scope {scope!r}, which yours lacks."
        )


def may_use(principal: Principal, name: str, models: Mapping[str, NamedModel]) -> bool:
    """Returns True when the model, adapter or route called `name` may be used. A model may have other names as well: it
    is enough if the one that is asked for is allowed, or its own. `models`: those that are served, by all names."""
    if principal.may_use_all_models:
        return True
    model = models.get(name)
    return principal.may_use((name,) if model is None else (name, model.name))


def check_models(principal: Principal, names: Iterable[str], models: Mapping[str, NamedModel]) -> None:
    """Raises KvloomError (PERMISSION_DENIED), which names the first one that may not be used, whether or not it
    exists."""
    for name in names:
        if not may_use(principal, name, models):
            raise KvloomError(
                ErrorReason.ERROR_REASON_PERMISSION_DENIED,
                f"Your key may not use the model {name[:MAX_SHOWN_CHARS]!r}.",
                field="model",
            )


def check_class(principal: Principal, name: str, field: str) -> None:
    """Raises KvloomError (PERMISSION_DENIED), with the header or field that names the class, or would."""
    if not principal.may_use_class(name):
        raise KvloomError(
            ErrorReason.ERROR_REASON_PERMISSION_DENIED,
            f"{field}: your key may not use the priority class {name[:MAX_SHOWN_CHARS]!r}.",
            field=field,
            end="rejected",
        )


def usable(principal: Principal, names: Iterable[str], models: Mapping[str, NamedModel]) -> Iterator[str]:
    """The names that may be used."""
    return (name for name in names if may_use(principal, name, models))
