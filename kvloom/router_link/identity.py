"""What a client's link to one router is known by, over all its connections."""

from __future__ import annotations

import secrets
from typing import Final, TypeVar

from kvloom.v1.router_service_pb2 import LostRequest

K = TypeVar("K")

MAX_LOST_REQUESTS: Final = 65_536
"""As many as a connection may have open."""
MAX_SPOKEN_FOR: Final = 16_384


class LinkIdentity:
    """A name for the router to know the link by, and what the router has to hear when they meet again."""

    def __init__(self) -> None:
        self.link_id = secrets.token_hex(16)
        self._lost: dict[tuple[str, str], int] = {}
        """Tokens that came over own connections, by link and request."""
        self.delegated_losses: dict[tuple[str, str], int] = {}
        """Tokens that came over links of dead processes, by link and request. Said when it happens, and again until the
        router has read a hello with them: nothing acknowledges what was said in between."""
        self._unsaid: list[tuple[str, str]] = []
        """Those that no frame has had yet."""

    def note_lost_by(self, link_id: str, request_id: str, num_tokens: int) -> None:
        """As `note_lost`, of another process's link."""
        note_bounded(self.delegated_losses, (link_id, request_id), num_tokens, MAX_SPOKEN_FOR)
        self._unsaid.append((link_id, request_id))
        del self._unsaid[:-MAX_SPOKEN_FOR]

    def take_unsaid(self) -> list[LostRequest]:
        """For a frame that is about to be written."""
        if not self._unsaid:
            return []
        unsaid, self._unsaid = self._unsaid, []
        return [self._spoken(key) for key in dict.fromkeys(unsaid) if key in self.delegated_losses]

    def all_losses(self) -> list[LostRequest]:
        """For a hello."""
        self._unsaid = []
        own = [
            LostRequest(request_id=name, num_received_tokens=count, link_id="" if link_id == self.link_id else link_id)
            for (link_id, name), count in self._lost.items()
        ]
        return own + [self._spoken(key) for key in self.delegated_losses]

    def _spoken(self, key: tuple[str, str]) -> LostRequest:
        link_id, request_id = key
        return LostRequest(link_id=link_id, request_id=request_id, num_received_tokens=self.delegated_losses[key])

    def note_lost(self, request_id: str, num_tokens: int) -> None:
        """A connection broke under a request, of whose answer `num_tokens` had come over it."""
        note_bounded(self._lost, (self.link_id, request_id), num_tokens, MAX_LOST_REQUESTS)

    def renew(self) -> None:
        """The next connection may go to another router while the last one's has yet to hear of what was lost. If that
        one gets the same requests again, over a later connection, these are others."""
        self.link_id = secrets.token_hex(16)

    def note_told(self) -> None:
        """The router has read a hello that had all of `lost` and `delegated_losses`."""
        self._lost = {}
        self.delegated_losses = {
            key: self.delegated_losses[key] for key in self._unsaid if key in self.delegated_losses
        }


def note_bounded(counts: dict[K, int], key: K, count: int, max_entries: int) -> None:
    """As the latest; beyond that many the oldest is forgotten."""
    counts.pop(key, None)
    counts[key] = count
    if len(counts) > max_entries:
        del counts[next(iter(counts))]
