"""Sequences whose tokens go straight on, and what is kept of them for later.

Most tokens change nothing: no news of their sequence is held, all its text so far is clear, and this text is too. For
such a sequence a token's way needs one look-up, its slot on its client's stream (two, where a shard works for several
clients). The failover buffer, and how much text was cleared, are written many frames at a time: what counts on a
processor that has done other things since the last frame is how much different memory a token touches.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvloom.router_link.deferred_token_log import DeferredTokenLog
from router.core.events import TextFilter
from router.core.live import Choice, Client


class FastPath:
    """Of one shard, those that are cleared by one filter; all others are relayed one by one."""

    __slots__ = ("_books", "_choices", "cleared_by", "client_slots", "clients", "only_client")

    def __init__(self, choices: dict[int, Choice]) -> None:
        """`choices`: the shard's, by its slots."""
        self._choices = choices
        self.client_slots: dict[int, int] = {}
        """Shard slot → the client's."""
        self.clients: dict[int, Client] = {}
        """Shard slot → whose it is."""
        self.only_client: Client | None = None
        """Of them all; None: they are of several, or there are none."""
        self.cleared_by: TextFilter | None = None
        """None: they are not screened."""
        self._books = DeferredTokenLog()
        """What the choices have not been told of."""

    def join(self, choice: Choice, cleared_by: TextFilter | None) -> None:
        """Nothing of it is held, its start was sent, and whatever this filter clears goes on at once."""
        if not self.client_slots:
            self.only_client, self.cleared_by = choice.client, cleared_by
        if self.cleared_by is cleared_by:
            self.client_slots[choice.shard_slot] = choice.client_slot
            self.clients[choice.shard_slot] = choice.client
            if self.only_client is not choice.client:
                self.only_client = None

    def note(self, slots: list[int], token_ids: Sequence[int], deltas: Sequence[str]) -> None:
        """Tokens of these sequences go on. Takes the arrays over: they may grow until the next frame, no more."""
        if self._books.is_full:
            self.book()
        self._books.note(slots, token_ids, deltas)

    def leave(self, slot: int) -> None:
        """Its choice is to be looked at, or changed. Repeatable."""
        if self.client_slots.pop(slot, None) is not None:
            del self.clients[slot]
            if self.only_client is None:
                clients = set(self.clients.values())
                self.only_client = clients.pop() if len(clients) == 1 else None
            _book(self._choices[slot], *self._books.take(slot))

    def end(self) -> None:
        """All leave."""
        self.book()
        self.client_slots.clear()
        self.clients.clear()
        self.only_client = None

    def book(self) -> None:
        """Bring the choices up to date."""
        for slot, token_ids, text in self._books.take_all():
            _book(self._choices[slot], token_ids, text)

    def check_integrity(self) -> None:
        """Assert that what fast_path may flow."""
        assert self.clients.keys() == self.client_slots.keys()
        clients = set(self.clients.values())
        assert not clients or clients == {self.only_client} or (len(clients) > 1 and self.only_client is None)
        for slot, client_slot in self.client_slots.items():
            choice = self._choices[slot]
            assert choice.client is self.clients[slot]
            assert choice.client_slot == client_slot
            assert not choice.request.prompt_verdict_open
            assert choice.is_screened == (self.cleared_by is not None)
            hold = choice.hold
            if self.cleared_by is None:
                assert hold is None
            else:
                assert hold is not None
                assert not hold.entries
                assert hold.start is None
                assert hold.num_clear_chars == choice.num_chars
                assert choice.screening_slot is None or choice.prefilter is self.cleared_by


def _book(choice: Choice, token_ids: Sequence[int], text: str) -> None:
    choice.output_token_ids.extend(token_ids)
    if text:
        choice.num_chars += len(text)
        hold = choice.hold
        if hold is not None:
            hold.num_clear_chars = choice.num_chars
            hold.last_shown_char = choice.last_skipped_char = text[-1]
            choice.num_skipped_chars += len(text)
