"""Shows the options of a request in `help()`, from the one place where they are written: `GenerateOptions`."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from kvloom.client.generate_request import GenerateOptions

_F = TypeVar("_F", bound=Callable[..., Any])


def lists_options(method: _F) -> _F:
    """A method that takes `**options: Unpack[GenerateOptions]` gets a signature with one keyword argument for each, and
    their descriptions at the end of its docstring."""
    own = [p for p in inspect.signature(method).parameters.values() if p.kind is not p.VAR_KEYWORD]
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if name == "model" else None,
            annotation=_type_of(name),
        )
        for name in GenerateOptions.__annotations__
    ]
    returns = method.__annotations__.get("return", inspect.Signature.empty)
    method.__signature__ = inspect.Signature([*own, *options], return_annotation=returns)  # pyrefly: ignore[missing-attribute]
    descriptions = "\n".join(f"    {name}: {text}" for name, text in option_descriptions().items())
    method.__doc__ = f"{inspect.cleandoc(method.__doc__ or '')}\n\nOptions:\n{descriptions}\n"
    return method


@functools.cache
def option_descriptions() -> Mapping[str, str]:
    """The docstring of each option, which Python does not keep; without the source, their types."""
    described = {name: f"{_type_of(name)}." for name in GenerateOptions.__annotations__}
    try:
        [definition] = ast.parse(inspect.getsource(GenerateOptions)).body
    except (OSError, TypeError, SyntaxError):
        return described
    assert isinstance(definition, ast.ClassDef)
    for field, text in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            words = " ".join(str(ast.literal_eval(text.value)).split())
            described[field.target.id] += f" {words}"
    return described


def _type_of(name: str) -> str:
    annotation = GenerateOptions.__annotations__[name]
    text = str(getattr(annotation, "__forward_arg__", annotation))
    return text.removeprefix("Required[").removesuffix("]") if text.startswith("Required[") else text
