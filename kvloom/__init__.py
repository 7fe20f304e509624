"""kvloom: client SDK and what every process shares (see ARCHITECTURE.md).

The SDK's names are `kvloom.Client`, `kvloom.ChatMessage`, `kvloom.Delta` and `kvloom.KvloomError`. They are loaded when
first used, so that a process which needs only a part of the package does not pay for gRPC and Jinja.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvloom.client.client import Client as Client
    from kvloom.client.generation import Delta as Delta
    from kvloom.errors import KvloomError as KvloomError
    from kvloom.text.chat_template import ChatMessage as ChatMessage

_HOMES = {
    "ChatMessage": "kvloom.text.chat_template",
    "Client": "kvloom.client.client",
    "Delta": "kvloom.client.generation",
    "KvloomError": "kvloom.errors",
}


__version__ = importlib.metadata.version("kvloom")


def __dir__() -> list[str]:
    return [*_HOMES, "__version__"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
