"""Queues what one client has sent and the router has not processed: submits, of which one long prompt is processed per
event loop turn, cancels and discards.

An edge's frame may bring several long prompts that arrived there at the same time. Processing them all in one turn
would delay the tokens of all other streams by several milliseconds.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from kvloom.errors import KvloomError
from kvloom.v1.router_service_pb2 import RouterServiceConnectRequest, Submit

LONG_PROMPT_TOKENS: Final = 1024
"""Processing a shorter prompt takes less time than a turn of the event loop."""
MAX_WAITING: Final = 1024
"""Entries beyond this number do not wait: a client must not be able to make the router hold what it sends."""


class SubmitQueue:
    """Submits, cancels and discards, processed in the order in which they arrived."""

    def __init__(
        self,
        on_submit: Callable[[Submit], None],
        on_cancel: Callable[[Sequence[int]], None],
        on_fault: Callable[[KvloomError], None],
        on_empty: Callable[[], None],
        on_discarded: Callable[[Sequence[str]], None] = lambda _: None,
    ) -> None:
        """`on_submit` and `on_cancel` may raise KvloomError. `add` raises it to its caller; when they are called on a
        later turn, `on_fault` receives it instead. `on_empty` is called when the queue has become empty on a later
        turn."""
        self._on_submit = on_submit
        self._on_cancel = on_cancel
        self._on_fault = on_fault
        self._on_empty = on_empty
        self._on_discarded = on_discarded
        self._waiting: deque[Submit | list[int] | tuple[str, ...]] = deque()
        """Submits, slots to cancel, and names of discarded answers."""
        self._num_tokens = 0
        """Prompt tokens processed since this queue's last turn. Once they reach LONG_PROMPT_TOKENS, the next turn has
        been scheduled."""
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, frame: RouterServiceConnectRequest) -> None:
        """Raises KvloomError."""
        self._waiting += frame.submits
        if frame.cancel_slots:
            self._waiting.append(frame.cancel_slots[:])
        if frame.discarded:
            self._waiting.append(tuple(frame.discarded))
        if self._num_tokens < LONG_PROMPT_TOKENS or len(self._waiting) > MAX_WAITING:
            self._process()

    def clear(self) -> None:
        self._waiting.clear()

    def _process(self) -> None:
        """Processes as much as this turn still allows; several frames may arrive in one turn."""
        waiting = self._waiting
        had_budget = self._num_tokens < LONG_PROMPT_TOKENS
        while waiting and (self._num_tokens < LONG_PROMPT_TOKENS or len(waiting) > MAX_WAITING):
            entry = waiting.popleft()
            if isinstance(entry, Submit):
                self._num_tokens += len(entry.prompt_token_ids) or len(entry.packed_prompt_token_ids) // 4
                self._on_submit(entry)
            elif isinstance(entry, tuple):
                self._on_discarded(entry)
            else:
                self._on_cancel(entry)
        if had_budget and self._num_tokens >= LONG_PROMPT_TOKENS:
            self._loop.call_soon(self._on_next_turn)

    def _on_next_turn(self) -> None:
        self._num_tokens = 0
        try:
            self._process()
        except KvloomError as error:
            self.clear()
            self._on_fault(error)
            return
        if not self._waiting:
            self._on_empty()
