"""The options of `kvloom orgs`, `projects` and `keys` that say which priority classes may be named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tools.options import option

AddOption = Callable[[Any], Any]


def class_options(scope: str, all_of_them: str, otherwise: str) -> tuple[AddOption, AddOption, AddOption]:
    """`--class`, `--all-classes` and `--default-class`, with what holds without the first and the last one."""
    return (
        option(
            "--class",
            "classes",
            scope=scope,
            multiple=True,
            help="A priority class (docs/concepts/scheduling.md) that may be named. May be repeated.  "
            f"[default: {all_of_them}]",
        ),
        option("--all-classes", scope=scope, is_flag=True, help="All priority classes may be named."),
        option(
            "--default-class",
            scope=scope,
            help=f"The priority class of requests that name none. Empty: none.  [default: {otherwise}]",
        ),
    )


def given_class_paths(classes: Sequence[str], default_class: str | None) -> list[str]:
    """The fields that an update changes."""
    given = {"priority_classes": classes, "default_priority_class": default_class is not None}
    return [field for field, is_given in given.items() if is_given]


def given_names(names: Sequence[str], *, are_all: bool) -> Sequence[str]:
    """The names that an update allows."""
    return names or (["*"] if are_all else [])


def shown_classes(one: Any) -> str:
    """Those of an organisation, a project or a key, with the default one in brackets."""
    default = one.default_priority_class
    allowed = " ".join(one.priority_classes) or "all"
    return f"{allowed} (default {default})" if default else allowed
