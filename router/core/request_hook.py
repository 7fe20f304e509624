"""Where a rule that is off by default meets requests, so that their common way does not name it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvloom.errors import KvloomError
from router.core.events import Request
from router.core.live import LiveRequest


class RequestHook(Protocol):
    """Sees requests when they arrive, and whether they have a first token in time. None stands for no rule."""

    def admit(self, request: Request, predicted_wait_seconds: Callable[[], float], now: float) -> Request | KvloomError:
        """Returns the request as it is to be served, or why it is not."""
        ...

    def note_first_token(self, live: LiveRequest, now: float) -> None:
        """Called before the request's client is sent its first token, which was computed for it."""
        ...

    def note_end_without_token(self, live: LiveRequest, now: float) -> None:
        """Called when a request has ended, or was refused, before it had a token."""
        ...
