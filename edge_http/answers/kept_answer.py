"""A streamed answer that is stored before its last event is sent: whoever has that event can find the response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from edge_http.answers.streamed_answer import StreamedAnswer
from kvloom.errors import KvloomError


class _LastEvent(msgspec.Struct):
    response: msgspec.Raw


class KeptAnswer(StreamedAnswer):
    """Holds its last event back until `release`."""

    __slots__ = ("_held",)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._held: Sequence[bytes] = ()

    def response_json(self) -> bytes:
        """The response as the event has it that was held back."""
        data = self._held[-1].partition(b"\ndata: ")[2]
        return bytes(msgspec.json.decode(data, type=_LastEvent).response)

    def release(self, error: KvloomError | None = None) -> None:
        """Send the last event, or that of the error that kept the response from being stored."""
        self._send_all(self._held if error is None else (self._formatter.error(error),))
        self._held = ()
        self._events.end()

    def _complete(self) -> None:
        self._held = self._formatter.ending(self.usage, self._final_details())
