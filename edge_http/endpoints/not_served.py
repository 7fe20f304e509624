"""APIs of OpenAI, and of servers like it, that kvloom does not serve. Their paths are refused by name, so that a user
does not take the refusal for a wrong URL."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason

_CHAT: Final = "This server generates text: use POST /v1/chat/completions."
_FILES: Final = "Send texts as parts of messages to POST /v1/chat/completions."
_STATE: Final = "Send the whole conversation with each request to POST /v1/chat/completions, which also takes tools."
_TRAINING: Final = "Serve a model that was trained elsewhere: see `kvloom models add`."
_MANY: Final = 'Send the requests to POST /v1/chat/completions; with service_tier: "flex" they wait behind all others.'

_APIS: Final = {
    "/v1/assistants": ("Assistants", _STATE),
    "/v1/audio": ("Audio", _CHAT),
    "/v1/batches": ("Batch", _MANY),
    "/v1/containers": ("Containers", _STATE),
    "/v1/conversations": ("Conversations", _STATE),
    "/v1/edits": ("Edits", _CHAT),
    "/v1/evals": ("Evals", _CHAT),
    "/v1/files": ("Files", _FILES),
    "/v1/fine-tunes": ("Fine-tuning", _TRAINING),
    "/v1/fine_tuning": ("Fine-tuning", _TRAINING),
    "/v1/images": ("Images", _CHAT),
    "/v1/organization": ("Administration", "Keys are administered by `kvloom keys`."),
    "/v1/realtime": ("Realtime", "Answers are streamed by POST /v1/chat/completions with stream: true."),
    "/v1/threads": ("Threads", _STATE),
    "/v1/uploads": ("Uploads", _FILES),
    "/v1/vector_stores": ("Vector stores", _FILES),
    "/v1/videos": ("Videos", _CHAT),
    "/v1/webhook_endpoints": ("Webhooks", "Ask again for what is to be waited for."),
    "/v1/webhook_event_types": ("Webhooks", "Ask again for what is to be waited for."),
}


_OWN_HISTORY: Final = "Nothing is stored here: keep the conversation, and send it with each request."
_OPERATIONS: Final = (
    (r"GET /v1/responses/[^/]+/input_items", "list the input of responses", _OWN_HISTORY),
    (r"DELETE /v1/responses/[^/]+", "delete responses", _OWN_HISTORY),
    (r"GET /v1/chat/completions", "list completions", _OWN_HISTORY),
    (r"(GET|POST|DELETE) /v1/chat/completions/[^/]+", "list, change or delete completions", _OWN_HISTORY),
    (r"GET /v1/chat/completions/[^/]+/messages", "list the messages of completions", _OWN_HISTORY),
    (r".* /v1/messages/batches(/.*)?", "process batches of messages", _MANY.replace("chat/completions", "messages")),
)
"""Operations of APIs that are served otherwise: what this server does not do, and what to do instead."""


def refuse_operation(method: str, path: str) -> None:
    """Raises KvloomError (NOT_IMPLEMENTED) for an operation that the API has elsewhere, and not here: to say that the
    method is wrong would mislead."""
    for pattern, what, instead in _OPERATIONS:
        if re.fullmatch(pattern, f"{method} {path}"):
            message = f"This server does not {what} ({method} {path[:128]}). {instead}"
            raise KvloomError(ErrorReason.ERROR_REASON_NOT_IMPLEMENTED, message)


def refuse_unserved(path: str, served: Iterable[str]) -> None:
    """Raises KvloomError (NOT_IMPLEMENTED) if the path belongs to an API that exists elsewhere, and of which no path is
    among the served ones."""
    folder = "/".join(path.split("/", 3)[:3])
    known = _APIS.get(folder)
    if known is not None and not any(one.startswith(folder) for one in served):
        name, instead = known
        raise KvloomError(
            ErrorReason.ERROR_REASON_NOT_IMPLEMENTED, f"This server does not have the {name} API ({folder}). {instead}"
        )
