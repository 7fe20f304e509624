"""What a client's link to one router is known by, over all its connections."""

from __future__ import annotations

import secrets
from typing import Final

MAX_LOST_REQUESTS: Final = 65_536
"""As many as a connection may have open."""


class LinkIdentity:
    """A name for the router to know the link by, and what the router has to hear when they meet again."""

    def __init__(self) -> None:
        self.link_id = secrets.token_hex(16)
        self._lost: dict[str, int] = {}

    def note_lost(self, request_id: str, num_tokens: int) -> None:
        """A connection broke under a request, of whose answer `num_tokens` had come over it."""
        self._lost.pop(request_id, None)
        self._lost[request_id] = num_tokens
        if len(self._lost) > MAX_LOST_REQUESTS:
            del self._lost[next(iter(self._lost))]

    @property
    def lost(self) -> dict[str, int]:
        """Tokens that came, by request: what the router has not taken note of."""
        return self._lost

    def note_told(self) -> None:
        """The router has read a hello that had all of `lost`."""
        self._lost = {}
