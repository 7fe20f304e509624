"""What a response that can be resumed is found by."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class ResponseName:
    """Only who asked for a response finds it."""

    id: str
    caller: bytes
    idempotency_key: str = ""
    """Given by the client, so that it can name the response before it has heard of it; "" without."""
    body_digest: str = ""
    """Of the request's body: the same key with another body is another request."""
