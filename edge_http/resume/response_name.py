"""ResponseName identifies a response that can be resumed: its id, which names the edge that began it, and its
caller."""

from __future__ import annotations

import dataclasses
import secrets
from typing import Final

TAG_CHARS: Final = 8


@dataclasses.dataclass(frozen=True, slots=True)
class ResponseName:
    """Only the caller that asked for a response can find it."""

    id: str
    caller: bytes
    """The digest of its credential. It is the same for all requests without one: for these the id is the secret."""
    tenant: str = ""
    """The name of its caller (kvloom_common/callers.py), to whom the idempotency key belongs."""
    idempotency_key: str = ""
    """Chosen by the client, so that it can name the response before it knows the id; "" if it chose none."""
    body_digest: str = ""
    """Digest of the request's body: the same key with a different body names a different request."""


def new_edge_tag() -> str:
    """Random: no two edges of a fabric have the same tag."""
    return secrets.token_hex(TAG_CHARS // 2)


def new_response_id(prefix: str, edge_tag: str) -> str:
    """`prefix` is e.g. "chatcmpl-", "resp_" or "msg_". The id cannot be guessed."""
    return f"{prefix}{edge_tag}{secrets.token_hex(8)}"


def edge_tag_of(response_id: str) -> str:
    """The tag of the edge that made the id; "" if no edge made it."""
    tag = response_id.replace("_", "-").rpartition("-")[2][:TAG_CHARS]
    return tag if len(tag) == TAG_CHARS and tag.isascii() and tag.isalnum() else ""
