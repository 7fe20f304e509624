"""APIs of OpenAI, and of servers like it, that kvloom does not serve. Their paths are refused by name, so that a user
does not take the refusal for a wrong URL."""

from __future__ import annotations

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
}


def refuse_unserved(path: str) -> None:
    """Raises KvloomError (NOT_IMPLEMENTED) if the path belongs to an API that exists elsewhere, and not here."""
    folder = "/".join(path.split("/", 3)[:3])
    known = _APIS.get(folder)
    if known is not None:
        name, instead = known
        raise KvloomError(
            ErrorReason.ERROR_REASON_NOT_IMPLEMENTED, f"This server does not have the {name} API ({folder}). {instead}"
        )
