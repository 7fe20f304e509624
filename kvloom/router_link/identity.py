"""The identity of a client's link to one router, over all its connections, and the losses to report to that router."""

from __future__ import annotations

import secrets
from typing import Final, TypeVar

from kvloom.v1.router_service_pb2 import LostRequest

K = TypeVar("K")

MAX_LOST_REQUESTS: Final = 65_536
"""At most so many lost requests are remembered: as many as a connection may have open."""
MAX_DELEGATED_LOSSES: Final = 16_384


class LinkIdentity:
    """The id by which the router knows the link, and the lost requests to report when they connect again."""

    def __init__(self) -> None:
        self.link_id = secrets.token_hex(16)
        self._lost: dict[tuple[str, str], int] = {}
        """By link and request: the number of tokens received over this process's own connections."""
        self.delegated_losses: dict[tuple[str, str], int] = {}
        """By link and request: the number of tokens received over links of dead processes. Sent at once, and again with
        every hello until the router has read one, because nothing acknowledges what is sent between hellos."""
        self._unsent: list[tuple[str, str]] = []
        """The delegated losses that have not been sent yet."""

    def note_delegated_loss(self, link_id: str, request_id: str, num_tokens: int) -> None:
        """Like `note_lost`, for another process's link."""
        note_bounded(self.delegated_losses, (link_id, request_id), num_tokens, MAX_DELEGATED_LOSSES)
        self._unsent.append((link_id, request_id))
        del self._unsent[:-MAX_DELEGATED_LOSSES]

    def take_unsent(self) -> list[LostRequest]:
        """The losses to send with a frame that is about to be written."""
        if not self._unsent:
            return []
        unsent, self._unsent = self._unsent, []
        return [self._delegated_loss(key) for key in dict.fromkeys(unsent) if key in self.delegated_losses]

    def all_losses(self) -> list[LostRequest]:
        """The losses to send with a hello: all of them."""
        self._unsent = []
        own = [
            LostRequest(request_id=name, num_received_tokens=count, link_id="" if link_id == self.link_id else link_id)
            for (link_id, name), count in self._lost.items()
        ]
        return own + [self._delegated_loss(key) for key in self.delegated_losses]

    def _delegated_loss(self, key: tuple[str, str]) -> LostRequest:
        link_id, request_id = key
        return LostRequest(link_id=link_id, request_id=request_id, num_received_tokens=self.delegated_losses[key])

    def note_lost(self, request_id: str, num_tokens: int) -> None:
        """A connection broke while it had a request, after `num_tokens` tokens of its answer."""
        note_bounded(self._lost, (self.link_id, request_id), num_tokens, MAX_LOST_REQUESTS)

    def renew(self) -> None:
        """Take a new link id. The next connection may reach another router before the last one has received the losses.
        If the last one gets the same requests again, over a later connection, they must count as different ones."""
        self.link_id = secrets.token_hex(16)

    def note_hello_read(self) -> None:
        """The router has read a hello with all losses up to then."""
        self._lost = {}
        self.delegated_losses = {
            key: self.delegated_losses[key] for key in self._unsent if key in self.delegated_losses
        }


def note_bounded(counts: dict[K, int], key: K, count: int, max_entries: int) -> None:
    """Set an entry and make it the newest one. Beyond `max_entries` the oldest is dropped."""
    counts.pop(key, None)
    counts[key] = count
    if len(counts) > max_entries:
        del counts[next(iter(counts))]
