"""kvloom: the Python SDK (see ARCHITECTURE.md).

    from kvloom import ChatMessage, Client

The public names are those of `__all__`. Each is loaded when it is first used, so that a process which needs only a part
of the package does not pay for gRPC. The SDK imports neither Jinja nor any tokenizer, Redis, Prometheus or structlog.

client/            `Client` and `SyncClient`, the entry points, and how answers survive lost connections and routers
router_link/       the client side of the data plane: requests multiplexed over one stream per router
conversation/      tools, and their checks
text/              messages, and token ids packed for the wire
transport/         streams between processes: gRPC, and Unix sockets on one machine
enums.py           reasons, finish reasons and tiers as Python's enums
errors.py          the error catalogue: each reason's gRPC code, HTTP status and OpenAI type
sampling.py        limits and checks of sampling parameters and stop conditions
objectives.py      checks of the objectives of a request (docs/how-to/deadlines.md)
request_fields.py  the names of a request's fields where nothing nests them
guide.py           limits and checks of guides (JSON schemas, regular expressions, grammars)
adapters.py        LoRA adapters of models, and by which names they can be requested
limits_state.py    what a caller is told about its limits
backoff.py         exponential backoff
v1/                code generated from protos/kvloom/v1
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvloom.client.answer import Answer, AnswerChoice
    from kvloom.client.client import Client
    from kvloom.client.credentials import TlsOptions
    from kvloom.client.delta_stream import DeltaStream
    from kvloom.client.embedding import Embedding, Moderation
    from kvloom.client.generate_request import GenerateOptions
    from kvloom.client.generation import Delta, ToolCallDelta
    from kvloom.client.sync_client import SyncClient, SyncDeltaStream
    from kvloom.conversation.tools import Tool
    from kvloom.enums import CancelOutcome, ErrorReason, FinishReason, Tier
    from kvloom.errors import ErrorKind, KvloomError
    from kvloom.text.chat_message import ChatMessage, ToolCall

    __version__: str

__all__ = [
    "Answer",
    "AnswerChoice",
    "CancelOutcome",
    "ChatMessage",
    "Client",
    "Delta",
    "DeltaStream",
    "Embedding",
    "ErrorKind",
    "ErrorReason",
    "FinishReason",
    "GenerateOptions",
    "KvloomError",
    "Moderation",
    "SyncClient",
    "SyncDeltaStream",
    "Tier",
    "TlsOptions",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "__version__",
]

_MODULES = {
    "Answer": "kvloom.client.answer",
    "AnswerChoice": "kvloom.client.answer",
    "CancelOutcome": "kvloom.enums",
    "ChatMessage": "kvloom.text.chat_message",
    "Client": "kvloom.client.client",
    "Delta": "kvloom.client.generation",
    "DeltaStream": "kvloom.client.delta_stream",
    "Embedding": "kvloom.client.embedding",
    "ErrorKind": "kvloom.errors",
    "ErrorReason": "kvloom.enums",
    "FinishReason": "kvloom.enums",
    "GenerateOptions": "kvloom.client.generate_request",
    "KvloomError": "kvloom.errors",
    "Moderation": "kvloom.client.embedding",
    "SyncClient": "kvloom.client.sync_client",
    "SyncDeltaStream": "kvloom.client.sync_client",
    "Tier": "kvloom.enums",
    "TlsOptions": "kvloom.client.credentials",
    "Tool": "kvloom.conversation.tools",
    "ToolCall": "kvloom.text.chat_message",
    "ToolCallDelta": "kvloom.client.generation",
}


def __dir__() -> list[str]:
    return list(__all__)


def __getattr__(name: str) -> object:
    if name == "__version__":
        value: object = _version()
    elif name in _MODULES:
        value = getattr(importlib.import_module(_MODULES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def _version() -> str:
    try:
        return importlib.metadata.version("kvloom")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return "0.0.0"
