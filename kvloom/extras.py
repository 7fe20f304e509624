"""Which extra brings what is not installed: `pip install kvloom` brings the SDK, without the services."""

from __future__ import annotations

from typing import Final

_BROUGHT_BY: Final = {
    **dict.fromkeys(("gguf", "llguidance", "numba", "numpy", "safetensors", "torch"), "torch"),
    "matplotlib": "simulate",
}
_OWN: Final = frozenset(("edge_http", "kvloom", "router", "safety_svc", "shard_server", "tools"))


def advice_on(error: ModuleNotFoundError) -> str | None:
    """One line for the user; None: it is one of our own modules, so a bug and no matter of what is installed."""
    package = (error.name or "").partition(".")[0]
    if not package or package in _OWN:
        return None
    return f'{package} is not installed; it comes with pip install "kvloom[{_BROUGHT_BY.get(package, "services")}]"'
