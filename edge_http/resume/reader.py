"""A connection that reads a response which outlives it."""

from __future__ import annotations

import asyncio
from typing import Final

from edge_http.openai.response_formatters import encode_json
from edge_http.wire.sse import EventStream
from kvloom.errors import KvloomError

LINGER_SECONDS: Final = 5.0
"""How long a connection that was broken off may take for what is written."""


class Reader:
    """One of them; a response has one at a time."""

    __slots__ = ("error", "events", "num_replayed", "over")

    def __init__(self, events: EventStream) -> None:
        self.events = events
        self.error: KvloomError | None = None
        """Why it was broken off."""
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when nothing more will be written to it."""
        self.num_replayed = 0

    def finish(self) -> None:
        if not self.over.done():
            self.over.set_result(None)

    def break_off(self, error: KvloomError) -> None:
        """End it before its time. What it missed is still in the log."""
        if self.over.done():
            return
        self.error = error
        if self.events.begun:
            self.events.break_off(encode_json(error.to_openai()), LINGER_SECONDS)
        self.finish()
