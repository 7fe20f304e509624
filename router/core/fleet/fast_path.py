"""Sequences whose tokens are forwarded without further checks, and the bookkeeping that is deferred for them.

Most tokens change nothing: no output of their sequence is withheld, all its text so far is clear, and the new text is
too. Such a token needs one look-up, its slot on the client's stream (two, where a shard works for several clients). The
failover buffer and the amount of cleared text are written for many frames at a time: on a processor that has done other
things since the last frame, the cost of a token is how much different memory it touches.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvloom.router_link.deferred_token_log import DeferredTokenLog
from router.core.events import TextFilter
from router.core.live import Choice, StreamClient


class FastPath:
    """Sequences of one shard that are cleared by one filter and whose tokens are forwarded without further checks. All
    other sequences are relayed one by one."""

    __slots__ = ("_choices", "_log", "cleared_by", "client_slots", "clients", "only_client")

    def __init__(self, choices: dict[int, Choice]) -> None:
        """`choices` are the shard's, by its slots."""
        self._choices = choices
        self.client_slots: dict[int, int] = {}
        """Shard slot → client slot."""
        self.clients: dict[int, StreamClient] = {}
        """Shard slot → client."""
        self.only_client: StreamClient | None = None
        """The client of all these sequences; None: they have several clients, or there are none."""
        self.cleared_by: TextFilter | None = None
        """The filter that clears their text; None: they are not screened."""
        self._log = DeferredTokenLog()
        """Tokens that the choices have not recorded yet."""

    def join(self, choice: Choice, cleared_by: TextFilter | None) -> None:
        """Add a choice. None of its output is withheld, its start was sent, and text that this filter clears is sent at
        once."""
        if not self.client_slots:
            self.only_client, self.cleared_by = choice.client, cleared_by
        if self.cleared_by is cleared_by:
            self.client_slots[choice.shard_slot] = choice.client_slot
            self.clients[choice.shard_slot] = choice.client
            if self.only_client is not choice.client:
                self.only_client = None

    def note(self, slots: list[int], token_ids: Sequence[int], deltas: Sequence[str]) -> None:
        """Record tokens of these sequences that were forwarded. Takes ownership of the arrays."""
        if self._log.is_full:
            self.write_back()
        self._log.note(slots, token_ids, deltas)

    def leave(self, slot: int) -> None:
        """Remove a choice that is to be examined or changed. Repeatable."""
        if self.client_slots.pop(slot, None) is not None:
            del self.clients[slot]
            if self.only_client is None:
                clients = set(self.clients.values())
                self.only_client = clients.pop() if len(clients) == 1 else None
            self._choices[slot].record_forwarded(*self._log.take(slot))

    def end(self) -> None:
        """Remove all choices."""
        self.write_back()
        self.client_slots.clear()
        self.clients.clear()
        self.only_client = None

    def write_back(self) -> None:
        """Write the deferred tokens to the choices."""
        for slot, token_ids, text in self._log.take_all():
            self._choices[slot].record_forwarded(token_ids, text)

    def check_integrity(self) -> None:
        """Assert that every choice here may be on the fast path."""
        assert self.clients.keys() == self.client_slots.keys()
        clients = set(self.clients.values())
        assert not clients or clients == {self.only_client} or (len(clients) > 1 and self.only_client is None)
        for slot, client_slot in self.client_slots.items():
            choice = self._choices[slot]
            assert choice.client is self.clients[slot]
            assert choice.client_slot == client_slot
            assert not choice.request.prompt_verdict_open
            assert choice.is_screened == (self.cleared_by is not None)
            withheld = choice.withheld
            if self.cleared_by is None:
                assert withheld is None
            else:
                assert withheld is not None
                assert not withheld.entries
                assert withheld.start is None
                assert withheld.num_clear_chars == choice.num_chars
                assert choice.screening_slot is None or choice.prefilter is self.cleared_by
